"""Prompts of in-context regression look as they should and have the moments that the closed forms assume."""

import math

import pytest
import torch
from asserts import assert_refused

from graven.errors import SpecError
from graven.tasks.regression import Regression


def test_a_prompt_is_examples_and_a_query_without_label(generator):
    prompts = Regression(dimension=3, outputs=2, examples=5).sample(4, generator=generator, dtype=torch.float64)
    assert prompts.tokens.shape == (4, 6, 5)
    assert not prompts.tokens[:, -1, 3:].any()
    weights = torch.linalg.lstsq(prompts.features, prompts.labels).solution.mT
    assert torch.allclose(weights @ prompts.features.mT, prompts.labels.mT)
    assert torch.allclose((weights @ prompts.query[..., None]).squeeze(-1), prompts.target)


@pytest.mark.parametrize(("law", "kurtosis"), [("uniform", 9 / 5), ("normal", 3.0)])
def test_entries_have_variance_1_and_the_kurtosis_of_their_law(generator, law, kurtosis):
    """Within 4 standard errors of 390 000 entries; the weights, by the labels: E y^2 = d s^2."""
    prompts = Regression(law=law, weight_variance=0.7).sample(10_000, generator=generator, dtype=torch.float64)
    x = torch.cat([prompts.features, prompts.query[:, None]], 1).flatten()
    for power, mean in ((1, 0.0), (2, 1.0), (3, 0.0), (4, kurtosis)):
        assert abs((x**power).mean() - mean) < 4 * (x**power).std() / len(x) ** 0.5
    squares = prompts.target.square().mean(-1)
    assert abs(squares.mean() - 3 * 0.7) < 4 * squares.std() / len(squares) ** 0.5


def test_doubling_scales_the_labels_only():
    task = Regression()
    plain, doubled = (each.sample(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for each in (task, task.doubled()))
    assert torch.equal(plain.features, doubled.features)
    assert torch.allclose(math.sqrt(2) * plain.labels, doubled.labels)
    assert torch.allclose(math.sqrt(2) * plain.target, doubled.target)


def test_a_prompt_may_have_no_examples(generator):
    assert Regression(examples=0).sample(2, generator=generator).tokens.shape == (2, 1, 6)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("`dimension` is 0", {"dimension": 0}),
        ("`examples` is -1", {"examples": -1}),
        ("`law` is 'cauchy'", {"law": "cauchy"}),
        ("`weight_variance` is nan", {"weight_variance": math.nan}),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(words, change):
    assert_refused(SpecError, words, lambda: Regression(**change))
