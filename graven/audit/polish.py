"""A small layer moved onto what a large one reads, or onto the attention that it is near: Levenberg-Marquardt on forms, so no data are drawn.

Decays are 0 and 1, accumulators are products of two maps of the token, queries are maps of it, and every output neuron multiplies one
reading of the accumulators with one of the queries, as `graven.audit.merge.separate_outputs` leaves them. Then what is read is

    y_T,e = sum_s M_e(z_s z_s^T, z_T),     M_e = sum_r D_er (A_r F) (B_r W)^T                                                (R45)

and M is to be a given form: the kernel of the attention, bordered by zeros for the constant 1, or the form of the layer itself. Where M
agrees, so does what is read, at any length.

Source: ours, docs/theory.md; scipy.optimize.least_squares, in float64.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares  # type: ignore[import-untyped]  # scipy ships no types
from torch import Tensor

from graven.audit.dimension import REMEMBERS
from graven.audit.forms import flat, symmetric, weights, with_weights
from graven.layers.gated_rnn import GatedRNN

MOST_PARAMETERS = 2500  # a step takes a singular value decomposition of so many columns
EXACT = 1e-20  # squared error as a share of the form's, below which a layer is the attention


class Small(NamedTuple):
    """Weights of equation R45: F_i = sym(in1_i in2_i^T), W = query, A = first, B = second, D = readout."""

    in1: Float[Tensor, "S N"]
    in2: Float[Tensor, "S N"]
    query: Float[Tensor, "Q N"]
    first: Float[Tensor, "M S"]
    second: Float[Tensor, "M Q"]
    readout: Float[Tensor, "E M"]


class Polished(NamedTuple):
    """A layer after polishing.

    Args:
        layer: The layer.
        error: |M - wanted|^2 / |wanted|^2 that is left.
        evaluations: Of the residual.
    """

    layer: GatedRNN
    error: float
    evaluations: int


def polish(layer: GatedRNN, wanted: Float[Tensor, "E C N"], *, most: int = 100, tolerance: float = 1e-15) -> Polished:
    """Move the weights of a layer with separated outputs until M is the given form, or nothing improves.

    Args:
        layer: As `separate_outputs` leaves it.
        wanted: `attention_form` of a kernel, or `reading_form` of a layer.
        most: Evaluations.
        tolerance: Stop where a step lowers the error by no more than this share of it.
    Source: ours, equation R45; tests/test_audit.py.
    """
    start = _balanced(_small(layer))
    scale = float(wanted.norm())
    sizes = [part.numel() for part in start]
    short = max(0, sum(sizes) - wanted.numel())

    def parts(vector: np.ndarray) -> Small:
        return Small(*(piece.reshape(part.shape) for piece, part in zip(torch.split(torch.from_numpy(vector), sizes), start, strict=True)))

    solved = least_squares(
        lambda v: np.pad(((_kernel(parts(v)) - wanted) / scale).flatten().numpy(), (0, short)),
        torch.cat([part.flatten() for part in start]).numpy(),
        lambda v: np.pad((_jacobian(parts(v)) / scale).numpy(), ((0, short), (0, 0))),
        method="lm", xtol=1e-15, ftol=tolerance, gtol=1e-15, max_nfev=most,
    )  # fmt: skip
    return Polished(_layer(parts(solved.x)), float(2 * solved.cost), int(solved.nfev))


def one_output_fewer(layer: GatedRNN, wanted: Float[Tensor, "E C N"], *, tries: int = 2) -> Polished:
    """The best of a few polishes with one output neuron taken out, the weakest first: does the layer need all of them?

    No number below the effective numbers of accumulators, queries and outputs can be exact: an output neuron adds 1 to a rank at most.

    Args:
        layer: Polished, with at least two output neurons.
        wanted: As in `polish`.
        tries: Neurons that are tried.
    """
    small = _small(layer)
    sizes = small.readout.norm(dim=0) * (small.first @ _forms(small)).norm(dim=1) * (small.second @ small.query).norm(dim=1)
    found = []
    for weak in sizes.argsort()[:tries].tolist():
        rest = [r for r in range(len(sizes)) if r != weak]
        fewer = small._replace(first=small.first[rest], second=small.second[rest], readout=small.readout[:, rest])
        found.append(polish(_layer(fewer), wanted, most=50))
    return min(found, key=lambda polished: polished.error)


def _balanced(small: Small) -> Small:
    """The same M with factors of equal size: a step of the search then changes each of them alike."""
    (in1, in2), inputs = _even(small.in1, small.in2), small.first
    size = (in1.norm(dim=1) * in2.norm(dim=1)).clamp(min=torch.finfo(torch.float64).tiny)
    in1, in2, inputs = in1 / size[:, None] ** 0.5, in2 / size[:, None] ** 0.5, inputs * size
    length = small.query.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    first, second, readout = _even(inputs, small.second * length, small.readout.T)
    return Small(in1, in2, small.query / length[:, None], first, second, readout.T)


def _even(*rows: Tensor) -> list[Tensor]:
    """Rows scaled so that those of one product have equal norms, and the product stays."""
    norms = [part.norm(dim=1, keepdim=True).clamp(min=1e-150) for part in rows]
    mean = torch.stack(norms).log().mean(0).exp()
    return [part / norm * mean for part, norm in zip(rows, norms, strict=True)]


def attention_form(kernel: Float[Tensor, "E D D D"]) -> Float[Tensor, "E C N"]:
    """M of a kernel, equation R42: nothing stands with the constant."""
    outputs, width = kernel.shape[:2]
    bordered = kernel.new_zeros(outputs, width + 1, width + 1, width + 1)
    bordered[:, :-1, :-1, :-1] = kernel
    return flat(bordered.movedim(3, 1)).mT


def parameters(layer: GatedRNN) -> int:
    """Numbers that polishing would move."""
    return sum(part.numel() for part in _small(layer))


def _small(layer: GatedRNN) -> Small:
    w = weights(layer)
    remembers = w["decay"] > REMEMBERS
    query = w["w_in1"][~remembers] * w["w_in2"][~remembers, -1:]
    return Small(
        w["w_in1"][remembers], w["w_in2"][remembers], query, w["w_out1"][:, remembers], w["w_out2"][:, ~remembers], w["readout"]
    )  # fmt: skip


def _layer(small: Small) -> GatedRNN:
    one = torch.zeros_like(small.query)
    one[:, -1] = 1.0
    nothing = (torch.zeros_like(small.first), torch.zeros_like(small.second))
    decay = torch.cat([torch.ones(len(small.in1)), torch.zeros(len(small.query))]).double()
    return with_weights(
        w_in1=torch.cat([small.in1, small.query]), w_in2=torch.cat([small.in2, one]), decay=decay, readout=small.readout,
        w_out1=torch.cat([small.first, nothing[1]], 1), w_out2=torch.cat([nothing[0], small.second], 1),
    )  # fmt: skip


def _forms(small: Small) -> Float[Tensor, "S C"]:
    return flat(symmetric(small.in1[:, :, None] * small.in2[:, None]))


def _kernel(small: Small) -> Float[Tensor, "E C N"]:
    return torch.einsum("er,rp,rc->epc", small.readout, small.first @ _forms(small), small.second @ small.query)


def _jacobian(small: Small) -> Float[Tensor, "R P"]:
    """Derivative of every entry of M by every weight."""
    form, d = _forms(small), small.readout
    sums, reads = small.first @ form, small.second @ small.query
    unit = torch.eye(small.query.shape[1], dtype=torch.float64)
    by_form = torch.einsum("er,ri,rc->eci", d, small.first, reads)
    slope = [flat(symmetric(unit[None, :, :, None] * other[:, None, None])) for other in (small.in2, small.in1)]  # [S, N, C]
    outer = torch.einsum("rp,rc->pcr", sums, reads)
    parts = [
        *(torch.einsum("eci,iup->epciu", by_form, by_weight) for by_weight in slope),
        torch.einsum("er,rp,rj,cu->epcju", d, sums, small.second, unit),
        torch.einsum("er,ip,rc->epcri", d, form, reads),
        torch.einsum("er,rp,jc->epcrj", d, sums, small.query),
        torch.einsum("ef,pcr->epcfr", torch.eye(len(d), dtype=torch.float64), outer),
    ]
    return torch.cat([part.flatten(3) for part in parts], 3).flatten(0, 2)
