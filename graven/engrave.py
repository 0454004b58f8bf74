"""Write token rows into memory until they are reproduced exactly, or until steps or time run out.

A row is reproduced exactly when the model, running freely from the memory, gives back every token. As long as each most probable token is the
right one, running freely and predicting the next true token are the same computation, so the length of the recited prefix is the place of
the first teacher-forced miss; a row without a miss is then run freely once, to be sure of it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from graven.errors import ModelError, Outcome
from graven.memory.gradient import GradMem, Moments, Prepared
from graven.memory.objective import Objective, reconstruct
from graven.tasks.base import Tokens

ROWS_AT_ONCE = 8
DIVERGED = 2.0  # a loss of more than this many times the lowest so far, and a nat, will not come back at the same rate


@dataclass(frozen=True)
class Engraved:
    """What a write gave.

    Args:
        state: One row of slots for each row of the context.
        losses: Mean over rows before each step.
        token_accuracy: Share of tokens that are the most probable one given the true tokens before them.
        recited: For each row, length of the prefix that is reproduced exactly when the model runs freely.
        outcome: How it ended.
        seconds: Wall clock.
    """

    state: Float[Tensor, "P M D"]
    losses: list[float]
    token_accuracy: float
    recited: list[int]
    outcome: Outcome
    seconds: float


@dataclass
class Row:
    """One row of the context and its best state so far; the first one is judged before any step."""

    state: Float[Tensor, "M D"]
    hits: Bool[Tensor, "T"]
    length: int
    kept: float = math.inf  # loss of that state
    loss: float = math.inf  # of the newest state
    first: float = math.inf
    lowest: float = math.inf
    exact: bool = False
    diverged: bool = False

    @property
    def recited(self) -> int:
        """Tokens before the first miss."""
        missed = (~self.hits[: self.length]).nonzero()
        return int(missed[0]) if len(missed) else self.length


def engrave(
    memory: GradMem,
    context: Tokens,
    *,
    steps: int,
    until_exact: bool,
    deadline: float | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> Engraved:
    """Write each row of the context into a memory of its own, rows side by side.

    Args:
        memory: Its start state is where each row starts.
        context: [P, T].
        steps: Most steps for each row.
        until_exact: A row stops when it is reproduced exactly and keeps its best state; otherwise it takes every step and keeps the last.
        deadline: Seconds after which no further step is taken.
        progress: Called at each step with its number, the mean loss before it and the token accuracy of what is kept. The number starts
            from 1 again for each group of rows that fits into a batch.
    Raises:
        ModelError: The loss of the start state is not finite.
    Source: ours; tests/test_engrave.py.
    """
    began = time.monotonic()
    context = context.aligned()
    groups = [Tokens(context.ids[i : i + ROWS_AT_ONCE], context.mask[i : i + ROWS_AT_ONCE]) for i in range(0, len(context.ids), ROWS_AT_ONCE)]
    rows: list[Row] = []
    curves: list[list[float]] = []
    late = False
    for done, group in enumerate(groups):
        left = None if deadline is None else max(0.0, deadline - (time.monotonic() - began)) / (len(groups) - done)
        part, curve, timed_out = _group(memory, group, steps=steps, until_exact=until_exact, seconds=left, progress=progress)
        rows += part
        curves.append(curve)
        late |= timed_out
    return Engraved(
        state=torch.stack([row.state for row in rows]),
        losses=_mean(curves, sizes=[len(group.ids) for group in groups])[:-1],  # the last is that of the end
        token_accuracy=sum(int(row.hits.sum()) for row in rows) / max(1, sum(row.length for row in rows)),
        recited=[row.recited for row in rows],
        outcome=_outcome(rows, until_exact=until_exact, late=late),
        seconds=time.monotonic() - began,
    )


def _mean(curves: list[list[float]], *, sizes: list[int]) -> list[float]:
    """One curve of all groups, each counted by its rows; a group that is done keeps its last loss."""
    most = max(len(curve) for curve in curves)
    full = [curve + curve[-1:] * (most - len(curve)) for curve in curves]
    return [sum(size * loss for size, loss in zip(sizes, at, strict=True)) / sum(sizes) for at in zip(*full, strict=True)]


@torch.no_grad()
def _group(
    memory: GradMem,
    context: Tokens,
    *,
    steps: int,
    until_exact: bool,
    seconds: float | None,
    progress: Callable[[int, float, float], None] | None,
) -> tuple[list[Row], list[float], bool]:
    """Rows that fit into one batch, their mean loss before each step and at the end, and whether time ran out. Rows that are done leave the batch."""
    began = time.monotonic()
    state = memory.start(len(context.ids))
    prepared = memory.prepare(state, context)
    rows = [Row(state[i].clone(), torch.zeros_like(context.mask[i]), int(n)) for i, n in enumerate(context.lengths)]
    going = torch.arange(len(rows))
    moments: Moments | None = None
    curve: list[float] = []
    for taken in range(steps + 1):
        step = memory.step(state, prepared, moments, taken=taken)
        for at, i in enumerate(going.tolist()):
            new = _judge(rows[i], state[at], step.loss[at], step.hits[at], keep_best=until_exact)
            if until_exact and new and rows[i].recited == rows[i].length:
                rows[i].exact = memory.recite(state[at : at + 1], [rows[i].length])[0] == context.row(i)
        curve.append(sum(row.loss for row in rows) / len(rows))
        keep = torch.tensor([not (rows[i].exact or rows[i].diverged) for i in going.tolist()], dtype=torch.bool)
        if taken == steps or not keep.any():
            break
        if seconds is not None and time.monotonic() - began >= seconds:
            return rows, curve, True
        if progress is not None:
            progress(taken + 1, curve[-1], sum(int(row.hits.sum()) for row in rows) / max(1, sum(row.length for row in rows)))
        going, state, moments, prepared = going[keep], step.state[keep], step.moments.kept(keep), _context_kept(prepared, keep)
    return rows, curve, False


def _judge(row: Row, state: Tensor, loss: Tensor, hits: Tensor, *, keep_best: bool) -> bool:
    """Take note of the newest state; True where it is the one to keep."""
    value = float(loss)
    if row.first == math.inf:
        if not math.isfinite(value):
            raise ModelError(f"the loss of the start state is {value}; the model's weights or embeddings are not finite. Fetch the model again.")
        row.first = value
    row.lowest = min(row.lowest, value)
    row.diverged = not math.isfinite(value) or (keep_best and value > DIVERGED * max(row.lowest, 1.0) + 1.0)
    new = not row.diverged and (not keep_best or (int(hits.sum()), -value) > (int(row.hits.sum()), -row.kept))
    if new:
        row.state, row.hits, row.kept = state.clone(), hits, value
    row.loss = row.kept if row.diverged else value
    return new


def _context_kept(context: Prepared, keep: Tensor) -> Prepared:
    return Prepared(Tokens(context.tokens.ids[keep], context.tokens.mask[keep]), context.embedded[keep], context.weight[keep])


def _outcome(rows: list[Row], *, until_exact: bool, late: bool) -> Outcome:
    if until_exact and all(row.exact for row in rows):
        return Outcome.EXACT
    if any(row.diverged for row in rows):
        return Outcome.DIVERGED
    if late:
        return Outcome.DEADLINE if until_exact else Outcome.LATE
    if not until_exact:
        return Outcome.DONE
    # a model that normalises its input bounds the loss however large the state has grown
    return Outcome.DIVERGED if any(row.loss > row.first for row in rows if not row.exact) else Outcome.STEPS


@dataclass(frozen=True)
class Pursued:
    """What descending an objective gave.

    Args:
        state: One row.
        losses: Of each step, before it, in nats.
        outcome: How it ended.
        seconds: Wall clock.
    """

    state: Float[Tensor, "B M D"]
    losses: list[float]
    outcome: Outcome
    seconds: float


def pursue(
    memory: GradMem,
    objective: Objective,
    *,
    start: Float[Tensor, "B M D"],
    steps: int,
    until: tuple[float, int] | None = None,
    deadline: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Pursued:
    """Descend any objective from a start state, at a rate that falls to nothing in a straight line.

    An objective looks at another part of its data in each step, so its losses are no measure of a state and the last state is the best guess;
    the falling rate takes the noise of the parts out of it. Where the loss diverges, the state before the lowest loss is kept.

    Args:
        memory: Its rule makes the steps.
        start: One row.
        steps: How many at most.
        until: A loss in nats and a number of steps: no further step is taken once the mean loss of the last so many is below it.
        deadline: Seconds after which no further step is taken.
        progress: Called before each step with its number and its loss.
    Raises:
        ModelError: The loss of the start state is not finite.
    Source: ours; tests/test_engrave.py.
    """
    began = time.monotonic()
    state, best, moments = start.detach(), start.detach(), None
    losses: list[float] = []
    outcome = Outcome.DONE
    for taken in range(steps):
        if until is not None and len(losses) >= until[1] and sum(losses[-until[1] :]) < until[0] * until[1]:
            outcome = Outcome.CLOSE
            break
        if deadline is not None and time.monotonic() - began >= deadline:
            outcome = Outcome.LATE
            break
        with torch.enable_grad():
            here = state.detach().requires_grad_()
            loss = objective.loss(memory, here, step=taken)
            (gradient,) = torch.autograd.grad(loss, here)
        value = float(loss.detach())
        if not losses and not math.isfinite(value):
            raise ModelError(f"the loss of the start state is {value}; the model's weights or embeddings are not finite. Fetch the model again.")
        if not math.isfinite(value) or (losses and value > DIVERGED * max(losses[0], 1.0) + 1.0):
            state, outcome = best, Outcome.DIVERGED
            break
        if not losses or value <= min(losses):
            best = state
        losses.append(value)
        if progress is not None:
            progress(taken + 1, value)
        with torch.no_grad():
            new, moments = memory.update(state, gradient, moments, taken=taken)
            state = state.lerp(new, 1 - taken / steps)
    return Pursued(state, losses, outcome, time.monotonic() - began)


def engrave_objective(
    memory: GradMem,
    context: Tokens,
    objective: Callable[[list[int]], Objective],
    *,
    steps: int,
    deadline: float | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> Engraved:
    """Descend an objective of each row of the context, one row after the other, each with its share of the time.

    Args:
        memory: Its start state is where each row starts.
        context: [P, T].
        objective: Of the tokens of one row.
        steps: Steps of each row.
        deadline: Seconds after which no further step is taken.
        progress: Called at each step with its number, its loss, and not a number for the accuracy that nobody measured.
    Raises:
        ModelError: The loss of the start state is not finite.
    """
    began = time.monotonic()
    rows = [context.row(i) for i in range(len(context.ids))]
    call = None if progress is None else lambda step, loss: progress(step, loss, math.nan)
    done: list[Pursued] = []
    for taken, row in enumerate(rows):
        left = None if deadline is None else max(0.0, deadline - (time.monotonic() - began)) / (len(rows) - taken)
        done.append(pursue(memory, objective(row), start=memory.start(1), steps=steps, deadline=left, progress=call))
    return engraved_of(memory, done, rows, seconds=time.monotonic() - began)


def engraved_of(memory: GradMem, done: list[Pursued], rows: list[list[int]], *, seconds: float) -> Engraved:
    """What descending an objective of each row gave, and how much of the rows themselves it holds."""
    hits = [hits_of(memory, one.state, row) for one, row in zip(done, rows, strict=True)]
    curves = [one.losses for one in done if one.losses]
    outcomes = {one.outcome for one in done}
    return Engraved(
        state=torch.cat([one.state for one in done]),
        losses=_mean(curves, sizes=[1] * len(curves)) if curves else [],
        token_accuracy=sum(sum(own) for own in hits) / max(1, sum(map(len, hits))),
        recited=[own.index(False) if False in own else len(own) for own in hits],
        outcome=next((kind for kind in (Outcome.DIVERGED, Outcome.LATE, Outcome.CLOSE) if kind in outcomes), Outcome.DONE),
        seconds=seconds,
    )


@torch.no_grad()
def hits_of(memory: GradMem, state: Float[Tensor, "B M D"], row: list[int]) -> list[bool]:
    """For each token of a row whether it is the most probable one behind the memory and the tokens before it.

    As long as all are, the model running freely gives the same tokens, so what comes before the first miss is what it recites.
    """
    return reconstruct(row).losses(memory, state, [0])[1].tolist()
