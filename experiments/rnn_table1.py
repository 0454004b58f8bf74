"""Identification: a gated RNN trained to imitate linear self-attention, taken apart.                        arXiv:2309.01775, section 4.1, table 1

Claim    With d = 4, a trained gated RNN is attention: 10 neurons accumulate key-values, 4 hold the query, and it can be reduced to 14 hidden neurons
         and 10 outputs without loss, which are then a copy of the teacher to rounding.
Differs  The paper trains 100 hidden neurons and 100 outputs for a million steps and prunes weights that are 0, to 14 and 13. Here training is
         short (see `Scale`), numbers are effective dimensions, and neurons are merged. 10 outputs are the least, not the 16 of the construction.
         The distance is over whole sequences.
Cost     --scale small: 17 s.  --scale full: 129 s, and 42 s of audits.   (CPU time of one core, measured on a busy machine)

    python experiments/rnn_table1.py [--scale full] [--save DIR]      measure and print; keep layers and teachers for `graven audit`
    python experiments/rnn_table1.py --report                         table, figure and verdict from the rows
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rnn_common import FIGURES, ROWS, Runs, resumed, teachers_batch, train

from graven.audit.checkpoint import save_layer, save_teacher
from graven.audit.explain import explain
from graven.fit import FitSpec
from graven.layers.gated_rnn import GatedRNNSpec
from graven.report import figure, read_lines, table
from graven.tasks.teacher import Teacher

Row = dict[str, Any]
PAPER = {"distance": 3.73e-4, "hidden": 14, "outputs": 13, "accumulators": 10, "queries": 4}
EXACT = 1e-15  # relative loss of a layer that is its teacher


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it."""

    dimension: int
    neurons: int
    seeds: int
    steps: int
    batch: int


SCALES = {
    "small": Scale(dimension=2, neurons=16, seeds=2, steps=3000, batch=16),
    "full": Scale(dimension=4, neurons=60, seeds=5, steps=15_000, batch=16),
}


def measure(scale: Scale, save: Path | None) -> list[Row]:
    """One row a seed."""
    teachers = [Teacher.random(dimension=scale.dimension, generator=torch.Generator().manual_seed(100 + seed)) for seed in range(scale.seeds)]
    runs = Runs(GatedRNNSpec(width=scale.dimension, hidden=scale.neurons, output_gates=scale.neurons), range(scale.seeds))
    batch = teachers_batch(teachers, generator=torch.Generator().manual_seed(1))
    stamp = train(runs, batch, FitSpec(steps=scale.steps), size=scale.batch)
    rows = []
    for seed, (layer, teacher) in enumerate(zip(runs.layers(), teachers, strict=True)):
        if save is not None:
            save_layer(layer, save / f"layer_{seed}.safetensors")
            save_teacher(teacher, save / f"teacher_{seed}.safetensors")
        began = time.process_time()
        report = explain(layer, teacher)
        facts = {"point": scale.neurons, "seed": seed, "smallest": teacher.ranks.smallest, "kind": report.kind, "verdict": report.verdict}
        facts["findings"] = {finding.name: [finding.value, *finding.controls.values()] for finding in report.findings}
        facts["stages"] = [[stage.name, stage.hidden, stage.output_gates, stage.relative_loss] for stage in report.stages]
        rows.append(facts | stamp | {"audit_seconds": round(time.process_time() - began, 2)})
    return rows


def verdict(rows: list[Row], dimension: int) -> list[str]:
    """Whether every seed ends at the least size, exactly, and without a detour."""
    least = (dimension * (dimension + 1) // 2, dimension)
    lines = []
    for row in rows:
        stages = {name: rest for name, *rest in row["stages"]}
        counts = tuple(int(row["findings"].get(name, [0])[0]) for name in ("accumulators", "queries"))
        fitted, moved = stages.get("fitted to what it read as it came"), stages.get("moved onto the teacher")
        good = counts == least and moved is not None and moved[:2] == [sum(least), least[0]] and moved[2] < EXACT
        found = f"{counts[0]} + {counts[1]} effective neurons"
        if fitted and moved:
            found += f"; {moved[0]} hidden and {moved[1]} outputs, {fitted[2]:.1e} before they are moved onto the teacher, {moved[2]:.0e} after"
        lines.append(f"{'holds' if good else 'FAILS'}   seed {row['seed']}: {found}; smallest singular value of the teacher {row['smallest']:.4f}")
    return lines


def draw(rows: list[Row]) -> None:
    """Relative loss from stage to stage, a line a seed."""
    with figure(FIGURES / "rnn_table1.png", width=9, height=3.6) as (axes,):
        for row in rows:
            losses = [stage[3] for stage in row["stages"]]
            axes.plot(range(len(losses)), losses, "o-", ms=4, lw=0.8, label=f"seed {row['seed']}")
        names = [f"{name}\n({hidden}, {outputs})" for name, hidden, outputs, _ in max((row["stages"] for row in rows), key=len)]
        axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=6, rotation=25, ha="right")
        axes.set(yscale="log", ylabel="relative loss", title="from the trained layer to the smallest (hidden neurons, outputs)")
        axes.legend(frameon=False, fontsize=7)


def cells(rows: list[Row]) -> list[Row]:
    """What table 1 has, and what it lacks, a column a seed."""
    names = [
        "relative loss",
        "polynomial distance",
        "kernel energy",
        "accumulators",
        "queries",
        "remember",
        "forget",
        "between",
        "score KV",
        "score Q",
    ]
    shown = []
    for row in rows:
        for name in names:
            value, *controls = row["findings"].get(name, [float("nan")])
            beside = f" ({', '.join(f'{c:.2g}' for c in controls)})" if controls else ""
            shown.append({"measure (controls)": name, "seed": row["seed"], "text": f"{value:.3g}{beside}"})
    paper = {"polynomial distance": f"{PAPER['distance']:.3g}", "accumulators": "10", "queries": "4", "score KV": "near 0", "score Q": "near 0"}
    return shown + [{"measure (controls)": name, "seed": "paper", "text": paper.get(name, "")} for name in names]


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scale = SCALES["full" if arguments.report else arguments.scale]
    if arguments.report:
        rows = read_lines(ROWS / "rnn_table1.jsonl")
        draw(rows)
    else:
        rows = resumed("rnn_table1", arguments.scale, [scale.neurons], "point", lambda _: measure(scale, arguments.save))
    print(table([cell | {"seed": str(cell["seed"])} for cell in cells(rows)], row="measure (controls)", column="seed", value=lambda row: row["text"]))
    print("\n".join(verdict(rows, scale.dimension)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
