"""A loaded model that writes texts into memory and answers from it: what the command line and a program both call.

`load` gives one of two. A `RecordsModel` was meta-trained (`graven train`) to answer from a few gradient steps; it takes one `key:value` a line.
A `TextModel` is any frozen causal language model; it takes any text and learns to recite it, which is not the same as answering questions.
"""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from graven.engrave import Engraved, engrave
from graven.errors import SpecError, TextError
from graven.lm.base import Continuation, LanguageModel, digest
from graven.lm.pretrained import Pretrained, load_pretrained
from graven.memory.file import About, Base, Memory, Page
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.tasks.base import Tokens
from graven.tasks.retrieval import digits_of, key_of, parse_records, text_of
from graven.train import Trained, load_trained

SHIPPED = Path(__file__).parent / "checkpoints"
PAGE_TOKENS = 64  # a longer text is cut: beyond this the steps to an exact copy grow faster than the text (docs/log.md)
TOKENS_A_SLOT = 8
TEXT_STEPS = 1000
TEXT_RATE = 0.3  # in standard deviations of the model's embeddings, a step
TEXT_START = 0.3  # of the start, in the same unit; with the rate above, the fastest of 16 settings on four stories (docs/log.md)
ANSWER_TOKENS = 64
ROWS_AT_ONCE = 64

T = TypeVar("T")
ProgressCall = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Answer:
    """What a model said from memory.

    Args:
        query: What was asked.
        text: The most probable continuation.
        log_probability: Natural logarithm of its probability, its end included.
        page: Page of the memory that it came from, counted from 0.
        known: False where the memory holds records and the query is none of their keys: the text is then a guess.
    """

    query: str
    text: str
    log_probability: float
    page: int = 0
    known: bool = True


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

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None) -> Answer:
        """The answer to one query."""
        ...

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None) -> list[Answer]:
        """The answers to several queries, the same as one by one."""
        ...

    def recite(self, memory: Memory) -> Recital:
        """What the model reproduces of the text."""
        ...


def load(name_or_path: str | Path, *, slots: int | None = None) -> Model:
    """A model by name or path.

    Args:
        name_or_path: A shipped checkpoint (`records`), the folder of a finished `graven train`, a Hugging Face model directory, a GGUF file, or
            a hub id. A shipped name wins; write `./records` for a folder of that name.
        slots: Memory vectors for each page of text, where the model lets one choose; from the length of the text where left out.
    Raises:
        ModelError: There is no such model, or it cannot be used behind a memory.
        SpecError: `slots` does not fit the model.
    """
    name = str(name_or_path)
    if name in {place.parent.name for place in SHIPPED.glob("*/model.json")}:
        return RecordsModel(load_trained(SHIPPED / name, name=name), slots=slots)
    if os.path.isfile(Path(name) / "model.json"):  # of `os.path`, which takes a name that is too long for one that is not there
        return RecordsModel(load_trained(Path(name), name=str(Path(name).resolve())), slots=slots)
    model = load_pretrained(name)
    if os.path.exists(name):
        model.name = str(Path(name).resolve())
    return TextModel(model, slots=slots)


class RecordsModel:
    """A meta-trained memory that takes one `key:value` a line and answers by key.

    Args:
        trained: The checkpoint.
        slots: Refused where it differs from what the checkpoint was trained with.
    """

    kind = "records"

    def __init__(self, trained: Trained, *, slots: int | None = None):
        self.memory, self.spec, self.task, self.name = trained.memory, trained.spec, trained.spec.task, trained.memory.model.name
        self.size = sum(weight.numel() for weight in self.memory.parameters())
        self.pairs_a_page = max(max(stage.pairs) for stage in trained.spec.stage)
        if slots not in (None, self.memory.spec.slots):
            raise SpecError(f"`slots` is {slots} and {self.name} was trained with {self.memory.spec.slots}; leave `slots` out.")

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
        """Write `key:value` lines. The start state is learned, so every seed gives the same bits.

        Raises:
            TextError: A line is no record of the model's lengths and alphabet, or repeats a key.
            SpecError: `rate` is given: it was trained, and no other means anything here.
        """
        if rate is not None:
            raise SpecError(f"`rate` is {rate} and that of {self.name} was fixed by its training; leave it out.")
        steps = self.memory.spec.steps if steps is None else steps
        check_numbers(steps=steps, seed=seed, deadline=deadline)
        pairs = parse_records(text, self.task)
        pages = cut(pairs, self.pairs_a_page)
        context = Tokens.of([self._context(page) for page in pages])
        keys = [tuple(sorted(key_hash(key) for key, _ in page)) for page in pages]
        done = engrave(self.memory, context, steps=steps, until_exact=False, deadline=deadline, progress=progress)
        found = self._values(done.state, [key for key, _ in pairs], keys=keys, most=self.task.value_length + 1)
        answered = sum(text_of(best.tokens, self.task) == value for (_, best), (_, value) in zip(found, pairs, strict=True))
        return memory_of(
            done, context, model=self.memory.model, kind="records", rule=repr(self.memory.spec.rule), seed=seed, lossless=True,
            records=len(pairs), answered=answered, keys=keys,
        )  # fmt: skip

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None) -> Answer:
        """The value of one key. `ab`, `ab:` and `?!ab:` are the same query.

        Raises:
            MismatchError: The memory was written with another model.
            TextError: The query is no key of the model's length and alphabet.
        """
        return self.ask_many(memory, [query], max_tokens=max_tokens)[0]

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None) -> list[Answer]:
        """The values of several keys; a key of none of the records gets the most probable guess, and `known` is False."""
        memory.belongs_to(self.memory.model)
        most = self.task.value_length + 1 if max_tokens is None else max_tokens
        asked, held = [key_of(query, self.task) for query in queries], [page.keys for page in memory.about.pages]
        return [
            Answer(query, text_of(best.tokens, self.task), sum(best.log_probabilities), page, known=key_hash(key) in held[page])
            for query, key, (page, best) in zip(queries, asked, self._values(memory.state, asked, keys=held, most=most), strict=True)
        ]

    def recite(self, memory: Memory) -> Recital:
        """The records that the write head reproduces, one a line; where they are not the ones that were written, with all their marks.

        Training asks for values, so keys are hardly among what a memory keeps.
        """
        memory.belongs_to(self.memory.model)
        rows, exact = recited_pages(self.memory, memory)
        text = "\n".join(text_of(row, self.task) for row in rows)
        return Recital(text.replace("!!", "\n").strip("!").replace("!\n!", "\n") if exact else text, exact, sum(map(len, rows)))

    def _values(
        self, state: Float[Tensor, "P M D"], asked: Sequence[str], *, keys: Sequence[Sequence[int]], most: int
    ) -> list[tuple[int, Continuation]]:
        mark = self.task.mark
        rows = [[mark("?"), mark("!"), *row, mark(":")] for row in digits_of(asked).tolist()] if asked else []
        where = [next((page for page, held in enumerate(keys) if key_hash(key) in held), None) for key in asked]
        return ask_pages(self.memory, state, rows, where=where, most=most, stop={mark("!"), mark("|")})

    def _context(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        keys, values = digits_of([key for key, _ in pairs]), digits_of([value for _, value in pairs])
        return self.task.episode(keys[None], values[None]).context.row(0)


class TextModel:
    """A frozen causal language model that learns to recite a text from a few vectors.

    Args:
        model: The language model; its weights never change.
        slots: Memory vectors for each page; one for every 8 tokens of a page where left out.
    """

    kind = "text"

    def __init__(self, model: Pretrained, *, slots: int | None = None):
        self.model, self.name, self.slots = model.requires_grad_(False), model.name, slots
        self.size = sum(weight.numel() for weight in model.parameters())
        if slots is not None and slots < 1:
            raise SpecError(f"`slots` is {slots}; it must be at least 1.")
        if slots is not None and model.positions is not None and slots >= model.positions:
            raise SpecError(
                f"`slots` is {slots} and {model.name} has {model.positions} positions, memory included; ask for fewer slots, or use a model "
                "with a longer context."
            )

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
        """Adam on the memory until the model, running freely from it, gives the text back token for token.

        Args:
            text: Any text; one that is longer than a page is cut into pages of equal length.
            steps: Most steps for each page; 1000 where left out.
            rate: Step size in standard deviations of the model's embeddings; 0.3 where left out.
            seed: Of the start vectors.
            deadline: Seconds after which no further step is taken.
            progress: Called at each step with its number, loss and token accuracy.
        Raises:
            TextError: The text has no tokens, or is no Unicode.
            SpecError: A setting is out of range.
        """
        steps, rate = TEXT_STEPS if steps is None else steps, TEXT_RATE if rate is None else rate
        check_numbers(steps=steps, seed=seed, deadline=deadline)
        if not (rate > 0 and math.isfinite(rate)):
            raise SpecError(f"`rate` is {rate}; it must be above 0. The default is {TEXT_RATE}.")
        ids = self._encode(text, what="the text")
        if not ids:
            raise TextError("the text is empty, or the tokenizer makes nothing of it; give at least one token.")
        room = PAGE_TOKENS if self.model.positions is None else min(PAGE_TOKENS, self.model.positions - (self.slots or self.model.positions // 8))
        pages = Tokens.of(cut(ids, max(1, room)))
        slots = self.slots or math.ceil(pages.ids.shape[1] / TOKENS_A_SLOT)
        rule = Adam(rate=rate * self.model.embedding_scale)
        memory = GradMem(self.model, GradMemSpec(slots=slots, steps=steps, rule=rule, order="none", start=TEXT_START), seed=seed)
        done = engrave(memory, pages, steps=steps, until_exact=steps > 0, deadline=deadline, progress=progress)
        return memory_of(done, pages, model=self.model, kind="text", rule=repr(rule), seed=seed, lossless=self.model.decode(ids) == text)

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None) -> Answer:
        """The most probable continuation of the query behind the memory.

        Raises:
            MismatchError: The memory was written with another model.
            TextError: Memory, query and answer do not fit the model's positions.
        """
        return self.ask_many(memory, [query], max_tokens=max_tokens)[0]

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None) -> list[Answer]:
        """The continuations of several queries. With several pages, each is asked and the most probable answer (a token) is given."""
        memory.belongs_to(self.model)
        rows = [self._encode(query, what="the query") for query in queries]
        most = self._most(memory, rows, max_tokens)
        found = ask_pages(self._reader(memory), memory.state, rows, where=[None] * len(rows), most=most, stop=self.model.stop)
        return [
            Answer(query, self.model.decode(best.tokens), sum(best.log_probabilities), page)
            for query, (page, best) in zip(queries, found, strict=True)
        ]

    def recite(self, memory: Memory) -> Recital:
        """The text that the model reproduces, page after page."""
        memory.belongs_to(self.model)
        rows, exact = recited_pages(self._reader(memory), memory)
        return Recital(self.model.decode([token for row in rows for token in row]), exact, sum(map(len, rows)))

    def _reader(self, memory: Memory) -> GradMem:
        return GradMem(self.model, GradMemSpec(slots=memory.about.slots, steps=0, rule=Adam(), order="none"))

    def _encode(self, text: str, *, what: str) -> list[int]:
        half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
        if half is not None:
            raise TextError(f"{what} has U+{ord(half):04X}, half of a surrogate pair, which is no character; give Unicode text.")
        return self.model.encode(text)

    def _most(self, memory: Memory, rows: Sequence[Sequence[int]], asked: int | None) -> int:
        """Most tokens of an answer: those that were asked for, or as many of the default as the model has positions for."""
        longest, room = max((len(row) for row in rows), default=0), self.model.positions
        if room is None:
            return ANSWER_TOKENS if asked is None else asked
        left = room - memory.about.slots - longest
        most = max(1, min(ANSWER_TOKENS, left)) if asked is None else asked
        if most > left:
            raise TextError(
                f"{memory.about.slots} slots, a query of {longest} tokens and an answer of up to {most} make {memory.about.slots + longest + most}, "
                f"and {self.name} has {room} positions; shorten the query or lower --max-tokens."
            )
        return most


def cut(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Pages of nearly equal length, none longer than `most`.

    >>> cut("abcde", 2)
    ['ab', 'cd', 'e']
    """
    count = max(1, math.ceil(len(items) / most))
    bounds = [math.ceil(len(items) * i / count) for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


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


def ask_pages(
    memory: GradMem,
    state: Float[Tensor, "P M D"],
    queries: Sequence[Sequence[int]],
    *,
    where: Sequence[int | None],
    most: int,
    stop: set[int] | frozenset[int],
) -> list[tuple[int, Continuation]]:
    """Page and answer of each query: that of the page it is known to be on, or of all pages the answer most probable for each of its tokens."""
    if most < 1:
        raise SpecError(f"`max_tokens` is {most}; it must be at least 1.")
    found: list[list[tuple[int, Continuation]]] = [[] for _ in queries]
    for page, slots in enumerate(state):
        asked = [i for i, known in enumerate(where) if known in (None, page)]
        for first in range(0, len(asked), ROWS_AT_ONCE):
            part = asked[first : first + ROWS_AT_ONCE]
            answers = memory.answer(slots.expand(len(part), -1, -1), Tokens.of([queries[i] for i in part]), most=most, stop=stop)
            for i, answer in zip(part, answers, strict=True):
                found[i].append((page, answer))
    return [max(answers, key=lambda answer: fmean(answer[1].log_probabilities)) for answers in found]


def recited_pages(memory: GradMem, written: Memory) -> tuple[list[list[int]], bool]:
    """Token rows that the model reproduces of each page, and whether all are those that were written."""
    pages = written.about.pages
    rows = [memory.recite(state[None], [page.tokens])[0] for state, page in zip(written.state, pages, strict=True)]
    return rows, all(text_hash(row) == page.text_hash for row, page in zip(rows, pages, strict=True))


def text_hash(ids: Sequence[int]) -> str:
    """Hash of token ids."""
    return digest(",".join(map(str, ids)).encode())


def key_hash(key: str) -> int:
    """32 bits of a key's SHA-256."""
    return int(digest(key.encode())[:8], 16)


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
        versions=(f"graven {version('graven')}", f"torch {torch.__version__}", f"python {platform.python_version()}"),
    )
    return Memory(done.state.float().contiguous(), about)
