"""The layers against loops over the equations they state, and against the layers of flash-linear-attention written out here."""

import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import ShapeError, SpecError
from graven.layers.gated_linear import (
    GatedLinear,
    GatedLinearAttention,
    GatedLinearAttentionSpec,
    GatedLinearSpec,
    Stack,
    read_fla,
)

GATES = ["none", "scalar", "key", "value", "matrix"]
SPEC = {"width": 6, "key_width": 3, "value_width": 2, "heads": 3}


def plain(**change):
    return GatedLinear(GatedLinearSpec(**(SPEC | change)))


def filled(module, generator):
    """Every parameter drawn from the test's generator, in float64."""
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_a_layer_is_the_recurrence_of_the_paper_head_by_head(randn, generator, gate, bias):
    """S_i = G_i * S_(i-1) + v_i k_i^T, o_i = S_i q_i, with S the transpose of ours."""
    layer = filled(GatedLinear(GatedLinearSpec(**SPEC, gate=gate, gate_bias=bias)), generator)
    x = randn(2, 5, 6)
    found = layer(x)
    heads, keys, values = 3, 3, 2
    for row in range(2):
        for head in range(heads):
            state = torch.zeros(values, keys).double()
            for t in range(5):
                q, k = ((y.weight @ x[row, t])[head * keys : (head + 1) * keys] for y in (layer.q, layer.k))
                v = (layer.v.weight @ x[row, t])[head * values : (head + 1) * values]
                decay = torch.ones(values, keys).double()
                if layer.gate is not None:
                    logits = layer.gate.weight @ x[row, t] + (layer.gate.bias if bias else 0.0)
                    g = 1 / (1 + torch.exp(-logits.reshape(heads, -1)[head]))
                    decay = {"scalar": g, "key": g[None], "value": g[:, None], "matrix": g.reshape(-1, values).T if gate == "matrix" else None}[gate]
                state = decay * state + torch.outer(v, k)
                assert_near([found[row, t, head * values : (head + 1) * values]], [state @ q], tolerance=1e-13)


@pytest.mark.parametrize("gate", GATES)
def test_a_layer_runs_in_two_parts_as_in_one(randn, generator, gate):
    layer, x = filled(GatedLinear(GatedLinearSpec(**SPEC, gate=gate)), generator), randn(2, 7, 6)
    first, state = layer.run(x[:, :3])
    second, end = layer.run(x[:, 3:], state=state)
    assert_near([torch.cat([first, second], 1), end], layer.run(x), tolerance=1e-13)


@pytest.mark.parametrize("places", [[0, 1], [6, 7], [2, 5]])
@pytest.mark.parametrize("gate", GATES)
def test_padding_anywhere_leaves_reads_and_state_as_they_were(randn, generator, gate, places):
    layer, x = filled(GatedLinear(GatedLinearSpec(**SPEC, gate=gate)), generator), randn(2, 8, 6)
    real = torch.ones(8, dtype=torch.bool)
    real[places] = False
    o, end = layer.run(x, mask=real.expand(2, -1))
    assert_near([o[:, real], end], layer.run(x[:, real]), tolerance=1e-13)


def test_a_stack_adds_every_layer_to_what_it_reads(randn, generator):
    spec = GatedLinearSpec(width=6, key_width=4, value_width=3, heads=2, gate="value")
    layers, x = [filled(GatedLinear(spec), generator) for _ in range(3)], randn(2, 5, 6)
    expected = x
    for layer in layers:
        expected = expected + layer(expected)
    assert_near([Stack(layers)(x)], [expected], tolerance=1e-13)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (SpecError, "`heads` is 0; .*at least 1", lambda: GatedLinearSpec(**(SPEC | {"heads": 0}))),
        (SpecError, "`gate` is 'vector'; .*\"none\"", lambda: GatedLinearSpec(**SPEC, gate="vector")),
        (SpecError, "`form` is 'parallel' and `gate` is \"matrix\"", lambda: GatedLinearSpec(**SPEC, gate="matrix", form="parallel")),
        (SpecError, r"layer 0 reads 3 \* 3 numbers a token and takes 6", lambda: Stack([plain(value_width=3)])),
        (ShapeError, "`x` has shape .* axis 2 is 5", lambda: plain()(torch.zeros(2, 3, 5))),
        (ShapeError, "`mask` has shape .* axis 1 is 4", lambda: plain()(torch.zeros(2, 3, 6), mask=torch.ones(2, 4).bool())),
    ],
)
def test_what_does_not_fit_is_one_sentence(error, words, call):
    assert_refused(error, words, call)


def fla_weights(randn, *, groups=1, simple=False, convolution=0, bias=False, fused=True, affine=True, output_gate=True):
    """A state dict with the names and shapes of that library's two layers: 12 channels, 4 heads over 8 key and 16 value channels."""
    width, heads, key, value = 12, 4, 8, 16
    shapes = {"q_proj": (key, width), "k_proj": (key // groups, width), "v_proj": (value // groups, width), "o_proj": (width, value)}
    weights = {f"{name}.weight": randn(*shape) for name, shape in shapes.items()}
    if output_gate:
        weights["g_proj.weight"] = randn(value, width)
    if simple:
        weights |= {"gk_proj.weight": randn(heads, width), "gk_proj.bias": randn(heads)}
    else:
        weights |= {"gk_proj.0.weight": randn(3, width), "gk_proj.1.weight": randn(key // groups, 3), "gk_proj.1.bias": randn(key // groups)}
    if affine:
        weights["g_norm_swish_gate.weight" if fused else "g_norm.weight"] = randn(value // heads)
    if convolution:
        for name, channels in (("q", key), ("k", key // groups), ("v", value // groups)):
            weights[f"{name}_conv1d.weight"] = randn(channels, 1, convolution)
            if bias:
                weights[f"{name}_conv1d.bias"] = randn(channels)
    return {name: tensor / max(tensor.shape[-1], 1) ** 0.5 for name, tensor in weights.items()}


def fla_layer(weights, x, *, heads, groups, divisor=16.0, floor=None):
    """That library's forward pass token by token, with the formula of its naive reference: h = exp(gk) h + k v^T, o = K ** -0.5 q h."""

    def mixed(name):
        y = x @ weights[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" not in weights:
            return y
        taps = weights[f"{name}_conv1d.weight"][:, 0]
        out = torch.zeros_like(y) + weights.get(f"{name}_conv1d.bias", 0.0)
        for t in range(y.shape[1]):
            for lag in range(min(t + 1, taps.shape[1])):
                out[:, t] = out[:, t] + y[:, t - lag] * taps[:, -1 - lag]
        return out * torch.sigmoid(out)

    simple = "gk_proj.weight" in weights
    logits = x @ weights["gk_proj.weight"].T if simple else x @ weights["gk_proj.0.weight"].T @ weights["gk_proj.1.weight"].T
    gates = -torch.log1p(torch.exp(-logits - weights["gk_proj.bias" if simple else "gk_proj.1.bias"])) / divisor
    gates = gates if floor is None else gates.clamp_min(floor)
    q, k, v = mixed("q"), mixed("k"), mixed("v")
    key, value = q.shape[-1] // heads, v.shape[-1] // (heads // groups)
    reads = torch.zeros(*x.shape[:2], heads, value).double()
    for head in range(heads):
        own = head // groups
        keys, values = slice(own * key, (own + 1) * key), slice(own * value, (own + 1) * value)
        h = torch.zeros(len(x), key, value).double()
        for t in range(x.shape[1]):
            gate = gates[:, t, head, None] if simple else gates[:, t, keys]
            h = h * gate.exp()[..., None] + k[:, t, keys, None] * v[:, t, None, values]
            reads[:, t, head] = (q[:, t, head * key : (head + 1) * key, None] * key**-0.5 * h).sum(1)
    scale = next((weights[name] for name in ("g_norm_swish_gate.weight", "g_norm.weight") if name in weights), 1.0)
    normed = (reads / (reads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale).flatten(2)
    if "g_proj.weight" in weights:
        g = x @ weights["g_proj.weight"].T
        normed = normed * g * torch.sigmoid(g)
    return normed @ weights["o_proj.weight"].T


@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"convolution": 4},
        {"convolution": 3, "bias": True, "groups": 4},
        {"fused": False},
        {"affine": False, "fused": False},
        {"output_gate": False, "fused": False},
    ],
)
def test_weights_of_flash_linear_attention_give_its_outputs(randn, simple, options):
    weights, x = fla_weights(randn, simple=simple, **options), randn(2, 9, 12)
    layer = read_fla(weights, heads=4 if "affine" in options else None)
    assert_near([layer(x)[0]], [fla_layer(weights, x, heads=4, groups=options.get("groups", 1))], tolerance=1e-13)


def test_options_of_flash_linear_attention_that_leave_no_trace_are_arguments(randn):
    weights, x = fla_weights(randn), randn(2, 9, 12)
    layer = read_fla(weights, gate_divisor=2.0, gate_floor=-0.3)
    assert_near([layer(x)[0]], [fla_layer(weights, x, heads=4, groups=1, divisor=2.0, floor=-0.3)], tolerance=1e-13)


def test_left_padding_leaves_the_attention_layer_as_it_was(randn):
    layer, x = read_fla(fla_weights(randn, convolution=4)), randn(2, 9, 12)
    real = torch.arange(9) >= 3
    (o, end), (alone, own) = layer(x, mask=real.expand(2, -1)), layer(x[:, real])
    assert_near([o[:, real], *end], [alone, *own], tolerance=1e-13)


def test_a_layer_that_was_read_has_gradients(randn):
    layer = read_fla(fla_weights(randn, convolution=2))
    layer(randn(1, 5, 12))[0].sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("unknown name `attn.q_proj.weight`; .*q_proj", lambda w: {f"attn.{name}": tensor for name, tensor in w.items()}),
        ("lacks `q_proj.weight`", lambda w: without(w, "q_proj.weight")),
        ("`gk_proj.1.bias` is missing and", lambda w: without(w, "gk_proj.1.bias")),
        ("`heads` was left out", lambda w: without(w, "g_norm_swish_gate.weight")),
        (r"`v_proj.weight` is \(15, 12\) and \(16, 12\)", lambda w: w | {"v_proj.weight": torch.zeros(15, 12)}),
        (r"`q_proj.extra` is \(1,\) and nothing", lambda w: w | {"q_proj.extra": torch.zeros(1)}),
    ],
)
def test_weights_that_are_no_such_layer_are_refused_in_one_sentence(randn, words, change):
    weights = change(fla_weights(randn))
    assert_refused(SpecError, words, lambda: read_fla(weights))


def test_heads_against_the_weights_are_refused(randn):
    assert_refused(SpecError, "`heads` is 3; the weights have 4", lambda: read_fla(fla_weights(randn), heads=3))


@pytest.mark.parametrize(
    ("change", "words"), [({"key_value_heads": 3}, "must divide"), ({"gate_divisor": 0.0}, "above 0"), ({"width": 0}, "at least 1")]
)
def test_an_attention_layer_that_cannot_be_is_refused(change, words):
    spec = {"width": 8, "heads": 4, "key_value_heads": 4, "key_width": 2, "value_width": 2} | change
    assert_refused(SpecError, words, lambda: GatedLinearAttention(GatedLinearAttentionSpec(**spec)))


@pytest.mark.parametrize("gate", GATES)
def test_what_lies_at_padding_reaches_no_state(randn, generator, gate):
    layer, x, real = filled(plain(gate=gate), generator), randn(2, 5, 6), torch.tensor([[True, True, False, True, True]])
    o, end = layer.run(x, mask=real.expand(2, -1))
    x[:, 2] = float("nan")
    other, same = layer.run(x, mask=real.expand(2, -1))
    assert torch.equal(end, same)
    assert torch.equal(o[:, real[0]], other[:, real[0]])
