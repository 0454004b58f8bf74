"""Weights with which gated linear layers perform given steps of weighted preconditioned gradient descent.

A token is [x; y; c]: K features, a label, and whatever else there is, which no key, query or value here sees. With keys P_k^T x, queries
P_q^T x and values y u, what row j of the state reads for a query is

    o_j = u_j x^T P_q (X P_k * Omega_j)^T y                                   (u is the unit vector of y's row, where nothing is said)

Omega_j the products of the gates of that row after each example. A head h joins rows: weights sum_j h_j u_j Omega_j, of any sign and order.

Source: Li et al. 2025, arXiv:2504.04308, sections 3 and 5.2, appendix B, with the errata of docs/theory.md. Judged by graven/theory.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError
from graven.layers.gated_linear import Gate, GatedLinear, GatedLinearSpec, Stack
from graven.shapes import check

# A logit whose sigmoid is 1 in float64, and whose negative's is 4e-18: gates that are open and shut as far as any sum of ours can tell.
SURE = 40.0


class Headed(NamedTuple):
    """A layer and the head that reads its prediction: `layer(tokens)[:, -1] @ head`."""

    layer: GatedLinear
    head: Float[Tensor, "D"]


def step_layer(
    *,
    key: Float[Tensor, "K K"],
    query: Float[Tensor, "K K"],
    extra: int = 0,
    values: Float[Tensor, "D"] | None = None,
    gate: Gate = "none",
    gate_weight: Float[Tensor, "G D"] | None = None,
) -> GatedLinear:
    """One layer that takes one step; entry K of what the last token reads is the prediction.

    Args:
        key: P_k.
        query: P_q.
        extra: Entries of a token after the label.
        values: u, how much of a label each row of the state gets (construction 2, equation 28 on); only row K where left out (construction 1).
        gate: Kind of gate.
        gate_weight: The linear map to the logits of the gates.
    Raises:
        ShapeError: The parts do not fit each other.
        SpecError: Gates without weights, or weights without gates.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 1, equations 9, 23 and 28; the vector gate of the paper is gate="value".
    """
    features = check(key=(key, "K K"), query=(query, "K K"))["K"]
    width = features + 1 + extra
    if (gate == "none") != (gate_weight is None):
        raise SpecError(f"`gate` is {gate!r} and `gate_weight` is {'missing' if gate_weight is None else 'given'}; give both or neither.")
    spec = GatedLinearSpec(width=width, key_width=width, value_width=width, gate=gate)
    layer = GatedLinear(spec).to(key.dtype)
    if values is None:
        values = torch.zeros(width, dtype=key.dtype)
        values[features] = 1.0
    check(values=(values, f"{width}"), **({} if gate_weight is None else {"gate_weight": (gate_weight, f"{spec.gates} {width}")}))
    with torch.no_grad():
        for projection, matrix in ((layer.k, key), (layer.q, query)):
            projection.weight.zero_()[:features, :features] = matrix.T
        layer.v.weight.zero_()[:, features] = values
        if layer.gate is not None and gate_weight is not None:
            layer.gate.weight.copy_(gate_weight)
    return layer


def step_stack(
    *,
    keys: Float[Tensor, "L K K"],
    queries: Float[Tensor, "L K K"],
    extra: int = 0,
    gate: Gate = "none",
    gate_weights: Float[Tensor, "L G D"] | None = None,
) -> Stack:
    """L layers that take L steps. After them entry K of example i is y_i - x_i . beta_i, and of the query -x . beta.

    Args:
        keys: P_k of every step.
        queries: P_q of every step; the layers hold its negative.
        extra: Entries of a token after the label.
        gate: Kind of gate.
        gate_weights: Maps to the logits. They may see y, which then changes the gates from layer to layer.
    Raises:
        ShapeError, SpecError: As `step_layer`.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 2; the recursion is that of docs/theory.md, which corrects the printed one.
    """
    count = check(keys=(keys, "L K K"), queries=(queries, "L K K"))["L"]
    weights = [None] * count if gate_weights is None else list(gate_weights)
    steps = zip(keys, queries, weights, strict=True)
    return Stack([step_layer(key=key, query=-query, extra=extra, gate=gate, gate_weight=weight) for key, query, weight in steps])


def delimiter_gates(weights: Float[Tensor, "C"]) -> Float[Tensor, "C"]:
    """Gates at the delimiters that give every task its weight, all other gates being 1: g_k = w_k / w_(k+1), w_(K+1) = 1.

    Args:
        weights: One a task, 0 <= w_1 <= ... <= w_K <= 1.
    Raises:
        SpecError: They fall somewhere, or leave [0, 1].
    Differs: the paper divides w_k by the product of all later weights, which is the same for two tasks and wrong for more.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 5, step 3 of its proof.

    >>> delimiter_gates(torch.tensor([0.125, 0.25, 0.5])).tolist()
    [0.5, 0.5, 0.5]
    """
    bounds = torch.cat([weights.new_zeros(1), weights, weights.new_ones(1)])
    if (bounds.diff() < 0).any():
        raise SpecError(
            f"`weights` is {[round(w, 4) for w in weights.tolist()]}; scalar gates reach 0 <= w_1 <= ... <= w_K <= 1 only: "
            "divide by the largest and scale the query matrix up instead, or use `vector_weighted_layer`."
        )
    later = bounds[2:]
    return torch.where(later > 0, weights / later.where(later > 0, torch.ones_like(later)), torch.zeros_like(weights))


def gate_weight_for(gates: Float[Tensor, "G C"], *, marks: Float[Tensor, "C F"], features: int) -> Float[Tensor, "G D"]:
    """The map of tokens to logits with which every kind of token has its gates, whatever its x and y are.

    Args:
        gates: In [0, 1], one column for each mark: data first, then each task's delimiter. 0 and 1 become logits of -40 and 40.
        marks: Contextual features, linearly independent.
        features: Width of x.
    Raises:
        ShapeError: Gates and marks differ in number.
        SpecError: A gate outside [0, 1], or marks that depend on each other.
    Differs: assumption B of the paper lets gates be 0 and 1; the sigmoid only comes near, so its minimum is a limit.
    Source: Li et al. 2025, arXiv:2504.04308, assumption B and step 3 of the proof of theorem 5.
    """
    check(gates=(gates, "G C"), marks=(marks, "C F"))
    if (gates < 0).any() or (gates > 1).any():
        raise SpecError(f"`gates` reach from {gates.min().item():.4g} to {gates.max().item():.4g}; gates lie in [0, 1].")
    rank = int(torch.linalg.matrix_rank(marks))
    if rank < len(marks):
        raise SpecError(f"`marks` has {len(marks)} rows of rank {rank}; take {len(marks)} contextual features or more, linearly independent.")
    logits = torch.logit(gates).clamp(-SURE, SURE)
    inverse = torch.linalg.pinv(marks).mT
    weight = logits @ inverse
    weight = weight + (logits - weight @ marks.mT) @ inverse  # one refinement: what is left of the logits after rounding
    return torch.cat([weight.new_zeros(len(gates), features + 1), weight], dim=1)


def scalar_weighted_layer(
    weights: Float[Tensor, "C"], *, marks: Float[Tensor, "E F"], key: Float[Tensor, "K K"], query: Float[Tensor, "K K"]
) -> GatedLinear:
    """A layer with one gate that weighs the tasks of a delimited prompt; entry K of what the last token reads is the prediction.

    Args:
        weights: One a task, 0 <= w_1 <= ... <= w_K <= 1.
        marks: Contextual features of data and of each task's delimiter; one more than weights.
        key: P_k.
        query: P_q.
    Raises:
        ShapeError, SpecError: As `delimiter_gates` and `gate_weight_for`.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 5.
    """
    gates = torch.cat([weights.new_ones(1), delimiter_gates(weights)])[None]
    gate_weight = gate_weight_for(gates, marks=marks, features=len(key))
    return step_layer(key=key, query=query, extra=marks.shape[1], gate="scalar", gate_weight=gate_weight)


def vector_weighted_layer(
    weights: Float[Tensor, "C"], *, marks: Float[Tensor, "E F"], key: Float[Tensor, "K K"], query: Float[Tensor, "K K"]
) -> Headed:
    """A layer with one gate a row, and a head, that give the tasks of a delimited prompt any weights at all.

    Row k shuts at the delimiter before task k, so it holds tasks k, k + 1 ...; the head adds the rows by w_k - w_(k-1).

    Args:
        weights: One a task, of any sign and order.
        marks, key, query: As `scalar_weighted_layer`.
    Raises:
        ShapeError, SpecError: As `gate_weight_for`.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 6 and its proof.
    """
    tasks, width = len(weights), len(key) + 1 + marks.shape[1]
    gates = weights.new_ones(width, tasks + 1)
    for row in range(1, tasks):
        gates[row, row] = 0.0
    gate_weight = gate_weight_for(gates, marks=marks, features=len(key))
    values, head = weights.new_zeros(width), weights.new_zeros(width)
    values[:tasks] = 1.0
    head[:tasks] = torch.cat([weights[:1], weights.diff()])
    return Headed(step_layer(key=key, query=query, extra=marks.shape[1], values=values, gate="value", gate_weight=gate_weight), head)
