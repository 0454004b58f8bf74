"""How many neurons a gated RNN needs to be a linear self-attention layer, and how many to give one that shall learn it.

With width d, r_V = rank W_V, r_KQ = rank W_K^T W_Q and c the dimension of what the row space of W_V and the column space of W_K^T W_Q share:

    form             hidden n                            output gates m
    naive            d^2 + d                             d^2
    symmetric        d(d+1)/2 + d                        d^2
    symmetric_fast   d(d+1)/2 + d                        d(d+1)/2
    low_rank         r_V r_KQ + r_KQ                     r_V r_KQ
    minimal          r_V r_KQ - c(c-1)/2 + r_KQ          r_V r_KQ - c(c-1)/2
    side             d^2                                 none
    side_symmetric   d(d+1)/2                            none

Source: Zucchet et al. 2023, arXiv:2309.01775, appendices A.1 to A.4; symmetric_fast, minimal and side_symmetric are ours, docs/theory.md,
equations (R6) to (R9). The layers with these counts are built by graven/construct/attention.py.
"""

from typing import Literal, NamedTuple, get_args

from graven.errors import SpecError

Form = Literal["naive", "symmetric", "symmetric_fast", "low_rank", "minimal", "side", "side_symmetric"]
TRAINING = 2  # times the least number of neurons at which gradient descent finds the construction: figure 3 of the paper, a, b and c


class Count(NamedTuple):
    """The size of a gated RNN.

    Args:
        hidden: Neurons that remember, n.
        output_gates: Products of two readings of the state, m; 0 with side gating.
        parameters: Numbers that it learns, for tokens and reads of width d.
    """

    hidden: int
    output_gates: int
    parameters: int


class Provision(NamedTuple):
    """What an attention layer needs, and what to give to a network that shall learn it.

    Args:
        needed: By the construction.
        provided: `TRAINING` times as many hidden neurons and output gates.
        width: Of a token, for which parameters were counted.
    """

    needed: Count
    provided: Count
    width: int


def neurons(*, form: Form, d: int, rank_v: int | None = None, rank_kq: int | None = None, overlap: int | None = None) -> Count:
    """The size of one construction of one attention head with tokens and reads of width d.

    Args:
        form: Of the construction.
        d: Width of a token.
        rank_v: Rank of W_V, for "low_rank" and "minimal" only, as the next; d where left out.
        rank_kq: Rank of W_K^T W_Q.
        overlap: c, for "minimal" only; that of matrices in general position, max(0, r_V + r_KQ - d), where left out.
    Raises:
        SpecError: An unknown form, a number out of range, or one that the form does not depend on.
    Differs: appendix A.4 has `low_rank` only and counts r_V r_KQ + r_KQ with c = 0; figure 2 calls 13 output neurons a match, where
        "symmetric" has 16 and "symmetric_fast" 10 at d = 4.
    Source: the table above.

    >>> neurons(form="minimal", d=4), neurons(form="low_rank", d=12, rank_v=6, rank_kq=6).hidden
    (Count(hidden=14, output_gates=10, parameters=474), 42)
    """
    _check_form(form)
    if d < 1:
        raise SpecError(f"`d` is {d}; it must be at least 1.")
    if form in ("low_rank", "minimal"):
        return _ranked(form, d, d if rank_v is None else rank_v, d if rank_kq is None else rank_kq, overlap)
    for name, value in (("rank_v", rank_v), ("rank_kq", rank_kq), ("overlap", overlap)):
        if value is not None:
            raise SpecError(f'`{name}` is {value} and `form` is {form!r}, whose size does not depend on it; leave it out or take "minimal".')
    products = d * (d + 1) // 2 if form.endswith(("fast", "side_symmetric")) else d * d
    stored = d * d if form in ("naive", "side") else d * (d + 1) // 2
    return _side(stored, d) if form.startswith("side") else _input_output(stored + d, products, d)


def provision(*, rank: int, form: Form = "minimal", width: int | None = None) -> Provision:
    """How many neurons to give a network whose attention has this effective rank: twice what the construction needs.

    Args:
        rank: Effective rank, of W_V and of W_K^T W_Q alike.
        form: Of the construction.
        width: Of a token. Where left out: twice the rank for "low_rank" and "minimal", the least at which the two need not share a direction
            and the count is largest; the rank itself for the others, whose size depends on the width alone.
    Raises:
        SpecError: An unknown form, a rank below 1 or above the width, or a rank below the width with a form that cannot use it.
    Source: Zucchet et al. 2023, arXiv:2309.01775, figure 3 (the factor of two); experiments/rnn_figure3.py measures it.

    >>> found = provision(rank=16)
    >>> found.needed.hidden, found.provided.hidden, provision(rank=16, width=16).provided.hidden
    (272, 544, 304)
    """
    _check_form(form)
    if rank < 1:
        raise SpecError(f"`rank` is {rank}; it must be at least 1.")
    ranked = form in ("low_rank", "minimal")
    d = (2 * rank if ranked else rank) if width is None else width
    if rank > d or (rank < d and not ranked):
        fits = "at most the width" if ranked else f'equal to the width, for a form {form!r} cannot use a lower one: take "minimal"'
        raise SpecError(f"`rank` is {rank} and `width` {d}; the rank must be {fits}.")
    needed = neurons(form=form, d=d, rank_v=rank if ranked else None, rank_kq=rank if ranked else None)
    hidden, gates = TRAINING * needed.hidden, TRAINING * needed.output_gates
    return Provision(needed, _input_output(hidden, gates, d) if gates else _side(hidden, d), d)


def _ranked(form: Form, d: int, rank_v: int, rank_kq: int, overlap: int | None) -> Count:
    for name, rank in (("rank_v", rank_v), ("rank_kq", rank_kq)):
        if not 1 <= rank <= d:
            raise SpecError(f"`{name}` is {rank}; it must be from 1 to `d`, which is {d}.")
    least, most = max(0, rank_v + rank_kq - d), min(rank_v, rank_kq)
    if form == "low_rank":
        if overlap is not None:
            raise SpecError(f'`overlap` is {overlap} and `form` is "low_rank", which makes no use of it; leave it out or take "minimal".')
        shared = 0
    else:
        shared = least if overlap is None else overlap
        if not least <= shared <= most:
            raise SpecError(f"`overlap` is {shared}; ranks {rank_v} and {rank_kq} in width {d} share from {least} to {most} dimensions.")
    products = rank_v * rank_kq - shared * (shared - 1) // 2
    return _input_output(products + rank_kq, products, d)


def _input_output(n: int, m: int, d: int) -> Count:
    return Count(n, m, 2 * n * (d + 1) + n + 2 * m * n + d * m)


def _side(n: int, d: int) -> Count:
    return Count(n, 0, 2 * n * (d + 1) + n + n * (d + 1) + d * n)


def _check_form(form: str) -> None:
    if form not in get_args(Form):
        raise SpecError(f"`form` is {form!r}; it must be one of {', '.join(get_args(Form))}.")
