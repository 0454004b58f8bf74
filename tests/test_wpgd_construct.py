"""Constructed layers against the algorithm of graven/theory, in float64, over random shapes."""

import numpy as np
import pytest
import torch
from asserts import assert_refused

from graven.construct.wpgd import delimiter_gates, gate_weight_for, scalar_weighted_layer, step_layer, step_stack, vector_weighted_layer
from graven.errors import ShapeError, SpecError
from graven.layers.gated_linear import GatedLinear, GatedLinearSpec
from graven.tasks.multitask import Multitask
from graven.theory.descent import gradient_step, gradient_steps, weights_of_gates
from graven.theory.wpgd import optimum, scalar_gate_optimum

EXACT = 1e-12
GATES = ["none", "scalar", "key", "value", "matrix"]
SHAPES = [(1, 1, 0), (1, 4, 2), (2, 1, 0), (3, 7, 1), (5, 12, 3), (4, 70, 0)]  # features, examples, extra entries of a token


def prompt(randn, features, examples, extra):
    """Tokens [x; y; c] of examples and a query, whose y is 0; and the parts in numpy."""
    tokens = randn(1, examples + 1, features + 1 + extra)
    tokens[:, -1, features] = 0.0
    x, y = tokens[0, :, :features].numpy(), tokens[0, :-1, features].numpy()
    return tokens, x[:-1], y, x[-1]


def gate_values(layer, tokens):
    """Gates of every step as [T, value axis, key axis]: the paper's G_i, straight from the weights of the layer."""
    width = layer.spec.width
    if layer.gate is None:
        return np.ones((tokens.shape[1], width, width))
    g = 1 / (1 + np.exp(-(tokens[0] @ layer.gate.weight.T).detach().numpy()))
    kind = layer.spec.gate
    if kind == "matrix":
        return g.reshape(-1, width, width).transpose(0, 2, 1)
    return np.broadcast_to(g[:, :, None] if kind == "value" else g[:, None, :], (len(g), width, width))


def drawn(randn, features, extra, gate, *, steps=1):
    """P_k, P_q and the gate's weights of every step."""
    width = features + 1 + extra
    count = GatedLinearSpec(width=width, key_width=width, value_width=width, gate=gate).gates
    keys, queries = (randn(steps, features, features) / features for _ in range(2))
    return keys, queries, randn(steps, count, width) if count else None


def assert_exact(found, wanted):
    error = np.abs(np.asarray(found) - np.asarray(wanted)).max()
    assert error <= EXACT * max(1.0, np.abs(wanted).max()), error


def test_assert_exact_fails_on_other_numbers():
    with pytest.raises(AssertionError):
        assert_exact([1.0], [1.0 + 1e-11])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_layer_takes_the_step_of_theorem_1(randn, shape, gate):
    features, _, extra = shape
    tokens, x, y, query = prompt(randn, *shape)
    (key,), (last,), weight = drawn(randn, features, extra, gate)
    layer = step_layer(key=key, query=last, extra=extra, gate=gate, gate_weight=None if weight is None else weight[0])
    omega = weights_of_gates(gate_values(layer, tokens)[:, features, :features])
    beta = gradient_step(x, y, key=key.numpy(), query=last.numpy(), weights=omega)
    assert_exact(layer(tokens)[0, -1, features].detach(), query @ beta)


def test_only_one_row_of_every_gate_counts_in_construction_1(randn):
    """Without its last entry: K of the (K + 1)^2 gates."""
    tokens, *_ = prompt(randn, 3, 6, 0)
    (key,), (last,), weight = drawn(randn, 3, 0, "matrix")
    layer = step_layer(key=key, query=last, gate="matrix", gate_weight=weight[0])
    layer(tokens)[0, -1, 3].backward()
    counts = layer.gate.weight.grad.reshape(4, 4, 4).abs().sum(-1).T > 0  # [value axis, key axis]
    assert counts.tolist() == [[False] * 4] * 3 + [[True] * 3 + [False]]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_construction_2_takes_one_step_a_row_and_the_head_joins_their_weights(randn, shape, gate):
    """Equations 29 to 31."""
    features, _, extra = shape
    tokens, x, y, query = prompt(randn, *shape)
    (key,), (last,), weight = drawn(randn, features, extra, gate)
    values, head = randn(features + 1 + extra), randn(features + 1 + extra)
    layer = step_layer(key=key, query=last, extra=extra, values=values, gate=gate, gate_weight=None if weight is None else weight[0])
    found, gates = layer(tokens)[0, -1].detach(), gate_values(layer, tokens)
    rows = [u * weights_of_gates(gates[:, j, :features]) for j, u in enumerate(values.numpy())]
    steps = [query @ gradient_step(x, y, key=key.numpy(), query=last.numpy(), weights=row) for row in rows]
    assert_exact(found, steps)
    joined = sum(h * row for h, row in zip(head.numpy(), rows, strict=True))
    assert_exact((found @ head).item(), query @ gradient_step(x, y, key=key.numpy(), query=last.numpy(), weights=joined))


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", [(1, 3, 0), (3, 7, 1), (4, 20, 2)])
def test_a_stack_takes_the_steps_of_theorem_2(randn, shape, gate, layers):
    """Gates read x and the context only, and so are the same numbers for a token in all layers that share their weights."""
    features, examples, extra = shape
    tokens, x, y, query = prompt(randn, *shape)
    keys, queries, weights = drawn(randn, features, extra, gate, steps=layers)
    if weights is not None:
        weights[:, :, features] = 0.0
    stack = step_stack(keys=keys / examples, queries=queries, extra=extra, gate=gate, gate_weights=weights)
    gates = np.array([gate_values(layer, tokens)[:, features, :features] for layer in stack.layers])
    wanted = gradient_steps(x, y, query, keys=keys.numpy() / examples, queries=queries.numpy(), gates=gates)
    for count in range(1, layers + 1):
        z = tokens
        for layer in stack.layers[:count]:
            z = z + layer(z)
        assert_exact(z[0, :-1, features].detach(), wanted.residuals[count - 1])
        assert_exact(z[0, -1, features].detach(), -wanted.predictions[count - 1])
    assert torch.equal(z, stack(tokens))
    assert torch.equal(z[..., :features], tokens[..., :features])


def test_gates_that_read_labels_differ_from_layer_to_layer(randn):
    """The extension that the text of theorem 2 allows: every layer has the gates of the labels that it sees."""
    tokens, x, y, query = prompt(randn, 2, 5, 0)
    keys, queries, weights = drawn(randn, 2, 0, "scalar", steps=3)
    stack = step_stack(keys=keys, queries=queries, gate="scalar", gate_weights=weights)
    z, gates = tokens, []
    for layer in stack.layers:
        gates.append(gate_values(layer, z)[:, 2, :2])
        z = z + layer(z)
    wanted = gradient_steps(x, y, query, keys=keys.numpy(), queries=queries.numpy(), gates=np.array(gates))
    assert_exact(z[0, -1, 2].detach(), -wanted.predictions[-1])


def delimited(generator, *, examples, features, width, size=3):
    """Prompts with delimiters, their marks, and P_k and P_q."""
    tasks = len(examples)
    task = Multitask(dimension=features, examples=examples, query_correlations=(0.5,) * tasks if tasks < 4 else (0.2,) * tasks, features=width)
    marks = task.marks(generator=generator)
    prompts = task.sample(size, generator=generator, marks=marks, dtype=torch.float64)
    key, query = (torch.randn(features, features, generator=generator, dtype=torch.float64) for _ in range(2))
    return prompts, marks, key, query


def assert_weighs(prompts, predictions, weights, examples, *, key, query):
    """Predictions are those of the step with these task weights."""
    each = np.repeat(weights.numpy(), examples)[:, None] * np.ones((1, prompts.dimension))
    for row, found in enumerate(predictions):
        x, y, last = (part[row].numpy() for part in (prompts.features, prompts.labels, prompts.query))
        assert_exact(found.item(), last @ gradient_step(x, y, key=key.numpy(), query=query.numpy(), weights=each))


@pytest.mark.parametrize(
    ("examples", "weights"),
    [((4,), [0.7]), ((3, 5), [0.2, 1.0]), ((2, 3, 4), [0.0, 0.0, 0.6]), ((2, 3, 4), [0.1, 0.25, 0.5]), ((20, 1, 30, 2), [0.0, 0.3, 0.3, 1.0])],
)
def test_a_scalar_gate_gives_tasks_any_weights_that_never_fall(generator, examples, weights):
    """Theorem 5. Three tasks with three different weights is where the gates printed in its proof go wrong."""
    weights = torch.tensor(weights, dtype=torch.float64)
    prompts, marks, key, query = delimited(generator, examples=examples, features=3, width=len(examples) + 1)
    layer = scalar_weighted_layer(weights, marks=marks, key=key, query=query)
    assert_weighs(prompts, layer(prompts.tokens)[:, -1, 3].detach(), weights, examples, key=key, query=query)


@pytest.mark.parametrize(
    ("examples", "weights"),
    [((4,), [-0.7]), ((3, 5), [0.8, 0.2]), ((2, 3, 4), [1.0, -2.0, 0.6]), ((20, 1, 30, 2), [0.0, 3.0, -0.3, 0.0])],
)
def test_a_vector_gate_and_a_head_give_tasks_any_weights(generator, examples, weights):
    """Theorem 6."""
    weights = torch.tensor(weights, dtype=torch.float64)
    prompts, marks, key, query = delimited(generator, examples=examples, features=3, width=len(examples) + 2)
    layer, head = vector_weighted_layer(weights, marks=marks, key=key, query=query)
    assert_weighs(prompts, (layer(prompts.tokens)[:, -1] @ head).detach(), weights, examples, key=key, query=query)


@pytest.mark.parametrize(("correlations", "kind"), [((0.2, 0.8), "scalar"), ((0.8, 0.2), "scalar"), ((0.8, 0.2), "vector")])
def test_a_constructed_layer_has_the_risk_of_its_closed_form(generator, correlations, kind):
    """On 20 000 prompts, within 3 standard errors: theory, construction, layer and task agree end to end."""
    task = Multitask(dimension=4, examples=(6, 6), query_correlations=correlations, features=3)
    marks = task.marks(generator=generator)
    prompts = task.sample(20_000, generator=generator, marks=marks, dtype=torch.float64)
    if kind == "scalar":
        best = scalar_gate_optimum(examples=[6, 6], correlations=list(correlations), dimension=4, noise_variance=0.0)
    else:
        among, with_query = task.example_correlations
        best = optimum(covariance=np.eye(4), task_correlation=among, query_correlation=with_query, noise_variance=0.0)
    weights, query = torch.from_numpy(best.weights[[0, -1]]), torch.from_numpy(best.preconditioner)
    identity = torch.eye(4, dtype=torch.float64)
    if kind == "scalar":
        found = scalar_weighted_layer(weights.clamp(0, 1), marks=marks, key=identity, query=query)(prompts.tokens)[:, -1, 4]
    else:
        layer, head = vector_weighted_layer(weights, marks=marks, key=identity, query=query)
        found = layer(prompts.tokens)[:, -1] @ head
    errors = (found.detach() - prompts.target).square()
    assert abs(errors.mean().item() - best.risk) < 3 * errors.std().item() / len(errors) ** 0.5


def test_the_gates_printed_in_the_proof_of_theorem_5_give_three_tasks_other_weights():
    """Erratum: w_k over the product of all later weights."""
    weights = torch.tensor([0.125, 0.25, 0.5])
    printed = torch.stack([weights[k] / weights[k + 1 :].prod() for k in range(3)])
    assert not torch.allclose(torch.stack([printed[k:].prod() for k in range(3)]), weights)
    ours = delimiter_gates(weights)
    assert torch.allclose(torch.stack([ours[k:].prod() for k in range(3)]), weights)


ONES = torch.eye(3, dtype=torch.float64)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (SpecError, r"`weights` is \[0.8, 0.2\]; scalar gates reach", lambda: delimiter_gates(torch.tensor([0.8, 0.2]))),
        (SpecError, r"`weights` is \[0.2, 1.2\]", lambda: delimiter_gates(torch.tensor([0.2, 1.2]))),
        (SpecError, "`gates` reach from 0.5 to 1.5", lambda: gate_weight_for(torch.tensor([[0.5, 1.5, 1.0]]).double(), marks=ONES, features=2)),
        (SpecError, "`marks` has 3 rows of rank 1", lambda: gate_weight_for(ONES[:1], marks=torch.ones(3, 5).double(), features=2)),
        (ShapeError, "`marks` has shape .* axis 0 is 3 and", lambda: gate_weight_for(ONES[:1, :2], marks=ONES, features=2)),
        (SpecError, "`gate` is 'scalar' and `gate_weight` is missing", lambda: step_layer(key=ONES, query=ONES, gate="scalar")),
        (SpecError, "`gate` is 'none' and `gate_weight` is given", lambda: step_layer(key=ONES, query=ONES, gate_weight=torch.ones(1, 4).double())),
        (ShapeError, "`query` has shape", lambda: step_layer(key=ONES, query=ONES[:2])),
        (ShapeError, "`gate_weight` has shape", lambda: step_layer(key=ONES, query=ONES, gate="value", gate_weight=ONES)),
    ],
)
def test_what_cannot_be_built_is_one_sentence(error, words, call):
    assert_refused(error, words, call)


def test_a_step_layer_is_a_plain_layer():
    assert type(step_layer(key=ONES, query=ONES)) is GatedLinear
