"""Attention as a sum of products: heads that were checked, their factors, and the products that a recurrent layer then has to compute.

Source: docs/theory.md, equations (R3) to (R9); Zucchet et al. 2023, arXiv:2309.01775, appendices A.3 and A.4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from graven.errors import SpecError
from graven.shapes import check
from graven.theory.capacity import Form

Heads = Float[Tensor, "_ _"] | Float[Tensor, "_ _ _"] | Sequence[Float[Tensor, "_ _"]]


class Head(NamedTuple):
    """W_V, W_K and W_Q of one head."""

    v: Float[Tensor, "V D"]
    k: Float[Tensor, "K D"]
    q: Float[Tensor, "K D"]


class Factors(NamedTuple):
    """W_V = out v and W_K^T W_Q = k^T q; the first `shared` rows of v and k are equal."""

    out: Float[Tensor, "V R"]
    v: Float[Tensor, "R D"]
    k: Float[Tensor, "E D"]
    q: Float[Tensor, "E D"]
    shared: int = 0


class Plan(NamedTuple):
    """What one head computes: y_t = sum over products m of out_m (weights_m . q x_t) sum over s of (v_c x_s) (k_c x_s), c the cell of m.

    Args:
        v, k: One row for each cell, a sum that is remembered.
        q: One row for each query.
        cell: Of each product.
        weights: Of queries in each product.
        out: What a product is added to.
    """

    v: Float[Tensor, "C D"]
    k: Float[Tensor, "C D"]
    q: Float[Tensor, "E D"]
    cell: Int[Tensor, "M"]
    weights: Float[Tensor, "M E"]
    out: Float[Tensor, "V M"]


def checked(w_v: Heads, w_k: Heads, w_q: Heads) -> list[Head]:
    """The heads, one by one, each of parts that fit together.

    Raises:
        ShapeError: Widths differ.
        SpecError: Heads differ in number, or matrices in type; nothing in a matrix, or something that is not a number.
    """
    parts = {"w_v": _matrices(w_v), "w_k": _matrices(w_k), "w_q": _matrices(w_q)}
    counts = [len(matrices) for matrices in parts.values()]
    if len(set(counts)) > 1 or not counts[0]:
        raise SpecError(f"`w_v`, `w_k` and `w_q` have {counts[0]}, {counts[1]} and {counts[2]} heads; give each the same number, at least 1.")
    heads = [Head(*matrices) for matrices in zip(*parts.values(), strict=True)]
    for head in heads:
        width = heads[0].v.shape[-1]
        check(w_v=(head.v, f"V {width}"), w_k=(head.k, f"K {width}"), w_q=(head.q, f"K {width}"))
        for name, matrix in zip(parts, head, strict=True):
            if not matrix.is_floating_point() or matrix.dtype != heads[0].v.dtype:
                raise SpecError(f"`{name}` is {matrix.dtype} and `w_v` {heads[0].v.dtype}; give all matrices in one floating type.")
            if not torch.isfinite(matrix).all():
                raise SpecError(f"`{name}` has an entry that is not finite; give numbers.")
            if not matrix.numel():
                raise SpecError(f"`{name}` has shape {tuple(matrix.shape)}, which holds nothing; every width must be at least 1.")
    return heads


def plan(head: Head, form: Form) -> Plan:
    """The products of one form, in float64.

    The fast forms take each entry of a symmetric block S once: sum over j of S_ij q_j is the sum over j != i of S_ij (q_i + q_j), which feeds
    i and j alike, and (S_ii - sum over j != i of S_ij) q_i, whose first factor is a sum of products of v_i with one other row.
    """
    fast = form in ("symmetric_fast", "minimal", "side_symmetric")
    out, v, k, q, shared = factors(head, form)
    inside = [(i, j) for i in range(shared) for j in range(i if fast else 0, shared)]
    pairs = inside + [(i, j) for i in range(len(v)) for j in range(len(k)) if max(i, j) >= shared]
    cells: dict[tuple[int, int], int] = {}
    for i, j in pairs:
        cells.setdefault((min(i, j), max(i, j)) if max(i, j) < shared else (i, j), len(cells))
    cell = [cells[(min(i, j), max(i, j)) if max(i, j) < shared else (i, j)] for i, j in pairs]
    twice = torch.tensor([fast and max(i, j) < shared and i != j for i, j in pairs], device=v.device)
    first, second = torch.tensor(pairs, device=v.device).unbind(1)
    unit = torch.eye(len(k), dtype=v.dtype, device=v.device)
    weights, into = unit[second], out[:, first].clone()
    weights[twice] += unit[first[twice]]
    into[:, twice] += out[:, second[twice]]
    keys = [2 * k[i] - k[:shared].sum(0) if fast and i == j < shared else k[j] for i, j in cells]
    return Plan(torch.stack([v[i] for i, _ in cells]), torch.stack(keys), q, torch.tensor(cell, device=v.device), weights, into)


class Terms(NamedTuple):
    """All heads as one sum, for layers that multiply with the token itself: y_t = sum over n of out_n (q_n x_t) sum over s of (v_n x_s) (k_n x_s)."""

    v: Float[Tensor, "N D"]
    k: Float[Tensor, "N D"]
    q: Float[Tensor, "N D"]
    out: Float[Tensor, "E N"]


def terms(heads: list[Head], form: Form = "side") -> Terms:
    """The products of every head, reads side by side."""
    plans = [plan(head, form) for head in heads]
    v, k = (torch.cat([getattr(p, name)[p.cell] for p in plans]) for name in ("v", "k"))
    return Terms(v, k, torch.cat([p.weights @ p.q for p in plans]), blocks([p.out for p in plans]))


def blocks(parts: list[Tensor]) -> Tensor:
    """One matrix with the parts along its diagonal."""
    return torch.block_diag(*parts)  # type: ignore[no-untyped-call]  # torch gives it no types


def _matrices(given: Heads) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given.detach()] if given.dim() != 3 else list(given.detach().unbind(0))
    return [matrix.detach() for matrix in given]


def factors(head: Head, form: Form) -> Factors:
    """Those that a form is made of; in float64, whatever the matrices are."""
    v, k, q = (matrix.double() for matrix in head)
    eye = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    if form in ("naive", "side"):
        return Factors(torch.eye(len(v), dtype=v.dtype, device=v.device), v, k, q)
    if form in ("symmetric", "symmetric_fast", "side_symmetric"):
        return Factors(v, eye, eye, k.mT @ q, shared=len(eye))
    # weights that were stored in half precision are what they are: a rank is counted as if they were float32 at least
    rounding = 8 * max(v.shape[1], len(v), len(k)) * min(torch.finfo(head.v.dtype).eps, torch.finfo(torch.float32).eps)
    rows = _range(v.mT, rounding * torch.linalg.matrix_norm(v, 2))
    columns = _range(k.mT @ q, rounding * torch.linalg.matrix_norm(k, 2) * torch.linalg.matrix_norm(q, 2))
    common = _common(rows, columns, rounding) if form == "minimal" else rows[:, :0]
    basis_v, basis_k = (torch.cat([common, _rest(whole, common)], 1) for whole in (rows, columns))
    return Factors(v @ basis_v, basis_v.mT, basis_k.mT, basis_k.mT @ k.mT @ q, shared=common.shape[1])


def _range(matrix: Tensor, tolerance: Tensor) -> Tensor:
    """An orthonormal basis of the column space, of one direction at least."""
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, : max(1, int((values > tolerance).sum()))]


def _common(one: Tensor, other: Tensor, rounding: float) -> Tensor:
    """An orthonormal basis of what two spaces share: directions of `one` whose sine to `other` is rounding.

    Sines, not cosines: a cosine of 1 - 1e-12 is an angle of 1e-6.
    """
    outside = one - other @ (other.mT @ one)
    _, sines, right = torch.linalg.svd(outside, full_matrices=False)
    return one @ right.mT[:, sines < 8 * rounding]


def _rest(whole: Tensor, part: Tensor) -> Tensor:
    """An orthonormal basis of what is in `whole` and at right angles to `part`."""
    _, _, right = torch.linalg.svd(part.mT @ whole)
    return whole @ right.mT[:, part.shape[1] :]
