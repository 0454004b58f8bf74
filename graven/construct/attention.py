"""Recurrent layers that are linear self-attention: y_t = sum over s <= t of W_V x_s (W_K x_s . W_Q x_t), heads side by side.

Source: Zucchet et al. 2023, arXiv:2309.01775, appendices A and B; docs/theory.md, chapter R. Which parts are ours is said at each function.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from graven.construct.base import Factors, Heads, Plan, Terms, blocks, checked, factors, plan, terms
from graven.errors import SpecError
from graven.layers.base import Chain
from graven.layers.classic import Classic, ClassicSpec
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.layers.lru import GLU, LRU, LRUSpec
from graven.layers.mamba import Mamba, MambaSpec
from graven.theory.capacity import Form

# A logit, or the logarithm of a rate, at which sigmoid and exp(-exp(.)) are 0 or 1 to the last digit of float64.
SURE = 40.0
LOST = 1e-2  # share of what is read that rounding may be before a scale is refused
STEP_ONE, SILU_ONE = 0.541324854612918, 1.2784645427610738  # where softplus and silu are 1


def attention_to_rnn(w_v: Heads, w_k: Heads, w_q: Heads, *, form: Form = "minimal") -> GatedRNN:
    """A gated RNN that computes what the attention layer computes, exactly.

    Args:
        w_v: W_V [V, D]; for several heads [H, V, D] or a sequence of matrices, whose V and K may then differ.
        w_k: W_K [K, D], likewise.
        w_q: W_Q [K, D], likewise. Heads lie side by side in what is read, V * H wide; an output projection W_O goes on top of
            `readout`: `layer.readout.data = w_o @ layer.readout`.
        form: "naive" (A.1). "symmetric" stores sum x x^T (A.3, but for any W_V; ours). "symmetric_fast" multiplies each entry of it once (ours).
            "low_rank" (A.4). "minimal" does all of these at once: the fewest neurons and products that we know (ours). "side" (A.2) and
            "side_symmetric" (ours) multiply with the token instead of the state.
    Returns:
        A layer in the dtype of the matrices; each head adds the counts of `graven.theory.capacity`.
    Raises:
        ShapeError, SpecError: The matrices do not fit each other or are not finite, or the form is unknown.
    Differs: A.3 asks for an invertible W_V, for it takes K := W_V; storing x x^T itself needs nothing.
    Source: Zucchet et al. 2023, arXiv:2309.01775, appendices A.1 to A.4; docs/theory.md, (R3) to (R9).

    >>> layer = attention_to_rnn(torch.eye(4), torch.eye(4), torch.eye(4))
    >>> layer.spec.hidden, layer.spec.output_gates
    (14, 10)
    """
    _check_form(form, Form)
    heads = checked(w_v, w_k, w_q)
    make = _side_gated if form.startswith("side") else _input_output_gated
    return make([plan(head, form) for head in heads]).to(heads[0].v)


def attention_to_lru(w_v: Heads, w_k: Heads, w_q: Heads, *, scale: float = 1e-6, form: Literal["stacked", "in_out"] = "stacked") -> Chain | LRU:
    """LRU layers that come near an attention layer: a sigmoid at a small argument is a line, a * (sigmoid(scale b) - 1/2) = scale a b / 4 + ...

    Args:
        w_v, w_k, w_q: As `attention_to_rnn`.
        scale: Of what the sigmoids see. The error falls with its square, down to a floor of rounding that rises as 1 / scale.
        form: "stacked" two LRUs, the gate of the first at the input of the second; "in_out" one LRU with gates on either side.
    Raises:
        ShapeError, SpecError: As `attention_to_rnn`; also a scale so small that rounding is all that is left, as the one taken here is in float32.
    Differs: the paper halves channels to cancel sigmoid(0) = 1/2; here the tokens themselves, passed on once, cancel it for all keys.
    Source: Zucchet et al. 2023, arXiv:2309.01775, appendix B.1; docs/theory.md, (R10) and (R11).
    """
    _check_form(form, Literal["stacked", "in_out"])
    heads = checked(w_v, w_k, w_q)
    _check_scale(scale, heads[0].v.dtype, 1)
    parts = terms(heads)
    layer = _remembering_lru(parts, scale, in_out=form == "in_out")
    return (layer if form == "in_out" else Chain([_multiplying_lru(parts, scale), layer])).to(heads[0].v.dtype)


def attention_to_lstm(w_v: Heads, w_k: Heads, w_q: Heads, *, scale: float = 1e-4) -> Classic:
    """An LSTM that comes near an attention layer, four cells for each entry of its state.

    With forget gates at 1, c adds sigmoid(scale k) tanh(scale v) and h = sigmoid(scale q) tanh(c); the four signs of k and q, added up with the
    sign of their product, leave scale^3 / 4 sum (v k) q and terms of relative size scale^2.

    Args:
        w_v, w_k, w_q: As `attention_to_rnn`.
        scale: Of what sigmoid and tanh see. The error falls with its square, down to a floor of rounding that rises as 1 / scale^2.
    Raises:
        ShapeError, SpecError: As `attention_to_rnn`; also a scale so small that rounding is all that is left, as the one taken here is in float32.
    Source: Zucchet et al. 2023, arXiv:2309.01775, appendix B.3; the four signs are those of docs/theory.md, (R12).
    """
    heads = checked(w_v, w_k, w_q)
    _check_scale(scale, heads[0].v.dtype, 2)
    parts = terms(heads)
    n = len(parts.v)
    layer = Classic(ClassicSpec(width=parts.v.shape[1], hidden=4 * n, cell="lstm", out_width=len(parts.out)), torch.Generator(), parts.v.dtype)
    signs_k, signs_q = _signs("+-+-", n), _signs("++--", n)
    k, v, q = (rows.repeat(4, 1) for rows in (parts.k, parts.v, parts.q))
    _zero_(layer)
    weights = dict(layer.cells.named_parameters())
    with torch.no_grad():
        weights["weight_ih_l0"].copy_(scale * torch.cat([signs_k * k, torch.zeros_like(k), v, signs_q * q]))  # gates i, f, g, o
        weights["bias_ih_l0"][4 * n : 8 * n] = SURE
        layer.readout.weight.copy_(4 / scale**3 * parts.out.repeat(1, 4) * (signs_k * signs_q).mT)
    return layer.to(heads[0].v.dtype)


def attention_to_gru(w_v: Heads, w_k: Heads, w_q: Heads, *, scale: float = 3e-4) -> Classic:
    """A GRU that comes near an attention layer, eight cells for each entry of its state; ours, where the paper holds that there is none.

    A GRU multiplies twice: its update gate with its candidate, and its reset gate with its own state of one token ago.

        h <- z h + (1 - z) tanh(scale v), 1 - z = sigmoid(scale k - b)    a pair of signs of k leaves the sum of v k, and forgets scale^2 a token
        h <- tanh(sigmoid(scale q) U h)                                    a pair of signs of q leaves q times the sum over all tokens before
        h <- tanh(scale (v +- k +- q))                                     four signs leave v k q of this token, the cubic term of tanh

    Args:
        w_v, w_k, w_q: As `attention_to_rnn`.
        scale: Of what sigmoid and tanh see. The error grows with the length like T scale^2, down to a floor of rounding that rises as
            1 / scale^3: 2e-6 at T = 32 in float64, and not below 0.1 in float32.
    Raises:
        ShapeError, SpecError: As `attention_to_rnn`; also a scale so small that rounding is all that is left.
    Differs: the paper says that no GRU, stacked or not, can (appendix B.4, table 3). What it cannot do is keep and add apart: what it adds
        by it forgets by. A slow gate does both slowly enough for any given length.
    Source: ours; docs/theory.md, (R15) and (R16).
    """
    heads = checked(w_v, w_k, w_q)
    _check_scale(scale, heads[0].v.dtype, 3)
    return _gru(terms(heads), scale).to(heads[0].v.dtype)


def attention_to_mamba(w_v: Heads, w_k: Heads, w_q: Heads, *, form: Literal["side", "selective"] = "side") -> Mamba:
    """A Mamba block that computes what the attention layer computes, exactly: silu(a) - silu(-a) = a, softplus(a) - softplus(-a) = a.

    Args:
        w_v, w_k, w_q: As `attention_to_rnn`.
        form: "side": the step size holds the key and the gate the query, in a block as released models have it. "selective": B holds the
            key and C the query, 2V + 2D channels for all; B and C are the same for all channels, so it is for one head, and the gate
            must be held open by a bias that released models lack.
    Raises:
        ShapeError, SpecError: As `attention_to_rnn`; also several heads with "selective".
    Differs: the paper takes silu for a line; the pairs of signs make it one. "selective" is ours.
    Source: Zucchet et al. 2023, arXiv:2309.01775, appendix B.2; docs/theory.md, (R13) and (R14).
    """
    _check_form(form, Literal["side", "selective"])
    heads = checked(w_v, w_k, w_q)
    if form == "selective" and len(heads) > 1:
        raise SpecError(f'`form` is "selective", which is for one head, and there are {len(heads)}; take "side".')
    layer = _side_mamba(terms(heads)) if form == "side" else _selective_mamba(factors(heads[0], "low_rank"))
    return layer.to(heads[0].v.dtype)


def _input_output_gated(plans: list[Plan]) -> GatedRNN:
    """Accumulators with decay 1 and then queries with decay 0, head by head."""
    n, m, reads = (sum(sizes) for sizes in zip(*((len(p.v) + len(p.q), len(p.cell), len(p.out)) for p in plans), strict=True))
    layer = _empty(GatedRNNSpec(width=plans[0].v.shape[1], hidden=n, output_gates=m, out_width=reads))
    with torch.no_grad():
        layer.w_in1[:, :-1] = torch.cat([torch.cat([p.v, p.q]) for p in plans])
        layer.w_in2[:, :-1] = torch.cat([torch.cat([p.k, torch.zeros_like(p.q)]) for p in plans])
        layer.w_in2[:, -1] = torch.cat([torch.cat([p.v.new_zeros(len(p.v)), p.q.new_ones(len(p.q))]) for p in plans])
        layer.decay.copy_(1 - layer.w_in2[:, -1])
        layer.w_out1.copy_(blocks([torch.eye(len(p.v) + len(p.q), dtype=p.v.dtype)[p.cell] for p in plans]))
        layer.w_out2.copy_(blocks([torch.cat([p.weights.new_zeros(len(p.cell), len(p.v)), p.weights], 1) for p in plans]))
        layer.readout.copy_(blocks([p.out for p in plans]))
    return layer


def _side_gated(plans: list[Plan]) -> GatedRNN:
    """One accumulator and one gate for each product."""
    n, reads = (sum(sizes) for sizes in zip(*((len(p.cell), len(p.out)) for p in plans), strict=True))
    layer = _empty(GatedRNNSpec(width=plans[0].v.shape[1], hidden=n, out_width=reads, gating="side"))
    with torch.no_grad():
        layer.w_in1[:, :-1] = torch.cat([p.v[p.cell] for p in plans])
        layer.w_in2[:, :-1] = torch.cat([p.k[p.cell] for p in plans])
        layer.w_side[:, :-1] = torch.cat([p.weights @ p.q for p in plans])
        layer.decay.fill_(1.0)
        layer.readout.copy_(blocks([p.out for p in plans]))
    return layer


def _empty(spec: GatedRNNSpec) -> GatedRNN:
    layer = GatedRNN(spec, torch.Generator(), torch.float64)
    _zero_(layer)
    return layer


@torch.no_grad()
def _zero_(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def _lru(width: int, hidden: int, inner: int, reads: int, *, in_out: bool = False) -> LRU:
    """One with decays of 1, that adds nothing and reads nothing yet."""
    spec = LRUSpec(width=width, hidden=hidden, inner=inner, out_width=reads, gating="in_out" if in_out else "out", scale="none")
    layer = LRU(spec, torch.Generator(), torch.float64)
    _zero_(layer)
    with torch.no_grad():
        layer.log_rate.fill_(-SURE)
        layer.log_phase.fill_(-SURE)
    return layer


@torch.no_grad()
def _multiply_(unit: nn.Module, parts: Terms, scale: float) -> None:
    """A GLU of v (1/2 + scale k / 4 + ...) for each term, and behind them of x / 2, which is all that cancels the halves."""
    assert isinstance(unit, GLU)
    n, width = parts.v.shape
    unit.value.weight[:n, :width] = parts.v
    unit.gate.weight[:n, :width] = scale * parts.k
    unit.value.weight[n : n + width, :width] = torch.eye(width)


def _products_of(parts: Terms, scale: float) -> Tensor:
    """v k of every term from what such a GLU gives."""
    return 4 / scale * torch.cat([torch.eye(len(parts.v)).to(parts.v), -parts.v], 1)


def _multiplying_lru(parts: Terms, scale: float) -> LRU:
    """The first of two: reads v k of every term, and x; its own recurrence does nothing."""
    n, width = parts.v.shape
    layer = _lru(width, 1, n + width, n + width)
    with torch.no_grad():
        assert isinstance(layer.embed, nn.Linear)
        layer.embed.weight[:width] = torch.eye(width)
        layer.skip.fill_(1.0)
        _multiply_(layer.unit, parts, scale)
        layer.readout.weight[:n] = _products_of(parts, scale)
        layer.readout.weight[n:, n:] = 2 * torch.eye(width)
    return layer


def _remembering_lru(parts: Terms, scale: float, *, in_out: bool) -> LRU:
    """Adds up v k of every term, carries x past the recurrence, and multiplies the two; `in_out` makes v k itself, else it is given them and x."""
    (n, width), reads = parts.v.shape, len(parts.out)
    layer = _lru(width if in_out else n + width, n, n + max(width, reads), reads, in_out=in_out)
    with torch.no_grad():
        if in_out:
            _multiply_(layer.embed, parts, scale)
        else:
            assert isinstance(layer.embed, nn.Linear)
            layer.embed.weight[: n + width] = torch.eye(n + width)
        layer.b[:, : n + width, 0] = _products_of(parts, scale) if in_out else torch.eye(n, n + width)
        layer.c[:n, :, 0] = torch.eye(n)
        layer.skip[n : n + width] = 2.0 if in_out else 1.0
        assert isinstance(layer.unit, GLU)
        layer.unit.value.weight[:n, :n] = torch.eye(n)
        layer.unit.gate.weight[:n, n : n + width] = scale * parts.q
        layer.unit.value.weight[n : n + reads, :n] = parts.out
        layer.readout.weight[:, : n + reads] = 4 / scale * torch.cat([parts.out, -torch.eye(reads).to(parts.out)], 1)
    return layer


@torch.no_grad()
def _gru(parts: Terms, scale: float) -> Classic:
    """Cells: 2 signs of k that add up, 2 signs of q that read what was added, 4 signs of k and q that see this token."""
    n, forgotten = len(parts.v), torch.tensor(scale).double() ** 2
    layer = Classic(ClassicSpec(width=parts.v.shape[1], hidden=8 * n, cell="gru", out_width=len(parts.out)), torch.Generator(), torch.float64)
    _zero_(layer)
    weights = dict(layer.cells.named_parameters())
    reset, update, candidate = weights["weight_ih_l0"].chunk(3)
    pair, of_k, of_q = (_signs(signs, n) for signs in ("+-", "++--", "+-+-"))
    update[: 2 * n] = -scale * pair * parts.k.repeat(2, 1)
    candidate[: 2 * n] = scale * parts.v.repeat(2, 1)
    reset[2 * n : 4 * n] = scale * pair * parts.q.repeat(2, 1)
    candidate[4 * n :] = scale * (parts.v.repeat(4, 1) + of_k * parts.k.repeat(4, 1) + of_q * parts.q.repeat(4, 1))
    bias = weights["bias_ih_l0"].chunk(3)[1]
    bias.fill_(-SURE)
    bias[: 2 * n] = -torch.logit(forgotten)
    sums = torch.eye(n, dtype=torch.float64).repeat(2, 2) * pair.mT / (2 * forgotten * (1 - forgotten))  # scale^2 times the sum of v k
    weights["weight_hh_l0"].chunk(3)[2][2 * n : 4 * n, : 2 * n] = sums
    layer.readout.weight[:, 2 * n :] = torch.cat([2 * pair, -of_k * of_q / 8]).mT / scale**3 * parts.out.repeat(1, 6)
    return layer


def _signs(signs: str, n: int) -> Tensor:
    """A column of signs, each n times."""
    return torch.tensor([1.0 if sign == "+" else -1.0 for sign in signs], dtype=torch.float64).repeat_interleave(n)[:, None]


def _side_mamba(parts: Terms) -> Mamba:
    """Channels: x and -x, a constant, and for each term the eight signs of v, k and q. The first two only feed the maps to steps, B and C."""
    (n, width), reads = parts.v.shape, len(parts.out)
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 3).repeat_interleave(n, 0)  # of v, k and q
    first = 2 * width + 1
    layer = _mamba(MambaSpec(width=width, inner=first + 8 * n, memory=1, step_rank=n, out_width=reads))
    with torch.no_grad():
        layer.in_proj.weight[: first - 1] = torch.cat([torch.eye(width), -torch.eye(width)])
        layer.in_proj.weight[first : first + 8 * n] = signs[:, :1] * parts.v.repeat(8, 1)
        layer.in_proj.weight[2 * first + 8 * n :] = signs[:, 2:] * parts.q.repeat(8, 1)
        assert layer.conv1d.bias is not None
        layer.conv1d.bias[first - 1] = SILU_ONE
        layer.x_proj.weight[:n, : first - 1] = torch.cat([parts.k, -parts.k], 1)
        layer.x_proj.weight[n:, first - 1] = 1.0
        layer.dt_proj.weight[first:] = signs[:, 1:2] * torch.eye(n).repeat(8, 1)
        layer.dt_proj.bias[:first] = -SURE
        layer.out_proj.weight[:, first:] = signs.prod(1) * parts.out.repeat(1, 8)
    return layer


def _selective_mamba(head: Factors) -> Mamba:
    """Channels: x and -x, which feed B and C only, v and -v. Step sizes and gates are 1."""
    (values, width), keys, reads = head.v.shape, len(head.k), len(head.out)
    layer = _mamba(MambaSpec(width=width, inner=2 * (width + values), memory=keys, step_rank=1, bias=True, out_width=reads))
    with torch.no_grad():
        eye = torch.eye(width).to(head.v)
        layer.in_proj.weight[: 2 * (width + values)] = torch.cat([eye, -eye, head.v, -head.v])
        layer.in_proj.bias[2 * (width + values) :] = SILU_ONE
        layer.x_proj.weight[1:, : 2 * width] = torch.cat([torch.cat([part, -part], 1) for part in (head.k, head.q)])
        layer.dt_proj.bias.fill_(STEP_ONE)
        layer.out_proj.weight[:, 2 * width :] = torch.cat([head.out, -head.out], 1)
    return layer


def _mamba(spec: MambaSpec) -> Mamba:
    """One with decays of 1 and no convolution, that reads nothing yet."""
    layer = Mamba(spec, torch.Generator(), torch.float64)
    _zero_(layer)
    with torch.no_grad():
        layer.A_log.fill_(-SURE)
        layer.conv1d.weight[:, :, -1] = 1.0
    return layer


def _check_form(form: str, known: object) -> None:
    if form not in get_args(known):
        raise SpecError(f"`form` is {form!r}; it must be one of {', '.join(get_args(known))}.")


def _check_scale(scale: float, dtype: torch.dtype, power: int) -> None:
    """Sums that cancel to the power of the scale leave rounding over that power."""
    if not 0 < scale < float("inf"):
        raise SpecError(f"`scale` is {scale}; it must be above 0 and finite.")
    rounding = torch.finfo(dtype).eps / scale**power
    if rounding > LOST:
        least = (torch.finfo(dtype).eps / LOST) ** (1 / power)
        raise SpecError(
            f"`scale` is {scale} and the matrices are {dtype}: rounding alone would be {100 * rounding:.2g} % of what is read; "
            f"take a scale above {least:.1g}, or pass matrices in float64."
        )
