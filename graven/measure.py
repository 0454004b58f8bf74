"""A memory and a task in, numbers out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from graven.errors import SpecError
from graven.memory.gradient import GradMem
from graven.tasks.base import Episode, Tokens
from graven.tasks.retrieval import Retrieval

CONTEXTS_AT_ONCE = 10  # more at once leave the cache


@dataclass(frozen=True)
class Row:
    """Exact match of one memory at one size of context and one number of write steps.

    Args:
        pairs: Pairs in a context, N.
        steps: Gradient steps of the write, K.
        seed: Of the contexts, drawn fresh for this measurement.
        contexts: How many; every key of each is asked.
        exact_match: Share of queries whose whole value is the most probable one at each of its tokens.
        standard_error: Of `exact_match`, over contexts.
        write_loss: Mean reconstruction loss of the memory that was read.
        value_loss: The same over the value tokens alone, each pair counted once.
    """

    pairs: int
    steps: int
    seed: int
    contexts: int
    exact_match: float
    standard_error: float
    write_loss: float
    value_loss: float


def read_episode(memory: GradMem, state: Float[Tensor, "B M D"], episode: Episode) -> Float[Tensor, "B Q S A"]:
    """Logits of every target token of every query, each read on its own from the one memory of its row; S target tokens."""
    batch, queries, asked = episode.query.ids.shape
    length = episode.target.ids.shape[-1]
    whole = Tokens(
        torch.cat([episode.query.ids, episode.target.ids[..., :-1]], -1), torch.cat([episode.query.mask, episode.target.mask[..., :-1]], -1)
    )
    logits = memory.read(state.repeat_interleave(queries, 0), whole.flat())
    return logits[:, asked : asked + length].view(batch, queries, length, -1)


def right(logits: Float[Tensor, "B Q S A"], episode: Episode) -> Bool[Tensor, "B Q"]:
    """Queries whose answer is right, token by token, given the right tokens before."""
    return (logits.argmax(-1) == episode.target.ids)[..., : episode.answer].all(-1)


@torch.no_grad()
def exact_match(memory: GradMem, task: Retrieval, *, pairs: int, steps: Sequence[int], contexts: int, seed: int) -> Iterator[Row]:
    """One row for each number of steps; a write of more steps continues that of fewer, so the most steps are the cost.

    Raises:
        SpecError: There is nothing to measure, or a number of steps is negative.
    Source: ours; the measure is that of Kuratov et al. 2026, arXiv:2603.13875v2, table 1.
    """
    wanted = sorted(set(steps))
    if contexts < 1 or pairs < 1 or not wanted or wanted[0] < 0:
        raise SpecError(
            f"`pairs` is {pairs}, `contexts` is {contexts} and `steps` is {wanted}; ask for at least one pair, one context and one number of steps."
        )
    generator = torch.Generator().manual_seed(seed)
    shares: dict[int, list[float]] = {k: [] for k in wanted}
    losses: dict[int, list[float]] = {k: [] for k in wanted}
    value_losses: dict[int, list[float]] = {k: [] for k in wanted}
    for first in range(0, contexts, CONTEXTS_AT_ONCE):
        episode = task.sample(min(CONTEXTS_AT_ONCE, contexts - first), pairs=pairs, generator=generator)
        state, moments = memory.start(len(episode.context.ids)), None
        prepared = memory.prepare(state, episode.context)
        for k in range(wanted[-1] + 1):
            step = memory.step(state, prepared, moments, taken=k)
            if k in shares:
                shares[k] += right(read_episode(memory, state, episode), episode).float().mean(-1).tolist()
                losses[k] += step.loss.tolist()
                value_losses[k] += ((step.token_losses * episode.values).sum(-1) / episode.values.sum(-1)).tolist()
            state, moments = step.state, step.moments
    for k in wanted:
        share = torch.tensor(shares[k], dtype=torch.float64)
        yield Row(
            pairs=pairs,
            steps=k,
            seed=seed,
            contexts=contexts,
            exact_match=float(share.mean()),
            standard_error=float(share.std()) / math.sqrt(contexts) if contexts > 1 else math.nan,
            write_loss=sum(losses[k]) / contexts,
            value_loss=sum(value_losses[k]) / contexts,
        )
