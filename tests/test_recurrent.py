"""Recurrent language models as memories: what the laws of every memory do not say."""

import dataclasses

import pytest
import torch
from asserts import assert_near, assert_refused
from cases import DELTA, GLA, MAMBA, MAMBA2, MEMORIES, VOCABULARY
from torch.nn import functional as F

from graven.errors import SpecError
from graven.layers.decoder import DecoderSpec
from graven.layers.delta_net import DeltaNetSpec
from graven.memory.base import floats, leaves, map_state
from graven.memory.kinds import takes_steps
from graven.memory.recurrent import MIXERS, Recurrent, RecurrentSpec
from graven.settings import build, table_of
from graven.tasks.base import Tokens

FLOAT32 = 2e-5  # two layers of a dozen tokens, and what one token does is carried on by all later ones
NAMES = [name for name in MEMORIES if isinstance(MEMORIES[name].make(), Recurrent)]
SIZES = DecoderSpec(vocabulary=VOCABULARY, width=32, layers=2, heads=4, key_value_heads=4, hidden=64)


@pytest.fixture(params=NAMES)
def memory(request):
    return MEMORIES[request.param].make()


def test_the_convolution_starts_as_the_sizes_say():
    made = Recurrent(dataclasses.replace(SIZES, convolution=3, convolution_start=0.5), RecurrentSpec(mixer=DELTA), seed=0)
    torch.testing.assert_close(made.convolution.weight, torch.full_like(made.convolution.weight, 0.5), rtol=0, atol=0)


def ids(generator, *shape):
    return torch.randint(VOCABULARY, shape, generator=generator)


def test_every_mixer_has_its_row_of_laws():
    named = {type(MEMORIES[name].make().spec.mixer) for name in NAMES}
    assert set(MIXERS) <= named


def test_token_by_token_is_the_same_as_all_at_once_in_state_and_in_gradient(memory, generator):
    tokens, state = ids(generator, 2, 5), memory.start(2)
    for token in tokens.split(1, 1):
        state = memory.write(state, Tokens.full(token))
    whole = memory.write(memory.start(2), Tokens.full(tokens))
    assert_near(leaves(state), leaves(whole), tolerance=FLOAT32)
    weights = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    query = Tokens.full(ids(generator, 2, 3))
    losses = [memory.read(end, query).log_softmax(-1)[..., 0].sum() for end in (state, whole)]
    found, wanted = (torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True) for loss in losses)
    assert_near(found, wanted, tolerance=10 * FLOAT32)


def test_what_is_read_is_what_the_model_predicts_behind_the_context(memory, generator):
    """One pass over context, start of a query and query, where nothing is ever cut."""
    context, query = ids(generator, 2, 6), ids(generator, 2, 4)
    read = memory.read(memory.write(memory.start(2), Tokens.full(context)), Tokens.full(query))
    embedded = [memory.body.embed(context), memory.begin.expand(2, 1, -1), memory.body.embed(query)]
    if not hasattr(memory.spec.mixer, "chunk"):  # LaCT ends a chunk where the context ends
        hidden, _ = memory._run(memory.start(2), torch.cat(embedded, 1), torch.ones(2, 11, dtype=torch.bool))
        assert_near([read], [memory.body.logits(hidden)[:, 6:]], tolerance=FLOAT32)
    assert read.shape == (2, 5, VOCABULARY)


def test_a_batch_of_another_size_may_come_next(memory, generator):
    """Nothing of a batch stays in the module."""
    big, small = ids(generator, 3, 5), ids(generator, 1, 4)
    state = memory.write(memory.start(3), Tokens.full(big))
    alone = memory.write(memory.start(1), Tokens.full(small))
    memory.read(state, Tokens.full(ids(generator, 3, 2)))
    assert_near(leaves(memory.write(memory.start(1), Tokens.full(small))), leaves(alone), tolerance=0.0)
    repeated = map_state(lambda x: x.repeat_interleave(2, 0), alone)
    query = ids(generator, 1, 3)
    twice = memory.read(repeated, Tokens.full(query.expand(2, -1)))
    assert_near([twice[:1], twice[1:]], [memory.read(alone, Tokens.full(query))] * 2, tolerance=FLOAT32)


# Numbers of the state of one row, by the formulas of each paper's recurrence; width 32, two layers, no convolution on the embeddings.
STATES = {
    "delta": (DELTA, {}, 2 * (4 * 4 * 8 + 3 * (4 * 4 * 2 + 4 * 8))),
    "gla": (GLA, {"key_value_heads": 2}, 2 * 4 * 4 * 8),
    "mamba": (MAMBA, {"heads": 1, "key_value_heads": 1}, 2 * 64 * (4 + 3)),
    "mamba2": (MAMBA2, {"key_value_heads": 2}, 2 * (64 * 4 + 3 * (64 + 2 * 2 * 4))),
}


def sized(**changed):
    return DecoderSpec(**(table_of(SIZES) | changed))


@pytest.mark.parametrize("name", STATES)
def test_the_state_has_as_many_numbers_as_the_formula_says(name):
    mixer, heads, numbers = STATES[name]
    assert floats(Recurrent(sized(**heads), RecurrentSpec(mixer=mixer)).start(1)) == numbers
    assert floats(Recurrent(sized(**heads, convolution=3), RecurrentSpec(mixer=mixer)).start(1)) == numbers + 2 * 32


@pytest.mark.parametrize("name", STATES)
def test_the_seed_draws_every_weight_and_the_global_generator_none(name):
    mixer, heads, _ = STATES[name]
    made = []
    for seed, noise in ((1, 0), (1, 5), (2, 0)):
        with torch.random.fork_rng():
            torch.manual_seed(noise)
            made.append(Recurrent(sized(**heads, convolution=3), RecurrentSpec(mixer=mixer), seed=seed).state_dict())
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert not all(torch.equal(made[0][key], made[2][key]) for key in made[0])


def test_sizes_of_the_embedding_and_a_tied_head_are_those_that_were_asked_for():
    memory = Recurrent(sized(embedding_std=0.5, tied=True), RecurrentSpec(mixer=DELTA))
    assert memory.body.head.weight is memory.body.tokens.weight
    assert abs(float(memory.body.tokens.weight.detach().std()) - 0.5) < 0.03
    assert 0.2 < float(memory.begin.detach().std()) < 0.8


@pytest.mark.parametrize("name", STATES)
def test_a_spec_comes_back_from_its_table(name):
    spec = RecurrentSpec(mixer=STATES[name][0])
    assert build(RecurrentSpec, table_of(spec), where="memory") == spec
    assert not takes_steps(spec)


def test_a_short_training_learns_to_give_back_what_was_written(generator):
    """The query is empty, so all that it can learn from goes through the state."""
    memory = Recurrent(sized(layers=1), RecurrentSpec(mixer=DELTA), seed=0)
    optimizer, losses = torch.optim.AdamW(memory.parameters(), lr=2e-2), []
    for _ in range(30):
        tokens = ids(generator, 16, 2) % 4
        read = memory.read(memory.write(memory.start(16), Tokens.full(tokens)), Tokens.full(tokens[:, :0]))
        loss = F.cross_entropy(read[:, 0], tokens[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < 1.3 < losses[0]


@pytest.mark.parametrize(
    ("mixer", "changed", "words"),
    [
        (DELTA, {"width": 64}, "`width` of the model is 64 and `width` of its delta_net mixer is 32"),
        (DELTA, {"heads": 2, "key_value_heads": 2}, "`heads` of the model is 2 and `heads` of its delta_net mixer is 4"),
        (GLA, {}, "`key_value_heads` of the model is 4 and `heads` of its gla mixer is 2"),
        (MAMBA, {}, "`heads` of the model is 4 and `heads` of its mamba mixer is 1"),
        (MAMBA2, {}, "`key_value_heads` of the model is 4 and `groups` of its mamba2 mixer is 2"),
        (MAMBA2, {"key_value_heads": 2, "hidden": 48}, "`hidden` of the model is 48 and `inner` of its mamba2 mixer is 64"),
    ],
)
def test_sizes_that_contradict_the_mixer_are_refused(mixer, changed, words):
    assert_refused(SpecError, words, lambda: Recurrent(sized(**changed), RecurrentSpec(mixer=mixer)))


def test_a_mixer_of_another_kind_is_told_by_its_name():
    table = {"kind": "recurrent", "mixer": {"kind": "delta_net", "width": 32, "heads": 4, "key_width": 8, "value_width": 8}}
    assert build(RecurrentSpec, table, where="memory").mixer == DeltaNetSpec(width=32, heads=4, key_width=8, value_width=8)
    assert_refused(SpecError, "kind", lambda: build(RecurrentSpec, {"mixer": {"kind": "rwkv"}}, where="memory"))
