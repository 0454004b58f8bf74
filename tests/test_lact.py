"""LaCT: its step by hand and by autograd, chunk after chunk, and what a chunk that is not full does."""

import pytest
import torch
from asserts import assert_near, assert_refused
from torch.nn import functional as F

from graven.errors import ShapeError, SpecError
from graven.layers.lact import LaCT, LaCTSpec, LaCTState, ascent, orthogonal, rescaled, swiglu_network

ROUNDING = 1e-10  # float64; Newton-Schulz blows up what is small
PRINTED = 1e-6  # of numbers that are given in six digits
SHAPE = {"width": 8, "heads": 2, "hidden": 6, "chunk": 4, "window": 4, "rate": 0.1}
SPECS = {
    "momentum and Muon": LaCTSpec(**SHAPE),
    "plain steps, window shorter than a chunk": LaCTSpec(**SHAPE | {"window": 2}, momentum=False, muon=False),
    "window longer than a chunk": LaCTSpec(**SHAPE | {"window": 7, "chunk": 3}, muon=False),
    "convolutions": LaCTSpec(**SHAPE, momentum=False, muon=False, convolution=3),
}


@pytest.fixture(params=SPECS)
def layer(request, generator):
    layer = LaCT(SPECS[request.param], generator, torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def parts(state):
    """Every tensor of a state."""
    return [state.weights, *state.steps, state.recent, state.pending, state.window]


def row(state, i):
    return LaCTState(*(tuple(x[i : i + 1] for x in part) if isinstance(part, tuple) else part[i : i + 1] for part in state))


def test_two_chunks_of_one_token_by_hand():
    """Numbers made with the public code, of six digits: without Muon and momentum, all matrices the identity."""
    one = torch.eye(2, dtype=torch.float64)
    weights = one.expand(1, 3, 1, 2, 2)
    q, k, v = (torch.tensor([[[numbers]]], dtype=torch.float64) for numbers in ([1.0, 0.0], [0.6, 0.8], [0.0, 1.0]))
    assert_near([swiglu_network(q, weights)[0, 0, 0]], [torch.tensor([0.731059, 0.0])], tolerance=PRINTED)
    moved = rescaled(weights + ascent(k, v, weights, rates=torch.full((3, 1, 1, 1), 0.1, dtype=torch.float64)), weights[0])
    assert_near([swiglu_network(q, moved)[0, 0, 0]], [torch.tensor([0.731035, 0.016902])], tolerance=2 * PRINTED)


def test_the_step_is_the_gradient_of_what_it_ascends(randn):
    weights = randn(2, 3, 3, 5, 4).requires_grad_()
    k, v, rates = randn(2, 3, 6, 4), randn(2, 3, 6, 4), randn(3, 2, 3, 6).abs()
    products = (swiglu_network(k, weights) * v).sum(-1)
    wanted = [torch.autograd.grad((products * rate).sum(), weights, retain_graph=True)[0][:, i] for i, rate in enumerate(rates)]
    assert_near(ascent(k, v, weights, rates=rates).unbind(1), wanted, tolerance=ROUNDING)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_muon_brings_singular_values_near_one_and_leaves_zero(shape, randn):
    left, _, right = torch.linalg.svd(randn(10, *shape), full_matrices=False)
    values = torch.linalg.svdvals(orthogonal(left * torch.linspace(0.02, 1, 3 if 3 in shape else 4).double() @ right))
    assert values.min() > 0.97
    assert values.max() < 1.04
    nothing = torch.zeros(1, *shape, requires_grad=True)
    end = orthogonal(nothing)
    end.sum().backward()
    assert not end.any()
    assert torch.isfinite(nothing.grad).all()


def projected(layer, x):
    """Queries, keys and values; the convolutions by torch's own."""
    if not layer.spec.convolution:
        return layer.qkv(x).chunk(3, -1)
    seen = F.pad(x, (0, 0, layer.spec.convolution - 1, 0)).mT
    behind = [F.conv1d(seen, each.weight, each.bias, groups=x.shape[-1]).mT for each in layer.convolutions]
    return [layer.qkv(rows).chunk(3, -1)[i] for i, rows in enumerate(behind)]


def by_hand(layer, x):
    """One row, chunk after chunk: what the fast networks read, scaled, and their weights in the end, every token applied."""
    spec, (q, k, v) = layer.spec, projected(layer, x)
    heads = lambda part: part.unflatten(-1, (spec.heads, -1)).transpose(1, 2)  # noqa: E731
    q, k = (F.normalize(heads(F.silu(part * layer.stretch[i] + layer.offset[i])), dim=-1) for i, part in enumerate((q, k)))
    v, rates = heads(F.silu(v)), F.softplus(layer.rates(x)).unflatten(-1, (3, spec.heads)).permute(2, 0, 3, 1)
    weights, before, reads = layer.fast[None], 0.0, []
    for at in range(0, x.shape[1], spec.chunk):
        here = slice(at, at + spec.chunk)
        reads.append(swiglu_network(q[:, :, here], weights))
        mean = layer.momentum(x[:, here]).sigmoid().mean(1)[:, None, :, None, None] if spec.momentum else 0.0
        before = ascent(k[:, :, here], v[:, :, here], weights, rates=rates[..., here]) + mean * before
        weights = weights + (orthogonal(before) if spec.muon else before)
        weights = torch.stack([weights[:, i] * layer.fast[i].norm(dim=axis, keepdim=True) / weights[:, i].norm(dim=axis, keepdim=True)
                               for i, axis in enumerate((-1, -2, -1))], 1)  # fmt: skip
    return layer.norm(torch.cat(reads, 2).transpose(1, 2)) * F.silu(layer.scale(x))[..., None], weights


NEAR = 1e-3  # what is added to the norm of a vector of length 1e-1, a few times over


def test_a_whole_layer_is_its_definition(layer, randn):
    """Without what is added to norms, written down once more; attention by torch."""
    x = randn(1, 10, 8)
    y, state = layer(x)
    fast, weights = by_hand(layer, x)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in projected(layer, x))
    angle = torch.arange(10)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.complex(z[..., :2].contiguous(), z[..., 2:].contiguous()) * turn).mT.flatten(-2) for z in (q, k))
    ahead = torch.arange(10)[:, None] - torch.arange(10)
    window = F.scaled_dot_product_attention(q, k, v, attn_mask=(ahead >= 0) & (ahead < layer.spec.window))
    assert_near([y], [layer.out(fast.flatten(2) + window.transpose(1, 2).flatten(2))], tolerance=NEAR)
    assert_near([layer.flush(state).weights], [weights], tolerance=NEAR)


def test_the_weights_change_when_a_chunk_is_full_and_flush_applies_the_rest(layer, randn):
    size = layer.spec.chunk
    start, x = layer.start(1), randn(1, size, 8)
    _, part = layer(x[:, :-1])
    _, full = layer(x)
    assert torch.equal(part.weights, start.weights)
    assert all((full.weights != start.weights)[0].flatten(1).any(1))
    assert (part.pending.item(), full.pending.item()) == (size - 1, 0)
    assert all((layer.flush(part).weights != start.weights)[0].flatten(1).any(1))
    assert all(torch.equal(new, old) for new, old in zip(parts(layer.flush(full)), parts(full), strict=True))


@pytest.mark.parametrize("places", [[1], [4], [3, 7], [2, 3, 4, 5], [10]])
def test_to_stop_anywhere_and_go_on_changes_neither_values_nor_gradients(layer, randn, places):
    x = randn(2, 11, 8).requires_grad_()
    state, reads = layer.start(2), []
    for piece in x.tensor_split(places, 1):
        y, state = layer(piece, state)
        reads.append(y)
    y, end = layer(x)
    ends = [[torch.cat(reads, 1), *parts(state)], [y, *parts(end)]]
    assert_near(*ends, tolerance=ROUNDING)
    weights, leaves = [randn(*tensor.shape) for tensor in ends[0]], [x, *layer.parameters()]
    pulled = [torch.autograd.grad(sum((a * b).sum() for a, b in zip(end, weights, strict=True)), leaves) for end in ends]
    assert_near(*pulled, tolerance=1e-8)  # of sums of hundreds


@pytest.mark.parametrize("gaps", [[0, 1], [8, 9], [4], [1, 3, 4, 6]])
def test_padding_is_the_identity_on_every_part_of_the_state(layer, randn, gaps):
    """Rows have different numbers of pending tokens when it comes."""
    x, kept = randn(2, 10, 8), torch.ones(2, 10, dtype=torch.bool)
    kept[0, gaps] = False
    _, state = layer(randn(2, 3, 8), mask=torch.tensor([[True, False, True], [True, True, True]]))
    y, end = layer(torch.where(kept[..., None], x, torch.nan), state, kept)
    for i in (0, 1):
        alone, own = layer(x[i : i + 1, kept[i]], row(state, i))
        assert_near([y[i : i + 1, kept[i]], *parts(row(end, i))], [alone, *parts(own)], tolerance=ROUNDING)
    _, same = layer(randn(2, 5, 8), state, torch.zeros(2, 5, dtype=torch.bool))
    assert all(torch.equal(new, old) for new, old in zip(parts(same), parts(state), strict=True))


def test_the_state_holds_weights_steps_window_and_place(layer):
    spec, state = layer.spec, layer.start(3)
    fast, kept = 3 * 8 * 6 * (2 if spec.momentum else 1), max(spec.window, spec.chunk) - 1
    assert sum(part.numel() for part in parts(state)) == 3 * (
        fast + kept * (16 + (8 if spec.momentum else 6) + 1) + 1 + max(0, spec.convolution - 1) * 8
    )


def test_everything_trains(layer, randn):
    _, state = layer(randn(2, 5, 8))
    layer(randn(2, 4, 8), layer.flush(state))[0].square().sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 6}, "multiple of 2"),
        ({"chunk": 0}, "`chunk` is 0"),
        ({"window": 0}, "`window` is 0"),
        ({"rate": 0.0}, "`rate` is"),
        ({"convolution": -1}, "`convolution` is -1"),
    ],
)
def test_a_wrong_spec_is_refused(settings, words):
    assert_refused(SpecError, words, lambda: LaCTSpec(**SHAPE | settings))


@pytest.mark.plain
def test_a_state_of_another_batch_is_refused(layer, randn):
    assert_refused(ShapeError, "`weights` has shape", lambda: layer(randn(2, 3, 8), layer.start(3)))
