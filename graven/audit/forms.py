"""A gated RNN without its neurons: quadratic forms of the token that are remembered, and quadratic forms of the state that are read.

    h_T = sum_s R^(T-s) u(x_s),   u_i(x) = z^T F_i z,   z = (x, 1),   y_e = h^T K_e h                                        (R40)

Neurons may be permuted, rescaled and mixed where decays agree; the forms make no difference of that. Side gating is the same with a second
set of neurons that forget at once and hold what the token multiplies the state with. In `Forms`, `inputs` holds F as [S, D + 1, D + 1],
`recurrence` R as [S] (diagonal) or [S, S], and `outputs` K as [E, S, S]; F and K are symmetric.

Source: ours, docs/theory.md; the layer is that of Zucchet et al. 2023, arXiv:2309.01775, equation 2 and appendix A.2.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec


class Forms(NamedTuple):
    """F, R and K of equation R40, in float64."""

    inputs: Float[Tensor, "S N N"]
    recurrence: Tensor
    outputs: Float[Tensor, "E S S"]


def forms(layer: GatedRNN) -> Forms:
    """Quadratic forms of a layer of either gating and either recurrence.

    Raises:
        SpecError: A weight is not finite.
    Source: ours, equation R40; tests/test_audit.py.
    """
    w = weights(layer)
    inputs = symmetric(w["w_in1"][:, :, None] * w["w_in2"][:, None, :])
    recurrence = w["decay"] if "decay" in w else w["recurrence"]
    if layer.spec.gating == "input_output":
        return Forms(inputs, recurrence, symmetric(torch.einsum("em,mi,mj->eij", w["readout"], w["w_out1"], w["w_out2"])))
    return _lifted(inputs, recurrence, w)


def weights(layer: GatedRNN) -> dict[str, Tensor]:
    """Every parameter of a layer in float64, by name.

    Raises:
        SpecError: One of them is not finite.
    """
    found = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    for name, tensor in found.items():
        if not bool(tensor.isfinite().all()):
            raise SpecError(f"`{name}` has an entry that is not finite, so the layer computes nothing; train it again with a lower rate.")
    return found


def with_weights(*, w_in1: Tensor, w_in2: Tensor, decay: Tensor, w_out1: Tensor, w_out2: Tensor, readout: Tensor) -> GatedRNN:
    """A layer of input and output gating with these very weights, in float64."""
    spec = GatedRNNSpec(width=w_in1.shape[1] - 1, hidden=len(w_in1), output_gates=len(w_out1), out_width=len(readout))
    layer = GatedRNN(spec, dtype=torch.float64)
    given = {"w_in1": w_in1, "w_in2": w_in2, "decay": decay, "w_out1": w_out1, "w_out2": w_out2, "readout": readout}
    with torch.no_grad():
        for name, tensor in given.items():
            getattr(layer, name).copy_(tensor)
    return layer


def input_output(layer: GatedRNN) -> GatedRNN:
    """The same function with input and output gating, in float64; a side-gated layer gets one more neuron with decay 0 for each of its own.

    Raises:
        SpecError: The recurrence is dense, so neurons cannot be told apart.
    Source: ours; tests/test_audit.py.
    """
    if layer.spec.recurrence == "dense":
        raise SpecError('`recurrence` is "dense", whose neurons cannot be told apart; its polynomial can be read, its neurons not.')
    w = weights(layer)
    if layer.spec.gating == "input_output":
        return with_weights(**w)
    n, zeros = layer.spec.hidden, torch.zeros(layer.spec.hidden, layer.spec.hidden, dtype=torch.float64)
    one = torch.zeros_like(w["w_side"])
    one[:, -1] = 1.0
    unit = torch.eye(n, dtype=torch.float64)
    return with_weights(
        w_in1=torch.cat([w["w_in1"], w["w_side"]]), w_in2=torch.cat([w["w_in2"], one]), decay=torch.cat([w["decay"], zeros[0]]),
        w_out1=torch.cat([unit, zeros], 1), w_out2=torch.cat([zeros, unit], 1), readout=w["readout"],
    )  # fmt: skip


def symmetric(matrices: Float[Tensor, "*A N N"]) -> Float[Tensor, "*A N N"]:
    """Symmetric parts."""
    return (matrices + matrices.mT) / 2


def flat(matrices: Float[Tensor, "*A N N"]) -> Float[Tensor, "*A C"]:
    """Upper triangles of symmetric matrices, N (N + 1) / 2 = C entries, scaled so that inner products stay what they are."""
    row, column = torch.triu_indices(*matrices.shape[-2:])
    return matrices[..., row, column] * _scale(row, column, matrices.dtype)


def unflat(vectors: Float[Tensor, "*A C"]) -> Float[Tensor, "*A N N"]:
    """Symmetric matrices from what `flat` made of them."""
    size = int((2 * vectors.shape[-1]) ** 0.5)
    row, column = torch.triu_indices(size, size)
    scale = 1 / _scale(row, column, vectors.dtype)
    matrices = vectors.new_zeros(*vectors.shape[:-1], size, size)
    matrices[..., row, column] = vectors * scale
    matrices[..., column, row] = vectors * scale
    return matrices


def _scale(row: Tensor, column: Tensor, dtype: torch.dtype) -> Tensor:
    """1 on the diagonal and sqrt 2 beside it, in the dtype itself: `torch.where` of two Python numbers rounds to float32."""
    return (1 + (row != column).to(dtype)).sqrt()


def _lifted(inputs: Tensor, recurrence: Tensor, w: dict[str, Tensor]) -> Forms:
    """Side gating: y_e = sum_i D_ei h_i (w_i . z_T) is a form in (h, w z_T), and w_i . z is a form of z."""
    n = len(inputs)
    linear = torch.zeros_like(inputs)
    linear[:, -1] = w["w_side"]
    nothing = torch.zeros_like(recurrence)
    joint = torch.cat([recurrence, nothing]) if recurrence.dim() == 1 else torch.nn.functional.pad(recurrence, (0, n, 0, n))
    outputs = w["readout"].new_zeros(len(w["readout"]), 2 * n, 2 * n)
    outputs[:, range(n), range(n, 2 * n)] = w["readout"]
    return Forms(torch.cat([inputs, symmetric(linear)]), joint, symmetric(outputs))
