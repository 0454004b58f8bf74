"""Attention against a loop over batch, heads and queries in float64."""

import math

import pytest
import torch

from graven.errors import ShapeError
from graven.ops.attention import attention

ROUNDING = 1e-12  # float64, sums of a few dozen terms of size 1
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


MASKS = [no_mask, right_padding, left_padding, random_mask]
SIZES = [(0, 0), (1, 1), (7, 7), (3, 7), (0, 3), (1, 5), (5, 3), (2, 0)]  # T, S


def inputs(randn, heads, groups, length, keys, batch=2):
    return tuple(
        x.requires_grad_() for x in (randn(batch, heads, length, WIDTH), randn(batch, groups, keys, WIDTH), randn(batch, groups, keys, VALUE))
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make_mask", MASKS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_value_and_gradient_equal_the_definition(heads, groups, length, keys, make_mask, causal, randn, generator):
    parts, mask = inputs(randn, heads, groups, length, keys), make_mask(2, length, keys, generator)
    got, expected = attention(*parts, mask=mask, causal=causal), definition(*parts, mask=mask, causal=causal)
    torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)
    weight = randn(*got.shape)
    # the definition does not touch a part that nobody sees: its gradient is then 0
    wanted = torch.autograd.grad((expected * weight).sum(), parts, materialize_grads=True) if expected.requires_grad else map(torch.zeros_like, parts)
    for one, other in zip(torch.autograd.grad((got * weight).sum(), parts), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make_mask", MASKS)
@pytest.mark.parametrize(("length", "keys"), [(3, 3), (2, 4), (4, 2)])
def test_first_and_second_derivative_agree_with_finite_differences(length, keys, make_mask, causal, randn, generator):
    parts, mask = inputs(randn, 2, 1, length, keys, batch=1), make_mask(1, length, keys, generator)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, mask=mask, causal=causal), parts)
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, mask=mask, causal=causal), parts, gen_non_contig_grad_outputs=False)


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
    q, k, v = (x.detach().float() for x in inputs(randn, 2, 2, 4, 4))
    assert attention(1e18 * q, 1e18 * k, v).isfinite().all()


def test_heads_that_do_not_divide_are_refused(randn):
    with pytest.raises(ShapeError) as caught:
        attention(*inputs(randn, 3, 2, 4, 4))
    assert str(caught.value) == "`q` has 3 heads and `k` has 2; the second must divide the first. Repeat or drop key heads."
