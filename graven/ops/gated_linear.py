"""Gated linear attention: one matrix per head, decayed and then written once per token.

    S_t = G_t * S_{t-1} + k_t v_t^T,     G_t = exp(a_t) exp(b_t)^T        (write; * is entrywise, a_t gates keys, b_t gates values)
    o_t = scale * S_t^T q_t                                               (read)

Three forms of one function. No form ever subtracts one sum of log gates from another: a cumulative sum over thousands of strong gates is
so large that float32 has no digits left for the weak gates after it, and the difference of two such sums loses them. Every decay here is
the exponential of a sum over just the steps it spans, which is at most 0.

Source: Yang et al. 2023, arXiv:2312.06635, equation 3 and section 4 (the recurrence and the chunks); Li et al. 2025, arXiv:2504.04308,
equation (GLA), whose S is the transpose of ours and whose scale is 1.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from graven.errors import SpecError
from graven.ops.base import blocks, check_heads, first_state, pair_sums

Form = Literal["recurrent", "parallel", "chunk"]


def gated_linear(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    log_gate_k: Float[Tensor, "B T H _"] | None = None,
    log_gate_v: Float[Tensor, "B T H V"] | None = None,
    scale: float = 1.0,
    state: Float[Tensor, "B H K V"] | None = None,
    reset: Bool[Tensor, "B T"] | None = None,
    form: Form = "chunk",
    chunk: int = 64,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """What every token reads, and the state after the last one; exact in value, first and second derivative.

    A step with log gates 0 and k or v 0 leaves the state as it is: that is how a caller passes over padding.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        log_gate_k: Logarithm of the gate on the key axis of the state, at most 0; one number a head in [B, T, H, 1]. None is no gate.
        log_gate_v: Logarithm of the gate on the value axis. -inf, on either axis, is a gate of exactly 0.
        scale: Factor on what is read. flash-linear-attention takes K ** -0.5 where nothing is said.
        state: Before the first token, float32 or wider; zeros where left out.
        reset: True where the whole state is forgotten before the token is written.
        form: "recurrent" is the definition, T dependent steps. "parallel" holds every pair of tokens: memory T T (K + V) a head, T T for one
            gate a head. "chunk" costs and holds what grows with T only.
        chunk: Tokens that the chunked form sees at once, rounded up to a power of two.
    Returns:
        Reads in the dtype of `v`, and the state in float32, or in float64 if anything came in float64.
    Raises:
        ShapeError: A tensor does not fit the others, often because T and H are swapped.
        SpecError: A log gate above 0, a state narrower than float32, an unknown form, a chunk below 1.
    Differs from flash-linear-attention: the scale; sums of log gates instead of their differences; a value-axis gate; `reset`.
    Source: Yang et al. 2023, arXiv:2312.06635, equation 3.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> o, state = gated_linear(q, k, v, log_gate_k=torch.full((1, 3, 1, 1), 0.5).log())
    >>> o.flatten().tolist(), state.item()
    ([1.0, 1.5, 1.75], 1.75)
    """
    keys = "B T H 1" if log_gate_k is not None and log_gate_k.shape[-1:] == (1,) else "B T H K"
    check_heads(q, k, v, log_gate_k=(log_gate_k, keys), log_gate_v=(log_gate_v, "B T H V"), state=(state, "B H K V"), reset=(reset, "B T"))
    if chunk < 1:
        raise SpecError(f"`chunk` is {chunk}; it must be at least 1.")
    dtype, start = v.dtype, first_state(q, k, v, log_gate_k, log_gate_v, state=state)
    open_gate = torch.zeros(*q.shape[:3], 1, dtype=start.dtype, device=q.device)
    a, b = (open_gate if gate is None else gate for gate in (log_gate_k, log_gate_v))
    cut = open_gate.bool() if reset is None else reset[:, :, None, None].expand(open_gate.shape)
    q, k, v, a, b = (x.to(start.dtype) for x in (q, k, v, a, b))
    rows = [x.transpose(1, 2) for x in (q * scale, k, v, a, b, cut)]
    if form not in ("recurrent", "parallel", "chunk"):
        raise SpecError(f'`form` is {form!r}; it must be "recurrent", "parallel" or "chunk".')
    with torch.autocast(q.device.type, enabled=False):  # it would compute the state in half of the digits that it is kept in
        if form == "recurrent":
            o, end = _recurrent(*rows, state=start)
        elif form == "parallel":
            o, end = _parallel(*rows, state=start)
        else:
            o, end = _chunk(*rows, state=start, chunk=chunk)
    return o.transpose(1, 2).to(dtype), end


def matrix_gated_linear(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    log_gate: Float[Tensor, "B T H K V"],
    scale: float = 1.0,
    state: Float[Tensor, "B H K V"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The same with a gate of its own on every entry of the state: no product of vectors, so the recurrence is its only form.

    Args:
        log_gate: At most 0; -inf is a gate of exactly 0.
    Returns:
        As `gated_linear`.
    Raises:
        ShapeError, SpecError: As `gated_linear`.
    Source: Li et al. 2025, arXiv:2504.04308, equation (GLA), with the gate transposed as S is.
    """
    check_heads(q, k, v, log_gate=(log_gate, "B T H K V"), state=(state, "B H K V"))
    start = first_state(q, k, v, log_gate, state=state)
    rows = [x.to(start.dtype).transpose(1, 2) for x in (q, k, v)]
    with torch.autocast(q.device.type, enabled=False):
        o, end = _recur(scale * rows[0], rows[1], rows[2], log_gate.to(start.dtype).exp().unbind(1), state=start)
    return o.transpose(1, 2).to(v.dtype), end


def _recur(q: Tensor, k: Tensor, v: Tensor, gates: Iterable[Tensor], *, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time: slow, and the judge of every other form."""
    reads = []
    for q_t, k_t, v_t, gate in zip(q.unbind(2), k.unbind(2), v.unbind(2), gates, strict=True):
        state = gate * state + k_t[..., None] * v_t[..., None, :]
        reads.append((q_t[..., None, :] @ state).squeeze(-2))
    return (torch.stack(reads, 2) if reads else v), state


def _recurrent(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, cut: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    steps = zip(a.unbind(2), b.unbind(2), cut.unbind(2), strict=True)
    gates = ((a_t[..., None] + b_t[..., None, :]).exp().masked_fill(cut_t[..., None], 0.0) for a_t, b_t, cut_t in steps)
    return _recur(q, k, v, gates, state=state)


def _parallel(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, cut: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair of tokens at once: o_t = sum over s <= t of (q_t . decayed k_s) decayed v_s, behind the state that was there before.

    Sums over pairs that are masked are 0 before the exponential: masking after it makes inf * 0 = NaN of the gradient of strong gates.
    """
    cuts = cut.squeeze(-1).cumsum(-1)
    seen = (cuts[..., :, None] == cuts[..., None, :]).tril()[..., None]
    if a.shape[-1] == 1:
        weights = (q @ k.mT)[..., None] * pair_sums(a).exp()
    else:
        weights = (q[..., None, :] * k[..., None, :, :] * pair_sums(a).exp()).sum(-1, keepdim=True)
    weights = weights.masked_fill(~seen, 0.0)
    weights = weights * pair_sums(b).exp()
    reads = weights.squeeze(-1) @ v if b.shape[-1] == 1 else (weights * v[..., None, :, :]).sum(-2)
    start_reads = (q * _since(a, cut)) @ state * _since(b, cut)
    writes = (k * _until(a, cut)).mT @ (v * _until(b, cut))
    return start_reads + reads, _whole(a, cut).mT * _whole(b, cut) * state + writes


def _chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, cut: Tensor, *, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Within a chunk by halves, from chunk to chunk by the state."""
    length = q.shape[2]
    if length == 0:
        return v, state
    size = 1 << (min(chunk, length) - 1).bit_length()
    fill = -length % size  # steps that gate nothing and write nothing
    q, k, v, a, b, cut = (blocks(F.pad(x, (0, 0, 0, fill)), size) for x in (q, k, v, a, b, cut))
    writes = (k * _until(a, cut)).mT @ (v * _until(b, cut))
    gates = _whole(a, cut).mT * _whole(b, cut)
    starts = []
    for write, gate in zip(writes.unbind(2), gates.unbind(2), strict=True):
        starts.append(state)
        state = gate * state + write
    start_reads = (q * _since(a, cut)) @ torch.stack(starts, 2) * _since(b, cut)
    return (start_reads + _halves(q, k, v, a, b, cut)).flatten(2, 3)[:, :, :length], state


def _halves(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
    """Reads of what the same chunk wrote. A token reads itself; then, for blocks of 2, 4, 8 ... tokens, the second half reads the first.

    Key and value decay from their own step to the seam between the halves, the query from the seam on. Both sums are at most 0, so
    one matrix product serves a whole block; products of exp(A_t) and exp(-A_s) from the front of a chunk would overflow.
    """
    o = (q * k).sum(-1, keepdim=True) * v
    size, half = q.shape[-2], 1
    while half < size:
        k1, v1, a1, b1, cut1 = (blocks(x, half)[..., 0::2, :, :] for x in (k, v, a, b, cut))
        q2, a2, b2, cut2 = (blocks(x, half)[..., 1::2, :, :] for x in (q, a, b, cut))
        reads = (q2 * _since(a2, cut2)) @ (k1 * _until(a1, cut1)).mT @ (v1 * _until(b1, cut1)) * _since(b2, cut2)
        o = o + F.pad(reads.unsqueeze(-3), (0, 0, 0, 0, 1, 0)).flatten(-4, -2)
        half *= 2
    return o


def _since(log_gate: Tensor, cut: Tensor) -> Tensor:
    """Decay from the front of a block to each of its steps, that step's gate included."""
    return log_gate.cumsum(-2).exp().masked_fill(cut.cumsum(-2) > 0, 0.0)


def _until(log_gate: Tensor, cut: Tensor) -> Tensor:
    """Decay from each step of a block to its end, that step's gate left out."""
    log_gate, cut = (F.pad(x[..., 1:, :], (0, 0, 0, min(1, x.shape[-2]))).flip(-2) for x in (log_gate, cut))
    return _since(log_gate, cut).flip(-2)


def _whole(log_gate: Tensor, cut: Tensor) -> Tensor:
    """Decay over a whole block."""
    return log_gate.sum(-2, keepdim=True).exp().masked_fill(cut.any(-2, keepdim=True), 0.0)
