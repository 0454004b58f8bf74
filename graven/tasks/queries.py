"""Queries with or without answers, from a file that a user wrote.

    plain text     one query a line; a tab and the answer may follow it
    JSON lines     {"query": "...", "answer": "..."} a line, "answer" may be left out: queries of several lines are spelled with \\n

A file whose name ends in .jsonl is JSON lines, any other is plain text. Blank lines are passed over.
"""

import json
from dataclasses import dataclass

from graven.errors import TextError


@dataclass(frozen=True)
class Query:
    """What stands behind a prompt, and what should follow it.

    Args:
        text: As it follows the prompt.
        answer: None where nobody knows.
    """

    text: str
    answer: str | None = None


def parse_queries(text: str, *, lines_of_json: bool, least: int = 1) -> list[Query]:
    """Queries of a file.

    Args:
        text: Of the file.
        lines_of_json: How it is written.
        least: Fewer queries than this are refused.
    Raises:
        TextError: A line cannot be read, repeats a query, or has an empty query or answer; or there are fewer lines than `least`.
    """
    found: dict[str, int] = {}
    queries: list[Query] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        query = _of_json(line, number) if lines_of_json else _of_plain(line, number)
        if not query.text.strip() or (query.answer is not None and not query.answer.strip()):
            what = "query" if not query.text.strip() else "answer"
            raise TextError(f"line {number} of the queries has an empty {what}; fill it in, or leave {'the line' if what == 'query' else 'it'} out.")
        if query.text in found:
            raise TextError(
                f"line {number} of the queries repeats the query of line {found[query.text]}; a query that is held out must not be trained on, "
                "so give each once."
            )
        found[query.text] = number
        queries.append(query)
    if len(queries) < least:
        raise TextError(f"there are {len(queries)} queries, and at least {least} are needed: a third is held out to measure with. Give more.")
    return queries


def parse_prompts(text: str, *, lines_of_json: bool) -> list[str]:
    """What a model is asked for queries with: a prompt a line, or a JSON string a line, whose line breaks are spelled \\n.

    Raises:
        TextError: A line cannot be read or is empty, or there is none.
    """
    found: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.strip():
            where = f"line {number} of the prompts"
            prompt = _json(line, where) if lines_of_json else line
            if not isinstance(prompt, str) or not prompt.strip():
                raise TextError(f"{where} is {line.strip()[:60]}; a string that is not empty was expected.")
            found.append(prompt)
    if not found:
        raise TextError("there is no prompt; give at least one line, such as {} or an instruction.")
    return found


def _of_plain(line: str, number: int) -> Query:
    query, tab, answer = line.partition("\t")
    if "\t" in answer:
        raise TextError(f"line {number} of the queries has {line.count(chr(9))} tabs; give a query, or a query, one tab and its answer.")
    return Query(query, answer if tab else None)


def _of_json(line: str, number: int) -> Query:
    where = f"line {number} of the queries"
    row = _json(line, where)
    if not isinstance(row, dict) or "query" not in row or set(row) - {"query", "answer"}:
        raise TextError(f'{where} is {line.strip()[:60]}; an object with "query" and perhaps "answer", and nothing else, was expected.')
    for key, value in row.items():
        if not isinstance(value, str):
            raise TextError(f'{where} has {value!r} as its "{key}"; a string was expected.')
    return Query(row["query"], row.get("answer"))


def _json(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too many brackets"
        raise TextError(f"{where} is no JSON ({reason}); a .jsonl file has JSON in each line. For plain text choose another ending.") from error
