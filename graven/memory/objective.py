"""What a write descends: the loss of one memory in front of rows of tokens.

    reconstruct   the text itself:                            -mean log f(t_i | [M; t_<i])
    continue      windows of it, counted after their start:   -mean log f(t_i | [M; t_a..t_(i-1)]),  i >= a + cue
    distill       what the model says with the whole text in front of it:   mean KL(f(. | [C; q, y_<j]) || f(. | [M; q, y_<j]))

C is the text, q a query and y what the model itself answers to it behind C, most probable token after most probable token. All three are one
class, `Predict`: queries, the answers behind them, and what these are compared with. A user's own objective is anything with `loss`.

Sources: reconstruct, Kuratov et al. 2026, arXiv:2603.13875v2, equation 5 (a mean here, a sum there); distill, context distillation as in
Eyuboglu et al. 2025, arXiv:2506.06266 (self-study). continue: ours. Tests: tests/test_objective.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from graven.errors import SpecError
from graven.lm.base import LanguageModel, predictors
from graven.lm.cached import Followed
from graven.memory.base import Prefixed
from graven.tasks.base import Tokens

ROWS_A_STEP = 8
NAMES = ("reconstruct", "continue", "distill")


@runtime_checkable  # for the shape checks of the tests
class Objective(Protocol):
    """Something that a write can descend."""

    def loss(self, memory: Prefixed, state: Float[Tensor, "B M D"], *, step: int) -> Float[Tensor, ""]:
        """Loss of one memory, in nats; the same state and step give the same bits.

        Args:
            memory: Whose state it is.
            state: One row.
            step: Number of the step, from 0: which part of the data it looks at.
        """
        ...


@dataclass(frozen=True)
class Predict:
    """Answers that a memory should make the model give.

    Args:
        queries: Tokens behind the memory; there may be none.
        answers: Tokens behind each query, at least one; every one of them counts.
        teacher: Hidden states that predicted each answer with the whole text in front, [T, E]; the head turns them into logits where they are
            needed, which takes a hundredth of the room. Where left out, the tokens themselves are right.
        rows_a_step: Rows of each step; an epoch is a random order of all.
        seed: Of that order.
    Raises:
        SpecError: An answer has no token, or the parts differ in length.
    """

    queries: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    teacher: Sequence[Tensor] | None = None
    rows_a_step: int = ROWS_A_STEP
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.answers or not all(self.answers) or len(self.answers) != len(self.queries):
            raise SpecError(f"there are {len(self.queries)} queries and {len(self.answers)} answers; give one of each for the other, none empty.")
        if self.teacher is not None and [len(states) for states in self.teacher] != [len(answer) for answer in self.answers]:
            raise SpecError("`teacher` has other lengths than `answers`; give one hidden state for each token of an answer.")

    def columns_a_step(self, *, prefix: int) -> float:
        """Columns that a step runs, in the mean over an epoch, with so many before each row."""
        total = sum(prefix + len(query) + len(answer) for query, answer in zip(self.queries, self.answers, strict=True))
        return total / math.ceil(len(self.answers) / self.rows_a_step)

    def loss(self, memory: Prefixed, state: Float[Tensor, "B M D"], *, step: int) -> Float[Tensor, ""]:
        return self.losses(memory, state, self.chosen(step))[0].mean()

    def losses(self, memory: Prefixed, state: Float[Tensor, "B M D"], chosen: Sequence[int]) -> tuple[Float[Tensor, "S"], Bool[Tensor, "S"]]:
        """Loss of each token of some answers, and whether its most probable prediction is the one of the teacher, or the token."""
        queries, answers = ([part[i] for i in chosen] for part in (self.queries, self.answers))
        prefix = memory.prefix(state, control=memory.read_control).expand(len(queries), -1, -1)
        said = log_probabilities(memory.model, torch.cat(predictors(memory.model, prefix, Tokens.of(queries), answers)))
        if self.teacher is None:
            wanted = torch.tensor(list(chain(*answers)), device=said.device)
            return F.nll_loss(said, wanted, reduction="none"), said.argmax(-1) == wanted
        with torch.no_grad():
            taught = log_probabilities(memory.model, torch.cat([self.teacher[i] for i in chosen]))
        return (taught.exp() * (taught - said)).sum(-1), said.argmax(-1) == taught.argmax(-1)

    def chosen(self, step: int) -> list[int]:
        """Rows of a step."""
        count = len(self.answers)
        if self.rows_a_step >= count:
            return list(range(count))
        steps = math.ceil(count / self.rows_a_step)
        epoch, at = divmod(step, steps)
        order = torch.randperm(count, generator=torch.Generator().manual_seed((self.seed << 20) + epoch)).tolist()
        return order[at * self.rows_a_step : (at + 1) * self.rows_a_step]


@dataclass(frozen=True)
class Weighted:
    """A sum of objectives.

    Args:
        parts: Weight and objective; weights above 0.
    Raises:
        SpecError: There is no part, or a weight is not above 0.
    """

    parts: tuple[tuple[float, Objective], ...]

    def __post_init__(self) -> None:
        if not self.parts or not all(weight > 0 and math.isfinite(weight) for weight, _ in self.parts):
            raise SpecError(f"the weights are {[weight for weight, _ in self.parts]}; each must be above 0, and there must be one.")

    def loss(self, memory: Prefixed, state: Float[Tensor, "B M D"], *, step: int) -> Float[Tensor, ""]:
        return torch.stack([weight * part.loss(memory, state, step=step) for weight, part in self.parts]).sum()


def reconstruct(ids: Sequence[int]) -> Predict:
    """The text itself, from its first token on."""
    return Predict([[]], [ids])


def continuations(ids: Sequence[int], *, cue: int = 4, length: int = 16, seed: int = 0) -> Predict:
    """Windows of the text that start anywhere: a few tokens are given, the ones after them count.

    Args:
        ids: At least one token more than `cue`.
        cue: Tokens given, at least 1.
        length: Most tokens that count in each window.
        seed: Of the order of windows.
    Raises:
        SpecError: The text is too short for the cue, or a number is out of range.
    """
    if cue < 1 or length < 1:
        raise SpecError(f"`cue` is {cue} and `length` {length}; both must be at least 1.")
    if len(ids) <= cue:
        raise SpecError(f"the text has {len(ids)} tokens, and a cue of {cue} leaves none to continue with; give a longer text, or reconstruct it.")
    starts = range(len(ids) - cue)
    return Predict([ids[at : at + cue] for at in starts], [ids[at + cue : at + cue + length] for at in starts], seed=seed)


def distil(queries: Sequence[Sequence[int]], followed: Sequence[Followed], *, seed: int = 0) -> Predict:
    """What the model said behind the whole text, to each query: every token of it is predicted, after the query and the tokens before it."""
    return Predict(queries, [said.tokens for said in followed], [said.hidden for said in followed], seed=seed)


def log_probabilities(model: LanguageModel, hidden: Float[Tensor, "S E"]) -> Float[Tensor, "S A"]:
    """Of the next token, in float32, or float64 where the model is."""
    logits = model.logits(hidden)
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def sum_of(weights: Mapping[str, float], ids: list[int], *, seed: int = 0) -> Objective:
    """The objectives that need nothing but the text, each with its weight."""
    return Weighted(tuple((weight, part_of(name, ids, seed=seed)) for name, weight in weights.items()))


def part_of(name: str, ids: Sequence[int], *, seed: int = 0) -> Predict:
    """One of the objectives that need nothing but the text."""
    return reconstruct(ids) if name == "reconstruct" else continuations(ids, seed=seed)


def weights_of(text: str) -> dict[str, float]:
    """Names and weights of objectives: `distill`, or `reconstruct=1,distill=0.5`; a weight that is left out is 1.

    Raises:
        SpecError: A name is unknown or repeated, or a weight is not a number above 0.

    >>> weights_of("reconstruct,distill=0.5")
    {'reconstruct': 1.0, 'distill': 0.5}
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in NAMES or name in weights:
            again = "named twice" if name in weights else "unknown"
            raise SpecError(f"the objective {name!r} is {again}; give {', '.join(NAMES)}, each at most once, as in reconstruct=1,distill=0.5.")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError as error:
            raise SpecError(f"the weight of {name} is {number!r}; give a number above 0.") from error
        if not (weights[name] > 0 and math.isfinite(weights[name])):
            raise SpecError(f"the weight of {name} is {number}; give a number above 0.")
    return weights
