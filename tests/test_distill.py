"""A prompt in a few vectors: the teacher is the full prompt, what is held out is never trained on, controls and savings are what they say."""

import math

import cases
import pytest
import torch
import transformers
import zoo
from asserts import assert_near, assert_refused

from graven import distill as distill_module
from graven.distill import Asked, Distillation, Judge, best_start, distil_prompt, held_apart, weights_a_token
from graven.errors import Outcome, TextError
from graven.lm.cached import Prompted
from graven.lm.pretrained import Pretrained
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.objective import reconstruct
from graven.tasks.base import Tokens

PROMPT = [(7 * n + 3) % 90 + 3 for n in range(24)]
QUERIES = [Asked([5, n]) for n in range(20, 44)]
STEPS = 30
SAID = 3  # tokens of each answer of the teacher; 16 outside the tests


def spec_of(**settings):
    return Distillation(**{"slots": 4, "weights": {"distill": 1.0}, "steps": STEPS, "rate": 0.3, **settings})


@pytest.fixture(autouse=True, scope="module")
def short_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_module, "SAID_TOKENS", SAID)
        yield


@pytest.fixture(scope="module")
def model():
    return cases.sharp(cases.llama())


@pytest.fixture(scope="module")
def done(model):
    return distil_prompt(model, PROMPT, QUERIES[8:], QUERIES[:8], spec_of(), stop=frozenset())


@torch.no_grad()
def next_tokens(model, prefix, query):
    """Log probabilities of what follows vectors and a query, by the model alone."""
    columns = torch.cat([prefix, model.embed(Tokens.of([query]))], dim=1)
    return model.logits(model.hidden(columns)[0, -1]).log_softmax(-1)


def agreement_by_definition(model, prefix, asked):
    full = model.embed(Tokens.of([PROMPT]))
    pairs = [(next_tokens(model, full, one.ids), next_tokens(model, prefix, one.ids)) for one in asked]
    kl = sum(float((taught.exp() * (taught - ours)).sum()) for taught, ours in pairs) / len(pairs)
    return kl, sum(bool(taught.argmax() == ours.argmax()) for taught, ours in pairs) / len(pairs)


def test_a_memory_comes_closer_to_the_full_prompt_than_it_started(done):
    assert len(done.engraved.losses) == STEPS
    assert sum(done.engraved.losses[-3:]) < 0.75 * sum(done.engraved.losses[:3])
    assert done.engraved.outcome is Outcome.DONE
    assert done.held_out.kl < min(control.kl for control in done.controls.values())


def test_what_is_measured_on_held_out_queries_is_the_definition(model, done):
    for found, prefix in (done.held_out, done.engraved.state), (done.controls["no_prompt"], torch.zeros(1, 0, model.width)):
        kl, top = agreement_by_definition(model, prefix, QUERIES[:8])
        assert (found.queries, found.top_token, found.accuracy) == (8, top, None)
        assert found.kl == pytest.approx(kl, abs=1e-4)  # float32
    assert list(done.controls) == ["no_prompt", "random", "reconstruct"]


def test_the_full_prompt_agrees_with_itself(model):
    full = model.embed(Tokens.of([PROMPT]))
    said = Prompted(model, full[0]).follow([one.ids for one in QUERIES], most=2, stop=())
    judge = Judge(model, [Asked(one.ids, own.tokens) for one, own in zip(QUERIES, said, strict=True)], said)
    found = judge(full)
    assert (found.top_token, found.accuracy, judge.full_prompt) == (1.0, 1.0, 1.0)
    assert found.kl == pytest.approx(0.0, abs=1e-5)


def test_an_answer_is_right_where_all_its_tokens_are_what_the_model_says(model):
    full = model.embed(Tokens.of([PROMPT]))
    said = Prompted(model, full[0]).follow([one.ids for one in QUERIES[:3]], most=2, stop=())
    first = said[0].tokens
    wrong = [first[0], (first[1] + 1) % zoo.VOCABULARY]
    judge = Judge(model, [Asked(QUERIES[0].ids, first), Asked(QUERIES[0].ids, wrong), QUERIES[2]], [said[0], said[0], said[2]])
    assert judge.full_prompt == 0.5
    assert judge(full).accuracy == 0.5


def test_held_out_queries_do_not_change_the_memory(model, done):
    other = distil_prompt(model, PROMPT, QUERIES[8:], [Asked([60, 61])], spec_of(controls=()), stop=frozenset())
    assert torch.equal(other.engraved.state, done.engraved.state)


def test_a_third_is_held_out_and_the_rest_is_trained_on():
    train, held_out = held_apart(range(10), seed=1)
    assert (len(train), len(held_out)) == (7, 3)
    assert sorted([*train, *held_out]) == list(range(10))
    assert held_apart(range(10), seed=1) == (train, held_out) != held_apart(range(10), seed=2)


def test_the_teacher_reads_the_prompt_once(model, monkeypatch):
    columns = []
    hidden, run = type(model).hidden, Prompted._run
    monkeypatch.setattr(type(model), "hidden", lambda self, x, **rest: columns.append(x.shape[1]) or hidden(self, x, **rest))
    monkeypatch.setattr(Prompted, "_run", lambda self, cache, x, **rest: columns.append(x.shape[1]) or run(self, cache, x, **rest))
    distil_prompt(model, PROMPT, QUERIES[8:], QUERIES[:8], spec_of(steps=2, controls=()), stop=frozenset())
    # once by the teacher, and once where it is asked how much of the prompt itself the memory gives back
    assert sorted(columns)[-3:] < [len(PROMPT)] * 2 + [len(PROMPT) + 5]
    assert sum(count >= len(PROMPT) for count in columns) == 2


def test_what_a_query_saves_is_counted_in_tokens_and_bytes(model, done):
    saved = done.saved
    assert saved.tokens == 24 - 4
    assert saved.bytes == 20 * 2 * 2 * 2 * 8 * 4  # tokens, layers, key and value, heads, width, float32
    assert saved.flops == 2 * weights_a_token(model) * 20
    teacher, student = 24 + 16 * (2 + SAID), 8 * (4 + 2 + SAID)
    assert saved.write_tokens == teacher + (4 + 2 * STEPS) * student  # four starts are tried
    assert saved.paid_after == math.ceil(saved.write_tokens / 20)


def test_weights_of_a_token_are_its_matrices_without_embeddings_and_head(model):
    attention, mlp = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48
    assert weights_a_token(model) == 2 * (attention + mlp)


def test_the_start_is_the_best_of_four(model):
    memory = GradMem(model, GradMemSpec(slots=3, steps=0, rule=Adam(), order="none"))
    embedded = model.embed(Tokens.of([PROMPT]))
    wanted = embedded[:, -3:]

    class Near:
        def loss(self, memory, state, *, step):
            assert (memory.spec.slots, step) == (3, 0)
            return (state - wanted).square().mean()

    assert_near([best_start(memory, Near(), PROMPT)], [wanted], tolerance=1e-6)
    losses = [float(reconstruct(PROMPT).loss(memory, state, step=0)) for state in (memory.start(1).detach(), wanted.detach())]
    assert float(reconstruct(PROMPT).loss(memory, best_start(memory, reconstruct(PROMPT), PROMPT), step=0).detach()) <= min(losses)


def test_a_write_that_is_close_enough_ends_early(model):
    early = distil_prompt(model, PROMPT, QUERIES[8:], QUERIES[:8], spec_of(until=100.0, controls=()), stop=frozenset())
    assert early.engraved.outcome is Outcome.CLOSE
    assert len(early.engraved.losses) == 2  # an epoch


def test_a_deadline_ends_a_write_and_says_so(model):
    late = distil_prompt(model, PROMPT, QUERIES[8:], QUERIES[:8], spec_of(deadline=0.0, controls=()), stop=frozenset())
    assert (late.engraved.outcome, late.engraved.losses) == (Outcome.LATE, [])


def test_what_stands_before_a_turn_stands_before_prompt_memory_and_no_prompt(model):
    before = (70, 71)
    done = distil_prompt(model, PROMPT, QUERIES[8:], QUERIES[:8], spec_of(steps=2, before=before), stop=frozenset())
    fixed = model.embed(Tokens.of([before]))
    full = torch.cat([fixed, model.embed(Tokens.of([PROMPT]))], dim=1)
    for found, prefix in (done.held_out, torch.cat([fixed, done.engraved.state], dim=1)), (done.controls["no_prompt"], fixed):
        pairs = [(next_tokens(model, full, one.ids), next_tokens(model, prefix, one.ids)) for one in QUERIES[:8]]
        assert found.kl == pytest.approx(sum(float((t.exp() * (t - s)).sum()) for t, s in pairs) / 8, abs=1e-4)


def test_a_prompt_no_longer_than_its_memory_is_refused(model):
    words = "the prompt has 4 tokens and the memory 4 vectors, so nothing would be saved"
    assert_refused(TextError, words, lambda: distil_prompt(model, PROMPT[:4], QUERIES[8:], QUERIES[:8], spec_of(), stop=frozenset()))


def test_answers_are_followed_a_token_beyond_the_longest_that_is_known():
    most = distill_module._most
    assert most([Asked([1], [2, 3]), Asked([1], [2])]) == 3
    assert most([Asked([1], [2, 3]), Asked([1])]) == SAID
    assert most([Asked([1], [2] * 40), Asked([1])]) == 41


def test_the_control_that_reconstructs_runs_as_many_columns(monkeypatch):
    model, steps, pursue = cases.sharp(cases.llama()), [], distill_module.pursue
    monkeypatch.setattr(distill_module, "SAID_TOKENS", 3)
    monkeypatch.setattr(distill_module, "pursue", lambda *parts, **settings: steps.append(settings["steps"]) or pursue(*parts, **settings))
    text, train, held = [(7 * n + 3) % 90 + 3 for n in range(24)], [Asked([5, n]) for n in range(28, 44)], [Asked([5, n]) for n in range(20, 28)]
    settings = Distillation(slots=4, weights={"distill": 1.0}, steps=3, rate=0.3, until=0.0, controls=("reconstruct",))
    distil_prompt(model, text, train, held, settings, stop=frozenset())
    assert steps == [3, round(3 * 8 * (4 + 2 + 3) / (4 + 24))]  # eight rows a step: slots, query and what is said; slots and text


def test_a_token_is_multiplied_with_the_experts_that_it_goes_to():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 60}
    counts = []
    for experts in (4, 16):
        config = transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)
        counts.append(weights_a_token(Pretrained(transformers.MixtralForCausalLM(config), zoo.tokenizer(), name="mixtral", checked=False)))
    assert counts[1] - counts[0] == (16 - 4) * 16  # rows of the router; the experts of a token are two in both
