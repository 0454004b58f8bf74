"""Attention against a loop over batch, heads and queries in float64."""

import math

import pytest
import torch
from asserts import assert_near, assert_refused
from torch.autograd import grad

from graven.errors import OrderError, ShapeError, SpecError
from graven.ops import attention as module
from graven.ops.attention import Setting, attention, plain_attention

ROUNDING = 1e-12  # float64, sums of a few dozen terms of size 1
TWICE = 1e-10  # and of their second derivatives
SINGLE = 1e-5  # float32, the same
WIDTH, VALUE = 3, 2


def definition(q, k, v, *, mask, causal, scale=None):
    """O_t = sum over visible s of exp(l_ts) v_s / sum over visible s of exp(l_ts), one row at a time; 0 where nothing is visible."""
    (batch, heads, length, width), keys = q.shape, k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = torch.zeros(batch, heads, length, v.shape[-1], dtype=q.dtype)
    seen = None if mask is None else mask.expand(batch, heads, length, keys)
    for b in range(batch):
        for h in range(heads):
            g = h * k.shape[1] // heads
            for t in range(length):
                visible = [s for s in range(keys) if (not causal or s <= t + keys - length) and (seen is None or bool(seen[b, h, t, s]))]
                if visible:
                    weights = torch.stack([(scale * (q[b, h, t] * k[b, g, s]).sum()).exp() for s in visible])
                    out[b, h, t] = sum(w * v[b, g, s] for w, s in zip(weights / weights.sum(), visible, strict=True))
    return out


def no_mask(*_):
    return None


def right_padding(batch, _length, keys, _generator):
    return (torch.arange(keys) < torch.arange(1, batch + 1)[:, None] * keys // (batch + 1))[:, None, None]


def left_padding(batch, length, keys, generator):
    """With `causal`, the first queries of a row see nothing."""
    return right_padding(batch, length, keys, generator).flip(-1)


def random_mask(batch, length, keys, generator):
    return torch.rand(batch, 1, length, keys, generator=generator) < 0.4


def window(_batch, length, keys, _generator):
    """The last two keys before each query and its own; each end of a block of rows sees nothing of the other's columns."""
    behind = torch.arange(length)[:, None] + keys - length - torch.arange(keys)
    return (behind >= 0) & (behind < 3)


def mask_of_every_head(batch, length, keys, generator, heads=4):
    return torch.rand(batch, heads, length, keys, generator=generator) < 0.5


MASKS = [no_mask, right_padding, left_padding, random_mask]
SIZES = [(0, 0), (1, 1), (7, 7), (3, 7), (0, 3), (1, 5), (5, 3), (2, 0)]  # T, S


def inputs(randn, heads, groups, length, keys, batch=2):
    return tuple(
        x.requires_grad_() for x in (randn(batch, heads, length, WIDTH), randn(batch, groups, keys, WIDTH), randn(batch, groups, keys, VALUE))
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of four rows, and two or three pairs of a head and a row of the batch at a time."""
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "BLOCK", 48)


@pytest.mark.parametrize("form", [attention, plain_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make_mask", MASKS)
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_value_and_gradient_equal_the_definition(form, length, keys, make_mask, causal, randn, generator):
    parts, mask = inputs(randn, 4, 2, length, keys), make_mask(2, length, keys, generator)
    got, expected = form(*parts, mask=mask, causal=causal), definition(*parts, mask=mask, causal=causal)
    torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)
    weight = randn(*got.shape)
    # the definition does not touch a part that nobody sees: its gradient is then 0
    wanted = torch.autograd.grad((expected * weight).sum(), parts, materialize_grads=True) if expected.requires_grad else map(torch.zeros_like, parts)
    for one, other in zip(torch.autograd.grad((got * weight).sum(), parts), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


def derivatives(form, parts, d_o, seconds, **settings):
    """The output, the gradient of one function of it, and the gradient of one function of both."""
    out = form(*parts, **settings)
    first = grad((out * d_o + out**2).sum(), parts, create_graph=True)
    return out, *first, *grad(sum((x * y + x**2).sum() for x, y in zip(first, seconds, strict=True)), parts)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make_mask", [*MASKS, window, mask_of_every_head])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("length", "keys"), [(3, 3), (4, 4), (5, 5), (9, 5), (3, 9)])  # around one block of four rows, or four of one
def test_values_and_both_derivatives_equal_those_of_the_plain_form(groups, length, keys, make_mask, causal, randn, generator):
    parts, mask = inputs(randn, 4, groups, length, keys), make_mask(2, length, keys, generator)
    given = randn(2, 4, length, VALUE), [randn(*x.shape) for x in parts]
    found, wanted = (derivatives(form, parts, *given, mask=mask, causal=causal) for form in (attention, plain_attention))
    assert_near(found, wanted, tolerance=TWICE)


@pytest.mark.parametrize("length", [module.ROWS - 1, module.ROWS, module.ROWS + 1])
def test_blocks_of_their_own_size_give_the_plain_derivatives_in_float32(length, randn):
    parts = [x.detach().float().requires_grad_() for x in inputs(randn, 2, 1, length, length, batch=1)]
    given = randn(1, 2, length, VALUE).float(), [randn(*x.shape).float() for x in parts]
    found = derivatives(attention, parts, *given)
    parts = [x.detach().double().requires_grad_() for x in parts]
    wanted = derivatives(plain_attention, parts, given[0].double(), [x.double() for x in given[1]])
    for one, other in zip(found, wanted, strict=True):
        assert_near([one / other.abs().max()], [other / other.abs().max()], tolerance=SINGLE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make_mask", MASKS)
@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize(("length", "keys"), [(3, 3), (2, 4), (4, 2)])
def test_first_and_second_derivative_agree_with_finite_differences(groups, length, keys, make_mask, causal, randn, generator, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 2)
    parts, mask = inputs(randn, 2, groups, length, keys, batch=1), make_mask(1, length, keys, generator)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, mask=mask, causal=causal), parts, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, mask=mask, causal=causal), parts, fast_mode=True)


def test_scale_multiplies_the_logits(randn):
    parts = inputs(randn, 2, 2, 5, 5)
    torch.testing.assert_close(attention(*parts, scale=0.3), definition(*parts, mask=None, causal=True, scale=0.3), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_sees_nothing_is_zero_and_so_are_its_derivatives(causal, dtype, randn):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(randn, 2, 2, 4, 4))
    mask = torch.tensor([False, False, True, True]).expand(2, 1, 1, 4) & torch.tensor([False, True, True, True])[:, None]
    out = attention(q, k, v, mask=mask, causal=causal)
    assert (out[:, :, 0] == 0).all()
    first = torch.autograd.grad(out.float().square().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), (q, k, v))
    for of_q, of_k, of_v in (first, second):
        assert all(x.isfinite().all() for x in (of_q, of_k, of_v))
        assert (of_q[:, :, 0] == 0).all()
        assert of_k[:, :, 3].any()


def test_more_queries_than_keys_leave_the_first_queries_blind(randn):
    q, k, v = inputs(randn, 1, 1, 5, 3)
    out = attention(q, k, v)
    assert (out[:, :, :2] == 0).all()
    torch.testing.assert_close(out[:, :, 2], v[:, :, 0])


def test_huge_logits_stay_finite(randn):
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(randn, 2, 2, 4, 4))
    out = attention(1e18 * q, 1e18 * k, v)
    assert out.isfinite().all()
    assert grad(out.sum(), v)[0].isfinite().all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_the_kernel_of_pytorch_and_the_blocks_give_the_same(causal, scale, randn):
    q, k, v = randn(6, 2, 9, 3), randn(6, 9, 3), randn(6, 9, 3)
    setting = Setting(2, causal, scale)
    assert module._is_fused(q, k, v, setting)
    assert_near(module._fused_value(q, k, v, setting), module._value(q, k, v, None, setting), tolerance=ROUNDING)


def test_a_scale_of_nothing_is_differentiated_too(randn):
    parts = [randn(1, 2, 5, 4).requires_grad_() for _ in range(3)]
    found, wanted = (torch.autograd.grad(form(*parts, scale=0.0).sin().sum(), parts) for form in (attention, plain_attention))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_what_the_kernel_of_pytorch_gets_wrong_is_right(scale, randn):
    """Axes that are not dense it reads as if they were; a factor that is not positive makes NaN of what it hides; nothing ends the process."""
    across = [randn(2, 4, 3, 5).mT for _ in range(3)]
    assert_near([attention(*across)], [plain_attention(*across)], tolerance=ROUNDING)
    assert_near([attention(*across, scale=scale)], [plain_attention(*across, scale=scale)], tolerance=ROUNDING)
    assert attention(*(x[:, :, :0] for x in across), causal=False).shape == (2, 4, 0, 3)


@pytest.mark.parametrize("make_mask", [no_mask, right_padding])
def test_nothing_of_the_size_of_the_matrix_is_kept_for_a_later_pass(make_mask, randn, generator):
    length, sizes = 64, []
    parts = inputs(randn, 4, 2, length, length)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        out = attention(*parts, mask=make_mask(2, length, length, generator))
        first = grad(out.square().sum(), parts, create_graph=True)
        grad(sum(x.square().sum() for x in first), parts)
        assert max(sizes) <= out.numel() * WIDTH < 4 * length * length
        plain_attention(*parts)
    assert max(sizes) >= 4 * length * length


def test_a_third_derivative_is_refused(randn):
    parts = inputs(randn, 2, 2, 4, 4)
    first = grad(attention(*parts).pow(3).sum(), parts, create_graph=True)
    second = grad(first[0].pow(3).sum(), parts, create_graph=True)
    assert_refused(OrderError, "a third was asked for; use `plain_attention`", lambda: grad(second[0].sum(), parts))
    first = grad(plain_attention(*parts).pow(3).sum(), parts, create_graph=True)
    second = grad(first[0].pow(3).sum(), parts, create_graph=True)
    assert all(x.isfinite().all() for x in grad(second[0].sum(), parts))


@pytest.mark.parametrize("make_mask", [no_mask, left_padding])
def test_half_precision_is_rounded_once(make_mask, randn, generator):
    parts = [x.detach().bfloat16() for x in inputs(randn, 4, 2, 9, 9)]
    mask = make_mask(2, 9, 9, generator)
    out = attention(*parts, mask=mask)
    assert out.dtype == torch.bfloat16
    assert_near([out], [attention(*(x.double() for x in parts), mask=mask)], tolerance=2**-8)


def test_autocast_changes_no_bit(randn):
    parts = [x.detach().float().requires_grad_() for x in inputs(randn, 4, 2, 9, 9)]
    given = randn(2, 4, 9, VALUE).float(), [randn(*x.shape).float() for x in parts]
    wanted = derivatives(attention, parts, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = derivatives(attention, parts, *given)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_softcap_bends_the_logits(randn):
    q, k, v = inputs(randn, 1, 1, 1, 3)
    logits = 2.0 * torch.tanh((q @ k.mT) * WIDTH**-0.5 / 2.0)
    assert_near([plain_attention(q, k, v, softcap=2.0)], [logits.softmax(-1) @ v], tolerance=ROUNDING)


def test_heads_that_do_not_divide_are_refused(randn):
    with pytest.raises(ShapeError) as caught:
        attention(*inputs(randn, 3, 2, 4, 4))
    assert str(caught.value) == "`q` has 3 heads and `k` has 2; the second must divide the first. Repeat or drop key heads."


@pytest.mark.plain
@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.zeros(4, 4), SpecError, "`mask` is torch.float32; it must be torch.bool"),
        (torch.ones(4, 3, dtype=torch.bool), ShapeError, r"\(4, 3\); it must broadcast to \[B, H, T, S\] = \(2, 2, 4, 4\)"),
        (torch.ones(1, 2, 2, 4, 4, dtype=torch.bool), ShapeError, "must broadcast"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, error, words, randn):
    assert_refused(error, words, lambda: attention(*inputs(randn, 2, 2, 4, 4), mask=mask))
