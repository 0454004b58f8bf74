"""Triples of context, question and answers: from the files that question answering data come in, and the two measures of SQuAD.

    .jsonl      one object a line
    .json       a list of objects, {"data": [objects]}, or the nested file of SQuAD 1.1
    .parquet    rows; takes the package pyarrow
    an id       of a data set on the hub; takes the package datasets

An object has the columns `context`, `question` (or `query`) and `answers` (or `target`); other columns are not read. Answers are a string, a list of
strings, {"text": [strings]} or a list of {"text": string}; the first is the one that is trained on, and a score counts the best of all.

Source of format and measures: Rajpurkar et al. 2016, arXiv:1606.05250, and its evaluation script, version 1.1. Tests: tests/test_triples.py.
"""

import json
import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from graven.errors import SpecError, TextError

ENDINGS = (".jsonl", ".json", ".parquet")
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Triple:
    """A text, a question about it, and what is right to say.

    Args:
        context: Of at least one character that is no space, as the other two.
        question: Asked once the context is gone.
        answers: At least one.
    """

    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Triples:
    """Where triples come from, and how a question stands behind a memory.

    Args:
        kind: Tells this task from the others.
        data: A `.jsonl`, `.json` or `.parquet` file, or the id of a data set.
        split: Of a data set; no file has any.
        template: Around a question, with one {question} in it.
        longest: Most tokens of a context; a triple that is longer is left out, and counted.
    Raises:
        SpecError: The template has no {question}, or more than one; or `longest` is below 1.
    """

    kind: Literal["triples"]
    data: str
    split: str = "train"
    template: str = "\nQuestion: {question}\nAnswer:"
    longest: int = 128

    def __post_init__(self) -> None:
        if self.template.count("{question}") != 1:
            raise SpecError(f"`template` is {self.template!r}; it must have {{question}} in it, once.")
        if self.longest < 1:
            raise SpecError(f"`longest` is {self.longest}; it must be at least 1.")

    def asked(self, question: str) -> str:
        """A question as it stands behind a memory."""
        return self.template.replace("{question}", question)


def read_triples(data: str, *, split: str = "train") -> list[Triple]:
    """Triples of a file or a data set, in its order.

    Args:
        data: As of `Triples`.
        split: As of `Triples`.
    Raises:
        TextError: It cannot be found or read, has no triple, or one of its rows is none.
        SpecError: It takes a package that is not there.
    """
    ending = Path(data).suffix
    if not os.path.isfile(data) and (ending in ENDINGS or data.count("/") > 1 or data.startswith((".", "/", "~")) or not data.strip()):
        raise TextError(f"there is no file {data!r}; give the path of a {', '.join(ENDINGS)} file, or the id of a data set.")
    if not os.path.isfile(data):
        rows: Iterable[Any] = _of_hub(data, split)
    elif ending == ".parquet":
        rows = _of_parquet(data)
    elif ending == ".json":
        rows = _of_json(data)
    elif ending == ".jsonl":
        rows = (_parsed(line, f"line {number} of {data}") for number, line in enumerate(_text(data).split("\n"), start=1) if line.strip())
    else:
        raise TextError(f"{data} ends in {ending!r}; triples come in {', '.join(ENDINGS)} files. Convert it, or give it the right ending.")
    found = [_triple(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]
    if not found:
        raise TextError(f"{data} holds no triple; give at least one.")
    return found


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and runs of spaces.

    >>> normalised("The  Virgin Mary!")
    'virgin mary'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact(said: str, answers: Sequence[str]) -> bool:
    """Whether something is one of the answers, both normalised.

    >>> exact(" a Virgin Mary.", ["the Virgin Mary", "Mary"])
    True
    """
    return normalised(said) in map(normalised, answers)


def f1(said: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the normalised words, for the answer for which it is largest.

    >>> f1("Mary of Lourdes", ["the Virgin Mary"])
    0.4
    """
    return max(_f1(normalised(said).split(), normalised(answer).split()) for answer in answers)


def _f1(said: list[str], answer: list[str]) -> float:
    shared = sum((Counter(said) & Counter(answer)).values())
    return 2 * shared / (len(said) + len(answer)) if shared else 0.0  # nothing shares no word with nothing, as in their script


def _text(data: str) -> str:
    try:
        return Path(data).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TextError(f"cannot read {data}: {error.strerror}. Give the path of a file of triples.") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{data} is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); convert it first.") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too many brackets"
        raise TextError(f"{where} is no JSON ({reason}); mend it.") from error


def _of_json(data: str) -> list[Any]:
    whole = _parsed(_text(data), data)
    rows = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise TextError(f'{data} holds neither a list of objects nor {{"data": [...]}}; give one of these, or JSON lines in a .jsonl file.')
    if not any(isinstance(row, dict) and "paragraphs" in row for row in rows):
        return rows
    try:  # SQuAD 1.1: articles of paragraphs of questions
        return [
            {"context": paragraph["context"], "question": asked["question"], "answers": asked["answers"]}
            for article in rows
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (KeyError, TypeError) as error:
        raise TextError(f"{data} begins like a file of SQuAD and is none ({type(error).__name__}: {error}); mend it, or give JSON lines.") from error


def _of_parquet(data: str) -> list[Any]:
    if find_spec("pyarrow") is None:
        raise SpecError(f"reading the parquet file {data} takes the package pyarrow; run `pip install 'graven[data]'`, or convert it to JSON lines.")
    broken = import_module("pyarrow").ArrowException
    try:
        rows: list[Any] = import_module("pyarrow.parquet").read_table(data).to_pylist()
    except (OSError, ValueError, broken) as error:
        raise TextError(f"{data} is no whole parquet file ({str(error).splitlines()[0][:120]}); fetch it again.") from error
    return rows


def _of_hub(data: str, split: str) -> Iterable[Any]:
    if find_spec("datasets") is None:
        raise SpecError(
            f"there is no file {data!r}, and a data set of that id takes the package datasets; run `pip install 'graven[data]'`, or give a file."
        )
    try:
        rows: Iterable[Any] = import_module("datasets").load_dataset(data, split=split)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160].rstrip(".")
        raise TextError(f"cannot load the split {split!r} of the data set {data!r} ({reason}); check both names, or give a file.") from error
    return rows


def _triple(row: Any, where: str) -> Triple:
    if not isinstance(row, dict):
        raise TextError(f"{where} is {str(row)[:60]!r}; an object with `context`, `question` and `answers` was expected.")
    context = _column(row, "context", where=where)
    question = _column(row, "question", "query", where=where)
    answers = tuple(_answers(_column(row, "answers", "target", where=where)))
    for name, text in (("context", context), ("question", question), *(("answer", answer) for answer in answers)):
        if not isinstance(text, str):
            raise TextError(f"{where} has {str(text)[:60]} as its {name}; a string was expected.")
        if not text.strip():
            raise TextError(f"{where} has an empty {name}; fill it in, or leave the row out.")
    if not answers:
        raise TextError(f"{where} has no answer; questions that their text does not answer, as in SQuAD 2.0, are not trained on: leave them out.")
    return Triple(context, question, answers)


def _column(row: dict[str, Any], *names: str, where: str) -> Any:
    there = [name for name in names if name in row]
    if len(there) != 1:
        wanted = " or ".join(f"`{name}`" for name in names)
        raise TextError(f"{where} has {'both' if there else 'no'} {wanted}; give one. Its columns are {', '.join(map(str, row))}.")
    return row[there[0]]


def _answers(value: Any) -> list[Any]:
    """Of the forms that are in use; whatever is none of them is left for the check of strings to name."""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    parts = value if isinstance(value, list | tuple) else [value]
    return [part["text"] if isinstance(part, dict) and "text" in part else part for part in parts]
