"""RMT against passes by hand on the raw decoder, in float64."""

import pytest
import torch
from asserts import assert_refused

from graven.errors import ModelError, ShapeError, SpecError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.forward import RMT, RMTSpec
from graven.tasks.base import Tokens

VOCABULARY, WIDTH, SLOTS = 11, 8, 3
DECODER = DecoderSpec(vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, key_value_heads=1, hidden=12, convolution=2)
ROUNDING = 1e-12  # float64: the same sums in another order


def make(**settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return RMT(Small(DECODER), RMTSpec(**{"slots": SLOTS, **settings}), seed=2).double()


@pytest.fixture
def ids(generator):
    return torch.randint(VOCABULARY, (3, 6), generator=generator)


def passed(memory, state, ids):
    """Hidden states of the vectors behind the tokens: `[M; C; M]`, with control vectors `[a M b C a M]`."""
    decoder = memory.model.decoder
    mapped = state if memory.write_map is None else state @ memory.write_map.weight.T + memory.write_map.bias
    before = behind = mapped
    if memory.write_control is not None:
        a, b = (part.expand(len(state), -1, -1) for part in memory.write_control)
        before, behind = torch.cat([a, mapped, b], 1), torch.cat([a, mapped], 1)
    return decoder.hidden(torch.cat([before, decoder.embed(ids), behind], 1))[:, -SLOTS:]


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("settings", [{}, {"write_map": True}, {"control": 2}], ids=str)
def test_a_write_is_what_the_last_vectors_of_one_pass_become(settings, ids):
    memory = make(**settings)
    assert_close(memory.write(memory.start(3), Tokens.full(ids)), passed(memory, memory.start(3), ids))


def test_every_further_pass_replaces_the_memory(ids):
    memory, context = make(steps=3), Tokens.full(ids)
    one = memory.write(memory.start(3), context, steps=1)
    assert_close(memory.write(memory.start(3), context), passed(memory, passed(memory, one, ids), ids))
    assert_close(memory.write(one, context, steps=2), memory.write(memory.start(3), context))


def test_with_a_residual_further_passes_add_to_the_memory(ids):
    memory = make(residual=True)
    one = passed(memory, memory.start(3), ids)
    assert_close(memory.write(memory.start(3), Tokens.full(ids), steps=2), one + memory.norm(passed(memory, one, ids)))


def test_the_read_map_is_the_identity_at_the_start_and_stands_between_memory_and_query(ids):
    with_map, without = make(), make(read_map=False)
    state = with_map.write(with_map.start(3), Tokens.full(ids))
    assert_close(with_map.read(state, Tokens.full(ids)), without.read(state, Tokens.full(ids)))
    with_map.read_map.weight.data *= 2
    with_map.read_map.bias.data += 1
    assert_close(with_map.read(state, Tokens.full(ids)), without.read(2 * state + 1, Tokens.full(ids)))


def test_a_read_is_the_model_behind_the_memory_and_its_read_control(ids):
    memory = make(control=1)
    state, decoder = memory.start(3), memory.model.decoder
    a, b = (part.expand(3, -1, -1) for part in memory.read_control)
    hidden = decoder.hidden(torch.cat([a, state, b, decoder.embed(ids)], 1))
    assert_close(memory.read(state, Tokens.full(ids)), decoder.head(hidden[:, SLOTS + 1 :]))


def test_vectors_behind_a_padded_context_stand_right_behind_its_tokens(ids):
    """Five real columns, two of padding, two behind: positions 0 1 2 3 4 and 5 6."""
    memory = make()
    mask = torch.tensor([[True, True, True, False, False, False]]).expand(3, -1)
    assert_close(memory.write(memory.start(3), Tokens(ids, mask)), passed(memory, memory.start(3), ids[:, :3]))


def test_training_goes_through_every_pass(ids):
    memory, context = make(), Tokens.full(ids)
    by_hand = passed(memory, passed(memory, memory.start(3), ids), ids)
    weights = [memory.initial, *memory.model.decoder.blocks.parameters()]
    found = torch.autograd.grad(memory.write(memory.start(3), context, steps=2).square().sum(), weights)
    for one, other in zip(found, torch.autograd.grad(by_hand.square().sum(), weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=ROUNDING * float(other.abs().max()))
    assert found[0].any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"slots": 0}, "`slots` is 0; it must be at least 1"), ({"steps": -1}, "`steps` is -1"), ({"start": 0.0}, "`start` is 0.0; it must be above 0")],
)
def test_a_spec_that_cannot_be_built_is_refused(settings, words):
    assert_refused(SpecError, words, lambda: RMTSpec(**{"slots": 2, **settings}))


@pytest.mark.plain
def test_what_does_not_fit_is_refused(ids):
    memory = make()
    assert_refused(SpecError, "`steps` is -1", lambda: memory.write(memory.start(3), Tokens.full(ids), steps=-1))
    assert_refused(ShapeError, "`context` has shape", lambda: memory.write(memory.start(2), Tokens.full(ids)))
    assert_refused(ShapeError, "`query` has shape", lambda: memory.read(memory.start(2), Tokens.full(ids)))


def test_a_model_whose_hidden_states_cannot_stand_before_a_text_is_refused():
    model = Small(DECODER)
    model.hidden_width = 4
    assert_refused(ModelError, "hidden states of width 4 and embeddings of 8", lambda: RMT(model, RMTSpec(slots=2)))
