"""The experiments on questions and on language modelling measure, go on where they stopped, draw and judge, on a model of random weights."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import zoo

from graven.tasks.base import Tokens
from graven.train_triples import new_memory

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

FOLDER = Path(__file__).parents[1] / "experiments"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    """The experiment, a tiny model and data of words, and how to call it."""
    module, place = load("gradmem_squad"), tmp_path_factory.mktemp("squad")
    module.draw_curve = lambda path, _: path.write_bytes(b"undrawn")
    module.PLACE = place / "rows.jsonl"
    zoo.architecture("llama").save_pretrained(place / "base")
    zoo.tokenizer().save_pretrained(place / "base")
    rows = [{"context": f"w{a} w{b}", "question": "w6", "answers": [f"w{a}"]} for a in range(30, 36) for b in range(40, 46)]
    for part in ("train", "dev"):
        (place / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = argparse.Namespace(
        model=str(place / "base"), name="tiny", data=place, memories=["none", "rmt", "gradmem"], triples=8, batch=4, rate=1e-2, slots=2,
        longest=8, dev=3, seed=0, device="cpu", runs=place / "runs", scale="full",
    )  # fmt: skip
    return module, settings


def test_short_squad_is_measured_in_every_way_and_once(squad, tmp_path, capsys):
    module, settings = squad
    rows = []
    module.run(settings, rows)
    assert [(row["memory"], row["steps"]) for row in rows] == [
        ("closed book", 0), ("full context", 0), ("rmt", 0), ("rmt", 1), ("gradmem", 0), ("gradmem", 1), ("gradmem", 2), ("gradmem", 5),
    ]  # fmt: skip
    assert all(0 <= row["exact_match"] <= 100 and row["loss"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == 8
    before = list(rows)
    module.run(settings, rows)
    assert rows == before == module.read_lines(module.PLACE)
    assert "| GradMem, K = 5 | 8 |" in capsys.readouterr().out
    assert [line.split()[0] in ("holds", "FAILS") for line in module.verdict(rows)] == [True] * 3
    module.draw(rows, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_a_forward_write_sees_its_own_row_and_no_padding(squad):
    module, settings = squad
    base = module.load_pretrained(settings.model, attention="graven")
    common = {name: getattr(settings, name) for name in ("triples", "slots", "longest", "batch", "rate", "seed", "device")}
    rmt = module.RMT(new_memory(module.Setting(memory="rmt", data="x", model=settings.model, **common).spec(), base))
    ids = [[30, 40, 41], [31]]
    with torch.no_grad():
        both = rmt.write(rmt.start(2), Tokens.of(ids))
        alone = torch.cat([rmt.write(rmt.start(1), Tokens.of([row])) for row in ids])
        again = rmt.write(rmt.start(2), Tokens.of(ids), steps=2)
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(both, again)


def test_a_chunk_is_measured_without_with_and_behind_vectors(tmp_path, monkeypatch):
    module = load("gradmem_lm")
    monkeypatch.setattr(module, "HALF", 12)
    monkeypatch.setattr(module, "DRAWN_TOKENS", 3)
    (tmp_path / "t.txt").write_text("\n".join("w5 w7 w9 w11" for _ in range(80)))
    model = zoo.pretrained("llama")
    model.requires_grad_(False)
    one, two = module.chunks_of(model, tmp_path / "t.txt", count=2)
    assert len(one) == len(two) == 24
    assert module.chunks_of(model, tmp_path / "t.txt", count=1) == [one]
    rows = []
    for chunk, ids in enumerate((one, two)):
        found = module.bounds(model, ids, slots=[2]) + [
            module.written(model, ids, memory=memory, slots=2, steps=2, seed=chunk) for memory in module.OBJECTIVES
        ]
        rows += [{"model": "tiny", "source": "t", "chunk": chunk, **row} for row in found]
    assert [row["memory"] for row in rows[:6]] == ["no context", "full context", "last tokens", *module.OBJECTIVES]
    none = model.model(input_ids=torch.tensor([one[12:]])).logits[0, :-1].log_softmax(-1)
    assert rows[0]["cross_entropy"] == pytest.approx(-none.gather(-1, torch.tensor(one[13:])[:, None]).mean().item(), rel=1e-4)
    full = model.model(input_ids=torch.tensor([one])).logits[0, 12:-1].log_softmax(-1)
    assert rows[1]["cross_entropy"] == pytest.approx(-full.gather(-1, torch.tensor(one[13:])[:, None]).mean().item(), rel=1e-4)
    assert len(module.verdict(rows)) == 3
    assert module.means([*rows, {**rows[0], "chunk": 2}]) == module.means(rows)
    module.draw(rows, tmp_path / "l.png")
    assert (tmp_path / "l.png").read_bytes()[:4] == b"\x89PNG"
