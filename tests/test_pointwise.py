"""Each part against its plain form in value, first and second derivative, in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from graven.errors import OrderError, ShapeError
from graven.layers.decoder import angles
from graven.ops.pointwise import cross_entropy, rms_norm, rotate, swiglu

ROUNDING = 1e-12  # float64: the same sums in another order


def plain_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def plain_swiglu(x):
    gate, up = x.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def plain_rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def plain_cross_entropy(logits, ids):
    return -logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def parts(randn):
    """Fast form, plain form, arguments that need a gradient, arguments that need none."""
    turn = angles(torch.arange(5)[None], 6, torch.float64)
    return {
        "rms_norm": (lambda x, w: rms_norm(x, w, epsilon=1e-6), plain_norm, (randn(2, 3, 6), randn(6)), ()),
        "rms_norm of one vector": (lambda x, w: rms_norm(x, w, epsilon=1e-6), plain_norm, (randn(6), randn(6)), ()),
        "rms_norm of nothing": (lambda x, w: rms_norm(x, w, epsilon=1e-6), plain_norm, (randn(2, 0, 6), randn(6)), ()),
        "swiglu": (swiglu, plain_swiglu, (3 * randn(2, 5, 8),), ()),
        "rotate": (lambda x, cos, sin: rotate(x, (cos, sin)), plain_rotate, (randn(2, 5, 3, 6).transpose(1, 2),), turn),
        "cross_entropy": (cross_entropy, plain_cross_entropy, (3 * randn(4, 7),), (torch.tensor([0, 6, 3, 3]),)),
        "cross_entropy of nothing": (cross_entropy, plain_cross_entropy, (randn(0, 7),), (torch.zeros(0, dtype=torch.long),)),
    }


NAMES = list(parts(lambda *shape: torch.zeros(*shape)))


def derivatives(run, arguments, rest, cotangents):
    """Value, first derivatives, and the derivatives of their product with fixed numbers."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    y = run(*leaves, *rest)
    weight = cotangents[0][: y.numel()].view(y.shape).clone().requires_grad_()
    first = torch.autograd.grad(y, leaves, weight, create_graph=True)
    total = sum((g * c[: g.numel()].view(g.shape)).sum() for g, c in zip(first, cotangents[1:], strict=False))
    second = torch.autograd.grad(total, [*leaves, weight], allow_unused=True, materialize_grads=True)
    return [y, *first, *second]


@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivatives_equal_those_of_the_plain_form(name, randn):
    fast, plain, arguments, rest = parts(randn)[name]
    cotangents = [randn(200) for _ in range(3)]
    for i, (one, other) in enumerate(zip(*(derivatives(run, arguments, rest, cotangents) for run in (fast, plain)), strict=True)):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING, msg=lambda m, i=i: f"tensor {i}: {m}")


@pytest.mark.parametrize("name", [name for name in NAMES if "nothing" not in name])
def test_finite_differences_agree_in_both_orders(name, randn):
    fast, _, arguments, rest = parts(randn)[name]
    leaves = tuple(x.detach().clone().requires_grad_() for x in arguments)
    assert gradcheck(lambda *xs: fast(*xs, *rest), leaves)
    assert gradgradcheck(lambda *xs: fast(*xs, *rest), leaves)


@pytest.mark.parametrize("only", [0, 1])
def test_a_norm_is_differentiated_twice_in_one_of_its_arguments(only, randn):
    fast, plain, arguments, _ = parts(randn)["rms_norm"]
    found = []
    for run in (fast, plain):
        leaves = [x.detach().clone().requires_grad_(i == only) for i, x in enumerate(arguments)]
        (first,) = torch.autograd.grad(run(*leaves).sin().sum(), leaves[only], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves[only])[0])
    torch.testing.assert_close(*found, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "cross_entropy"])
def test_a_third_derivative_is_refused(name, randn):
    fast, _, arguments, rest = parts(randn)[name]
    x = arguments[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(fast(x, *arguments[1:], *rest).square().sum(), x, create_graph=True)
    with pytest.raises(OrderError, match=f"`{name}` has a first and a second derivative, and a third was asked for"):
        torch.autograd.grad(first.square().sum(), x, create_graph=True)


def test_a_rotation_is_linear_in_every_order(randn):
    fast, _, (x,), rest = parts(randn)["rotate"]
    y = x.clone().requires_grad_()
    for _ in range(3):
        (slope,) = torch.autograd.grad(fast(y, *rest).pow(4).sum(), y, create_graph=True)
        y = slope
    assert slope.isfinite().all()
    torch.testing.assert_close(fast(fast(x, *rest), rest[0], -rest[1]), x, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.plain
def test_shapes_that_do_not_fit_are_refused(randn):
    with pytest.raises(ShapeError, match="`weight` has shape"):
        rms_norm(randn(2, 3), randn(4), epsilon=1e-6)
    with pytest.raises(ShapeError, match="`ids` has shape"):
        cross_entropy(randn(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ShapeError, match="has no two halves"):
        swiglu(randn(2, 3))
