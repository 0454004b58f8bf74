"""Beyond the figures of arXiv:2504.04308: other covariances, four tasks, MLPs between layers, and the weights of a trained layer.        ours

Claims   covariance  With variances from 1 to 0.01 one layer trains to the corrected optima: equal weights, weights that never fall, any weights.
         tasks       So it does with four tasks, their correlations rising or mixed. Without delimiters gates do no better than no gates.
         mlp         An MLP between two layers adds to what they can do (section 7 of the paper leaves it open).
         weights     Read off its gates, values and head, the weights of a layer that was trained on four tasks are the optimal ones.
Effort   As figure 1, with fewer restarts: SCALES says how many. The gates are those of figure 1: 3 % without gates, 5 % with them.
Cost     --scale small: 112 s.  --scale full: 14 min of one CPU core; --part splits it over processes.

    python experiments/gla_beyond.py --scale full [--part tasks]      measure; points that have their rows are passed over
    python experiments/gla_beyond.py --report                         table, figure and verdict from the rows
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gla_training import FIGURES, ROWS, Effort, Learner, Row, Runs, drawn_prompts, least_risk, resumed, trained

from graven.report import figure, read_lines, table
from graven.theory.wpgd import optimum, scalar_gate_optimum

DIMENSION, SEED = 10, 0
NO_GATE = "linear attention"
ONE_LAYER = {
    NO_GATE: Learner(gate="none", delimiters=False),
    "scalar": Learner(gate="scalar"),
    "vector": Learner(gate="value"),
}
WITHOUT = {
    "scalar without delimiters": Learner(gate="scalar", delimiters=False),
    "vector without delimiters": Learner(gate="value", delimiters=False),
}
TWO_LAYERS = {
    "two layers": Learner(gate="scalar", layers=2),
    "two layers, MLP between": Learner(gate="scalar", layers=2, hidden=64),
}
NEAR = 0.15  # of the largest weight, how far a trained one may be off
COLOURS = {NO_GATE: "C0", "scalar": "C3", "vector": "C9", "scalar without delimiters": "C2", "vector without delimiters": "C1"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the questions: its learners on its prompts."""

    learners: dict[str, Learner]
    examples: tuple[int, ...]
    correlations: tuple[tuple[float, ...], ...]
    least_variance: float = 1.0


PARTS = {
    "covariance": Part(learners=ONE_LAYER, examples=(10, 10), correlations=((0.2, 0.8), (0.8, 0.2)), least_variance=0.01),
    "tasks": Part(learners=ONE_LAYER | WITHOUT, examples=(8,) * 4, correlations=((0.1, 0.3, 0.5, 0.7), (0.7, 0.1, 0.5, 0.3))),
    "mlp": Part(learners=TWO_LAYERS, examples=(5, 5), correlations=((0.0, 1.0), (0.2, 0.8))),
}
SCALES = {
    "small": Effort(restarts=2, steps=300, test=10_000),
    "full": Effort(restarts=5, steps=1500, test=40_000),
}


def point(part: str, name: str, correlations: tuple[float, ...], effort: Effort) -> Row:
    """One row: all restarts of one learner on one kind of prompts, and the weights of the best."""
    question = PARTS[part]
    learner = question.learners[name]
    covariance = torch.logspace(0, np.log10(question.least_variance), DIMENSION, dtype=torch.float64).diag()
    task = learner.task(dimension=DIMENSION, examples=question.examples, correlations=correlations, covariance=covariance)
    runs, found = trained(learner, task, effort, seed=SEED)
    row = {"part": part, "learner": name, "correlations": list(correlations), "optimum": None, "weights": None, **found}
    if isinstance(runs, Runs):
        weights = runs.weights(row["best"], drawn_prompts(task, 2000, generator=torch.Generator().manual_seed(SEED)))
        weights = weights / weights.mean(0)[weights.mean(0).abs().argmax()]
        row |= {"weights": weights.mean(0).tolist(), "spread": weights.std(0).tolist()}
        if name in ONE_LAYER:
            row["optimum"] = least_risk(learner, task)
    return row


def key(row: Row) -> tuple[str, str, tuple[float, ...]]:
    """What a row is of."""
    return row["part"], row["learner"], tuple(row["correlations"])


def measure(scale: str, parts: list[str]) -> list[Row]:
    """Rows of a scale; those of the full one are kept, one file for each part."""
    rows = []
    for part in parts:
        points = [(part, name, r) for r in PARTS[part].correlations for name in PARTS[part].learners]
        place = ROWS / f"gla_beyond_{part}.jsonl" if scale == "full" else None
        rows += resumed(points, partial(point, effort=SCALES[scale]), key=key, place=place)
    return rows


def verdict(rows: list[Row]) -> list[str]:
    """Each point with a closed form against its gate; no delimiters against no gates; an MLP against none; weights against the optimal ones."""
    lines, flat = [], {key(row): row for row in rows}
    for (part, name, correlations), row in flat.items():
        where, bar = f"{part}, {name}, {correlations}", 2 * row["error"]
        if row["optimum"] is not None:
            above, allowed = row["risk"] / row["optimum"] - 1, 0.03 if name == NO_GATE else 0.05
            lines.append(f"{word(above <= allowed)}   {where}: {100 * above:+.1f} % of {row['optimum']:.4f}, {100 * allowed:.0f} allowed")
        elif name in WITHOUT and (plain := flat.get((part, NO_GATE, correlations))):
            no_better = row["risk"] > plain["risk"] - bar - 2 * plain["error"]
            lines.append(f"{word(no_better)}   {where}: {row['risk']:.4f}, no better than {NO_GATE}'s {plain['risk']:.4f}")
        elif name == "two layers, MLP between" and (plain := flat.get((part, "two layers", correlations))):
            better = row["risk"] < plain["risk"] - bar - 2 * plain["error"]
            lines.append(f"{word(better)}   {where}: {row['risk']:.4f}, below {plain['risk']:.4f} without")
        if part == "tasks" and name in ONE_LAYER and name != NO_GATE:
            off = np.abs(np.array(row["weights"]) - best_weights(row)).max()
            lines.append(
                f"{word(off <= NEAR)}   weights, {name}, {correlations}: off the optimal ones by at most {off:.2f} of the largest, {NEAR} allowed"
            )
    return lines


def word(good: bool) -> str:
    """How a verdict begins."""
    return "holds" if good else "FAILS"


def best_weights(row: Row) -> np.ndarray:
    """The optimal ones of the learner's kind, the largest 1."""
    question = PARTS[row["part"]]
    if row["learner"] == NO_GATE:
        return np.ones(sum(question.examples))
    if row["learner"] == "scalar":
        found = scalar_gate_optimum(examples=question.examples, correlations=row["correlations"], dimension=DIMENSION, noise_variance=0.0)
        return found.weights
    task = question.learners["vector"].task(dimension=DIMENSION, examples=question.examples, correlations=row["correlations"])
    among, with_query = task.example_correlations
    return optimum(covariance=np.eye(DIMENSION), task_correlation=among, query_correlation=with_query, noise_variance=0.0).weights


def draw(rows: list[Row], path: Path) -> None:
    """Effective weights of four tasks, mean and spread over prompts, over the optimal ones: one panel for each order of the tasks."""
    orders = PARTS["tasks"].correlations
    with figure(path, width=9, height=3.4, columns=len(orders)) as panels:
        for axes, correlations in zip(panels, orders, strict=True):
            for row in (row for row in rows if key(row)[0::2] == ("tasks", correlations)):
                name, places = row["learner"], np.arange(1, len(row["weights"]) + 1)
                if name in ONE_LAYER:
                    axes.plot(places, best_weights(row), "--", lw=1.2, color=COLOURS[name])
                axes.errorbar(places, row["weights"], yerr=row["spread"], fmt="o", ms=2.5, lw=0.6, color=COLOURS[name], label=name)
            axes.set(title=f"r = {correlations}", xlabel="example", ylim=(0, 1.25))
        panels[0].set_ylabel("weight, the largest 1")
        panels[0].legend(frameon=False, fontsize=7)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.report:
        rows = [row for part in PARTS for row in read_lines(ROWS / f"gla_beyond_{part}.jsonl")]
        draw(rows, FIGURES / "gla_beyond.png")
    else:
        rows = measure(arguments.scale, arguments.part)
    cells = [{"learner": f"{row['part']}: {row['learner']}", "correlations": str(row["correlations"]), "risk": row["risk"]} for row in rows]
    print(table(cells, row="learner", column="correlations", value=lambda row: f"{row['risk']:.4f}"))
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
