"""What every memory obeys, over every row of `cases.py`."""

from functools import cache

import pytest
import torch
from asserts import assert_equal_states
from cases import LONGEST, MEMORIES, VOCABULARY

from graven.memory.base import Memory, leaves, map_state, map_states, size_of
from graven.tasks.base import Tokens

LENGTHS = [9, 2, 5, 0]
WIDTH = 12
made = cache(lambda name: MEMORIES[name].make())
FLOAT32 = [name for name in MEMORIES if "bfloat16" not in name]


def claiming(law):
    """The memories that claim it."""
    return [name for name in MEMORIES if getattr(MEMORIES[name], law)]


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


def started(memory, batch):
    return map_state(torch.Tensor.detach, memory.start(batch))


def written(memory, context):
    return map_state(torch.Tensor.detach, memory.write(memory.start(len(context.ids)), context))


def row_of(state, at):
    """The state of one row."""
    return map_state(lambda x: x[at : at + 1] if at >= 0 else x[at:], state)


def root_mean_square(x):
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def widened(*tensors):
    """All with as many columns (axis 2) as the widest, zeros behind: states that grow are as wide as the longest row of their batch."""
    most = max(x.shape[2] for x in tensors) if tensors[0].dim() == 4 else 0
    return tuple(torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[2])) if most else x for x in tensors)


def assert_same(got, expected, *, start, tolerance):
    """Equal, tensor by tensor, to within so many root mean squares of what was written."""
    for index, parts in enumerate(zip(*map(leaves, (got, expected, start)), strict=True)):
        x, y, z = widened(*parts)
        assert x.shape == y.shape
        off, size = float((x - y).abs().max()) if x.numel() else 0.0, root_mean_square(y - z)
        assert off <= tolerance * size, f"tensor {index} is off by {off:.2g}, and what was written has size {size:.2g}"


def test_assert_same_fails_on_a_difference_in_any_tensor():
    start, end = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    for got in (end + 1e-3, end * torch.nan):
        with pytest.raises(AssertionError, match="tensor 1 is off by"):
            assert_same((end, got), (end, end), start=(start, start), tolerance=1e-4)


def test_it_is_a_memory(memory):
    assert isinstance(memory, Memory)


def test_every_tensor_of_a_state_has_a_row_for_each_row(memory, rows):
    for state in (memory.start(len(rows)), memory.write(memory.start(len(rows)), Tokens.of(rows))):
        assert {len(leaf) for leaf in leaves(state)} == {len(rows)}


@pytest.mark.parametrize("name", [name for name in MEMORIES if not MEMORIES[name].grows])
def test_the_size_of_the_state_does_not_depend_on_the_context(name, generator):
    memory = made(name)
    shapes = {tuple(leaf.shape for leaf in leaves(written(memory, Tokens.full(ids(generator, 2, length))))) for length in (0, 1, 7, LONGEST)}
    assert shapes == {tuple(leaf.shape for leaf in leaves(memory.start(2)))}


@pytest.mark.parametrize("name", claiming("grows"))
def test_a_state_that_grows_grows_by_the_same_bytes_for_every_token(name, generator):
    memory = made(name)
    sizes = [size_of(written(memory, Tokens.full(ids(generator, 2, length)))) for length in (1, 2, 9)]
    assert sizes[1] > sizes[0]
    assert sizes[2] - sizes[1] == 7 * (sizes[1] - sizes[0])


def test_different_contexts_leave_different_states(memory, generator):
    one, other = (written(memory, Tokens.full(ids(generator, 1, 7))) for _ in range(2))
    assert any((x != y).any() for x, y in zip(leaves(one), leaves(other), strict=True))


def test_neither_write_nor_read_touches_the_old_state(memory, generator):
    context, query = Tokens.full(ids(generator, 2, 7)), Tokens.full(ids(generator, 2, 3))
    for state in (memory.start(2), written(memory, context)):
        before, versions = map_state(lambda x: x.detach().clone(), state), [leaf._version for leaf in leaves(state)]
        memory.write(state, context)
        memory.read(state, query)
        assert_equal_states(map_state(torch.Tensor.detach, state), before)
        assert [leaf._version for leaf in leaves(state)] == versions


def test_a_read_sees_the_state_and_nothing_else_of_the_past(memory, generator):
    """Not the context's tensor, not what else was written or read since; and two reads of one state are one."""
    context, query = Tokens.full(ids(generator, 2, 7)), Tokens.full(ids(generator, 2, 3))
    state = written(memory, context)
    first = memory.read(state, query).detach()
    copy = map_state(torch.clone, state)
    context.ids.fill_(0)
    memory.read(written(memory, Tokens.full(ids(generator, 3, 5))), Tokens.full(ids(generator, 3, 4)))
    assert torch.equal(memory.read(copy, query).detach(), first)


@pytest.mark.parametrize("length", [0, 5])
def test_writing_a_context_without_tokens_returns_the_state_bit_for_bit(length, memory, generator):
    nothing = Tokens(ids(generator, 2, length), torch.zeros(2, length, dtype=torch.bool))
    for state in (started(memory, 2), written(memory, Tokens.full(ids(generator, 2, 4)))):
        assert_equal_states(memory.write(state, nothing), state)


def test_a_row_without_tokens_keeps_its_state_bit_for_bit_beside_rows_that_have_some(memory, rows):
    state, start = written(memory, Tokens.of(rows)), started(memory, len(rows))
    start = map_states(lambda x, y: widened(x, y)[0], start, state)
    assert_equal_states(row_of(state, -1), row_of(start, -1))
    changed = map_states(lambda x, y: (x != y).reshape(len(x), -1).any(1), state, start)
    assert torch.stack(leaves(changed)).any(0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", claiming("steps"))
def test_writing_with_no_steps_returns_the_state_bit_for_bit(name, rows):
    memory = made(name)
    assert_equal_states(memory.write(memory.start(len(rows)), Tokens.of(rows), steps=0), memory.start(len(rows)))


@pytest.mark.parametrize("name", claiming("parts"))
@pytest.mark.parametrize("cut", [1, 4, 8])
def test_writing_in_two_parts_is_writing_once(cut, name, generator):
    memory, whole = made(name), ids(generator, 3, 9)
    half = memory.write(memory.start(3), Tokens.full(whole[:, :cut]))
    state = map_state(torch.Tensor.detach, memory.write(half, Tokens.full(whole[:, cut:])))
    assert_same(state, written(memory, Tokens.full(whole)), start=started(memory, 3), tolerance=MEMORIES[name].tolerance)


@pytest.mark.parametrize("where", ["right", "left", "interior"])
def test_padding_never_changes_a_state(where, case, memory, rows, generator):
    start, state = started(memory, 1), written(memory, padded(rows, where=where, generator=generator))
    for i, row in enumerate(rows[:-1]):
        assert_same(row_of(state, i), written(memory, Tokens.of([row])), start=start, tolerance=MEMORIES[case].tolerance)


def test_padding_never_changes_the_state_of_one_row_alone(case, memory, generator):
    """A batch of one: where some libraries pass over the mask."""
    row = ids(generator, 5).tolist()
    expected = written(memory, Tokens.of([row]))
    for where in ("right", "left"):
        found = written(memory, padded([row], where=where, generator=generator))
        assert_same(found, expected, start=started(memory, 1), tolerance=MEMORIES[case].tolerance)


def test_rows_of_a_batch_never_meet(case, memory, generator):
    one = ids(generator, 3, 7)
    other = one.clone()
    other[1] = (one[1] + 1) % VOCABULARY
    states = [written(memory, Tokens.full(x)) for x in (one, other)]
    assert any((x != y).any() for x, y in zip(*(leaves(row_of(state, 1)) for state in states), strict=True))
    for i in (0, 2):
        assert_same(row_of(states[1], i), row_of(states[0], i), start=started(memory, 1), tolerance=MEMORIES[case].tolerance)


def test_a_batch_is_written_and_read_like_its_rows_one_by_one(case, memory, rows, generator):
    state, queries = written(memory, Tokens.of(rows)), [ids(generator, length).tolist() for length in (3, 0, 6, 1)]
    read = memory.read(state, Tokens.of(queries)).detach()
    for i, (row, query) in enumerate(zip(rows, queries, strict=True)):
        alone = written(memory, Tokens.of([row]))
        if row:
            assert_same(row_of(state, i), alone, start=started(memory, 1), tolerance=MEMORIES[case].tolerance)
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
        alone = memory.read(row_of(state, i), Tokens.of([row]))[0].detach()
        expected = alone[torch.cat([torch.zeros(1, dtype=torch.long), query.mask[i].cumsum(0)])]
        assert float((read[i] - expected).abs().max() / expected.std()) <= MEMORIES[case].tolerance


def test_what_is_read_depends_on_what_was_written(memory, generator):
    query = Tokens.full(ids(generator, 1, 3))
    one, other = (memory.read(written(memory, Tokens.full(ids(generator, 1, 7))), query) for _ in range(2))
    assert (one != other).any()


def test_the_same_seed_gives_the_same_bits(case, memory, rows):
    context, again = Tokens.of(rows), MEMORIES[case].make()
    one, other = (written(x, context) for x in (memory, again))
    assert_equal_states(one, other)
    assert torch.equal(memory.read(one, context), again.read(other, context))


def test_the_state_is_float32_whatever_the_model_is(memory, rows):
    kinds = {leaf.dtype for state in (memory.start(len(rows)), written(memory, Tokens.of(rows))) for leaf in leaves(state)}
    assert {kind for kind in kinds if kind.is_floating_point} == {torch.float32}


def test_under_autocast_the_state_is_float32_too(memory, rows):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = written(memory, Tokens.of(rows))
    assert {leaf.dtype for leaf in leaves(state) if leaf.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("name", claiming("trains"))
def test_the_loss_of_what_is_read_reaches_every_weight(name, rows, generator):
    memory = made(name)
    state = memory.write(memory.start(len(rows)), Tokens.of(rows))
    query = Tokens.full(ids(generator, len(rows), 5))
    loss = torch.nn.functional.cross_entropy(memory.read(state, query)[:, 1:].flatten(0, 1), query.ids.flatten())
    names, weights = zip(*((name, weight) for name, weight in memory.named_parameters() if weight.requires_grad), strict=True)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    assert [name for name, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.any()] == []


def test_a_write_without_gradients_leaves_no_graph_and_is_the_same_write(case, memory, rows):
    with torch.no_grad():
        state = memory.write(memory.start(len(rows)), Tokens.of(rows))
    assert not any(leaf.requires_grad for leaf in leaves(state))
    assert_same(state, written(memory, Tokens.of(rows)), start=started(memory, len(rows)), tolerance=MEMORIES[case].tolerance)
