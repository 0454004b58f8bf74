"""The simplest recurrent layer that can hold attention: a linear recurrence between two products of linear maps.

    h_t = a * h_(t-1) + (W1_in x_t) * (W2_in x_t)                         (a constant 1 is appended to x; * is entrywise)
    y_t = D [(W1_out h_t) * (W2_out h_t)]                                 (input and output gating)
    y_t = D [(W_side x_t) * h_t]                                          (side gating)

Source: Zucchet et al. 2023, arXiv:2309.01775, equation 2, appendix A.2 (side gating) and section 4.3 (dense recurrence).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.base import affine, at_least_one, entered
from graven.ops.diagonal import diagonal

Gating = Literal["input_output", "side"]
Recurrence = Literal["diagonal", "dense"]
SPREAD = 0.4  # standard deviation of a weight at the start, times the root of its fan-in


@dataclass(frozen=True, kw_only=True)
class GatedRNNSpec:
    """The shape of a `GatedRNN`.

    Args:
        width: Of a token, D.
        hidden: Neurons that remember, n.
        output_gates: Products of two readings of the state, m; left out with side gating, which multiplies the state itself.
        out_width: Of what is read, as wide as a token where left out.
        gating: What the state is multiplied with: "input_output" another reading of the state, "side" a map of the token.
        recurrence: "diagonal" a factor for each neuron, "dense" a matrix in its place.
    Raises:
        SpecError: A number is below 1, a name is unknown, or output gates are missing or cannot be.
    """

    width: int
    hidden: int
    output_gates: int = 0
    out_width: int | None = None
    gating: Gating = "input_output"
    recurrence: Recurrence = "diagonal"

    def __post_init__(self) -> None:
        if self.gating not in ("input_output", "side"):
            raise SpecError(f'`gating` is {self.gating!r}; it must be "input_output" or "side".')
        if self.recurrence not in ("diagonal", "dense"):
            raise SpecError(f'`recurrence` is {self.recurrence!r}; it must be "diagonal" or "dense".')
        if self.gating == "side" and self.output_gates:
            raise SpecError(f'`output_gates` is {self.output_gates} and `gating` is "side", which has none; leave `output_gates` out.')
        numbers = {"width": self.width, "hidden": self.hidden, "out_width": self.reads}
        at_least_one(**numbers, **({} if self.gating == "side" else {"output_gates": self.output_gates}))

    @property
    def reads(self) -> int:
        """Width of what is read."""
        return self.width if self.out_width is None else self.out_width

    @property
    def parameters(self) -> int:
        """Numbers that the layer learns: 2n(D + 1) + n + 2mn + Em with E read, one for each neuron and D + 1 and E with side gating."""
        memory = self.hidden if self.recurrence == "diagonal" else self.hidden**2
        side = self.hidden * (self.width + 1 + self.reads)
        read = side if self.gating == "side" else self.output_gates * (2 * self.hidden + self.reads)
        return 2 * self.hidden * (self.width + 1) + memory + read


class GatedRNN(nn.Module):
    """The layer of equation 2. Every parameter is a plain matrix, `[to, from]`; the last column of what acts on a token acts on the constant 1.

    Weights start at N(0, 0.16 / fan-in) and decays at U(0, 1); a dense recurrence starts symmetric with eigenvalues from U(0, 1).

    Args:
        spec: Its shape.
        generator: Of the first weights; torch's own where left out.
        dtype: Of the weights, torch's default where left out.
    Differs: decays are free numbers, and `project_` puts them back into [0, 1] after a step of training; a sigmoid or exp(-exp(.)) never reaches
        0 and 1, where attention lies.
    Source: Zucchet et al. 2023, arXiv:2309.01775, equation 2; the start of training is ours, docs/theory.md.
    """

    decay: nn.Parameter  # [n], of a diagonal recurrence
    recurrence: nn.Parameter  # [n, n], of a dense one
    w_out1: nn.Parameter  # [m, n], of input and output gating, as w_out2
    w_out2: nn.Parameter
    w_side: nn.Parameter  # [n, D + 1], of side gating

    def __init__(self, spec: GatedRNNSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        n, m, width = spec.hidden, spec.output_gates, spec.width + 1

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype) * SPREAD * shape[1] ** -0.5)

        self.w_in1, self.w_in2 = drawn(n, width), drawn(n, width)
        decay = torch.rand(n, generator=generator, dtype=dtype)
        if spec.recurrence == "diagonal":
            self.decay = nn.Parameter(decay)
        else:
            basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=dtype))[0]
            self.recurrence = nn.Parameter(basis * decay @ basis.mT)
        if spec.gating == "side":
            self.w_side, self.readout = drawn(n, width), drawn(spec.reads, n)
        else:
            self.w_out1, self.w_out2, self.readout = drawn(m, n), drawn(m, n), drawn(spec.reads, m)

    def forward(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "B S"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B S"]]:
        """What every token reads, E wide, and the state after the last one.

        Args:
            x: Tokens; none at all leaves the state as it is.
            state: h_0, S = n wide; zeros where left out.
            mask: True where a token is real; the others change no state, and read it as a token of zeros would.
        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = self._checked(x, state, mask)
        h, end = self._remember(x, state, mask)
        return self.read(h.to(x.dtype), x), end

    def hidden(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "B S"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T S"]:
        """The state after every token."""
        return self._remember(self._checked(x, state, mask), state, mask)[0]

    def read(self, h: Float[Tensor, "B T S"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T E"]:
        """What tokens read in given states; the tokens themselves matter with side gating only."""
        if self.spec.gating == "side":
            return F.linear(affine(x, self.w_side) * h, self.readout)
        return F.linear(F.linear(h, self.w_out1) * F.linear(h, self.w_out2), self.readout)

    @torch.no_grad()
    def project_(self) -> None:
        """Decays to the nearest ones in [0, 1]; a dense recurrence to the nearest matrix of spectral norm at most 1."""
        if self.spec.recurrence == "diagonal":
            self.decay.clamp_(0.0, 1.0)
        else:
            left, values, right = torch.linalg.svd(self.recurrence)
            self.recurrence.copy_(left * values.clamp(max=1.0) @ right)

    def _checked(self, x: Tensor, state: Tensor | None, mask: Tensor | None) -> Tensor:
        return entered(x, width=self.spec.width, mask=mask, state=(state, f"B {self.spec.hidden}"))

    def _remember(self, x: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1)  # [T, B, D], so that the scan finds its memory in order
        u = (affine(rows, self.w_in1) * affine(rows, self.w_in2)).transpose(0, 1)
        if self.spec.recurrence == "diagonal":
            return diagonal(u, decay=self.decay, state=state, mask=mask)
        h = u.new_zeros(len(u), self.spec.hidden) if state is None else state
        states = []
        for t, u_t in enumerate(u.unbind(1)):
            new = F.linear(h, self.recurrence) + u_t
            h = new if mask is None else torch.where(mask[:, t, None], new, h)
            states.append(h)
        return (torch.stack(states, 1) if states else u), h
