"""A meta-trained memory that answers by key: records, or a story whose keys are the questions about it."""

from collections.abc import Generator, Sequence

from jaxtyping import Float
from torch import Tensor

from graven.answer import Answer, ask_pages, at_least_one
from graven.decoding import GREEDY, Decoding
from graven.engrave import engrave
from graven.errors import ModelError, SpecError
from graven.fidelity import Verified, same_text
from graven.lm.base import Continuation
from graven.memory.file import Memory
from graven.memory.gradient import GradMem
from graven.models.base import ProgressCall, Recital, check_numbers, key_hash, memory_of, recited_pages
from graven.tasks.base import Tokens
from graven.tasks.queries import Query
from graven.train import Trained


class RecordsModel:
    """A meta-trained memory that takes what its task reads, one `key:value` a line or a story, and answers by key.

    Args:
        trained: The checkpoint.
        slots: Refused where it differs from what the checkpoint was trained with.
    Raises:
        ModelError: The checkpoint is another kind of memory than GradMem,
    """

    kind = "records"

    def __init__(self, trained: Trained, *, slots: int | None = None):
        if not isinstance(trained.memory, GradMem):
            raise ModelError(
                f'this checkpoint is a memory of kind "{trained.spec.memory.kind}"; records and stories are answered from "gradmem" only.'
            )
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
        pages = self.task.pages(text, most=self.pairs_a_page)
        pairs, context = [pair for _, page in pages for pair in page], Tokens.of([tokens for tokens, _ in pages])
        keys = [tuple(sorted(key_hash(key) for key, _ in page)) for _, page in pages]
        done = engrave(self.memory, context, steps=steps, until_exact=False, deadline=deadline, progress=progress)
        found = self._values(done.state, [key for key, _ in pairs], keys=keys, most=self.task.answer_length)
        answered = sum(self.task.text_of(best.tokens) == value for (_, best), (_, value) in zip(found, pairs, strict=True))
        return memory_of(
            done, context, model=self.memory.model, kind="records", rule=repr(self.memory.spec.rule), seed=seed, lossless=True,
            records=len(pairs), answered=answered, keys=keys,
        )  # fmt: skip

    def ask(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Answer:
        """The value of one key. `ab`, `ab:` and `?!ab:` are the same query.

        Raises:
            MismatchError: The memory was written with another model.
            TextError: The query is no key of the model's length and alphabet.
            SpecError: `decoding` is given: it was trained to give the most probable value.
        """
        return self.ask_many(memory, [query], max_tokens=max_tokens, decoding=decoding)[0]

    def ask_many(self, memory: Memory, queries: Sequence[str], *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> list[Answer]:
        """The values of several keys; a key of none of the records gets the most probable guess, and `known` is False."""
        if decoding != GREEDY:
            raise SpecError(f"{self.name} answers a key with its most probable value and in no other way; leave the settings of decoding out.")
        memory.belongs_to(self.memory.model)
        most = self.task.answer_length if max_tokens is None else at_least_one(max_tokens)
        asked, held = [self.task.key_of(query) for query in queries], [page.keys for page in memory.about.pages]
        return [
            Answer(query, self.task.text_of(best.tokens), sum(best.log_probabilities), page, known=key_hash(key) in held[page])
            for query, key, (page, best) in zip(queries, asked, self._values(memory.state, asked, keys=held, most=most), strict=True)
        ]

    def stream(self, memory: Memory, query: str, *, max_tokens: int | None = None, decoding: Decoding = GREEDY) -> Generator[str, None, Answer]:
        """The value of one key, in one piece."""
        answer = self.ask(memory, query, max_tokens=max_tokens, decoding=decoding)

        def pieces() -> Generator[str, None, Answer]:
            yield answer.text
            return answer

        return pieces()

    def recite(self, memory: Memory) -> Recital:
        """The records that the write head reproduces, one a line; where they are not the ones that were written, with all their marks.

        Training asks for values, so keys are hardly among what a memory keeps.
        """
        memory.belongs_to(self.memory.model)
        rows, exact = recited_pages(self.memory, memory)
        told = self.task.lines_of if exact else self.task.text_of
        return Recital("\n".join(map(told, rows)), exact, sum(map(len, rows)))

    def verify(self, memory: Memory, text: str, *, questions: Sequence[Query] | None = None, probes: int | None = None) -> Verified:
        """Ask every key of the records anew.

        Raises:
            MismatchError: The memory was written with another model.
            TextError: The text is no records, or not those that were written.
            SpecError: `questions` or `probes` is given: every key is asked.
        """
        memory.belongs_to(self.memory.model)
        if questions is not None or probes is not None:
            raise SpecError(f"`questions` or `probes` is given; {self.name} is asked every key, so leave them out.")
        pages = self.task.pages(text, most=self.pairs_a_page)
        same_text([token for tokens, _ in pages for token in tokens], memory.about)
        pairs = [pair for _, page in pages for pair in page]
        right = sum(answer.text == value for answer, (_, value) in zip(self.ask_many(memory, [key for key, _ in pairs]), pairs, strict=True))
        stored = memory.about.answered or 0
        return Verified(answered=right, shortfalls=(f"{right} queries are answered, and the file says {stored}",) if right < stored else ())

    def _values(
        self, state: Float[Tensor, "P M D"], asked: Sequence[str], *, keys: Sequence[Sequence[int]], most: int
    ) -> list[tuple[int, Continuation]]:
        rows = self.query_rows(asked)
        where = [next((page for page, held in enumerate(keys) if key_hash(key) in held), None) for key in asked]
        return ask_pages(lambda slots, query: self.memory.answer(slots, query, most=most, stop=self.task.ends), state, rows, where=where)

    def query_rows(self, keys: Sequence[str]) -> list[list[int]]:
        """Tokens of the query for each key."""
        return [self.task.query_of(key) for key in keys]
