"""The linear recurrent unit: a complex diagonal recurrence between an embedding and a gated linear unit.

    h_t = a * h_(t-1) + g * B e_t,    z_t = Re(C h_t) + d * e_t,    y_t = D unit(z_t),     a = exp(-exp(nu) + i exp(theta))

e_t is a linear map of the token ("LRU") or a unit upon the token ("LRU In+Out"); a unit is a GLU, (W z + b) * sigmoid(W' z + b'), or in its place an
MLP of one hidden layer with as many parameters.

Source: Orvieto et al. 2023, arXiv:2303.06349, equations 5 to 7; Zucchet et al. 2023, arXiv:2309.01775, section 4.3.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.base import at_least_one, entered, start_
from graven.ops.diagonal import diagonal

Gating = Literal["out", "in_out"]
Unit = Literal["glu", "mlp"]
Scale = Literal["clipped", "none"]
LEAST = 1e-4  # of 1 - |a|^2: the input scale stays at 0.01 or above


@dataclass(frozen=True, kw_only=True)
class LRUSpec:
    """The shape of an `LRU`.

    Args:
        width: Of a token, D.
        hidden: Complex neurons that remember, n.
        inner: Width of e and z.
        out_width: Of what is read, as wide as a token where left out.
        gating: Where units stand: "out" behind the recurrence, "in_out" before it too.
        unit: "glu", or "mlp" with as many parameters, to within those of one hidden neuron.
        scale: g. "clipped" is the root of 1 - |a|^2, but never below 0.01; "none" is 1.
        phase: Largest angle of a at the start, in radians.
    Raises:
        SpecError: A number is out of range, or a name is unknown.
    Differs: the root of 1 - |a|^2 has an infinite derivative at |a| = 1, which is where attention lies: it is clipped or left out.
    """

    width: int
    hidden: int
    inner: int
    out_width: int | None = None
    gating: Gating = "out"
    unit: Unit = "glu"
    scale: Scale = "clipped"
    phase: float = 2 * math.pi

    def __post_init__(self) -> None:
        at_least_one(width=self.width, hidden=self.hidden, inner=self.inner, out_width=self.reads)
        for name, choices in (("gating", ("out", "in_out")), ("unit", ("glu", "mlp")), ("scale", ("clipped", "none"))):
            if getattr(self, name) not in choices:
                raise SpecError(f'`{name}` is {getattr(self, name)!r}; it must be "{choices[0]}" or "{choices[1]}".')
        if not 0 < self.phase <= 2 * math.pi:
            raise SpecError(f"`phase` is {self.phase}; it must be above 0 and at most 2 pi, in radians.")

    @property
    def reads(self) -> int:
        """Width of what is read."""
        return self.width if self.out_width is None else self.out_width


class GLU(nn.Module):
    """(W x + b) * sigmoid(W' x + b')."""

    def __init__(self, width: int, out_width: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.value, self.gate = (nn.Linear(width, out_width, dtype=dtype) for _ in range(2))

    def forward(self, x: Float[Tensor, "*rows _"]) -> Float[Tensor, "*rows _"]:
        """The product of the two."""
        return self.value(x) * torch.sigmoid(self.gate(x))


def mlp(width: int, out_width: int, dtype: torch.dtype | None = None) -> nn.Sequential:
    """One hidden layer, of a size that gives as many parameters as a GLU has: equal where the two widths are equal."""
    hidden = max(1, round(out_width * (2 * width + 1) / (width + out_width + 1)))
    return nn.Sequential(nn.Linear(width, hidden, dtype=dtype), nn.GELU(), nn.Linear(hidden, out_width, dtype=dtype))


class LRU(nn.Module):
    """One layer of the equations above. `log_rate` is nu, `log_phase` theta; `b` [n, inner, 2] and `c` [inner, n, 2] hold real and imaginary parts.

    |a| starts uniform on the disc, its angle uniform up to `phase`; B, C and units at N(0, 1 / fan-in).
    """

    def __init__(self, spec: LRUSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        make = GLU if spec.unit == "glu" else mlp
        self.embed = make(spec.width, spec.inner, dtype) if spec.gating == "in_out" else nn.Linear(spec.width, spec.inner, dtype=dtype)
        self.unit = make(spec.inner, spec.inner, dtype)
        self.readout = nn.Linear(spec.inner, spec.reads, bias=False, dtype=dtype)
        start_(self, generator)
        radius, angle = (torch.rand(spec.hidden, generator=generator, dtype=dtype).clamp_min(1e-6) for _ in range(2))
        self.log_rate = nn.Parameter((-0.5 * radius.log()).log())  # |a| is the root of `radius`
        self.log_phase = nn.Parameter((spec.phase * angle).log())
        b, c = (torch.randn(*shape, 2, generator=generator, dtype=dtype) for shape in ((spec.hidden, spec.inner), (spec.inner, spec.hidden)))
        self.b, self.c = nn.Parameter(b * (2 * spec.inner) ** -0.5), nn.Parameter(c * spec.hidden**-0.5)
        self.skip = nn.Parameter(torch.randn(spec.inner, generator=generator, dtype=dtype))

    @property
    def decay(self) -> Complex[Tensor, "S"]:
        """a. A rate of exp(-40) is |a| = 1 and one of exp(40) is a = 0, to the last digit of float64."""
        return torch.polar((-self.log_rate.exp()).exp(), self.log_phase.exp())

    def forward(
        self, x: Float[Tensor, "B T D"], state: Complex[Tensor, "B S"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], Complex[Tensor, "B S"]]:
        """What every token reads, and the state after the last one, S = n complex numbers.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = entered(x, width=self.spec.width, mask=mask, state=(state, f"B {self.spec.hidden}"))
        e = self.embed(x)
        u = torch.complex(F.linear(e, self.b[..., 0]), F.linear(e, self.b[..., 1]))
        if self.spec.scale == "clipped":
            u = u * (-torch.expm1(-2 * self.log_rate.exp())).clamp_min(LEAST).sqrt()
        h, end = diagonal(u, decay=self.decay, state=state, mask=mask)
        z = F.linear(h.real, self.c[..., 0]) - F.linear(h.imag, self.c[..., 1]) + self.skip * e
        return self.readout(self.unit(z)), end
