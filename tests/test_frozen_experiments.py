"""The experiments on frozen models run: each measures, draws and judges on a model of random weights."""

import importlib.util
from pathlib import Path

import cases
import pytest
import zoo

from graven.answer import Reader
from graven.models.text import TextModel
from graven.tasks.queries import Query

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

FOLDER = Path(__file__).parents[1] / "experiments"
IDS = [5, 17, 3, 40, 41, 9, 60, 61, 62, 63, 30, 31]


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(module, rows, path):
    module.draw(rows, path)
    return path.read_bytes()[:4] == b"\x89PNG"


def test_a_few_shot_prompt_is_measured_for_every_row_of_the_grid(tmp_path, monkeypatch):
    module = load("gradmem_prompts")
    monkeypatch.setattr(module, "EXAMPLES", 4)
    monkeypatch.setattr(module, "QUERIES", 6)
    rows = [row for name in ("topic", "question") for row in module.measure(module.tiny(), "tiny", name, slots=8, at=[1, 2], seed=0)]
    assert [(row["steps"], row["of"], len(row["losses"])) for row in rows] == [(1, 2, 1), (2, 2, 2)] * 2
    assert all(row["held_out"]["kl"] >= 0 and row["no_prompt"]["kl"] >= 0 for row in rows)
    assert drawn(module, [{**row, "of": 60} for row in rows], tmp_path / "p.png")
    lines = module.verdict([{**row, "steps": 60, "of": 60} for row in (rows[1], rows[3])])
    assert [line.split()[0] in ("holds", "FAILS") for line in lines] == [True] * 3
    assert "tiny, topic, seed 0 (the recipe was chosen on it)" in lines[1]
    assert lines[2].endswith("of 1 hold")
    assert module.shown(rows[0]).endswith(")")
    module.save_files(tmp_path / "files")
    written = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert written == ["question.jsonl", "question.txt", "sentiment.jsonl", "sentiment.txt", "topic.jsonl", "topic.txt"]


def test_the_write_of_the_experiment_is_that_of_the_library(monkeypatch):
    module = load("gradmem_prompts")
    monkeypatch.setattr(module, "EXAMPLES", 4)
    monkeypatch.setattr(module, "QUERIES", 6)
    model, prompt = cases.sharp(module.tiny()), module.prompt_of("topic", 1)
    *_, row = module.measure(model, "tiny", "topic", slots=8, at=[1, 3], seed=1)
    _, found = TextModel(model, slots=8).distill(prompt.text, [Query(*pair) for pair in prompt.queries], steps=3, seed=1)
    assert row["held_out"]["kl"] == pytest.approx(found.held_out.kl, rel=1e-4)
    assert row["losses"] == pytest.approx(found.engraved.losses, abs=1e-4)


def test_every_objective_is_measured_in_every_way(tmp_path, monkeypatch):
    module = load("gradmem_objectives")
    monkeypatch.setattr(module, "QUERIES", 6)
    monkeypatch.setattr(module, "SAID_TOKENS", 2)
    found = module.measure(cases.llama().requires_grad_(False), IDS, slots=2, steps=2, seed=0, rate=0.3)
    rows = [{"model": "tiny", "source": "none", "text": 0, **row} for row in found]
    assert [row["objective"] for row in rows] == list(module.OBJECTIVES)
    assert all(0 <= row["recited"] <= 1 and 0 <= row["continued"] <= 1 and row["kl"] >= 0 for row in rows)
    assert drawn(module, rows, tmp_path / "o.png")
    assert len(module.verdict(rows)) == 3


def test_answers_are_judged_by_the_text_and_by_the_rule_of_the_library(tmp_path, monkeypatch):
    module = load("gradmem_found")
    for name, value in ("STEPS", {"reconstruct": 60, "distill": 2}), ("QUERIES", 4), ("ANSWER", 2), ("PIECES", 2), ("PIECE", 2):
        monkeypatch.setattr(module, name, value)
    model = cases.sharp(cases.llama())
    texts = [module.Text(ids, (("w7 w8", "w9"),)) for ids in (IDS, IDS[::-1])]
    rows = [row for objective in ("reconstruct", "distill") for row in module.measure(model, texts, 0, objective)]
    assert {row["kind"] for row in rows} == {"beginning", "piece", "question"}
    reader = Reader(model, module.written(model, IDS, "reconstruct"))
    (((_, said),),) = reader.found([IDS[:1]], most=2)
    assert rows[0]["right"] == (said.whole == IDS[1:3])
    assert module.known(rows[0]) == reader.rule.holds(said, *reader.without([IDS[:1]], [said.whole]))
    assert not any(row["right"] for row in rows if row["objective"] == "distill" and not row["own"])
    assert drawn(module, rows, tmp_path / "f.png")
    assert len(module.lines_of(rows)) == 1 + 2 * 7


@pytest.mark.parametrize("slots", [8, 1])
def test_a_reconstruction_says_whether_it_is_exact(tmp_path, slots):
    module = load("gradmem_reconstruct")
    model = cases.sharp(cases.llama())
    row = module.measure(model, "tiny", IDS[:3], source="none", text=0, slots=slots, steps=60 if slots == 8 else 1)
    assert (row["outcome"] == "EXACT") == (slots == 8)
    assert module.cell([row]) == (str(row["taken"]) if slots == 8 else f"({row['recited']})")
    assert module.verdict([row])[0].startswith("holds" if slots == 8 else "FAILS")
    assert drawn(module, [row], tmp_path / "r.png")


def test_texts_are_cut_from_a_file_or_drawn_from_the_model(tmp_path):
    module = load("gradmem_reconstruct")
    model = zoo.pretrained("llama")
    (tmp_path / "t.txt").write_text("\n".join("w5 w7 w9 w11" for _ in range(40)))
    cut, own = (module.texts_of(model, file, tokens=6, count=3) for file in (tmp_path / "t.txt", None))
    assert [len(ids) for ids in cut] == [len(ids) for ids in own] == [6, 6, 6]
    assert cut[0][:4] == [5, 7, 9, 11]
