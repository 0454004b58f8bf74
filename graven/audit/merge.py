"""The same function with fewer neurons: what is linear in others is taken out, without any training.

Source: ours, docs/theory.md; the paper merges three output neurons by hand (arXiv:2309.01775, figure 2C and appendix C.2).
"""

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import qr  # type: ignore[import-untyped]  # scipy ships no types
from torch import Tensor

from graven.audit.dimension import REMEMBERS, flat_form, linear
from graven.audit.forms import flat, forms, input_output, symmetric, weights, with_weights
from graven.audit.kernel import Attention
from graven.errors import SpecError
from graven.layers.gated_rnn import GatedRNN

COLLINEAR = 1e-6  # most sine between two columns of D, and least share of an eigenvalue, that count as different from 0


def round_decays(layer: GatedRNN) -> GatedRNN:
    """Decays at 1 above `REMEMBERS` and at 0 below it, in float64."""
    w = weights(input_output(layer))
    return with_weights(**{**w, "decay": (w["decay"] > REMEMBERS).double()})


def merge_hidden(layer: GatedRNN, *, accumulators: int, queries: int) -> GatedRNN:
    """A layer with so many neurons of each kind that comes nearest, decays at 0 and 1; exact where the effective numbers are no larger.

    Accumulators are chosen among those that are there, by a pivoted QR of their forms along the leading singular vectors of equation R44;
    queries are made new, from the linear parts of the leading singular vectors on the other side.

    Raises:
        SpecError: There are fewer neurons of a kind.
    Source: ours, docs/theory.md; tests/test_audit.py.
    """
    layer = input_output(layer)
    w, form = weights(layer), flat_form(layer)
    inputs, remembers = flat(forms(layer).inputs), w["decay"] > REMEMBERS
    there = (int(remembers.sum()), int((~remembers).sum()))
    if there[0] < accumulators or min(accumulators, queries) < 1 or queries > layer.spec.width + 1:
        raise SpecError(f"{accumulators} accumulators and {queries} queries were asked of a layer with {there[0]} and {there[1]} neurons.")
    chosen, mixed = _pivots(inputs[remembers], _leading(form, axis=1, count=accumulators))
    reading, read = _linear(inputs[~remembers], _leading(form, axis=2, count=queries))
    one = torch.zeros_like(reading)
    one[:, -1] = 1.0
    rows = remembers.nonzero().flatten()[chosen]
    out = {name: torch.cat([w[name][:, remembers] @ mixed, w[name][:, ~remembers] @ read], 1) for name in ("w_out1", "w_out2")}
    decay = torch.cat([torch.ones(accumulators), torch.zeros(queries)]).double()
    ins = {"w_in1": torch.cat([w["w_in1"][rows], reading]), "w_in2": torch.cat([w["w_in2"][rows], one])}
    return with_weights(**ins, **out, decay=decay, readout=w["readout"])


def merge_outputs(layer: GatedRNN) -> GatedRNN:
    """Output neurons whose columns of D are collinear, as few as have the same sum: max(p, q) for a form with p positive and q negative eigenvalues.

    So several are one neuron exactly where their summed form has rank 2 or less and no two eigenvalues of one sign.

    Source: ours, docs/theory.md; tests/test_audit.py.
    """
    w = weights(input_output(layer))
    left, parts = list(range(w["readout"].shape[1])), []
    units = w["readout"] / w["readout"].norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    while left:
        unit = units[:, left[0]]
        lengths = w["readout"].T @ unit
        group = [r for r in left if float((w["readout"][:, r] - lengths[r] * unit).norm()) <= COLLINEAR * float(w["readout"][:, r].norm())]
        left = [r for r in left if r not in group]
        total = symmetric((lengths[group, None] * w["w_out1"][group]).T @ w["w_out2"][group])
        first, second = products(total)
        keep = len(first) < len(group)
        parts.append(
            (first, second, unit[:, None].expand(-1, len(first))) if keep else (w["w_out1"][group], w["w_out2"][group], w["readout"][:, group])
        )
    firsts, seconds, columns = zip(*parts, strict=True)
    return with_weights(**{**w, "w_out1": torch.cat(firsts), "w_out2": torch.cat(seconds), "readout": torch.cat(columns, 1)})


def products(form: Float[Tensor, "S S"]) -> tuple[Float[Tensor, "M S"], Float[Tensor, "M S"]]:
    """Fewest pairs of linear forms whose products add up to a quadratic form.

    p a^2 - q b^2 is (a + b)(a - b) up to scale, so a positive eigenvalue and a negative one share a product.

    Source: ours; tests/test_audit.py.
    """
    values, vectors = torch.linalg.eigh(form)
    scaled = (vectors * values.abs().sqrt()).T
    large = values.abs() > COLLINEAR * values.abs().max()
    plus, minus = scaled[large & (values > 0)].flip(0), scaled[large & (values < 0)]
    count = max(len(plus), len(minus))
    a, b = (torch.cat([part, part.new_zeros(count - len(part), form.shape[0])]) for part in (plus, minus))
    return a + b, a - b


def separate_outputs(layer: GatedRNN, *, outputs: int) -> GatedRNN:
    """Output neurons that each multiply one reading of accumulators with one query, for the leading `outputs` directions of what is read.

    Products of two accumulators, or of two queries, are no part of attention and are left out.

    Source: ours, docs/theory.md; tests/test_audit.py.
    """
    layer = input_output(layer)
    w, remembers = weights(layer), weights(layer)["decay"] > REMEMBERS
    core = 2 * forms(layer).outputs[:, remembers][:, :, ~remembers]
    directions = torch.linalg.svd(flat_form(layer).flatten(1), full_matrices=False).U[:, :outputs]
    along = torch.einsum("ev,eij->vji", directions, core)  # [V, query, accumulator]
    count = along.shape[1]
    first, second = (along.new_zeros(outputs * count, len(remembers)) for _ in range(2))
    first[:, remembers] = along.flatten(0, 1)
    second[:, ~remembers] = torch.eye(count, dtype=torch.float64).repeat(outputs, 1)
    return with_weights(**{**w, "w_out1": first, "w_out2": second, "readout": directions.repeat_interleave(count, 1)})


def fast_outputs(layer: GatedRNN, head: Attention, *, accumulators: int, queries: int, outputs: int) -> GatedRNN:
    """As many output neurons as accumulators, over the hidden neurons that are there: near an attention whose products are formed the fast way.

    With V = sum_i d_i v_i^T, W_K^T W_Q = sum_j k_j g_j^T and v_i = k_i for i <= c, S the sum of x x^T and S_ij = v_i^T S k_j,

        V S W_K^T W_Q = sum_(i < j <= c) S_ij (d_i + d_j)(g_i + g_j)^T + sum_(i <= c) (S_ii - sum_(j != i) S_ij) d_i g_i^T + the other d_i S_ij g_j^T

    Args:
        layer: With its hidden neurons merged.
        head: The attention that it is near.
        accumulators, queries, outputs: Effective numbers; they tell c, for accumulators = outputs * queries - c (c - 1) / 2.
    Raises:
        SpecError: No c fits the numbers.
    Source: ours, docs/theory.md; tests/test_audit.py.
    """
    shared = (1 + (1 + 8 * (outputs * queries - accumulators)) ** 0.5) / 2 if accumulators < outputs * queries else 0
    if shared != int(shared) or not 0 <= shared <= min(outputs, queries):
        raise SpecError(f"{accumulators} accumulators, {queries} queries and {outputs} outputs are the numbers of no attention with one head.")
    reads, sums, asks = _fast_products(head, values=outputs, queries=queries, shared=int(shared))
    w = weights(layer)
    remembers, inputs = w["decay"] > REMEMBERS, flat(forms(layer).inputs)
    first, second = (inputs.new_zeros(len(sums), len(inputs)) for _ in range(2))
    pad = torch.nn.functional.pad
    first[:, remembers] = torch.linalg.lstsq(inputs[remembers].T, flat(pad(sums, (0, 1, 0, 1))).T).solution.T
    second[:, ~remembers] = torch.linalg.lstsq(linear(inputs[~remembers]).T, pad(asks, (0, 1)).T).solution.T
    return with_weights(**{**w, "w_out1": first, "w_out2": second, "readout": reads.T})


def _fast_products(head: Attention, *, values: int, queries: int, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of D [M, E], forms of the past [M, D, D] and maps of the token that reads [M, D]."""
    rows = torch.linalg.svd(head.w_v).Vh[:values]
    columns = torch.linalg.svd(head.key_query).U[:, :queries]
    left, _, right = torch.linalg.svd(rows @ columns)  # principal angles: what both spaces share comes first
    v, k = left.T @ rows, (columns @ right.T).T
    d, g = v @ head.w_v.T, k @ head.key_query
    form = symmetric(v[:, None, :, None] * k[None, :, None, :])
    own = [form[i, i] - sum((form[i, j] for j in range(shared) if j != i), torch.zeros_like(form[0, 0])) for i in range(shared)]
    pairs = [(i, j) for i in range(shared) for j in range(i + 1, shared)]
    others = [(i, j) for i in range(values) for j in range(queries) if max(i, j) >= shared]
    reads = [*(d[i] for i in range(shared)), *(d[i] + d[j] for i, j in pairs), *(d[i] for i, _ in others)]
    sums = [*own, *(form[i, j] for i, j in pairs), *(form[i, j] for i, j in others)]
    asks = [*(g[i] for i in range(shared)), *(g[i] + g[j] for i, j in pairs), *(g[j] for _, j in others)]
    return torch.stack(reads), torch.stack(sums), torch.stack(asks)


def _leading(form: Float[Tensor, "E C C"], *, axis: int, count: int) -> Float[Tensor, "C K"]:
    """Leading singular vectors of a flattening."""
    return torch.linalg.svd(form.movedim(axis, 0).flatten(1), full_matrices=False).U[:, :count]


def _pivots(inputs: Float[Tensor, "S C"], along: Float[Tensor, "C K"]) -> tuple[np.ndarray, Float[Tensor, "S K"]]:
    """Neurons that span the others along given directions, and every neuron in terms of them."""
    seen = inputs @ along
    angles = seen / inputs.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    chosen = np.asarray(qr(angles.T.numpy(), mode="r", pivoting=True)[1])[: along.shape[1]]
    return chosen, torch.linalg.lstsq(seen[chosen].T, seen.T).solution.T


def _linear(inputs: Float[Tensor, "S C"], along: Float[Tensor, "C K"]) -> tuple[Float[Tensor, "K N"], Float[Tensor, "S K"]]:
    """Linear parts of given forms, as maps of (x, 1), and every neuron in terms of them."""
    maps = linear(along.T)
    own = torch.zeros(len(maps), maps.shape[1], maps.shape[1], dtype=torch.float64)
    own[:, -1] = maps
    return maps, torch.linalg.lstsq(flat(symmetric(own)).T, inputs.T).solution.T
