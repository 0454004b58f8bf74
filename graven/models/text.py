"""A frozen causal language model that learns to recite a text."""

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

from graven.answer import Answer, Reader, encode
from graven.decoding import GREEDY, Decoding
from graven.distill import RATE, STEPS, Distillation, Distilled, asked_of, distil_prompt, held_apart
from graven.engrave import engrave, engrave_objective
from graven.errors import SpecError, TextError
from graven.fidelity import PROBES, Verified, probe, verify
from graven.lm.chat import halves
from graven.lm.pretrained import Pretrained
from graven.memory.file import Memory
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.objective import sum_of, weights_of
from graven.models.base import ProgressCall, Recital, check_numbers, memory_of, recited_pages
from graven.study import self_study
from graven.tasks.base import Tokens, cut
from graven.tasks.queries import Query

PAGE_TOKENS = 64  # a longer text is cut: beyond this the steps to an exact copy grow faster than the text (docs/log.md)
TOKENS_A_SLOT = 8
TEXT_STEPS = 1000
OTHER_STEPS = 200
PROMPT_SLOTS = 8
OWN_QUERIES = 48
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
        objective: str = "reconstruct",
        chat: bool = False,
        probes: int | None = None,
    ) -> Memory:
        """Adam on the memory until the model, running freely from it, gives the text back token for token.

        Args:
            text: Any text; one that is longer than a page is cut into pages of equal length.
            steps: Most steps for each page; 1000 where left out, 200 where something else than the text is descended.
            rate: Step size in standard deviations of the model's embeddings; 0.3 where left out.
            seed: Of the start vectors.
            deadline: Seconds after which no further step is taken.
            progress: Called at each step with its number, loss and token accuracy.
            objective: "reconstruct", "continue", or a sum such as "reconstruct=1,continue=0.5". With anything but "reconstruct" every step is
                taken, at a rate that falls to nothing.
            chat: The memory stands inside the user turn of the model's chat template, and so do the queries that are asked of it.
            probes: Questions that the model asks itself about the text once it is written, to measure the memory with; `PROBES` where left out.
        Raises:
            TextError: The text has no tokens, or is no Unicode.
            SpecError: A setting is out of range, or the objective needs queries.
            ModelError: `chat` is set and the model has no template for it.
        """
        weights = weights_of(objective)
        if "distill" in weights:
            raise SpecError(f"`objective` is {objective!r}, which takes queries; `distill` of the model writes it.")
        plain = set(weights) == {"reconstruct"}
        steps = (TEXT_STEPS if plain else OTHER_STEPS) if steps is None else steps
        rate = self._checked(steps=steps, seed=seed, deadline=deadline, rate=rate, default=TEXT_RATE)
        ids, before = self._tokens(text), self._before(chat)
        room = self.model.positions
        page = PAGE_TOKENS if room is None else min(PAGE_TOKENS, room - len(before) - (self.slots or room // 8))
        pages = Tokens.of(cut(ids, max(1, page)))
        slots = self.slots or math.ceil(pages.ids.shape[1] / TOKENS_A_SLOT)
        rule = Adam(rate=rate * self.model.embedding_scale)
        spec = GradMemSpec(slots=slots, steps=steps, rule=rule, order="none", start=TEXT_START)
        memory = GradMem(self.model, spec, seed=seed, before=before)
        if plain:
            done = engrave(memory, pages, steps=steps, until_exact=steps > 0, deadline=deadline, progress=progress)
        else:
            done = engrave_objective(memory, pages, partial(sum_of, weights, seed=seed), steps=steps, deadline=deadline, progress=progress)
        written = memory_of(
            done, pages, model=self.model, kind="text", rule=repr(rule), seed=seed, lossless=self.model.decode(ids) == text,
            objective=objective, chat=chat, before=before,
        )  # fmt: skip
        count = PROBES if probes is None else probes
        if count == 0:
            return written
        measured = probe(Reader(self.model, written), ids, count=count, seed=seed)
        return Memory(written.state, replace(written.about, fidelity=measured))

    def distill(
        self,
        text: str,
        queries: Sequence[Query] | None = None,
        *,
        steps: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        deadline: float | None = None,
        progress: ProgressCall | None = None,
        objective: str = "distill",
        chat: bool = False,
        prompts: Sequence[str] | None = None,
    ) -> tuple[Memory, Distilled]:
        """A memory that stands in for a prompt: behind it the model does with a query what it does behind the whole prompt.

        Args:
            text: The prompt, of any length that fits into the model; it is never cut.
            queries: What will be asked behind it, at least three: a third is held out to measure with. Where left out, 48 that the model asks itself.
            steps: Adam steps; as many as `graven.distill.STEPS` where left out.
            rate: Of the first step, in standard deviations of the model's embeddings; it falls to nothing.
            seed: Of the start, the order of the queries, and which of them are held out.
            deadline: Seconds after which no further step is taken.
            progress: Called at each step with its number, its loss, and not a number for the accuracy that nobody measured.
            objective: "distill", or a sum such as "distill=1,reconstruct=0.1".
            chat: The prompt, and so the memory, stands inside the user turn of the model's chat template, and the query behind it.
            prompts: What the model is asked for queries with, where none are given: `graven.study.PLAIN` or `CHAT` where left out.
        Returns:
            The memory, and how well it stands in for the prompt.
        Raises:
            TextError: The prompt has fewer tokens than the memory vectors, or does not fit into the model; or there are too few queries.
            SpecError: A setting is out of range, or the objective has no "distill" in it.
            ModelError: `chat` is set and the model has no template for it.
        """
        weights = weights_of(objective)
        if "distill" not in weights:
            raise SpecError(f"`objective` is {objective!r}, which takes no queries; `write` of the model writes it.")
        if prompts is not None and queries is not None:
            raise SpecError("`queries` and `prompts` are both given; the model asks itself only where no queries are.")
        steps = STEPS if steps is None else steps
        rate = self._checked(steps=steps, seed=seed, deadline=deadline, rate=rate, default=RATE)
        ids, before, began = self._tokens(text), self._before(chat), time.monotonic()
        if queries is None:
            queries = [Query(line) for line in self_study(self.model, ids, count=OWN_QUERIES, prompts=prompts, seed=seed, chat=chat)]
        asked = asked_of(self.model, queries, chat=chat)
        left = None if deadline is None else max(0.0, deadline - (time.monotonic() - began))  # asking itself takes time too
        spec = Distillation(
            slots=self.slots or PROMPT_SLOTS, weights=weights, steps=steps, rate=rate, seed=seed, deadline=left, before=tuple(before),
            opening=() if chat else tuple(self.model.opening), reconstruct_start=TEXT_START, reconstruct_rate=TEXT_RATE,
        )  # fmt: skip
        call = None if progress is None else lambda step, loss: progress(step, loss, math.nan)
        done = distil_prompt(self.model, ids, *held_apart(asked, seed=seed), spec, stop=self.model.stop, progress=call)
        rule = Adam(rate=rate * self.model.embedding_scale)
        memory = memory_of(
            done.engraved, Tokens.of([ids]), model=self.model, kind="text", rule=repr(rule), seed=seed, lossless=self.model.decode(ids) == text,
            objective=objective, chat=chat, before=before, agreement=done.held_out,
        )  # fmt: skip
        return memory, done

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

    def verify(self, memory: Memory, text: str, *, questions: Sequence[Query] | None = None, probes: int | None = None) -> Verified:
        """Measure a memory anew against the text that was written.

        Args:
            memory: Written by this model.
            text: The very text that was written.
            questions: To measure with; the model asks its own where left out, the same ones as at the write.
            probes: How many it asks; as many as at the write where left out, and they are compared only then.
        Raises:
            MismatchError: The memory was written with another model.
            TextError: The text is another one, or does not fit into the model together with a question that is given.
            SpecError: A setting is out of range, or both kinds of questions are given.
        """
        if questions is not None and probes is not None:
            raise SpecError("`questions` and `probes` are both given; the model asks its own questions only where none are given.")
        return verify(Reader(self.model, memory), memory, self._tokens(text), questions=questions, probes=probes)

    def _reader(self, memory: Memory) -> GradMem:
        spec = GradMemSpec(slots=memory.about.slots, steps=0, rule=Adam(), order="none")
        return GradMem(self.model, spec, before=memory.about.before)

    def _before(self, chat: bool) -> list[int]:
        return self.model.encode(halves(self.model.tokenizer, "", name=self.name)[0]) if chat else []

    @staticmethod
    def _checked(*, steps: int, seed: int, deadline: float | None, rate: float | None, default: float) -> float:
        """The rate, where all are in range."""
        check_numbers(steps=steps, seed=seed, deadline=deadline)
        rate = default if rate is None else rate
        if not (rate > 0 and math.isfinite(rate)):
            raise SpecError(f"`rate` is {rate}; it must be above 0. The default is {default}.")
        return rate

    def _tokens(self, text: str) -> list[int]:
        ids = self._encode(text, what="the text")
        if not ids:
            raise TextError("the text is empty, or the tokenizer makes nothing of it; give at least one token.")
        return ids

    def _encode(self, text: str, *, what: str) -> list[int]:
        return encode(self.model, text, what=what)
