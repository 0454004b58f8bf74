"""What the operations with one matrix a head share: their door, their first state, sums of log gates over pairs of steps."""

import torch
from torch import Tensor

from graven.errors import ShapeError, SpecError
from graven.shapes import check


def check_heads(q: Tensor, k: Tensor, v: Tensor, **rest: tuple[Tensor | None, str]) -> None:
    """Pass where the arguments fit each other.

    Args:
        rest: Further tensors with their axes, as `check` takes them. What is named `log_gate...` must not be above 0.
    Raises:
        ShapeError: A tensor does not fit the others.
        SpecError: A log gate above 0, a state narrower than float32.
    """
    given = {name: (x, axes) for name, (x, axes) in rest.items() if x is not None}
    try:
        check(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T H V"), **given)
    except ShapeError as error:
        raise ShapeError(f"{error} Tokens are axis 1 (T) and heads axis 2 (H) of all but `state`, which is [B, H, K, V].") from None
    for name, (x, axes) in given.items():
        if name.startswith("log_gate") and (x > 0).any():
            place = tuple((x > 0).nonzero()[0].tolist())
            where = ", ".join(f"{letter}={index}" for letter, index in zip(axes.split(), place, strict=True))
            raise SpecError(f"`{name}` is {x[place].item():.4g} at {where}; it is the logarithm of a gate and at most 0: pass logsigmoid.")
        if name == "state" and x.dtype not in (torch.float32, torch.float64):
            raise SpecError(f"`state` is {x.dtype}; a state is added to at every step and must be float32 or wider: pass `state.float()`.")


def first_state(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, state: Tensor | None) -> Tensor:
    """The first state, in the dtype that everything is computed in."""
    wide = torch.float64 if any(x is not None and x.dtype == torch.float64 for x in (q, k, v, *gates, state)) else torch.float32
    if state is not None:
        return state.to(wide)
    return torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=wide, device=q.device)


def pair_sums(log_gate: Tensor) -> Tensor:
    """Sums over the steps s < j <= t as [..., t, s, gate], each added up for itself; 0 where s >= t."""
    length = log_gate.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=log_gate.device).tril(-1)[..., None]
    return log_gate[..., :, None, :].masked_fill(~later, 0.0).cumsum(-3)


def blocks(x: Tensor, size: int) -> Tensor:
    """[..., T, K] as [..., T / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])
