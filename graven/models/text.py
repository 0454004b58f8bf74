"""A frozen causal language model that learns to recite a text."""

import math
from collections.abc import Generator, Sequence

from graven.answer import Answer, Reader, encode
from graven.decoding import GREEDY, Decoding
from graven.engrave import engrave
from graven.errors import SpecError, TextError
from graven.lm.pretrained import Pretrained
from graven.memory.file import Memory
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.models.base import ProgressCall, Recital, check_numbers, cut, memory_of, recited_pages
from graven.tasks.base import Tokens

PAGE_TOKENS = 64  # a longer text is cut: beyond this the steps to an exact copy grow faster than the text (docs/log.md)
TOKENS_A_SLOT = 8
TEXT_STEPS = 1000
TEXT_RATE = 0.3  # in standard deviations of the model's embeddings, a step
TEXT_START = 0.3  # of the start, in the same unit; with the rate above, the fastest of 16 settings on four stories (docs/log.md)


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

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Answer:
        """The most probable continuation of the query behind the memory, or one that is chosen in another way.

        Args:
            memory: Written by this model.
            query: Any text.
            max_tokens: Most tokens of the answer; 64, or as many as the model has room for.
            decoding: How to choose.
        Raises:
            MismatchError: The memory was written with another model.
            TextError: Memory, query and answer do not fit the model's positions.
            SpecError: A setting is out of range, or several answers are asked for.
        """
        if decoding.count > 1:
            raise SpecError(f"`count` is {decoding.count} and `ask` gives one answer; use `ask_many`.")
        return self.ask_many(memory, [query], max_tokens=max_tokens, decoding=decoding)[0]

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> list[Answer]:
        """The answers to several queries, `decoding.count` each, side by side, the same as one by one.

        With several pages, each is asked and the most probable answer (a token) is given.
        """
        return Reader(self.model, memory).answers(queries, max_tokens=max_tokens, decoding=decoding)

    def stream(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Generator[str, None, Answer]:
        """The answer of `ask` in pieces, as they come; what the generator returns at its end is the `Answer`."""
        return Reader(self.model, memory).stream(query, max_tokens=max_tokens, decoding=decoding)

    def recite(self, memory: Memory) -> Recital:
        """The text that the model reproduces, page after page."""
        memory.belongs_to(self.model)
        rows, exact = recited_pages(self._reader(memory), memory)
        return Recital(self.model.decode([token for row in rows for token in row]), exact, sum(map(len, rows)))

    def _reader(self, memory: Memory) -> GradMem:
        return GradMem(self.model, GradMemSpec(slots=memory.about.slots, steps=0, rule=Adam(), order="none"))

    def _encode(self, text: str, *, what: str) -> list[int]:
        return encode(self.model, text, what=what)
