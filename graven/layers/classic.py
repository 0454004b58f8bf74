"""The LSTM and the GRU of torch behind the interface of the other layers, with a linear readout.

Source: Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078; the equations are those of torch.nn.LSTM and torch.nn.GRU.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from graven.errors import SpecError
from graven.layers.base import at_least_one, entered

Cell = Literal["lstm", "gru"]


@dataclass(frozen=True, kw_only=True)
class ClassicSpec:
    """The shape of a `Classic`.

    Args:
        width: Of a token, D.
        hidden: Cells, n.
        cell: "lstm" or "gru".
        out_width: Of what is read, as wide as a token where left out.
    Raises:
        SpecError: A number is below 1, or the cell is unknown.
    """

    width: int
    hidden: int
    cell: Cell
    out_width: int | None = None

    def __post_init__(self) -> None:
        at_least_one(width=self.width, hidden=self.hidden, out_width=self.reads)
        if self.cell not in ("lstm", "gru"):
            raise SpecError(f'`cell` is {self.cell!r}; it must be "lstm" or "gru".')

    @property
    def reads(self) -> int:
        """Width of what is read."""
        return self.width if self.out_width is None else self.out_width


class Classic(nn.Module):
    """One layer of LSTM or GRU cells, all weights from U(-1, 1) / sqrt(n) as torch has it, and `readout` on top.

    The state of a GRU is h in [B, 1, n], that of an LSTM h and c in [B, 2, n].
    """

    def __init__(self, spec: ClassicSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.cells = (nn.LSTM if spec.cell == "lstm" else nn.GRU)(spec.width, spec.hidden, batch_first=True, dtype=dtype)
        self.readout = nn.Linear(spec.hidden, spec.reads, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-(spec.hidden**-0.5), spec.hidden**-0.5, generator=generator)

    def forward(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "B L S"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B L S"]]:
        """What every token reads, and the state after the last one: L = 1 or 2 vectors of S = n.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        parts = 2 if self.spec.cell == "lstm" else 1
        x = entered(x, width=self.spec.width, mask=mask, state=(state, f"B {parts} {self.spec.hidden}"))
        state = x.new_zeros(len(x), parts, self.spec.hidden) if state is None else state
        if mask is None:
            h, state = self._run(x, state)
            return self.readout(h), state
        states = []
        for t in range(x.shape[1]):  # token by token: torch's fused loops know padding at the end only
            state = torch.where(mask[:, t, None, None], self._run(x[:, t : t + 1], state)[1], state)
            states.append(state[:, 0])
        return self.readout(torch.stack(states, 1) if states else x.new_zeros(len(x), 0, self.spec.hidden)), state

    def _run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not x.shape[1]:
            return x.new_zeros(len(x), 0, self.spec.hidden), state
        start = [part[None].contiguous() for part in state.unbind(1)]
        if self.spec.cell == "gru":
            h, end = self.cells(x, start[0])
            return h, end.transpose(0, 1)
        h, ends = self.cells(x, tuple(start))
        return h, torch.cat(ends).transpose(0, 1)
