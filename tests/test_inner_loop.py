"""The reverse sweep against the same steps unrolled, in float64; and what it refuses."""

import weakref

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

from graven.errors import OrderError, ShapeError, SpecError
from graven.ops.inner_loop import descend

ROUNDING = 1e-12  # float64: the same sums in another order
SINGLE = 2e-5  # float32, of the largest entry of each gradient
ROWS, WIDTH, DATA = 5, 3, 4


def sgd(_, variables, gradients, carried):
    return tuple(x - 0.3 * g for x, g in zip(variables, gradients, strict=True)), carried


def clipped(_, variables, gradients, carried):
    return tuple(x - 0.3 * g * (0.05 / g.norm(dim=1, keepdim=True).clamp(min=0.05)) for x, g in zip(variables, gradients, strict=True)), carried


def settling(k, variables, gradients, carried):
    return tuple(x - 0.3 * 0.5**k * g for x, g in zip(variables, gradients, strict=True)), carried


def adam(k, variables, gradients, carried):
    (x,), (g,), (first, second) = variables, gradients, carried
    first, second = first.lerp(g, 0.1), second.lerp(g * g, 0.05)
    return (x - 0.1 * (first / (1 - 0.9 ** (k + 1))) / (second / (1 - 0.95 ** (k + 1)) + 1e-8).sqrt(),), (first, second)


def slope_only(_, __, gradients, carried):
    return gradients, carried


def shorter(_, __, gradients, carried):
    return (gradients[0][:1],), carried


class Problem:
    """Rows of a small network's loss, with a learned rate, data that need a gradient, and tied weights."""

    def __init__(self, randn):
        self.weights = [
            randn(WIDTH, 7).requires_grad_(),
            randn(7, DATA).requires_grad_(),
            torch.full((WIDTH,), 0.2, dtype=torch.float64, requires_grad=True),
        ]
        self.start, self.data, self.labels = randn(ROWS, WIDTH).requires_grad_(), randn(ROWS, DATA).requires_grad_(), torch.arange(ROWS) % DATA
        self.moments = (randn(ROWS, WIDTH).requires_grad_(), randn(ROWS, WIDTH).square().requires_grad_())

    def loss(self, variables, inputs):
        data, labels = inputs
        logits = torch.tanh(variables[0] @ self.weights[0]) @ self.weights[1] + data * (variables[0] @ self.weights[0])[:, :DATA]
        return F.cross_entropy(logits, labels, reduction="none")

    def learned(self, _, variables, gradients, carried):
        return (variables[0] - self.weights[2] * gradients[0],), carried

    def leaves(self):
        return [self.start, self.data, *self.weights, *self.moments]


def unrolled(start, loss, update, *, steps, inputs=(), carried=(), second=None):
    """The definition: every step in one graph."""
    variables = tuple(start)
    for k in range(steps):
        gradients = torch.autograd.grad(loss(variables, inputs).sum(), variables, create_graph=True)
        if second is not None and k < steps - second:
            gradients = tuple(g.detach() for g in gradients)
        variables, carried = update(k, variables, gradients, carried)
    return variables, carried


def outer(ends, leaves):
    """An outer loss of everything that came out, and its gradients."""
    loss = sum((i + 1) * (x.sin() * torch.arange(x.numel(), dtype=x.dtype).view(x.shape)).sum() for i, x in enumerate((*ends[0], *ends[1])))
    return [loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def assert_same(got, expected, tolerance=ROUNDING):
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, msg=lambda m, i=i: f"tensor {i}: {m}")


UPDATES = {"sgd": sgd, "clipped": clipped, "settling": settling, "adam": adam, "learned": None}


def both(problem, name, *, steps, second=None, **options):
    """Value and gradients of the sweep and of the unrolled form."""
    update, carried = UPDATES[name] or problem.learned, problem.moments if name == "adam" else ()
    inputs = (problem.data, problem.labels)
    got = descend(
        (problem.start,), problem.loss, update, steps=steps, parameters=problem.weights, inputs=inputs, carried=carried, second=second, **options
    )
    expected = unrolled((problem.start,), problem.loss, update, steps=steps, inputs=inputs, carried=carried, second=second)
    return outer(got, problem.leaves()), outer(expected, problem.leaves())


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("name", UPDATES)
def test_the_sweep_equals_the_unrolled_steps(name, steps, randn):
    assert_same(*both(Problem(randn), name, steps=steps))


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("second", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("keep", [0, 1, 2, 9])
@pytest.mark.parametrize("rows", [None, 1, 2, ROWS])
def test_truncation_kept_graphs_and_parts_of_a_batch_equal_the_unrolled_steps(rows, keep, second, name, randn):
    assert_same(*both(Problem(randn), name, steps=3, second=second, keep=keep, rows=rows))


def test_first_and_second_order_differ(randn):
    problem = Problem(randn)
    first, second = (both(problem, "sgd", steps=3, second=order)[0] for order in (0, None))
    with pytest.raises(AssertionError):
        assert_same(first, second)


def test_float32_stays_within_rounding_of_float64(randn):
    problem = Problem(randn)
    _, expected = both(problem, "learned", steps=5)
    problem.start, problem.data, *problem.weights = (x.detach().float().requires_grad_() for x in (problem.start, problem.data, *problem.weights))
    got, _ = both(problem, "learned", steps=5)
    assert_same([x.double() for x in got], expected, SINGLE)


def test_finite_differences_agree(randn):
    problem = Problem(randn)

    def end(*leaves):
        problem.start, problem.data, *problem.weights = leaves
        return descend((problem.start,), problem.loss, problem.learned, steps=3, parameters=problem.weights, inputs=(problem.data, problem.labels))[
            0
        ][0]

    assert gradcheck(end, problem.leaves()[:5])


def test_several_variables_are_the_weights_of_a_model_that_learns_from_examples(randn):
    """MAML: no parameters beside the variables."""
    start, data = [randn(4, 6).requires_grad_(), randn(6).requires_grad_(), randn(6, 1).requires_grad_()], randn(8, 4)

    def loss(weights, inputs):
        return (torch.tanh(inputs[0] @ weights[0] + weights[1]) @ weights[2]).square().mean()

    got = descend(start, loss, sgd, steps=4, inputs=(data,))
    assert_same(outer(got, start), outer(unrolled(start, loss, sgd, steps=4, inputs=(data,)), start))


def test_a_penalty_on_a_gradient_is_a_step_that_returns_the_gradient(randn):
    weight, x = randn(3, 5).requires_grad_(), randn(2, 3).requires_grad_()

    def loss(variables, _):
        return torch.tanh(variables[0] @ weight).sum()

    (slope,), _ = descend((x,), loss, slope_only, steps=1, parameters=[weight])
    (expected,) = torch.autograd.grad(loss((x,), ()), x, create_graph=True)
    assert_same(torch.autograd.grad(slope.square().sum(), (weight, x)), torch.autograd.grad(expected.square().sum(), (weight, x)))


# Rules


def test_a_leaf_that_is_left_out_is_refused_in_the_loss_and_in_the_update(randn):
    problem = Problem(randn)
    for left_out in range(3):
        weights = [weight for i, weight in enumerate(problem.weights) if i != left_out]
        for keep in (0, 1):
            with pytest.raises(SpecError, match=r"not in `parameters`: its second-order"):  # noqa: PT012 - at once, or where the graph is first made
                (end,), _ = descend(
                    (problem.start,), problem.loss, problem.learned, steps=2, parameters=weights, inputs=(problem.data, problem.labels), keep=keep
                )
                end.sum().backward()


def test_first_order_asks_for_the_leaves_of_the_update_alone(randn):
    problem = Problem(randn)
    inputs = (problem.data, problem.labels)
    descend((problem.start,), problem.loss, problem.learned, steps=2, parameters=problem.weights[2:], inputs=inputs, second=0)
    with pytest.raises(SpecError, match="not in `parameters`"):
        descend((problem.start,), problem.loss, problem.learned, steps=2, parameters=problem.weights[:2], inputs=inputs, second=0)


def test_a_repeated_parameter_counts_once(randn):
    problem = Problem(randn)
    once = both(problem, "learned", steps=2)[1]
    problem.weights += problem.weights[:2]
    twice = both(problem, "learned", steps=2)[0]
    assert_same(twice[:6], once[:6])


def test_a_parameter_that_is_not_trained_needs_no_gradient_and_gets_none(randn):
    problem = Problem(randn)
    problem.weights[0].requires_grad_(False)
    got = descend((problem.start,), problem.loss, sgd, steps=2, parameters=problem.weights, inputs=(problem.data, problem.labels))
    got[0][0].sum().backward()
    assert problem.weights[0].grad is None
    assert problem.weights[1].grad is not None


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("which", ["weights", "data", "start"])
def test_a_tensor_that_changes_before_the_backward_pass_is_noticed(which, keep, randn):
    problem = Problem(randn)
    (end,), _ = descend((problem.start,), problem.loss, sgd, steps=2, parameters=problem.weights, inputs=(problem.data, problem.labels), keep=keep)
    changed = problem.weights[1] if which == "weights" else getattr(problem, which)
    with torch.no_grad():
        changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.sum().backward()


def test_what_a_loss_draws_is_drawn_again_and_the_generator_of_the_caller_is_left_alone(randn):
    problem = Problem(randn)

    def loss(variables, inputs):
        return problem.loss((F.dropout(variables[0], 0.5),), inputs)

    found = []
    for run in (descend, unrolled):
        torch.manual_seed(7)
        options = {"parameters": problem.weights} if run is descend else {}
        ends = run((problem.start,), loss, problem.learned, steps=3, inputs=(problem.data, problem.labels), **options)
        found.append([*outer(ends, problem.leaves()), torch.rand(1)])
    assert_same(*found)


def test_a_second_derivative_of_the_end_is_refused(randn):
    problem = Problem(randn)
    (end,), _ = descend((problem.start,), problem.loss, sgd, steps=2, parameters=problem.weights, inputs=(problem.data, problem.labels))
    with pytest.raises(OrderError, match="a second was asked for"):
        torch.autograd.grad(end.sum(), problem.start, create_graph=True)


def test_a_backward_pass_can_be_repeated(randn):
    problem = Problem(randn)
    (end,), _ = descend(
        (problem.start,), problem.loss, problem.learned, steps=3, parameters=problem.weights, inputs=(problem.data, problem.labels), second=2
    )
    once, again = (torch.autograd.grad(end.sum(), problem.leaves()[:5], retain_graph=True) for _ in range(2))
    assert_same(once, again)


def test_autocast_is_the_same_in_both_passes(randn):
    problem = Problem(randn)
    problem.start, problem.data, *problem.weights = (x.detach().float().requires_grad_() for x in (problem.start, problem.data, *problem.weights))
    seen = []

    def loss(variables, inputs):
        seen.append((variables[0] @ problem.weights[0]).dtype)
        return problem.loss(variables, inputs)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        (end,), _ = descend((problem.start,), loss, sgd, steps=2, parameters=problem.weights, inputs=(problem.data, problem.labels), keep=0)
    end.sum().backward()
    assert seen == [torch.bfloat16] * 4


def test_without_gradients_nothing_is_kept_and_the_variables_are_left_as_they_are(randn):
    problem = Problem(randn)
    before = problem.start.detach().clone()
    with torch.no_grad():
        (end,), _ = descend((problem.start,), problem.loss, sgd, steps=2, inputs=(problem.data, problem.labels))
    assert not end.requires_grad
    assert torch.equal(problem.start, before)


class Box:
    """A saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_saved(run):
    """Most tensors that are saved for a backward pass at any one time."""
    alive, most = weakref.WeakSet(), 0

    def pack(tensor):
        nonlocal most
        box = Box(tensor)
        alive.add(box)
        most = max(most, len(alive))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        run()
    return most


def test_what_is_saved_does_not_grow_with_the_steps(randn):
    problem, inputs = Problem(randn), lambda: (problem.data, problem.labels)

    def swept(steps):
        descend((problem.start,), problem.loss, sgd, steps=steps, parameters=problem.weights, inputs=inputs())[0][0].sum().backward()

    def definition(steps):
        unrolled((problem.start,), problem.loss, sgd, steps=steps, inputs=inputs())[0][0].sum().backward()

    few, many = (most_saved(lambda k=k: swept(k)) for k in (2, 10))
    assert few == many
    assert most_saved(lambda: definition(10)) > 4 * most_saved(lambda: definition(2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": -1}, "`steps` is -1; it must be at least 0"),
        ({"second": -1}, "`second` is -1; it must be at least 0"),
        ({"keep": -1}, "`keep` is -1; it must be at least 0"),
        ({"rows": 0}, "`rows` is 0; it must be at least 1"),
    ],
)
def test_a_number_out_of_range_is_refused(options, said, randn):
    with pytest.raises(SpecError, match=said):
        descend((randn(2),), lambda v, _: v[0], sgd, **{"steps": 1, **options})


def test_shapes_that_do_not_fit_are_refused(randn):
    with pytest.raises(ShapeError, match=r"`rows` is 1 and the tensors have shapes \[\(2,\), \(3,\)\]"):
        descend((randn(2),), lambda v, _: v[0], sgd, steps=1, inputs=(randn(3),), rows=1)
    with pytest.raises(ShapeError, match=r"`update` returned shapes \[\(1,\)\] for \[\(2,\)\]"):
        descend((randn(2),), lambda v, _: v[0] ** 2, shorter, steps=1)


class Detached(torch.autograd.Function):
    """x^3 with a backward that is a constant to autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0].detach() ** 2


def test_a_loss_whose_second_derivative_could_be_dropped_is_refused():
    x = torch.tensor([2.0], requires_grad=True)
    with pytest.raises(OrderError, match="Detached"):
        descend((x,), lambda v, _: Detached.apply(v[0]), lambda _, v, g, c: ((v[0] - 0.1 * g[0],), c), steps=2)
