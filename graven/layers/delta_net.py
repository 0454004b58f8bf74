"""DeltaNet: a recurrent layer whose state, a matrix a head, is corrected towards each value by the delta rule; and its gated form.

    q, k, v = silu(conv(W x)),    q, k of length 1 in each head,    beta = sigmoid(W_b x),    log_gate = -exp(A) softplus(W_a x + b_a)
    y       = W_o (norm(delta(q, k, v)) * silu(W_g x))                                  (the gate W_g where asked for)

Source: Yang et al. 2024, arXiv:2406.06484, section 3.4, and arXiv:2412.06464, section 3.4, as flash-linear-attention builds them. Differs: weights
start from N(0, 1 / fan-in), theirs from N(0, 0.02^2); one map and one convolution give queries, keys and values.
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
from graven.ops.delta import Form, delta
from graven.shapes import check

LENGTH = 1e-6  # under the root of the length of a query or key
DECAYS = (1e-3, 16.0)  # between which exp(A) starts, uniformly; theirs starts at 0, whose logarithm is no weight
STEPS = (1e-3, 1e-1)  # between which softplus(b_a) starts, uniform in its logarithm


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """The shape of a `DeltaNet`.

    Args:
        width: Of a token, D.
        heads: H.
        key_width: Of a head, K.
        value_width: Of a head, V.
        convolution: Tokens that the causal depthwise convolution on queries, keys and values spans.
        gate: The state decays by a number that each token and head chooses (Gated DeltaNet).
        output_gate: Reads are multiplied by silu of another map of the token. Gated DeltaNet has one, DeltaNet none.
        epsilon: Of the norm of the reads.
        form: Of the operation.
    Raises:
        SpecError: A number is out of range.
    """

    width: int
    heads: int
    key_width: int
    value_width: int
    convolution: int = 4
    gate: bool = False
    output_gate: bool = False
    epsilon: float = 1e-5
    form: Form = "chunk"
    kind: Literal["delta_net"] = "delta_net"

    def __post_init__(self) -> None:
        at_least_one(**{name: getattr(self, name) for name in ("width", "heads", "key_width", "value_width", "convolution")})
        if not self.epsilon > 0:
            raise SpecError(f"`epsilon` is {self.epsilon}; it must be above 0.")


DeltaNetState = tuple[Float[Tensor, "B R C"], Float[Tensor, "B H K V"]]
"""What the convolution still sees, queries, keys and values side by side; and the matrices. Float32 or wider."""


class DeltaNet(nn.Module):
    """One layer, without the norm and the residual that stand around it in a model."""

    def __init__(self, spec: DeltaNetSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.widths = [spec.heads * spec.key_width] * 2 + [spec.heads * spec.value_width]
        self.qkv = nn.Linear(spec.width, sum(self.widths), bias=False, dtype=dtype)
        self.convolution = Convolution(sum(self.widths), spec.convolution, bias=False, dtype=dtype)
        self.rate = nn.Linear(spec.width, spec.heads, bias=False, dtype=dtype)
        self.gate = nn.Linear(spec.width, spec.heads, dtype=dtype) if spec.gate else None
        self.output_gate = nn.Linear(spec.width, self.widths[2], bias=False, dtype=dtype) if spec.output_gate else None
        self.out = nn.Linear(self.widths[2], spec.width, bias=False, dtype=dtype)
        start_(self, generator)
        self.norm = nn.RMSNorm(spec.value_width, eps=spec.epsilon, dtype=dtype)
        self.log_decay = None
        if self.gate is not None:
            uniform = torch.rand(2, spec.heads, generator=generator, dtype=self.gate.weight.dtype)
            self.log_decay = nn.Parameter((DECAYS[0] + (DECAYS[1] - DECAYS[0]) * uniform[0]).log())
            low, high = (math.log(bound) for bound in STEPS)
            steps = (low + (high - low) * uniform[1]).exp()
            self.gate.bias.data.copy_(steps + (-torch.expm1(-steps)).log())  # softplus of it is the step

    def start(self, batch: int) -> DeltaNetState:
        """Nothing read yet."""
        spec, recent = self.spec, self.convolution.start(batch)
        return recent, recent.new_zeros(batch, spec.heads, spec.key_width, spec.value_width)

    def forward(
        self, x: Float[Tensor, "B T D"], state: DeltaNetState | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], DeltaNetState]:
        """What every token reads, and the state after the last one.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        spec = self.spec
        x = entered(x, width=spec.width, mask=mask)
        recent, matrix = self.start(len(x)) if state is None else state
        check(x=(x, "B T D"), recent=(recent, f"B {spec.convolution - 1} {sum(self.widths)}"),
              matrix=(matrix, f"B {spec.heads} {spec.key_width} {spec.value_width}"))  # fmt: skip
        return in_order(self._run, x, (recent, matrix), mask)

    def _run(self, x: Tensor, state: DeltaNetState, mask: Tensor | None) -> tuple[Tensor, DeltaNetState]:
        """With padding at the end only, where the rate is 0 and the gate is open."""
        spec = self.spec
        mixed, recent = self.convolution(self.qkv(x), state[0], mask)
        q, k, v = (in_heads(part, spec.heads) for part in torch.split(F.silu(mixed), self.widths, -1))
        q, k = (part * (part.square().sum(-1, keepdim=True) + LENGTH).rsqrt() for part in (q, k))
        beta, log_gate = self.rate(x).sigmoid(), self.log_gate(x)
        if mask is not None:
            beta = beta.masked_fill(~mask[..., None], 0.0)
            log_gate = None if log_gate is None else log_gate.masked_fill(~mask[..., None], 0.0)
        o, matrix = delta(q, k, v, beta=beta, log_gate=log_gate, scale=spec.key_width**-0.5, state=state[1], form=spec.form)
        o = self.norm(o.to(self.norm.weight.dtype)).flatten(2)  # of the weights' width, also where a caller computes in less
        return self.out(o if self.output_gate is None else o * F.silu(self.output_gate(x))), (recent, matrix)

    def log_gate(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"] | None:
        """Logarithm of the gate of every token and head."""
        if self.gate is None or self.log_decay is None:
            return None
        return -self.log_decay.exp() * F.softplus(self.gate(x))
