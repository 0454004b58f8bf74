"""What gradient steps and the Bayes predictor reach on in-context linear regression, in closed form.

A prompt has T examples y_i = W x_i and a query x. Entries of W are N(0, s^2), those of x independent and symmetric with variance v and kurtosis
kappa. The loss is half of the mean squared error over outputs. With S = sum_i x_i x_i^T, k gradient steps from zero predict

    Y^T X p(S) x,      r(z) = 1 - z p(z),      loss = (1/2) s^2 v E tr r(S)^2

with p of degree k - 1. For one step p is the rate: E tr S = T d v and E tr S^2 = T d v^2 (T + d + kappa - 2), so

    rate* = 1 / (v (T + d + kappa - 2)),      loss* = (1/2) s^2 v d (d + kappa - 2) / (T + d + kappa - 2)

No gated RNN of one layer with quadratic gates and any linear recurrence goes below loss*. Its reads are sums of products of two quadratic
forms of two tokens. The loss is convex in the predictor, and the law of prompts is left as it is by flipping the sign of a token (for the
query with its target), of W with all labels, of a coordinate of x or of y, and by permuting coordinates or examples. Averaging a predictor over these
changes cannot raise its loss and leaves, of all such products, only c sum_i y_i x_i^T x: what is odd in the query and in the labels and even
in every other token has one factor of each. Losses of those are known, and the least is loss*.

Source: Zucchet et al. 2023, arXiv:2309.01775, section 5 and appendix D.2 (rate* for the uniform law); the rest is ours, docs/theory.md.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from graven.errors import SpecError
from graven.shapes import check

Law = Literal["uniform", "normal"]
MOST_STEPS = 4  # moments up to the 8th need the 4140 partitions of 8 places; five steps would need 115 975


class Steps(NamedTuple):
    """The best k gradient steps, the same for every prompt.

    Args:
        loss: Half of the mean squared error.
        coefficients: Of p, the constant first.
        rates: Of the steps: one over the roots of r, the largest first. All are positive, for r is an orthogonal polynomial of its own weight.
    """

    loss: float
    coefficients: Float[np.ndarray, "L"]
    rates: Float[np.ndarray, "L"]


def optimal_rate(*, examples: int, dimension: int, kurtosis: float, feature_variance: float = 1.0) -> float:
    """The best rate of one gradient step on half of the sum of squares.

    Raises:
        SpecError: A number is out of range.
    Source: Zucchet et al. 2023, arXiv:2309.01775, appendix D.2 for the uniform law; any kurtosis is ours.

    >>> round(optimal_rate(examples=12, dimension=3, kurtosis=9 / 5), 7)
    0.0675676
    """
    _check(examples, dimension, kurtosis, feature_variance, 1.0)
    return 1 / (feature_variance * (examples + dimension + kurtosis - 2))


def step_loss(rate: float, *, examples: int, dimension: int, kurtosis: float, weight_variance: float, feature_variance: float = 1.0) -> float:
    """Half of the mean squared error of one gradient step at any rate.

    Raises:
        SpecError: A number is out of range.
    Source: ours; against simulation in tests/test_regression_theory.py.

    >>> round(step_loss(0.0, examples=12, dimension=3, kurtosis=9 / 5, weight_variance=1 / 3), 7)
    0.5
    """
    _check(examples, dimension, kurtosis, feature_variance, weight_variance)
    step = rate * feature_variance * examples
    square = rate**2 * feature_variance**2 * examples * (examples + dimension + kurtosis - 2)
    return 0.5 * weight_variance * feature_variance * dimension * (1 - 2 * step + square)


def best_loss(*, examples: int, dimension: int, kurtosis: float, weight_variance: float, feature_variance: float = 1.0) -> float:
    """loss*: the least that one gradient step, and any one-layer gated RNN, can reach.

    Raises:
        SpecError: A number is out of range.
    Source: ours; the argument stands above.

    >>> [round(best_loss(examples=12, dimension=3, kurtosis=9 / 5, weight_variance=variance), 7) for variance in (1 / 3, 2 / 3)]
    [0.0945946, 0.1891892]
    """
    world = {"examples": examples, "dimension": dimension, "kurtosis": kurtosis, "feature_variance": feature_variance}
    return step_loss(optimal_rate(**world), **world, weight_variance=weight_variance)  # type: ignore[arg-type]  # integers stay integers


def best_steps(degree: int, *, examples: int, dimension: int, law: Law = "uniform", weight_variance: float, feature_variance: float = 1.0) -> Steps:
    """The best k gradient steps with a rate for each, k = `degree`; exact, from the moments E tr S^j.

    Any k steps with fixed rates are a polynomial preconditioner p, and the best p are steps.

    Args:
        degree: k, at most 4.
        law: Of the entries of x.
    Raises:
        SpecError: A number is out of range, or the law is unknown.
    Source: ours; against simulation in tests/test_regression_theory.py.

    >>> world = {"examples": 12, "dimension": 3, "weight_variance": 1 / 3}
    >>> [round(best_steps(degree, **world).loss, 4) for degree in (1, 2)]
    [0.0946, 0.0265]
    """
    if not 1 <= degree <= MOST_STEPS:
        raise SpecError(f"`degree` is {degree}; it must be from 1 to {MOST_STEPS}, for higher moments cost too much.")
    _check(examples, dimension, 3.0, feature_variance, weight_variance)
    if examples < 1:
        raise SpecError(f"`examples` is {examples}; it must be at least 1, for without examples no step moves.")
    scale = feature_variance * (examples + dimension)  # of the eigenvalues of S, to keep the moments near 1
    means = trace_moments(2 * degree, examples=examples, dimension=dimension, law=law)
    moments = np.array([moment * (feature_variance / scale) ** j for j, moment in enumerate(means)])
    hankel = moments[np.add.outer(np.arange(1, degree + 1), np.arange(1, degree + 1))]
    solution = np.linalg.solve(hankel, moments[1 : degree + 1])
    left = moments[0] - solution @ moments[1 : degree + 1]
    roots = np.roots(np.concatenate([[1.0], -solution])[::-1])
    rates = np.sort(1 / (scale * roots.real))[::-1]
    coefficients = solution / scale ** np.arange(1, degree + 1)
    return Steps(float(0.5 * weight_variance * feature_variance * left), coefficients, rates)


def trace_moments(highest: int, *, examples: int, dimension: int, law: Law) -> list[float]:
    """E tr S^j for j = 0 .. highest, exact, for entries of variance 1.

    tr S^j sums prod_i x_(t_i, a_i) x_(t_i, a_(i+1)) over examples t and coordinates a, round a circle of j places. The mean of such a product
    depends only on which t are equal and which a are: two partitions of the places.

    Raises:
        SpecError: The law is unknown.
    Source: ours; for the normal law against Wishart moments in tests/test_regression_theory.py.

    >>> trace_moments(2, examples=12, dimension=3, law="normal")
    [3.0, 36.0, 576.0]
    """
    if law not in ("uniform", "normal"):
        raise SpecError(f'`law` is {law!r}; it must be "uniform" or "normal".')
    powers = np.zeros(2 * highest + 1)
    powers[::2] = [3.0**k / (2 * k + 1) if law == "uniform" else math.prod(range(1, 2 * k, 2)) for k in range(highest + 1)]
    return [float(dimension)] + [_trace_moment(places, examples, dimension, powers) for places in range(1, highest + 1)]


def _trace_moment(places: int, examples: int, dimension: int, powers: np.ndarray) -> float:
    words = np.array([word for word in _partitions(places) if max(word) < dimension])
    ways = np.array([math.perm(dimension, max(word) + 1) for word in words.tolist()], dtype=np.float64)
    owners = np.arange(words.max() + 1)
    here = (words[:, :, None] == owners).astype(np.int64)  # word, place, coordinate
    exponents = here + np.roll(here, -1, axis=1)
    total = 0.0
    for partition, turns in _necklaces(places):
        if max(partition) < examples:
            blocks = (np.array(partition)[:, None] == np.arange(max(partition) + 1)).astype(np.int64)
            counts = np.einsum("wpc,pb->wbc", exponents, blocks)
            total += turns * math.perm(examples, max(partition) + 1) * float(ways @ powers[counts].prod((1, 2)))
    return total


def _partitions(places: int) -> Iterator[tuple[int, ...]]:
    """Every partition of a row of places: the number of each one's block, blocks numbered as they appear."""
    if places == 0:
        yield ()
        return
    for rest in _partitions(places - 1):
        for block in range(max(rest, default=-1) + 2):
            yield (*rest, block)


def _necklaces(places: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """One partition of each set that turning the circle makes equal, and how many it stands for."""
    for partition in _partitions(places):
        turned = {_renumbered(partition[i:] + partition[:i]) for i in range(places)}
        if partition == min(turned):
            yield partition, len(turned)


def _renumbered(blocks: tuple[int, ...]) -> tuple[int, ...]:
    names: dict[int, int] = {}
    return tuple(names.setdefault(block, len(names)) for block in blocks)


def predict_steps(
    features: Float[np.ndarray, "B N K"], labels: Float[np.ndarray, "B N E"], query: Float[np.ndarray, "B K"], *, coefficients: Float[np.ndarray, "L"]
) -> Float[np.ndarray, "B E"]:
    """What gradient steps from zero predict: Y^T X p(S) x.

    Raises:
        ShapeError: The parts do not fit each other.
    Source: ours; for one step against `graven.theory.descent.gradient_step`.
    """
    check(features=(features, "B N K"), labels=(labels, "B N E"), query=(query, "B K"), coefficients=(coefficients, "L"))
    direction = np.zeros_like(query)
    for coefficient in coefficients[::-1]:  # Horner's rule
        direction = coefficient * query + _apply(features, direction)
    return np.einsum("bne,bn->be", labels, np.einsum("bnk,bk->bn", features, direction))


def _apply(features: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """S times a vector."""
    applied: np.ndarray = np.einsum("bnk,bn->bk", features, np.einsum("bnk,bk->bn", features, direction))
    return applied


def ridge(
    features: Float[np.ndarray, "B N K"],
    labels: Float[np.ndarray, "B N E"],
    query: Float[np.ndarray, "B K"],
    *,
    weight_variance: float = 1.0,
    noise_variance: float = 0.0,
) -> Float[np.ndarray, "B E"]:
    """The Bayes predictor, no predictor has a lower mean squared error: Y^T X (S + noise / s^2 I)^-1 x; without noise the least-norm interpolant.

    It is this for normal W, and normal noise, whatever the law of x, for x is seen. Without noise, d examples in general position leave no error.

    Raises:
        ShapeError: The parts do not fit each other.
        SpecError: A variance is out of range.
    Source: the normal posterior, standard; against simulation in tests/test_regression_theory.py.
    """
    sizes = check(features=(features, "B N K"), labels=(labels, "B N E"), query=(query, "B K"))
    if not (0 < weight_variance < math.inf and 0 <= noise_variance < math.inf):
        raise SpecError(f"`weight_variance` is {weight_variance} and `noise_variance` {noise_variance}; give one above 0 and one of at least 0.")
    if noise_variance == 0:
        return np.einsum("bke,bk->be", np.linalg.pinv(features) @ labels, query)
    inner = features.swapaxes(1, 2) @ features + noise_variance / weight_variance * np.eye(sizes["K"])
    return np.einsum("bke,bk->be", np.linalg.solve(inner, features.swapaxes(1, 2) @ labels), query)


def _check(examples: int, dimension: int, kurtosis: float, feature_variance: float, weight_variance: float) -> None:
    for name, value, least in (("examples", examples, 0), ("dimension", dimension, 1), ("kurtosis", kurtosis, 1)):
        if not least <= value < math.inf:
            raise SpecError(f"`{name}` is {value}; it must be finite and at least {least}.")
    if examples + dimension + kurtosis == 2:
        raise SpecError("one dimension of kurtosis 1 without examples has no best rate; give examples.")
    for name, value in (("feature_variance", feature_variance), ("weight_variance", weight_variance)):
        if not 0 < value < math.inf:
            raise SpecError(f"`{name}` is {value}; it must be above 0 and finite.")
