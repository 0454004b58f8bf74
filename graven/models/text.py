"""A frozen causal language model that learns to recite a text."""

import math
from collections.abc import Sequence

from graven.engrave import engrave
from graven.errors import SpecError, TextError
from graven.lm.pretrained import Pretrained
from graven.memory.file import Memory
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.models.base import Answer, ProgressCall, Recital, ask_pages, check_numbers, cut, memory_of, recited_pages
from graven.tasks.base import Tokens

PAGE_TOKENS = 64  # a longer text is cut: beyond this the steps to an exact copy grow faster than the text (docs/log.md)
TOKENS_A_SLOT = 8
TEXT_STEPS = 1000
TEXT_RATE = 0.3  # in standard deviations of the model's embeddings, a step
TEXT_START = 0.3  # of the start, in the same unit; with the rate above, the fastest of 16 settings on four stories (docs/log.md)
ANSWER_TOKENS = 64


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
