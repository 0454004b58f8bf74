"""Writing until exact: it stops early, keeps the best, says how it ended, and no row minds the others."""

import math

import cases
import pytest
import torch

from graven import engrave as engrave_module
from graven.engrave import ROWS_AT_ONCE, Row, _judge, engrave, engrave_objective, hits_of, pursue
from graven.errors import ModelError, Outcome
from graven.memory.gradient import SGD, Adam, GradMem, GradMemSpec
from graven.memory.objective import reconstruct, sum_of
from graven.tasks.base import Tokens

TEXTS = [[5, 17, 3, 40, 41, 2], [9, 8], [30, 31, 32, 33, 34, 35, 36, 1]]
MODELS = {"small": cases.small, "llama": cases.llama}


def memory_of(model, *, rate=0.1, slots=8, **rule):
    return GradMem(model, GradMemSpec(slots=slots, steps=0, rule=Adam(rate=rate * model.embedding_scale, **rule), order="none"))


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return cases.sharp(MODELS[request.param]())


@pytest.fixture(scope="module")
def small():
    return cases.sharp(cases.small())


@pytest.fixture(scope="module")
def written(model):
    return engrave(memory_of(model), Tokens.of(TEXTS), steps=300, until_exact=True)


def loss_of(memory, state, text):
    return float(memory.step(state, memory.prepare(state, Tokens.of([text]))).loss)


# Until exact


def test_texts_are_written_exactly_before_the_steps_run_out(written):
    assert written.outcome is Outcome.EXACT
    assert written.recited == [6, 2, 8]
    assert written.token_accuracy == 1.0
    assert 1 < len(written.losses) < 300
    assert written.losses[-1] < written.losses[0] / 2
    assert written.seconds > 0


def test_a_model_that_runs_freely_from_what_was_written_gives_the_texts(model, written):
    assert memory_of(model).recite(written.state, [6, 2, 8]) == TEXTS


def test_a_row_ends_the_same_alone_and_beside_others(model, written):
    for number, text in enumerate(TEXTS):
        alone = engrave(memory_of(model), Tokens.of([text]), steps=300, until_exact=True)
        assert alone.recited == [len(text)]
        assert memory_of(model).recite(alone.state, [len(text)]) == [text]
        assert len(alone.losses) <= len(written.losses)
        assert alone.losses[:5] == pytest.approx(engrave(memory_of(model), Tokens.of([text] * 2), steps=5, until_exact=True).losses, rel=1e-4)
        # Adam's first steps are signs of gradients, which rounding may turn; what is kept is as good
        assert loss_of(memory_of(model), alone.state, text) == pytest.approx(loss_of(memory_of(model), written.state[[number]], text), abs=0.5)


def test_a_row_that_is_done_keeps_its_state_while_others_go_on(small):
    memory = memory_of(small)
    quick, slow = engrave(memory, Tokens.of([[9, 8]]), steps=300, until_exact=True), engrave(memory, Tokens.of(TEXTS), steps=300, until_exact=True)
    assert len(quick.losses) < len(slow.losses)
    torch.testing.assert_close(slow.state[1], quick.state[0], rtol=1e-3, atol=1e-3)


def test_more_rows_than_fit_into_a_batch_are_the_same_rows_alone(small, generator):
    texts = torch.randint(cases.VOCABULARY, (ROWS_AT_ONCE + 3, 3), generator=generator).tolist()
    memory = memory_of(small)
    many = engrave(memory, Tokens.of(texts), steps=200, until_exact=True)
    assert many.recited == [3] * len(texts)
    assert many.outcome is Outcome.EXACT
    assert memory.recite(many.state, [3] * len(texts)) == texts
    alone = [engrave(memory, Tokens.of([text]), steps=200, until_exact=True) for text in texts]
    assert [memory.recite(one.state, [3])[0] for one in alone] == texts


def test_padding_anywhere_changes_nothing(small):
    padded = Tokens(torch.tensor([[5, 17, 3, 40], [7, 9, 7, 8]]), torch.tensor([[True] * 4, [False, True, False, True]]))
    ours, plain = (engrave(memory_of(small), tokens, steps=5, until_exact=True) for tokens in (padded, Tokens.of([[5, 17, 3, 40], [9, 8]])))
    assert torch.equal(ours.state, plain.state)
    assert ours.losses == plain.losses


def test_the_same_memory_and_text_give_the_same_bits(small):
    first, second = (engrave(memory_of(small), Tokens.of(TEXTS), steps=20, until_exact=True) for _ in range(2))
    assert torch.equal(first.state, second.state)
    assert first.losses == second.losses


def test_weights_and_start_stay_as_they_are(model):
    memory = memory_of(model)
    before = {name: x.clone() for name, x in memory.state_dict().items()}
    engrave(memory, Tokens.of(TEXTS), steps=3, until_exact=True)
    assert all(torch.equal(x, before[name]) for name, x in memory.state_dict().items())
    assert all(parameter.grad is None for parameter in memory.parameters())


# The best is kept


def trajectory(memory, text, steps):
    """Loss and hits of the state before each step, by the definition."""
    with torch.no_grad():
        state, moments, seen = memory.start(1), None, []
        prepared = memory.prepare(state, Tokens.of([text]))
        for _ in range(steps + 1):
            step = memory.step(state, prepared, moments)
            seen.append((int(step.hits.sum()), float(step.loss), state))
            state, moments = step.state, step.moments
    return seen


@pytest.mark.parametrize("rate", [0.03, 1.0, 10.0])
def test_the_state_kept_is_the_best_of_all_that_were_seen(small, rate):
    text = list(range(40, 52))  # too long for two slots
    memory = memory_of(small, rate=rate, slots=2)
    seen = trajectory(memory, text, 25)
    best = max(seen, key=lambda s: (s[0], -s[1]))
    out = engrave(memory, Tokens.of([text]), steps=25, until_exact=True)
    assert torch.equal(out.state, best[2])
    assert out.token_accuracy == best[0] / len(text)
    assert out.losses == [loss for _, loss, _ in seen[:-1]]


def test_without_until_exact_every_step_is_taken_and_the_last_state_kept(small):
    memory = GradMem(small, GradMemSpec(slots=2, steps=0, rule=SGD(rate=0.05)))
    seen = trajectory(memory, TEXTS[0], 6)
    out = engrave(memory, Tokens.of([TEXTS[0]]), steps=6, until_exact=False)
    assert out.outcome is Outcome.DONE
    assert torch.equal(out.state, seen[-1][2])
    assert out.losses == [loss for _, loss, _ in seen[:-1]]


def test_an_exact_state_is_one_that_was_run_freely_itself(small, monkeypatch):
    memory = memory_of(small)
    recite, asked = memory.recite, []

    def stubborn(state, lengths):
        asked.append(state.clone())
        return recite(state, lengths) if len(asked) > 2 else [[0] * lengths[0]]

    monkeypatch.setattr(memory, "recite", stubborn)
    out = engrave(memory, Tokens.of([TEXTS[0]]), steps=300, until_exact=True)
    assert len(asked) == 3
    assert torch.equal(out.state, asked[-1])
    assert out.outcome is Outcome.EXACT


# Steps


def test_no_steps_give_the_start_state(model):
    memory = memory_of(model)
    out = engrave(memory, Tokens.of(TEXTS), steps=0, until_exact=False, deadline=0.0)
    assert out.outcome is Outcome.DONE
    assert out.losses == []
    assert torch.equal(out.state, memory.start(3))


@pytest.mark.parametrize("steps", [1, 7])
def test_losses_and_calls_have_one_for_each_step(small, steps):
    calls = []
    out = engrave(
        memory_of(small), Tokens.of(TEXTS), steps=steps, until_exact=True, progress=lambda step, loss, right: calls.append((step, loss, right))
    )
    assert [step for step, _, _ in calls] == list(range(1, steps + 1))
    assert [loss for _, loss, _ in calls] == out.losses
    assert all(0 <= right <= 1 for _, _, right in calls)
    assert out.outcome is Outcome.STEPS


def test_the_losses_of_several_batches_are_the_mean_over_all_rows(small):
    texts = [*TEXTS * 3, [1, 2]]
    one = [engrave(memory_of(small), Tokens.of([text]), steps=2, until_exact=False).losses for text in texts]
    many = engrave(memory_of(small), Tokens.of(texts), steps=2, until_exact=False).losses
    assert many == pytest.approx([sum(at) / len(texts) for at in zip(*one, strict=True)], rel=1e-3)


# Time


class Clock:
    """Each look at it takes a second."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def test_a_deadline_of_no_time_gives_the_start_state(model):
    memory = memory_of(model)
    out = engrave(memory, Tokens.of(TEXTS), steps=50, until_exact=True, deadline=0.0)
    assert out.outcome is Outcome.DEADLINE
    assert out.losses == []
    assert torch.equal(out.state, memory.start(3))


def test_a_deadline_keeps_the_best_so_far(small, monkeypatch):
    monkeypatch.setattr(engrave_module, "time", Clock())
    out = engrave(memory_of(small, rate=0.01), Tokens.of(TEXTS), steps=500, until_exact=True, deadline=10.0)
    assert out.outcome is Outcome.DEADLINE
    assert 5 <= len(out.losses) <= 10
    assert out.losses[-1] < out.losses[0]
    assert not torch.equal(out.state, memory_of(small).start(3))


def test_a_deadline_that_passes_at_the_last_step_changes_nothing(small, monkeypatch):
    memory = memory_of(small)
    plain = engrave(memory, Tokens.of(TEXTS), steps=4, until_exact=False)
    monkeypatch.setattr(engrave_module, "time", Clock())
    late = engrave(memory, Tokens.of(TEXTS), steps=4, until_exact=False, deadline=6.0)
    assert late.outcome is Outcome.DONE
    assert torch.equal(late.state, plain.state)


def test_every_group_of_pages_has_its_share_of_the_time(small, monkeypatch):
    texts = [[n, n + 1, n + 2, n + 3] for n in range(3 * ROWS_AT_ONCE)]
    steps = []
    monkeypatch.setattr(engrave_module, "time", Clock())
    memory = memory_of(small, rate=0.01)
    out = engrave(memory, Tokens.of(texts), steps=500, until_exact=True, deadline=60.0, progress=lambda step, *_: steps.append(step))
    assert out.outcome is Outcome.DEADLINE
    ends = [a for a, b in zip(steps, [*steps[1:], 1], strict=True) if b == 1]
    assert len(ends) == 3
    assert max(ends) - min(ends) <= 5  # the clock ticks at every look, between the groups as well
    assert sum(ends) <= 60
    assert len(out.losses) == max(ends)


# What goes wrong


@pytest.mark.parametrize("rate", [1e4, 1e30])
def test_a_rate_far_too_large_is_said_and_what_is_kept_is_finite(model, rate):
    memory = memory_of(model, rate=rate)
    out = engrave(memory, Tokens.of(TEXTS), steps=10, until_exact=True)
    assert out.outcome is Outcome.DIVERGED
    assert bool(out.state.isfinite().all())
    assert all(math.isfinite(loss) for loss in out.losses)
    for number, text in enumerate(TEXTS):  # no worse than the start
        assert loss_of(memory, out.state[[number]], text) <= loss_of(memory, memory.start(1), text) or out.recited[number] > 0


@pytest.mark.parametrize("until_exact", [True, False])
def test_a_state_that_is_not_finite_is_never_kept(small, until_exact):
    memory = GradMem(small, GradMemSpec(slots=2, steps=0, rule=SGD(rate=1e38)))
    out = engrave(memory, Tokens.of(TEXTS), steps=8, until_exact=until_exact)
    assert out.outcome is Outcome.DIVERGED
    assert bool(out.state.isfinite().all())
    assert all(math.isfinite(loss) for loss in out.losses)


def test_a_row_that_diverges_does_not_change_the_others(small):
    memory = memory_of(small)
    plain = engrave(memory, Tokens.of(TEXTS), steps=6, until_exact=False)
    step = memory.step

    def poisoned(state, prepared, moments, *, taken):
        """The second row's loss is not finite from the third state on."""
        out = step(state, prepared, moments, taken=taken)
        if len(state) == 3 and moments is not None and moments.count == 2:
            out.loss[1] = math.nan
        return out

    memory.step = poisoned
    out = engrave(memory, Tokens.of(TEXTS), steps=6, until_exact=False)
    assert out.outcome is Outcome.DIVERGED
    torch.testing.assert_close(out.state[[0, 2]], plain.state[[0, 2]], rtol=1e-3, atol=1e-3)
    assert all(math.isfinite(loss) for loss in out.losses)


def test_a_start_without_a_finite_loss_is_an_error_in_words(small):
    memory = memory_of(small)
    with torch.no_grad():
        memory.initial.fill_(math.nan)
    with pytest.raises(ModelError, match="the loss of the start state is nan"):
        engrave(memory, Tokens.of(TEXTS), steps=2, until_exact=True)


def test_a_loss_that_rises_far_above_the_lowest_is_a_divergence():
    state, hits = torch.zeros(1, 1), torch.zeros(1, dtype=torch.bool)
    for losses, diverged in ([5.0, 1.0, 2.9], False), ([5.0, 1.0, 3.1], True), ([5.0, 10.9], False), ([5.0, 11.1], True), ([5.0, math.inf], True):
        row = Row(state, hits, 1)
        for loss in losses:
            _judge(row, state, torch.tensor(loss), hits, keep_best=True)
        assert (row.diverged, row.kept) == (diverged, min(losses))


# Any objective


class Slope:
    """Loss of a state along a line, and what it is at given steps whatever the state."""

    def __init__(self, **given):
        self.given = {int(step.removeprefix("at")): loss for step, loss in given.items()}
        self.seen = []

    def loss(self, memory, state, *, step):
        assert memory.spec.slots == state.shape[1]
        self.seen.append(state.detach().clone())
        return state.sum() * 0 + self.given.get(step, 1.0 / (step + 1))


def pursued(small, objective, steps, **rest):
    memory = GradMem(small, GradMemSpec(slots=2, steps=0, rule=SGD(rate=1.0), order="none"))
    return memory, pursue(memory, objective, start=memory.start(1), steps=steps, **rest)


def test_a_pursuit_descends_at_a_rate_that_falls_to_nothing(small):
    class Plane:
        def loss(self, memory, state, *, step):
            assert memory.spec.slots == 2 and step >= 0  # noqa: PT018
            return state.sum()

    memory, done = pursued(small, Plane(), 4)
    torch.testing.assert_close(done.state, memory.start(1) - (1 + 0.75 + 0.5 + 0.25))
    assert done.outcome is Outcome.DONE
    assert len(done.losses) == 4


def test_a_pursuit_of_the_text_makes_it_known(small):
    memory = memory_of(small, rate=0.3)
    done = pursue(memory, reconstruct(TEXTS[0]), start=memory.start(1), steps=100)
    assert all(hits_of(memory, done.state, TEXTS[0]))
    assert memory.recite(done.state, [6]) == [TEXTS[0]]


def test_a_pursuit_ends_where_the_mean_of_its_last_losses_is_low_enough(small):
    _, done = pursued(small, Slope(), 30, until=(0.3, 2))
    assert done.outcome is Outcome.CLOSE
    assert done.losses == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_a_pursuit_that_diverges_keeps_the_state_of_its_lowest_loss(small):
    for bad in (math.nan, 3.1):
        slope = Slope(at3=bad)
        _, done = pursued(small, slope, 30)
        assert done.outcome is Outcome.DIVERGED
        assert torch.equal(done.state, slope.seen[2])
        assert len(done.losses) == 3


def test_a_pursuit_without_a_finite_start_is_an_error_in_words(small):
    with pytest.raises(ModelError, match="the loss of the start state is nan"):
        pursued(small, Slope(at0=math.nan), 3)


def test_a_pursuit_says_when_its_time_is_over(small, monkeypatch):
    monkeypatch.setattr(engrave_module, "time", Clock())
    calls = []
    _, done = pursued(small, Slope(), 30, deadline=5.0, progress=lambda step, loss: calls.append((step, loss)))
    assert done.outcome is Outcome.LATE
    assert [loss for _, loss in calls] == done.losses
    assert [step for step, _ in calls] == [1, 2, 3, 4]


def test_pages_pursue_a_sum_of_objectives_each_for_itself(small):
    memory, texts = memory_of(small, rate=0.3), [TEXTS[0], TEXTS[2]]
    weights = {"reconstruct": 1.0, "continue": 0.5}
    both = engrave_objective(memory, Tokens.of(texts), lambda row: sum_of(weights, row), steps=12)
    for number, text in enumerate(texts):
        alone = engrave_objective(memory, Tokens.of([text]), lambda row: sum_of(weights, row), steps=12)
        torch.testing.assert_close(both.state[number], alone.state[0])
        hits = hits_of(memory, alone.state, text)
        assert both.recited[number] == alone.recited[0] == (hits.index(False) if False in hits else len(hits))
    assert both.outcome is Outcome.DONE
    assert len(both.losses) == 12
    assert both.losses[-1] < both.losses[0]
