"""The Mamba-2 block: gated linear attention with one gate a head, between a short convolution and a gated norm.

    z, u, s = W_in x,   x', B, C = split(silu(conv(u))),   s = softplus(s + b)          (x' and s by head, B and C shared by a group of heads)
    h_t = exp(s_t A) h_(t-1) + B_t (s_t x'_t)^T,   y_t = h_t^T C_t + D x'_t,   out = W_out norm(y * silu(z))

Source: Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7; names and shapes of weights are those of the mixer in Hugging Face's Mamba-2. Differs
from theirs: padding anywhere is the identity on the state, which there decays; a state can be carried over any cut; A starts anywhere in 1 to 16.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.base import Convolution, at_least_one, entered, in_heads, in_order, start_
from graven.ops.gated_linear import Form, gated_linear
from graven.shapes import check

STEPS = (1e-3, 1e-1)  # between which step sizes start, uniform in their logarithm


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """The shape of a `Mamba2`.

    Args:
        width: Of a token, D.
        inner: Channels between the projections, a multiple of `heads`.
        heads: H.
        memory: Numbers that a channel remembers.
        groups: Heads of one group share B and C; divides `heads`.
        convolution: Tokens that the convolution spans.
        convolution_bias: It has a bias.
        bias: The projections in and out have one. Released models have none.
        epsilon: Of the norm.
        form: Of gated linear attention.
    Raises:
        SpecError: A number is below 1, or heads do not divide.
    """

    width: int
    inner: int
    heads: int
    memory: int
    groups: int = 1
    convolution: int = 4
    convolution_bias: bool = True
    bias: bool = False
    epsilon: float = 1e-5
    form: Form = "chunk"
    kind: Literal["mamba2"] = "mamba2"

    def __post_init__(self) -> None:
        at_least_one(**{name: getattr(self, name) for name in ("width", "inner", "heads", "memory", "groups", "convolution")})
        if self.inner % self.heads or self.heads % self.groups:
            raise SpecError(f"`inner` is {self.inner}, `heads` {self.heads} and `groups` {self.groups}; each must be a multiple of the next.")
        if not self.epsilon > 0:
            raise SpecError(f"`epsilon` is {self.epsilon}; it must be above 0.")

    @property
    def mixed(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.memory


Mamba2State = tuple[Float[Tensor, "B R C"], Float[Tensor, "B H S P"]]
"""What the convolution still sees, and h, S numbers for each of the P channels of a head. Float32 or wider."""


class GatedNorm(nn.Module):
    """The root mean square norm of y * silu(z), each group for itself."""

    def __init__(self, spec: Mamba2Spec, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(spec.inner, dtype=dtype))

    def forward(self, y: Float[Tensor, "B T I"], z: Float[Tensor, "B T I"]) -> Float[Tensor, "B T I"]:
        groups = in_heads(y * F.silu(z), self.spec.groups)
        return self.weight * F.rms_norm(groups, groups.shape[-1:], eps=self.spec.epsilon).flatten(2)


class Mamba2(nn.Module):
    """One block, without the norm and the residual that stand around it in a model."""

    def __init__(self, spec: Mamba2Spec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(spec.width, spec.inner + spec.mixed + spec.heads, bias=spec.bias, dtype=dtype)
        self.conv1d = Convolution(spec.mixed, spec.convolution, bias=spec.convolution_bias, dtype=dtype)
        self.out_proj = nn.Linear(spec.inner, spec.width, bias=spec.bias, dtype=dtype)
        start_(self, generator)
        low, high = (math.log(bound) for bound in STEPS)
        steps = (low + (high - low) * torch.rand(spec.heads, generator=generator, dtype=dtype)).exp()
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())  # softplus of it is the step
        self.A_log = nn.Parameter((1 + 15 * torch.rand(spec.heads, generator=generator, dtype=dtype)).log())
        self.norm = GatedNorm(spec, dtype)
        self.D = nn.Parameter(torch.ones(spec.heads, dtype=dtype))

    def start(self, batch: int) -> Mamba2State:
        """Nothing read yet."""
        spec, recent = self.spec, self.conv1d.start(batch)
        return recent, recent.new_zeros(batch, spec.heads, spec.memory, spec.inner // spec.heads)

    def forward(
        self, x: Float[Tensor, "B T D"], state: Mamba2State | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Mamba2State]:
        """What every token reads, and the state after the last one.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        spec = self.spec
        x = entered(x, width=spec.width, mask=mask)
        recent, memory = self.start(len(x)) if state is None else state
        check(x=(x, "B T D"), recent=(recent, f"B {spec.convolution - 1} {spec.mixed}"),
              memory=(memory, f"B {spec.heads} {spec.memory} {spec.inner // spec.heads}"))  # fmt: skip
        return in_order(self._run, x, (recent, memory), mask)

    def _run(self, x: Tensor, state: Mamba2State, mask: Tensor | None) -> tuple[Tensor, Mamba2State]:
        """With padding at the end only: there a step of 0 neither writes nor decays."""
        spec = self.spec
        z, mixed, step = torch.split(self.in_proj(x), [spec.inner, spec.mixed, spec.heads], -1)
        mixed, recent = self.conv1d(mixed, state[0], mask)
        shared = spec.groups * spec.memory
        x, b, c = torch.split(F.silu(mixed), [spec.inner, shared, shared], -1)
        step = F.softplus(step + self.dt_bias, threshold=40.0)  # torch's own is a line from 20 on, which is off by 2e-9
        if mask is not None:
            step = step.masked_fill(~mask[..., None], 0.0)
        x = in_heads(x, spec.heads)
        b, c = (in_heads(part, spec.groups).repeat_interleave(spec.heads // spec.groups, 2) for part in (b, c))
        log_gate = -(step * self.A_log.exp())[..., None]
        o, memory = gated_linear(c, b, step[..., None] * x, log_gate_k=log_gate, state=state[1], form=spec.form)
        y = (o + self.D[:, None] * x).flatten(2)
        return self.out_proj(self.norm(y, z)), (recent, memory)
