"""Exact match against a count by hand: one context, one query, one token at a time."""

import math
import statistics

import pytest
import torch
import zoo

from graven.errors import SpecError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.measure import CONTEXTS_AT_ONCE, exact_match, read_episode, right
from graven.memory.cache import KVCache
from graven.memory.forward import RMT, RMTSpec
from graven.memory.gradient import SGD, Adam, GradMem, GradMemSpec
from graven.tasks.base import Tokens
from graven.tasks.retrieval import Retrieval

TASK = Retrieval(key_length=1, value_length=2, symbols=3)
ROUNDING = 1e-5  # float32, batches of other sizes


@pytest.fixture(params=[(SGD(rate=0.5), "second"), (Adam(rate=0.05), "none")], ids=["SGD", "Adam"])
def memory(request):
    model = Small(DecoderSpec(vocabulary=TASK.vocabulary, width=16, layers=1, heads=2, key_value_heads=2, hidden=16))
    zoo.redraw(model, seed=2)
    model.decoder.norm.weight.data[:] = 4
    model.decoder.head.weight.data[TASK.symbols :] = 0  # so that it mostly guesses symbols, and some of its guesses are right
    rule, order = request.param
    return GradMem(model, GradMemSpec(slots=2, steps=1, rule=rule, order=order))


def episode_of(generator, size=3, pairs=3):
    return TASK.sample(size, pairs=pairs, generator=generator)


def test_every_target_token_of_every_query_is_read_from_the_memory_of_its_row(memory, generator):
    episode, state = episode_of(generator), torch.randn(3, 2, 16, generator=generator)
    logits = read_episode(memory, state, episode)
    assert logits.shape == (3, 3, TASK.value_length + 2, TASK.vocabulary)
    for b in range(3):
        for q in range(3):
            for s in range(TASK.value_length + 2):
                seen = torch.cat([episode.query.ids[b, q], episode.target.ids[b, q, :s]])
                expected = memory.read(state[b : b + 1], Tokens.full(seen[None]))[0, -1]
                torch.testing.assert_close(logits[b, q, s], expected, rtol=ROUNDING, atol=ROUNDING)


def test_an_answer_is_right_when_its_value_is_whatever_follows(generator):
    episode = episode_of(generator, size=1)
    logits = torch.nn.functional.one_hot(episode.target.ids, TASK.vocabulary).float()
    assert right(logits, episode).tolist() == [[True, True, True]]
    logits[0, 0, 1] = logits[0, 0, 1].roll(1)  # the second token of a value
    logits[0, 1, 2:] = 0  # what closes an answer
    assert right(logits, episode).tolist() == [[False, True, True]]


def test_rows_equal_a_count_by_hand(memory):
    steps, contexts, pairs, seed = [4, 0, 1, 4], CONTEXTS_AT_ONCE + 3, 3, 7
    rows = list(exact_match(memory, TASK, pairs=pairs, steps=steps, contexts=contexts, seed=seed))
    assert [row.steps for row in rows] == [0, 1, 4]
    generator = torch.Generator().manual_seed(seed)
    episodes = [TASK.sample(size, pairs=pairs, generator=generator) for size in (CONTEXTS_AT_ONCE, 3)]
    for row in rows:
        shares, losses, value_losses = [], [], []
        for episode in episodes:
            for b in range(len(episode.context.ids)):
                context = Tokens.full(episode.context.ids[b : b + 1])
                with torch.no_grad():
                    state = memory.write(memory.start(1), context, steps=row.steps)
                    logits = memory.read(state, Tokens.full(context.ids[:, :-1]))[0].log_softmax(-1)
                    each = -logits.gather(-1, context.ids[0, :, None])[:, 0]
                    losses.append(float(each.mean()))
                    value_losses.append(float(each[episode.values[b]].mean()))
                    shares.append(
                        statistics.mean(is_right(memory, state, *asked) for asked in zip(episode.query.ids[b], episode.target.ids[b], strict=True))
                    )
        assert row.exact_match == pytest.approx(statistics.mean(shares), abs=ROUNDING)
        assert row.standard_error == pytest.approx(statistics.stdev(shares) / math.sqrt(contexts), abs=ROUNDING)
        assert row.write_loss == pytest.approx(statistics.mean(losses), rel=ROUNDING)
        assert row.value_loss == pytest.approx(statistics.mean(value_losses), rel=ROUNDING)
        assert (row.pairs, row.seed, row.contexts) == (pairs, seed, contexts)
    assert len({row.write_loss for row in rows}) == 3
    assert any(0 < row.exact_match < 1 for row in rows)


def test_a_memory_that_takes_no_steps_gives_one_row_and_forward_writes_begin_anew(memory):
    model = memory.model
    (row,) = exact_match(KVCache(model), TASK, pairs=2, contexts=12, seed=1)
    assert (row.steps, row.write_loss, row.value_loss) == (None, None, None)
    rmt = RMT(model, RMTSpec(slots=2))
    both, one, two = (list(exact_match(rmt, TASK, pairs=2, steps=steps, contexts=12, seed=1)) for steps in ([1, 2], [1], [2]))
    assert both == one + two


def is_right(memory, state, query, target):
    """Every token of the value is the most probable one after those before it."""
    return all(
        int(memory.read(state, Tokens.full(torch.cat([query, target[:s]])[None]))[0, -1].argmax()) == int(target[s]) for s in range(TASK.value_length)
    )


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(memory):
    one, same, other = (list(exact_match(memory, TASK, pairs=2, steps=[1], contexts=5, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one[0].write_loss != other[0].write_loss


def test_one_context_has_no_standard_error(memory):
    (row,) = exact_match(memory, TASK, pairs=2, steps=[1], contexts=1, seed=1)
    assert math.isnan(row.standard_error)


def test_steps_that_are_left_out_are_those_of_the_spec(memory):
    given = list(exact_match(memory, TASK, pairs=2, steps=[memory.spec.steps], contexts=5, seed=1))
    assert list(exact_match(memory, TASK, pairs=2, contexts=5, seed=1)) == given


@pytest.mark.parametrize(("pairs", "contexts", "steps"), [(0, 1, [1]), (1, 0, [1]), (1, 1, []), (1, 1, [-1, 2])])
def test_nothing_to_measure_is_refused(pairs, contexts, steps, memory):
    with pytest.raises(SpecError) as caught:
        list(exact_match(memory, TASK, pairs=pairs, steps=steps, contexts=contexts, seed=1))
    assert str(caught.value) == (
        f"`pairs` is {pairs}, `contexts` is {contexts} and `steps` is {steps}; ask for at least one pair, one context and one number of steps."
    )
