"""Few-shot prompts: every sentence once, labels even, the same seed the same prompt."""

from collections import Counter

import pytest
import torch
from asserts import assert_refused

from graven.errors import SpecError
from graven.tasks.prompts import CLASSES, few_shot


def parts(task, block):
    """Sentence and label of one example."""
    sentence, label = block.removeprefix(f"{task.sentence}: ").split(f"\n{task.label}:")
    return sentence, label.strip()


@pytest.mark.parametrize("name", CLASSES)
def test_a_query_and_its_answer_are_one_more_example(name, generator):
    task, prompt = CLASSES[name], few_shot(name, examples=20, queries=96, generator=generator)
    blocks = [block for block in prompt.text.split("\n\n") if block] + [query + answer for query, answer in prompt.queries]
    assert prompt.text.endswith("\n\n")
    assert len(blocks) == 116
    sentences, labels = zip(*(parts(task, block) for block in blocks), strict=True)
    assert len(set(sentences)) == 116
    assert all(sentence in task.sentences(label) for sentence, label in zip(sentences, labels, strict=True))
    for count in Counter(labels[:20]), Counter(labels[20:]):
        assert max(count.values()) - min(count.values()) <= 1
        assert set(count) == set(task.parts)


@pytest.mark.parametrize("name", CLASSES)
def test_no_sentence_has_two_labels(name):
    sentences = [sentence for label in CLASSES[name].parts for sentence in CLASSES[name].sentences(label)]
    assert len(set(sentences)) == len(sentences)


def test_the_same_seed_draws_the_same_prompt_and_another_one_another():
    one, same, other = (few_shot("topic", examples=4, queries=4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "colour"}, "no few-shot task 'colour'; it must be one of sentiment, topic, question"),
        ({"examples": 0}, "`examples` is 0"),
        ({"queries": -1}, "`queries` is -1"),
        ({"queries": 400}, "20 examples and 400 queries are more than the 48 sentences"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(given, words, generator):
    settings = {"name": "topic", "examples": 20, "queries": 9} | given
    assert_refused(SpecError, words, lambda: few_shot(generator=generator, **settings))
