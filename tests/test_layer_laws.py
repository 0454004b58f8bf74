"""Laws of the recurrent layers. A new layer is one more row of `LAYERS`."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from asserts import assert_near, assert_refused
from torch import nn

from graven.errors import ShapeError, SpecError
from graven.layers.base import Chain
from graven.layers.classic import Classic, ClassicSpec
from graven.layers.delta_net import DeltaNet, DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttention, GatedLinearAttentionSpec
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.layers.linear_attention import LinearAttention, LinearAttentionSpec
from graven.layers.lru import LRU, LRUSpec
from graven.layers.mamba import Mamba, MambaSpec
from graven.layers.mamba2 import Mamba2, Mamba2Spec

WIDTH, OUT = 3, 4
ROUNDING = 1e-12  # float64, a dozen tokens through one or two layers, and their derivatives
DRAWN = {"dtype": torch.float64}
LRU_SHAPE = {"width": WIDTH, "hidden": 5, "inner": 6, "out_width": OUT}
DELTA_SHAPE = {"width": WIDTH, "heads": 2, "key_width": 2, "value_width": 3}
GLA_SHAPE = {"width": WIDTH, "heads": 4, "key_value_heads": 2, "key_width": 2, "value_width": 3}
MAMBA_SHAPE = {"width": WIDTH, "inner": 5, "memory": 3, "step_rank": 2, "out_width": OUT}


def widened(layer, generator):
    """A layer as wide as its tokens, below one that reads as wide as the others."""
    return Chain([layer, LinearAttention(LinearAttentionSpec(width=WIDTH, key_width=5, value_width=2, heads=2), generator, **DRAWN)])


LAYERS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "linear attention": lambda g: LinearAttention(LinearAttentionSpec(width=WIDTH, key_width=5, value_width=2, heads=2), g, **DRAWN),
    "gated": lambda g: GatedRNN(GatedRNNSpec(width=WIDTH, hidden=7, output_gates=5, out_width=OUT), g, **DRAWN),
    "gated, side": lambda g: GatedRNN(GatedRNNSpec(width=WIDTH, hidden=7, out_width=OUT, gating="side"), g, **DRAWN),
    "gated, dense": lambda g: GatedRNN(GatedRNNSpec(width=WIDTH, hidden=7, output_gates=5, out_width=OUT, recurrence="dense"), g, **DRAWN),
    "LRU": lambda g: LRU(LRUSpec(**LRU_SHAPE), g, **DRAWN),
    "LRU In+Out": lambda g: LRU(LRUSpec(**LRU_SHAPE, gating="in_out"), g, **DRAWN),
    "LRU, MLP": lambda g: LRU(LRUSpec(**LRU_SHAPE, unit="mlp", scale="none"), g, **DRAWN),
    "LRU In+Out, MLP": lambda g: LRU(LRUSpec(**LRU_SHAPE, gating="in_out", unit="mlp"), g, **DRAWN),
    "two LRUs": lambda g: Chain([LRU(LRUSpec(**LRU_SHAPE | {"out_width": WIDTH}), g, **DRAWN), LRU(LRUSpec(**LRU_SHAPE), g, **DRAWN)]),
    "LSTM": lambda g: Classic(ClassicSpec(width=WIDTH, hidden=5, cell="lstm", out_width=OUT), g, **DRAWN),
    "GRU": lambda g: Classic(ClassicSpec(width=WIDTH, hidden=5, cell="gru", out_width=OUT), g, **DRAWN),
    "Mamba": lambda g: Mamba(MambaSpec(**MAMBA_SHAPE), g, **DRAWN),
    "Mamba without convolution": lambda g: Mamba(MambaSpec(**MAMBA_SHAPE, convolution=1, convolution_bias=False, bias=True), g, **DRAWN),
    "Mamba-2": lambda g: widened(Mamba2(Mamba2Spec(width=WIDTH, inner=8, heads=4, groups=2, memory=3), g, **DRAWN), g),
    "DeltaNet": lambda g: widened(DeltaNet(DeltaNetSpec(**DELTA_SHAPE), g, **DRAWN), g),
    "Gated DeltaNet": lambda g: widened(DeltaNet(DeltaNetSpec(**DELTA_SHAPE, gate=True, output_gate=True, convolution=1), g, **DRAWN), g),
    "gated linear attention": lambda g: widened(GatedLinearAttention(GatedLinearAttentionSpec(**GLA_SHAPE), g, **DRAWN), g),
    "gated linear attention, convolutions": lambda g: widened(
        GatedLinearAttention(GatedLinearAttentionSpec(**GLA_SHAPE, convolution=3, convolution_bias=True, gate="scalar"), g, **DRAWN), g
    ),
}
CHAINS = {"two LRUs", "Mamba-2", "DeltaNet", "Gated DeltaNet", "gated linear attention", "gated linear attention, convolutions"}


@pytest.fixture(params=LAYERS)
def layer(request, generator):
    return LAYERS[request.param](generator)


def flat(state):
    """Every tensor of a state."""
    return [state] if isinstance(state, torch.Tensor) else [tensor for part in state for tensor in flat(part)]


def real(state):
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in flat(state)]


def assert_same(found, wanted):
    assert_near([found[0], *real(found[1])], [wanted[0], *real(wanted[1])], tolerance=ROUNDING)


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_to_split_anywhere_and_carry_the_state_changes_nothing(layer, randn, place):
    x = randn(2, 9, WIDTH)
    first, state = layer(x[:, :place])
    second, end = layer(x[:, place:], state)
    assert_same((torch.cat([first, second], 1), end), layer(x))


@pytest.mark.parametrize("places", [[0, 1], [3, 6], [7, 8], [0, 2, 5, 8]])
def test_padding_anywhere_is_the_identity(layer, randn, places):
    """Not a number lies in it, so that a look at it would show."""
    x = randn(2, 9, WIDTH)
    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[0, places] = False
    state = layer(randn(2, 4, WIDTH))[1]
    y, end = layer(torch.where(kept[..., None], x, torch.nan), state, kept)
    alone, own = layer(x[:1, kept[0]], rows(state, 0))
    assert_same((y[:1, kept[0]], rows(end, 0)), (alone, own))
    whole, other = layer(x[1:], rows(state, 1))
    assert_same((y[1:], rows(end, 1)), (whole, other))


def rows(state, row):
    """The state of one row of the batch."""
    if isinstance(state, torch.Tensor):
        return state[row : row + 1]
    parts = [rows(part, row) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def test_padding_alone_leaves_the_state_as_it_was(layer, randn):
    state = layer(randn(2, 4, WIDTH))[1]
    end = layer(randn(2, 3, WIDTH), state, torch.zeros(2, 3, dtype=torch.bool))[1]
    assert all(torch.equal(new, old) for new, old in zip(flat(end), flat(state), strict=True))


def test_padding_has_no_gradient(layer, randn):
    x, kept = randn(1, 4, WIDTH), torch.tensor([[True, False, True, True]])
    x[:, 1] = torch.nan
    x.requires_grad_()
    layer(x, mask=kept)[0][:, kept[0]].sum().backward()
    assert (x.grad[:, 1] == 0).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_rows_never_meet_and_nothing_sees_what_is_to_come(layer, randn):
    x = randn(2, 6, WIDTH)
    changed = x.clone()
    changed[1, 3:] += 1.0
    (y, _), (other, _) = layer(x), layer(changed)
    assert torch.equal(y[0], other[0])
    assert torch.equal(y[1, :3], other[1, :3])
    assert not torch.isclose(y[1, 3:], other[1, 3:]).all()


def test_no_tokens_read_nothing_and_keep_the_state(layer, randn):
    y, start = layer(randn(2, 0, WIDTH))
    assert y.shape == (2, 0, OUT)
    assert all((tensor == 0).all() for tensor in flat(start))
    state = layer(randn(2, 3, WIDTH))[1]
    none = torch.ones(2, 0, dtype=torch.bool)
    for mask in (None, none):
        assert all(torch.equal(new, old) for new, old in zip(flat(layer(randn(2, 0, WIDTH), state, mask)[1]), flat(state), strict=True))


def test_a_call_leaves_the_state_that_it_was_given_alone(layer, randn):
    state = layer(randn(2, 3, WIDTH))[1]
    before = [tensor.clone() for tensor in flat(state)]
    layer(randn(2, 3, WIDTH), state)
    assert all(torch.equal(new, old) for new, old in zip(flat(state), before, strict=True))


def test_two_derivatives_are_those_of_finite_differences(layer, randn):
    """Along random directions of token and weights at once: the slope of the loss, and the slope of that slope."""
    x, weights = randn(1, 4, WIDTH), dict(layer.named_parameters())
    direction = {name: randn(*p.shape) for name, p in weights.items()}
    along = randn(1, 4, WIDTH)

    def slope(at):
        shifted = {name: (p + at * direction[name]).detach().requires_grad_() for name, p in weights.items()}
        moved = (x + at * along).requires_grad_()
        loss = torch.func.functional_call(layer, shifted, (moved,))[0].sin().sum()
        grads = torch.autograd.grad(loss, [moved, *shifted.values()], create_graph=True)
        first = sum((g * d).sum() for g, d in zip(grads, [along, *direction.values()], strict=True))
        second = torch.autograd.grad(first, [moved, *shifted.values()], allow_unused=True, materialize_grads=True)
        return loss.item(), first.item(), sum((g * d).sum().item() for g, d in zip(second, [along, *direction.values()], strict=True))

    step = 1e-5  # a difference is off by step^2 times the derivative two orders up, and by rounding / step
    below, (_, first, second), above = slope(-step), slope(0.0), slope(step)
    assert_near([torch.tensor((above[0] - below[0]) / (2 * step))], [torch.tensor(first)], tolerance=1e-5)
    assert_near([torch.tensor((above[1] - below[1]) / (2 * step))], [torch.tensor(second)], tolerance=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_seed_gives_the_same_layer(name):
    one, two = (LAYERS[name](torch.Generator().manual_seed(3)).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in CHAINS])
def test_a_spec_is_frozen(name, generator):
    spec = LAYERS[name](generator).spec
    with pytest.raises(FrozenInstanceError):
        spec.width = 5


@pytest.mark.plain
def test_what_does_not_fit_a_layer_is_one_sentence(layer, randn):
    assert_refused(ShapeError, "`x` has shape .* axis 2 is 5", lambda: layer(randn(2, 3, 5)))
    assert_refused(ShapeError, "`mask` has shape .* axis 1 is 4", lambda: layer(randn(2, 3, WIDTH), mask=torch.ones(2, 4).bool()))


SPECS = {
    "gated": GatedRNNSpec,
    "lru": LRUSpec,
    "classic": ClassicSpec,
    "mamba": MambaSpec,
    "mamba2": Mamba2Spec,
    "attention": LinearAttentionSpec,
    "delta": DeltaNetSpec,
}


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "spec", "fields"),
    [
        ("`hidden` is 0; .*at least 1", "gated", {"width": 2, "hidden": 0, "output_gates": 1}),
        ("`output_gates` is 0; .*at least 1", "gated", {"width": 2, "hidden": 2}),
        ('`output_gates` is 3 and `gating` is "side"', "gated", {"width": 2, "hidden": 2, "output_gates": 3, "gating": "side"}),
        ("`gating` is 'input'; .*\"side\"", "gated", {"width": 2, "hidden": 2, "output_gates": 3, "gating": "input"}),
        ("`recurrence` is 'full'; .*\"dense\"", "gated", {"width": 2, "hidden": 2, "output_gates": 3, "recurrence": "full"}),
        ("`inner` is 0; .*at least 1", "lru", {"width": 2, "hidden": 2, "inner": 0}),
        ("`unit` is 'relu'; .*\"mlp\"", "lru", {"width": 2, "hidden": 2, "inner": 2, "unit": "relu"}),
        ("`phase` is 7.0; .*2 pi", "lru", {"width": 2, "hidden": 2, "inner": 2, "phase": 7.0}),
        ("`cell` is 'rnn'; .*\"gru\"", "classic", {"width": 2, "hidden": 2, "cell": "rnn"}),
        ("`memory` is 0; .*at least 1", "mamba", {"width": 2, "inner": 2, "memory": 0, "step_rank": 1}),
        ("`heads` is 0; .*at least 1", "attention", {"width": 2, "heads": 0}),
        ("`inner` is 6, `heads` 4 and `groups` 1; .*multiple", "mamba2", {"width": 2, "inner": 6, "heads": 4, "memory": 1}),
        ("`epsilon` is 0; .*above 0", "mamba2", {"width": 2, "inner": 6, "heads": 2, "memory": 1, "epsilon": 0}),
        ("`key_width` is 0; .*at least 1", "delta", {"width": 2, "heads": 1, "key_width": 0, "value_width": 1}),
        ("`epsilon` is 0; .*above 0", "delta", {"width": 2, "heads": 1, "key_width": 1, "value_width": 1, "epsilon": 0}),
    ],
)
def test_a_spec_that_cannot_be_is_one_sentence(words, spec, fields):
    assert_refused(SpecError, words, lambda: SPECS[spec](**fields))


def test_a_chain_takes_one_state_for_each_layer(generator, randn):
    chain = LAYERS["two LRUs"](generator)
    state = chain(randn(1, 2, WIDTH))[1]
    assert_refused(SpecError, "holds 1 states and there are 2", lambda: chain(randn(1, 2, WIDTH), state[:1]))
    assert_refused(SpecError, "`layers` is 0", lambda: Chain([]))


@pytest.mark.parametrize("name", [name for name in LAYERS if "LRU" not in name and name not in ("LSTM", "GRU", "gated, dense")])
def test_a_layer_runs_in_bfloat16_and_carries_on_in_float32(name, generator, randn):
    """But for cells of torch, a dense recurrence, and complex numbers, of which there are none so narrow."""
    y, state = LAYERS[name](generator).bfloat16()(randn(2, 6, WIDTH).bfloat16())
    assert y.dtype == torch.bfloat16
    assert {part.dtype for part in flat(state)} == {torch.float32}
    assert y.isfinite().all()
