"""What the experiments of gated linear attention share: the quick layer is the library's, and its weights are those it was made for."""

import importlib
from pathlib import Path

import pytest
import torch

from graven.construct.wpgd import scalar_weighted_layer, vector_weighted_layer

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
WEIGHTS = {"scalar": [0.125, 0.5, 1.0], "value": [0.7, -0.2, 1.0]}


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("gla_training")


def prompts_of(training, learner, seed=0):
    task = learner.task(dimension=3, examples=(2, 1, 3), correlations=(0.2, 0.3, 0.6))
    return task, training.drawn_prompts(task, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gate", ["none", "scalar", "value"])
@pytest.mark.parametrize("marked", [True, False])
def test_restarts_side_by_side_are_the_layers_of_the_library(training, gate, marked, monkeypatch):
    learner = training.Learner(gate=gate, marked=marked, delimiters=marked)
    task, prompts = prompts_of(training, learner)
    runs = training.Runs(learner, task, 3, generator=torch.Generator().manual_seed(1))
    runs.check(prompts)
    monkeypatch.setattr(runs, "layer", lambda run, layer=runs.layer: layer(2 - run))
    with pytest.raises(AssertionError):
        runs.check(prompts)


@pytest.mark.parametrize("gate", ["scalar", "value"])
def test_weights_read_off_a_constructed_layer_are_those_it_was_made_for(training, gate):
    learner = training.Learner(gate=gate)
    task, prompts = prompts_of(training, learner)
    runs = training.Runs(learner, task, 1, generator=torch.Generator().manual_seed(1))
    wanted, marks = torch.tensor(WEIGHTS[gate]), runs.embedding[0, 4:, 4:]
    if gate == "scalar":
        layer, head = scalar_weighted_layer(wanted, marks=marks, key=torch.eye(3), query=torch.eye(3)), torch.eye(9)[3]
    else:
        layer, head = vector_weighted_layer(wanted, marks=marks, key=torch.eye(3), query=torch.eye(3))
    with torch.no_grad():
        for name, projection in layer.named_children():
            getattr(runs, name)[0] = projection.weight
        runs.head[0] = head
    found = runs.weights(0, prompts)
    torch.testing.assert_close(found, wanted.repeat_interleave(torch.tensor(task.examples)).expand_as(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [0, 4])
def test_a_stack_whose_layers_read_nothing_hands_its_tokens_on(training, hidden):
    learner = training.Learner(gate="scalar", layers=2, hidden=hidden)
    task, prompts = prompts_of(training, learner)
    deep = training.Deep(learner, task, 2, generator=torch.Generator().manual_seed(1))
    for weight in deep.stacks.parameters():
        weight.data.zero_()
    with torch.no_grad():
        expected = torch.stack([prompts.tokens[:, -1] @ own @ head for own, head in zip(deep.embedding, deep.head, strict=True)])
        torch.testing.assert_close(deep(prompts.tokens), expected)


def test_training_lowers_the_risk(training):
    learner = training.Learner(gate="none", delimiters=False)
    task = learner.task(dimension=2, examples=(6,), correlations=(1.0,))
    _, row = training.trained(learner, task, training.Effort(restarts=2, steps=150, rate=3e-2, batch=32, test=2000), seed=0)
    assert training.least_risk(learner, task) - 2 * row["error"] < row["risk"] < 0.8
