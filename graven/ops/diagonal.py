"""The diagonal linear recurrence: every entry of the state decays by a factor of its own and is then added to.

    h_t = a_t * h_(t-1) + u_t                                             (* is entrywise; real or complex)

Two forms of one function. "scan" walks over the tokens in place, inside one node of the graph, on memory laid out [T, B, S]: a step is
then one fused call on what lies together. Its derivative is the same operation run backwards in time, so it can be derived again:

    p_t = dL/dh_t + conj(a_(t+1)) p_(t+1),     dL/du_t = p_t,     dL/da_t = p_t conj(h_(t-1)),     dL/dh_0 = conj(a_1) p_1

No form divides by a product of decays: 0 is a decay like any other, and cumulative sums of logarithms are NaN there.

Source: Zucchet et al. 2023, arXiv:2309.01775, equation 2; Orvieto et al. 2023, arXiv:2303.06349, equation 5 (complex). The adjoint is ours.
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Inexact
from torch import Tensor

from graven.errors import ShapeError, SpecError
from graven.shapes import check

Form = Literal["scan", "recurrent"]


def diagonal(
    u: Inexact[Tensor, "B T S"],
    *,
    decay: Inexact[Tensor, "S"] | Inexact[Tensor, "B T S"],
    state: Inexact[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    form: Form = "scan",
) -> tuple[Inexact[Tensor, "B T S"], Inexact[Tensor, "B S"]]:
    """The state after every token, and after the last one; exact in value, first and second derivative. S is the size of the state.

    Args:
        u: What each token adds. Cheapest where it lies in memory as [T, B, S].
        decay: a, one factor an entry, or one an entry and token. Of any size: nothing keeps it below 1.
        state: Before the first token; zeros where left out.
        mask: True where a token is real. The others leave the state as it is, whatever `u` and `decay` hold there.
        form: "recurrent" is the definition, a node of the graph for every token; it also runs under transformations of torch.func.
    Returns:
        States, real only where everything is; in float32 or wider, for a state is added to at every step.
    Raises:
        ShapeError: A tensor does not fit the others.
        SpecError: An unknown form.
    Source: Zucchet et al. 2023, arXiv:2309.01775, equation 2.

    >>> h, end = diagonal(torch.ones(1, 3, 2), decay=torch.tensor([1.0, 0.5]))
    >>> h[0, :, 1].tolist(), end.tolist()
    ([1.0, 1.5, 1.75], [[3.0, 1.75]])
    """
    _check_arguments(u, decay, state, mask)
    dtype = torch.promote_types(torch.promote_types(u.dtype, decay.dtype), torch.float32)
    dtype = dtype if state is None else torch.promote_types(dtype, state.dtype)
    start = u.new_zeros(u.shape[0], u.shape[2], dtype=dtype) if state is None else state.to(dtype)
    if mask is not None:
        u = u.masked_fill(~mask[..., None], 0.0)
        decay = torch.where(mask[..., None], decay, torch.ones((), dtype=decay.dtype, device=decay.device))
    if u.shape[1] == 0:
        return u.to(dtype), start
    gates = decay.to(dtype).expand(1, 1, -1) if decay.dim() == 1 else decay.to(dtype).transpose(0, 1)
    rows = u.to(dtype).transpose(0, 1)
    if form == "scan":
        h = _scan(rows, gates, start, backwards=False)
    elif form == "recurrent":
        h = _recurrent(rows, gates, start)
    else:
        raise SpecError(f'`form` is {form!r}; it must be "scan" or "recurrent".')
    return h.transpose(0, 1), h[-1]


def _recurrent(u: Tensor, gates: Tensor, state: Tensor) -> Tensor:
    """The definition, one token at a time: slow, and the judge of the other form."""
    states = []
    for u_t, gate in zip(u.unbind(0), gates.expand(len(u), -1, -1).unbind(0), strict=True):
        state = gate * state + u_t
        states.append(state)
    return torch.stack(states)


def _scan(u: Tensor, gates: Tensor, start: Tensor, *, backwards: bool) -> Tensor:
    return _Scan.apply(u, gates, start, backwards)  # type: ignore[no-untyped-call]  # torch gives `apply` no types


class _Scan(torch.autograd.Function):
    """The recurrence in place, from either end. Rows [T, B, S]; gates [T or 1, B or 1, S]."""

    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(ctx: Any, u: Tensor, gates: Tensor, start: Tensor, backwards: bool) -> Tensor:
        h = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        steps = list(zip(h.unbind(0), u.unbind(0), gates.expand(len(u), -1, -1).unbind(0), strict=True))
        before = start
        for h_t, u_t, gate in reversed(steps) if backwards else steps:
            torch.addcmul(u_t, gate, before, out=h_t)
            before = h_t
        ctx.save_for_backward(gates, start, h)
        ctx.backwards = backwards
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        gates, start, h = ctx.saved_tensors
        first, last = (slice(-1, None), slice(0, 1)) if ctx.backwards else (slice(0, 1), slice(-1, None))
        later = gates if len(gates) == 1 else _shifted(gates, torch.zeros_like(gates[last]), not ctx.backwards)
        p = _scan(grads[0], later.conj(), torch.zeros_like(start), backwards=not ctx.backwards)
        before = _shifted(h, start[None], ctx.backwards) if ctx.needs_input_grad[1] else None
        grad_gates = None if before is None else (p * before.conj()).sum_to_size(gates.shape)
        grad_start = (gates[first].conj() * p[first])[0] if ctx.needs_input_grad[2] else None
        return p, grad_gates, grad_start, None


def _shifted(x: Tensor, fill: Tensor, backwards: bool) -> Tensor:
    """What lay one step earlier, seen in the direction of walking."""
    return torch.cat([x[1:], fill]) if backwards else torch.cat([fill, x[:-1]])


def _check_arguments(u: Tensor, decay: Tensor, state: Tensor | None, mask: Tensor | None) -> None:
    given = {name: pair for name, pair in {"state": (state, "B S"), "mask": (mask, "B T")}.items() if pair[0] is not None}
    try:
        check(u=(u, "B T S"), decay=(decay, "S" if decay.dim() == 1 else "B T S"), **given)  # type: ignore[arg-type]  # None was left out
    except ShapeError as error:
        raise ShapeError(f"{error} Tokens are axis 1 (T) of `u`; `decay` is [S] or [B, T, S].") from None
