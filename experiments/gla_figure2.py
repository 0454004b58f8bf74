"""Gated linear attention in one, two and three layers.                                                       arXiv:2504.04308, figure 2

Claim    L layers take L steps of weighted gradient descent (theorem 2), so deeper is better: at correlations (0, 1), scalar gates, delimiters.
Differs  As figure 1; also three restarts, two where layers are stacked, and at most 20 examples a task where the paper has 50. Stacked layers
         train at 4e-3 with clipped gradients: at 1e-2 three layers diverged and two stayed at the risk of one. No closed form is known for
         more than one layer, so what is checked is the order of the three.
Cost     --scale small: 48 s.  --scale full: 9 min of one CPU core; --layers and --count split it over processes.

    python experiments/gla_figure2.py --scale full [--layers 2]       measure; points that have their rows are passed over
    python experiments/gla_figure2.py --report                        table, figure and verdict from the rows
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gla_training import FIGURES, ROWS, Effort, Learner, Row, least_risk, resumed, trained

from graven.report import figure, read_lines, table

DIMENSION, CORRELATIONS, SEED = 10, (0.0, 1.0), 0
COUNTS, LAYERS = (5, 10, 20), (1, 2, 3)
SCALES = {"small": ((5,), Effort(restarts=3, steps=600, test=10_000)), "full": (COUNTS, Effort(restarts=3, steps=1000, test=40_000))}


def point(layers: int, count: int, effort: Effort) -> Row:
    """One row: all restarts of one depth at one length."""
    learner = Learner(gate="scalar", layers=layers)
    task = learner.task(dimension=DIMENSION, examples=(count, count), correlations=CORRELATIONS)
    one = least_risk(Learner(gate="scalar"), task)
    careful = replace(effort, restarts=2, rate=4e-3, clip=1.0) if layers > 1 else effort
    return {"layers": layers, "count": count, "optimum_of_one_layer": one, **trained(learner, task, careful, seed=SEED)[1]}


def key(row: Row) -> tuple[int, int]:
    """What a row is of."""
    return row["layers"], row["count"]


def verdict(rows: list[Row]) -> list[str]:
    """At each length, each layer more against one less, beyond two standard errors."""
    flat = {(row["layers"], row["count"]): row for row in rows}
    lines = []
    for (layers, count), row in flat.items():
        if less := flat.get((layers - 1, count)):
            better = row["risk"] < less["risk"] - 2 * (row["error"] + less["error"])
            lines.append(f"{'holds' if better else 'FAILS'}   {count} a task: {layers} layers {row['risk']:.4f}, {layers - 1} {less['risk']:.4f}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """One curve a depth, and what one layer can reach."""
    with figure(path, width=5, height=3.4) as (axes,):
        for colour, layers in zip(("C0", "C3", "C2"), LAYERS, strict=True):
            here = sorted((row for row in rows if row["layers"] == layers), key=lambda row: row["count"])
            axes.plot(
                [row["count"] for row in here], [row["risk"] for row in here], "o-", ms=4, color=colour, label=f"{layers} layer{'s'[: layers > 1]}"
            )
        ones = sorted({(row["count"], row["optimum_of_one_layer"]) for row in rows})
        axes.plot(*zip(*ones, strict=True), "--", lw=1, color="C0", label="optimum of one layer")
        axes.set(title=f"r = {CORRELATIONS}, scalar gates", xlabel="examples a task", ylabel="risk / d", yscale="log")
        axes.legend(frameon=False, fontsize=8)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--count", type=int, choices=COUNTS, nargs="+")
    parser.add_argument("--layers", type=int, choices=LAYERS, nargs="+", default=LAYERS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts, effort = SCALES[arguments.scale]
    places = {layers: ROWS / f"gla_figure2_{layers}.jsonl" for layers in arguments.layers}
    if arguments.report:
        rows = [row for place in places.values() for row in read_lines(place)]
        draw(rows, FIGURES / "gla_figure2.png")
    else:
        rows = []
        for layers, place in places.items():
            points = [(layers, count) for count in arguments.count or counts]
            rows += resumed(points, partial(point, effort=effort), key=key, place=place if arguments.scale == "full" else None)
    print(table(rows, row="count", column="layers", value=lambda row: f"{row['risk']:.4f}"))
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
