"""The prompts look as equation 22 says, and have the moments that definitions 1 and 2 give them."""

import numpy as np
import pytest
import torch
from asserts import assert_refused

from graven.errors import ShapeError, SpecError
from graven.tasks.multitask import Multitask

TWO = Multitask(dimension=3, examples=(2, 1), query_correlations=(0.2, 0.8), features=4)


def test_a_prompt_is_laid_out_as_in_equation_22(generator):
    marks = TWO.marks(generator=generator)
    prompts = TWO.sample(5, generator=generator, marks=marks, dtype=torch.float64)
    assert prompts.tokens.shape == (5, TWO.length, TWO.width) == (5, 6, 8)
    assert prompts.places.tolist() == [0, 1, 3]
    for column, mark in enumerate((0, 0, 1, 0, 2, 0)):
        assert torch.equal(prompts.tokens[:, column, 4:], marks[mark].expand(5, -1))
    assert not prompts.tokens[:, [2, 4], :4].any()
    assert not prompts.tokens[:, -1, 3].any()
    assert torch.equal(prompts.query, prompts.tokens[:, -1, :3])
    assert torch.equal(prompts.labels, prompts.tokens[:, [0, 1, 3], 3])


def test_prompts_may_have_marks_of_their_own(generator):
    marks = torch.stack([TWO.marks(generator=generator) for _ in range(2)])
    both = TWO.sample(2, generator=torch.Generator().manual_seed(1), marks=marks).tokens
    for row in range(2):
        assert torch.equal(both[row], TWO.sample(2, generator=torch.Generator().manual_seed(1), marks=marks[row]).tokens[row])


def test_without_delimiters_and_features_tokens_are_examples_and_the_query(generator):
    task = Multitask(dimension=3, examples=(2, 1), query_correlations=(0.2, 0.8), delimiters=False)
    prompts = task.sample(5, generator=generator)
    assert prompts.tokens.shape == (5, 4, 4)
    assert torch.equal(prompts.features, prompts.tokens[:, :3, :3])


def test_a_task_of_one_that_is_the_querys_is_plain_regression(generator):
    """With as many examples as dimensions and no noise, they determine the answer."""
    prompts = Multitask(dimension=3, examples=(3,), query_correlations=(1.0,)).sample(20, generator=generator, dtype=torch.float64)
    beta = torch.linalg.solve(prompts.features, prompts.labels)
    assert torch.allclose((prompts.query * beta).sum(-1), prompts.target, rtol=1e-6)


def test_labels_have_the_moments_of_the_definitions(generator):
    """E[y_i x_i y x] is r_i Sigma^2 in one product and the covariance of x is Sigma; within 4 standard errors of 200 000 prompts."""
    covariance = ((2.0, 0.5), (0.5, 1.0))
    task = Multitask(
        dimension=2,
        examples=(1, 2),
        query_correlations=(0.3, -0.6),
        task_correlations=((1.0, 0.4), (0.4, 1.0)),
        covariance=covariance,
        noise_variance=0.5,
    )
    prompts = task.sample(200_000, generator=generator, dtype=torch.float64)
    correlations, with_query = task.example_correlations
    sigma = torch.tensor(covariance, dtype=torch.float64)
    assert_mean(prompts.query[:, :, None] * prompts.query[:, None], sigma)
    assert_mean(prompts.labels.square(), (0.5 + sigma.trace()).expand(3))
    votes = prompts.labels[..., None] * prompts.features
    answer = prompts.target[:, None] * prompts.query
    square = torch.trace(sigma @ sigma)
    assert_mean((votes * answer[:, None]).sum(-1), square * torch.from_numpy(with_query))
    pairs = torch.stack([(votes[:, 0] * votes[:, 1]).sum(-1), (votes[:, 1] * votes[:, 2]).sum(-1)], 1)
    assert_mean(pairs, square * torch.tensor([correlations[0, 1], correlations[1, 2]]))


def assert_mean(samples, expected):
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < 4 * error).all(), (samples.mean(0), expected, error)


def test_assert_mean_fails_where_the_mean_is_another(randn):
    with pytest.raises(AssertionError):
        assert_mean(randn(1000, 2), torch.tensor([0.0, 0.5]))


def test_correlations_of_examples_repeat_those_of_their_tasks():
    correlations, with_query = Multitask(dimension=1, examples=(2, 1), query_correlations=(0.2, 0.8)).example_correlations
    np.testing.assert_array_equal(correlations, [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(with_query, [0.2, 0.2, 0.8])


def test_the_same_seed_gives_the_same_prompts_in_either_dtype():
    narrow, wide = (
        TWO.sample(3, generator=torch.Generator().manual_seed(1), marks=torch.ones(3, 4), dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    assert torch.equal(narrow.tokens, wide.tokens.float())
    assert torch.equal(narrow.target, wide.target.float())


def test_tasks_without_examples_leave_their_delimiters(generator):
    prompts = Multitask(dimension=2, examples=(0, 0), query_correlations=(0.0, 1.0)).sample(2, generator=generator)
    assert prompts.tokens.shape == (2, 3, 3)
    assert prompts.places.numel() == 0


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("`dimension` is 0", {"dimension": 0}),
        ("`examples` is \\(2, -1\\)", {"examples": (2, -1)}),
        ("`query_correlations` has 1 entries and there are 2", {"query_correlations": (1.0,)}),
        ("`covariance` is not 3 rows of 3", {"covariance": ((1.0,),)}),
        ("bordered by `query_correlations` has the eigenvalue -0.2", {"query_correlations": (0.9, 0.9)}),
        ("diagonal entry other than 1", {"task_correlations": ((2.0, 0.0), (0.0, 1.0))}),
        ("`noise_variance` is -1", {"noise_variance": -1.0}),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(words, change):
    given = {"dimension": 3, "examples": (2, 1), "query_correlations": (0.2, 0.8)} | change
    assert_refused(SpecError, words, lambda: Multitask(**given))


@pytest.mark.plain
def test_marks_that_do_not_fit_are_refused(generator):
    assert_refused(SpecError, "`marks` is missing and `features` is 4", lambda: TWO.sample(1, generator=generator))
    assert_refused(ShapeError, "`marks` has shape .* axis 1 is 2", lambda: TWO.sample(1, generator=generator, marks=torch.ones(2, 4)))
