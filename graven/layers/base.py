"""What recurrent layers share: how tokens come in, how weights start, and one layer upon the other.

Every such layer is called alike: `layer(x, state=None, mask=None) -> (y, state)`. Tokens [B, T, D] in, reads [B, T, E] out; a state left out is
the start; padding (mask False) changes no state, and what it reads means nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import ShapeError, SpecError
from graven.shapes import check
from graven.tasks.base import front, rows_at

S = TypeVar("S")


def entered(x: Tensor, *, width: int, mask: Tensor | None, state: tuple[Tensor | None, str] = (None, "")) -> Tensor:
    """Tokens whose shape was checked, padding set to 0: whatever lay there, NaN too, now reaches neither a state nor a gradient.

    Args:
        state: With its axes, as `check` takes them.
    Raises:
        ShapeError: The parts do not fit each other.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise ShapeError(f"`mask` is of {mask.dtype}; True where a token is real was expected: pass mask.bool().")
    given = {} if state[0] is None else {"state": (state[0], state[1])}
    check(x=(x, f"B T {width}"), **given, **({} if mask is None else {"mask": (mask, "B T")}))
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def in_order(
    run: Callable[[Tensor, S, Tensor | None], tuple[Tensor, S]], x: Float[Tensor, "B T D"], state: S, mask: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T E"], S]:
    """A run over rows whose real tokens stand in front, for padding anywhere: neighbours are then those that a convolution should see."""
    if mask is None or bool((mask[:, :-1] >= mask[:, 1:]).all()):
        return run(x, state, mask)
    order = front(mask)
    y, end = run(rows_at(x, order), state, mask.gather(1, order))
    return rows_at(y, order.argsort(-1)), end


class Convolution(nn.Conv1d):
    """A causal depthwise convolution over rows that come in parts: the last tokens of one part are what the next begins to see."""

    def __init__(self, width: int, span: int, *, bias: bool = True, dtype: torch.dtype | None = None):
        super().__init__(width, width, span, groups=width, bias=bias, dtype=dtype)

    def start(self, batch: int) -> Float[Tensor, "B R D"]:
        """Nothing seen yet: zeros, float32 or wider."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.new_zeros(batch, self.kernel_size[0] - 1, self.in_channels, dtype=wide)

    def forward(  # type: ignore[override]  # torch's own takes no window
        self, x: Float[Tensor, "B T D"], recent: Float[Tensor, "B R D"], mask: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B R D"]]:
        """Each token with those before it, and the last real ones. Padding stands at the end of a row.

        Raises:
            ShapeError: Tokens and window differ in rows.
        """
        check(x=(x, f"B T {self.in_channels}"), recent=(recent, f"B {self.kernel_size[0] - 1} {self.in_channels}"))
        if not x.shape[1]:
            return x, recent
        seen = torch.cat([recent.to(x.dtype), x], 1)
        # tap by tap: torch's own backward of a depthwise convolution takes ten times as long on a CPU
        taps = [seen[:, at : at + x.shape[1]] * self.weight[:, 0, at] for at in range(self.kernel_size[0])]
        y = sum(taps[1:], taps[0]) if self.bias is None else sum(taps, self.bias)
        lengths = x.new_full((len(x), 1), x.shape[1], dtype=torch.long) if mask is None else mask.sum(1, keepdim=True)
        last = lengths + torch.arange(recent.shape[1], device=x.device)
        return y, rows_at(seen, last).to(recent.dtype)


def axes_of(start: Tensor) -> str:
    """The axes of a part of a state, as `check` takes them, from the start of one row."""
    return " ".join(["B", *map(str, start.shape[1:])])


def in_heads(x: Float[Tensor, "B T D"], heads: int) -> Float[Tensor, "B T H K"]:
    """Features as heads side by side."""
    return x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)


def affine(x: Tensor, weight: Tensor) -> Tensor:
    """A map whose last column acts on the constant 1."""
    return F.linear(x, weight[:, :-1], weight[:, -1])


@torch.no_grad()
def start_(module: nn.Module, generator: torch.Generator | None) -> None:
    """Weights from N(0, 1 / fan-in), biases 0."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.zero_()


def at_least_one(**numbers: int) -> None:
    """One sentence about the first number that is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise SpecError(f"`{name}` is {number}; it must be at least 1.")


class Chain(nn.Module):
    """Layers one upon the other: each takes what the one before it reads. Its state is a tuple of theirs.

    Raises:
        SpecError: No layers, or a state of another number of layers.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        at_least_one(layers=len(self.layers))

    def forward(
        self, x: Float[Tensor, "B T D"], state: tuple[Any, ...] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], tuple[Any, ...]]:
        """What every token reads, and the states of all layers after the last one."""
        if state is not None and len(state) != len(self.layers):
            raise SpecError(f"`state` holds {len(state)} states and there are {len(self.layers)} layers; pass one for each.")
        ends = []
        for layer, start in zip(self.layers, state or [None] * len(self.layers), strict=True):
            x, end = layer(x, start, mask)
            ends.append(end)
        return x, tuple(ends)
