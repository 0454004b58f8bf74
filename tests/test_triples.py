"""Triples: the same ones from every form that they come in, one sentence about whatever is none, and the measures of SQuAD."""

import json
import sys
import types
from importlib.util import find_spec

import pytest

from graven.errors import GravenError, SpecError, TextError
from graven.tasks.triples import Triple, Triples, exact, f1, normalised, read_triples

ROWS = [Triple("The cat sat.", "Who sat?", ("The cat",)), Triple("It rained in Ulm.", "Where did it rain?", ("Ulm", "in Ulm"))]
FLAT = [
    {"id": 7, "context": "The cat sat.", "question": "Who sat?", "answers": ["The cat"], "answer_start": 0},
    {"context": "It rained in Ulm.", "question": "Where did it rain?", "answers": ["Ulm", "in Ulm"]},
]
TARGETS = [
    {"context": "The cat sat.", "query": "Who sat?", "target": "The cat"},
    {"context": "It rained in Ulm.", "query": "Where did it rain?", "target": ["Ulm", "in Ulm"]},
]
HUB = [{**row, "answers": {"text": row["answers"], "answer_start": [0] * len(row["answers"])}} for row in FLAT]
NESTED = {
    "version": "1.1",
    "data": [
        {"title": "t", "paragraphs": [{"context": row.context, "qas": [{"id": "1", "question": row.question, "answers": answers}]}]}
        for row, answers in zip(ROWS, [[{"text": text, "answer_start": 0} for text in row.answers] for row in ROWS], strict=True)
    ],
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(FLAT)),
        ("b.jsonl", "\ufeff" + lines(TARGETS).replace("\n", "\r\n\r\n")),
        ("c.jsonl", lines(HUB)),
        ("d.json", json.dumps(FLAT)),
        ("e.json", json.dumps({"data": TARGETS})),
        ("f.json", json.dumps(NESTED)),
    ],
)
def test_every_form_gives_the_same_triples(name, text, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    assert read_triples(str(tmp_path / name)) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.jsonl", "", "a.jsonl holds no triple; give at least one."),
        ("a.jsonl", lines(FLAT) + "{", "line 3 of {}/a.jsonl is no JSON (Expecting property name enclosed in double quotes); mend it."),
        ("a.jsonl", "[" * 100_000, "is no JSON (too many brackets); mend it."),
        ("a.jsonl", "3", "row 1 of {}/a.jsonl is '3'; an object with `context`, `question` and `answers` was expected."),
        ("a.jsonl", '{"context": "c", "answers": "a"}', "has no `question` or `query`; give one. Its columns are context, answers."),
        (
            "a.jsonl", '{"context": "c", "question": "q", "query": "q", "answers": "a"}',
            "has both `question` or `query`; give one. Its columns are context, question, query, answers.",
        ),
        ("a.jsonl", '{"context": "c", "question": " ", "answers": "a"}', "row 1 of {}/a.jsonl has an empty question; fill it in"),
        ("a.jsonl", '{"context": "c", "question": "q", "answers": ["a", ""]}', "has an empty answer; fill it in"),
        ("a.jsonl", '{"context": "c", "question": "q", "answers": 3}', "has 3 as its answer; a string was expected."),
        ("a.jsonl", '{"context": null, "question": "q", "answers": "a"}', "has None as its context; a string was expected."),
        ("a.jsonl", '{"context": "c", "question": "q", "answers": []}', "has no answer; questions that their text does not answer"),
        ("a.json", "3", 'holds neither a list of objects nor {{"data": [...]}}'),
        ("a.json", '{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "begins like a file of SQuAD and is none (KeyError: 'context')"),
        ("a.txt", lines(FLAT), "ends in '.txt'; triples come in .jsonl, .json, .parquet files."),
    ],
)  # fmt: skip
def test_what_is_no_triple_is_one_sentence(name, text, part, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(TextError) as caught:
        read_triples(str(tmp_path / name))
    assert part.format(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"context": "\xff"}')
    with pytest.raises(TextError, match="is not UTF-8 \\(byte 0xff at offset 13\\)"):
        read_triples(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "./none", "a/b/c", "", "~/x"])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises(TextError, match="there is no file"):
        read_triples(name)


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is there")
def test_a_parquet_file_names_the_package_that_it_takes(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SpecError, match=r"takes the package pyarrow; run `pip install 'graven\[data\]'`, or convert it to JSON lines."):
        read_triples(str(tmp_path / "a.parquet"))


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_a_parquet_file_gives_the_same_triples(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(HUB), tmp_path / "a.parquet")
    assert read_triples(str(tmp_path / "a.parquet")) == ROWS
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(TextError, match="is no whole parquet file"):
        read_triples(str(tmp_path / "a.parquet"))


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is there")
def test_an_id_names_the_package_that_it_takes():
    with pytest.raises(SpecError, match=r"a data set of that id takes the package datasets; run `pip install 'graven\[data\]'`, or give a file."):
        read_triples("rajpurkar/squad")


def test_a_split_of_a_data_set_is_asked_for_by_name(monkeypatch):
    """Against a stand-in with the one function that is called, as the package documents it."""

    def load_dataset(path, *, split):
        if (path, split) != ("rajpurkar/squad", "validation"):
            raise ValueError(f'Unknown split "{split}".\nmore')
        return iter(HUB)

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    fake.__spec__ = types.SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_triples("rajpurkar/squad", split="validation") == ROWS
    with pytest.raises(TextError) as caught:
        read_triples("rajpurkar/squad", split="dev")
    assert str(caught.value) == (
        "cannot load the split 'dev' of the data set 'rajpurkar/squad' (Unknown split \"dev\"); check both names, or give a file."
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"template": "Q"}, "`template` is 'Q'"), ({"template": "{question}{question}"}, "once"), ({"longest": 0}, "`longest` is 0; it must be")],
)
def test_a_task_that_cannot_be_is_refused(changes, part):
    with pytest.raises(SpecError, match=part) as caught:
        Triples(kind="triples", data="x.jsonl", **changes)
    assert isinstance(caught.value, GravenError)


def test_a_question_stands_in_its_template():
    assert Triples(kind="triples", data="x").asked("Who {sat}?") == "\nQuestion: Who {sat}?\nAnswer:"


@pytest.mark.parametrize(
    ("said", "answers", "is_exact", "score"),
    [
        ("Denver Broncos", ["Denver Broncos", "The Broncos"], True, 1.0),
        (" the  denver BRONCOS!", ["Denver Broncos"], True, 1.0),
        ("Broncos", ["Denver Broncos", "Broncos of Denver"], False, 2 / 3),
        ("the the cat", ["cat cat"], False, 2 / 3),
        ("", ["Ulm"], False, 0.0),
        ("a", ["the"], True, 0.0),
        ("co-op", ["coop"], True, 1.0),
        ("anthem", ["them"], False, 0.0),
    ],
)
def test_the_measures_are_those_of_squad(said, answers, is_exact, score):
    assert exact(said, answers) == is_exact
    assert f1(said, answers) == pytest.approx(score)


def test_normalising_twice_changes_nothing():
    for text in ("The U.S. (an ally)", "a a an the", "x\ty\nz", "Über-Ich"):
        assert normalised(normalised(text)) == normalised(text)
