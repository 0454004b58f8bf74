"""How much each neuron contributes to what is read, and a layer without those that contribute nothing.

Norms of weights say nothing here: a hidden neuron may be scaled up and its readings down, and the function stays.

Source: ours, docs/theory.md; the paper prunes by weights that are 0 (arXiv:2309.01775, section 4.1).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.forms import forms, input_output, weights, with_weights
from graven.layers.gated_rnn import GatedRNN


class Pruned(NamedTuple):
    """A smaller layer.

    Args:
        layer: What is left.
        kept: Which neurons those are, of the layer that was pruned.
        least: The smallest contribution among them.
    """

    layer: GatedRNN
    kept: tuple[int, ...]
    least: float


def hidden_contributions(layer: GatedRNN, x: Float[Tensor, "B T D"], *, last: bool = False) -> Float[Tensor, "S"]:
    """mean |y - y(h_i := 0)|^2 / mean |y|^2 of every hidden neuron.

    Args:
        layer: With a diagonal recurrence.
        x: Fresh tokens.
        last: What the last token reads, in place of what every token does.
    Raises:
        SpecError: A weight is not finite, or the recurrence is dense.
    Source: ours, equation R43; tests/test_audit.py compares with a layer whose neuron is cut out.
    """
    return _shares(*_states_and_readings(layer, x, last))


def prune_hidden(layer: GatedRNN, x: Float[Tensor, "B T D"], *, threshold: float, last: bool = False) -> Pruned:
    """Take out the hidden neuron of least contribution, again and again, until every one that is left contributes `threshold` or more.

    Contributions are measured anew after each removal: two neurons that cancel each other contribute much, and nothing together.
    """
    layer = input_output(layer)
    h, readings, forms_of, power = _states_and_readings(layer, x, last)
    kept = list(range(layer.spec.hidden))
    shares = _shares(h, readings, forms_of, power)
    while len(kept) > 1 and float(shares.min()) < threshold:
        i = int(shares.argmin())
        readings = readings - h[:, i, None] * forms_of[:, i, None]
        rest = [j for j in range(len(kept)) if j != i]
        h, readings, forms_of = h[:, rest], readings[..., rest], forms_of[:, rest][..., rest]
        del kept[i]
        shares = _shares(h, readings, forms_of, power)
    w = weights(layer)
    rows = {name: w[name][kept] for name in ("w_in1", "w_in2", "decay")}
    columns = {name: w[name][:, kept] for name in ("w_out1", "w_out2")}
    return Pruned(with_weights(**rows, **columns, readout=w["readout"]), tuple(kept), float(shares.min()))


def output_contributions(layer: GatedRNN, x: Float[Tensor, "B T D"], *, last: bool = False) -> Float[Tensor, "M"]:
    """mean z_r^2 |D_r|^2 / (E mean y^2) of every output neuron z_r = (A_r h)(B_r h).

    Source: ours, equation R43; tests/test_audit.py.
    """
    layer = input_output(layer)
    w = weights(layer)
    h = _states(layer, x, last)
    z = (h @ w["w_out1"].T) * (h @ w["w_out2"].T)
    return z.square().mean(0) * w["readout"].square().sum(0) / (z @ w["readout"].T).square().sum(1).mean()


def prune_outputs(layer: GatedRNN, x: Float[Tensor, "B T D"], *, threshold: float, last: bool = False) -> Pruned:
    """Take out every output neuron that contributes less than `threshold`."""
    layer = input_output(layer)
    shares = output_contributions(layer, x, last=last)
    kept = (shares >= min(threshold, float(shares.max()))).nonzero().flatten().tolist()
    w = weights(layer)
    rows = {name: w[name][kept] for name in ("w_out1", "w_out2")}
    columns = {name: w[name] for name in ("w_in1", "w_in2", "decay")}
    return Pruned(with_weights(**columns, **rows, readout=w["readout"][:, kept]), tuple(kept), float(shares[kept].min()))


def _states_and_readings(layer: GatedRNN, x: Tensor, last: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """States [N, S], K_e h [E, N, S], K [E, S, S] and the mean of |y|^2."""
    layer = input_output(layer)
    outputs = forms(layer).outputs
    h = _states(layer, x, last)
    readings = h @ outputs
    return h, readings, outputs, float((readings * h).sum(2).square().sum(0).mean())


def _states(layer: GatedRNN, x: Tensor, last: bool) -> Tensor:
    with torch.no_grad():
        h = layer.hidden(x.double())
    return h[:, -1] if last else h.flatten(0, 1)


def _shares(h: Tensor, readings: Tensor, outputs: Tensor, power: float) -> Tensor:
    """y - y(h_i := 0) = h_i (2 (K h)_i - K_ii h_i), an output each."""
    change = h * (2 * readings - outputs.diagonal(dim1=1, dim2=2)[:, None] * h)
    return change.square().sum(0).mean(0) / power
