"""The bench of all memories: every entry can be made, equal bytes are equal, rows that are there are passed over, verdicts can fail."""

import importlib
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest

from graven.memory.base import size_of
from graven.report import write_lines

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def module(monkeypatch):
    """Imports an experiment."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


def row(memory, value, *, pairs=4, seed=0, size=512):
    costs = {"write_flops": 1, "read_flops": 1, "steps": 1, "cpu_seconds": 1.0}
    return {"memory": memory, "pairs": pairs, "seed": seed, "exact_match": value, "bytes": size, **costs}


def test_memories_of_equal_bytes_have_them(module):
    bench, matched = module("gradmem_bench"), module("gradmem_state_matched")
    sizes = {name: size_of(bench.new(entry, 0).start(1)) for name, entry in matched.ENTRIES.items()}
    for suffix in ("1 kB", "2.5 kB", "6 kB"):
        own = [size for name, size in sizes.items() if name.endswith(f", {suffix}")]
        assert len(own) >= 8
        assert max(own) <= matched.SLACK * min(own)


def test_every_memory_of_the_bench_trains_a_step_and_is_measured(module, monkeypatch):
    bench = module("gradmem_bench")
    monkeypatch.setattr(bench, "CONTEXTS", 4)
    monkeypatch.setattr(bench, "SCALES", {"tiny": (3, (2,), 2)})
    for name in ("RMT", "DeltaNet"):
        found = bench.run(name, bench.MEMORIES[name], 0, scale="tiny", cost=1.0)
        assert found["steps"] == 2
        assert [stage[:2] for stage in found["spec"]["stages"]] == [[2, 1], [3, 1]]
        assert 0 <= found["exact_match"] <= 1 < found["write_flops"]


def test_stages_before_those_of_the_scale_end_in_time(module, monkeypatch):
    bench = module("gradmem_bench")
    monkeypatch.setattr(bench, "CONTEXTS", 4)
    monkeypatch.setattr(bench, "SCALES", {"tiny": (3, (2,), 8)})
    found = bench.run("ARMT", bench.armt(features=2, order=1), 0, scale="tiny", cost=1.0)
    assert [stage[:2] for stage in found["spec"]["stages"]] == [[1, 2], [2, 2], [3, 4]]


def test_the_best_answer_without_the_key_is_the_most_frequent_value(module, monkeypatch):
    """All contexts of three and four pairs, one by one."""
    bench = module("gradmem_bench")
    monkeypatch.setattr(bench, "TASK", bench.Retrieval(key_length=1, value_length=1, symbols=5))
    for pairs in (3, 4):
        counts = [max(Counter(values).values()) for values in itertools.product(range(5), repeat=pairs)]
        assert bench.blind(pairs) == pytest.approx(sum(counts) / len(counts) / pairs, rel=1e-12)


def test_a_setting_is_screened_up_its_ladder_and_no_longer_than_it_may(module, monkeypatch):
    tuning = module("gradmem_tuning")
    monkeypatch.setattr(module("gradmem_bench"), "step", lambda *_, **__: 1.0)
    right, late = (tuning.screened("RMT", tuning.rmt(6e-3, ladder=(2, 4), seconds=seconds)) for seconds in (60, 0))
    assert right["stages"] == [[2, 19, 0.865], [4, 19, 0.865]]  # 1 - 0.9^19
    assert late["stages"] == [[2, 0, 0.0], [4, 0, 0.0]]
    assert tuning.report([right]).splitlines()[2] == f"| RMT | 512 | {right['cpu_seconds']} | 2: 19, 86 %; 4: 19, 86 % |"


def test_the_cost_of_the_papers_grid_is_extrapolated_where_it_would_take_too_long(module, tmp_path, monkeypatch):
    table1 = module("gradmem_table1")
    monkeypatch.setattr(table1, "PAPER", {"RMT": ()})
    monkeypatch.setattr(table1, "seconds_of", lambda _, pairs: pairs**2 / 4)
    rows = table1.estimates(tmp_path / "rows.jsonl", steps=3600, most=33.0)
    assert [row["measured"] for row in rows] == [True, True, True, True, False, False]  # at 32 pairs 256 s a batch, 32 of them a micro-batch
    assert [row["seconds_a_step"] for row in rows] == pytest.approx([pairs**2 / 4 for pairs in table1.GRID])
    assert [row["hours"] for row in rows[:2]] == [4.0, 17.0]  # the first stage has a quarter of the steps
    assert table1.estimates(tmp_path / "rows.jsonl", steps=3600, most=33.0) == table1.read_lines(tmp_path / "rows.jsonl")


def test_rows_that_are_there_are_passed_over(module, tmp_path, monkeypatch):
    bench = module("gradmem_bench")
    monkeypatch.setattr(bench, "COSTS", tmp_path / "costs.jsonl")
    write_lines(bench.COSTS, [{"memory": "RMT", "pairs": 4, "cost": 0.4}])
    write_lines(tmp_path / "rows.jsonl", [row("RMT", 0.3)])
    entries = {"RMT": bench.MEMORIES["RMT"]}
    assert bench.resumed(entries, tmp_path / "rows.jsonl", seeds=[0], scale="small", minutes=math.inf) == [row("RMT", 0.3)]
    assert bench.resumed(entries, tmp_path / "rows.jsonl", seeds=[0, 1], scale="small", minutes=0.0) == [row("RMT", 0.3)]


def test_verdicts_follow_the_rows(module):
    table1, matched = module("gradmem_table1"), module("gradmem_state_matched")
    good = [row("GradMem K=1", 0.8), row("RMT", 0.3), row("RMT, 2 writes", 0.35), row("KV cache", 0.9)]
    assert [line.split()[0] for line in table1.verdict(good)] == ["holds"] * 3
    bad = [row("GradMem K=1", 0.35), row("RMT", 0.3), row("RMT, 2 writes", 0.6), row("KV cache", 0.5)]
    assert [line.split()[0] for line in table1.verdict(bad)] == ["FAILS"] * 3
    equal = [row("GradMem K=2, 1 kB", 0.5), row("RMT, 1 kB", 0.6)]
    assert [line.split()[0] for line in matched.verdict(equal)] == ["holds", "FAILS"]
    assert matched.verdict([row("GradMem K=2, 1 kB", 0.5), row("RMT, 1 kB", 0.4, size=5000)])[0].startswith("FAILS")


def test_a_memory_pays_where_the_lines_cross(module):
    amortised = module("gradmem_amortised")
    costs = {"write": 100.0, "read": 9.0, "kept_read": 5.0, "full": 25.0, "cache": 20.0, "cached_read": 9.0}
    assert amortised.queries_until_it_pays({f"{way}_flops": cost for way, cost in costs.items()}, "flops") == (5.0, 20.0)
    dearer = costs | {"kept_read": 25.0}
    assert amortised.queries_until_it_pays({f"{way}_flops": cost for way, cost in dearer.items()}, "flops") == (math.inf, math.inf)
