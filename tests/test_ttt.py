"""TTT-Linear: the dual form is the definition, and a layer goes on where it stopped."""

import pytest
import torch
from asserts import assert_near, assert_refused
from torch.nn import functional as F

from graven.errors import ShapeError, SpecError
from graven.layers.ttt import TTT, Norm, TTTSpec, TTTState, mini_batch

ROUNDING = 1e-10  # float64; the inner LN divides by numbers near 1e-2
PRINTED = 6e-5  # of a vector that is given in four digits
SPECS = {
    "one projection, convolutions, gate": TTTSpec(width=8, heads=2, batch=4),
    "separate projections": TTTSpec(width=8, heads=2, batch=4, convolution=0, gate=False),
}


@pytest.fixture(params=SPECS)
def layer(request, generator):
    layer = TTT(SPECS[request.param], generator, torch.float64)
    with torch.no_grad():  # a fresh layer writes almost nothing
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def inner(randn, *, batch=2, heads=2, size=4, features=4):
    """A state in the middle of nothing, and a norm."""
    state = TTTState(
        randn(batch, heads, features, features), randn(batch, heads, features),
        torch.zeros(batch, heads, features, features, dtype=torch.float64), torch.zeros(batch, heads, features, dtype=torch.float64),
        torch.zeros(batch, dtype=torch.float64), torch.zeros(batch, 0, heads * features, dtype=torch.float64),
    )  # fmt: skip
    return state, Norm(1 + 0.1 * randn(heads, 1, features), randn(heads, 1, features)), [randn(batch, heads, size, features) for _ in range(3)]


def token_by_token(q, k, v, *, rate, places, norm, state):
    """The definition: one gradient a token, by autograd, at the weights before the mini-batch."""
    weight_sum, bias_sum, reads = torch.zeros_like(state.weight), torch.zeros_like(state.bias), []
    for i in range(q.shape[2]):
        weight, bias = state.weight.detach().requires_grad_(), state.bias.detach().requires_grad_()
        found = k[:, :, i : i + 1] + norm(k[:, :, i : i + 1] @ weight + bias[:, :, None])
        loss = 0.5 * (found - v[:, :, i : i + 1]).square().sum()
        of_weight, of_bias = torch.autograd.grad(loss, (weight, bias))
        weight_sum = weight_sum + rate[:, :, i, None, None] * of_weight
        bias_sum = bias_sum + rate[:, :, i, None] * of_bias
        weight, bias = state.weight - places[i] * weight_sum, state.bias - places[i] * bias_sum
        reads.append(q[:, :, i] + norm(q[:, :, i : i + 1] @ weight + bias[:, :, None]).squeeze(2))
    return torch.stack(reads, 2), weight, bias


def test_one_token_by_hand():
    """Numbers made with the public code, of four digits."""
    row = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)[None, None, None]  # noqa: E731
    norm = Norm(torch.ones(1, 1, 4, dtype=torch.float64), torch.zeros(1, 1, 4, dtype=torch.float64))
    zeros, weight = torch.zeros(1, 1, 4, dtype=torch.float64), torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    state = TTTState(weight[None, None], zeros, torch.zeros_like(weight)[None, None], zeros, torch.zeros(1, dtype=torch.float64), zeros[:, :0])
    q, k, v = row(1, 0, 0, 0), row(0.6, 0.8, 0, 0), row(0, 1, 0, 2)
    gradient = norm.loss_gradient(k @ state.weight, v - k)
    assert_near([gradient], [row(1.7572, -1.3179, 2.5809, -3.0202)], tolerance=PRINTED)
    rate, places = torch.full((1, 1, 1), 0.1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    read, end = mini_batch(q, k, v, rate=rate, places=places, norm=norm, real=torch.ones(1, 1, dtype=torch.bool), state=state)
    assert_near([read], [row(2.1087, -0.0926, -1.5678, 0.5516)], tolerance=PRINTED)
    assert_near([read], [q + norm(q @ state.weight - 0.1 * ((k * q).sum() + 1) * gradient)], tolerance=ROUNDING)
    assert_near([end.weight], [state.weight - 0.1 * k.mT @ gradient], tolerance=ROUNDING)


def test_the_dual_form_is_one_gradient_after_the_other(randn):
    state, norm, (q, k, v) = inner(randn)
    rate, places, real = randn(2, 2, 4).abs(), randn(4).abs(), torch.ones(2, 4, dtype=torch.bool)
    read, end = mini_batch(q, k, v, rate=rate, places=places, norm=norm, real=real, state=state)
    wanted, weight, bias = token_by_token(q, k, v, rate=rate, places=places, norm=norm, state=state)
    assert_near([read, end.weight, end.bias], [wanted, weight, bias], tolerance=ROUNDING)
    assert all((x == 0).all() for x in (end.weight_sum, end.bias_sum, end.place))


def test_an_unfinished_mini_batch_leaves_its_weights_and_keeps_its_sums(randn):
    state, norm, (q, k, v) = inner(randn)
    rate, places, real = randn(2, 2, 4).abs(), randn(4).abs(), torch.tensor([[True] * 4, [True, True, False, False]])
    rate = rate * real[:, None]
    _, end = mini_batch(q, k, v, rate=rate, places=places, norm=norm, real=real, state=state)
    assert torch.equal(end.weight[1], state.weight[1])
    assert end.place.tolist() == [0.0, 2.0]
    assert (end.weight_sum[1] != 0).all()


@pytest.mark.parametrize("settings", [{"rate": 0.5}, {"convolution": 0, "gate": False}])
def test_a_whole_layer_is_its_definition(generator, randn, settings):
    """Every part around the inner model written down once more, a token after the other, with weights as after training."""
    spec = TTTSpec(width=8, heads=2, batch=4, **settings)
    layer, x = TTT(spec, generator, torch.float64), randn(1, 6, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    q = layer.q(x)
    if spec.convolution:
        seen = F.pad(q, (0, 0, spec.convolution - 1, 0)).mT
        q, k = (F.conv1d(seen, part.weight, part.bias, groups=8).mT for part in layer.convolutions)
    else:
        k = layer.k(x)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k, layer.v(x)))
    angle = (torch.arange(6) % 4)[:, None] * torch.tensor([1.0, 10_000.0**-0.5], dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.complex(part[..., :2].contiguous(), part[..., 2:].contiguous()) * turn).mT.flatten(-2) for part in (q, k))
    rate = layer.rate(x).sigmoid().transpose(1, 2) * spec.rate / 4
    norm, places = Norm(layer.inner_scale, layer.inner_offset), (1 / torch.arange(1, 5, dtype=torch.float64) + layer.place_rate).clamp(min=0)
    state, reads = layer.start(1), []
    for here in (slice(0, 4), slice(4, 6)):
        parts = (part[:, :, here] for part in (q, k, v))
        read, weight, bias = token_by_token(*parts, rate=rate[:, :, here], places=places, norm=norm, state=state)
        state, reads = state._replace(weight=weight.detach(), bias=bias.detach()), [*reads, read]
    o = layer.norm(torch.cat(reads, 2).transpose(1, 2).flatten(2))
    wanted = layer.out(o * F.gelu(layer.gate(x), approximate="tanh") if spec.gate else o)
    assert_near([layer(x)[0]], [wanted], tolerance=100 * ROUNDING)


@pytest.mark.parametrize("places", [[1], [4], [3, 7], [2, 3, 4, 5], [10]])
def test_to_stop_anywhere_and_go_on_changes_neither_values_nor_gradients(layer, randn, places):
    x = randn(2, 11, 8).requires_grad_()
    state, reads = layer.start(2), []
    for piece in x.tensor_split(places, 1):
        y, state = layer(piece, state)
        reads.append(y)
    ends = [(torch.cat(reads, 1), *state), (lambda y, end: (y, *end))(*layer(x))]
    assert_near(*ends, tolerance=ROUNDING)
    weights = [randn(*tensor.shape) for tensor in ends[0]]
    leaves = [x, *layer.parameters()]
    pulled = [torch.autograd.grad(sum((a * b).sum() for a, b in zip(end, weights, strict=True)), leaves) for end in ends]
    assert_near(*pulled, tolerance=ROUNDING)


@pytest.mark.parametrize("gaps", [[0, 1], [8, 9], [4], [1, 3, 4, 6]])
def test_padding_is_the_identity_on_every_part_of_the_state(layer, randn, gaps):
    """Rows stand at different places in their mini-batches when it comes."""
    x, kept = randn(2, 10, 8), torch.ones(2, 10, dtype=torch.bool)
    kept[0, gaps] = False
    _, state = layer(randn(2, 3, 8), mask=torch.tensor([[True, False, True], [True, True, True]]))
    y, end = layer(torch.where(kept[..., None], x, torch.nan), state, kept)
    for row in (0, 1):
        alone, own = layer(x[row : row + 1, kept[row]], TTTState(*(part[row : row + 1] for part in state)))
        assert_near([y[row : row + 1, kept[row]], *(part[row : row + 1] for part in end)], [alone, *own], tolerance=ROUNDING)
    _, same = layer(randn(2, 5, 8), state, torch.zeros(2, 5, dtype=torch.bool))
    assert all(torch.equal(new, old) for new, old in zip(same, state, strict=True))


def test_the_state_holds_weights_sums_place_and_window(layer):
    spec, state = layer.spec, layer.start(3)
    window = 3 * spec.width if spec.convolution else 0
    assert sum(part.numel() for part in state) == 3 * (2 * spec.width * (4 + 1) + 1 + window)


def test_the_learned_start_trains(layer, randn):
    y, _ = layer(randn(2, 5, 8))
    y.square().sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    assert (layer.inner_weight.grad != 0).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"width": 6}, "multiple of 2"), ({"batch": 0}, "`batch` is 0"), ({"convolution": -1}, "`convolution` is -1"), ({"rate": 0.0}, "`rate` is 0.0")],
)
def test_a_wrong_spec_is_refused(settings, words):
    assert_refused(SpecError, words, lambda: TTTSpec(**{"width": 8, "heads": 2, **settings}))


@pytest.mark.plain
def test_a_state_of_another_batch_is_refused(layer, randn):
    assert_refused(ShapeError, "`weight` has shape", lambda: layer(randn(2, 3, 8), layer.start(3)))
