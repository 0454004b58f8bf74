"""ARMT: its matrix by hand, segment after segment, and what holds at the start."""

import pytest
import torch
from asserts import assert_near, assert_refused
from cases import VOCABULARY, small

from graven.errors import SpecError
from graven.layers.decoder import angles
from graven.memory.associative import ARMT, ARMTSpec, associate, dpfp, recall
from graven.memory.base import floats
from graven.tasks.base import Tokens

ROUNDING = 1e-5  # float32 through two layers
EPS = 1e-4  # what the epsilon of a quotient leaves
SPEC = {"slots": 2, "features": 6, "segment": 5}


def armt(**settings):
    memory = ARMT(small(), ARMTSpec(**SPEC | settings), seed=3)
    generator = torch.Generator().manual_seed(4)
    for association in memory.associations:  # a start writes zeros
        torch.nn.init.normal_(association.v.weight, std=0.2, generator=generator)
    return memory


def tokens(generator, *shape):
    return Tokens.full(torch.randint(VOCABULARY, shape, generator=generator))


def test_features_by_hand():
    x = torch.tensor([1.0, -2.0])
    assert dpfp(x, order=1).tolist() == [2, 0, 0, 0]
    assert dpfp(x, order=3).tolist() == [2, *[0] * 10, 2]
    assert dpfp(3 * x, order=3).tolist() == [18, *[0] * 10, 18]
    assert not dpfp(torch.tensor([1.0, 0.0]), order=3).any()


WRITES = [([1.0, -2.0], [1.0, 0.0], 0.5), ([1.0, 2.0], [0.0, 1.0], 1.0), ([1.0, -2.0], [3.0, 3.0], 0.5)]


def written(writes, **settings):
    matrix, normaliser = torch.zeros(1, 4, 2), torch.zeros(1, 4)
    for i, (key, value, strength) in enumerate(writes):
        parts = {"keys": dpfp(torch.tensor(key), order=1)[None, None], "values": torch.tensor(value)[None, None]}
        parts |= {"strengths": torch.tensor([[strength]]), "fresh": torch.tensor([i == 0])}
        matrix, normaliser = associate(matrix, normaliser, **parts, **settings)
    return matrix, normaliser


def test_three_writes_by_hand():
    matrix, normaliser = written(WRITES)
    assert_near([matrix[0], normaliser[0]], [torch.tensor([[3.5, 3], [0, 2], [0, 0], [0, 0]]), torch.tensor([2.0, 2, 0, 0])], tolerance=EPS)
    reads = [recall(dpfp(torch.tensor([[key]]), order=1), matrix, normaliser)[0, 0] for key in ([1.0, -2.0], [1.0, 2.0])]
    assert_near(reads, [torch.tensor([1.75, 1.5]), torch.tensor([0.0, 1.0])], tolerance=EPS)


def test_a_key_that_is_written_again_holds_the_last_value_and_without_correction_half_of_it():
    again = [([1.0, -2.0], [1.0, 0.0], 1.0), ([1.0, -2.0], [3.0, 3.0], 1.0)]
    key = dpfp(torch.tensor([[[1.0, -2.0]]]), order=1)
    one, other = written(again), written(again, correction=False)
    assert_near([recall(key, *one)[0, 0], one[1]], [torch.tensor([3.0, 3.0]), written(again[:1])[1]], tolerance=EPS)
    assert_near([recall(key, *other)[0, 0]], [torch.tensor([1.5, 1.5])], tolerance=EPS)


def test_one_key_twice_in_a_segment_adds_both_corrections():
    """2 v2 - v1 after v1 = v2 were asked for at once behind v1: parallel, not one after the other."""
    matrix, normaliser = written([([1.0, -2.0], [1.0, 0.0], 1.0)])
    keys = dpfp(torch.tensor([[[1.0, -2.0]] * 2]), order=1)
    values = torch.tensor([[[3.0, 3.0]] * 2])
    matrix, normaliser = associate(matrix, normaliser, keys=keys, values=values, strengths=torch.ones(1, 2), fresh=torch.tensor([False]))
    assert_near([recall(keys, matrix, normaliser)[0, 0]], [torch.tensor([5.0, 6.0])], tolerance=EPS)


def test_gamma_has_no_gradient(generator):
    keys = torch.rand(1, 2, 4, generator=generator, requires_grad=True)
    parts = {"values": torch.ones(1, 2, 3), "strengths": torch.ones(1, 2), "fresh": torch.tensor([False])}
    _, normaliser = associate(torch.ones(1, 4, 3), torch.full((1, 4), 0.1), keys=keys, **parts)
    normaliser.sum().backward()
    known = (keys * 0.1).sum(-1) + 1e-5
    gamma = (1 - known / (keys.square().sum(-1) + 1e-5)).detach()
    assert (gamma > 0).all()
    assert_near([keys.grad], [gamma[..., None].expand(keys.shape)], tolerance=ROUNDING)


def test_at_the_start_it_is_its_base_model_and_only_the_values_learn_at_first(generator):
    memory = ARMT(small(), ARMTSpec(**SPEC), seed=3)
    context, query = tokens(generator, 2, 9), tokens(generator, 2, 3)
    state = memory.write(memory.start(2), context)
    assert not state[0].any()
    assert state[1].any()
    logits = memory.read(state, query)
    embedded = torch.cat([memory.begin.expand(2, -1, -1), memory.model.embed(query)], 1)
    assert_near([logits], [memory.model.logits(memory.model.hidden(embedded))], tolerance=ROUNDING)
    logits.square().sum().backward()
    assert all(x.v.weight.grad.any() for x in memory.associations)
    assert not any(x.q.weight.grad.any() or x.k.weight.grad.any() or x.strength.weight.grad.any() for x in memory.associations)


def test_where_values_start_at_random_all_maps_learn_at_once(generator):
    memory = ARMT(small(), ARMTSpec(**SPEC, value_start=2.0), seed=3)
    spreads = [float(x.v.weight.detach().std()) * memory.model.width**0.5 for x in memory.associations]
    assert spreads == pytest.approx([2.0] * len(spreads), rel=0.15)  # of a thousand numbers: 3 % is one deviation
    memory.read(memory.write(memory.start(2), tokens(generator, 2, 9)), tokens(generator, 2, 3)).square().sum().backward()
    assert all(x.q.weight.grad.any() and x.k.weight.grad.any() and x.strength.weight.grad.any() for x in memory.associations)


def test_the_first_segment_reads_nothing_and_the_second_what_it_wrote(generator):
    """The state after two segments, computed from the parts: nothing of the second sees its own write."""
    memory, context = armt(), tokens(generator, 1, 8)
    matrix, normaliser = (part[:, 0] for part in memory.start(1))
    association, block = memory.associations[0], memory.model.decoder.blocks[0]
    embedded = memory.model.embed(context)
    for fresh, piece in ((True, embedded[:, :5]), (False, embedded[:, 5:])):
        x = torch.cat([piece, memory.slots[None]], 1)
        read = recall(association.query(x), matrix, normaliser)
        assert bool(read.any()) != fresh
        h = block(x + read, angles(torch.arange(x.shape[1])[None], 8, x.dtype), None)[0][:, -2:]
        matrix, normaliser = association.write(h, matrix, normaliser, fresh=torch.tensor([fresh]))
    state = memory.write(memory.start(1), context)
    assert_near([state[0][:, 0], state[1][:, 0]], [matrix, normaliser], tolerance=ROUNDING)


def test_to_stop_at_the_end_of_a_segment_and_go_on_changes_nothing(generator):
    """Without a convolution on the embeddings, which would look across."""
    memory, context = armt(), tokens(generator, 2, 10)
    memory.model.decoder.convolution = None
    first, second = (Tokens.full(context.ids[:, piece]) for piece in (slice(0, 5), slice(5, 10)))
    assert_near(memory.write(memory.write(memory.start(2), first), second), memory.write(memory.start(2), context), tolerance=ROUNDING)


def test_the_state_is_a_matrix_and_a_normaliser_a_layer():
    assert floats(armt().start(3)) == 2 * 2 * 3 * 6 * (32 + 1)


@pytest.mark.parametrize("name", ["slots", "features", "segment", "order"])
def test_a_wrong_spec_is_refused(name):
    assert_refused(SpecError, f"`{name}` is 0", lambda: ARMTSpec(**{**SPEC, "order": 3, name: 0}))


def test_a_negative_spread_of_values_is_refused():
    assert_refused(SpecError, "`value_start` is -1.0", lambda: ARMTSpec(**SPEC, value_start=-1.0))


def test_float64_keeps_its_digits(generator):
    memory, context = armt(), tokens(generator, 2, 10)
    narrow = memory.write(memory.start(2), context)
    wide = memory.double()
    state = wide.write(wide.start(2), context)
    assert [part.dtype for part in state] == [torch.float64] * 2
    assert_near([part.float() for part in state], narrow, tolerance=ROUNDING)
