"""GradMem on a key-value prefix: its steps, what they leave alone, and training through them."""

import pytest
import torch
from asserts import assert_near, assert_refused
from cases import VOCABULARY, small

from graven.errors import ShapeError, SpecError
from graven.memory.base import floats
from graven.memory.prefix import Prefix, PrefixSpec
from graven.tasks.base import Tokens

ROUNDING = 1e-5  # float32 through two layers and back
SPEC = {"slots": 4, "steps": 2, "write_head": True, "rate_keys": 0.5, "rate_values": 2.0}


def prefix(**settings):
    return Prefix(small(), PrefixSpec(**SPEC | settings), seed=3)


def tokens(generator, *shape):
    return Tokens.full(torch.randint(VOCABULARY, shape, generator=generator))


def test_behind_the_keys_and_values_of_a_text_it_reads_as_behind_the_text(generator):
    memory, text = prefix(), tokens(generator, 2, 9)
    memory.model.decoder.convolution = None  # it would look back at the text
    memory.begin.data.copy_(memory.model.decoder.tokens.weight[text.ids[0, 4]])
    rest = Tokens.full(text.ids[:, 5:])
    text.ids[1, 4] = text.ids[0, 4]
    whole, caches = memory.model.decoder.run(memory.model.embed(text))
    state = tuple(torch.stack([cache[part][:, :, :4] for cache in caches], 1) for part in (0, 1))
    assert_near([memory.read(state, rest)], [memory.model.logits(whole[:, 4:])], tolerance=ROUNDING)


@pytest.mark.parametrize("order", ["second", "first"])
def test_training_goes_through_the_steps_as_through_an_unrolled_write(order, generator):
    memory, context, query = prefix(order=order), tokens(generator, 2, 6), tokens(generator, 2, 3)
    state = memory.start(2)
    for _ in range(2):
        gradients = torch.autograd.grad(memory.write_loss(state, context).sum(), state, create_graph=True)
        if order == "first":
            gradients = [gradient.detach() for gradient in gradients]
        state = tuple(x - rate * gradient for x, gradient, rate in zip(state, gradients, (0.5, 2.0), strict=True))
    ends, parameters = (memory.write(memory.start(2), context), state), list(memory.parameters())
    assert_near(*ends, tolerance=ROUNDING)
    pulled = [torch.autograd.grad(memory.read(end, query).square().mean(), parameters, materialize_grads=True, allow_unused=True) for end in ends]
    assert_near(*pulled, tolerance=ROUNDING)
    head = [name for name, _ in memory.named_parameters()].index("write_head.weight")
    assert bool(pulled[0][head].any()) == (order == "second")


def test_one_small_step_lowers_the_loss_of_every_row(generator):
    memory, context = prefix(rate_keys=0.1, rate_values=0.1), tokens(generator, 3, 8)
    before, after = (memory.write_loss(memory.write(memory.start(3), context, steps=steps), context) for steps in (0, 1))
    assert (after < before).all()


def test_a_frozen_slot_is_learned_and_never_written(generator):
    memory, context = prefix(frozen=1), tokens(generator, 2, 6)
    start, end = memory.start(2), memory.write(memory.start(2), context)
    for old, new in zip(start, end, strict=True):
        assert torch.equal(old[:, :, :, 0], new[:, :, :, 0])
        assert (old[:, :, :, 1:] != new[:, :, :, 1:]).any()
    memory.read(end, context).square().mean().backward()
    assert memory.keys.grad[:, :, 0].any()


@pytest.mark.parametrize(("setting", "still"), [("rate_keys", 0), ("rate_values", 1)])
def test_keys_and_values_have_a_rate_each(setting, still, generator):
    memory, context = prefix(**{setting: 0.0}), tokens(generator, 2, 6)
    start, end = memory.start(2), memory.write(memory.start(2), context)
    assert torch.equal(start[still], end[still])
    assert (start[1 - still] != end[1 - still]).any()


def test_keys_behind_the_rotation_descend_as_keys_before_it(generator):
    """The rotation is orthogonal, so that a plain step commutes with it."""
    memory, context = prefix(frozen=0), tokens(generator, 1, 6)
    angle = torch.linspace(0, 1, 4).repeat(2)
    cos, sin = angle.cos(), angle.sin()

    def turn(x):
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    keys, values = (x.detach() for x in memory.start(1))
    bare = keys.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(memory.write_loss((turn(bare), values), context).sum(), bare)
    end = memory.write((turn(keys), values), context, steps=1)
    assert_near([end[0]], [turn(keys - 0.5 * gradient)], tolerance=ROUNDING)


def test_the_state_holds_keys_and_values_of_every_layer():
    assert floats(prefix().start(3)) == 2 * 2 * 2 * 8 * 4


@pytest.mark.plain
def test_a_state_of_another_size_is_refused(generator):
    memory, other = prefix(), prefix(slots=3)
    assert_refused(ShapeError, "`keys` has shape", lambda: memory.write(other.start(2), tokens(generator, 2, 3)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slots": 0}, "`slots` is 0"),
        ({"steps": -1}, "`steps` is -1"),
        ({"frozen": 4}, "`frozen` is 4 of 4"),
        ({"rate_keys": 0.0, "rate_values": 0.0}, "nothing could be written"),
        ({"start": 0.0}, "`start` is 0.0"),
        pytest.param({"order": "third"}, "`order` is 'third'", marks=pytest.mark.plain),
    ],
)
def test_a_wrong_spec_is_refused(settings, words):
    assert_refused(SpecError, words, lambda: PrefixSpec(**SPEC | settings))


def test_float64_keeps_its_digits(generator):
    memory, context = prefix(), tokens(generator, 2, 6)
    exact = memory.write_loss(memory.start(2), context)
    wide = memory.double()
    state = wide.write(wide.start(2), context)
    loss = wide.write_loss(wide.start(2), context)
    rows = [wide.write_loss(wide.start(1), Tokens.full(context.ids[i : i + 1])) for i in (0, 1)]
    assert [part.dtype for part in (*state, loss)] == [torch.float64] * 3
    assert_near([loss], [torch.cat(rows)], tolerance=1e-14)
    assert_near([loss.float()], [exact], tolerance=ROUNDING)
