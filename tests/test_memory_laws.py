"""What every memory obeys, over every row of `cases.py`."""

from functools import cache

import pytest
import torch
from cases import LONGEST, MEMORIES, VOCABULARY

from graven.memory.base import Memory
from graven.tasks.base import Tokens

LENGTHS = [9, 2, 5, 0]
WIDTH = 12
made = cache(lambda name: MEMORIES[name].make())
FLOAT32 = [name for name in MEMORIES if "bfloat16" not in name]


@pytest.fixture(params=MEMORIES)
def case(request):
    return request.param


@pytest.fixture
def memory(case):
    return made(case)


@pytest.fixture
def rows(generator):
    """Token ids of ragged rows, one of them empty."""
    return [ids(generator, length).tolist() for length in LENGTHS]


def ids(generator, *shape):
    return torch.randint(VOCABULARY, shape, generator=generator)


def padded(rows, *, where, generator):
    """The rows in twelve columns with their tokens on the right, on the left or scattered; other tokens stand at the padding."""
    tokens, mask = ids(generator, len(rows), WIDTH), torch.zeros(len(rows), WIDTH, dtype=torch.bool)
    for i, row in enumerate(rows):
        scattered = torch.randperm(WIDTH, generator=generator)[: len(row)].sort().values
        at = {"right": torch.arange(len(row)), "left": torch.arange(WIDTH - len(row), WIDTH), "interior": scattered}[where]
        tokens[i, at], mask[i, at] = torch.tensor(row, dtype=torch.long), True
    return Tokens(tokens, mask)


def written(memory, context):
    return memory.write(memory.start(len(context.ids)), context).detach()


def assert_same(got, expected, *, start, tolerance):
    """Equal to within so many standard deviations of what was written."""
    assert got.shape == expected.shape
    off = float((got - expected).abs().max() / (expected - start).std())
    assert off <= tolerance, f"off by {off:.2g} standard deviations of what was written"


def test_assert_same_fails_on_a_difference():
    start, end = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="off by"):
        assert_same(end + 1e-3, end, start=start, tolerance=1e-4)


def test_it_is_a_memory(memory):
    assert isinstance(memory, Memory)


def test_the_size_of_the_state_does_not_depend_on_the_context(memory, generator):
    shapes = {written(memory, Tokens.full(ids(generator, 2, length))).shape for length in (0, 1, 7, LONGEST)}
    assert shapes == {memory.start(2).shape}


def test_different_contexts_leave_different_states(memory, generator):
    one, other = (written(memory, Tokens.full(ids(generator, 1, 7))) for _ in range(2))
    assert (one != other).any()


def test_neither_write_nor_read_touches_the_old_state(memory, generator):
    context, query = Tokens.full(ids(generator, 2, 7)), Tokens.full(ids(generator, 2, 3))
    for state in (memory.start(2), written(memory, context)):
        before, version = state.detach().clone(), state._version
        memory.write(state, context)
        memory.read(state, query)
        assert torch.equal(state.detach(), before)
        assert state._version == version


@pytest.mark.parametrize("length", [0, 5])
def test_writing_a_context_without_tokens_returns_the_state_bit_for_bit(length, memory, generator):
    nothing = Tokens(ids(generator, 2, length), torch.zeros(2, length, dtype=torch.bool))
    for state in (memory.start(2).detach(), written(memory, Tokens.full(ids(generator, 2, 4)))):
        assert torch.equal(memory.write(state, nothing), state)


def test_a_row_without_tokens_keeps_its_state_bit_for_bit_beside_rows_that_have_some(memory, rows):
    state = written(memory, Tokens.of(rows))
    assert torch.equal(state[-1], memory.start(1)[0])
    assert (state[:-1] != memory.start(3)).flatten(1).any(1).all()


@pytest.mark.parametrize("name", [name for name in MEMORIES if MEMORIES[name].steps])
def test_writing_with_no_steps_returns_the_state_bit_for_bit(name, rows):
    memory = made(name)
    assert torch.equal(memory.write(memory.start(len(rows)), Tokens.of(rows), steps=0), memory.start(len(rows)))


@pytest.mark.parametrize("where", ["right", "left", "interior"])
def test_padding_never_changes_a_state(where, case, memory, rows, generator):
    start, state = memory.start(1).detach(), written(memory, padded(rows, where=where, generator=generator))
    for i, row in enumerate(rows[:-1]):
        assert_same(state[i : i + 1], written(memory, Tokens.of([row])), start=start, tolerance=MEMORIES[case].tolerance)


def test_rows_of_a_batch_never_meet(case, memory, generator):
    one = ids(generator, 3, 7)
    other = one.clone()
    other[1] = (one[1] + 1) % VOCABULARY
    states = [written(memory, Tokens.full(x)) for x in (one, other)]
    assert (states[0][1] != states[1][1]).any()
    for i in (0, 2):
        assert_same(states[1][i], states[0][i], start=memory.start(1)[0].detach(), tolerance=MEMORIES[case].tolerance)


def test_a_batch_is_written_and_read_like_its_rows_one_by_one(case, memory, rows, generator):
    state, queries = written(memory, Tokens.of(rows)), [ids(generator, length).tolist() for length in (3, 0, 6, 1)]
    read = memory.read(state, Tokens.of(queries)).detach()
    for i, (row, query) in enumerate(zip(rows, queries, strict=True)):
        alone = written(memory, Tokens.of([row]))
        if row:
            assert_same(state[i : i + 1], alone, start=memory.start(1).detach(), tolerance=MEMORIES[case].tolerance)
        expected = memory.read(alone, Tokens.of([query]))[0].detach()
        got = read[i, : len(query) + 1]
        assert float((got - expected).abs().max() / expected.std()) <= MEMORIES[case].tolerance
        if case in FLOAT32:
            assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("where", ["right", "left", "interior"])
def test_a_read_sees_the_tokens_of_a_query_and_never_its_padding(where, case, memory, rows, generator):
    state = written(memory, Tokens.full(ids(generator, len(rows), 7)))
    query = padded(rows, where=where, generator=generator)
    read = memory.read(state, query).detach()
    assert read.shape == (len(rows), WIDTH + 1, VOCABULARY)
    for i, row in enumerate(rows):
        alone = memory.read(state[i : i + 1], Tokens.of([row]))[0].detach()
        expected = alone[torch.cat([torch.zeros(1, dtype=torch.long), query.mask[i].cumsum(0)])]
        assert float((read[i] - expected).abs().max() / expected.std()) <= MEMORIES[case].tolerance


def test_what_is_read_depends_on_what_was_written(memory, generator):
    query = Tokens.full(ids(generator, 1, 3))
    one, other = (memory.read(written(memory, Tokens.full(ids(generator, 1, 7))), query) for _ in range(2))
    assert (one != other).any()


def test_the_same_seed_gives_the_same_bits(case, memory, rows):
    context, again = Tokens.of(rows), MEMORIES[case].make()
    one, other = (written(x, context) for x in (memory, again))
    assert torch.equal(one, other)
    assert torch.equal(memory.read(one, context), again.read(other, context))


def test_the_state_is_float32_whatever_the_model_is(memory, rows):
    assert memory.start(2).dtype == written(memory, Tokens.of(rows)).dtype == torch.float32


def test_a_write_without_gradients_leaves_no_graph_and_is_the_same_write(case, memory, rows):
    with torch.no_grad():
        state = memory.write(memory.start(len(rows)), Tokens.of(rows))
    assert not state.requires_grad
    start = memory.start(len(rows)).detach()
    assert_same(state, written(memory, Tokens.of(rows)), start=start, tolerance=MEMORIES[case].tolerance)
