"""A memory and a task in, numbers out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from graven.errors import SpecError
from graven.memory.base import Memory, S, map_state, written
from graven.memory.gradient import GradMem
from graven.tasks.base import Episode, Tokens
from graven.tasks.phonebook import Phonebook
from graven.tasks.retrieval import Retrieval
from graven.tasks.stories import Stories

CONTEXTS_AT_ONCE = 10  # more at once leave the cache


@dataclass(frozen=True)
class Row:
    """Exact match of one memory at one size of context and one number of write steps.

    Args:
        pairs: Pairs in a context, N.
        steps: Steps of the write, K; None of a memory that takes none.
        seed: Of the contexts, drawn fresh for this measurement.
        contexts: How many; every key of each is asked.
        exact_match: Share of queries whose whole value is the most probable one at each of its tokens.
        standard_error: Of `exact_match`, over contexts.
        write_loss: Mean reconstruction loss of the memory that was read; None of a memory that reconstructs nothing.
        value_loss: The same over the value tokens alone, each pair counted once.
    """

    pairs: int
    steps: int | None
    seed: int
    contexts: int
    exact_match: float
    standard_error: float
    write_loss: float | None
    value_loss: float | None


def read_episode(memory: Memory[S], state: S, episode: Episode) -> Float[Tensor, "B Q S A"]:
    """Logits of every target token of every query, each read on its own from the one memory of its row; S target tokens."""
    batch, queries, asked = episode.query.ids.shape
    length = episode.target.ids.shape[-1]
    whole = Tokens(
        torch.cat([episode.query.ids, episode.target.ids[..., :-1]], -1), torch.cat([episode.query.mask, episode.target.mask[..., :-1]], -1)
    )
    logits = memory.read(map_state(lambda x: x.repeat_interleave(queries, 0), state), whole.flat())
    return logits[:, asked : asked + length].view(batch, queries, length, -1)


def right(logits: Float[Tensor, "B Q S A"], episode: Episode) -> Bool[Tensor, "B Q"]:
    """Queries whose answer is right, token by token, given the right tokens before."""
    return ((logits.argmax(-1) == episode.target.ids) | ~episode.target.mask)[..., : episode.answer].all(-1)


@torch.no_grad()
def exact_match(
    memory: Memory[Any], task: Retrieval | Phonebook | Stories, *, pairs: int, steps: Sequence[int] | None = None, contexts: int, seed: int
) -> Iterator[Row]:
    """One row for each number of steps, those of the spec where left out, or one row of a memory that takes none; a write of more steps continues
    that of fewer.

    Raises:
        SpecError: There is nothing to measure, or a number of steps is negative.
    Source: ours; the measure is that of Kuratov et al. 2026, arXiv:2603.13875v2, table 1.
    """
    if steps is None and isinstance(memory, GradMem):
        steps = [memory.spec.steps]
    wanted = None if steps is None else sorted(set(steps))
    if contexts < 1 or pairs < 1 or (wanted is not None and (not wanted or wanted[0] < 0)):
        raise SpecError(
            f"`pairs` is {pairs}, `contexts` is {contexts} and `steps` is {wanted}; ask for at least one pair, one context and one number of steps."
        )
    generator = torch.Generator().manual_seed(seed)
    found: dict[int | None, list[Found]] = {}
    for first in range(0, contexts, CONTEXTS_AT_ONCE):
        episode = task.sample(min(CONTEXTS_AT_ONCE, contexts - first), pairs=pairs, generator=generator)
        for k, part in _states(memory, episode, wanted):
            found.setdefault(k, []).append(part)
    for k, parts in found.items():
        share = torch.cat([part.share for part in parts]).double()
        yield Row(
            pairs=pairs,
            steps=k,
            seed=seed,
            contexts=contexts,
            exact_match=float(share.mean()),
            standard_error=float(share.std()) / math.sqrt(contexts) if contexts > 1 else math.nan,
            write_loss=_mean([part.write_loss for part in parts], contexts),
            value_loss=_mean([part.value_loss for part in parts], contexts),
        )


@dataclass(frozen=True)
class Found:
    """Of each context of one batch: share of the queries that are right, and the losses where there are any."""

    share: Float[Tensor, "B"]
    write_loss: Float[Tensor, "B"] | None = None
    value_loss: Float[Tensor, "B"] | None = None


def _mean(parts: Sequence[Tensor | None], count: int) -> float | None:
    return sum(float(part.double().sum()) for part in parts if part is not None) / count if parts[0] is not None else None


def _states(memory: Memory[Any], episode: Episode, wanted: Sequence[int] | None) -> Iterator[tuple[int | None, Found]]:
    """What is found after each number of steps."""
    state = memory.start(len(episode.context.ids))
    if isinstance(memory, GradMem):
        assert wanted is not None
        moments, prepared = None, memory.prepare(state, episode.context)
        for k in range(wanted[-1] + 1):
            step = memory.step(state, prepared, moments, taken=k)
            if k in wanted:
                values = (step.token_losses * episode.values).sum(-1) / episode.values.sum(-1)
                yield k, Found(_share(memory, state, episode), step.loss, values)
            state, moments = step.state, step.moments
        return
    for steps in [None] if wanted is None else wanted:  # forward writes do not continue each other: each number of them begins anew
        yield steps, Found(_share(memory, written(memory, state, episode.context, steps=steps), episode))


def _share(memory: Memory[S], state: S, episode: Episode) -> Float[Tensor, "B"]:
    return right(read_episode(memory, state, episode), episode).float().mean(-1)
