"""Several memories as one, parts of one as another, and what two have in common: by their pages, which stay as they are, bit for bit.

A memory file holds no text, so nothing here can write: a page that comes from another memory is that page. `graven.several` writes.

Source: ours; tests/test_several.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest

import torch

from graven.errors import MismatchError, Outcome, SpecError, TextError
from graven.memory.file import VERSION, About, Memory

# from the worst to the best: what a memory of several pages ended as
OUTCOMES = (Outcome.IMPORTED, Outcome.DIVERGED, Outcome.DEADLINE, Outcome.LATE, Outcome.STEPS, Outcome.DONE, Outcome.CLOSE, Outcome.EXACT)


def ensure_one_model(one: Memory, other: Memory) -> None:
    """Pass where two memories were written with the same model.

    Raises:
        MismatchError: They were not; the sentence names both.
    """
    a, b = one.about.base, other.about.base
    if a.fingerprint != b.fingerprint:
        raise MismatchError(
            f"the first memory was written with {a.name} (fingerprint {a.fingerprint[:12]}) and the second with {b.name} (fingerprint "
            f"{b.fingerprint[:12]}); vectors of one model mean nothing to another. Write one of the two texts anew with the other model."
        )


def join(one: Memory, other: Memory) -> Memory:
    """The pages of two memories in one. Each page keeps its bits, so what it recites and which of the records it answers stay as they were.

    What the file says of both together: the losses are their mean, a page counting like another; the outcome is the worse one; seconds add up. What
    was measured on a whole text (`fidelity`, `agreement`) is left out, and so is the quantization of a state that was not written as one.

    Raises:
        MismatchError: They are of different models.
        SpecError: They were written in different ways: other numbers of slots, objectives, or places in a chat.
        TextError: Both have a record of the same key.
    """
    ensure_one_model(one, other)
    a, b = one.about, other.about
    for name in ("kind", "slots", "objective", "chat", "before"):
        if getattr(a, name) != getattr(b, name):
            raise SpecError(
                f"`{name}` is {getattr(a, name)!r} of the first memory and {getattr(b, name)!r} of the second, and all pages of a memory are read "
                "in one way; write one of the two texts anew as the other was written."
            )
    twice = {key for page in a.pages for key in page.keys} & {key for page in b.pages for key in page.keys}
    if twice:
        raise TextError(f"{len(twice)} of the keys are in both memories, and a key has one value; write the records anew without them.")
    curve = tuple(_mean(a.losses, len(a.pages), b.losses, len(b.pages)))
    about = replace(
        a,
        version=VERSION,
        pages=a.pages + b.pages,
        rule=a.rule if a.rule == b.rule else f"{a.rule}; {b.rule}",
        steps=len(curve),
        losses=curve,
        token_accuracy=(a.token_accuracy * a.tokens + b.token_accuracy * b.tokens) / max(1, a.tokens + b.tokens),
        outcome=min((a.outcome, b.outcome), key=lambda name: OUTCOMES.index(Outcome[name])),
        lossless=a.lossless and b.lossless,
        records=None if a.records is None or b.records is None else a.records + b.records,
        answered=None if a.answered is None or b.answered is None else a.answered + b.answered,
        seconds=a.seconds + b.seconds,
        versions=tuple(dict.fromkeys(a.versions + b.versions)),
        agreement=None,
        fidelity=None,
        quantization=None,
    )
    return Memory(torch.cat([one.state, other.state]), about)


def _mean(one: Sequence[float], pages: int, other: Sequence[float], more: int) -> list[float]:
    """One curve of two; a write that was done keeps its last loss."""
    if not one or not other:
        return list(one or other)
    pairs = list(zip_longest(one, other))
    return [((one[-1] if a is None else a) * pages + (other[-1] if b is None else b) * more) / (pages + more) for a, b in pairs]


def fork(memory: Memory, pages: Sequence[int] | None = None) -> Memory:
    """A memory of some pages of another, in the order given; all of it, bit for bit, where left out.

    Args:
        memory: Left as it is.
        pages: Counted from 0.
    Raises:
        SpecError: There is no such page, one is named twice, or none is; or it is a part of a memory of records, whose right answers were not
            counted page by page.
    """
    if pages is None:
        return memory
    about, count = memory.about, len(memory.about.pages)
    if not pages or len(set(pages)) != len(pages) or not all(0 <= page < count for page in pages):
        raise SpecError(f"pages {', '.join(str(page + 1) for page in pages) or 'none'} were asked for; name some of 1 to {count}, each once.")
    kept = tuple(about.pages[page] for page in pages)
    if list(pages) == list(range(count)):
        return memory
    if about.kind == "records" and about.answered != about.records:
        raise SpecError(
            f"{about.answered} of {about.records} records are answered and the file does not say on which pages; fork the whole memory, or "
            "write those records anew."
        )
    tokens, right = sum(page.tokens for page in kept), sum(page.recited for page in kept)
    exact = right == tokens > 0  # nothing is known of what was imported
    records = None if about.records is None else sum(len(page.keys) for page in kept)
    return Memory(
        memory.state[list(pages)].clone(),
        replace(
            about,
            pages=kept,
            token_accuracy=1.0 if exact else about.token_accuracy,
            outcome=Outcome.EXACT.name if exact and about.kind == "text" else about.outcome,
            records=records,
            answered=records,
            agreement=None,
            fidelity=None,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A page of one memory and a page of the other that were written with the same tokens.

    Args:
        one, other: The pages, counted from 0.
        distance: Norm of the difference of their vectors, as a share of the norm of the first's; 0 where they are the same bits.
    """

    one: int
    other: int
    distance: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What two memories of one model have in common.

    Args:
        same: Pages of the same text.
        only_one, only_other: Pages whose text the other memory has not.
        fields: What their files say differently of the write, with both values.
    """

    same: tuple[Pair, ...]
    only_one: tuple[int, ...]
    only_other: tuple[int, ...]
    fields: dict[str, tuple[object, object]]

    @property
    def none(self) -> bool:
        """Whether they hold the same pages, in the same bits and the same order."""
        return not self.only_one and not self.only_other and all(pair.distance == 0.0 and pair.one == pair.other for pair in self.same)


def difference(one: Memory, other: Memory) -> Difference:
    """Two memories, page by page.

    Raises:
        MismatchError: They are of different models.
    """
    ensure_one_model(one, other)
    left = list(enumerate(other.about.pages))
    same, only = list[Pair](), list[int]()
    for at, page in enumerate(one.about.pages):
        twin = next((i for i, (_, held) in enumerate(left) if (held.text_hash, held.tokens) == (page.text_hash, page.tokens)), None)
        if twin is None:
            only.append(at)
            continue
        there = left.pop(twin)[0]
        same.append(Pair(one=at, other=there, distance=_distance(one.state[at], other.state[there])))
    said = {field.name: (getattr(one.about, field.name), getattr(other.about, field.name)) for field in fields(About)}
    # page by page above, a consequence of the rest, or of the machine
    for name in ("pages", "base", "losses", "agreement", "fidelity", "version", "versions", "seconds"):
        del said[name]
    return Difference(
        same=tuple(same),
        only_one=tuple(only),
        only_other=tuple(at for at, _ in left),
        fields={name: (a, b) for name, (a, b) in said.items() if a != b},
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Infinite where they cannot be compared."""
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).norm() / one.double().norm().clamp(min=torch.finfo(torch.float64).tiny))
