"""The experiment on bAbI: every memory trains and is measured on both lengths, rows that are there are passed over, verdicts follow the rows."""

import importlib
import sys
from pathlib import Path

import pytest

from graven.report import write_lines
from graven.tasks.stories import Story

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
LINES = tuple(f"Mary went to the {place}." for place in ("office", "garden", "kitchen", "hallway"))
TOLD = [Story(LINES[: 1 + n % 4] * (1 + 3 * (n % 2)), (("Where is Mary?", "garden"),)) for n in range(6)]


@pytest.fixture
def babi(monkeypatch):
    """The experiment, cut to its smallest size."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("gradmem_babi")
    monkeypatch.setattr(module, "LADDERS", {1: (2, 4), 4: (2,)})
    monkeypatch.setattr(module, "LENGTHS", {"short": (0, 4), "longer": (4, 20)})
    monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(module, "cost_over", lambda *_: 1.0)
    monkeypatch.setattr(module, "STEPS", {1: 2, 4: 2})
    monkeypatch.setattr(module, "SCALES", {"full": (1.0, 9)})
    monkeypatch.setattr(module, "questions_of", lambda _: TOLD)
    return module


def test_every_memory_trains_through_the_sizes_and_is_measured_on_both_lengths(babi):
    for name in babi.MEMORIES:
        row = babi.run(name, 1, 0, scale="full", relative=1.0)
        assert (row["task"], row["questions"], row["longer_questions"], row["steps"]) == ("QA1", 3, 3, 2), name
        assert 0 <= row["exact_match"] <= 1, name


def test_a_size_is_left_when_it_is_learned_and_all_steps_are_taken(babi, monkeypatch):
    monkeypatch.setattr(importlib.import_module("gradmem_bench"), "step", lambda *_, **__: 1.0)
    monkeypatch.setattr(babi, "PASSED", 0.15)
    assert babi.train(babi.MEMORIES["KV cache"], 1, 0, steps=20)[1] == [[2, 2, 0.19], [4, 18, pytest.approx(1 - 0.9**18, abs=1e-3)]]


def rows_of(name, values):
    return [
        {"memory": name, "task": f"QA{task}", "seed": 0, "exact_match": value, "longer_exact_match": None if task in (1, 4) else value / 2,
         "questions": 9, "longer_questions": 0, "bytes": 1, "steps": 1, "cpu_seconds": 1.0}
        for task, value in zip((1, 2, 3, 4, 5), values, strict=True)
    ]  # fmt: skip


def test_verdicts_and_tables_follow_the_rows(babi, monkeypatch, tmp_path, capsys):
    rows = rows_of("GradMem K=2", (1.0, 0.9, 0.8, 1.0, 0.9)) + rows_of("RMT", (1.0, 0.6, 0.8, 0.98, 0.9))
    rows += rows_of("GradMem K=1", (1.0, 0.9, 0.8, 1.0, 0.85))
    monkeypatch.setattr(babi, "LADDERS", dict.fromkeys((1, 2, 3, 4, 5), (2,)))
    assert [line.split()[0] for line in babi.verdict(rows)] == ["holds", "FAILS", "holds", "FAILS"]
    write_lines(tmp_path / "gradmem_babi.jsonl", rows)
    monkeypatch.setattr(babi, "ROWS", tmp_path)
    monkeypatch.setattr(babi, "FIGURES", tmp_path)
    monkeypatch.setattr(babi, "DATA", tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["gradmem_babi.py", "--report"])
    assert babi.main() == 0
    told = capsys.readouterr().out
    assert "| RMT | 100.0 (100.0 to 100.0) | 60.0 (60.0 to 60.0) |" in told
    assert "45.0 (45.0 to 45.0)" in told  # of longer stories
    assert (tmp_path / "gradmem_babi.png").exists()


def test_rows_that_are_there_are_passed_over(babi, monkeypatch, tmp_path):
    write_lines(tmp_path / "gradmem_babi.jsonl", rows_of("RMT", (1.0, 1.0, 1.0, 1.0, 1.0)))
    monkeypatch.setattr(babi, "ROWS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradmem_babi.py", "--scale", "full", "--memory", "RMT", "KV cache", "--seed", "0"])
    monkeypatch.setattr(babi, "DATA", tmp_path / "none")
    assert babi.main() == 0
    rows = babi.read_lines(tmp_path / "gradmem_babi.jsonl")
    assert [(row["memory"], row["task"]) for row in rows[5:]] == [("KV cache", "QA1"), ("KV cache", "QA4")]
    assert rows[0]["exact_match"] == 1.0


def test_rows_of_another_rate_have_a_file_of_their_own_and_no_figure(babi, monkeypatch, tmp_path):
    for name in ("ROWS", "FIGURES"):
        monkeypatch.setattr(babi, name, tmp_path)
    monkeypatch.setattr(babi, "DATA", tmp_path / "none")
    for options in (["--scale", "full", "--memory", "RMT", "--seed", "0", "--task", "4"], ["--report"]):
        monkeypatch.setattr(sys, "argv", ["gradmem_babi.py", "--rate", "9e-3", *options])
        assert babi.main() == 0
    (row,) = babi.read_lines(tmp_path / "gradmem_babi_rate_0.009.jsonl")
    assert row["spec"]["entry"]["rate"] == 0.009
    assert [path.name for path in tmp_path.iterdir()] == ["gradmem_babi_rate_0.009.jsonl"]
