"""The delta rule: two forms of one function, against a loop of plain numbers, known values and each other."""

import itertools
import math

import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import ShapeError, SpecError
from graven.ops.delta import delta
from graven.ops.gated_linear import gated_linear

FORMS = ["recurrent", "chunk"]
CHUNK = 4
LENGTHS = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 11]
# float64; a correction feeds every later one, so errors pile up along T, and T times more of them meet in each derivative
VALUE, FIRST, SECOND = 1e-12, 1e-11, 1e-10
B, H, K, V = 2, 3, 4, 5


def drawn(randn, length, *, gated=True, strength=1.0):
    """Arguments with unit keys and rates between 0 and 2, all of them leaves."""
    inputs = {name: randn(B, length, H, width) for name, width in (("q", K), ("k", K), ("v", V))}
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs |= {"beta": 2 * torch.sigmoid(randn(B, length, H)), "state": randn(B, H, K, V)}
    if gated:
        inputs["log_gate"] = -strength * randn(B, length, H).abs()
    return {name: x.requires_grad_() for name, x in inputs.items()}


def loop(q, k, v, *, beta, log_gate, state, scale):
    """The equations entry by entry, in Python's floats; for one row and one head."""
    s, keys, values, reads = [row[:] for row in state], len(k[0]), len(v[0]), []
    for t in range(len(q)):
        s = [[math.exp(log_gate[t]) * entry for entry in row] for row in s]
        wrong = [v[t][j] - sum(s[i][j] * k[t][i] for i in range(keys)) for j in range(values)]
        s = [[s[i][j] + beta[t] * k[t][i] * wrong[j] for j in range(values)] for i in range(keys)]
        reads.append([scale * sum(q[t][i] * s[i][j] for i in range(keys)) for j in range(values)])
    return reads, s


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_recurrence_in_plain_numbers(randn, form):
    x = {name: value.detach() for name, value in drawn(randn, 7).items()}
    o, end = delta(**x, scale=0.7, form=form, chunk=CHUNK)
    for b, h in itertools.product(range(B), range(H)):
        row = {name: (value[b, h] if name == "state" else value[b, :, h]).tolist() for name, value in x.items()}
        found = [torch.tensor(part, dtype=torch.float64) for part in loop(**row, scale=0.7)]
        assert_near([o[b, :, h], end[b, h]], found, tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [None, 0.5])
def test_two_steps_are_those_worked_out_by_hand(form, gate):
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 2) for x in ([1, 0, 0.6, 0.8], [0.6, 0.8, 1, 0], [1, 2, 0, 1]))
    log_gate = None if gate is None else torch.full((1, 2, 1), math.log(gate), dtype=torch.float64)
    o, end = delta(q, k, v, beta=torch.tensor([[[0.5], [1.0]]], dtype=torch.float64), log_gate=log_gate, form=form)
    reads, state = ([0.3, 0.6, 0.32, 1.24], [0, 1, 0.4, 0.8]) if gate is None else ([0.3, 0.6, 0.16, 0.92], [0, 1, 0.2, 0.4])
    assert_near([o.flatten(), end.flatten()], [torch.tensor(x, dtype=torch.float64) for x in (reads, state)], tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("beta", "weights"), [(1.0, (0.0, 1.0)), (2.0, (-1.0, 2.0))])
def test_a_key_that_is_written_twice_holds_the_last_value_at_rate_one_and_overshoots_at_two(randn, form, beta, weights):
    k, v = torch.nn.functional.normalize(randn(1, 1, 1, K), dim=-1).expand(1, 2, 1, K), randn(1, 2, 1, V)
    held = (k[0, 0, 0, :, None] * v[0, 0, 0])[None, None]  # the first value is there already: the first write changes nothing
    o, _ = delta(k, k, v, beta=torch.full((1, 2, 1), beta, dtype=torch.float64), state=held, form=form)
    assert_near([o[0, 1, 0]], [weights[0] * v[0, 0, 0] + weights[1] * v[0, 1, 0]], tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_orthonormal_keys_hold_their_values_exactly(randn, form):
    k = torch.linalg.qr(randn(K, K)).Q[None, :, None]
    v = randn(1, K, 1, V)
    _, end = delta(k, k, v, beta=torch.ones(1, K, 1, dtype=torch.float64), form=form, chunk=3)
    assert_near([k[0, :, 0] @ end[0, 0]], [v[0, :, 0]], tolerance=VALUE)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_chunks_agree_with_the_recurrence_in_value_first_and_second_derivative(randn, length, gated):
    x = drawn(randn, length, gated=gated)
    direction = [randn(*value.shape) for value in x.values()]
    weights = randn(B, length, H, V), randn(B, H, K, V)
    found, wanted = (derivatives(x, direction, weights, form=form) for form in ("chunk", "recurrent"))
    for part, other, tolerance in zip(found, wanted, (VALUE, FIRST, SECOND), strict=True):
        assert_near(part, other, tolerance=tolerance)


def derivatives(x, direction, weights, *, form):
    """Outputs, gradient of a nonlinear scalar of them, and the Hessian of that scalar times a direction."""
    unused = {"allow_unused": True, "materialize_grads": True}  # at T = 0 the state is all there is
    outputs = delta(**x, form=form, chunk=CHUNK)
    loss = sum((o.sin() * w).sum() for o, w in zip(outputs, weights, strict=True))
    first = torch.autograd.grad(loss, list(x.values()), create_graph=True, **unused)
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, direction, strict=True)), list(x.values()), **unused)
    return outputs, first, second


def test_derivatives_of_the_definition_are_those_of_finite_differences(randn):
    x = {name: value[:1, :, :1] if name != "state" else value[:1, :1, :2] for name, value in drawn(randn, 2).items()}
    x = {name: value[..., :2] if name not in ("beta", "log_gate") else value for name, value in x.items()}
    inputs = [value.detach().clone().requires_grad_() for value in x.values()]

    def run(*values):
        return delta(**dict(zip(x, values, strict=True)), form="recurrent")

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("chunk", [1, 2, 5, 29, 1000])
def test_the_chunk_size_changes_nothing(randn, chunk):
    x = drawn(randn, 29)
    assert_near(delta(**x, chunk=chunk), delta(**x, form="recurrent"), tolerance=29 * VALUE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [0, 1, 5, 8, 11])
def test_writing_in_two_parts_is_writing_once(randn, form, at):
    x = drawn(randn, 11)
    state = x.pop("state")
    whole, reads = delta(**x, state=state, form=form, chunk=CHUNK), []
    for part in (slice(None, at), slice(at, None)):
        o, state = delta(**{name: value[:, part] for name, value in x.items()}, state=state, form=form, chunk=CHUNK)
        reads.append(o)
    assert_near([torch.cat(reads, 1), state], whole, tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_rate_nothing_and_open_gate_keeps_the_state_bit_for_bit(randn, form):
    x = drawn(randn, 6) | {"beta": torch.zeros(B, 6, H), "log_gate": torch.zeros(B, 6, H)}
    assert torch.equal(delta(**x, form=form, chunk=CHUNK)[1], x["state"])


@pytest.mark.parametrize("form", FORMS)
def test_gates_that_close_and_gates_beyond_the_range_of_the_exponential_are_exact(randn, form):
    """A quotient of cumulated gates is NaN for either: exp(-16 * 100) underflows, and minus infinity cancels nothing."""
    x = drawn(randn, 16, strength=100.0)
    with torch.no_grad():
        x["log_gate"][:, 5] = -math.inf
    o, end = delta(**x, form=form)
    later = {name: value[:, 5:] for name, value in x.items() if name != "state"}
    fresh, again = delta(**later, form="recurrent")
    assert_near([o[:, 5:], end], [fresh, again], tolerance=16 * VALUE)
    gradients = torch.autograd.grad(o.sum(), list(x.values()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("form", FORMS)
def test_orthogonal_keys_without_overlap_make_it_gated_linear_attention(randn, form):
    """Nothing is there to correct, so at rate 1 both operations write the same."""
    x = {name: value.detach() for name, value in drawn(randn, K).items() if name != "state"}
    x["k"] = torch.linalg.qr(randn(B, H, K, K)).Q.permute(0, 2, 1, 3)
    x["beta"] = torch.ones_like(x["beta"])
    other = gated_linear(x["q"], x["k"], x["v"], log_gate_k=x["log_gate"][..., None])
    assert_near(delta(**x, form=form, chunk=CHUNK), other, tolerance=VALUE)


def test_half_precision_is_computed_in_float32_and_the_state_stays_there(randn):
    x = {name: value.detach().bfloat16() for name, value in drawn(randn, 5).items() if name != "state"}
    o, end = delta(**x)
    assert (o.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    exact, state = delta(**{name: value.float() for name, value in x.items()})
    assert_near([o, end], [exact.bfloat16(), state], tolerance=1e-6)


def test_a_scale_is_applied_in_the_digits_of_the_sums(randn):
    x = {name: value.detach().float() for name, value in drawn(randn, 5).items() if name != "state"}
    x["q"] = x["q"].bfloat16()
    wanted = delta(**{**x, "q": x["q"].float()}, scale=0.3)
    assert_near(delta(**x, scale=0.3), wanted, tolerance=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_the_state_keeps_all_its_digits(randn, form):
    x = {name: value.detach().float() for name, value in drawn(randn, 9).items()}
    plain = delta(**x, form=form, chunk=CHUNK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = delta(**x, form=form, chunk=CHUNK)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.plain
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"beta": torch.ones(B, 3, H, 1)}, ShapeError, r"`beta` has shape \(2, 3, 3, 1\)"),
        ({"log_gate": torch.zeros(B, 3, H + 1)}, ShapeError, r"axis 2 is 4 and \[B=2, T=3, H=3\]"),
        ({"log_gate": torch.full((B, 3, H), 0.5)}, SpecError, r"`log_gate` is 0.5 at B=0, T=0, H=0"),
        ({"state": torch.zeros(B, H, K, V, dtype=torch.bfloat16)}, SpecError, "`state` is torch.bfloat16"),
        ({"chunk": 0}, SpecError, "`chunk` is 0"),
        ({"form": "scan"}, SpecError, "`form` is 'scan'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(randn, change, error, words):
    assert_refused(error, words, lambda: delta(**drawn(randn, 3) | change))
