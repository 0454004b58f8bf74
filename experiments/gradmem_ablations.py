"""What limits a write: its rule, its objective, the order of the pairs, depth, cheaper meta-gradients.          arXiv:2603.13875v2, table 1

Claim    One good step is worth several plain ones (*Gating is Weighting*, arXiv:2504.04308: preconditioning and weighting are what one step can
         gain); nothing cheaper than the exact meta-gradient learns to write, at equal CPU time.
Differs  The cell of gradmem_cell.py, not the paper's model. FLOPs are those of matrix products, counted; attention scores are left out.
Cost     --scale small: 1 min on one CPU core.  --scale full: 6 min a seed on a crowded one, resumable.   (measured)

    python experiments/gradmem_ablations.py                    train briefly and print
    python experiments/gradmem_ablations.py --scale full --seed 0   train; what has its rows already is passed over
    python experiments/gradmem_ablations.py --report           table, figure and verdict from the rows
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
from gradmem_cell import FIGURES, HERE, PLAIN, Cell, Row, exact, options, run, spread

from graven.memory.gradient import GradMemSpec
from graven.memory.rules import SGD, GaussNewton, LowRank, Momentum, Rule
from graven.report import figure, read_lines

PLAIN_STEPS = (1, 2, 3)


def spec(steps: int, rule: Rule = PLAIN.rule, **settings: object) -> GradMemSpec:
    """The memory of the cell with another write."""
    return dataclasses.replace(PLAIN, steps=steps, rule=rule, **settings)


CELLS = {
    **{f"plain, K = {k}": Cell(memory=spec(k)) for k in PLAIN_STEPS},
    "rate a coordinate": Cell(memory=spec(1, SGD(learn="coordinate"))),
    "low rank": Cell(memory=spec(1, LowRank(rank=8))),
    "token weights": Cell(memory=spec(1, weigh=True)),
    "Gauss-Newton": Cell(memory=spec(1, GaussNewton(damping=1.0, iterations=1, learn=True))),
    "momentum, K = 2": Cell(memory=spec(2, Momentum(learn=True))),
    "values only": Cell(objective="values"),
    "sorted by key": Cell(order="sorted"),
    "one layer": Cell(layers=1),
    "three layers": Cell(layers=3),
    "last step only, K = 2": Cell(memory=spec(2, last=1)),
    "first order, K = 2": Cell(memory=spec(2, order="first")),
    "reptile, K = 2": Cell(memory=spec(2, order="none"), meta="reptile"),
    "implicit, K = 2": Cell(memory=spec(2, order="none"), meta="implicit"),
}
CHEAPER = [name for name in CELLS if name.split(",")[0] in ("last step only", "first order", "reptile", "implicit")]
RULES = [name for name, cell in CELLS.items() if (cell.objective, cell.order, cell.layers) == ("all", "drawn", 2) and name not in CHEAPER]
BASE = {"values only": "plain, K = 1", "sorted by key": "plain, K = 1", "one layer": "plain, K = 1", "three layers": "plain, K = 1"}


def trained(name: str) -> int:
    """Steps of a write of the cell in training."""
    return CELLS[name].memory.steps


def flops(rows: list[Row], name: str) -> float:
    """Of writing one context as in training."""
    return next(row["write_flops"] for row in rows if (row["cell"], row["evaluated"]) == (name, trained(name)))


def worth(rows: list[Row], name: str) -> float:
    """Plain steps that give as many right answers, between those that were trained along a straight line; beyond them the nearest."""
    exact_of, steps = zip(*sorted((mean(exact(rows, f"plain, K = {k}", k)), float(k)) for k in PLAIN_STEPS), strict=True)
    return float(np.interp(mean(exact(rows, name, trained(name))), exact_of, steps))


def complete(rows: list[Row]) -> list[Row]:
    """Those of the seeds that every cell has: what is compared shares its seeds."""
    seeds = set.intersection(*({row["seed"] for row in rows if row["cell"] == name} for name in CELLS))
    return [row for row in rows if row["seed"] in seeds]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(rows: list[Row]) -> str:
    """One line a cell."""
    unit = flops(rows, "plain, K = 1")
    lines = [
        "| run | seeds | exact match, % | FLOPs of a write, plain steps | worth, plain steps | training steps | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CELLS:
        own = [row for row in rows if row["cell"] == name and row["evaluated"] == 0]
        steps, seconds = (mean([row["trained"][key] for row in own]) for key in ("steps", "cpu_seconds"))
        values, cost = spread(exact(rows, name, trained(name))), flops(rows, name) / unit
        lines.append(f"| {name} | {len(own)} | {values} | {cost:.2f} | {worth(rows, name):.1f} | {steps:.0f} | {seconds:.1f} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> list[str]:
    """What was claimed, from the rows."""
    unit = flops(rows, "plain, K = 1")
    good = [name for name in RULES if not name.startswith("plain") and worth(rows, name) > flops(rows, name) / unit + 0.25]
    seeds = len({row["seed"] for row in rows})
    best = max(mean(exact(rows, name, trained(name))) for name in CHEAPER)
    own = mean(exact(rows, "plain, K = 2", 2))
    return [
        f"{'holds' if good else 'FAILS'}   writes that are worth more than their FLOPs in plain steps, {seeds} seeds: {', '.join(good) or 'none'}",
        f"{'holds' if best < own - 0.05 else 'FAILS'}   no cheaper meta-gradient comes within 5 points of the exact one at equal CPU time: "
        f"{100 * best:.1f} and {100 * own:.1f} %",
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Exact match against the FLOPs of a write, and the rest beside what each is compared with."""
    unit = flops(rows, "plain, K = 1")
    with figure(path, width=10.5, height=4.0, columns=2) as (left, right_axes):
        curve = [(flops(rows, name) / unit, exact(rows, name, trained(name))) for name in RULES if name.startswith("plain")]
        left.plot([cost for cost, _ in curve], [100 * mean(values) for _, values in curve], "o-", color="black", label="plain, 1 to 3 steps")
        for name in RULES:
            if not name.startswith("plain"):
                values = [100 * value for value in exact(rows, name, trained(name))]
                left.errorbar(
                    flops(rows, name) / unit, mean(values), [[mean(values) - min(values)], [max(values) - mean(values)]], fmt="s", ms=5, label=name
                )
        left.set(xlabel="FLOPs of a write, in plain steps", ylabel="exact match, %", title="What one step can gain")
        left.legend(frameon=False, fontsize=7)
        names = ["plain, K = 1", *BASE, "plain, K = 2", *CHEAPER]
        for at, name in enumerate(reversed(names)):
            values = [100 * value for value in exact(rows, name, trained(name))]
            right_axes.barh(at, mean(values), color="0.6" if name.startswith("plain") else "#3b6ea5")
            right_axes.plot(values, [at] * len(values), "k.", ms=4)
        right_axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
        right_axes.set(xlabel="exact match, %", xlim=(0, 100), title="Against plain steps; below, at the CPU seconds of K = 2")


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "gradmem_ablations.jsonl"
    if arguments.report:
        rows = complete(read_lines(place))
        draw(rows, FIGURES / "gradmem_ablations.png")
    else:
        with tempfile.TemporaryDirectory() as folder:
            target = place if arguments.scale == "full" else Path(folder) / "rows.jsonl"
            rows = run(CELLS, target, seeds=arguments.seed, scale=arguments.scale, seconds_of=dict.fromkeys(CHEAPER, "plain, K = 2"))
    if all(exact(rows, name, 0) for name in CELLS):
        print(report(rows) + "\n\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
