"""A folder of memories: a question goes to the one whose text shares its rare words, whatever became of files and index since."""

import json
import os
import sqlite3
from dataclasses import replace

import cases
import pytest
import test_file
import torch
import zoo
from asserts import assert_refused

import graven
from graven import cli
from graven.errors import OutputError, TextError
from graven.folder import NAME, Index, bag, picked
from graven.memory.file import Memory
from graven.report import LEFT_BEHIND, sweep, write_atomically

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

TEXTS = {
    "dog": "The old dog Max sleeps under the kitchen table every afternoon.",
    "bridge": "The bridge over the river was built in 1887 by engineer Anna Holm.",
    "bread": "Rye bread needs flour, water, salt and a sourdough that is three days old.",
}


def memory(name):
    """A memory whose recital is that text, as far as `Recital` below is concerned."""
    about = replace(test_file.ABOUT, base=replace(test_file.ABOUT.base, name=name))
    return Memory(torch.ones(2, 3, 4), about)


@pytest.fixture
def folder(tmp_path):
    for name in TEXTS:
        memory(name).save(tmp_path / f"{name}.graven")
    return tmp_path


class Recital:
    """Gives the text, and counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, memory):
        self.asked.append(memory.about.base.name)
        return TEXTS[memory.about.base.name]


def pick(folder, question, recite=None):
    with Index(folder) as index:
        faults = index.refresh(recite or Recital())
        return index.pick(question), faults


# Which memory


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Where does Max sleep?", "dog"),
        ("Who ENGINEERED the bridge?", "bridge"),
        ("What does bread need?", "bread"),
        ("max", "dog"),
        ("In which year, 1887 or 1888?", "bridge"),
    ],
)
def test_a_question_goes_to_the_text_that_shares_its_words(question, name, folder):
    found, faults = pick(folder, question)
    assert (found.name, faults) == (f"{name}.graven", {})
    assert 0 <= found.sure <= 1


def test_a_question_that_shares_nothing_goes_nowhere(folder):
    assert pick(folder, "quantum zebra")[0] is None
    assert pick(folder, "")[0] is None


def test_a_word_that_only_one_text_has_makes_sure(folder):
    rare, common = pick(folder, "Anna Holm")[0], pick(folder, "old")[0]
    assert (rare.sure, rare.next) == (1.0, None)
    assert common.sure < 0.5
    assert {common.name, common.next} == {"dog.graven", "bread.graven"}


def test_scores_are_those_of_bm25(folder):
    """By hand: 11, 12 and 14 words; `old` is in two of three texts."""
    lengths = {name: bag(text).total() for name, text in TEXTS.items()}
    mean = sum(lengths.values()) / 3
    weight = torch.tensor(1 + (3 - 2 + 0.5) / (2 + 0.5)).log()
    wanted = float(weight) * 2.2 / (1 + 1.2 * (0.25 + 0.75 * lengths["dog"] / mean))
    assert pick(folder, "old")[0].score == pytest.approx(wanted, rel=1e-6)


def test_records_are_picked_by_their_key(tmp_path):
    model = graven.load("records")
    model.write("aB:11\nc3:Qm").save(tmp_path / "one.graven")
    model.write("Ab:22\nhi:yo").save(tmp_path / "two.graven")
    for key, name in (("aB", "one"), ("Ab", "two"), ("?!hi:", "two")):
        assert pick(tmp_path, key)[0].name == f"{name}.graven"
    assert pick(tmp_path, "zz")[0] is None


def test_a_key_is_found_as_the_memory_itself_takes_it(tmp_path):
    graven.load("phonebook").write("Alice: 555123").save(tmp_path / "book.graven")
    graven.load("stories").write("Mary went to the garden.").save(tmp_path / "story.graven")
    for question, name in (("Alice", "book"), ("ALICE:", "book"), ("where is mary", "story"), ("Where is Mary?", "story")):
        assert pick(tmp_path, question)[0].name == f"{name}.graven"
    assert pick(tmp_path, "\udcff")[0] is None


# Stale, missing, damaged


def test_a_file_whose_name_is_no_unicode_is_left_out_and_told(folder):
    os.rename(folder / "dog.graven", os.fsencode(folder) + b"/\xff.graven")
    found, faults = pick(folder, "bridge")
    assert found.name == "bridge.graven"
    assert faults == {"\udcff.graven": "its name is no Unicode; give it another"}


def test_a_text_is_recited_once_and_again_only_where_its_memory_changed(folder):
    recite = Recital()
    pick(folder, "x", recite)
    assert sorted(recite.asked) == sorted(TEXTS)
    os.utime(folder / "dog.graven")
    memory("bread").save(folder / "bridge.graven")
    (folder / "bread.graven").rename(folder / "rye.graven")
    recite = Recital()
    pick(folder, "x", recite)
    assert recite.asked == ["bread", "bread"]  # what stands in the place of the bridge, and what has a new name
    assert pick(folder, "bridge")[0] is None
    (folder / "rye.graven").unlink()
    (folder / "bridge.graven").unlink()
    assert pick(folder, "bread")[0] is None
    assert pick(folder, "Max")[0].name == "dog.graven"


def test_what_holds_no_text_is_left_out_and_told(folder):
    (folder / "bad.graven").write_text("no memory")
    held = memory("dog")
    Memory(held.state, replace(held.about, objective="distill")).save(folder / "prompt.graven")
    (folder / "notes.txt").write_text("bridge")
    found, faults = pick(folder, "bridge")
    assert found.name == "bridge.graven"
    assert sorted(faults) == ["bad.graven", "prompt.graven"]
    assert pick(folder, "bridge")[1] == faults


def test_a_memory_whose_model_is_away_is_tried_again(folder):
    def away(_):
        raise TextError("no model here")

    found, faults = pick(folder, "Max", away)
    assert (found, sorted(faults)) == (None, ["bread.graven", "bridge.graven", "dog.graven"])
    assert pick(folder, "Max")[0].name == "dog.graven"


def test_a_folder_that_cannot_be_written_to_is_asked_all_the_same(folder):
    folder.chmod(0o555)
    try:
        assert pick(folder, "Max")[0].name == "dog.graven"
        assert not (folder / NAME).exists()
    finally:
        folder.chmod(0o755)


def test_a_database_of_something_else_is_left_alone(folder):
    base = sqlite3.connect(folder / NAME)
    base.execute("CREATE TABLE mine (x)")
    base.commit()
    base.close()
    assert_refused(OutputError, "a database of something else", lambda: pick(folder, "x"))


def test_what_is_no_folder_of_memories_is_refused(tmp_path):
    assert_refused(OutputError, "is no folder", lambda: Index(tmp_path / "nowhere"))
    with Index(tmp_path) as index:
        assert_refused(TextError, "holds no memory", lambda: picked(index, ["x"]))


# What a kill leaves


def test_only_old_leftovers_of_memories_are_swept_away(tmp_path):
    marked = [".a.graven.tmp-abcd1234", ".b.graven.tmp-abcd_234", ".a.txt.tmp-abcd1234", ".a.graven.tmp-abcd1234x"]
    leftovers = [*marked, "a.graven.tmp-abcd1234", ".a.graven", ".notes.graven.20250101"]
    for name in leftovers:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / leftovers[1])
    sweep(tmp_path, ".graven")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(leftovers[1:])
    assert LEFT_BEHIND > 60
    names = []
    write_atomically(tmp_path / "c.graven", lambda temporary: names.append(temporary.name) or temporary.write_text("x"))
    (tmp_path / names[0]).write_text("")
    os.utime(tmp_path / names[0], (0, 0))
    sweep(tmp_path, ".graven")
    assert not (tmp_path / names[0]).exists()  # the pattern is that of `write_atomically`


# The command line


def test_the_verb_ask_says_which_memory_it_used(tmp_path, capsys):
    model = cases.sharp(cases.llama())
    model.model.save_pretrained(tmp_path / "model")
    zoo.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "texts.jsonl").write_text('{"name": "a", "text": "w5 w17"}\n{"name": "b", "text": "w30 w31"}')
    common = ["--model", str(tmp_path / "model")]
    cli.main(["write-many", str(tmp_path / "many" / "texts.jsonl"), "-o", str(tmp_path / "many"), *common, "--steps", "3", "--slots", "2"])
    capsys.readouterr()
    cli.main(["ask", str(tmp_path / "many"), "w31", "w5", "w77", "--json", "--max-tokens", "2"])
    out, err = capsys.readouterr()
    answers = json.loads(out)["answers"]
    assert [(a["query"], a["memory"] and a["memory"]["name"]) for a in answers] == [("w31", "b.graven"), ("w5", "a.graven"), ("w77", None)]
    assert answers[2]["text"] is None
    assert "'w31' went to b.graven" in err
    assert "has a word of 'w77'; name the one to ask" in err
    assert cli.main(["ask", str(tmp_path / "many"), "w31", "--stream"]) == 2
    assert Memory.load(tmp_path / "many" / "a.graven").about.fidelity is None  # nothing was asked for
