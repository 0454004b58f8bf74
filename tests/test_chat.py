"""The place of a memory in a chat: halves of the template that join to what the template itself makes of a text."""

import pytest
import zoo
from asserts import assert_refused

from graven.errors import ModelError
from graven.lm.chat import halves

TEMPLATE = "w90 {% for m in messages %}{{ m['content'] }} w91{% endfor %}{% if add_generation_prompt %} w92 {% endif %}"


def speaker(template):
    tokenizer = zoo.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("query", ["w5 w6", "", "w5\n", "{{ w5 }}", "\uf8ff"])
def test_halves_with_a_text_between_are_the_rendered_turn(query):
    tokenizer = speaker(TEMPLATE)
    before, after = halves(tokenizer, query, name="tiny")
    turn = [{"role": "user", "content": "w7 w8 " + query}]
    assert f"{before}w7 w8 {after}" == tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)


def test_what_stands_before_does_not_depend_on_the_query():
    assert len({halves(speaker(TEMPLATE), query, name="tiny")[0] for query in ("", "w5", "w6 w7")}) == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "tokenizer of tiny has no chat template; leave --chat out"),
        ("w90", "does not show what the user says once"),
        ("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}", "does not show what the user says once"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "as it is"),
    ],
)
def test_a_template_that_has_no_place_for_a_memory_is_refused(template, words):
    assert_refused(ModelError, words, lambda: halves(speaker(template), "w5", name="tiny"))
