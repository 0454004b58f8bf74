"""ARMT: an associative matrix in every layer of a decoder, written by the delta rule from a few memory tokens behind each segment of a context.

    phi(x)  = concat over j = 1 .. nu of c * roll(c, j),   c = [relu(x), relu(-x)]                   (DPFP: features of degree 2, none below 0)
    read    h <- h + phi(h W_q) A / (z . phi(h W_q) + eps)                                          before every layer, all tokens
    write   A += sum_i b_i p_i (v_i - p_i A / (z . p_i + eps))^T,   z += sum_i gamma_i p_i           behind every layer, memory tokens only
            p_i = phi(x_i W_k),   v_i = x_i W_v,   b_i = sigmoid(x_i w_b + c),   gamma_i = clip(1 - z . p_i / |p_i|^2, 0, 1)

All memory tokens of a segment write at once, against the matrix before it; the layers see what was written from the next segment on. gamma keeps the
normaliser from counting a key twice and has no gradient.

Source: Rodkin et al. 2024, arXiv:2407.04841, equations 3 to 8, and their public code. Differs: the base decoder is ours; a learned vector stands
before a query, so that there is a prediction after none of its tokens; where nothing was written a read is 0, which needs no case of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from graven.errors import SpecError
from graven.layers.base import at_least_one
from graven.layers.decoder import angles
from graven.lm.small import Small
from graven.memory.base import kept_where_empty, rows_seen, wide
from graven.shapes import check
from graven.tasks.base import Tokens, front, rows_at

EPSILON = 1e-5  # in every quotient
Matrices = tuple[Float[Tensor, "B L F D"], Float[Tensor, "B L F"]]


@dataclass(frozen=True, kw_only=True)
class ARMTSpec:
    """What an `ARMT` is.

    Args:
        slots: Memory tokens behind a segment, M; the same ones behind each.
        features: Width of keys and queries before the feature map, at least 2: of one number every product is 0. F = 2 * order * features after it.
        segment: Tokens of a segment; the last one of a context may be shorter.
        order: nu, products that each feature is in.
        correction: Keys that were there before do not count in the normaliser again; without it gamma is 1.
        value_start: Spread of W_v at the start, times the root of the width. Ours: at 0, as in the public code, the first gradient reaches W_v alone,
            and training begins slowly (docs/log.md).
    Raises:
        SpecError: A number is below 1, `features` below 2, or `value_start` negative.
    """

    slots: int
    features: int
    segment: int
    order: int = 3
    correction: bool = True
    value_start: float = 0.0
    kind: Literal["armt"] = "armt"

    def __post_init__(self) -> None:
        at_least_one(slots=self.slots, segment=self.segment, order=self.order)
        if self.features < 2:
            raise SpecError(f"`features` is {self.features}; it must be at least 2: products of the parts of one number are always 0.")
        if not self.value_start >= 0:
            raise SpecError(f"`value_start` is {self.value_start}; it must be at least 0.")


class ARMT(nn.Module):
    """The memory. `model` is a part of it and trains with it. Its state is the matrices A and the normalisers z of all layers, 0 at the start.

    Args:
        model: The decoder whose layers get a matrix each.
        spec: What to build.
        seed: Of the weights that are not the model's.
    """

    def __init__(self, model: Small, spec: ARMTSpec, *, seed: int = 0):
        super().__init__()
        self.model, self.spec = model, spec
        generator = torch.Generator().manual_seed(seed)
        scale = model.embedding_scale

        self.slots = nn.Parameter(scale * torch.randn(spec.slots, model.width, generator=generator))
        self.begin = nn.Parameter(scale * torch.randn(1, model.width, generator=generator))
        self.associations = nn.ModuleList(Association(model.width, spec, generator) for _ in model.decoder.blocks)

    def start(self, batch: int) -> Matrices:
        """Nothing written: zeros."""
        shape, begin = (batch, len(self.associations), 2 * self.spec.order * self.spec.features), wide(self.begin)
        return begin.new_zeros(*shape, self.model.width), begin.new_zeros(shape)

    def write(self, state: Matrices, context: Tokens) -> Matrices:
        """The matrices after every segment of the context; segments are counted from the first real token of each row.

        Writing in two parts is writing once only where the first part ends with a segment.
        Raises:
            ShapeError: State and context differ in rows.
        """
        check(context=(context.ids, "B T"), A=(state[0], f"B L F {self.model.width}"))
        tokens = context.aligned()
        embedded = self.model.embed(tokens)
        for first in range(0, tokens.ids.shape[1], self.spec.segment):
            segment = slice(first, first + self.spec.segment)
            state = self._write_segment(state, embedded[:, segment], Tokens(tokens.ids[:, segment], tokens.mask[:, segment]))
        return state

    def read(self, state: Matrices, query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query; the matrices stay as they are.

        Raises:
            ShapeError: State and query differ in rows.
        """
        check(query=(query.ids, "B T"), A=(state[0], f"B L F {self.model.width}"))
        embedded = self.model.embed(query.aligned())
        hidden, _ = self._run(torch.cat([self.begin.expand(len(embedded), -1, -1), embedded], 1), state, at=None)
        return self.model.logits(rows_seen(hidden, query))

    def _write_segment(self, state: Matrices, embedded: Float[Tensor, "B T D"], tokens: Tokens) -> Matrices:
        """The slots stand right behind the tokens of each row, and what follows them sees them in vain."""
        slots, lengths = self.spec.slots, tokens.lengths
        x = torch.cat([embedded, self.slots.expand(len(embedded), -1, -1)], 1)
        order = front(torch.cat([tokens.mask, tokens.mask.new_ones(len(x), slots)], 1))
        at = lengths[:, None] + torch.arange(slots, device=x.device)
        _, new = self._run(rows_at(x, order), state, at=at)
        return kept_where_empty(tokens, old=state, new=new)

    def _run(self, x: Float[Tensor, "B S D"], state: Matrices, *, at: Int[Tensor, "B M"] | None) -> tuple[Float[Tensor, "B S D"], Matrices]:
        """Every layer behind its read; what the columns `at` write."""
        decoder = self.model.decoder
        rotation = angles(torch.arange(x.shape[1], device=x.device)[None], decoder.spec.width // decoder.spec.heads, x.dtype)
        fresh, ends = (state[1] == 0).all(-1), []
        for layer, (block, association) in enumerate(zip(decoder.blocks, self.associations, strict=True)):
            assert isinstance(association, Association)
            matrix, normaliser = (part[:, layer] for part in state)
            x = x + recall(association.query(x), matrix, normaliser)
            x, _ = block(x, rotation, None)
            if at is not None:
                ends.append(association.write(rows_at(x, at), matrix, normaliser, fresh=fresh[:, layer]))
        return decoder.norm(x), stacked(ends) if ends else state


class Association(nn.Module):
    """The maps of one layer. Where W_v starts at 0, nothing is written at the start, and the memory is its base model."""

    def __init__(self, width: int, spec: ARMTSpec, generator: torch.Generator):
        super().__init__()
        self.spec = spec
        self.q, self.k = (nn.Linear(width, spec.features, bias=False) for _ in range(2))
        self.v = nn.Linear(width, width, bias=False)
        self.strength = nn.Linear(width, 1)
        nn.init.zeros_(self.v.weight)
        if spec.value_start:
            nn.init.normal_(self.v.weight, std=spec.value_start * width**-0.5, generator=generator)
        for parameter in (self.q.weight, self.k.weight, self.strength.weight, self.strength.bias):
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5, generator=generator)  # torch's own start of a Linear

    def query(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S F"]:
        return dpfp(self.q(x), order=self.spec.order)

    def write(self, x: Float[Tensor, "B M D"], matrix: Tensor, normaliser: Tensor, *, fresh: Bool[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        keys = dpfp(self.k(x), order=self.spec.order)
        strengths = self.strength(x).sigmoid().squeeze(-1)
        return associate(matrix, normaliser, keys=keys, values=self.v(x), strengths=strengths, fresh=fresh, correction=self.spec.correction)


def dpfp(x: Float[Tensor, "*B K"], *, order: int) -> Float[Tensor, "*B F"]:
    """Features of degree 2, all at least 0: F = 2 * order * K. They can all be 0.

    Source: Schlag et al. 2021, arXiv:2102.11174, equation 37.

    >>> dpfp(torch.tensor([1.0, -2.0]), order=1)
    tensor([2., 0., 0., 0.])
    """
    c = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([c * c.roll(j, -1) for j in range(1, order + 1)], -1)


def recall(features: Float[Tensor, "B S F"], matrix: Float[Tensor, "B F D"], normaliser: Float[Tensor, "B F"]) -> Float[Tensor, "B S D"]:
    """What stands under these features; 0 where nothing was written.

    Source: Rodkin et al. 2024, arXiv:2407.04841, equation 8.
    """
    return features @ matrix / (features @ normaliser[..., None] + EPSILON)


def associate(
    matrix: Float[Tensor, "B F D"],
    normaliser: Float[Tensor, "B F"],
    *,
    keys: Float[Tensor, "B M F"],
    values: Float[Tensor, "B M D"],
    strengths: Float[Tensor, "B M"],
    fresh: Bool[Tensor, "B"],
    correction: bool = True,
) -> tuple[Float[Tensor, "B F D"], Float[Tensor, "B F"]]:
    """Matrix and normaliser after all keys were written at once: the same key twice in one call adds both corrections.

    Args:
        keys: Their features.
        fresh: Rows whose first write this is: every gamma is exactly 1.
        correction: Without it gamma is 1 everywhere.
    Source: Rodkin et al. 2024, arXiv:2407.04841, equations 4 to 7.
    """
    new = values - recall(keys, matrix, normaliser)
    known = (keys @ normaliser[..., None]).squeeze(-1) + EPSILON
    gamma = (1 - known / (keys.square().sum(-1) + EPSILON)).clamp(0, 1).detach()
    gamma = gamma.masked_fill(fresh[:, None], 1.0) if correction else torch.ones_like(gamma)
    return matrix + keys.mT @ (strengths[..., None] * new), normaliser + (gamma[..., None] * keys).sum(1)


def stacked(ends: Sequence[tuple[Tensor, Tensor]]) -> Matrices:
    """The ends of all layers as one state."""
    matrices, normalisers = zip(*ends, strict=True)
    return torch.stack(matrices, 1), torch.stack(normalisers, 1)
