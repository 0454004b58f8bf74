"""What a write descends: each objective against its definition, one row and one token at a time."""

import math
from itertools import chain

import cases
import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import SpecError
from graven.lm.base import predictors
from graven.lm.cached import Followed
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.objective import Objective, Predict, Weighted, continuations, distil, reconstruct, sum_of, weights_of
from graven.tasks.base import Tokens

TEXT = [5, 17, 3, 40, 41, 2, 60, 61, 9, 30]
QUERIES = [[5, 17], [9], [30, 31, 32, 33]]
BEFORE = [70, 71]
ROUNDING = 1e-5  # float32, a mean over a handful of losses


@pytest.fixture(scope="module", params=["plain", "behind fixed tokens"])
def memory(request):
    before = BEFORE if request.param != "plain" else ()
    return GradMem(cases.llama(), GradMemSpec(slots=3, steps=0, rule=Adam(), order="none"), seed=3, before=before)


@pytest.fixture
def state(memory):
    return memory.start(1).detach()


def log_probabilities(memory, state, row):
    """Of the token after memory and row, by the model alone."""
    parts = [memory.model.embed(Tokens.of([memory.before]))] if memory.before else []
    columns = torch.cat([*parts, state, memory.model.embed(Tokens.of([row]))], dim=1)
    return memory.model.logits(memory.model.hidden(columns)[0, -1]).log_softmax(-1)


def said_by(generator, counts, width):
    """Answers of a teacher, and the hidden states that predicted them."""
    return [Followed(torch.randint(cases.VOCABULARY, (n,), generator=generator).tolist(), torch.randn(n, width, generator=generator)) for n in counts]


def test_reconstruct_is_the_mean_over_the_tokens_of_the_text(memory, state):
    wanted = [-log_probabilities(memory, state, TEXT[:i])[TEXT[i]] for i in range(len(TEXT))]
    assert_near([reconstruct(TEXT).loss(memory, state, step=0)], [torch.stack(wanted).mean()], tolerance=ROUNDING)


def test_reconstruct_is_what_a_write_descends(memory, state):
    step = memory.step(state, memory.prepare(state, Tokens.of([TEXT])))
    assert_near([reconstruct(TEXT).loss(memory, state, step=0)[None]], [step.loss], tolerance=ROUNDING)


def test_continue_counts_what_follows_a_cue_from_anywhere(memory, state):
    wanted = [-log_probabilities(memory, state, TEXT[a:i])[TEXT[i]] for a in range(len(TEXT) - 2) for i in range(a + 2, min(a + 2 + 3, len(TEXT)))]
    objective = continuations(TEXT, cue=2, length=3)
    losses, _ = objective.losses(memory, state, range(len(TEXT) - 2))
    assert_near([losses], [torch.stack(wanted)], tolerance=ROUNDING)


def test_distill_is_the_divergence_from_what_the_teacher_says_at_every_token_of_its_answers(memory, state, generator):
    said = said_by(generator, [2, 1, 3], memory.model.hidden_width)
    wanted, tops = [], []
    for query, one in zip(QUERIES, said, strict=True):
        for at, hidden in enumerate(one.hidden):
            taught, ours = memory.model.logits(hidden).log_softmax(-1), log_probabilities(memory, state, [*query, *one.tokens[:at]])
            wanted.append((taught.exp() * (taught - ours)).sum())
            tops.append(bool(taught.argmax() == ours.argmax()))
    objective = distil(QUERIES, said)
    losses, hits = objective.losses(memory, state, [0, 1, 2])
    assert_near([losses], [torch.stack(wanted)], tolerance=ROUNDING)
    assert hits.tolist() == tops
    assert_near([objective.losses(memory, state, [2, 0])[0]], [torch.stack([*wanted[3:], *wanted[:2]])], tolerance=ROUNDING)


def test_a_memory_that_is_its_own_teacher_has_no_divergence_and_no_gradient(memory, state):
    (hidden,) = predictors(memory.model, memory.prefix(state, control=None), Tokens.of([[9]]), [[4]])
    here = state.clone().requires_grad_()
    loss = distil([[9]], [Followed([4], hidden)]).loss(memory, here, step=0)
    (gradient,) = torch.autograd.grad(loss, here)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(gradient.abs().max()) < 1e-6


def test_a_sum_weighs_its_parts(memory, state):
    parts = [reconstruct(TEXT), continuations(TEXT)]
    one, other = (part.loss(memory, state, step=2) for part in parts)
    both = sum_of({"reconstruct": 2.0, "continue": 0.5}, TEXT).loss(memory, state, step=2)
    assert_near([both], [2 * one + 0.5 * other], tolerance=ROUNDING)


def test_an_epoch_sees_every_row_once_and_the_next_one_in_another_order():
    objective = Predict([[]] * 21, [[i] for i in range(21)], rows_a_step=8)
    first, second = ([objective.chosen(step) for step in steps] for steps in (range(3), range(3, 6)))
    assert [len(rows) for rows in first] == [8, 8, 5]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(21))
    assert first != second
    assert [objective.chosen(step) for step in range(3)] == first


def test_columns_of_a_step_count_rows_and_what_stands_before_each():
    assert reconstruct(TEXT).columns_a_step(prefix=5) == 15
    rows = Predict([[1], [3]], [[2], [4, 5, 6]], rows_a_step=1)
    assert rows.columns_a_step(prefix=5) == 8  # a row of 3 in the mean
    nine = Predict([[]] * 9, [[1, 2, 3]] * 9, rows_a_step=8)
    assert nine.columns_a_step(prefix=5) == 36  # eight rows, and one


def test_objectives_are_objectives():
    assert isinstance(reconstruct(TEXT), Objective)
    assert isinstance(Weighted(((1.0, reconstruct(TEXT)),)), Objective)


@pytest.mark.parametrize(
    ("text", "weights"),
    [("distill", {"distill": 1.0}), ("reconstruct=1,distill=0.5", {"reconstruct": 1.0, "distill": 0.5}), (" continue = 2 ", {"continue": 2.0})],
)
def test_objectives_are_named_with_their_weights(text, weights):
    assert weights_of(text) == weights


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recite", "'recite' is unknown; give reconstruct, continue, distill"),
        ("", "'' is unknown"),
        ("distill,distill=2", "'distill' is named twice"),
        ("distill=much", "weight of distill is 'much'"),
        ("distill=0", "weight of distill is 0; give a number above 0"),
        ("distill=nan", "weight of distill is nan"),
    ],
)
def test_an_objective_that_nobody_knows_is_refused(text, words):
    assert_refused(SpecError, words, lambda: weights_of(text))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Predict([[1]], [[]]), "there are 1 queries and 1 answers; give one of each for the other, none empty"),
        (lambda: Predict([[1]], [[1]], [torch.zeros(2, 4)]), "`teacher` has other lengths than `answers`"),
        (lambda: continuations([1, 2, 3], cue=3), "the text has 3 tokens, and a cue of 3 leaves none"),
        (lambda: continuations([1, 2, 3], cue=0), "`cue` is 0"),
        (lambda: distil([], []), "there are 0 queries and 0 answers"),
        (lambda: Weighted(()), "there must be one"),
        (lambda: Weighted(((-1.0, reconstruct([1])),)), "the weights are"),
        (lambda: Weighted(((math.inf, reconstruct([1])),)), "the weights are"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(call, words):
    assert_refused(SpecError, words, call)
