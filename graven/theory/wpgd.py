"""The best one-step learner: what weighted preconditioned gradient descent can reach, and what a scalar gate can reach of it.

Tasks beta_1 .. beta_N and the query's are jointly Gaussian, each N(0, I); R holds the correlations among the first N, r those with the
last. x_i ~ N(0, Sigma), y_i ~ N(x_i . beta_i, noise). The learner predicts x^T P sum_i w_i x_i y_i. With M = noise + tr Sigma,

    risk(P, w) = M - 2 tr(Sigma^2 P) w.r + M |w|^2 tr(Sigma P^T Sigma P) + (|w|^2 + w^T R w) tr(Sigma^2 P^T Sigma P)

Only the product of the scales of P and w matters. Everything below returns weights whose largest is 1 and puts the scale into P.

Source: Li et al. 2025, arXiv:2504.04308, section 4, with the errata of docs/theory.md.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq, isotonic_regression  # type: ignore[import-untyped]  # scipy ships no types

from graven.errors import Outcome, SpecError
from graven.shapes import check

Vector = np.ndarray
TOLERANCE = 1e-9  # of what must be symmetric, positive or in a range, relative to the largest entry
GRID = 1024  # points at which the range of gamma is searched for fixed points


class Optimum(NamedTuple):
    """The best learner of a kind, at the scale that minimises its risk.

    Args:
        preconditioner: P.
        weights: w, one an example, the largest 1.
        gamma: 1 + w^T R w / |w|^2.
        risk: Mean squared error on the query.
        unique: The sufficient condition of theorem 4 holds. Where it does not, there may still be only one; `outcome` says what was found.
        outcome: How the search ended.
    """

    preconditioner: Float[np.ndarray, "D D"]
    weights: Float[np.ndarray, "N"]
    gamma: float
    risk: float
    unique: bool
    outcome: Outcome


def risk(
    preconditioner: Float[np.ndarray, "D D"],
    weights: Float[np.ndarray, "N"],
    *,
    covariance: Float[np.ndarray, "D D"],
    task_correlation: Float[np.ndarray, "N N"],
    query_correlation: Float[np.ndarray, "N"],
    noise_variance: float,
) -> float:
    """Mean squared error of one given step on the query.

    Args:
        preconditioner: P; need not be symmetric.
        weights: w.
        covariance: Sigma, of x.
        task_correlation: R.
        query_correlation: r.
        noise_variance: Of every label, the query's included.
    Raises:
        ShapeError: The parts do not fit each other.
        SpecError: Sigma is not positive definite, or R and r are not correlations.
    Source: Li et al. 2025, arXiv:2504.04308, equation 39; against simulation in tests/test_wpgd_theory.py.

    >>> risk(np.eye(1), np.array([0.25]), covariance=np.eye(1), task_correlation=np.eye(1), query_correlation=np.ones(1), noise_variance=0.0)
    0.6875
    """
    check(preconditioner=(preconditioner, "D D"), covariance=(covariance, "D D"), weights=(weights, "N"), query_correlation=(query_correlation, "N"))
    _check_world(covariance, task_correlation, query_correlation, noise_variance)
    inner = covariance @ preconditioner.T @ covariance @ preconditioner
    total = noise_variance + np.trace(covariance)
    square = weights @ weights
    linear = np.trace(covariance @ covariance @ preconditioner) * (weights @ query_correlation)
    spread = total * square * np.trace(inner) + (square + weights @ task_correlation @ weights) * np.trace(covariance @ inner)
    return float(total - 2 * linear + spread)


def optimum(
    *,
    covariance: Float[np.ndarray, "D D"],
    task_correlation: Float[np.ndarray, "N N"],
    query_correlation: Float[np.ndarray, "N"],
    noise_variance: float,
) -> Optimum:
    """The best P and w of all.

        w = (h2(gamma) R + I)^-1 r,    P = scale * (gamma / M Sigma + I)^-1,    gamma = h1(h2(gamma)) + 1

    Every minimiser is such a fixed point. All of them are looked for on [1, 1 + lambda_max], where all must lie, and the best is taken.

    Args:
        covariance, task_correlation, query_correlation, noise_variance: As `risk`.
    Raises:
        ShapeError, SpecError: As `risk`; also where r is 0 or outside the range of R.
    Differs: the paper prints P with a factor Sigma^(-1/2) on either side, which is not stationary unless Sigma = I.
    Source: Li et al. 2025, arXiv:2504.04308, theorems 3 and 4, equations 15 to 17 and 44a.
    """
    _check_world(covariance, task_correlation, query_correlation, noise_variance)
    _check_query(query_correlation)
    s, total = np.linalg.eigvalsh(covariance), noise_variance + np.trace(covariance)
    lam, basis = np.linalg.eigh(task_correlation)
    present = lam > TOLERANCE * lam[-1]
    lam, basis = lam[present], basis[:, present]
    a = basis.T @ query_correlation

    def weights_at(gamma: float) -> Vector:
        best: Vector = basis @ (a / (1 + lam * _pull(gamma, s, total)))
        return best

    candidates = [weights_at(gamma) for gamma in _fixed_points(weights_at, task_correlation, lam[-1])]
    unique = bool((s[-1] - s[0]) * (lam[-1] - lam[0]) < total + s[0])
    return _best(candidates, unique, covariance=covariance, task_correlation=task_correlation,
                 query_correlation=query_correlation, noise_variance=noise_variance)  # fmt: skip


def linear_attention_risk(
    *,
    covariance: Float[np.ndarray, "D D"],
    task_correlation: Float[np.ndarray, "N N"],
    query_correlation: Float[np.ndarray, "N"],
    noise_variance: float,
) -> float:
    """The least risk with equal weights: the best P for a layer without gates.

    Args:
        covariance, task_correlation, query_correlation, noise_variance: As `risk`.
    Raises:
        ShapeError, SpecError: As `risk`.
    Source: Li et al. 2025, arXiv:2504.04308, equation 44a at w = 1; corollary 3 (equation 27) is Sigma = I.

    >>> world = dict(covariance=np.eye(10), task_correlation=np.eye(2), query_correlation=np.array([0.0, 1.0]), noise_variance=0.0)
    >>> round(linear_attention_risk(**world) / 10, 6)
    0.958333
    """
    _check_world(covariance, task_correlation, query_correlation, noise_variance)
    ones = np.ones(len(query_correlation))
    return _with_best_preconditioner(ones, covariance, task_correlation, query_correlation, noise_variance)[1]


def scalar_gate_optimum(
    *,
    examples: Sequence[int] | Int[np.ndarray, "C"],
    correlations: Sequence[float] | Float[np.ndarray, "C"],
    dimension: int,
    noise_variance: float,
    covariance: Float[np.ndarray, "D D"] | None = None,
) -> Optimum:
    """The best learner among weights that a scalar gate with delimiters can give: 0 <= w_1 <= ... <= w_K <= 1, constant in a task.

    For a given P the best weights are r_k / (n_k + c) made monotone, an isotonic regression with weights n_k (n_k + c), and clipped at 0,
    c = 1 / h2(gamma); for given weights the best P is known. At Sigma = I, c = dimension + noise + 1 whatever the weights, so it is closed.

    Args:
        examples: n_k, of each task in the order of the prompt.
        correlations: r_k, of each task with the query's; the tasks of the context are uncorrelated with each other.
        dimension: Of x.
        noise_variance: Of every label.
        covariance: Sigma, the identity where left out.
    Returns:
        One weight an example, and `unique` as for `optimum`.
    Raises:
        ShapeError, SpecError: As `optimum`; also where the numbers of tasks differ or a task has no example.
    Differs: the paper asks for 0 <= r_1 <= ... <= r_K in effect, but does not say 0. Where correlations are negative the best P may be, so
        both signs are tried.
    Source: ours, from equation 43 of Li et al. 2025, arXiv:2504.04308; against a constrained minimiser in tests/test_wpgd_theory.py.

    >>> best = scalar_gate_optimum(examples=[10, 10], correlations=[0.8, 0.2], dimension=10, noise_variance=0.0)
    >>> round(best.risk / 10, 6), best.weights[[0, -1]].tolist()
    (0.761905, [1.0, 1.0])
    """
    covariance = np.eye(dimension) if covariance is None else covariance
    counts, r = np.asarray(examples, dtype=np.float64), np.asarray(correlations, dtype=np.float64)
    check(covariance=(covariance, f"{dimension} {dimension}"), examples=(counts, "K"), correlations=(r, "K"))
    if not (counts >= 1).all():
        raise SpecError(f"`examples` is {list(examples)}; every task needs at least one example: leave the others out, with their correlations.")
    owner = np.repeat(np.arange(len(r)), counts.astype(int))
    task_correlation, query_correlation = (owner[:, None] == owner).astype(np.float64), r[owner]
    _check_world(covariance, task_correlation, query_correlation, noise_variance)
    _check_query(query_correlation)
    s, total = np.linalg.eigvalsh(covariance), noise_variance + np.trace(covariance)
    candidates = []
    for sign in (1, -1):

        def weights_at(gamma: float, sign: int = sign) -> Vector:
            c = 1 / _pull(gamma, s, total)
            best: Vector = np.maximum(isotonic_regression(sign * r / (counts + c), weights=counts * (counts + c)).x, 0.0)[owner]
            return best

        if weights_at(1.0).any():  # all weights are 0 at one gamma only if they are at every gamma
            candidates += [weights_at(gamma) for gamma in _fixed_points(weights_at, task_correlation, counts.max())]
    unique = bool((s[-1] - s[0]) * (counts.max() - counts.min()) < total + s[0])
    return _best(candidates, unique, covariance=covariance, task_correlation=task_correlation,
                 query_correlation=query_correlation, noise_variance=noise_variance)  # fmt: skip


def is_scalar_realisable(weights: Float[np.ndarray, "N"]) -> bool:
    """Whether some scalar gates in [0, 1] give every example exactly this weight. A common factor can always go into P.

    Weights are products of the gates that follow, so they cannot fall; up to 1e-12, for weights that were computed.

    Source: Li et al. 2025, arXiv:2504.04308, theorem 5, step 1 of its proof.

    >>> is_scalar_realisable(np.array([0.0, 0.2, 0.2, 1.0])), is_scalar_realisable(np.array([0.8, 0.2]))
    (True, False)
    """
    check(weights=(weights, "N"))
    ordered = np.concatenate([[0.0], weights, [1.0]])
    return bool((np.diff(ordered) >= -1e-12).all())


def _pull(gamma: float, s: Vector, total: float) -> float:
    """h2: how strongly correlations pull on the best weights."""
    p = s**2 / (total + s * gamma) ** 2
    return float(1 / (1 + total * p.sum() / (p * s).sum()))


def _gamma(weights: Vector, task_correlation: Vector) -> float:
    return float(1 + weights @ task_correlation @ weights / (weights @ weights))


def _fixed_points(weights_at: Callable[[float], Vector], task_correlation: Vector, highest: float) -> list[float]:
    """Every gamma whose best weights have that gamma. The first point of the range lies at or below its image, the last above."""
    grid = np.linspace(1.0, 1.0 + 1.001 * highest, GRID)

    def excess(gamma: float) -> float:
        return _gamma(weights_at(gamma), task_correlation) - gamma

    values = np.array([excess(gamma) for gamma in grid])
    falls = np.flatnonzero((values[:-1] >= 0) != (values[1:] >= 0))
    return [float(brentq(excess, grid[i], grid[i + 1], xtol=1e-14, rtol=1e-14)) for i in falls]


def _with_best_preconditioner(
    weights: Vector, covariance: Vector, task_correlation: Vector, query_correlation: Vector, noise_variance: float
) -> tuple[Vector, float]:
    """P for given weights, scale included, and the risk; equation 44a with the factors Sigma^(-1/2) multiplied out."""
    total, square = noise_variance + np.trace(covariance), weights @ weights
    gamma = _gamma(weights, task_correlation)
    shape = np.linalg.inv(gamma / total * covariance + np.eye(len(covariance)))
    scale = (weights @ query_correlation) / (total * square)
    return scale * shape, float(total - scale * (weights @ query_correlation) * np.trace(covariance @ covariance @ shape))


def _best(
    candidates: list[Vector], unique: bool, *, covariance: Vector, task_correlation: Vector, query_correlation: Vector, noise_variance: float
) -> Optimum:
    """The candidate of lowest risk."""

    def learner(weights: Vector) -> Optimum:
        weights = weights / weights[np.abs(weights).argmax()]
        preconditioner, least = _with_best_preconditioner(weights, covariance, task_correlation, query_correlation, noise_variance)
        outcome = Outcome.SOLVED if len(candidates) == 1 else Outcome.SEVERAL
        return Optimum(preconditioner, weights, _gamma(weights, task_correlation), least, unique, outcome)

    return min(map(learner, candidates), key=lambda found: found.risk)


def _check_world(covariance: Vector, task_correlation: Vector, query_correlation: Vector, noise_variance: float) -> None:
    """One sentence about the first of the model's conditions that does not hold."""
    check(covariance=(covariance, "D D"), task_correlation=(task_correlation, "N N"), query_correlation=(query_correlation, "N"))
    if not noise_variance >= 0 or not np.isfinite(noise_variance):
        raise SpecError(f"`noise_variance` is {noise_variance}; it must be a number of at least 0.")
    for name, matrix in (("covariance", covariance), ("task_correlation", task_correlation), ("query_correlation", query_correlation[:, None])):
        if not np.isfinite(matrix).all():
            raise SpecError(f"`{name}` has an entry that is not finite; give numbers.")
        if matrix.shape[0] == matrix.shape[1] and np.abs(matrix - matrix.T).max(initial=0.0) > TOLERANCE * np.abs(matrix).max(initial=0.0):
            raise SpecError(f"`{name}` is off its transpose by {np.abs(matrix - matrix.T).max():.3g}; it must be symmetric: pass (A + A.T) / 2.")
    least = np.linalg.eigvalsh(covariance).min(initial=np.inf)
    if least <= TOLERANCE * np.abs(covariance).max():
        raise SpecError(f"`covariance` has the eigenvalue {least:.3g}; it must be positive definite: leave directions without variance out.")
    if np.abs(np.diag(task_correlation) - 1).max(initial=0.0) > TOLERANCE:
        raise SpecError(f"`task_correlation` has the diagonal {np.diag(task_correlation)}; a task correlates with itself by 1: divide by variances.")
    outside = query_correlation - task_correlation @ (np.linalg.pinv(task_correlation, rcond=TOLERANCE, hermitian=True) @ query_correlation)
    if np.abs(outside).max(initial=0.0) > np.sqrt(TOLERANCE):
        raise SpecError(
            f"`query_correlation` lies {np.abs(outside).max():.3g} outside the range of `task_correlation`; "
            "examples of one and the same task must have one and the same correlation with the query."
        )
    joint = np.block([[task_correlation, query_correlation[:, None]], [query_correlation[None], np.ones((1, 1))]])
    least = np.linalg.eigvalsh(joint).min(initial=np.inf)
    if least < -TOLERANCE * len(joint):
        raise SpecError(
            f"`task_correlation` bordered by `query_correlation` has the eigenvalue {least:.3g}; "
            "no tasks have such correlations, for they must be positive semidefinite: lower the correlations with the query."
        )


def _check_query(query_correlation: Vector) -> None:
    """Assumption A of the paper, whose other half, that r is in the range of R, holds for all correlations that there can be."""
    if not np.abs(query_correlation).max(initial=0.0) > 0:
        raise SpecError("`query_correlation` is 0; the context then says nothing of the query and every learner does best by predicting 0.")
