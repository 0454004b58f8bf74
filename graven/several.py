"""A text more in a memory, two memories in one: and what that did to what each text is recited and answered like.

There are two honest ways, and both are measured. A *page* more leaves the old vectors as they are, bit for bit: nothing is lost of what a page
recites, the memory grows by a page, and a query meets one page more whose answer may be taken for the right one. The *vectors* that there are can
take a text on by further descent: the memory stays as large as it was. Descent on the new text alone forgets the old one (docs/log.md), so it is on
both: on what the memory recites of the old text, which must be that text exactly, and the new one behind it.

A memory of records is not descended further: its model was trained to write from its own start. Its keys are known by their hashes and its values
by asking, so `vectors` writes old and new records together, in as few pages as they take.

Source: ours; tests/test_several.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graven.answer import encode
from graven.engrave import engrave, hits_of
from graven.errors import SpecError, TextError
from graven.fidelity import QUESTION
from graven.memory.file import Memory, text_hash
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.several import ensure_one_model, fork, join
from graven.models.base import ProgressCall, check_numbers, memory_of, recited_pages
from graven.models.records import RecordsModel
from graven.models.text import TEXT_RATE, TEXT_STEPS, TextModel
from graven.models.triples import TriplesModel
from graven.quantize import held_keys
from graven.study import CHAT, self_study
from graven.tasks.base import Tokens
from graven.tasks.world import WorldTask

PROBES = 4  # questions about each text

Into = Literal["page", "vectors"]
Rows = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is left of one text.

    Args:
        name: Which text.
        tokens: Its length.
        recited: Its tokens that are reproduced exactly, each page up to its first miss, before and after; none of records, or where there was no
            memory of it before.
        token_accuracy: Teacher-forced, before and after.
        queries: Questions that the model asked itself about it, or keys of records.
        same_answers: Share of them that are answered as before; none where nothing was asked.
        answered: Records whose value comes back, before and after; none where the values are not known.
    """

    name: str
    tokens: int
    recited: tuple[int | None, int] | None = None
    token_accuracy: tuple[float | None, float] | None = None
    queries: int = 0
    same_answers: float | None = None
    answered: tuple[int, int] | None = None

    @property
    def lost(self) -> bool:
        """Whether tokens or records came back before that do not now."""
        return any(pair is not None and pair[0] is not None and pair[1] < pair[0] for pair in (self.recited, self.answered))


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A memory of two texts, and what is left of each."""

    memory: Memory
    kept: tuple[Kept, Kept]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the write that adds a text; those of `write` of the model where left out. `probes` are questions about each text."""

    steps: int | None = None
    rate: float | None = None
    seed: int = 0
    deadline: float | None = None
    probes: int = PROBES
    progress: ProgressCall | None = None


def append(model: TextModel | RecordsModel, memory: Memory, text: str, *, into: Into = "page", settings: Settings = Settings()) -> Changed:
    """A memory that holds one text more.

    Args:
        model: The one that wrote the memory.
        memory: Left as it is.
        text: As for `write` of the model.
        into: "page" or "vectors", see above.
        settings: Of the write.
    Raises:
        MismatchError: The memory was written with another model.
        TextError: The text cannot be written, or a key of its records is in the memory.
        SpecError: The memory stands in for a prompt; or it does not hold its old text exactly, and "vectors" has nothing to descend on.
    """
    memory.belongs_to(model.memory.model if isinstance(model, RecordsModel) else model.model)
    _ensure_joinable(model)
    _ensure_growable(memory)
    if isinstance(model, RecordsModel):
        alone = _records_written(model, text, settings)
        return _merged_records(model, memory, alone, into=into, settings=settings, names=("old", "new"), wanted=dict(model.task.parse(text)))
    if into == "page":
        writer, about = TextModel(model.model, slots=memory.about.slots), memory.about
        alone = writer.write(
            text, steps=settings.steps, rate=settings.rate, seed=settings.seed, deadline=settings.deadline, progress=settings.progress,
            objective=about.objective, chat=about.chat, probes=0,
        )  # fmt: skip
        return _joined_texts(model, memory, alone, settings, names=("old", "new"))
    ids = encode(model.model, text, what="the text")
    if not ids:
        raise TextError("the text is empty, or the tokenizer makes nothing of it; give at least one token.")
    return _taken_on(model, memory, ids, None, settings, names=("old", "new"), lossless=model.model.decode(ids) == text)


def merge(
    model: TextModel | RecordsModel,
    one: Memory,
    other: Memory,
    *,
    into: Into = "page",
    settings: Settings = Settings(),
    names: tuple[str, str] = ("first", "second"),
) -> Changed:
    """A memory that holds the texts of two. With "page" nothing is written; with "vectors" those of the first take on what the second recites.

    Raises:
        MismatchError: One of them was written with another model.
        TextError: Both have a record of the same key.
        SpecError: They were written in different ways, or one does not hold its text exactly and "vectors" has nothing to descend on.
    """
    ensure_one_model(one, other)
    one.belongs_to(model.memory.model if isinstance(model, RecordsModel) else model.model)
    _ensure_joinable(model)
    if isinstance(model, RecordsModel):
        return _merged_records(model, one, other, into=into, settings=settings, names=names)
    if into == "page":
        return _joined_texts(model, one, other, settings, names=names)
    _ensure_growable(one)
    _ensure_growable(other)
    rows = exact_rows(model, other, which="the second memory")
    return _taken_on(model, one, [token for row in rows for token in row], other, settings, names=names, lossless=other.about.lossless)


def _ensure_joinable(model: TextModel | RecordsModel | TriplesModel) -> None:
    if isinstance(model, TriplesModel):
        raise SpecError(f"{model.name} was trained to write a text from its own start, and a page beside it is another text; write both texts anew.")
    if isinstance(model, RecordsModel) and isinstance(model.task, WorldTask):
        raise SpecError("a story is one page, for what comes later changes what came before; write it anew with the new sentences in their place.")


def _ensure_growable(memory: Memory) -> None:
    if "distill" in memory.about.objective:
        raise SpecError("this memory stands in for a prompt, of which there is no half; distil the longer prompt anew.")


# Texts


def exact_rows(model: TextModel, memory: Memory, *, which: str = "the memory") -> Rows:
    """Tokens of the text, by reciting it.

    Raises:
        SpecError: It is not recited exactly.
    """
    rows = recited_pages(gradmem_of(model, memory), memory)[0]
    wrong = [at for at, page in enumerate(memory.about.pages) if text_hash(rows[at]) != page.text_hash]
    if wrong:
        page = memory.about.pages[wrong[0]]
        raise SpecError(
            f"{which} recites {page.recited} of the {page.tokens} tokens of page {wrong[0] + 1}, so what further descent would hold it to is "
            "not its text; add the text as a page, or write both texts anew."
        )
    return rows


def gradmem_of(model: TextModel, memory: Memory) -> GradMem:
    """What reads a memory of a text."""
    return GradMem(model.model, GradMemSpec(slots=memory.about.slots, steps=0, rule=Adam(), order="none"), before=memory.about.before)


def _joined_texts(model: TextModel, one: Memory, other: Memory, settings: Settings, *, names: tuple[str, str]) -> Changed:
    both = join(one, other)
    first, second = (_page_kept(model, memory, both, name=name, settings=settings) for memory, name in zip((one, other), names, strict=True))
    return Changed(memory=both, kept=(first, second))


def _page_kept(model: TextModel, before: Memory, after: Memory, *, name: str, settings: Settings) -> Kept:
    """Of pages that stay as they were, bit for bit, what the file says of reciting them stays true; only an answer may come from another page."""
    recited = sum(page.recited for page in before.about.pages)
    told = [token for row in recited_pages(gradmem_of(model, before), before)[0] for token in row] if settings.probes else []
    queries, same = same_answers(model, before, after, told, settings)
    return Kept(
        name=name,
        tokens=before.about.tokens,
        recited=(recited, recited),
        token_accuracy=(before.about.token_accuracy, before.about.token_accuracy),
        queries=queries,
        same_answers=same,
    )


def _taken_on(
    model: TextModel, memory: Memory, ids: list[int], alone: Memory | None, settings: Settings, *, names: tuple[str, str], lossless: bool
) -> Changed:
    """The last page descends further, on its text and the new one behind it; all other pages stay."""
    about, last = memory.about, len(memory.about.pages) - 1
    if about.objective != "reconstruct":
        raise SpecError(f"this memory descended {about.objective!r}, which ends at no text that could be descended on; add the text as a page.")
    steps, rate = TEXT_STEPS if settings.steps is None else settings.steps, TEXT_RATE if settings.rate is None else settings.rate
    check_numbers(steps=steps, seed=settings.seed, deadline=settings.deadline)
    old = exact_rows(model, memory)
    whole = [*old[last], *ids]
    rule = Adam(rate=rate * model.model.embedding_scale)
    gradmem = GradMem(model.model, GradMemSpec(slots=about.slots, steps=steps, rule=rule, order="none"), before=about.before)
    gradmem.initial.data.copy_(memory.state[last])  # where the page stands is where it goes on from
    context = Tokens.of([whole])
    done = engrave(gradmem, context, steps=steps, until_exact=True, deadline=settings.deadline, progress=settings.progress)
    page = memory_of(
        done, context, model=model.model, kind="text", rule=repr(rule), seed=settings.seed, lossless=lossless and about.lossless,
        chat=about.chat, before=about.before,
    )  # fmt: skip
    after = join(fork(memory, range(last)), page) if last else page
    pages = [*old[:last], whole]
    first = _text_kept(model, memory, after, old, pages, at=[(at, 0) for at in range(last + 1)], name=names[0], settings=settings)
    second = _text_kept(model, alone, after, [ids], pages, at=[(last, len(old[last]))], name=names[1], settings=settings)
    return Changed(memory=after, kept=(first, second))


def _text_kept(
    model: TextModel, before: Memory | None, after: Memory, rows: Rows, whole: Rows, *, at: list[tuple[int, int]], name: str, settings: Settings
) -> Kept:
    """What is left of one text.

    Args:
        model: Reads.
        before: The memory of this text alone, if there is one, which recites it exactly.
        after: The memory of both.
        rows: Tokens of the text, page by page.
        whole: Tokens of every page of `after`.
        at: Page of `after` for each row, and where in it the row begins.
        name: Of the text.
        settings: `probes` and `seed` are asked with.
    """
    tokens = sum(map(len, rows))
    held = [hits_of(gradmem_of(model, after), after.state[page : page + 1], whole[page]) for page, _ in at]
    new = [(recited(hits, first, len(row)), sum(hits[first : first + len(row)])) for hits, (_, first), row in zip(held, at, rows, strict=True)]
    queries, same = (0, None) if before is None else same_answers(model, before, after, [t for row in rows for t in row], settings)
    return Kept(
        name=name,
        tokens=tokens,
        recited=(None if before is None else tokens, sum(n for n, _ in new)),
        token_accuracy=(None if before is None else 1.0, sum(n for _, n in new) / tokens),
        queries=queries,
        same_answers=same,
    )


def recited(hits: Sequence[bool], first: int, length: int) -> int:
    """Tokens of a part of a page that come before the first miss of the whole page.

    >>> recited([True, True, True, False, True], 2, 3)
    1
    """
    miss = next((at for at, hit in enumerate(hits) if not hit), len(hits))
    return min(max(miss - first, 0), length)


def same_answers(model: TextModel, before: Memory, after: Memory, text: Sequence[int], settings: Settings) -> tuple[int, float | None]:
    """How many questions the model asked itself about a text, and the share of them that two memories answer alike."""
    if settings.probes < 1 or not text:
        return 0, None
    chat = after.about.chat
    try:
        asked = self_study(model.model, text, count=settings.probes, prompts=CHAT[:1] if chat else QUESTION, seed=settings.seed, chat=chat)
        old, new = (model.ask_many(memory, asked) for memory in (before, after))
    except TextError:  # text and question do not fit into the model together
        return 0, None
    return len(asked), sum(a.text == b.text for a, b in zip(old, new, strict=True)) / len(asked) if asked else None


# Records


def _records_written(model: RecordsModel, text: str, settings: Settings) -> Memory:
    return model.write(text, steps=settings.steps, rate=settings.rate, seed=settings.seed, deadline=settings.deadline, progress=settings.progress)


def values_of(model: RecordsModel, memory: Memory) -> dict[str, str]:
    """What each key of a memory of records is answered with; the keys are found by their hashes."""
    keys = [key for page in held_keys(model, memory) for key in page]
    return {answer.query: answer.text for answer in model.ask_many(memory, keys)}


def told(model: TextModel | RecordsModel | TriplesModel, memory: Memory) -> str:
    """What a memory says when nobody asks: the recital of its pages, or each key with what it is answered with, in order of the keys."""
    if not isinstance(model, RecordsModel):
        return model.recite(memory).text
    try:
        return "\n".join(f"{key}:{value}" for key, value in sorted(values_of(model, memory).items()))
    except SpecError as error:
        raise SpecError(f"{model.name} has too many possible keys to find those of a memory; compare the vectors alone with --vectors.") from error


def _merged_records(
    model: RecordsModel,
    one: Memory,
    other: Memory,
    *,
    into: Into,
    settings: Settings,
    names: tuple[str, str],
    wanted: dict[str, str] | None = None,
) -> Changed:
    """Two memories of records in one; `wanted` are the true values of the second, where they are known."""
    both = join(one, other)  # refused before anything else is done
    values = [_said(model, one), _said(model, other, wanted)]
    true: list[dict[str, str] | None] = [None, wanted]
    if into == "vectors":
        both = _records_written(model, _lines(model, (one, other), values), settings)  # which has seen that all were answered right
        true = [*values]
    kept = []
    for name, memory, said, right in zip(names, (one, other), values, true, strict=True):
        after = {answer.query: answer.text for answer in model.ask_many(both, list(said))}
        kept.append(
            Kept(
                name=name,
                tokens=memory.about.tokens,
                queries=len(said),
                same_answers=sum(after[key] == value for key, value in said.items()) / len(said) if said else None,
                answered=None if right is None else (_right(said, right), _right(after, right)),
            )
        )
    return Changed(memory=both, kept=(kept[0], kept[1]))


def _said(model: RecordsModel, memory: Memory, wanted: dict[str, str] | None = None) -> dict[str, str]:
    """Keys and what they are answered with; none where there are too many possible keys to find those of the memory."""
    if wanted is not None:
        return {answer.query: answer.text for answer in model.ask_many(memory, list(wanted))}
    try:
        return values_of(model, memory)
    except SpecError:
        return {}


def _lines(model: RecordsModel, memories: tuple[Memory, Memory], values: Sequence[dict[str, str]]) -> str:
    """All records of two memories as text.

    Raises:
        SpecError: They are not known, or not all are answered right.
    """
    for memory, said, which in zip(memories, values, ("first", "second"), strict=True):
        if len(said) != memory.about.records or memory.about.answered != memory.about.records:
            raise SpecError(
                f"the {which} memory has {memory.about.records} records, of which {len(said)} keys can be found and {memory.about.answered} are "
                f"answered by {model.name}, so not all can be written again; add the records as a page, or write all of them anew."
            )
    return "\n".join(f"{key}:{value}" for said in values for key, value in said.items())


def _right(said: dict[str, str], wanted: dict[str, str]) -> int:
    return sum(said[key] == value for key, value in wanted.items())
