"""The recipe is what it says, step by step, and its ends are told apart."""

import math

import pytest
import torch
from asserts import assert_near, assert_refused
from torch import nn
from torch.nn import functional as F

from graven.errors import Outcome, SpecError
from graven.fit import FitSpec, fit
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.tasks.teacher import Teacher


def small(seed: int = 1) -> GatedRNN:
    return GatedRNN(GatedRNNSpec(width=2, hidden=5, output_gates=4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batches(generator, count=4):
    teacher = Teacher.random(dimension=2, generator=generator, length=6)
    return [teacher.sample(3, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_training_is_adam_along_a_cosine_with_the_penalty_in_the_loss(generator):
    """Against the recipe written out; 1e-10 is what the order of sums may change."""
    drawn, layer, wanted = batches(generator), small(), small()
    fit(layer, iter(drawn).__next__, FitSpec(steps=len(drawn), rate=1e-2, last_rate=1e-3, penalty=0.1))
    optimiser = torch.optim.Adam(wanted.parameters())
    for step, (x, y) in enumerate(drawn):
        optimiser.param_groups[0]["lr"] = 1e-3 + 9e-3 * (1 + math.cos(math.pi * step / (len(drawn) - 1))) / 2
        optimiser.zero_grad()
        penalty = sum(parameter.square().sum() for name, parameter in wanted.named_parameters() if name != "decay")
        (F.mse_loss(wanted(x)[0], y) + 0.1 * penalty).backward()
        optimiser.step()
        wanted.project_()
    assert_near(layer.parameters(), wanted.parameters(), tolerance=1e-10)


def test_decays_stay_in_range_and_reach_its_ends(generator):
    drawn, layer = batches(generator, 60), small()
    fit(layer, iter(drawn).__next__, FitSpec(steps=60, rate=0.3))
    assert layer.decay.min() == 0 or layer.decay.max() == 1
    assert ((layer.decay >= 0) & (layer.decay <= 1)).all()


def test_a_projection_can_be_given(generator):
    drawn, layer = batches(generator), small()
    fit(layer, iter(drawn).__next__, FitSpec(steps=4), project=lambda: layer.decay.data.fill_(0.25))
    assert (layer.decay == 0.25).all()


def test_any_module_can_be_read_in_any_way(generator):
    """A linear map of the last token is found; its noiseless error falls with the rate, to 1e-6 of the power here."""
    goal = torch.randn(2, 3, generator=generator)
    layer = nn.Linear(3, 2, bias=False)

    def batch():
        x = torch.randn(8, 4, 3, generator=generator)
        return x, x[:, -1] @ goal.T

    fitted = fit(layer, batch, FitSpec(steps=400, rate=0.1, penalty=0.0), read=lambda x: layer(x[:, -1]), objective=F.l1_loss)
    assert fitted.outcome is Outcome.DONE
    assert fitted.steps == 400
    assert fitted.loss < 1e-3
    assert_near([layer.weight], [goal], tolerance=1e-3)


def test_a_loss_that_is_not_finite_ends_the_training(generator):
    drawn, layer = batches(generator), small()
    drawn[2] = (drawn[2][0] * float("inf"), drawn[2][1])
    fitted = fit(layer, iter(drawn).__next__, FitSpec(steps=4))
    assert fitted.outcome is Outcome.DIVERGED
    assert fitted.steps == 2
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"steps": 0}, "`steps` is 0"), ({"rate": 1e-7}, "`rate` is 1e-07"), ({"penalty": -1.0}, "`penalty` is -1"), ({"rate": math.inf}, "finite")],
)
def test_a_recipe_that_cannot_be_is_refused(change, words):
    assert_refused(SpecError, words, lambda: FitSpec(**({"steps": 1} | change)))
