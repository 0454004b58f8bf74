"""DeltaNet: against its equations written out one token at a time, and its own traps."""

import pytest
import torch
from asserts import assert_near
from torch.nn import functional as F

from graven.layers.delta_net import LENGTH, DeltaNet, DeltaNetSpec

ROUNDING = 1e-12  # float64, nine tokens
SHAPE = {"width": 6, "heads": 2, "key_width": 3, "value_width": 5, "convolution": 3}


def written_out(layer, x):
    """One row, token by token and head by head, from the weights alone."""
    spec, weights = layer.spec, dict(layer.named_parameters())
    projected = F.pad(x @ weights["qkv.weight"].mT, (0, 0, spec.convolution - 1, 0))
    kernel = weights["convolution.weight"][:, 0]
    mixed = [F.silu((projected[t : t + spec.convolution].mT * kernel).sum(1)) for t in range(len(x))]
    states, reads = [torch.zeros(spec.key_width, spec.value_width, dtype=x.dtype) for _ in range(spec.heads)], []
    keys, values = spec.heads * spec.key_width, spec.heads * spec.value_width
    for x_t, qkv in zip(x, mixed, strict=True):
        q, k, v = (part.view(spec.heads, -1) for part in qkv.split([keys, keys, values]))
        heads = []
        for h in range(spec.heads):
            key, query = (part[h] / (part[h] @ part[h] + LENGTH).sqrt() for part in (k, q))
            if spec.gate:
                step = F.softplus(weights["gate.weight"][h] @ x_t + weights["gate.bias"][h])
                states[h] = states[h] * torch.exp(-weights["log_decay"][h].exp() * step)
            rate = torch.sigmoid(weights["rate.weight"][h] @ x_t)
            states[h] = states[h] + rate * torch.outer(key, v[h] - key @ states[h])
            o = query @ states[h] / spec.key_width**0.5
            heads.append(o / (o.square().mean() + spec.epsilon).sqrt() * weights["norm.weight"])
        o = torch.cat(heads)
        if spec.output_gate:
            o = o * F.silu(weights["output_gate.weight"] @ x_t)
        reads.append(weights["out.weight"] @ o)
    return torch.stack(reads), torch.stack(states)


@pytest.mark.parametrize("gated", [False, True])
def test_the_layer_is_its_equations(generator, randn, gated):
    layer = DeltaNet(DeltaNetSpec(**SHAPE, gate=gated, output_gate=gated), generator, torch.float64)
    x = randn(2, 9, 6)
    y, (_, matrix) = layer(x)
    for row in range(2):
        assert_near([y[row], matrix[row]], written_out(layer, x[row]), tolerance=ROUNDING)


def test_the_form_of_the_operation_changes_nothing(generator, randn):
    layer = DeltaNet(DeltaNetSpec(**SHAPE, gate=True), generator, torch.float64)
    loop = DeltaNet(DeltaNetSpec(**SHAPE, gate=True, form="recurrent"), dtype=torch.float64)
    loop.load_state_dict(layer.state_dict())
    x = randn(2, 40, 6)
    assert_near([layer(x)[0], *layer(x)[1]], [loop(x)[0], *loop(x)[1]], tolerance=ROUNDING)


def test_padding_writes_nothing_where_a_gate_would_let_the_state_decay(generator, randn):
    """A gate of a padded token, which sees zeros, is not open by itself."""
    layer = DeltaNet(DeltaNetSpec(**SHAPE, gate=True), generator, torch.float64)
    _, state = layer(randn(1, 5, 6))
    assert (layer.log_gate(torch.zeros(1, 1, 6, dtype=torch.float64)) < 0).all()
    _, (recent, matrix) = layer(randn(1, 4, 6), state, torch.zeros(1, 4, dtype=torch.bool))
    assert torch.equal(matrix, state[1])
    assert torch.equal(recent, state[0])


def test_rates_and_decays_start_where_the_papers_have_them():
    layer = DeltaNet(DeltaNetSpec(width=8, heads=64, key_width=2, value_width=2, gate=True), torch.Generator().manual_seed(0))
    steps, decays = F.softplus(layer.gate.bias.detach()), layer.log_decay.detach().exp()
    assert 1e-3 <= float(steps.min()) < 2e-3 < 5e-2 < float(steps.max()) <= 1e-1 + 1e-6
    assert 0 < float(decays.min()) < 2 < 14 < float(decays.max()) <= 16 + 1e-5
    assert (layer.norm.weight == 1).all()


def test_the_state_is_float32_where_the_layer_is_bfloat16(generator):
    layer = DeltaNet(DeltaNetSpec(**SHAPE), generator).bfloat16()
    y, state = layer(torch.ones(1, 3, 6, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {part.dtype for part in (*state, *layer.start(1))} == {torch.float32}
