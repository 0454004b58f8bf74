"""Gated linear attention: three forms of one function, against a loop of plain Python numbers and against each other."""

import itertools
import math

import pytest
import torch
from asserts import assert_near, assert_refused
from torch import Tensor

from graven.errors import ShapeError, SpecError
from graven.ops.gated_linear import gated_linear, matrix_gated_linear

FAST = ["parallel", "chunk"]
FORMS = ["recurrent", *FAST]
CHUNK = 8
LENGTHS = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 13, 2 * CHUNK, 31]
GATES = ["none", "scalar", "key", "value", "both"]
# float64 sums of at most 31 terms; the first derivative sums T of them, the second T * T
VALUE, FIRST, SECOND = 1e-13, 1e-12, 1e-11
B, H, K, V = 2, 3, 4, 5
UNUSED = {"allow_unused": True, "materialize_grads": True}  # at T = 0 the state is all there is


def drawn(randn, length, gate, *, strength=1.0):
    """q, k, v and the gates of one kind, all of them leaves."""
    gates = {
        "log_gate_k": {"scalar": 1, "key": K, "both": K}.get(gate),
        "log_gate_v": {"value": V, "both": V}.get(gate),
    }
    inputs = {name: randn(B, length, H, width) for name, width in (("q", K), ("k", K), ("v", V))}
    inputs |= {name: -strength * randn(B, length, H, width).abs() for name, width in gates.items() if width}
    inputs["state"] = randn(B, H, K, V)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def loop(q, k, v, *, log_gate_k=None, log_gate_v=None, state=None, reset=None, scale=1.0):
    """The two equations entry by entry, in Python's floats; for one row and one head of a batch that has more."""
    length, keys, values = len(q), len(k[0]), len(v[0])
    s = [[0.0] * values for _ in range(keys)] if state is None else [row[:] for row in state]
    reads = []
    for t in range(length):
        for i, j in itertools.product(range(keys), range(values)):
            gate = 1.0 if log_gate_k is None else math.exp(log_gate_k[t][i])
            gate *= 1.0 if log_gate_v is None else math.exp(log_gate_v[t][j])
            s[i][j] = (0.0 if reset is not None and reset[t] else gate) * s[i][j] + k[t][i] * v[t][j]
        reads.append([scale * sum(q[t][i] * s[i][j] for i in range(keys)) for j in range(values)])
    return reads, s


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 7])
def test_every_form_is_the_recurrence_in_plain_numbers(randn, generator, form, length):
    x = {name: value.detach() for name, value in drawn(randn, length, "both").items()}
    reset = torch.rand(B, length, generator=generator) < 0.3
    o, end = gated_linear(**x, reset=reset, scale=0.7, form=form)
    for b, h in itertools.product(range(B), range(H)):
        row = {name: (value[b, h] if name == "state" else value[b, :, h]).tolist() for name, value in x.items()}
        reads, state = loop(**row, reset=reset[b].tolist(), scale=0.7)
        assert_near([o[b, :, h], end[b, h]], [torch.tensor(reads).double(), torch.tensor(state).double()], tolerance=1e-6)


@pytest.mark.parametrize("form", FAST)
def test_values_of_one_number_decay_too(randn, form):
    q, k, v, a, b = (randn(B, 9, H, 1) for _ in range(5))
    gates = {"log_gate_k": -a.abs(), "log_gate_v": -b.abs()}
    assert_near(gated_linear(q, k, v, **gates, form=form), gated_linear(q, k, v, **gates, form="recurrent"), tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_two_steps_are_those_worked_out_by_hand(form):
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 2) for x in ([1, 0, 0.6, 0.8], [0.6, 0.8, 1, 0], [1, 2, 0, 1]))
    gate = torch.tensor([math.log(0.5), 0.0], dtype=torch.float64).expand(1, 2, 1, 2)
    o, end = gated_linear(q, k, v, log_gate_k=gate, scale=0.5**0.5, form=form)
    wanted = [0.6 * 0.5**0.5, 1.2 * 0.5**0.5, 0.82 * 0.5**0.5, 2.24 * 0.5**0.5], [0.3, 1.6, 0.8, 1.6]
    assert_near([o.flatten(), end.flatten()], [torch.tensor(x, dtype=torch.float64) for x in wanted], tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_the_state_keeps_all_its_digits(randn, form):
    x = {name: value.detach().float() for name, value in drawn(randn, 9, "both").items()}
    plain = gated_linear(**x, form=form, chunk=CHUNK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_linear(**x, form=form, chunk=CHUNK)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FAST)
def test_forms_agree_in_value_first_and_second_derivative(randn, generator, form, length, gate, with_reset):
    x = drawn(randn, length, gate)
    reset = torch.rand(B, length, generator=generator) < 0.2 if with_reset else None
    direction = [randn(*value.shape) for value in x.values()]
    weights = randn(B, length, H, V), randn(B, H, K, V)
    found, wanted = (derivatives(x, direction, weights, reset=reset, form=f) for f in (form, "recurrent"))
    for part, other, tolerance in zip(found, wanted, (VALUE, FIRST, SECOND), strict=True):
        assert_near(part, other, tolerance=tolerance * max(length, 1))


def derivatives(x, direction, weights, **options):
    """Outputs, gradient of a nonlinear scalar of them, and the Hessian of that scalar times a direction."""
    outputs = gated_linear(**x, **options, chunk=CHUNK)
    loss = sum((o.sin() * w).sum() for o, w in zip(outputs, weights, strict=True))
    first = torch.autograd.grad(loss, list(x.values()), create_graph=True, **UNUSED)
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, direction, strict=True)), list(x.values()), **UNUSED)
    return outputs, first, second


def test_derivatives_of_the_definition_are_those_of_finite_differences(randn):
    """The other forms agree with the definition in both derivatives; this holds the definition itself to something outside."""
    q, k, a = randn(1, 3, 1, 2), randn(1, 3, 1, 2), -randn(1, 3, 1, 2).abs()
    v, b, state = randn(1, 3, 1, 2), -randn(1, 3, 1, 2).abs(), randn(1, 1, 2, 2)

    def run(q, k, v, a, b, state):
        return gated_linear(q, k, v, log_gate_k=a, log_gate_v=b, state=state, form="recurrent")

    inputs = [x.requires_grad_() for x in (q, k, v, a, b, state)]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 64, 1000])
def test_the_chunk_size_changes_nothing(randn, chunk):
    x = drawn(randn, 29, "both")
    assert_near(gated_linear(**x, chunk=chunk), gated_linear(**x, form="recurrent"), tolerance=29 * VALUE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [0, 1, 6, 7, 8, 12, 13])
def test_writing_in_two_parts_is_writing_once(randn, generator, form, at):
    x = drawn(randn, 13, "both")
    reset = torch.rand(B, 13, generator=generator) < 0.2
    state = x.pop("state")
    whole = gated_linear(**x, state=state, reset=reset, form=form, chunk=CHUNK)
    reads = []
    for part in (slice(None, at), slice(at, None)):
        o, state = gated_linear(**{n: y[:, part] for n, y in x.items()}, state=state, reset=reset[:, part], form=form, chunk=CHUNK)
        reads.append(o)
    assert_near([torch.cat(reads, 1), state], whole, tolerance=13 * VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_what_comes_later_is_not_read(randn, form):
    x = drawn(randn, 13, "both")
    state = x.pop("state")
    early = gated_linear(**{name: y[:, :9] for name, y in x.items()}, state=state, form=form)[0]
    assert_near([gated_linear(**x, state=state, form=form)[0][:, :9]], [early], tolerance=13 * VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_heads_never_meet(randn, form):
    x = {name: y.detach() for name, y in drawn(randn, 9, "both").items()}
    o, end = gated_linear(**x, form=form)
    for b, h in itertools.product(range(B), range(H)):
        alone = {n: y[b : b + 1, h : h + 1] if n == "state" else y[b : b + 1, :, h : h + 1] for n, y in x.items()}
        assert_near(gated_linear(**alone, form=form), [o[b : b + 1, :, h : h + 1], end[b : b + 1, h : h + 1]], tolerance=9 * VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_the_gate_of_a_step_does_not_decay_what_it_writes(form):
    one = torch.ones(1, 1, 1, 1)
    o, end = gated_linear(one, one, one, log_gate_k=-9 * one, state=one, form=form)
    assert_near([o, end], [1 + one * math.exp(-9)] * 2, tolerance=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_gates_of_one_are_no_gates(randn, form):
    x = drawn(randn, 11, "none")
    open_gates = {"log_gate_k": torch.zeros(B, 11, H, K).double(), "log_gate_v": torch.zeros(B, 11, H, V).double()}
    assert_near(gated_linear(**x, **open_gates, form=form), gated_linear(**x, form=form), tolerance=VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_of_one_number_a_head_is_that_number_on_every_channel(randn, form):
    x = drawn(randn, 11, "scalar")
    wide = x | {"log_gate_k": x["log_gate_k"].expand(-1, -1, -1, K)}
    assert_near(gated_linear(**x, form=form), gated_linear(**wide, form=form), tolerance=11 * VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_forgets_everything_before_it(randn, form):
    x = drawn(randn, 11, "both")
    reset = torch.zeros(B, 11, dtype=torch.bool)
    reset[:, 6] = True
    after = {name: y[:, 6:] for name, y in x.items() if name != "state"}
    o, end = gated_linear(**x, reset=reset, form=form, chunk=4)
    assert_near([o[:, 6:], end], gated_linear(**after, form=form), tolerance=11 * VALUE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["scalar", "key", "value", "both"])
def test_a_log_gate_of_minus_infinity_is_a_gate_of_zero_with_finite_derivatives(randn, generator, form, gate):
    x = drawn(randn, 11, gate)
    for name in ("log_gate_k", "log_gate_v"):
        if name in x:
            shut = torch.rand(x[name].shape, generator=generator) < 0.3
            x[name] = x[name].detach().masked_fill(shut, -math.inf).requires_grad_()
    direction = [randn(*value.shape) for value in x.values()]
    weights = randn(B, 11, H, V), randn(B, H, K, V)
    found, wanted = (derivatives(x, direction, weights, form=f) for f in (form, "recurrent"))
    for part, other in zip(found, wanted, strict=True):
        assert_near(part, other, tolerance=11 * SECOND)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("places", [[0, 1], [11, 12], [3, 7, 8]])
def test_padding_is_the_identity(randn, form, places):
    x = {name: y.detach() for name, y in drawn(randn, 13, "both").items()}
    real = torch.ones(13, dtype=torch.bool)
    real[places] = False
    padded = {name: y if name == "state" else y.masked_fill(~real[:, None, None], 0.0) for name, y in x.items() if name != "q"}
    o, end = gated_linear(x["q"], **padded, form=form, chunk=CHUNK)
    short = {name: y if name == "state" else y[:, real] for name, y in x.items()}
    assert_near([o[:, real], end], gated_linear(**short, form=form, chunk=CHUNK), tolerance=13 * VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_strong_gates_have_finite_gradients(randn, form):
    """The trap: the mask of the parallel form put on after the exponential, which overflows above the diagonal from sums of 88 on."""
    x = {name: y.float().detach().requires_grad_() for name, y in drawn(randn, 64, "both").items()}
    for name in ("log_gate_k", "log_gate_v"):
        x[name] = torch.full_like(x[name], -3.0).requires_grad_()
    o, end = gated_linear(**x, form=form)
    for gradient in torch.autograd.grad(o.sum() + end.sum(), list(x.values())):
        assert torch.isfinite(gradient).all()
    late = torch.cat([torch.full((64,), -3.0), torch.zeros(64)]).cumsum(0).requires_grad_()
    (bad,) = torch.autograd.grad((late[:, None] - late[None, :]).exp().tril().sum(), late)
    assert bad.isnan().any()  # the trap is there to fall into


@pytest.mark.parametrize(("form", "chunk"), [("recurrent", 64), ("parallel", 64), ("chunk", 64), ("chunk", 8192)])
def test_weak_gates_after_thousands_of_strong_ones_are_not_forgotten(form, chunk):
    """The trap: float32 sums from the front of a sequence keep no digits for them."""
    strong, weak = 4096, 64
    log_gate = torch.cat([torch.full((strong,), -50.0), torch.full((weak,), -1e-4)])
    ones = torch.ones(1, strong + weak, 1, 1)
    o, _ = gated_linear(ones, ones, ones, log_gate_k=log_gate[None, :, None, None], form=form, chunk=chunk)
    # behind the strong gates one write is whole, and each weak step adds one: a sum of exp(-1e-4 m)
    expected = sum(math.exp(-1e-4 * m) for m in range(weak + 1))
    assert abs(o[0, -1, 0, 0].item() / expected - 1) < 1e-6
    sums = log_gate.cumsum(0)
    differences = sums[strong + 1 :] - sums[strong:-1]
    assert (differences == 0).float().mean() > 0.9  # the trap is there to fall into


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_accumulated_in_float32(randn, form):
    x = {name: y.bfloat16() for name, y in drawn(randn, 600, "none").items() if name != "state"}
    x["k"] = x["k"].abs()  # sums that grow, which bfloat16 itself stops adding to after some 256 of them
    o, end = gated_linear(**x, form=form)
    exact, exact_end = gated_linear(**{name: y.double() for name, y in x.items()}, form="recurrent")
    assert (o.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    assert_near([o], [exact], tolerance=2**-8)  # the one rounding at the end
    assert_near([end], [exact_end], tolerance=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(randn, form, dtype):
    x = {name: y.to(dtype) for name, y in drawn(randn, 9, "both").items()}
    assert {y.dtype for y in gated_linear(**x, form=form)} == {dtype}


def test_a_float64_state_widens_the_sums_and_not_the_reads(randn):
    x = {name: y.float() for name, y in drawn(randn, 9, "both").items()}
    o, end = gated_linear(**(x | {"state": x["state"].double()}))
    assert (o.dtype, end.dtype) == (torch.float32, torch.float64)


def test_fifty_thousand_tokens_are_finite_with_their_gradients(generator):
    length = 50_000
    q, k, v, gate = (torch.randn(1, length, 1, 4, generator=generator).requires_grad_() for _ in range(4))
    log_gate = torch.where(torch.rand(1, length, 1, 1, generator=generator) < 0.5, -20.0, -1e-3) * gate.abs()
    o, end = gated_linear(q, k, v, log_gate_k=log_gate)
    gradients = torch.autograd.grad(o.square().sum() + end.sum(), [q, k, v, gate])
    assert all(torch.isfinite(y).all() for y in (o, end, *gradients))


def test_a_matrix_gate_that_is_a_product_of_vectors_is_two_gates(randn):
    x = drawn(randn, 13, "both")
    a, b = x.pop("log_gate_k"), x.pop("log_gate_v")
    found = matrix_gated_linear(**x, log_gate=a[..., None] + b[..., None, :], scale=0.3)
    assert_near(found, gated_linear(**x, log_gate_k=a, log_gate_v=b, scale=0.3), tolerance=13 * VALUE)


def test_a_matrix_gate_has_second_derivatives(randn):
    x = [y.requires_grad_() for y in (randn(1, 4, 1, 2), randn(1, 4, 1, 2), randn(1, 4, 1, 3), -randn(1, 4, 1, 2, 3).abs())]
    assert torch.autograd.gradgradcheck(lambda q, k, v, g: matrix_gated_linear(q, k, v, log_gate=g), x)


def fine(length=6) -> dict[str, Tensor]:
    return {"q": torch.zeros(B, length, H, K), "k": torch.zeros(B, length, H, K), "v": torch.zeros(B, length, H, V)}


@pytest.mark.plain
@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ShapeError, r"`k` has shape \(2, 3, 6, 4\); axis 1 is 3 and \[B=2, T=6, H=3, K=4\].*axis 1 \(T\)", {"k": torch.zeros(B, H, 6, K)}),
        (ShapeError, r"`v` has shape \(2, 3, 6, 5\); axis 1", {"v": torch.zeros(B, H, 6, V)}),
        (ShapeError, r"`q` has shape .* 3 axes; 4 were expected: \[B, T, H, K\]", {"q": torch.zeros(B, 6, K)}),
        (ShapeError, r"`log_gate_k` .* axis 3 is 2 and .*K=4", {"log_gate_k": torch.zeros(B, 6, H, 2)}),
        (ShapeError, r"`log_gate_k` .* 3 axes", {"log_gate_k": torch.zeros(B, 6, H)}),
        (ShapeError, r"`log_gate_v` .* axis 3 is 4 and .*V=5", {"log_gate_v": torch.zeros(B, 6, H, K)}),
        (ShapeError, r"`state` .* axis 2 is 5 and .*K=4", {"state": torch.zeros(B, H, V, K)}),
        (ShapeError, r"`reset` .* axis 1 is 5 and .*T=6", {"reset": torch.zeros(B, 5, dtype=torch.bool)}),
        (SpecError, r"`log_gate_k` is 0\.5 at B=0, T=0, H=0, K=0; .*at most 0", {"log_gate_k": torch.full((B, 6, H, K), 0.5)}),
        (SpecError, r"`log_gate_v` is 2 at B=0", {"log_gate_v": torch.full((B, 6, H, V), 2.0)}),
        (SpecError, r"`state` is torch.bfloat16; .*float32", {"state": torch.zeros(B, H, K, V, dtype=torch.bfloat16)}),
        (SpecError, r'`form` is \'chunked\'; .*"recurrent", "parallel" or "chunk"', {"form": "chunked"}),
        (SpecError, r"`chunk` is 0; .*at least 1", {"chunk": 0}),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_axis(error, words, change):
    assert_refused(error, words, lambda: gated_linear(**(fine() | change)))


@pytest.mark.plain
def test_a_matrix_gate_of_another_shape_is_refused():
    assert_refused(ShapeError, r"`log_gate` .* axis 3 is 5 and .*K=4", lambda: matrix_gated_linear(**fine(), log_gate=torch.zeros(B, 6, H, V, K)))
