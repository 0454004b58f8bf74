"""The Mamba block: a selective scan between a short convolution and a side gate, in plain torch.

    x', z = W_in x,    x' = silu(conv(x')),    d_t, B_t, C_t = maps of x'_t,    s_t = softplus(W_s d_t + b_s)
    h_t = exp(s_t A) * h_(t-1) + s_t x'_t B_t^T,    y_t = h_t C_t + D * x'_t,    out = W_out (y * silu(z))

Source: Gu and Dao 2023, arXiv:2312.00752, section 3; names and shapes of weights are those of the mixer in Hugging Face's Mamba.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import ShapeError, SpecError
from graven.layers.base import Convolution, at_least_one, entered, in_order, start_
from graven.ops.diagonal import diagonal
from graven.shapes import check

STEPS = (1e-3, 1e-1)  # between which step sizes start, uniform in their logarithm


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """The shape of a `Mamba`.

    Args:
        width: Of a token, D.
        inner: Channels between the projections.
        memory: Numbers that a channel remembers.
        step_rank: Width in the middle of the map to the step sizes.
        convolution: Tokens that the convolution spans.
        convolution_bias: It has a bias.
        bias: The projections in and out have one. Released models have none.
        out_width: Of what is read, as wide as a token where left out.
    Raises:
        SpecError: A number is below 1.
    """

    width: int
    inner: int
    memory: int
    step_rank: int
    convolution: int = 4
    convolution_bias: bool = True
    bias: bool = False
    out_width: int | None = None
    kind: Literal["mamba"] = "mamba"

    def __post_init__(self) -> None:
        numbers = ("width", "inner", "memory", "step_rank", "convolution")
        at_least_one(**{name: getattr(self, name) for name in numbers}, out_width=self.reads)

    @property
    def reads(self) -> int:
        """Width of what is read."""
        return self.width if self.out_width is None else self.out_width


class MambaState(NamedTuple):
    """What a block carries on.

    Args:
        recent: The last tokens that the convolution still sees, behind the projection, I channels each; the latest last.
        memory: h, S numbers for each channel.
    """

    recent: Float[Tensor, "B R I"]
    memory: Float[Tensor, "B I S"]


class Mamba(nn.Module):
    """One block, without the norm and the residual that stand around it in a model."""

    def __init__(self, spec: MambaSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(spec.width, 2 * spec.inner, bias=spec.bias, dtype=dtype)
        self.conv1d = Convolution(spec.inner, spec.convolution, bias=spec.convolution_bias, dtype=dtype)
        self.x_proj = nn.Linear(spec.inner, spec.step_rank + 2 * spec.memory, bias=False, dtype=dtype)
        self.dt_proj = nn.Linear(spec.step_rank, spec.inner, dtype=dtype)
        self.out_proj = nn.Linear(spec.inner, spec.reads, bias=spec.bias, dtype=dtype)
        start_(self, generator)
        low, high = (math.log(bound) for bound in STEPS)
        steps = (low + (high - low) * torch.rand(spec.inner, generator=generator, dtype=dtype)).exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps + (-torch.expm1(-steps)).log())  # softplus of it is the step
        self.A_log = nn.Parameter(torch.arange(1, spec.memory + 1, dtype=self.in_proj.weight.dtype).log().repeat(spec.inner, 1))
        self.D = nn.Parameter(torch.ones(spec.inner, dtype=dtype))

    def start(self, batch: int) -> MambaState:
        """Nothing read yet."""
        recent = self.conv1d.start(batch)
        return MambaState(recent, recent.new_zeros(batch, self.spec.inner, self.spec.memory))

    def forward(
        self, x: Float[Tensor, "B T D"], state: MambaState | tuple[Any, ...] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], MambaState]:
        """What every token reads, and the state after the last one.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = entered(x, width=self.spec.width, mask=mask)
        state = self.start(len(x)) if state is None else MambaState(*state)
        check(x=(x, "B T D"), recent=(state.recent, f"B {self.spec.convolution - 1} {self.spec.inner}"),
              memory=(state.memory, f"B {self.spec.inner} {self.spec.memory}"))  # fmt: skip
        return in_order(self._run, x, state, mask)

    def _run(self, x: Tensor, state: MambaState, mask: Tensor | None) -> tuple[Tensor, MambaState]:
        """With padding at the end only."""
        spec = self.spec
        x, z = self.in_proj(x).chunk(2, -1)
        x, recent = self.conv1d(x, state.recent, mask)
        x = F.silu(x)
        d, b, c = torch.split(self.x_proj(x), [spec.step_rank, spec.memory, spec.memory], -1)
        step = F.softplus(self.dt_proj(d), threshold=40.0)  # torch's own is a line from 20 on, which is off by 2e-9
        decay = (step[..., None] * -self.A_log.exp()).exp()
        u = (step * x)[..., None] * b[:, :, None]
        h, memory = diagonal(u.flatten(2), decay=decay.flatten(2), state=state.memory.flatten(1), mask=mask)
        y = (h.reshape(decay.shape) @ c[..., None].to(h.dtype)).squeeze(-1).to(x.dtype) + self.D * x
        return self.out_proj(y * F.silu(z)), MambaState(recent, memory.reshape(state.memory.shape))


def read_mamba(weights: Mapping[str, Tensor]) -> Mamba:
    """A block with the weights of a mixer of Hugging Face's Mamba: `model.backbone.layers[0].mixer.state_dict()`.

    Raises:
        SpecError: A name is missing or unknown, or shapes do not fit each other.
    Differs: everything is computed in the dtype of the weights; theirs takes A, D and steps to float32.
    """
    needed = ("in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "out_proj.weight", "A_log", "D")
    for name in needed:
        if name not in weights:
            raise SpecError(f"`weights` lacks `{name}`; pass the state dict of one mixer, as in `model.backbone.layers[0].mixer.state_dict()`.")
    try:
        sizes = check(in_proj=(weights["in_proj.weight"], "G D"), A_log=(weights["A_log"], "I S"), dt_proj=(weights["dt_proj.weight"], "I R"),
                      conv1d=(weights["conv1d.weight"], "I 1 W"), out_proj=(weights["out_proj.weight"], "E I"))  # fmt: skip
    except ShapeError as error:
        raise SpecError(f"`weights` are not of one Mamba mixer: {error}") from None
    spec = MambaSpec(width=sizes["D"], inner=sizes["I"], memory=sizes["S"], step_rank=sizes["R"], convolution=sizes["W"], out_width=sizes["E"],
                     convolution_bias="conv1d.bias" in weights, bias="in_proj.bias" in weights)  # fmt: skip
    layer = Mamba(spec, dtype=weights["in_proj.weight"].dtype)
    own = layer.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        came, expected = (tuple(source[name].shape) if name in source else "nothing" for source in (weights, own))
        if came != expected:
            raise SpecError(f"`{name}` is {came} and {expected} is expected beside the other weights of this Mamba mixer.")
    layer.load_state_dict(dict(weights))
    return layer
