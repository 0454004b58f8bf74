"""The diagonal recurrence: two forms of one function, against a loop of plain Python numbers and against each other."""

import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import ShapeError, SpecError
from graven.ops.diagonal import diagonal

B, S = 2, 3
LENGTHS = [0, 1, 2, 7, 13]
# float64 sums of at most 13 terms; the first derivative sums T of them, the second T * T
VALUE, FIRST, SECOND = 1e-13, 1e-12, 1e-11
DTYPES = [torch.float64, torch.complex128]
SHAPES = ["one for all tokens", "one a token"]
UNUSED = {"allow_unused": True, "materialize_grads": True}  # at T = 0 the state is all there is


def drawn(generator, length, *, dtype=torch.float64, shape="one a token"):
    """u, decay and state, all of them leaves; decays on both sides of 1 and at 0."""
    decay = torch.randn(*((S,) if shape == SHAPES[0] else (B, length, S)), generator=generator, dtype=dtype)
    decay.flatten()[:1] = 0.0
    u, state = (torch.randn(*size, generator=generator, dtype=dtype) for size in ((B, length, S), (B, S)))
    return {name: x.requires_grad_() for name, x in (("u", u), ("decay", decay), ("state", state))}


def loop(u, decay, state):
    """One entry of the state in Python's numbers."""
    states = []
    for add, factor in zip(u, decay, strict=True):
        state = factor * state + add
        states.append(state)
    return states


@pytest.mark.parametrize("form", ["scan", "recurrent"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_is_the_recurrence_in_plain_numbers(generator, form, shape, dtype):
    x = {name: value.detach() for name, value in drawn(generator, 7, dtype=dtype, shape=shape).items()}
    h, end = diagonal(**x, form=form)
    for b in range(B):
        for s in range(S):
            decay = [x["decay"][s].item()] * 7 if shape == SHAPES[0] else x["decay"][b, :, s].tolist()
            states = torch.tensor(loop(x["u"][b, :, s].tolist(), decay, x["state"][b, s].item()), dtype=dtype)
            assert torch.allclose(h[b, :, s], states, rtol=VALUE, atol=VALUE)
            assert torch.allclose(end[b, s], states[-1], rtol=VALUE, atol=VALUE)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_forms_agree_in_value_first_and_second_derivative(generator, length, shape, dtype, with_mask):
    x = drawn(generator, length, dtype=dtype, shape=shape)
    mask = torch.rand(B, length, generator=generator) < 0.6 if with_mask else None
    direction = [torch.randn(value.shape, generator=generator, dtype=dtype) for value in x.values()]
    found, wanted = (derivatives(x, direction, mask=mask, form=form) for form in ("scan", "recurrent"))
    for part, other, tolerance in zip(found, wanted, (VALUE, FIRST, SECOND), strict=True):
        real, expected = ([torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in side] for side in (part, other))
        assert_near(real, expected, tolerance=tolerance * max(length, 1))


def derivatives(x, direction, **options):
    """Outputs, gradient of a nonlinear real scalar of them, and the Hessian of that scalar times a direction."""
    outputs = diagonal(**x, **options)
    loss = sum((o.sin() * torch.linspace(0.5, 1.5, o.shape[-1])).sum() for o in outputs)
    first = torch.autograd.grad(loss.real, list(x.values()), create_graph=True, **UNUSED)
    along = sum((g * d.conj()).real.sum() for g, d in zip(first, direction, strict=True))
    return outputs, first, torch.autograd.grad(along, list(x.values()), **UNUSED)


@pytest.mark.parametrize("form", ["scan", "recurrent"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_derivatives_are_those_of_finite_differences(generator, form, shape, dtype):
    x = drawn(generator, 3, dtype=dtype, shape=shape)

    def run(u, decay, state):
        return diagonal(u, decay=decay, state=state, form=form)

    assert torch.autograd.gradcheck(run, tuple(x.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tuple(x.values()), fast_mode=True)


def test_complex_decays_of_real_tokens_leave_real_gradients(generator):
    u = torch.randn(1, 4, S, generator=generator, dtype=torch.float64, requires_grad=True)
    decay = torch.randn(S, generator=generator, dtype=torch.complex128)
    h, _ = diagonal(u, decay=decay)
    h.real.sum().backward()
    assert h.dtype == torch.complex128
    assert u.grad.dtype == torch.float64


def test_a_decay_of_one_never_forgets_and_one_of_zero_forgets_at_once(randn):
    u = randn(1, 1000, 2)
    h, _ = diagonal(u, decay=torch.tensor([1.0, 0.0]).double())
    assert_near([h[..., 0], h[..., 1]], [u[..., 0].cumsum(1), u[..., 1]], tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_is_never_narrower_than_float32(dtype):
    u = torch.full((1, 3000, 1), 1.0).to(dtype)  # in float16 a sum of ones stops at 2048
    h, end = diagonal(u, decay=torch.ones(1, dtype=dtype))
    assert h.dtype == end.dtype == torch.float32
    assert end.item() == 3000.0


def test_what_lies_in_padding_reaches_nothing(generator):
    x = drawn(generator, 4)
    mask = torch.tensor([[True, False, True, False]] * B)
    broken = {**x, "u": torch.where(mask[..., None], x["u"], torch.nan), "decay": torch.where(mask[..., None], x["decay"], torch.nan)}
    h, end = diagonal(**broken, mask=mask)
    kept, own = diagonal(x["u"][:, ::2], decay=x["decay"][:, ::2], state=x["state"])
    assert_near([h[:, ::2], h[:, 1], end], [kept, kept[:, 0], own], tolerance=VALUE)
    end.sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in x.values())


@pytest.mark.plain
@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ShapeError, "`decay` has shape .* axis 0 is 4", {"decay": torch.zeros(4)}),
        (ShapeError, r"`decay` is \[S\] or \[B, T, S\]", {"decay": torch.zeros(2, 3)}),
        (ShapeError, "`state` has shape .* axis 1 is 2", {"state": torch.zeros(B, 2)}),
        (ShapeError, "`mask` has shape .* axis 1 is 5", {"mask": torch.ones(B, 5).bool()}),
        (SpecError, "`form` is 'fast'; .*\"scan\"", {"form": "fast"}),
    ],
)
def test_what_does_not_fit_is_one_sentence(error, words, change):
    assert_refused(error, words, lambda: diagonal(**{"u": torch.zeros(B, 4, S), "decay": torch.zeros(S)} | change))
