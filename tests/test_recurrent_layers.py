"""Linear attention, LRU, LSTM, GRU and Mamba, each against its equations or against the library that has them."""

import math

import pytest
import torch
from asserts import assert_near, assert_refused
from torch import nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from graven.construct.attention import attention_to_mamba
from graven.errors import SpecError
from graven.layers.classic import Classic, ClassicSpec
from graven.layers.gated_linear import GatedLinear, GatedLinearSpec
from graven.layers.linear_attention import LinearAttention, LinearAttentionSpec
from graven.layers.lru import GLU, LRU, LRUSpec, mlp
from graven.layers.mamba import Mamba, MambaSpec, read_mamba

ROUNDING = 1e-13  # float64 sums of a dozen terms
WIDTH, OUT = 3, 2


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_linear_attention_is_the_gated_linear_layer_with_no_gate(randn, generator):
    layer = LinearAttention(LinearAttentionSpec(width=WIDTH, key_width=4, value_width=2, heads=2), generator, torch.float64)
    other, x = GatedLinear(GatedLinearSpec(width=WIDTH, key_width=4, value_width=2, heads=2, gate="none")).double(), randn(2, 6, WIDTH)
    for projection, weight in ((other.v, layer.w_v), (other.k, layer.w_k), (other.q, layer.w_q)):
        projection.weight.data = weight.detach().flatten(0, 1)
    assert_near(layer(x), other.run(x), tolerance=ROUNDING)


@pytest.mark.parametrize("scale", ["clipped", "none"])
@pytest.mark.parametrize("gating", ["out", "in_out"])
def test_an_lru_is_its_equations_in_complex_numbers(randn, generator, gating, scale):
    layer = LRU(LRUSpec(width=WIDTH, hidden=4, inner=5, out_width=OUT, gating=gating, scale=scale), generator, torch.float64)
    x = randn(1, 6, WIDTH)
    b, c = torch.view_as_complex(layer.b), torch.view_as_complex(layer.c)
    decay = torch.exp(torch.complex(-layer.log_rate.exp(), layer.log_phase.exp()))
    factor = torch.ones(4) if scale == "none" else (1 - decay.abs().square()).clamp_min(1e-4).sqrt()
    h, found = torch.zeros(4).to(b), layer(x)[0]
    for t in range(6):
        e = layer.embed(x[0, t])
        h = decay * h + factor * (b @ e.to(b))
        z = (c @ h).real + layer.skip * e
        y = layer.unit.value(z) * torch.sigmoid(layer.unit.gate(z))
        assert_near([found[0, t]], [layer.readout.weight @ y], tolerance=ROUNDING)


def test_an_lru_that_never_forgets_has_gradients(generator, randn):
    """The unclipped scale has an infinite derivative there."""
    layer = LRU(LRUSpec(width=WIDTH, hidden=4, inner=5), generator, torch.float64)
    layer.log_rate.data[:2] = torch.tensor([-40.0, -math.inf])
    layer(randn(1, 6, WIDTH))[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_an_lru_starts_uniform_on_the_disc_and_within_its_phase(generator):
    decay = LRU(LRUSpec(width=1, hidden=2000, inner=1, phase=0.5), generator).decay
    assert decay.abs().square().mean().item() == pytest.approx(0.5, abs=5 * (12 * 2000) ** -0.5)  # five standard errors
    assert 0 <= decay.angle().min() < decay.angle().max() <= 0.5


@pytest.mark.parametrize(("width", "out"), [(6, 6), (1, 1), (60, 60), (6, 40), (40, 6)])
def test_an_mlp_has_the_parameters_of_a_glu_to_within_one_hidden_neuron(width, out):
    assert abs(parameters(mlp(width, out)) - parameters(GLU(width, out))) <= (0 if width == out else (width + out + 1) / 2)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_classic_layer_is_that_of_torch_with_a_readout(randn, generator, cell):
    layer, x = Classic(ClassicSpec(width=WIDTH, hidden=4, cell=cell, out_width=OUT), generator, torch.float64), randn(2, 6, WIDTH)
    theirs = (nn.LSTM if cell == "lstm" else nn.GRU)(WIDTH, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(layer.cells.state_dict())
    h, end = theirs(x)
    y, state = layer(x)
    assert_near([y, state.transpose(0, 1)], [h @ layer.readout.weight.mT, end if cell == "gru" else torch.cat(end)], tolerance=ROUNDING)


def mixer(generator, **changes):
    """A mixer of Hugging Face's Mamba whose weights are all drawn anew."""
    config = MambaConfig(hidden_size=6, state_size=4, intermediate_size=10, time_step_rank=3, num_hidden_layers=1, **changes)
    theirs = MambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return theirs


@pytest.mark.parametrize("changes", [{}, {"use_bias": True}, {"use_conv_bias": False, "conv_kernel": 2}])
def test_a_mamba_block_reads_the_weights_of_hugging_face(generator, changes):
    theirs, x = mixer(generator, **changes), torch.randn(2, 9, 6, generator=generator)
    layer = read_mamba(theirs.state_dict())
    with torch.no_grad():
        assert_near([layer(x)[0]], [theirs(x)], tolerance=1e-5)  # float32, theirs


def test_attention_runs_as_mamba_in_hugging_face(generator):
    """Weights that were built here and loaded there, in a block as released models have it."""
    weights, x = [torch.randn(4, 4, generator=generator) / 2 for _ in range(3)], torch.randn(2, 16, 4, generator=generator)
    layer = attention_to_mamba(*weights)
    spec = layer.spec
    config = MambaConfig(hidden_size=4, state_size=spec.memory, intermediate_size=spec.inner, time_step_rank=spec.step_rank, num_hidden_layers=1)
    theirs = MambaMixer(config, layer_idx=0).eval()
    theirs.load_state_dict(layer.state_dict())
    v, k, q = (x @ weight.mT for weight in weights)
    with torch.no_grad():
        assert_near([theirs(x)], [(q @ k.mT).tril() @ v], tolerance=1e-5)  # float32


def test_a_mamba_block_starts_with_the_steps_and_decays_of_the_paper(generator):
    layer = Mamba(MambaSpec(width=4, inner=500, memory=3, step_rank=2), generator)
    steps = nn.functional.softplus(layer.dt_proj.bias)
    assert 0.99e-3 < steps.min() < steps.max() < 1.01e-1
    assert steps.log().mean().item() == pytest.approx(math.log(1e-2), abs=5 * math.log(100) * (12 * 500) ** -0.5)  # five standard errors
    assert_near([layer.A_log.exp()], [torch.tensor([1.0, 2.0, 3.0]).expand(500, -1)], tolerance=1e-6)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("lacks `in_proj.weight`; .*state_dict", lambda w: {f"mixer.{name}": tensor for name, tensor in w.items()}),
        ("lacks `A_log`", lambda w: {name: tensor for name, tensor in w.items() if name != "A_log"}),
        (r"`in_proj.weight` is \(19, 6\) and \(20, 6\)", lambda w: w | {"in_proj.weight": torch.zeros(19, 6)}),
        (r"`x_proj.weight` is \(12, 10\) and \(11, 10\)", lambda w: w | {"x_proj.weight": torch.zeros(12, 10)}),
        (r"`norm.weight` is \(6,\) and nothing", lambda w: w | {"norm.weight": torch.zeros(6)}),
        ("not of one Mamba mixer: `conv1d` has shape .* axis 0 is 9", lambda w: w | {"conv1d.weight": torch.zeros(9, 1, 4)}),
    ],
)
def test_weights_that_are_no_mamba_mixer_are_refused_in_one_sentence(generator, words, change):
    weights = change(mixer(generator).state_dict())
    assert_refused(SpecError, words, lambda: read_mamba(weights))
