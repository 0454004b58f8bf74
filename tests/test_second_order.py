"""The guard, on the smallest mixed loss, where the right answer is 13 and a backward that is cut off gives 1."""

import pytest
import torch
import zoo
from asserts import assert_refused
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from graven.errors import OrderError
from graven.ops.attention import attention
from graven.ops.second_order import check_twice_differentiable


class Cube(Function):
    """x^3, rightly."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, d_y):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * d_y


class Detached(Cube):
    twice_differentiable = False

    @staticmethod
    def backward(ctx, d_y):
        (x,) = ctx.saved_tensors
        return 3 * x.detach() ** 2 * d_y


class Once(Cube):
    twice_differentiable = False

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * d_y


class Unmarked(Function):
    forward, backward = Cube.forward, Cube.backward


def mixed(cube, x, *, guarded=True):
    """The derivative of x + f'."""
    y = cube(x)
    if guarded:
        check_twice_differentiable(y, [x])
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(x + slope, x)[0].item()


@pytest.fixture
def two():
    return torch.tensor(2.0, requires_grad=True)


@pytest.mark.parametrize("cube", [lambda x: x**3, Cube.apply, lambda x: torch.utils.checkpoint.checkpoint(lambda z: z**3, x, use_reentrant=False)])
def test_what_can_be_differentiated_twice_passes(cube, two):
    assert mixed(cube, two) == 13.0


@pytest.mark.parametrize("function", [Detached, Once])
def test_what_would_be_dropped_is_refused(function, two):
    assert mixed(function.apply, two, guarded=False) == 1.0
    assert_refused(OrderError, rf"test_second_order\.{function.__name__}, whose backward", lambda: mixed(function.apply, two))


def test_what_says_nothing_of_itself_is_refused(two):
    assert_refused(OrderError, "Unmarked", lambda: mixed(Unmarked.apply, two))


def test_only_what_lies_between_is_looked_at(two):
    weight = Once.apply(torch.tensor(1.5, requires_grad=True))
    middle = Once.apply(two) + 1
    assert mixed(lambda x: weight * x**3, two) == 1 + 12 * weight.item()
    check_twice_differentiable(middle**2, [middle])
    check_twice_differentiable(middle.detach() ** 2, [middle])
    assert_refused(OrderError, "Once", lambda: check_twice_differentiable(middle**2, [middle, two]))


def test_a_graph_of_many_paths_is_walked_once(two):
    y = two
    for _ in range(2000):  # 2^2000 paths
        y = y * 0.5 + y * 0.5
    check_twice_differentiable(y, [two])


def test_attention_passes_and_its_gradient_does_not(randn):
    q, k, v = (randn(1, 2, 3, 4).requires_grad_() for _ in range(3))
    out = attention(q, k, v)
    check_twice_differentiable(out, [q, k, v])
    gradient = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    assert_refused(OrderError, "_Gradient", lambda: check_twice_differentiable(gradient, [q]))


def test_a_library_operation_of_its_own_is_refused(two):
    @torch.library.custom_op("graven_tests::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    def keep(ctx, inputs, output):  # noqa: ARG001
        ctx.x = inputs[0].detach()

    cube.register_autograd(lambda ctx, d_y: 3 * ctx.x**2 * d_y, setup_context=keep)
    assert mixed(cube, two, guarded=False) == 1.0
    assert_refused(OrderError, "second derivative", lambda: mixed(cube, two))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "gemma2", "jamba", "gpt-oss"])
def test_models_of_transformers_pass_until_a_bad_function_stands_in_one(name):
    model = zoo.architecture(name, attention="eager")
    x = model.get_input_embeddings()(torch.arange(5)[None]).detach().requires_grad_()
    check_twice_differentiable(model(inputs_embeds=x).logits.sum(), [x])
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: Once.apply(logits))
    assert_refused(OrderError, "Once", lambda: check_twice_differentiable(model(inputs_embeds=x).logits.sum(), [x]))
