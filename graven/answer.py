"""Answers from a memory: on which page they are, how sure the model is of them, and whether they come from the memory at all.

Whatever is asked, columns stand in one order: what a chat template opens with, the memory (or nothing, or the text), the query and what closes
the turn. No beginning-of-text token stands before a memory, which takes its place; where there is no memory, the tokenizer's own is there.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from graven.decoding import GREEDY, Decoding, Stream, text_before
from graven.errors import MismatchError, SpecError, TextError
from graven.lm.base import Continuation, score
from graven.lm.chat import halves, prints_the_date
from graven.lm.pretrained import Pretrained
from graven.memory.file import About, Memory
from graven.memory.objective import weights_of
from graven.tasks.base import Tokens

ANSWER_TOKENS = 64
ROWS_AT_ONCE = 64
# An answer counts as found in memory where the memory adds this much to it, in nats a token, and where it costs at most so many times the loss at
# which the text itself is recited. Below, by what was descended: shares of right answers that are missed so and of wrong ones that pass, on texts
# that the numbers were not chosen on (stories260K, experiments/gradmem_found.py, docs/log.md).
FOUND_GAIN = 0.005
FOUND_LOSS = 1.5
ERRORS = {"reconstruct": (0.04, 0.12), "continue": (0.36, 0.41), "distill": (0.62, 0.57)}

Found = tuple[int, Continuation]
Generate = Callable[[Float[Tensor, "B M D"], Tokens], list[Continuation]]


@dataclass(frozen=True)
class Answer:
    """What a model said from memory.

    Args:
        query: What was asked.
        text: The answer.
        log_probability: Natural logarithm of its probability, its end included, whatever way it was chosen.
        page: Page of the memory that it came from, counted from 0.
        known: False where it does not come from the memory: the memory holds records and the query is none of their keys; or the model would say
            the same without it, or is less sure of it than of the text (`rule_of`, which says how often that is wrong). The text is then a guess.
        log_probability_without: That of the same text without the memory; none for records, and where nothing would stand before the answer.
    """

    query: str
    text: str
    log_probability: float
    page: int = 0
    known: bool = True
    log_probability_without: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When an answer counts as found in a memory, and how often that is wrong.

    Args:
        gain: Least that the memory must add, in nats a token.
        cost: Most that the answer may cost with it, in nats a token; none where only the gain counts.
        missed: Share of right answers that are said not to be in memory; none where nobody measured it.
        passed: Share of wrong answers that are said to be.
    """

    gain: float
    cost: float | None
    missed: float | None
    passed: float | None

    def holds(self, said: Continuation, without: float | None) -> bool:
        """Whether an answer counts as found; `without` is the logarithm of its probability without the memory."""
        total, tokens = sum(said.log_probabilities), len(said.log_probabilities)
        return without is None or (total - without >= self.gain * tokens and (self.cost is None or -total <= self.cost * tokens))

    @property
    def errors(self) -> str:
        """For a person."""
        if self.missed is None:
            return "how often such a verdict is wrong was not measured for this objective"
        return f"in our tests this was said of {self.missed:.0%} of right answers, and not said of {self.passed:.0%} of wrong ones"


def rule_of(about: About) -> Rule:
    """The rule for a memory of a text.

    What stands in for a prompt is not recited, and an unsure answer behind it may be the prompt's own: only the gain counts there.
    """
    missed, passed = ERRORS.get(about.objective, (None, None))
    cost = None
    if about.losses and "distill" not in about.objective:  # without losses nothing was descended here: an imported memory, or no step
        cost = FOUND_LOSS * about.losses[-1] / sum(weights_of(about.objective).values())
    return Rule(gain=FOUND_GAIN, cost=cost, missed=missed, passed=passed)


def ask_pages(generate: Generate, prefixes: Float[Tensor, "P M D"], queries: Sequence[Sequence[int]], *, where: Sequence[int | None]) -> list[Found]:
    """Page and answer of each query: that of the page it is known to be on, or of all pages the answer most probable for each of its tokens."""
    found: list[list[Found]] = [[] for _ in queries]
    for page, slots in enumerate(prefixes):
        asked = [i for i, known in enumerate(where) if known in (None, page)]
        for first in range(0, len(asked), ROWS_AT_ONCE):
            part = asked[first : first + ROWS_AT_ONCE]
            answers = generate(slots.expand(len(part), -1, -1), Tokens.of([queries[i] for i in part]))
            for i, answer in zip(part, answers, strict=True):
                found[i].append((page, answer))
    return [max(answers, key=lambda answer: fmean(answer[1].log_probabilities)) for answers in found]


def at_least_one(max_tokens: int) -> int:
    """The number, where an answer can have so many tokens.

    Raises:
        SpecError: It cannot.
    """
    if max_tokens < 1:
        raise SpecError(f"`max_tokens` is {max_tokens}; it must be at least 1.")
    return max_tokens


def encode(model: Pretrained, text: str, *, what: str) -> list[int]:
    """Tokens of a text.

    Raises:
        TextError: It is no Unicode.
    """
    half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if half is not None:
        raise TextError(f"{what} has U+{ord(half):04X}, half of a surrogate pair, which is no character; give Unicode text.")
    return model.encode(text)


def encode_behind(model: Pretrained, ids: Sequence[int], behind: str, text: str, *, what: str) -> list[int]:
    """Tokens of a text as they follow another, whose tokens are given: some tokenizers begin every text with a blank of its own.

    Raises:
        TextError: It is no Unicode.
    """
    whole = encode(model, behind + text, what=what)
    return whole[len(ids) :] if whole[: len(ids)] == list(ids) else encode(model, text, what=what)


class Reader:
    """A language model and a memory of a text.

    Args:
        model: The one that wrote the memory.
        memory: Its pages are all asked; the answer that is most probable, a token, is given.
    Raises:
        MismatchError: The memory was written with another model, or with another chat template.
    """

    def __init__(self, model: Pretrained, memory: Memory):
        memory.belongs_to(model)
        self.model, self.slots, self.chat = model, memory.about.slots, memory.about.chat
        self.before = list(memory.about.before)
        self.rule = rule_of(memory.about)
        found = model.encode(halves(model.tokenizer, "", name=model.name)[0]) if self.chat else []
        if self.chat and found != self.before and not prints_the_date(model.tokenizer):
            raise MismatchError(
                f"this memory was written behind {len(self.before)} tokens of a chat template and that of {model.name} now puts {found} there; "
                "load the tokenizer that it was written with, or write the memory anew."
            )
        front = self._embed(self.before)
        state = memory.state.to(front.device, front.dtype)
        self.prefixes: Float[Tensor, "P M D"] = torch.cat([front.expand(len(state), -1, -1), state], dim=1)
        self.bare: Float[Tensor, "1 S D"] = self.behind([])

    def behind(self, ids: Sequence[int]) -> Float[Tensor, "1 S D"]:
        """What stands before a query where tokens stand in the place of the memory."""
        return self._embed([*self.before, *([] if self.chat else self.model.opening), *ids])

    def rows(self, queries: Sequence[str]) -> list[list[int]]:
        """Tokens of each query, as they stand behind the memory."""
        texts = [halves(self.model.tokenizer, query, name=self.model.name)[1] for query in queries] if self.chat else queries
        return [encode(self.model, text, what="the query") for text in texts]

    def answers(self, queries: Sequence[str], *, max_tokens: int | None, decoding: Decoding) -> list[Answer]:
        """`decoding.count` answers to each query, side by side, the same as one query at a time."""
        rows = self.rows(queries)
        most = self.most(rows, max_tokens, decoding)
        found: dict[int, list[Found]] = {}
        for length, part in groupby(sorted(range(len(rows)), key=lambda i: most[i]), key=lambda i: most[i]):
            group = list(part)
            found |= zip(group, self.found([rows[i] for i in group], most=length, decoding=decoding), strict=True)
        asked = [(i, said) for i in range(len(rows)) for said in found[i]]
        without = self.without([rows[i] for i, _ in asked], [said.whole for _, (_, said) in asked])
        return [self._answer(queries[i], *said, alone, decoding) for (i, said), alone in zip(asked, without, strict=True)]

    def stream(self, query: str, *, max_tokens: int | None, decoding: Decoding) -> Generator[str, None, Answer]:
        """The answer to one query, in pieces that make up its text; the `Answer` is what the generator returns.

        Raises:
            SpecError: Beams or several answers are asked for, which do not come one token after another.
        """
        if decoding.beams > 1 or decoding.count > 1:
            raise SpecError(f"`beams` is {decoding.beams} and `count` {decoding.count}; only one answer comes token by token, so leave both out.")
        rows = self.rows([query])
        return self._stream(query, rows, self.most(rows, max_tokens, decoding)[0], decoding)

    def _stream(self, query: str, rows: list[list[int]], most: int, decoding: Decoding) -> Generator[str, None, Answer]:
        page = self._page(rows, most=most, decoding=decoding)[0]
        said: list[Continuation] = []
        tokens: list[int] = []
        told = ""

        def run(stream: Stream) -> None:
            said.extend(self._generate(most, decoding, stream)(self.prefixes[page : page + 1], Tokens.of(rows)))

        for token in Stream(run):
            tokens += [] if token in self.model.stop else [token]
            ready = settled(self.model.decode(tokens), decoding.stop)
            if len(ready) > len(told):
                yield ready[len(told) :]
                told = ready
        answer = self._answer(query, page, said[0], self.without(rows, [said[0].whole])[0], decoding)
        if rest := answer.text[len(told) :]:
            yield rest
        return answer

    def found(self, rows: Sequence[Sequence[int]], *, most: int, decoding: Decoding = GREEDY) -> list[list[Found]]:
        """Page and answers for each row. Where an answer is not greedy, the page is that of the greedy one."""
        if decoding.greedy:
            return [[said] for said in self._ask(rows, self._generate(most, decoding), where=[None] * len(rows))]
        pages = self._page(rows, most=most, decoding=decoding)
        found: list[list[Found]] = [[] for _ in rows]
        for page in sorted(set(pages)):
            asked = [i for i, at in enumerate(pages) if at == page]
            several = self._generate(most, decoding)
            for first in range(0, len(asked), ROWS_AT_ONCE):
                part = asked[first : first + ROWS_AT_ONCE]
                said = several(self.prefixes[page].expand(len(part), -1, -1), Tokens.of([rows[i] for i in part]))
                for at, i in enumerate(part):
                    found[i] = [(page, one) for one in said[at * decoding.count : (at + 1) * decoding.count]]
        return found

    def without(self, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float | None]:
        """Logarithm of the probability of each answer where there is no memory; none where no column at all would stand before it."""
        asked = [i for i, row in enumerate(rows) if row or self.bare.shape[1]]
        found: list[float | None] = [None] * len(rows)
        for first in range(0, len(asked), ROWS_AT_ONCE):
            part = asked[first : first + ROWS_AT_ONCE]
            query = Tokens.of([rows[i] for i in part])
            for i, values in zip(part, score(self.model, self.bare.expand(len(part), -1, -1), query, [answers[i] for i in part]), strict=True):
                found[i] = sum(values)
        return found

    def most(self, rows: Sequence[Sequence[int]], asked: int | None, decoding: Decoding) -> list[int]:
        """Most tokens of each answer: those that were asked for, or as many of the default as the model has positions for.

        Raises:
            SpecError: It is below 1, or below the least tokens of an answer.
            TextError: Memory, query and answer are longer than the model.
        """
        most = [self._room(len(row), asked if asked is None else at_least_one(asked)) for row in rows]
        if most and decoding.min_tokens > min(most):
            raise SpecError(f"`min_tokens` is {decoding.min_tokens} and an answer has at most {min(most)} tokens; raise `max_tokens`, or lower it.")
        return most

    def _room(self, length: int, asked: int | None) -> int:
        room = self.model.positions
        if room is None:
            return ANSWER_TOKENS if asked is None else asked
        taken = self.prefixes.shape[1]
        most = max(1, min(ANSWER_TOKENS, room - taken - length)) if asked is None else asked
        if taken + length + most > room:
            template = f" behind {len(self.before)} tokens of the chat template" if self.before else ""
            raise TextError(
                f"{self.slots} slots{template}, a query of {length} tokens and an answer of up to {most} make {taken + length + most}, "
                f"and {self.model.name} has {room} positions; shorten the query or lower --max-tokens."
            )
        return most

    def _answer(self, query: str, page: int, said: Continuation, without: float | None, decoding: Decoding) -> Answer:
        text, total = text_before(self.model.decode(said.tokens), decoding.stop), sum(said.log_probabilities)
        return Answer(query, text, total, page, self.rule.holds(said, without), without)

    def _page(self, rows: Sequence[Sequence[int]], *, most: int, decoding: Decoding) -> list[int]:
        """Page of the greedy answer to each row."""
        if len(self.prefixes) == 1:
            return [0] * len(rows)
        return [page for page, _ in self._ask(rows, self._generate(most, decoding.plain), where=[None] * len(rows))]

    def _ask(self, rows: Sequence[Sequence[int]], generate: Generate, *, where: Sequence[int | None]) -> list[Found]:
        return ask_pages(generate, self.prefixes, rows, where=where)

    def _generate(self, most: int, decoding: Decoding, streamer: Stream | None = None) -> Generate:
        return lambda prefix, query: self.model.generate(prefix, query, most=most, stop=self.model.stop, decoding=decoding, streamer=streamer)

    @torch.no_grad()
    def _embed(self, ids: Sequence[int]) -> Float[Tensor, "1 S D"]:
        return self.model.embed(Tokens.of([ids]))


def settled(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that can be told: it does not change when more comes.

    >>> settled("one two thr", ["three"])
    'one two '
    """
    before = text_before(text, stop)
    if before != text:
        return before
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character
    held = max((n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])), default=0)
    return text[: len(text) - held]
