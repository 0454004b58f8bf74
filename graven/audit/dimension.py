"""How many sums over the past, and how many readings of the token, a layer really uses: ranks of its forms, with no neuron looked at.

    M_e = F_acc^T (2 K_e[acc, query]) F_query                                                                                (R44)

in an isometric basis of symmetric matrices, so that singular values do not depend on scales of neurons. Its three flattenings have the
effective numbers of accumulators, of queries and of outputs as their ranks; a singular value counts above 5 sqrt(relative loss).

Source: ours, docs/theory.md.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.forms import Forms, flat, forms, unflat
from graven.errors import SpecError
from graven.layers.gated_rnn import GatedRNN

WHOLE = 0.9  # share of what it was that an accumulator still holds after a whole sequence
NOTHING = 0.1  # decay up to which a neuron counts as one that forgets at once
REMEMBERS = 0.9  # decay above which a neuron is made to accumulate: one of 0.6 holds two tokens, and would hold all of them at 1
LOSSES = 5.0  # singular values count above so many roots of the relative loss
ROUNDING = 1e-9  # and never below this share of the largest


class Groups(NamedTuple):
    """Neurons by their decay.

    Args:
        accumulators: Those that remember a whole sequence.
        queries: Those that forget at once.
        between: The others.
    """

    accumulators: tuple[int, ...]
    queries: tuple[int, ...]
    between: tuple[int, ...]


class Dimension(NamedTuple):
    """Effective numbers, and the singular values behind them as shares of the largest.

    Args:
        accumulators, queries, outputs: How many singular values lie above `threshold`.
        accumulator_values, query_values, output_values: All of them, falling.
        threshold: The least that counts.
    """

    accumulators: int
    queries: int
    outputs: int
    accumulator_values: tuple[float, ...]
    query_values: tuple[float, ...]
    output_values: tuple[float, ...]
    threshold: float


def groups(decay: Float[Tensor, "S"], *, length: int) -> Groups:
    """Which neurons remember, which forget, and which do neither, over sequences of this length.

    Source: ours; tests/test_audit.py.
    """
    kinds = ["accumulators" if d > 0 and abs(d - 1) <= 1 - WHOLE ** (1 / length) else "queries" if abs(d) <= NOTHING else "" for d in decay.tolist()]
    chosen = {name: tuple(i for i, kind in enumerate(kinds) if kind == name) for name in ("accumulators", "queries", "")}
    return Groups(chosen["accumulators"], chosen["queries"], chosen[""])


def effective_dimension(layer: GatedRNN | Forms, *, relative_loss: float, blank: tuple[int, ...] = ()) -> Dimension:
    """Effective numbers of accumulators and queries.

    Args:
        layer: With a diagonal recurrence; neurons whose decay is above `REMEMBERS` accumulate.
        relative_loss: Of the layer, against what it is compared with: what singular values may owe to noise.
        blank: Entries that are 0 in the token that reads.
    Raises:
        SpecError: The recurrence is dense, a weight is not finite, or no neuron accumulates or none queries.
    Source: ours, equation R44; tests/test_audit.py.
    """
    form = flat_form(layer, blank=blank)
    threshold = max(LOSSES * relative_loss**0.5, ROUNDING)
    values = [torch.linalg.svdvals(form.movedim(axis, 0).flatten(1)) for axis in (1, 2, 0)]
    shares = [tuple((v / v[0].clamp(min=torch.finfo(v.dtype).tiny)).tolist()) for v in values]
    counts = [sum(share > threshold for share in row) for row in shares]
    return Dimension(counts[0], counts[1], counts[2], shares[0], shares[1], shares[2], threshold)


def flat_form(layer: GatedRNN | Forms, *, blank: tuple[int, ...] = ()) -> Float[Tensor, "E C C"]:
    """M of equation R44, [outputs, accumulated form, form of the token that reads].

    Raises:
        SpecError: As `effective_dimension`.
    Source: ours, equation R44; tests/test_audit.py.
    """
    inputs, decay, outputs = layer if isinstance(layer, Forms) else forms(layer)
    if decay.dim() == 2:
        raise SpecError('`recurrence` is "dense", so no neuron has a decay of its own; read the polynomial instead.')
    remembers = decay > REMEMBERS
    if not bool(remembers.any()) or bool(remembers.all()):
        missing = "below" if bool(remembers.all()) else "above"
        raise SpecError(f"no neuron has a decay {missing} {REMEMBERS}; attention needs some that remember and some that forget.")
    reading = inputs[~remembers].clone()
    if blank:
        reading[:, list(blank)] = 0.0
        reading[:, :, list(blank)] = 0.0
    return flat(inputs[remembers]).T @ (2 * outputs[:, remembers][:, :, ~remembers]) @ flat(reading)


def reading_form(layer: GatedRNN | Forms) -> Float[Tensor, "E C N"]:
    """M of equation R45 for a layer of any size: what multiplies sums over the past with (x, 1) of the token that reads."""
    return linear(flat_form(layer))


def linear(forms_of: Float[Tensor, "*A C"]) -> Float[Tensor, "*A N"]:
    """Linear parts of flat forms of (x, 1), as maps of (x, 1): the products of two entries of x are left out."""
    last = unflat(forms_of)[..., -1, :]
    return torch.cat([2 * last[..., :-1], last[..., -1:]], -1)
