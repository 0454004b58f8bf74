"""The delta rule: what a key holds is corrected towards a value, so that a key which is written twice holds the last value.

    S_t = g_t S_{t-1} + beta_t k_t (v_t - (g_t S_{t-1})^T k_t)^T          (write; g_t = exp(log_gate_t), one number a head)
    o_t = scale * S_t^T q_t                                               (read)

One step of gradient descent on |S^T k_t - v_t|^2 / 2, of rate beta_t. Two forms of one function; within a chunk that starts from S, with
D_ts the decay over the steps s < j <= t, the corrections U_t = beta_t (v_t - (g_t S_{t-1})^T k_t) solve a triangular system:

    (1 + A) U = beta (V - (D_t0 K) S),   A_ts = beta_t k_t.k_s D_ts, s < t;        o_t = D_t0 S^T q_t + sum over s <= t of q_t.k_s D_ts U_s

Every decay is the exponential of a sum over just the steps it spans, at most 0, as in `ops.gated_linear`.

Source: Yang et al. 2024, arXiv:2406.06484, equation 2 and section 3.2 (the chunks); Yang et al. 2024, arXiv:2412.06464, equation 10 (the gate).
The triangular solve in place of their inverse is ours; tests/test_delta.py holds both forms to plain loops.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from graven.errors import SpecError
from graven.ops.base import blocks, check_heads, first_state, pair_sums

Form = Literal["recurrent", "chunk"]


def delta(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    beta: Float[Tensor, "B T H"],
    log_gate: Float[Tensor, "B T H"] | None = None,
    scale: float = 1.0,
    state: Float[Tensor, "B H K V"] | None = None,
    form: Form = "chunk",
    chunk: int = 32,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """What every token reads, and the state after the last one; exact in value, first and second derivative.

    A step with beta 0 and log gate 0 leaves the state as it is, bit for bit: that is how a caller passes over padding.

    Args:
        q: Queries.
        k: Keys. With |k| = 1 a step of beta 1 makes the key hold the value exactly; beta |k|^2 above 2 makes the state grow.
        v: Values.
        beta: Rate of the step.
        log_gate: Logarithm of the gate on the whole state, before the correction; at most 0, -inf is a gate of exactly 0. None is no gate.
        scale: Factor on what is read.
        state: Before the first token, float32 or wider; zeros where left out.
        form: "recurrent" is the definition, T dependent steps; "chunk" has T / chunk of them.
        chunk: Most tokens that the chunked form sees at once.
    Returns:
        Reads in the dtype of `v`, and the state in float32, or in float64 if anything came in float64.
    Raises:
        ShapeError: A tensor does not fit the others, often because T and H are swapped.
        SpecError: A log gate above 0, a state narrower than float32, an unknown form, a chunk below 1.
    Source: Yang et al. 2024, arXiv:2406.06484, equation 2; arXiv:2412.06464, equation 10.

    >>> k, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    >>> o, state = delta(k, k, v, beta=torch.ones(1, 2, 1))
    >>> o.flatten().tolist(), state.item()
    ([3.0, 5.0], 5.0)
    """
    check_heads(q, k, v, beta=(beta, "B T H"), log_gate=(log_gate, "B T H"), state=(state, "B H K V"))
    if chunk < 1:
        raise SpecError(f"`chunk` is {chunk}; it must be at least 1.")
    dtype, start = v.dtype, first_state(q, k, v, beta, log_gate, state=state)
    gate = torch.zeros_like(beta) if log_gate is None else log_gate
    rows = [x.to(start.dtype).transpose(1, 2) for x in (q.to(start.dtype) * scale, k, v, beta[..., None], gate[..., None])]
    if form not in ("recurrent", "chunk"):
        raise SpecError(f'`form` is {form!r}; it must be "recurrent" or "chunk".')
    with torch.autocast(q.device.type, enabled=False):  # it would compute the state in half of the digits that it is kept in
        o, end = _recurrent(*rows, state=start) if form == "recurrent" else _chunk(*rows, state=start, chunk=chunk)
    return o.transpose(1, 2).to(dtype), end


def _recurrent(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time: slow, and the judge of the other form."""
    reads = []
    for q_t, k_t, v_t, beta_t, gate_t in zip(*(x.unbind(2) for x in (q, k, v, beta, gate)), strict=True):
        state = gate_t.exp()[..., None] * state
        held = (k_t[..., None, :] @ state).squeeze(-2)
        state = state + k_t[..., None] * (beta_t * (v_t - held))[..., None, :]
        reads.append((q_t[..., None, :] @ state).squeeze(-2))
    return (torch.stack(reads, 2) if reads else v), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor, *, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """All chunks are solved at once, for their values and for what the state before them will take off; the state walks from one to the next."""
    length = q.shape[2]
    if length == 0:
        return v, state
    size = math.ceil(length / math.ceil(length / chunk))  # as many chunks, of nearly equal size
    fill = -length % size  # steps that correct nothing and decay nothing
    q, k, v, beta, gate = (blocks(F.pad(x, (0, 0, 0, fill)), size) for x in (q, k, v, beta, gate))
    since, decay = gate.cumsum(-2).exp(), pair_sums(gate).squeeze(-1).exp()
    ours = torch.linalg.solve_triangular(
        (beta * (k @ k.mT) * decay).tril(-1), torch.cat([beta * v, beta * since * k], -1), upper=False, unitriangular=True
    )
    values, taken = ours.split([v.shape[-1], k.shape[-1]], -1)
    seen, late, whole = (q @ k.mT * decay).tril(), k * decay[..., -1, :, None], since[..., -1:, :]
    direct, through = seen @ values, q * since - seen @ taken
    reads = []
    for value, take, last, end, own, old in zip(*(x.unbind(2) for x in (values, taken, late, whole, direct, through)), strict=True):
        reads.append(own + old @ state)
        state = end * state + last.mT @ (value - take @ state)
    return torch.stack(reads, 2).flatten(2, 3)[:, :, :length], state
