"""Queries from a file: what is read, and the sentence for what is not."""

import pytest
from asserts import assert_refused

from graven.errors import TextError
from graven.tasks.queries import Query, parse_prompts, parse_queries


def test_plain_text_has_a_query_a_line_and_perhaps_a_tab_and_an_answer():
    text = "What is it?\ta cat\r\n\n  Who is it? \nWhere: \t here \n"
    assert parse_queries(text, lines_of_json=False) == [Query("What is it?", "a cat"), Query("  Who is it? "), Query("Where: ", " here ")]


def test_json_lines_have_a_query_and_perhaps_an_answer():
    text = '{"query": "Review: dull\\nSentiment:", "answer": " negative"}\n\n{"query": "\\u2028 and \\t"}\n'
    assert parse_queries(text, lines_of_json=True) == [Query("Review: dull\nSentiment:", " negative"), Query("\u2028 and \t")]


@pytest.mark.parametrize(
    ("line", "lines_of_json", "words"),
    [
        ("a\tb\tc", False, "line 2 of the queries has 2 tabs; give a query"),
        ("\tb", False, "line 2 of the queries has an empty query"),
        ("a\t ", False, "line 2 of the queries has an empty answer"),
        ("first", False, "line 2 of the queries repeats the query of line 1"),
        ("{", True, "line 2 of the queries is no JSON"),
        ("[" * 100_000, True, "line 2 of the queries is no JSON"),
        ('"a"', True, 'line 2 of the queries is "a"; an object with "query"'),
        ('{"answer": "a"}', True, 'an object with "query"'),
        ('{"query": "a", "label": "b"}', True, "and nothing else, was expected"),
        ('{"query": 3}', True, 'has 3 as its "query"; a string'),
        ('{"query": "a", "answer": null}', True, 'has None as its "answer"'),
        ('{"query": ""}', True, "has an empty query"),
        ('{"query": "first"}', True, "repeats the query of line 1"),
    ],
)
def test_a_line_that_is_no_query_is_refused_by_its_number(line, lines_of_json, words):
    first = '{"query": "first"}' if lines_of_json else "first"
    assert_refused(TextError, words, lambda: parse_queries(f"{first}\n{line}\n", lines_of_json=lines_of_json))


def test_too_few_queries_are_refused():
    assert len(parse_queries("a\nb\nc", lines_of_json=False, least=3)) == 3
    assert_refused(TextError, "there are 2 queries, and at least 3", lambda: parse_queries("a\nb\n\n", lines_of_json=False, least=3))


def test_prompts_stand_a_line_each_as_text_or_as_json_strings():
    assert parse_prompts("{}\r\n\n Ask:{} \n", lines_of_json=False) == ["{}", " Ask:{} "]
    assert parse_prompts('"\\n\\nQuestion:{}\\nAnswer:"\n', lines_of_json=True) == ["\n\nQuestion:{}\nAnswer:"]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{}", "line 2 of the prompts is {}; a string that is not empty"), ('" "', 'is " "; a string'), ("Ask:", "line 2 of the prompts is no JSON")],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(line, words):
    assert_refused(TextError, words, lambda: parse_prompts(f'"a"\n{line}\n', lines_of_json=True))


def test_a_file_without_a_prompt_is_refused():
    assert_refused(TextError, "there is no prompt", lambda: parse_prompts("\n \n", lines_of_json=False))
