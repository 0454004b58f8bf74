"""Queries that a model asks itself: different ones, the same from the same seed, from prompts that are a plain list."""

import pytest
import torch
import zoo
from asserts import assert_refused

from graven import study
from graven.errors import ModelError, SpecError
from graven.lm.chat import halves
from graven.study import self_study

TEXT = [5, 17, 3, 40, 41, 9, 60, 61]
TEMPLATE = "w90 {% for m in messages %}{{ m['content'] }} w91{% endfor %}{% if add_generation_prompt %} w92 {% endif %}"


@pytest.fixture(scope="module")
def model():
    model = zoo.pretrained("llama")
    model.tokenizer.chat_template = TEMPLATE
    return model


@pytest.mark.parametrize("chat", [False, True])
def test_queries_are_different_and_the_same_seed_asks_the_same(model, chat):
    first, same, other = (self_study(model, TEXT, count=9, seed=seed, chat=chat) for seed in (1, 1, 2))
    assert len(set(first)) == 9
    assert first == same != other
    assert all(query.strip() and "\n" not in query.strip("\n").partition("\n")[0] for query in first)


@pytest.mark.parametrize("text", [TEXT, []])
def test_a_place_in_a_prompt_is_filled_with_what_the_model_writes(model, text):
    queries = self_study(model, text, count=4, prompts=["w7 w8 {} w9"], seed=0)
    assert len(queries) == 4
    for query in queries:
        assert query.startswith("w7 w8 ")
        assert query.endswith(" w9")
        assert len(model.encode(query)) > 3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_that_has_no_text_asks_about_nothing_in_particular(name, monkeypatch):
    model = zoo.pretrained(name)
    assert model.encode("\n") == []
    monkeypatch.setattr(model, "stop", frozenset())
    assert len(self_study(model, [], count=3, prompts=["{}"], seed=0)) == 3


def test_a_prompt_without_a_place_is_an_instruction_and_no_part_of_the_query(model):
    assert not any("w7 w8" in query for query in self_study(model, TEXT, count=4, prompts=["w7 w8"], seed=0))


@pytest.mark.parametrize("chat", [False, True])
def test_an_instruction_stands_behind_the_text_and_in_a_chat_inside_the_turn(model, chat, monkeypatch):
    seen = []

    class Listening(study.Prompted):
        def follow(self, rows, **rest):
            seen.append((self.prefix, rows))
            return super().follow(rows, **rest)

    monkeypatch.setattr(study, "Prompted", Listening)
    self_study(model, TEXT, count=1, prompts=["w7 w8"], seed=0, chat=chat)
    prefix, (row,) = seen[0]
    if chat:
        before, after = (model.encode(half) for half in halves(model.tokenizer, " w7 w8", name="tiny"))
    else:
        before, after = model.opening, model.encode("w7 w8")
    assert row == after
    assert torch.equal(prefix, model.embed(study.Tokens.of([[*before, *TEXT]]))[0])


def test_a_model_that_repeats_itself_gives_each_query_once(model, monkeypatch):
    monkeypatch.setattr(study, "_line", lambda text: "same" if text else "")
    assert self_study(model, TEXT, count=4, prompts=["{}", "w7 {}"], seed=0) == ["same", "w7 same"]


def test_no_more_is_run_than_the_longest_line_takes(model, monkeypatch):
    columns = []
    run = study.Prompted._run

    def counted(self, cache, embedded, **rest):
        columns.append(embedded.shape[1])
        return run(self, cache, embedded, **rest)

    monkeypatch.setattr(study.Prompted, "_run", counted)
    monkeypatch.setattr(model, "decode", lambda ids: " ".join(["w", "w\n", "w"][min(at, 2)] for at in range(len(ids))))
    assert self_study(model, TEXT, count=1, prompts=["w7 w8 w9{}"], seed=0) == ["w7 w8 w9w w"]
    assert columns[-2:] == [3, 1]


def test_what_cannot_be_asked_is_refused(model):
    assert_refused(SpecError, "`count` is 0 and there are 4 prompts", lambda: self_study(model, TEXT, count=0))
    assert_refused(SpecError, "there are 0 prompts", lambda: self_study(model, TEXT, count=2, prompts=[]))
    assert_refused(ModelError, "has no chat template", lambda: self_study(zoo.pretrained("gpt2"), TEXT, count=2, chat=True))
