"""The experiments on the small cell: every kind of run trains, rows that are there are passed over, and each reports from its rows."""

import dataclasses
import importlib
import math
from pathlib import Path

import pytest
import torch

from graven.memory.gradient import SGD

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SINGLE = 1e-4  # float32


@pytest.fixture
def module(monkeypatch):
    """Imports one of them."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


@pytest.fixture
def cell(module):
    return module("gradmem_cell")


def test_reptile_moves_the_start_to_where_the_writes_end(cell, generator):
    one = cell.Cell(memory=dataclasses.replace(cell.PLAIN, order="none", steps=2), meta="reptile")
    memory, episode = cell.new(one, 0), one.draw(cell.BATCH, generator)
    ends = cell.written(memory, one, episode)
    cell.reptile(memory, one, episode)
    torch.testing.assert_close(memory.initial.detach() - memory.initial.grad, ends.mean(0), rtol=SINGLE, atol=SINGLE)
    assert memory.write_head.weight.grad.any()


def test_the_implicit_gradient_of_the_start_is_the_read_gradient_where_the_spring_is_stiff(cell, generator):
    one = cell.Cell(memory=dataclasses.replace(cell.PLAIN, order="none", rule=SGD(rate=1e-9)), meta="implicit")
    memory, episode = cell.new(one, 0), one.draw(cell.BATCH, generator)
    state = cell.written(memory, one, episode).requires_grad_()
    (wanted,) = torch.autograd.grad(cell.read_loss(memory, state, episode), state)
    cell.implicit(memory, one, episode)
    torch.testing.assert_close(memory.initial.grad, wanted.sum(0), rtol=SINGLE, atol=SINGLE * float(wanted.sum(0).abs().max()))


def test_sorted_contexts_are_sorted_and_values_alone_can_count(cell, generator):
    episode = cell.Cell(order="sorted").draw(5, generator)
    keys = episode.query.ids[..., 2]
    assert (keys[:, 1:] > keys[:, :-1]).all()
    assert torch.equal(cell.Cell(objective="values").counted(episode), episode.values)
    assert cell.Cell().counted(episode) is None


def test_every_ablation_is_trained_once_measured_and_judged(module, cell, tmp_path, monkeypatch):
    experiment, place = module("gradmem_ablations"), tmp_path / "rows.jsonl"
    monkeypatch.setattr(cell, "STEPS", {"small": 1})
    monkeypatch.setattr(cell, "CONTEXTS", {"small": 2})
    monkeypatch.setattr(cell, "BATCH", 2)
    cheaper = dict.fromkeys(experiment.CHEAPER, "plain, K = 2")
    rows = cell.run(experiment.CELLS, place, seeds=[0], scale="small", seconds_of=cheaper)
    assert {row["cell"] for row in rows} == set(experiment.CELLS)
    assert {"memory", "pairs", "seed", "exact_match", "bytes", "cpu_seconds"} <= set(rows[0])
    assert all(math.isfinite(row["value_loss"]) for row in rows)
    before = place.read_bytes()
    monkeypatch.setattr(cell, "train", None)  # nothing is left to train
    assert cell.run(experiment.CELLS, place, seeds=[0], scale="small", seconds_of=cheaper) == rows
    assert place.read_bytes() == before
    assert all(line.split()[0] in ("holds", "FAILS") for line in experiment.verdict(rows))
    assert len(experiment.report(rows).splitlines()) == 2 + len(experiment.CELLS)
    experiment.draw(rows, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_the_grid_of_vectors_and_steps_is_judged_from_its_rows(module, tmp_path):
    experiment = module("gradmem_memory")

    def rows(exact_of):
        return [
            {"cell": name, "evaluated": one.memory.steps, "exact_match": exact_of(one.memory.slots, one.memory.steps)}
            for name, one in experiment.CELLS.items()
        ]

    rising = rows(lambda slots, steps: 0.05 * slots + 0.15 * steps)
    assert [line.split()[0] for line in experiment.verdict(rising)] == ["holds"] * 3
    assert [line.split()[0] for line in experiment.verdict(rows(lambda slots, _: 0.1 * slots))] == ["holds", "FAILS", "FAILS"]
    assert experiment.report(rising).splitlines()[2].startswith("| 1 | 128 | 20.0 (20.0 to 20.0)")
    experiment.draw(rising, tmp_path / "f.png")
    assert (tmp_path / "f.png").exists()


def test_a_seed_that_lacks_a_cell_is_left_out_and_named(module):
    experiment = module("gradmem_memory")
    rows = [{"cell": name, "seed": seed, "evaluated": 0, "exact_match": 0.5} for name in experiment.CELLS for seed in (0, 1)]
    assert experiment.whole(rows) == (rows, "")
    kept, said = experiment.whole(rows[:-1])
    assert {row["seed"] for row in kept} == {0}
    assert said == "seed 1 is left out, it lacks 8 vectors, K = 3"
    assert experiment.whole([])[1].startswith("there are no rows yet")


def test_the_losses_of_keys_values_and_marks_make_up_that_of_the_write(cell, generator):
    one = cell.Cell()
    memory, episode = cell.new(one, 0), one.draw(3, generator)
    first = cell.trace(memory, cell.TASK, episode, most=0)[0]
    assert first["write_loss"] == pytest.approx((first["key_loss"] + first["value_loss"] + 3 * first["mark_loss"]) / 5, rel=SINGLE)


@pytest.mark.parametrize(("name", "holds"), [("gradmem_figure4", 3), ("gradmem_capacity", 2)])
def test_what_the_committed_rows_of_the_records_checkpoint_hold(name, holds, module, tmp_path):
    experiment = module(name)
    rows = experiment.read_lines(EXPERIMENTS / "rows" / f"{name}.jsonl")
    lines = experiment.verdict(rows)
    assert [line.split()[0] for line in lines[:holds]] == ["holds"] * holds
    experiment.draw(*([rows, []] if name == "gradmem_figure4" else [rows]), tmp_path / "f.png")
    assert (tmp_path / "f.png").exists()
