"""What models share: what they promise, what they give back, pages, and the memory file's worth of a write."""

import platform
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, Protocol, runtime_checkable

import torch

from graven.answer import Answer
from graven.decoding import GREEDY, Decoding
from graven.engrave import Engraved
from graven.errors import SpecError
from graven.fidelity import Verified
from graven.lm.base import LanguageModel, digest
from graven.memory.file import About, Agreement, Base, Memory, Page, text_hash
from graven.memory.gradient import GradMem
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

ProgressCall = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Recital:
    """What a model reproduces when it runs freely from a memory.

    Args:
        text: All pages in order.
        exact: It is the text that was written, token for token.
        tokens: Its length.
    """

    text: str
    exact: bool
    tokens: int


@runtime_checkable  # for the shape checks of the tests
class Model(Protocol):
    """What `load` returns; `size` is the number of its parameters."""

    name: str
    kind: str
    size: int

    def write(
        self,
        text: str,
        *,
        steps: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        deadline: float | None = None,
        progress: ProgressCall | None = None,
    ) -> Memory:
        """A memory of the text."""
        ...

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Answer:
        """The answer to one query."""
        ...

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> list[Answer]:
        """The answers to several queries, the same as one by one."""
        ...

    def stream(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Generator[str, None, Answer]:
        """The answer to one query in pieces, as they come; the `Answer` is what the generator returns."""
        ...

    def recite(self, memory: Memory) -> Recital:
        """What the model reproduces of the text."""
        ...

    def verify(self, memory: Memory, text: str, *, questions: Sequence[Query] | None = None, probes: int | None = None) -> Verified:
        """The memory measured anew, against the text that was written."""
        ...


def check_numbers(*, steps: int, seed: int, deadline: float | None) -> None:
    """Pass where these settings of a write are in range.

    Raises:
        SpecError: One is not; the sentence names it.
    """
    if steps < 0:
        raise SpecError(f"`steps` is {steps}; it must be at least 0, which gives the start state.")
    if not 0 <= seed < 1 << 63:
        raise SpecError(f"`seed` is {seed}; it must be at least 0 and below 2^63.")
    if deadline is not None and not deadline >= 0:
        raise SpecError(f"`deadline` is {deadline} seconds; it must be at least 0, which gives the start state.")


def recited_pages(memory: GradMem, written: Memory) -> tuple[list[list[int]], bool]:
    """Token rows that the model reproduces of each page, and whether all are those that were written."""
    pages = written.about.pages
    rows = [memory.recite(state[None], [page.tokens])[0] for state, page in zip(written.state, pages, strict=True)]
    return rows, all(text_hash(row) == page.text_hash for row, page in zip(rows, pages, strict=True))


def key_hash(key: str) -> int:
    """32 bits of a key's SHA-256."""
    return int(digest(key.encode("utf-8", "surrogatepass"))[:8], 16)


def made_with() -> tuple[str, ...]:
    """What a memory that is made now is made with."""
    return f"graven {version('graven')}", f"torch {torch.__version__}", f"python {platform.python_version()}"


def memory_of(
    done: Engraved,
    context: Tokens,
    *,
    model: LanguageModel,
    kind: Literal["records", "text"],
    rule: str,
    seed: int,
    lossless: bool,
    records: int | None = None,
    answered: int | None = None,
    keys: Sequence[tuple[int, ...]] | None = None,
    objective: str = "reconstruct",
    chat: bool = False,
    before: Sequence[int] = (),
    agreement: Agreement | None = None,
) -> Memory:
    """A memory file's worth of what a write gave."""
    rows = [context.row(i) for i in range(len(context.ids))]
    keys = [()] * len(rows) if keys is None else keys
    about = About(
        kind=kind,
        base=Base(name=model.name, fingerprint=model.fingerprint, revision=getattr(model, "revision", None)),
        slots=done.state.shape[1],
        pages=tuple(
            Page(tokens=len(row), recited=n, text_hash=text_hash(row), keys=held) for row, n, held in zip(rows, done.recited, keys, strict=True)
        ),
        rule=rule,
        steps=len(done.losses),
        losses=tuple(done.losses),
        token_accuracy=done.token_accuracy,
        outcome=done.outcome.name,
        lossless=lossless,
        records=records,
        answered=answered,
        seed=seed,
        seconds=done.seconds,
        objective=objective,
        chat=chat,
        before=tuple(before),
        agreement=agreement,
        versions=made_with(),
    )
    return Memory(done.state.float().contiguous(), about)
