"""The loss of trained gated RNNs against their number of neurons.                                        arXiv:2309.01775, figure 3

Claim    Training finds attention from about twice the least number of neurons on: (a) 28 where 14 suffice, a teacher of 4 dimensions; (b) 84
         where 42 do, a teacher of 12 dimensions and rank 6; (c) 24 where 12 do, in-context linear regression.
Differs  As many output gates as hidden neurons; the recipe of `graven.fit`, some hundred times shorter than the paper's training. Each seed has a
         teacher of its own. The loss is relative to the power of the targets; in (c) it is what is left above one best gradient step.
Cost     --scale full: panel (c) 96 s, (a) 133 s, (b) 163 s.   (CPU time of one core, measured on a busy machine)

    python experiments/rnn_figure3.py [--panel a]                        measure small and print
    python experiments/rnn_figure3.py --scale full [--panel a]           measure; points that have their rows are passed over
    python experiments/rnn_figure3.py --report                           table, figure and verdict from the rows
"""

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from rnn_common import FIGURES, ROWS, Runs, paired_excess, prompts_batch, relative_losses, resumed, teachers_batch, train

from graven.fit import FitSpec
from graven.layers.gated_rnn import GatedRNNSpec
from graven.report import figure, read_lines, table
from graven.tasks.regression import Regression
from graven.tasks.teacher import Teacher
from graven.theory.regression import optimal_rate

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of the figure.

    Args:
        title: Above it.
        least: Neurons that suffice.
        paper: Neurons from which the paper's training succeeds.
        counts: Neurons that are tried.
        seeds: Runs of each.
        steps: Of training.
        size: Sequences of a step.
        bar: Loss below which a run has succeeded.
    """

    title: str
    least: int
    paper: int
    counts: tuple[int, ...]
    seeds: int
    steps: int
    size: int
    bar: float


PANELS = {
    "a": Panel(title="teacher, 4 dimensions", least=14, paper=28, counts=(10, 14, 17, 20, 24, 28, 34, 44), seeds=6, steps=3000, size=16, bar=1e-3),
    "b": Panel(title="teacher, 12 dimensions, rank 6", least=42, paper=84, counts=(42, 56, 70, 84, 112), seeds=2, steps=6000, size=16, bar=1e-3),
    "c": Panel(title="in-context regression", least=12, paper=24, counts=(8, 12, 14, 17, 20, 24, 32), seeds=6, steps=4000, size=32, bar=0.02),
}


def measure(panel: str, count: int, seeds: int, steps: int) -> list[Row]:
    """Rows of one number of neurons, every seed trained beside the others."""
    stamp = {"panel": panel, "point": f"{panel} {count}", "count": count}
    rows = (regression if panel == "c" else teacher)(panel, count, seeds, FitSpec(steps=steps))
    return [stamp | {"seed": seed} | row for seed, row in enumerate(rows)]


def teacher(panel: str, count: int, seeds: int, spec: FitSpec) -> list[Row]:
    """Against teachers; the loss is a share of the power of the targets."""
    dimension, rank = {"a": (4, None), "b": (12, 6)}[panel]
    teachers = [Teacher.random(dimension=dimension, rank=rank, generator=torch.Generator().manual_seed(seed)) for seed in range(seeds)]
    runs = Runs(GatedRNNSpec(width=dimension, hidden=count, output_gates=count), range(seeds))
    batch = teachers_batch(teachers, generator=torch.Generator().manual_seed(count))
    stamp = train(runs, batch, spec, size=PANELS[panel].size)
    losses = relative_losses(runs, batch, sequences=2000)
    return [{"loss": loss, "least": sum(t.ranks[:2]), "smallest": t.ranks.smallest} | stamp for loss, t in zip(losses, teachers, strict=True)]


def regression(panel: str, count: int, seeds: int, spec: FitSpec) -> list[Row]:
    """In-context regression; the loss is what is left above the best gradient step, on the same prompts."""
    task = Regression()
    runs = Runs(GatedRNNSpec(width=task.width, hidden=count, output_gates=count, out_width=task.outputs), range(seeds))
    batch = prompts_batch(task, seeds, generator=torch.Generator().manual_seed(count))
    stamp = train(runs, batch, spec, size=PANELS[panel].size, last=True)
    rate = optimal_rate(examples=task.examples, dimension=task.dimension, kurtosis=9 / 5)
    return [{"loss": excess, "error": error} | stamp for excess, error in paired_excess(runs, task, rate, prompts=50_000, seed=10_000 + count)]


def successes(rows: list[Row], name: str) -> dict[int, list[bool]]:
    """Which seeds end below the bar, by number of neurons."""
    counts = sorted({row["count"] for row in rows})
    return {count: [row["loss"] < PANELS[name].bar for row in rows if row["count"] == count] for count in counts}


def transition(won: dict[int, list[bool]]) -> float:
    """The fewest neurons from which on at least half of the seeds succeed; infinite where there are none."""
    failing = [count for count, seeds in won.items() if sum(seeds) < len(seeds) / 2]
    return min((count for count in won if count > max(failing, default=0)), default=math.inf)


def interval(won: dict[int, list[bool]], *, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the transition: seeds are drawn anew at every number of neurons."""
    numbers = random.Random(0)
    found = sorted(transition({count: numbers.choices(seeds, k=len(seeds)) for count, seeds in won.items()}) for _ in range(draws))
    return found[draws // 40], found[-draws // 40 - 1]


def verdict(rows: list[Row]) -> list[str]:
    """The transition of every panel beside the least number and the paper's."""
    lines = []
    for name, panel in PANELS.items():
        here = [row for row in rows if row["panel"] == name]
        if here:
            won = successes(here, name)
            found, (low, high) = transition(won), interval(won)
            counts = ", ".join(f"{count}: {sum(seeds)}/{len(seeds)}" for count, seeds in won.items())
            lines.append(
                f"{'holds' if low <= panel.paper <= high else 'FAILS'}   ({name}) {panel.title}: from {found} neurons on ({low} to {high}, 95 %), "
                f"least {panel.least}, paper {panel.paper}; below {panel.bar:g}: {counts}"
            )
    return lines


def draw(rows: list[Row]) -> None:
    """Every run, and the median, against neurons over the least number."""
    shown = {name: panel for name, panel in PANELS.items() if any(row["panel"] == name for row in rows)}
    with figure(FIGURES / "rnn_figure3.png", width=1 + 3.2 * len(shown), height=3.2, columns=len(shown)) as axes_of:
        for axes, (name, panel) in zip(axes_of, shown.items(), strict=True):
            here = [row for row in rows if row["panel"] == name]
            counts = sorted({row["count"] for row in here})
            axes.plot([row["count"] for row in here], [max(row["loss"], 1e-6) for row in here], "o", ms=3, color="C0", alpha=0.6)
            middles = [statistics.median(row["loss"] for row in here if row["count"] == count) for count in counts]
            axes.plot(counts, [max(middle, 1e-6) for middle in middles], "-", color="C0", lw=1)
            axes.axvline(panel.least, color="black", lw=1, ls=":", label=f"least, {panel.least}")
            axes.axvline(panel.paper, color="C3", lw=1, ls="--", label=f"paper, {panel.paper}")
            axes.axhline(panel.bar, color="grey", lw=0.8)
            axes.set(title=f"({name}) {panel.title}", xlabel="hidden neurons", yscale="log")
            axes.legend(frameon=False, fontsize=7)
        axes_of[0].set_ylabel("relative loss; in (c) loss above a step")


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=("small", "full"), default="small")
    parser.add_argument("--panel", choices=PANELS, nargs="+", default=list(PANELS))
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.panel:
        panel, small = PANELS[name], arguments.scale == "small"
        counts = (panel.least, panel.paper) if small else panel.counts
        seeds, steps = (2, 1500) if small else (panel.seeds, panel.steps)
        points = {f"{name} {count}": count for count in counts}
        if arguments.report:
            rows += read_lines(ROWS / f"rnn_figure3_{name}.jsonl")
        else:
            rows += resumed(f"rnn_figure3_{name}", arguments.scale, list(points), "point", lambda p: measure(name, points[p], seeds, steps))  # noqa: B023
    if arguments.report:
        draw(rows)
    for name in arguments.panel:
        here = [row for row in rows if row["panel"] == name]
        print(f"\nPanel {name}\n")
        print(table(here, row="seed", column="count", value=lambda row: f"{row['loss']:.1e}"))
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
