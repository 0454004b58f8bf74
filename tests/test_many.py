"""Many texts: the same bits as one at a time, nothing done twice, nothing bad stops the rest, and a kill loses the text in hand at most."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import test_train
import torch
from asserts import assert_refused

import graven
from graven import cli
from graven.errors import OutputError, SpecError, TextError
from graven.folder import NAME, Index
from graven.many import Row, Settings, sources_of, write_many
from graven.memory.file import Memory
from graven.processes import Processes, alone_by_mistake, here
from graven.train import train
from graven.verbs.many import totals
from graven.written import Wish

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

PORT = 20_000 + os.getpid() % 20_000
forked = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def records(seed, count=3):
    draw = random.Random(seed)
    return "\n".join(f"{key:02d}:{draw.randrange(100):02d}" for key in sorted(draw.sample(range(100), count)))


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return graven.load("records")


@pytest.fixture
def texts(tmp_path):
    """A folder of three texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"t{number}.txt").write_text(records(number))
    return folder


def kinds(rows):
    return Counter(row.kind for row in rows)


def states(folder):
    return {place.stem: Memory.load(place).state for place in folder.glob("*.graven")}


def assert_same_states(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@contextmanager
def numbered(index, count):
    """The environment that torchrun gives to a process."""
    names = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    os.environ |= {name: str(value) for name, value in names.items()}
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def in_child(work):
    """The id of a forked process that does it; torch is loaded already."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


# What is written


def test_each_file_has_the_bits_of_a_write_of_its_own(model, texts, tmp_path):
    rows = write_many(model, sources_of(texts), tmp_path / "out", Settings())
    assert [(row.name, row.kind, row.reason) for row in rows] == [(f"t{i}", "written", "") for i in range(3)]
    for number in range(3):
        alone, found = model.write(records(number)), Memory.load(tmp_path / "out" / f"t{number}.graven")
        assert torch.equal(found.state, alone.state)
        assert replace(found.about, seconds=0.0) == replace(alone.about, seconds=0.0)


def test_json_lines_are_named_by_themselves_or_by_their_number(model, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": records(1), "name": "one"}) + "\n\n" + json.dumps({"text": records(2)}) + "\n")
    rows = write_many(model, sources_of(tmp_path / "texts.jsonl"), tmp_path / "out", Settings())
    assert [row.name for row in rows] == ["one", "000003"]
    assert sorted(states(tmp_path / "out")) == ["000003", "one"]


def test_a_bad_text_is_told_and_the_rest_is_written(model, tmp_path):
    good = json.dumps({"text": records(1), "name": "good"})
    bad = [
        '{"text": "no record"}', "{", '{"text": 3}', '{"text": "aa:11", "colour": 1}', '{"name": "x"}', "[" * 100_000,
        '{"text": "", "name": "empty"}',
        '{"text": "aa:11", "name": "../up"}', '{"text": "aa:11", "name": ""}', '{"text": "aa:11", "name": "%s"}' % ("n" * 300),
        '{"text": "aa:\\ud800", "name": "half"}', '{"text": "aa:11", "name": "\\ud800"}', good.replace("good", "mine"), good,
    ]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("\n".join([good, *bad, good.replace("good", "last")]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.graven").write_text("not a memory")
    rows = write_many(model, sources_of(tmp_path / "texts.jsonl"), tmp_path / "out", Settings())
    assert [row.kind for row in rows] == ["written", *["bad"] * len(bad), "written"]
    assert all(row.reason and "\n" not in row.reason for row in rows[1:-1])
    assert "the name 'good' was there before" in rows[-2].reason
    assert (tmp_path / "out" / "mine.graven").read_text() == "not a memory"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["good.graven", NAME, "last.graven", "mine.graven"]


def test_a_text_that_breaks_the_model_is_told_too(model, texts, tmp_path, monkeypatch):
    plain = type(model).write

    def breaking(self, text, **settings):
        if text == records(2):
            raise RuntimeError("it\nbroke")
        return plain(self, text, **settings)

    monkeypatch.setattr(type(model), "write", breaking)
    rows = write_many(model, sources_of(texts), tmp_path / "out", Settings())
    assert kinds(rows) == {"written": 2, "bad": 1}
    assert rows[2].reason == "RuntimeError: it broke"


def test_a_wrong_setting_stops_at_once(model, texts, tmp_path):
    assert_refused(SpecError, "`rate` is 3.0", lambda: write_many(model, sources_of(texts), tmp_path / "out", Settings(rate=3.0)))
    assert_refused(SpecError, "queries of its own", lambda: Settings(wish=Wish(objective="distill")))
    (tmp_path / "file").write_text("")
    assert_refused(OutputError, "cannot make the folder", lambda: write_many(model, sources_of(texts), tmp_path / "file", Settings()))
    for place in (tmp_path / "nowhere", tmp_path):
        assert_refused(TextError, "a file of JSON lines", lambda place=place: sources_of(place))


# What is there already


def test_what_is_there_is_not_written_again_unless_text_settings_or_file_changed(model, texts, tmp_path):
    out = tmp_path / "out"
    write_many(model, sources_of(texts), out, Settings())
    before = states(out)
    assert kinds(write_many(model, sources_of(texts), out, Settings())) == {"there": 3}
    (texts / "t0.txt").write_text(records(9))
    (out / "t1.graven").unlink()
    os.utime(out / "t2.graven")
    rows = write_many(model, sources_of(texts), out, Settings())
    assert [row.kind for row in rows] == ["written", "written", "there"]
    after = states(out)
    assert torch.equal(after["t0"], model.write(records(9)).state)
    assert_same_states({name: after[name] for name in ("t1", "t2")}, {name: before[name] for name in ("t1", "t2")})
    assert kinds(write_many(model, sources_of(texts), out, Settings(steps=1))) == {"written": 3}


def test_a_file_that_was_replaced_or_damaged_is_written_again_whoever_looked_at_it(model, texts, tmp_path):
    out = tmp_path / "out"
    write_many(model, sources_of(texts), out, Settings())
    model.write("zz:99").save(out / "t0.graven")
    (out / "t1.graven").write_bytes((out / "t1.graven").read_bytes()[:-1] + b"x")
    with Index(out) as index:
        assert list(index.refresh(lambda _: "")) == ["t1.graven"]
    rows = write_many(model, sources_of(texts), out, Settings())
    assert [row.kind for row in rows] == ["written", "bad", "there"]
    assert "is no memory that can be read" in rows[1].reason
    assert torch.equal(Memory.load(out / "t0.graven").state, model.write(records(0)).state)


def test_a_link_to_nowhere_is_a_bad_text_and_stops_no_other(model, texts, tmp_path):
    (texts / "t9.txt").symlink_to(tmp_path / "nowhere")
    rows = write_many(model, sources_of(texts), tmp_path / "out", Settings())
    assert [row.kind for row in rows] == ["written"] * 3 + ["bad"]
    assert rows[3].reason == "cannot be read: No such file or directory."


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "text"])
def test_an_index_that_is_damaged_costs_a_second_write_and_no_more(damage, model, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": records(1)}))
    sources, out = sources_of(tmp_path / "one.jsonl"), tmp_path / "out"
    write_many(model, sources, out, Settings())
    before, data = states(out), (out / NAME).read_bytes()
    damaged = {"empty": b"", "cut": data[:5000], "zeros": data[:100] + bytes(len(data) - 100), "text": b"text" * 3000}
    (out / NAME).write_bytes(damaged[damage])
    assert kinds(write_many(model, sources, out, Settings())) == {"written": 1}
    assert_same_states(states(out), before)


@forked
def test_a_kill_at_any_moment_loses_the_text_in_hand_at_most(model, texts, tmp_path, generator):
    out, whole = tmp_path / "out", tmp_path / "whole"
    write_many(model, sources_of(texts), whole, Settings())
    told = tmp_path / "told"

    def work():
        with told.open("a") as file:
            write_many(model, sources_of(texts), out, Settings(), report=lambda row, _: print(row.name, row.kind, file=file, flush=True))

    for _ in range(6):
        (out / NAME).exists() and assert_noted_at_most_one_short(out)
        child = in_child(work)
        time.sleep(float(torch.rand(1, generator=generator)) * 0.6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    rows = write_many(model, sources_of(texts), out, Settings())
    assert kinds(rows)["bad"] == 0
    written = Counter(line.split()[0] for line in told.read_text().splitlines() if line.endswith(" written"))
    assert all(count == 1 for count in written.values())  # what was told was never written again
    assert_same_states(states(out), states(whole))


def assert_noted_at_most_one_short(out):
    """Every whole file is noted, the one that was being noted excepted."""
    with Index(out) as index:
        noted = {f"{name}.graven" for (name,) in index.base.execute("SELECT name FROM written")}
    files = {place.name for place in out.glob("*.graven")}
    assert noted <= files
    assert len(files - noted) <= 1


# Several processes


def test_a_share_is_every_other_item_and_results_come_back_in_order():
    assert Processes(1, 3).share(range(7)) == [1, 4]
    assert Processes().together(lambda items: [2 * item for item in items], [1, 2, 3]) == [2, 4, 6]
    with numbered(1, 2):
        assert here() == Processes(1, 2)
    assert here() == Processes()


SHORT = replace(test_train.TINY, stage=(replace(test_train.TINY.stage[0], at_most=4),), checkpoint_every=100)


@forked
def test_two_processes_write_and_train_the_same_bits_as_one(model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("graven.train.draw_curve", lambda *_: None)

    def work():
        processes = here()
        rows = write_many(model, sources_of(texts), tmp_path / "out", Settings(), processes=processes)
        assert len(rows) == (3 if processes.first else 1)
        assert train(SHORT, tmp_path / "run").about["trained"]["steps"] == 4

    import_module("accelerate")  # once, and not in each child
    children = []
    for index in range(2):
        with numbered(index, 2):
            children.append(in_child(work))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    write_many(model, sources_of(texts), tmp_path / "one", Settings())
    train(SHORT, tmp_path / "alone")
    assert_same_states(states(tmp_path / "out"), states(tmp_path / "one"))
    assert test_train.bits(tmp_path / "run") == test_train.bits(tmp_path / "alone")
    assert test_train.curve(tmp_path / "run") == test_train.curve(tmp_path / "alone")


def test_more_processes_than_micro_batches_are_refused(tmp_path):
    with numbered(0, 3):
        assert_refused(SpecError, "3 processes and a step has 2 micro-batches", lambda: train(test_train.TINY, tmp_path / "run"))


def test_one_process_of_accelerate_launch_is_told(monkeypatch):
    assert alone_by_mistake() is None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert "torchrun --nproc_per_node" in alone_by_mistake()
    monkeypatch.setenv("RANK", "0")
    assert alone_by_mistake() is None


# The command line


def test_the_verb_says_how_many_how_fast_and_what_is_bad(texts, tmp_path, capsys):
    (texts / "bad.txt").write_bytes(b"\xff")
    command = ["write-many", str(texts), "-o", str(tmp_path / "out"), "--json"]
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["written"], found["there"], found["bad"]) == (3, 0, 1)
    assert found["texts_per_cpu_hour"] > 0
    assert err == "graven: bad: is not UTF-8 (at byte 0); convert it first.\n"
    (texts / "bad.txt").unlink()
    assert cli.main(command[:-1]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 0 texts written, 3 there already, 0 bad\n"
    assert totals([Row(name="a", kind="written", seconds=0.5)])["texts_per_cpu_hour"] == 7200.0
