"""A meta-trained language model: a text goes into memory by the few steps that were trained, and questions are answered from there."""

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from graven.answer import Answer, Reader, encode
from graven.decoding import GREEDY, Decoding
from graven.engrave import engrave
from graven.errors import SpecError, TextError
from graven.fidelity import Verified, agreeing, fidelity, same_text
from graven.memory.adapted import reading
from graven.memory.file import Memory
from graven.models.base import ProgressCall, Recital, check_numbers, memory_of, recited_pages
from graven.tasks.base import Tokens, cut
from graven.tasks.queries import Query
from graven.train_triples import TrainedTriples


class TriplesModel:
    """What `graven train` made of a language model and triples.

    Args:
        trained: The checkpoint.
        slots: Refused where it differs from what the checkpoint was trained with.
    """

    kind = "text"

    def __init__(self, trained: TrainedTriples, *, slots: int | None = None):
        self.memory, self.spec, self.model, self.name = trained.memory, trained.spec, trained.model, trained.model.name
        self.size = sum(weight.numel() for weight in self.memory.parameters())
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
        """Write a text, in pages no longer than the contexts of the training. The start state is learned, so every seed gives the same bits.

        Raises:
            TextError: The text has no tokens, or is no Unicode.
            SpecError: `rate` is given: it was trained, and no other means anything here.
        """
        if rate is not None:
            raise SpecError(f"`rate` is {rate} and that of {self.name} was fixed by its training; leave it out.")
        steps = self.memory.spec.steps if steps is None else steps
        check_numbers(steps=steps, seed=seed, deadline=deadline)
        ids = self._tokens(text)
        pages = Tokens.of(cut(ids, self.spec.task.longest))
        done = engrave(self.memory, pages, steps=steps, until_exact=False, deadline=deadline, progress=progress)
        return memory_of(
            done, pages, model=self.model, kind="text", rule=repr(self.memory.spec.rule), seed=seed, lossless=self.model.decode(ids) == text
        )

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Answer:
        """The answer to one question.

        Raises:
            MismatchError: The memory was written with another model.
            TextError: Memory, question and answer do not fit the model's positions.
            SpecError: A setting is out of range, or several answers are asked for.
        """
        if decoding.count > 1:
            raise SpecError(f"`count` is {decoding.count} and `ask` gives one answer; use `ask_many`.")
        return self.ask_many(memory, [query], max_tokens=max_tokens, decoding=decoding)[0]

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> list[Answer]:
        """The answers to several questions, each in the template of the training; the same as one by one."""
        with reading(self.memory):
            answers = self._reader(memory).answers([self.spec.task.asked(query) for query in queries], max_tokens=max_tokens, decoding=decoding)
        return [
            replace(answer, query=query, text=answer.text.strip())
            for answer, query in zip(answers, [query for query in queries for _ in range(decoding.count)], strict=True)
        ]

    def stream(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Generator[str, None, Answer]:
        """The answer of `ask`, in one piece: a model whose adapter is off must not wait for whoever reads the pieces."""
        answer = self.ask(memory, query, max_tokens=max_tokens, decoding=decoding)

        def pieces() -> Generator[str, None, Answer]:
            yield answer.text
            return answer

        return pieces()

    def recite(self, memory: Memory) -> Recital:
        """What the model, as it writes, reproduces of the text. Training asks for answers, so a text is hardly ever whole."""
        memory.belongs_to(self.model)
        rows, exact = recited_pages(self.memory, memory)
        return Recital(self.model.decode([token for row in rows for token in row]), exact, sum(map(len, rows)))

    def verify(self, memory: Memory, text: str, *, questions: Sequence[Query] | None = None, probes: int | None = None) -> Verified:
        """Measure a memory anew against the text that was written.

        Args:
            memory: Written by this model.
            text: The very text that was written.
            questions: To measure with, beside the model alone and the model with the whole text.
            probes: Refused: this model was trained to answer, not to ask.
        Raises:
            MismatchError: The memory was written with another model.
            TextError: The text is another one, or does not fit into the model together with a question.
            SpecError: `probes` is given.
        """
        memory.belongs_to(self.model)
        if probes is not None:
            raise SpecError(f"`probes` is {probes}, and {self.name} was trained to answer questions, not to ask them; give `questions`.")
        ids = self._tokens(text)
        pages = same_text(ids, memory.about)
        found, _ = recited_pages(self.memory, memory)
        anew = [replace(page, recited=agreeing(row, own)) for page, row, own in zip(memory.about.pages, found, pages, strict=True)]
        recited, stored = replace(memory.about, pages=tuple(anew)).recited, memory.about.recited
        asked = None
        if questions is not None:
            with reading(self.memory):
                asked = fidelity(self._reader(memory), ids, [Query(self.spec.task.asked(one.text), one.answer) for one in questions])
        accuracy = self._accuracy(memory, pages)
        short = [f"{recited} tokens are recited exactly, and the file says {stored}"] if recited < stored else []
        if round(accuracy * len(ids)) < round(memory.about.token_accuracy * len(ids)):
            short.append(f"teacher-forced accuracy is {accuracy:.4f}, and the file says {memory.about.token_accuracy:.4f}")
        return Verified(token_accuracy=accuracy, recited=recited, fidelity=asked, shortfalls=tuple(short))

    @torch.no_grad()
    def _accuracy(self, memory: Memory, pages: Sequence[Sequence[int]]) -> float:
        context = Tokens.of(pages)
        step = self.memory.step(memory.state, self.memory.prepare(memory.state, context))
        return int(step.hits.sum()) / int(context.mask.sum())

    def _reader(self, memory: Memory) -> Reader:
        """Of the vectors that stand before a question: the memory, mapped and between control vectors where it was trained so."""
        memory.belongs_to(self.model)
        with torch.no_grad():
            return Reader(self.model, Memory(self.memory.prefix(memory.state, control=self.memory.read_control), memory.about))

    def _tokens(self, text: str) -> list[int]:
        ids = encode(self.model, text, what="the text")
        if not ids:
            raise TextError("the text is empty, or the tokenizer makes nothing of it; give at least one token.")
        return ids
