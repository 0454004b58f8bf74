"""LaCT: a recurrent layer whose state is a small SwiGLU network, trained by one large step on every chunk of tokens; short attention beside it.

    f(x; w)  = w_1 (silu(w_0 x) * (w_2 x))                                        (fast weights, one network a head)
    D        = sum over the chunk of r_j,w d<f(k_j; w), v_j>/dw                    (rates of each token, head and matrix)
    D        <- D + mu D_before,   D <- NS(D)                                      (momentum; Muon: all singular values near 1)
    w        <- the rows of w + D at their first norms
    o_t      = attention over the last tokens + silu(a_t) rms(f(q_t; w))           (a chunk reads the weights before it, then changes them)

The weights change when a chunk is full. Tokens of a chunk that is not are kept in the state, so that writing in parts is writing once; `flush`
applies them, which a memory does before it is asked. The public code never applies the last chunk of a text, full or not: of a text of one chunk it
writes nothing.

Source: Zhang et al. 2025, arXiv:2505.23884, sections 3.1 to 3.3 and algorithm 1, with the details of their public code; Jordan et al. 2024 (Muon),
its five steps with the coefficients of that code. Differs: the last chunk; no rotation of what the fast weights see; the window may be shorter than
a chunk; short convolutions, where asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.base import Convolution, at_least_one, axes_of, entered, in_heads, in_order, start_
from graven.layers.decoder import RMSNorm, angles
from graven.ops.attention import attention
from graven.ops.pointwise import rotate
from graven.shapes import check
from graven.tasks.base import rows_at

NEAR_ZERO = 1e-5  # beside the norm of a vector
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
Weights = Float[Tensor, "B 3 H F K"]  # w_0, the transpose of w_1, w_2


@dataclass(frozen=True, kw_only=True)
class LaCTSpec:
    """The shape of a `LaCT`.

    Args:
        width: Of a token, D; a multiple of 2 * heads.
        heads: Fast networks, H, each on K = D / H features; and heads of attention.
        hidden: Width inside a fast network, F.
        chunk: Tokens of one step.
        window: Tokens that attention sees, its own included; the paper's is at least a chunk. Those before the last are in the state.
        momentum: Steps carry on; twice the state.
        muon: Steps are orthogonalised, so that only the ratios of rates count.
        rate: Of every token at the start.
        convolution: Tokens that a short convolution before each of queries, keys and values spans; 0 for none, as in the paper. Ours: with it a token
            can carry the key of an earlier one.
    Raises:
        SpecError: A number is out of range, or `width` is no multiple.
    """

    width: int
    heads: int
    hidden: int
    chunk: int
    window: int
    momentum: bool = True
    muon: bool = True
    rate: float = 1e-2
    convolution: int = 0
    kind: Literal["lact"] = "lact"

    def __post_init__(self) -> None:
        at_least_one(width=self.width, heads=self.heads, hidden=self.hidden, chunk=self.chunk, window=self.window)
        if self.width % (2 * self.heads):
            raise SpecError(f"`width` is {self.width} and `heads` is {self.heads}; `width` must be a multiple of 2 * `heads`.")
        if self.convolution < 0 or not self.rate > 0:
            raise SpecError(f"`convolution` is {self.convolution} and `rate` is {self.rate}; the first must be at least 0, the second above 0.")


class LaCTState(NamedTuple):
    """Everything that a layer carries on, float32 or wider.

    Args:
        weights: Of the fast networks.
        steps: The last step, before Muon; nothing without momentum.
        recent: Of the last tokens: key, value, rates, momentum, and 1 where there was a token; the latest last.
        pending: How many of them are in a chunk that is not full.
        window: The last tokens that the convolutions still see; the latest last.
    """

    weights: Weights
    steps: tuple[Weights, ...]
    recent: Float[Tensor, "B R E"]
    pending: Float[Tensor, "B"]
    window: Float[Tensor, "B W D"]


class LaCT(nn.Module):
    """One layer, without the norm and the residual that stand around it in a model."""

    def __init__(self, spec: LaCTSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        width, features = spec.width, spec.width // spec.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.convolutions = nn.ModuleList(Convolution(width, spec.convolution, dtype=dtype) for _ in range(3 if spec.convolution else 0))
        self.rates = nn.Linear(width, 3 * spec.heads, dtype=dtype)
        self.momentum = nn.Linear(width, spec.heads, dtype=dtype) if spec.momentum else None
        self.scale = nn.Linear(width, spec.heads, dtype=dtype)
        start_(self, generator)
        fan_in = torch.tensor([features, spec.hidden, features], dtype=dtype)[:, None, None, None]
        drawn = torch.randn(3, spec.heads, spec.hidden, features, generator=generator, dtype=dtype)
        self.fast = nn.Parameter(drawn * fan_in**-0.5)
        nn.init.constant_(self.rates.bias, spec.rate + math.log(-math.expm1(-spec.rate)))  # softplus of it is the rate
        self.stretch = nn.Parameter(torch.ones(2, width, dtype=dtype))  # of queries and keys of the fast networks
        self.offset = nn.Parameter(torch.zeros(2, width, dtype=dtype))
        self.norm = RMSNorm(features).to(dtype)

    def start(self, batch: int) -> LaCTState:
        """The learned fast weights, one copy a row, and nothing read yet."""
        weights = _wide(self.fast).expand(batch, *self.fast.shape)
        kept = max(self.spec.window, self.spec.chunk) - 1
        numbers = 2 * self.spec.width + (4 if self.spec.momentum else 3) * self.spec.heads + 1
        steps = (torch.zeros_like(weights),) if self.spec.momentum else ()
        window = weights.new_zeros(batch, max(0, self.spec.convolution - 1), self.spec.width)
        return LaCTState(weights, steps, weights.new_zeros(batch, kept, numbers), weights.new_zeros(batch), window)

    def forward(
        self, x: Float[Tensor, "B T D"], state: LaCTState | tuple[Any, ...] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], LaCTState]:
        """What every token reads, and the state after the last one; padding is the identity on every part of the state.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = entered(x, width=self.spec.width, mask=mask)
        state = self.start(len(x)) if state is None else LaCTState(*state)
        wanted = self.start(1)
        parts = {name: getattr(state, name) for name in ("weights", "recent", "pending", "window")}
        check(x=(x, "B T D"), **{name: (part, axes_of(getattr(wanted, name))) for name, part in parts.items()})
        return in_order(self._run, x, state, mask) if x.shape[1] else (x, state)

    def flush(self, state: LaCTState | tuple[Any, ...]) -> LaCTState:
        """The state with the tokens of its unfinished chunk applied; rows without any keep theirs bit for bit."""
        state = LaCTState(*state)
        kept, most = state.recent.shape[1], self.spec.chunk - 1
        if not most:
            return state
        columns = torch.arange(most, device=state.recent.device)
        pending = state.pending.long()[:, None]
        tokens = rows_at(state.recent, (kept - pending + columns).clamp(max=kept - 1))
        state = self._step(tokens, columns < pending, state, full=state.pending > 0)
        return state._replace(pending=torch.zeros_like(state.pending))

    def _run(self, x: Tensor, state: LaCTState, mask: Tensor | None) -> tuple[Tensor, LaCTState]:
        """With padding at the end only."""
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        lengths, kept = real.sum(1), state.recent.shape[1]
        (q, k, v), window = self._projected(x, state.window, mask)
        momentum = [] if self.momentum is None else [self.momentum(x).sigmoid()]
        tokens = _wide(torch.cat([k, v, F.softplus(self.rates(x)), *momentum, real[..., None].to(x.dtype)], -1))
        seen = torch.cat([state.recent, tokens * real[..., None]], 1)
        read, end = self._chunks(_wide(q), seen, lengths, state)
        fast = self.norm(read) * F.silu(self.scale(x))[..., None]
        y = self.out(fast.flatten(2).to(x.dtype) + self._attention(_wide(q), seen).to(x.dtype))
        columns = torch.arange(kept, device=x.device)
        pending = (state.pending + lengths) % self.spec.chunk
        return y, end._replace(recent=rows_at(seen, lengths[:, None] + columns), pending=pending, window=window)

    def _projected(self, x: Tensor, window: Tensor, mask: Tensor | None) -> tuple[Sequence[Tensor], Tensor]:
        """Queries, keys and values, each behind its convolution, and what these see next."""
        if not self.convolutions:
            return self.qkv(x).chunk(3, -1), window
        (q, window), (k, _), (v, _) = (convolution(x, window, mask) for convolution in self.convolutions)
        return [F.linear(y, weight) for y, weight in zip((q, k, v), self.qkv.weight.chunk(3), strict=True)], window

    def _attention(self, q: Float[Tensor, "B T D"], seen: Float[Tensor, "B S E"]) -> Float[Tensor, "B T D"]:
        """Over the last tokens, rotated by their columns: only differences of positions count."""
        length, columns = q.shape[1], torch.arange(seen.shape[1], device=q.device)
        k, v = seen[..., : 2 * self.spec.width].chunk(2, -1)
        q, k, v = (in_heads(x, self.spec.heads).transpose(1, 2) for x in (q, k, v))
        cos, sin = angles(columns[None], q.shape[-1], q.dtype)
        q, k = rotate(q, (cos[:, :, -length:], sin[:, :, -length:])), rotate(k, (cos, sin))
        ahead = columns[-length:, None] - columns
        mask = ((ahead >= 0) & (ahead < self.spec.window))[None] & (seen[:, None, :, -1] > 0)
        return attention(q, k, v, mask=mask[:, None], causal=False).transpose(1, 2).flatten(2)

    def _chunks(self, q: Tensor, seen: Tensor, lengths: Tensor, state: LaCTState) -> tuple[Float[Tensor, "B T H K"], LaCTState]:
        """From chunk to chunk. Each row starts in the column of its pending tokens, so that all rows go to the next chunk in the same column."""
        size, length, pending = self.spec.chunk, q.shape[1], state.pending.long()[:, None]
        columns = torch.arange(-(-(length + int(pending.max())) // size) * size, device=q.device)
        first, total = state.recent.shape[1] - pending, pending + lengths[:, None]
        tokens = rows_at(seen, (first + columns).clamp(max=seen.shape[1] - 1))
        queries = self._fast(rows_at(q, (columns - pending).clamp(0, length - 1)), 0)
        real, reads = columns < total, []
        for at in range(0, len(columns), size):
            here = slice(at, at + size)
            reads.append(swiglu_network(queries[:, :, here], state.weights))
            state = self._step(tokens[:, here], real[:, here], state, full=real[:, here].all(1))
        read = torch.cat(reads, 2).transpose(1, 2).flatten(2)
        return in_heads(rows_at(read, pending + torch.arange(length, device=q.device)), self.spec.heads), state

    def _step(self, tokens: Tensor, real: Tensor, state: LaCTState, *, full: Bool[Tensor, "B"]) -> LaCTState:
        """What the tokens of a chunk change, in rows where it is `full`."""
        if not full.any():
            return state
        width, heads = self.spec.width, self.spec.heads
        k, v, rates, momentum = (
            tokens[..., first:end] for first, end in pairwise((0, width, 2 * width, 2 * width + 3 * heads, 2 * width + 4 * heads))
        )
        values = in_heads(F.silu(v), heads).transpose(1, 2)
        rates = in_heads(rates * real[..., None], 3).permute(2, 0, 3, 1)
        step = ascent(self._fast(k, 1), values, state.weights, rates=rates)
        if self.spec.momentum:
            mean = (momentum * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
            step = step + mean[:, None, :, None, None] * state.steps[0]
        weights = rescaled(state.weights + (orthogonal(step) if self.spec.muon else step), _wide(self.fast))
        kept = full[:, None, None, None, None]
        steps = (torch.where(kept, step, state.steps[0]),) if self.spec.momentum else ()
        return state._replace(weights=torch.where(kept, weights, state.weights), steps=steps)

    def _fast(self, x: Float[Tensor, "B T D"], which: int) -> Float[Tensor, "B H T K"]:
        """Queries (0) or keys (1) as the fast networks take them: of length 1."""
        x = in_heads(F.silu(x * _wide(self.stretch[which]) + _wide(self.offset[which])), self.spec.heads).transpose(1, 2)
        return x / (x.norm(dim=-1, keepdim=True) + NEAR_ZERO)


def swiglu_network(x: Float[Tensor, "B H T K"], weights: Weights) -> Float[Tensor, "B H T K"]:
    """f(x; w)."""
    w0, w1, w2 = weights.unbind(1)
    return (F.silu(x @ w0.mT) * (x @ w2.mT)) @ w1


def ascent(k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"], weights: Weights, *, rates: Float[Tensor, "3 B H T"]) -> Weights:
    """Gradients of sum_j r_j <f(k_j; w), v_j> in the three matrices, each with its rates; written out, so that they can be trained through.

    Source: Zhang et al. 2025, arXiv:2505.23884, equation 6.
    """
    w0, w1, w2 = weights.unbind(1)
    h, up, pull = k @ w0.mT, k @ w2.mT, v @ w1.mT
    s = h.sigmoid()
    gate, r = h * s, rates[..., None]
    slope = s * (1 + h * (1 - s))
    return torch.stack([(r[0] * pull * up * slope).mT @ k, (gate * up).mT @ (r[1] * v), (r[2] * pull * gate).mT @ k], 1)


def orthogonal(x: Float[Tensor, "*B K V"]) -> Float[Tensor, "*B K V"]:
    """Nearly the orthogonal factor of a matrix: a singular value of more than 0.01 of the norm comes to lie between 0.97 and 1.04; 0 stays 0.

    Source: Newton-Schulz steps as in Muon (Jordan et al. 2024), with the five pairs of coefficients of the public code.
    """
    y = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    wide = y.shape[-2] <= y.shape[-1]
    y = y if wide else y.mT
    for a, b, c in NEWTON_SCHULZ:
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y if wide else y.mT


def rescaled(weights: Weights, first: Float[Tensor, "3 H F K"]) -> Weights:
    """What every unit of a layer multiplies its inputs with, at the norm that it has in `first`."""
    return weights / (_norms(weights) + NEAR_ZERO) * _norms(first)


def _norms(weights: Float[Tensor, "*B 3 H F K"]) -> Tensor:
    """Of rows, and of columns in the middle, which is kept as its transpose."""
    rows, columns = (weights.norm(dim=axis, keepdim=True).expand_as(weights) for axis in (-1, -2))
    return torch.stack([rows[..., 0, :, :, :], columns[..., 1, :, :, :], rows[..., 2, :, :, :]], -4)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
