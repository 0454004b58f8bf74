"""The gated RNN against its equations, neuron by neuron, and what training needs of it."""

import pytest
import torch
from asserts import assert_near

from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec

SPEC = {"width": 3, "hidden": 5, "out_width": 2}
GATINGS = {"input_output": {"output_gates": 4}, "side": {}}
ROUNDING = 1e-13  # float64 sums of a dozen terms


@pytest.mark.parametrize("recurrence", ["diagonal", "dense"])
@pytest.mark.parametrize("gating", GATINGS)
def test_a_layer_is_its_equations_neuron_by_neuron(randn, generator, gating, recurrence):
    spec = GatedRNNSpec(**SPEC, gating=gating, recurrence=recurrence, **GATINGS[gating])
    layer, x = GatedRNN(spec, generator, torch.float64), randn(2, 6, 3)
    w = {name: p.detach() for name, p in layer.named_parameters()}
    decay = torch.diag(w["decay"]) if recurrence == "diagonal" else w["recurrence"]
    found, end = layer(x)
    for row in range(2):
        h = torch.zeros(5).double()
        for t in range(6):
            token = torch.cat([x[row, t], torch.ones(1)])
            h = decay @ h + (w["w_in1"] @ token) * (w["w_in2"] @ token)
            gated = (w["w_side"] @ token) * h if gating == "side" else (w["w_out1"] @ h) * (w["w_out2"] @ h)
            assert_near([found[row, t]], [w["readout"] @ gated], tolerance=ROUNDING)
        assert_near([end[row]], [h], tolerance=ROUNDING)


@pytest.mark.parametrize("recurrence", ["diagonal", "dense"])
@pytest.mark.parametrize("gating", GATINGS)
def test_the_states_of_a_layer_are_what_it_reads_from(randn, generator, gating, recurrence):
    layer = GatedRNN(GatedRNNSpec(**SPEC, gating=gating, recurrence=recurrence, **GATINGS[gating]), generator, torch.float64)
    x, start = randn(2, 6, 3), randn(2, 5)
    h = layer.hidden(x, start)
    y, end = layer(x, start)
    assert_near([layer.read(h, x), h[:, -1]], [y, end], tolerance=ROUNDING)


@pytest.mark.parametrize("recurrence", ["diagonal", "dense"])
@pytest.mark.parametrize("gating", GATINGS)
def test_a_spec_knows_how_many_numbers_its_layer_learns(gating, recurrence):
    spec = GatedRNNSpec(**SPEC, gating=gating, recurrence=recurrence, **GATINGS[gating])
    assert spec.parameters == sum(p.numel() for p in GatedRNN(spec).parameters())


def test_a_start_has_weights_of_the_recipe_and_decays_between_0_and_1(generator):
    layer = GatedRNN(GatedRNNSpec(width=24, hidden=400, output_gates=300), generator)
    for weight in (layer.w_in1, layer.w_in2, layer.w_out1, layer.w_out2, layer.readout):
        spread = 0.4 * weight.shape[1] ** -0.5
        assert abs(weight.std().item() / spread - 1) < 5 * (2 * weight.numel()) ** -0.5  # five standard errors
    assert layer.decay.min() >= 0
    assert layer.decay.max() <= 1
    assert layer.decay.mean().item() == pytest.approx(0.5, abs=5 * (12 * 400) ** -0.5)
    dense = GatedRNN(GatedRNNSpec(width=2, hidden=30, output_gates=1, recurrence="dense"), generator, torch.float64)
    values = torch.linalg.eigvalsh(dense.recurrence)
    assert values.min() > -1e-12
    assert values.max() < 1 + 1e-12


def test_decays_are_put_back_to_exactly_0_and_1(generator):
    layer = GatedRNN(GatedRNNSpec(width=2, hidden=4, output_gates=1), generator)
    layer.decay.data = torch.tensor([-0.5, 0.25, 1.0, 1.5])
    layer.project_()
    assert layer.decay.tolist() == [0.0, 0.25, 1.0, 1.0]


def test_a_dense_recurrence_is_put_back_to_the_nearest_that_does_not_grow(generator, randn):
    layer = GatedRNN(GatedRNNSpec(width=2, hidden=4, output_gates=1, recurrence="dense"), generator, torch.float64)
    layer.recurrence.data = given = randn(4, 4)
    layer.project_()
    projected = layer.recurrence.detach().clone()
    assert torch.linalg.matrix_norm(projected, 2) <= 1 + ROUNDING
    for _ in range(20):  # none of these lies nearer
        other = randn(4, 4)
        other = other / torch.linalg.matrix_norm(other, 2).clamp_min(1.0)
        assert (given - projected).norm() <= (given - (projected + 0.1 * (other - projected))).norm()
    layer.project_()
    assert_near([layer.recurrence], [projected], tolerance=ROUNDING)
