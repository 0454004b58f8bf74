"""The key-value cache against one run over context and query, in float64."""

import pytest
import torch
from asserts import assert_refused

from graven.errors import ShapeError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.base import floats, leaves
from graven.memory.cache import KVCache
from graven.tasks.base import Tokens

VOCABULARY, WIDTH, LAYERS, GROUPS, HEAD = 11, 8, 2, 1, 4
ROUNDING = 1e-12  # float64: the same sums in another order


@pytest.fixture(params=[0, 1, 3], ids=lambda span: f"convolution {span}")
def memory(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        spec = DecoderSpec(vocabulary=VOCABULARY, width=WIDTH, layers=LAYERS, heads=2, key_value_heads=GROUPS, hidden=12, convolution=request.param)
        return KVCache(Small(spec), seed=2).double()


def whole(memory, context, query, *, shift=0):
    """Logits from the last token of the context on, in one run over the learned vector, context and query."""
    decoder, ids = memory.model.decoder, torch.tensor([[*context, *query]])
    x = torch.cat([memory.begin, decoder.embed(ids)], 1)
    positions = torch.arange(x.shape[1])[None]
    positions[:, len(context) + 1 :] += shift
    return decoder.head(decoder.hidden(x, positions=positions))[0, len(context) :]


def test_a_read_equals_one_run_over_context_and_query(memory, generator):
    contexts, queries = ([torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths] for lengths in ((7, 3, 0), (2, 5, 4)))
    read = memory.read(memory.write(memory.start(3), Tokens.of(contexts)), Tokens.of(queries))
    for row, context, query in zip(read, contexts, queries, strict=True):
        torch.testing.assert_close(row[: len(query) + 1], whole(memory, context, query), rtol=ROUNDING, atol=ROUNDING)


def test_a_query_at_other_positions_would_be_seen(memory, generator):
    context, query = (torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (7, 3))
    read = memory.read(memory.write(memory.start(1), Tokens.of([context])), Tokens.of([query]))[0]
    assert float((read - whole(memory, context, query, shift=-7)).detach().abs().max()) > 1e-3


def test_pieces_of_ragged_rows_are_one_cache(memory, generator):
    rows = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (7, 3, 5)]
    cuts, state = (0, 1, 5), memory.start(3)
    for pieces in ([row[:cut] for row, cut in zip(rows, cuts, strict=True)], [row[cut:] for row, cut in zip(rows, cuts, strict=True)]):
        state = memory.write(state, Tokens.of(pieces))
    for found, wanted in zip(leaves(state), leaves(memory.write(memory.start(3), Tokens.of(rows))), strict=True):
        torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)


def test_keys_and_values_of_a_token_are_so_many_numbers(memory, generator):
    sizes = [floats(memory.write(memory.start(1), Tokens.full(torch.randint(VOCABULARY, (1, n), generator=generator)))) for n in (4, 9)]
    assert sizes[1] - sizes[0] == 2 * LAYERS * GROUPS * HEAD * 5


@pytest.mark.plain
def test_other_rows_are_refused(memory):
    assert_refused(ShapeError, "`tokens` has shape", lambda: memory.read(memory.start(2), Tokens.of([[1]])))
