"""GradMem against finite differences, and against a write that is unrolled by hand on the raw decoder; all in float64."""

import dataclasses

import pytest
import torch

from graven.errors import ShapeError, SpecError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.gradient import SGD, Adam, GradMem, GradMemSpec
from graven.tasks.base import Tokens

VOCABULARY, WIDTH, SLOTS, RATE = 11, 8, 3, 0.2
DECODER = DecoderSpec(vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, key_value_heads=1, hidden=12, convolution=2)
ROUNDING = 1e-12  # float64: the same sums in another order
STEP = 1e-5  # of a central difference: its error falls with the square, about 1e-10, and rounding stays below that
SINGLE = 2e-5  # float32, of the norm of a gradient
DIFFERENCE = 1e-7  # allowed between a derivative and a central difference


@pytest.fixture
def make(generator):
    """Makes a float64 GradMem; all that one test makes have the same random weights."""

    def build(**settings):
        model, weights = Small(DECODER), torch.Generator().manual_seed(generator.initial_seed())
        for parameter in model.parameters():
            parameter.data.copy_(0.35 * torch.randn(parameter.shape, generator=weights) + (parameter.dim() == 1))
        spec = GradMemSpec(**{"slots": SLOTS, "steps": 2, "rule": SGD(rate=RATE), **settings})
        return GradMem(model, spec, seed=1).double()

    return build


@pytest.fixture
def ids(generator):
    return torch.randint(VOCABULARY, (3, 6), generator=generator)


def losses(memory, state, ids, *, weight=None):
    """-log f(t_i | [M; t_<i]), each row's mean over its tokens or its weighted sum; the last vector before the tokens predicts t_1."""
    decoder = memory.model.decoder
    prefix = state if memory.projection is None else state @ memory.projection
    if memory.write_control is not None:
        before, after = (part.expand(len(state), -1, -1) for part in memory.write_control)
        prefix = torch.cat([before, prefix, after], 1)
    hidden = decoder.hidden(torch.cat([prefix, decoder.embed(ids)[:, :-1]], 1))[:, prefix.shape[1] - 1 :]
    head = decoder.head if memory.write_head is None else memory.write_head
    each = -head(hidden).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return each.mean(-1) if weight is None else (each * weight).sum(-1)


def unrolled(memory, ids, *, steps, clip=None, weight=None):
    """K gradient steps from the start, kept whole for a backward pass unless the memory's order says otherwise."""
    state = memory.initial.expand(len(ids), -1, -1)
    for k in range(steps):
        (gradient,) = torch.autograd.grad(losses(memory, state, ids, weight=weight).sum(), state, create_graph=True)
        if memory.spec.order == "first" or (memory.spec.last is not None and k < steps - memory.spec.last):
            gradient = gradient.detach()
        if clip is not None:
            norms = [row.square().sum().sqrt() for row in gradient]
            gradient = torch.stack([row if norm <= clip else row * clip / norm for row, norm in zip(gradient, norms, strict=True)])
        state = state - (RATE if memory.rate is None else memory.rate) * gradient
    return state


def read_loss(memory, state, ids):
    """An outer loss: the log-probability of four tokens behind the memory, on the raw decoder."""
    decoder = memory.model.decoder
    hidden = decoder.hidden(torch.cat([state, decoder.embed(ids[:, :3])], 1))[:, state.shape[1] - 1 :]
    return -decoder.head(hidden).log_softmax(-1).gather(-1, ids[:, :4, None]).mean()


def gradients(memory, loss):
    """Of every parameter, by name; 0 where the loss does not depend on it."""
    names, parameters = zip(*memory.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))


def assert_equal(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=ROUNDING, atol=ROUNDING * max(1.0, float(value.abs().max())), msg=lambda m, n=name: f"{n}: {m}"
        )


def full(ids):
    return Tokens.full(ids)


def test_the_comparison_of_gradients_sees_a_difference(make, ids):
    memory = make()
    one = gradients(memory, read_loss(memory, unrolled(memory, ids, steps=1), ids))
    other = {name: value * (1 + 1e-9) for name, value in one.items()}
    with pytest.raises(AssertionError):
        assert_equal(one, other)


# The write


def test_a_step_follows_the_gradient_that_finite_differences_give(make, ids):
    memory = make(rule=SGD(rate=1.0), order="none")
    state = memory.start(3).detach() + 0
    prepared = memory.prepare(state, full(ids))
    gradient = state - memory.step(state, prepared).state
    for m in range(SLOTS):
        for d in range(WIDTH):
            up, down = state.clone(), state.clone()
            up[:, m, d] += STEP
            down[:, m, d] -= STEP
            slope = (memory.step(up, prepared).loss - memory.step(down, prepared).loss) / (2 * STEP)
            torch.testing.assert_close(gradient[:, m, d], slope, rtol=DIFFERENCE, atol=DIFFERENCE)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_write_is_so_many_steps_whatever_the_spec_says(steps, make, ids):
    memory = make(steps=2)
    torch.testing.assert_close(
        memory.write(memory.start(3), full(ids), steps=steps), unrolled(memory, ids, steps=steps), rtol=ROUNDING, atol=ROUNDING
    )


def test_a_write_that_names_no_steps_takes_those_of_the_spec(make, ids):
    memory = make(steps=3)
    assert torch.equal(memory.write(memory.start(3), full(ids)), memory.write(memory.start(3), full(ids), steps=3))


def test_the_last_slot_predicts_the_first_token_of_the_context(make, generator):
    memory, first = make(), torch.randint(VOCABULARY, (3, 1), generator=generator)
    state = memory.start(3)
    hidden = memory.model.decoder.hidden(state)[:, -1]
    expected = -memory.model.decoder.head(hidden).log_softmax(-1).gather(-1, first)[:, 0]
    step = memory.step(state, memory.prepare(state, full(first)))
    torch.testing.assert_close(step.loss, expected.detach(), rtol=ROUNDING, atol=ROUNDING)


def test_a_step_reports_the_loss_and_the_hits_of_the_state_that_it_started_from(make, ids):
    memory = make()
    state = memory.write(memory.start(3), full(ids), steps=40)
    step = memory.step(state, memory.prepare(state, full(ids)))
    torch.testing.assert_close(step.loss, losses(memory, state, ids).detach(), rtol=ROUNDING, atol=ROUNDING)
    decoder = memory.model.decoder
    logits = decoder.head(decoder.hidden(torch.cat([state, decoder.embed(ids)[:, :-1]], 1))[:, SLOTS - 1 :])
    assert torch.equal(step.hits, logits.argmax(-1) == ids)
    assert step.hits.any()
    assert not step.hits.all()


def test_padding_is_never_a_hit_and_never_counts(make, ids):
    memory, state = make(), make().start(3)
    whole, padded = Tokens.of([row[:4] for row in ids.tolist()]), Tokens(ids, torch.arange(6).expand(3, 6) < 4)
    one, other = (memory.step(state, memory.prepare(state, tokens)) for tokens in (whole, padded))
    torch.testing.assert_close(one.loss, other.loss, rtol=ROUNDING, atol=ROUNDING)
    short = Tokens(ids, torch.tensor([[True] * 6, [True] * 2 + [False] * 4, [False] * 6]))
    assert not memory.step(state, memory.prepare(state, short)).hits[~short.mask].any()


def test_only_counted_tokens_count(make, ids, generator):
    memory = make()
    counted = torch.rand(ids.shape, generator=generator) < 0.5
    counted[0], counted[1, 0] = False, True
    weight = counted / counted.sum(-1, keepdim=True).clamp(min=1)
    got = memory.write(memory.start(3), full(ids), counted=counted)
    torch.testing.assert_close(got, unrolled(memory, ids, steps=2, weight=weight), rtol=ROUNDING, atol=ROUNDING)
    assert torch.equal(got[0], memory.start(3)[0])
    assert not torch.equal(got[1], memory.start(3)[1])


def test_counted_tokens_move_with_their_tokens_when_padding_stands_before_them(make, ids, generator):
    memory, counted = make(), torch.rand(ids.shape, generator=generator) < 0.5
    mask = torch.tensor([False, True, True, False, True, True]).expand(3, 6)
    packed, packed_counted = ids[mask].view(3, 4), counted[mask].view(3, 4)
    got = memory.write(memory.start(3), Tokens(ids, mask), counted=counted)
    torch.testing.assert_close(got, memory.write(memory.start(3), full(packed), counted=packed_counted), rtol=ROUNDING, atol=ROUNDING)


# Training through the write


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("order", ["second", "first"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rule": SGD(rate=RATE, learn="scalar")},
        {"rule": SGD(rate=RATE, learn="coordinate")},
        {"rule": SGD(rate=RATE, clip=0.05)},
        {"write_head": True, "control": 2, "projection": True},
    ],
    ids=["plain", "scalar", "coordinate", "clip", "all parts"],
)
def test_the_meta_gradient_equals_that_of_the_unrolled_write(settings, order, steps, make, ids):
    memory = make(order=order, **settings)
    if memory.write_head is not None:
        memory.write_head.weight.data *= 1.5  # so that the two heads differ
    clip = settings.get("rule", SGD()).clip
    got = gradients(memory, read_loss(memory, memory.write(memory.start(3), full(ids), steps=steps), ids))
    expected = gradients(memory, read_loss(memory, unrolled(memory, ids, steps=steps, clip=clip), ids))
    assert_equal(got, expected)
    assert got["initial"].any()


@pytest.mark.parametrize("settings", [{"last": 1}, {"last": 2, "keep": 0}, {"keep": 5}, {"rows": 1}, {"rows": 2, "keep": 3, "last": 3}])
@pytest.mark.parametrize("rule", [SGD(rate=RATE, settle=0.5, learn="coordinate"), SGD(rate=RATE, clip=0.05)], ids=["settle", "clip"])
def test_what_stays_in_memory_and_where_second_order_begins_change_nothing_else(rule, settings, make, ids):
    memory = make(rule=rule, write_head=True, control=1, projection=True, **{"steps": 5, **settings})
    got = gradients(memory, read_loss(memory, memory.write(memory.start(3), full(ids)), ids))
    assert_equal(got, gradients(memory, read_loss(memory, unrolled(memory, ids, steps=5, clip=rule.clip), ids)))
    assert got["initial"].any()


@pytest.mark.parametrize("steps", [2, 5])
def test_in_float32_the_meta_gradient_stays_close_to_that_of_the_unrolled_write(steps, make, ids):
    memory = make(write_head=True).float()
    got = gradients(memory, read_loss(memory, memory.write(memory.start(3), full(ids), steps=steps), ids))
    expected = gradients(memory, read_loss(memory, unrolled(memory, ids, steps=steps), ids))
    for name, value in expected.items():
        assert (got[name] - value).norm() <= SINGLE * value.norm(), name


def test_a_model_with_dropout_is_trained_through_the_masks_that_its_write_drew(make, ids):
    memory = make(steps=3)
    for block in memory.model.decoder.blocks:
        block.feed.down.register_forward_hook(lambda module, _, out: torch.nn.functional.dropout(out, 0.3, module.training))
    found = []
    for write in (lambda: memory.write(memory.start(3), full(ids)), lambda: unrolled(memory, ids, steps=3)):
        torch.manual_seed(3)
        found.append(gradients(memory, read_loss(memory, write(), ids)))
    assert_equal(*found)


def test_second_and_first_order_differ_in_the_gradient_and_not_in_the_value(make, ids):
    second, first = make(order="second"), make(order="first")
    states = [memory.write(memory.start(3), full(ids)) for memory in (second, first)]
    torch.testing.assert_close(*states, rtol=ROUNDING, atol=ROUNDING)
    one, other = (gradients(memory, read_loss(memory, state, ids)) for memory, state in zip((second, first), states, strict=True))
    assert all(not torch.allclose(one[name], other[name], rtol=1e-3) for name in ("initial", "model.decoder.tokens.weight"))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_meta_gradient_agrees_with_finite_differences_of_the_read_loss(steps, make, ids, randn):
    memory = make(rule=SGD(rate=RATE, learn="coordinate"), write_head=True, control=1, projection=True)

    def loss():
        return read_loss(memory, memory.write(memory.start(3), full(ids), steps=steps), ids)

    def loss_at(distance):
        with torch.no_grad():
            for name, parameter in memory.named_parameters():
                parameter.copy_(here[name] + distance * directions[name])
        return float(loss().detach())

    slopes = gradients(memory, loss())
    here = {name: parameter.detach().clone() for name, parameter in memory.named_parameters()}
    directions = {name: randn(*parameter.shape) / parameter.numel() ** 0.5 for name, parameter in memory.named_parameters()}
    expected = sum(float((slopes[name] * directions[name]).sum()) for name in slopes)
    assert (loss_at(STEP) - loss_at(-STEP)) / (2 * STEP) == pytest.approx(expected, rel=DIFFERENCE)


@pytest.mark.parametrize(("learn", "shape"), [("scalar", ()), ("coordinate", (SLOTS, WIDTH))])
def test_a_learned_rate_starts_at_the_given_one_and_receives_a_gradient(learn, shape, make, ids):
    memory, fixed = make(rule=SGD(rate=RATE, learn=learn)), make()
    assert memory.rate.shape == shape
    state = memory.write(memory.start(3), full(ids))
    torch.testing.assert_close(state, fixed.write(fixed.start(3), full(ids)), rtol=1e-6, atol=1e-6)  # 0.2 was a float32 before it was a float64
    assert gradients(memory, read_loss(memory, state, ids))["rate"].any()


def test_order_none_leaves_no_gradient_in_the_state(make, ids):
    memory = make(order="none")
    state = memory.write(memory.start(3), full(ids))
    assert not state.requires_grad
    torch.testing.assert_close(state, unrolled(memory, ids, steps=2).detach(), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("order", ["second", "first"])
def test_clipping_a_row_that_counts_nothing_has_a_finite_meta_gradient(order, make, ids):
    memory = make(order=order, rule=SGD(rate=RATE, clip=0.05))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1] = False
    loss = read_loss(memory, memory.write(memory.start(3), Tokens(ids, mask)), ids)
    assert all(gradient.isfinite().all() for gradient in gradients(memory, loss).values())


def test_clipping_bounds_the_step_of_each_row_by_itself(make, ids):
    memory, clip = make(rule=SGD(rate=1.0, clip=0.05)), 0.05
    free = make(rule=SGD(rate=1.0))
    length = [(memory.write(memory.start(3), full(ids), steps=1) - memory.start(3)).flatten(1).norm(dim=1) for memory in (memory, free)]
    torch.testing.assert_close(length[0], length[1].clamp(max=clip), rtol=ROUNDING, atol=ROUNDING)
    assert (length[1] > clip).any()


# Adam


def test_adam_is_the_adam_of_torch(make, ids):
    rule = Adam(rate=0.05, betas=(0.8, 0.9), epsilon=1e-6)
    memory = make(rule=rule, order="none")
    state = torch.nn.Parameter(memory.start(3).detach().clone())
    optimizer = torch.optim.Adam([state], lr=rule.rate, betas=rule.betas, eps=rule.epsilon)
    for steps in range(1, 6):
        optimizer.zero_grad()
        losses(memory, state, ids).sum().backward()
        optimizer.step()
        got = memory.write(memory.start(3), full(ids), steps=steps)
        torch.testing.assert_close(got, state.detach(), rtol=ROUNDING, atol=ROUNDING, msg=lambda m, k=steps: f"step {k}: {m}")


# Parts that start as nothing


def test_a_projection_changes_nothing_at_the_start(make, ids):
    plain, mapped = make(), make(projection=True)
    for memory in (plain, mapped):
        torch.testing.assert_close(memory.write(memory.start(3), full(ids)), unrolled(plain, ids, steps=2), rtol=ROUNDING, atol=ROUNDING)


def test_a_write_head_changes_nothing_at_the_start(make, ids):
    plain, headed = make(), make(write_head=True)
    assert headed.write_head.weight is not headed.model.decoder.head.weight
    torch.testing.assert_close(headed.write(headed.start(3), full(ids)), plain.write(plain.start(3), full(ids)), rtol=ROUNDING, atol=ROUNDING)


def test_control_vectors_stand_around_the_memory_and_differ_between_writing_and_reading(make, ids):
    memory = make(control=2)
    assert not torch.equal(memory.write_control, memory.read_control)
    state = memory.start(3)
    before, after = (part.expand(3, -1, -1) for part in memory.read_control)
    decoder = memory.model.decoder
    hidden = decoder.hidden(torch.cat([before, state, after, decoder.embed(ids)], 1))
    torch.testing.assert_close(memory.read(state, full(ids)), decoder.head(hidden[:, SLOTS + 3 :]), rtol=ROUNDING, atol=ROUNDING)


# The read


def test_a_read_equals_the_decoder_behind_the_memory(make, ids, randn):
    memory, state = make(), randn(3, SLOTS, WIDTH)
    decoder = memory.model.decoder
    expected = decoder.head(decoder.hidden(torch.cat([state, decoder.embed(ids)], 1)))[:, SLOTS - 1 :]
    torch.testing.assert_close(memory.read(state, full(ids)), expected, rtol=ROUNDING, atol=ROUNDING)


def test_reading_an_empty_query_predicts_from_the_last_slot(make, randn):
    memory, state = make(), randn(2, SLOTS, WIDTH)
    logits = memory.read(state, Tokens.of([[], []]))
    assert logits.shape == (2, 1, VOCABULARY)
    torch.testing.assert_close(logits[:, 0], memory.model.decoder.head(memory.model.decoder.hidden(state)[:, -1]), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 1], [0] * 6])
def test_a_padded_column_repeats_the_prediction_of_the_last_token_before_it(mask, make, ids, randn):
    memory, state = make(), randn(1, SLOTS, WIDTH)
    row, mask = ids[0], torch.tensor(mask, dtype=torch.bool)
    alone = memory.read(state, full(row[mask][None]))[0]
    seen = [int(mask[:columns].sum()) for columns in range(7)]
    torch.testing.assert_close(memory.read(state, Tokens(row[None], mask[None]))[0], alone[seen], rtol=ROUNDING, atol=ROUNDING)


def test_reciting_feeds_on_its_own_output_through_the_write_head(make):
    memory = make(write_head=True)
    memory.write_head.weight.data *= -1.0  # so that the two heads disagree
    state = memory.start(2).detach() + torch.tensor([0.0, 0.3])[:, None, None]
    decoder, expected = memory.model.decoder, [[], []]
    for i, length in enumerate((5, 3)):
        for _ in range(length):
            written = torch.tensor([expected[i]], dtype=torch.long)
            hidden = decoder.hidden(torch.cat([state[i : i + 1], decoder.embed(written)], 1))
            expected[i].append(int(memory.write_head(hidden[0, -1]).argmax()))
    assert memory.recite(state, [5, 3]) == expected


# Types


def test_a_float64_model_stays_float64_from_start_to_loss(make, ids):
    memory = make(rule=SGD(rate=RATE, learn="coordinate"), write_head=True, control=1, projection=True)
    state = memory.start(3)
    prepared = memory.prepare(state, full(ids))
    step = memory.step(state, prepared)
    assert {x.dtype for x in (state, prepared.weight, step.loss, step.state, memory.read(state, full(ids)))} == {torch.float64}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"slots": 0}, "`slots` is 0; it must be at least 1."),
        ({"steps": -1}, "`steps` is -1; it must be at least 0."),
        ({"last": 0}, "`last` is 0; it must be at least 1."),
        ({"keep": -1}, "`keep` is -1; it must be at least 0."),
        ({"rows": 0}, "`rows` is 0; it must be at least 1."),
        ({"last": 1, "order": "first"}, '`last` is 1 and `order` is "first"; only second order can be cut short. Leave `last` out.'),
        ({"control": -1}, "`control` is -1; it must be at least 0."),
        ({"rule": Adam()}, '`order` is "second" and the rule is Adam, whose moments are not trained through; use SGD, or order="none".'),
        (
            {"rule": SGD(learn="scalar"), "order": "none"},
            '`order` is "none" and `learn` is "scalar"; a rate cannot learn from steps that training does not see.',
        ),
    ],
)
def test_an_impossible_memory_is_refused(settings, sentence):
    with pytest.raises(SpecError) as caught:
        GradMemSpec(**{"slots": SLOTS, "steps": 2, **settings})
    assert str(caught.value) == sentence


@pytest.mark.plain
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (lambda: {"rule": SGD(learn="all")}, '`learn` is \'all\'; it must be "no", "scalar" or "coordinate".'),
        (lambda: {"order": "third"}, '`order` is \'third\'; it must be "second", "first" or "none".'),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(settings, sentence):
    with pytest.raises(SpecError) as caught:
        GradMemSpec(slots=SLOTS, steps=2, **settings())
    assert str(caught.value) == sentence


def test_a_spec_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GradMemSpec(slots=1, steps=1).steps = -1


def test_a_negative_number_of_steps_is_refused(make, ids):
    memory = make()
    with pytest.raises(SpecError, match=r"^`steps` is -1; it must be at least 0\.$"):
        memory.write(memory.start(3), full(ids), steps=-1)


@pytest.mark.plain
@pytest.mark.parametrize("call", ["write", "read"])
@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ((2, SLOTS, WIDTH), r"axis 0 is 3 and \[B=2, T\] was expected"),
        ((3, SLOTS, WIDTH + 1), r"axis 2 is 9 and \[B, M, 8\] was expected"),
        ((3, WIDTH), r"has 2 axes; 3 were expected: \[B, M, 8\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(state, sentence, call, make, ids):
    memory = make()
    with pytest.raises(ShapeError, match=sentence):
        getattr(memory, call)(torch.zeros(state, dtype=torch.float64), full(ids))


def test_steps_beyond_the_spec_settle(make, ids):
    constant, settling = make(), make(rule=SGD(rate=RATE, settle=0.5))
    context, start = Tokens.full(ids), constant.start(len(ids))
    state = constant.write(start, context, steps=2)
    torch.testing.assert_close(settling.write(start, context, steps=2), state, rtol=0, atol=0)
    for halvings in (1, 2):
        state = state - 0.5**halvings * RATE * (state - constant.write(state, context, steps=1)) / RATE
        torch.testing.assert_close(settling.write(start, context, steps=2 + halvings), state, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("settle", [0.0, -1.0, 1.5, float("nan")])
def test_a_settling_factor_is_a_share(settle):
    with pytest.raises(SpecError, match=r"`settle` is .*; it must be above 0 and at most 1, which is a constant rate\.$"):
        GradMemSpec(slots=1, steps=1, rule=SGD(settle=settle))
