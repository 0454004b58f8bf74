"""TTT-Linear: a recurrent layer whose state is a small linear model, trained by a gradient step on every token it reads.

    f(x; W, b) = x + LN(x W + b)                                                      (the inner model, one a head; LN with learned scale and offset)
    g_j        = d/d(k_j W_0 + b_0)  1/2 |f(k_j; W_0, b_0) - v_j|^2                   (at the weights before the mini-batch)
    W_i        = W_0 - s_i sum_(j <= i) r_j k_j^T g_j,    b_i = b_0 - s_i sum_(j <= i) r_j g_j
    o_i        = f(q_i; W_i, b_i)                                                     (a token reads what it has just written)

i and j count within a mini-batch; the next one starts from the weights after its last token. r_j is a rate that the token chooses, s_i one for each
place in the mini-batch. All tokens of a mini-batch at once (the dual form), with Z = q W_0 + b_0 and E_ij = s_i r_j for j <= i:

    q_i W_i + b_i = Z - (E * (q k^T + 1)) g

Source: Sun et al. 2024, arXiv:2407.04620, sections 2.3 to 2.7 and appendix A, with the details of their public code: LN as a residual, RoPE by
the place in the mini-batch, the rate of a place 1 / i. Differs: a layer goes on anywhere, in the middle of a mini-batch too, for the sums are in
its state; RoPE turns halves, not neighbours, which is the same up to the order of features; one window serves both convolutions, which see the
same input.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.base import Convolution, at_least_one, axes_of, entered, in_heads, in_order
from graven.layers.decoder import EPSILON, angles
from graven.ops.pointwise import rotate
from graven.shapes import check
from graven.tasks.base import rows_at

STD = 0.02  # of linear maps and of the inner weights at the start, as in the public code


@dataclass(frozen=True, kw_only=True)
class TTTSpec:
    """The shape of a `TTT`.

    Args:
        width: Of a token, D; a multiple of 2 * heads.
        heads: Inner models, H, each on D / H features.
        batch: Tokens of a mini-batch.
        convolution: Tokens that the two convolutions span which make queries and keys of one projection; 0 for two projections without them.
        gate: What is read is multiplied by gelu of another map of the token.
        rate: Largest rate of a token, before it is divided by the features of a head.
    Raises:
        SpecError: A number is out of range, or `width` is no multiple.
    """

    width: int
    heads: int
    batch: int = 16
    convolution: int = 4
    gate: bool = True
    rate: float = 1.0
    kind: Literal["ttt"] = "ttt"

    def __post_init__(self) -> None:
        at_least_one(width=self.width, heads=self.heads, batch=self.batch)
        if self.width % (2 * self.heads):
            raise SpecError(f"`width` is {self.width} and `heads` is {self.heads}; `width` must be a multiple of 2 * `heads`.")
        if self.convolution < 0 or not self.rate > 0:
            raise SpecError(f"`convolution` is {self.convolution} and `rate` is {self.rate}; the first must be at least 0, the second above 0.")


class TTTState(NamedTuple):
    """Everything that a layer carries on, float32 or wider.

    Args:
        weight: W before the running mini-batch.
        bias: b before it.
        weight_sum: Its gradients so far in W, each times the rate of its token.
        bias_sum: The same in b.
        place: Tokens of the running mini-batch so far.
        recent: The last tokens that the convolutions still see, behind their projection; the latest last.
    """

    weight: Float[Tensor, "B H K K"]
    bias: Float[Tensor, "B H K"]
    weight_sum: Float[Tensor, "B H K K"]
    bias_sum: Float[Tensor, "B H K"]
    place: Float[Tensor, "B"]
    recent: Float[Tensor, "B R D"]


class Norm(NamedTuple):
    """Scale and offset of the inner LN."""

    scale: Float[Tensor, "H 1 K"]
    offset: Float[Tensor, "H 1 K"]

    def __call__(self, z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], eps=EPSILON) * self.scale + self.offset

    def loss_gradient(self, z: Float[Tensor, "B H T K"], wanted: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """d/dz 1/2 |LN(z) - wanted|^2, written out: the layer is trained through it by one ordinary backward pass."""
        deviation = z - z.mean(-1, keepdim=True)
        inverse = (deviation.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        normal = deviation * inverse
        pull = (normal * self.scale + self.offset - wanted) * self.scale
        return (pull - pull.mean(-1, keepdim=True) - normal * (pull * normal).mean(-1, keepdim=True)) * inverse


class TTT(nn.Module):
    """One layer, without the norm and the residual that stand around it in a model."""

    def __init__(self, spec: TTTSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        width, features = spec.width, spec.width // spec.heads
        self.q, self.v, self.out = (nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(3))
        self.k = None if spec.convolution else nn.Linear(width, width, bias=False, dtype=dtype)
        self.convolutions = nn.ModuleList(Convolution(width, spec.convolution, dtype=dtype) for _ in range(2 if spec.convolution else 0))
        self.rate = nn.Linear(width, spec.heads, dtype=dtype)
        self.gate = nn.Linear(width, width, bias=False, dtype=dtype) if spec.gate else None
        self.norm = nn.LayerNorm(width, eps=EPSILON, dtype=dtype)
        self.place_rate = nn.Parameter(torch.zeros(spec.batch, dtype=dtype))  # added to 1 / i
        self.inner_scale = nn.Parameter(torch.ones(spec.heads, 1, features, dtype=dtype))
        self.inner_offset = nn.Parameter(torch.zeros(spec.heads, 1, features, dtype=dtype))
        self.inner_weight = nn.Parameter(STD * torch.randn(spec.heads, features, features, generator=generator, dtype=dtype))
        self.inner_bias = nn.Parameter(torch.zeros(spec.heads, features, dtype=dtype))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD, generator=generator)
            if isinstance(module, nn.Conv1d):
                bound = spec.convolution**-0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def start(self, batch: int) -> TTTState:
        """The learned inner model, one copy a row, and nothing read yet."""
        weight, bias = (_wide(x).expand(batch, *x.shape) for x in (self.inner_weight, self.inner_bias))
        recent = weight.new_zeros(batch, max(0, self.spec.convolution - 1), self.spec.width)
        return TTTState(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias), weight.new_zeros(batch), recent)

    def forward(
        self, x: Float[Tensor, "B T D"], state: TTTState | tuple[Any, ...] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], TTTState]:
        """What every token reads, and the state after the last one; padding is the identity on every part of the state.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = entered(x, width=self.spec.width, mask=mask)
        state = self.start(len(x)) if state is None else TTTState(*state)
        wanted = self.start(1)
        check(x=(x, "B T D"), **{name: (part, axes_of(getattr(wanted, name))) for name, part in state._asdict().items()})
        return in_order(self._run, x, state, mask) if x.shape[1] else (x, state)

    def _run(self, x: Tensor, state: TTTState, mask: Tensor | None) -> tuple[Tensor, TTTState]:
        """With padding at the end only."""
        q, k, recent = self._queries_and_keys(x, state.recent, mask)
        parts = (_wide(part) for part in (q, k, self.v(x), self.rate(x).sigmoid() * (self.spec.rate * self.spec.heads / self.spec.width)))
        # each row starts in the column of its place, so that all rows go from one mini-batch to the next in the same column
        place, length = state.place.long()[:, None], x.shape[1]
        columns = torch.arange(-(-(length + int(place.max())) // self.spec.batch) * self.spec.batch, device=x.device)
        here = columns - place
        real = (here >= 0) & (here < (length if mask is None else mask.sum(1, keepdim=True)))
        q, k, v, rate = (rows_at(part, here.clamp(0, length - 1)) for part in parts)
        o, end = self._batches(q, k, v, rate, real, state._replace(recent=recent))
        o = self.norm(rows_at(o, place + torch.arange(length, device=x.device)).to(x.dtype))
        return self.out(o if self.gate is None else F.gelu(self.gate(x), approximate="tanh") * o), end

    def _queries_and_keys(self, x: Tensor, recent: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x)
        if self.k is not None:
            return q, self.k(x), recent
        (q, window), (k, _) = (convolution(q, recent, mask) for convolution in self.convolutions)
        return q, k, window

    def _batches(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, real: Tensor, state: TTTState) -> tuple[Tensor, TTTState]:
        """From mini-batch to mini-batch; rows of [B, T, D] with T a multiple of a mini-batch, `real` where there is a token."""
        size, heads = self.spec.batch, self.spec.heads
        q, k, v = (in_heads(x, heads).transpose(1, 2) for x in (q, k, v))
        rate = (rate * real[..., None]).transpose(1, 2)
        rotation = angles(torch.arange(q.shape[2], device=q.device)[None] % size, q.shape[-1], q.dtype)
        q, k = rotate(q, rotation), rotate(k, rotation)
        norm = Norm(_wide(self.inner_scale), _wide(self.inner_offset))
        places = (1 / torch.arange(1, size + 1, device=q.device, dtype=q.dtype) + _wide(self.place_rate)).clamp(min=0.0)
        reads = []
        for at in range(0, q.shape[2], size):
            q_b, k_b, v_b, rate_b = (x[:, :, at : at + size] for x in (q, k, v, rate))
            read, state = mini_batch(q_b, k_b, v_b, rate=rate_b, places=places, norm=norm, real=real[:, at : at + size], state=state)
            reads.append(read)
        return torch.cat(reads, 2).transpose(1, 2).flatten(2), state


def mini_batch(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T K"],
    *,
    rate: Float[Tensor, "B H T"],
    places: Float[Tensor, "T"],
    norm: Norm,
    real: Bool[Tensor, "B T"],
    state: TTTState,
) -> tuple[Float[Tensor, "B H T K"], TTTState]:
    """The columns of one mini-batch, some of which may have been read before or be still to come: the dual form.

    Args:
        rate: r, 0 where a column is not real.
        places: s of every column.
    Source: Sun et al. 2024, arXiv:2407.04620, appendix A.
    """
    gradient = norm.loss_gradient(k @ state.weight + state.bias[:, :, None], v - k) * rate[..., None]
    before = q @ state.weight_sum + state.bias_sum[:, :, None]
    within = ((q @ k.mT + 1.0).tril()) @ gradient
    read = q + norm(q @ state.weight + state.bias[:, :, None] - places[:, None] * (before + within))
    weight_sum, bias_sum = state.weight_sum + k.mT @ gradient, state.bias_sum + gradient.sum(2)
    place = state.place + real.sum(1)
    full = place == len(places)
    whole, row = full[:, None, None, None], full[:, None, None]
    end = TTTState(
        torch.where(whole, state.weight - places[-1] * weight_sum, state.weight),
        torch.where(row, state.bias - places[-1] * bias_sum, state.bias),
        weight_sum.masked_fill(whole, 0.0),
        bias_sum.masked_fill(row, 0.0),
        place.masked_fill(full, 0.0),
        state.recent,
    )
    return read, end


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
