"""What a one-layer gated RNN reads last, as a polynomial of all its tokens: the same function whatever the neurons are.

    y_T = c_0 + sum_s p_s(x_s) + sum_(s < t) p_st(x_s, x_t)                                                                  (R41)

p_s has degree 1 to 4, p_st degree 1 or 2 in each token: two gates of degree 2 each. Every coefficient in the basis of monomials is there, so
two layers are one function of sequences of this length exactly where their polynomials agree. `Polynomial` holds `constant` as [E], `one` as
[E, T, monomials of degree 1 to 4], `two` as [E, pairs, q, q] with q monomials of degree 1 and 2, and pairs (0, 1), (0, 2) ... (T - 2, T - 1).

Source: Zucchet et al. 2023, arXiv:2309.01775, section 4.1 (polynomial distance). Differs: the paper compares one time step, that is a
sequence of length 1, which never sees the memory; here it is the whole sequence.
"""

from functools import lru_cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.forms import Forms, forms
from graven.errors import ShapeError, SpecError
from graven.layers.gated_rnn import GatedRNN

MOST_NUMBERS = 1 << 27  # of a polynomial: 1 GiB


class Polynomial(NamedTuple):
    """Coefficients of equation R41."""

    constant: Float[Tensor, "E"]
    one: Float[Tensor, "E T N"]
    two: Float[Tensor, "E P Q Q"]

    def squares(self) -> Float[Tensor, "E"]:
        """Sum of the squares of all coefficients, an output each."""
        return self.constant**2 + self.one.square().flatten(1).sum(1) + self.two.square().flatten(1).sum(1)

    def minus(self, other: "Polynomial") -> "Polynomial":
        """The difference of two polynomials in the same tokens.

        Raises:
            ShapeError: They have other widths, lengths or outputs.
        """
        for mine, its in zip(self, other, strict=True):
            if mine.shape != its.shape:
                raise ShapeError(f"coefficients have shapes {tuple(mine.shape)} and {tuple(its.shape)}; give two layers of the same widths.")
        return Polynomial(*(mine - its for mine, its in zip(self, other, strict=True)))


def polynomial(layer: GatedRNN | Forms, *, length: int, blank: tuple[int, ...] = ()) -> Polynomial:
    """All coefficients of what the last of `length` tokens reads.

    Args:
        layer: A gated RNN of any gating and recurrence, or its forms.
        length: Tokens, T; at least 2, for the memory to be seen.
        blank: Entries that are 0 in the last token, as the label of a query is.
    Raises:
        SpecError: A weight is not finite, `length` is below 2, or there are too many coefficients to hold.
    Source: ours, equation R41; tests/test_audit.py compares with the layer itself.
    """
    inputs, recurrence, outputs = layer if isinstance(layer, Forms) else forms(layer)
    width = inputs.shape[-1] - 1
    _check(length, width, len(outputs), blank)
    states = _written(_coefficients(inputs), recurrence, length)
    if blank:
        states[-1][:, [bool({*m} & {*blank}) for m in monomials(width)]] = 0.0
    return Polynomial(*map(torch.stack, zip(*(_of_output(states, form, width) for form in outputs), strict=True)))


def distance(found: Polynomial, wanted: Polynomial) -> float:
    """|found - wanted| / |wanted| over all coefficients, mean over outputs; an output that should be 0 is measured by the mean of the others.

    Raises:
        ShapeError: The polynomials are not in the same tokens.
        SpecError: `wanted` is 0.
    Source: Zucchet et al. 2023, arXiv:2309.01775, table 1, at full length.
    """
    scale = wanted.squares().sqrt()
    if not bool((scale > 0).any()):
        raise SpecError("every coefficient of the polynomial to compare with is 0; give a teacher that reads something.")
    scale = torch.where(scale > 0, scale, scale[scale > 0].mean())
    return float((found.minus(wanted).squares().sqrt() / scale).mean())


@lru_cache
def monomials(width: int) -> list[tuple[int, ...]]:
    """Degree 2, degree 1 and last the constant, as the entries that are multiplied."""
    return [*combinations_with_replacement(range(width), 2), *((a,) for a in range(width)), ()]


@lru_cache
def _products(width: int) -> tuple[Tensor, int]:
    """Where the product of two monomials of degree 0 to 2 lies among those of degree 1 to 4, the constant last; and how many there are."""
    places = {m: i for i, m in enumerate(m for degree in (1, 2, 3, 4) for m in combinations_with_replacement(range(width), degree))}
    places[()] = len(places)
    names = monomials(width)
    return torch.tensor([[places[tuple(sorted(a + b))] for b in names] for a in names]), len(places)


def _coefficients(inputs: Float[Tensor, "S N N"]) -> Float[Tensor, "S C"]:
    """Forms of z = (x, 1) in the basis of monomials of x."""
    width, doubled = inputs.shape[-1] - 1, 2 * inputs - torch.diag_embed(inputs.diagonal(dim1=-2, dim2=-1))
    pairs = [(*m, width, width)[:2] for m in monomials(width)]
    return doubled[:, [a for a, _ in pairs], [b for _, b in pairs]]


def _written(u: Float[Tensor, "S C"], recurrence: Tensor, length: int) -> list[Float[Tensor, "S C"]]:
    """What every token has left in the last state: R^(T - s) u."""
    states = [u.clone()]
    for _ in range(length - 1):
        states.append(recurrence[:, None] * states[-1] if recurrence.dim() == 1 else recurrence @ states[-1])
    return states[::-1]


def _of_output(states: list[Tensor], form: Float[Tensor, "S S"], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Constant, one-token and two-token coefficients of one output."""
    joined = torch.cat(states, 1)  # [S, T C]
    count, length = states[0].shape[1], len(states)
    table = (joined.mT @ (form @ joined)).reshape(length, count, length, count).permute(0, 2, 1, 3)  # [T, T, C, C]
    where, total = _products(width)
    own = table.new_zeros(length, total)
    own.index_add_(1, where.flatten(), table[range(length), range(length)].flatten(1))
    first, last = torch.triu_indices(length, length, offset=1)
    with_constant = 2 * table[:, :, :, -1].clone()
    with_constant[range(length), range(length)] = 0.0  # already in `own`
    own.index_add_(1, where[:-1, -1], with_constant[..., :-1].sum(1))
    constant = own[:, -1].sum() + table[first, last][:, -1, -1].sum() * 2
    return constant, own[:, :-1], 2 * table[first, last][:, :-1, :-1]


def _check(length: int, width: int, outputs: int, blank: tuple[int, ...]) -> None:
    if length < 2:
        raise SpecError(f"`length` is {length}; it must be at least 2, for a shorter sequence never sees the memory.")
    if bad := [entry for entry in blank if not 0 <= entry < width]:
        raise SpecError(f"`blank` names entry {bad[0]} and a token has {width}; entries count from 0.")
    numbers = outputs * (length * len(monomials(width))) ** 2
    if numbers > MOST_NUMBERS:
        raise SpecError(f"the polynomial of {outputs} outputs and {length} tokens of width {width} has {numbers} coefficients; lower `length`.")
