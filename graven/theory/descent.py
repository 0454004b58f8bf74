"""Weighted preconditioned gradient descent as an algorithm, written with no layer in sight.

The examples (x_i, y_i) are the rows of X and y; what a gate decays is the key P_k^T x_i, so every weight is a vector of the width of x.

Source: Li et al. 2025, arXiv:2504.04308; docs/theory.md numbers the equations.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from graven.shapes import check


class Trajectory(NamedTuple):
    """What L steps leave, after each of them.

    Args:
        residuals: y_i - x_i . beta_i of every example under its own estimate.
        predictions: x . beta of the query.
    """

    residuals: Float[np.ndarray, "L N"]
    predictions: Float[np.ndarray, "L"]


def weights_of_gates(gates: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "N D"]:
    """How much of every example is left when the query comes: the product of all gates after its own; the last gate is the query's.

    Source: Li et al. 2025, arXiv:2504.04308, equation 10.

    >>> weights_of_gates(np.array([[0.3], [0.5], [0.8]])).ravel().tolist()
    [0.4, 0.8]
    """
    return np.array([np.prod(gates[i + 1 :], axis=0) for i in range(len(gates) - 1)]).reshape(len(gates) - 1, gates.shape[1])


def gradient_step(
    features: Float[np.ndarray, "N D"],
    labels: Float[np.ndarray, "N"],
    *,
    key: Float[np.ndarray, "D D"],
    query: Float[np.ndarray, "D D"],
    weights: Float[np.ndarray, "N D"],
) -> Float[np.ndarray, "D"]:
    """One step from zero: beta = P_q (X P_k * Omega)^T y.

    Args:
        key: P_k.
        query: P_q.
        weights: Omega, one weight for every coordinate of every key.
    Raises:
        ShapeError: The parts do not fit each other.
    Source: Li et al. 2025, arXiv:2504.04308, equation 8a.
    """
    check(features=(features, "N D"), labels=(labels, "N"), key=(key, "D D"), query=(query, "D D"), weights=(weights, "N D"))
    step = np.zeros(features.shape[1])
    for x, y, weight in zip(features, labels, weights, strict=True):
        step += y * weight * (key.T @ x)
    return query @ step


def gradient_steps(
    features: Float[np.ndarray, "N D"],
    labels: Float[np.ndarray, "N"],
    x: Float[np.ndarray, "D"],
    *,
    keys: Float[np.ndarray, "L D D"],
    queries: Float[np.ndarray, "L D D"],
    gates: Float[np.ndarray, "L T D"],
) -> Trajectory:
    """L steps as L layers take them: every example has an estimate of its own, which sees the examples up to itself.

        beta_i <- beta_i - P_q sum_{j <= i} g_(j:i) * P_k^T x_j (x_j . beta_j - y_j)
        beta   <- (1 - x^T P_q P_k^T x) beta - P_q sum_j g_(j:n+1) * P_k^T x_j (x_j . beta_j - y_j)

    All x_j . beta_j on the right are those before the step.

    Args:
        keys: P_k of every step.
        queries: P_q of every step.
        gates: T = N + 1 gates of every step, the last one the query's.
    Raises:
        ShapeError: The parts do not fit each other.
    Differs: the paper writes products up to n + 1 divided by those after i, which needs gates above 0; divides the query's step by g_(n+1)
        once more, which is wrong; and gives the estimates on the right the index of those on the left.
    Source: Li et al. 2025, arXiv:2504.04308, theorem 2; with other gates in every layer as its text allows.
    """
    sizes = check(features=(features, "N D"), labels=(labels, "N"), x=(x, "D"), keys=(keys, "L D D"), queries=(queries, "L D D"))
    check(gates=(gates, f"{sizes['L']} {sizes['N'] + 1} {sizes['D']}"))
    beta, own = np.zeros(sizes["D"]), np.zeros((sizes["N"], sizes["D"]))
    residuals, predictions = [], []
    for key, query, gate in zip(keys, queries, gates, strict=True):
        errors = [row @ estimate - y for row, estimate, y in zip(features, own, labels, strict=True)]
        total = np.zeros(sizes["D"])
        for i, row in enumerate(features):
            total = gate[i] * total + (key.T @ row) * errors[i]
            own[i] = own[i] - query @ total
        beta = (1 - x @ query @ key.T @ x) * beta - query @ (gate[-1] * total)
        residuals.append(labels - np.sum(features * own, axis=1))
        predictions.append(x @ beta)
    return Trajectory(np.array(residuals), np.array(predictions))
