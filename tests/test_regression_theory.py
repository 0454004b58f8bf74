"""Closed forms of in-context regression against simulation, against other formulas, and against the numbers of the paper."""

import itertools
import math

import numpy as np
import pytest
import torch
from asserts import assert_refused

from graven.errors import SpecError
from graven.tasks.regression import Regression
from graven.theory import regression as theory
from graven.theory.descent import gradient_step

PAPER = {"examples": 12, "dimension": 3}
KURTOSIS = {"uniform": 9 / 5, "normal": 3.0}


def prompts(task, size, generator):
    drawn = task.sample(size, generator=generator, dtype=torch.float64)
    return drawn.features.numpy(), drawn.labels.numpy(), drawn.query.numpy(), drawn.target.numpy()


def assert_mean(losses, wanted):
    error = losses.std() / len(losses) ** 0.5
    assert abs(losses.mean() - wanted) < 4 * error, (losses.mean(), wanted, error)


def test_the_rate_and_loss_of_the_paper_have_the_known_values():
    """arXiv:2309.01775, section 5 and appendix D.2 (there sampled: 0.0945 and 0.0947)."""
    assert theory.optimal_rate(**PAPER, kurtosis=9 / 5) == pytest.approx(1 / (12 + 3 - 1 / 5), rel=1e-15)
    assert theory.best_loss(**PAPER, kurtosis=9 / 5, weight_variance=1 / 3) == pytest.approx(0.0945946, abs=5e-8)
    assert theory.best_loss(**PAPER, kurtosis=9 / 5, weight_variance=2 / 3) == pytest.approx(0.1891892, abs=5e-8)


@pytest.mark.parametrize("law", KURTOSIS)
def test_the_loss_of_a_step_is_that_of_simulated_prompts(generator, law):
    """Any rate, within 4 standard errors of 40 000 prompts."""
    task = Regression(dimension=2, outputs=3, examples=5, law=law, weight_variance=0.4)
    features, labels, query, target = prompts(task, 40_000, generator)
    losses = (theory.predict_steps(features, labels, query, coefficients=np.array([0.1])) - target) ** 2 / 2
    assert_mean(losses.mean(-1), theory.step_loss(0.1, examples=5, dimension=2, kurtosis=KURTOSIS[law], weight_variance=0.4))


def test_scaling_the_features_scales_rate_and_loss():
    world = {**PAPER, "kurtosis": 2.5}
    assert theory.optimal_rate(**world, feature_variance=4.0) == pytest.approx(theory.optimal_rate(**world) / 4)
    wide, narrow = (theory.best_loss(**world, weight_variance=1.0, feature_variance=v) for v in (4.0, 1.0))
    assert wide == pytest.approx(4 * narrow)
    wide, narrow = (theory.best_steps(3, **PAPER, weight_variance=1.0, feature_variance=v) for v in (4.0, 1.0))
    assert wide.loss == pytest.approx(4 * narrow.loss)
    assert wide.rates == pytest.approx(narrow.rates / 4)


def test_no_other_rate_is_better():
    world = {**PAPER, "kurtosis": 9 / 5, "weight_variance": 1 / 3}
    losses = [theory.step_loss(rate, **world) for rate in np.linspace(0, 0.2, 2001)]
    assert min(losses) == pytest.approx(theory.best_loss(**world), abs=1e-6)
    assert min(losses) >= theory.best_loss(**world)


def test_one_step_is_that_of_gradient_descent(generator):
    features, labels, query, _ = prompts(Regression(), 3, generator)
    found = theory.predict_steps(features, labels, query, coefficients=np.array([0.07]))
    unit, all_kept = np.eye(3), np.ones((12, 3))
    for row, output in itertools.product(range(3), range(3)):
        beta = gradient_step(features[row], labels[row, :, output], key=unit, query=0.07 * unit, weights=all_kept)
        assert found[row, output] == pytest.approx(query[row] @ beta)


def test_moments_of_normal_entries_are_those_of_wishart_matrices():
    """E tr S = T d, E tr S^2 = T d (T + d + 1), E tr S^3 = T d (T^2 + d^2 + 3 T d + 3 T + 3 d + 4); one dimension: chi squared."""
    examples, dimension = 5, 4
    third = examples**2 + dimension**2 + 3 * examples * dimension + 3 * examples + 3 * dimension + 4
    wanted = [dimension, *(examples * dimension * x for x in (1, examples + dimension + 1, third))]
    assert theory.trace_moments(3, examples=examples, dimension=dimension, law="normal") == pytest.approx(wanted, rel=1e-14)
    chi = [math.prod(range(examples, examples + 2 * j, 2)) for j in range(7)]
    assert theory.trace_moments(6, examples=examples, dimension=1, law="normal") == pytest.approx(chi, rel=1e-14)


def test_moments_of_few_uniform_entries_are_sums_over_all_tuples():
    """Two examples of two coordinates, entry by entry: tr S^4 as 2^8 products of moments 3^k / (2k + 1)."""
    moment = [0.0 if k % 2 else 3 ** (k // 2) / (k + 1) for k in range(9)]
    total = 0.0
    for times, coordinates in itertools.product(itertools.product(range(2), repeat=4), repeat=2):
        exponents = np.zeros((2, 2), dtype=int)
        for i, t in enumerate(times):
            exponents[t, coordinates[i]] += 1
            exponents[t, coordinates[(i + 1) % 4]] += 1
        total += math.prod(moment[k] for k in exponents.ravel())
    assert theory.trace_moments(4, examples=2, dimension=2, law="uniform")[-1] == pytest.approx(total, rel=1e-14)


@pytest.mark.parametrize(("degree", "known"), [(1, 0.094595), (2, 0.026477), (3, 0.009249), (4, 0.003720)])
def test_the_best_steps_have_the_loss_of_simulated_prompts(generator, degree, known):
    """Known apart from this code to three digits, by fitting coefficients to sampled prompts: 0.0947, 0.0265, 0.0093, 0.0037."""
    best = theory.best_steps(degree, **PAPER, weight_variance=1 / 3)
    assert best.loss == pytest.approx(known, abs=5e-7)
    features, labels, query, target = prompts(Regression(), 20_000, generator)
    losses = ((theory.predict_steps(features, labels, query, coefficients=best.coefficients) - target) ** 2).mean(-1) / 2
    assert_mean(losses, best.loss)


def test_the_best_polynomial_is_steps_with_its_rates(generator):
    """k explicit steps from zero on the sum of squares give the same predictions, in whatever order."""
    features, labels, query, _ = prompts(Regression(), 4, generator)
    best = theory.best_steps(4, **PAPER, weight_variance=1 / 3)
    assert (best.rates > 0).all()
    weights = np.zeros((4, 3, 3))
    for rate in best.rates[[2, 0, 3, 1]]:
        weights += rate * np.einsum("bne,bnk->bek", labels - np.einsum("bek,bnk->bne", weights, features), features)
    found = theory.predict_steps(features, labels, query, coefficients=best.coefficients)
    assert found == pytest.approx(np.einsum("bek,bk->be", weights, query), rel=1e-9)


def test_ridge_is_the_best_of_all_penalties_and_exact_without_noise(generator):
    task = Regression(examples=4, weight_variance=0.5)
    features, labels, query, target = prompts(task, 20_000, generator)
    assert theory.ridge(features, labels, query) == pytest.approx(target, abs=1e-8)
    noise = 0.3 * torch.randn(labels.shape, generator=generator, dtype=torch.float64).numpy()
    losses = {}
    for assumed in (0.03, 0.09, 0.27):
        guess = theory.ridge(features, labels + noise, query, weight_variance=0.5, noise_variance=assumed)
        losses[assumed] = ((guess - target) ** 2).mean()
    assert min(losses, key=losses.get) == 0.09


def test_ridge_without_noise_interpolates_with_the_least_norm(generator):
    """Fewer examples than dimensions: the mean of the posterior, what examples do not show is 0."""
    features, labels, query, _ = prompts(Regression(dimension=4, examples=2), 3, generator)
    near = theory.ridge(features, labels, query, noise_variance=1e-9)
    assert theory.ridge(features, labels, query) == pytest.approx(near, abs=1e-6)


def test_averaging_any_layer_over_the_symmetries_leaves_one_gradient_step(generator):
    """The argument for loss*: any linear recurrence, quadratic gates; two dimensions, one output, two examples, all 1024 changes that there are."""
    numbers = np.random.default_rng(generator.initial_seed())
    hidden, gates = 5, 4
    w1, w2 = numbers.normal(size=(2, hidden, 4))
    recurrence, (out1, out2) = numbers.normal(size=(hidden, hidden)), numbers.normal(size=(2, gates, hidden))
    readout = numbers.normal(size=gates)

    def layer(x, y, query):
        h = np.zeros(hidden)
        for token in [*np.column_stack([x, y]), [*query, 0.0]]:
            full = np.append(token, 1.0)
            h = recurrence @ h + (w1 @ full) * (w2 @ full)
        return readout @ ((out1 @ h) * (out2 @ h))

    def averaged(x, y, query):
        signs, total = (1, -1), 0.0
        for first, second, last, label, one, two in itertools.product(signs, repeat=6):
            for order, places in itertools.product(([0, 1], [1, 0]), repeat=2):
                flipped, token = np.array([one, two]), np.array([first, second])
                features = (token[:, None] * x * flipped)[places][:, order]
                total += last * label * layer(features, (label * token * y)[places], (last * query * flipped)[order])
        return total / 256

    cases = [(numbers.normal(size=(2, 2)), numbers.normal(size=2), numbers.normal(size=2)) for _ in range(4)]
    ratios = [averaged(*case) / (case[1] @ case[0] @ case[2]) for case in cases]
    assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("`kurtosis` is 0.5", lambda: theory.optimal_rate(examples=1, dimension=1, kurtosis=0.5)),
        ("has no best rate", lambda: theory.optimal_rate(examples=0, dimension=1, kurtosis=1)),
        ("`weight_variance` is 0", lambda: theory.best_loss(**PAPER, kurtosis=3, weight_variance=0)),
        ("`degree` is 5", lambda: theory.best_steps(5, **PAPER, weight_variance=1)),
        ("`examples` is 0", lambda: theory.best_steps(1, examples=0, dimension=3, weight_variance=1)),
        ("`law` is 'cauchy'", lambda: theory.best_steps(1, **PAPER, law="cauchy", weight_variance=1)),
        ("`noise_variance` -1", lambda: theory.ridge(np.ones((1, 2, 1)), np.ones((1, 2, 1)), np.ones((1, 1)), noise_variance=-1)),
    ],
)
@pytest.mark.plain
def test_a_world_that_cannot_be_is_refused(words, call):
    assert_refused(SpecError, words, call)
