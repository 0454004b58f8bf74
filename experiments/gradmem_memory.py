"""Exact match against the number of memory vectors and of write steps.                                arXiv:2603.13875v2, appendix F

Claim    More vectors help, more steps help, and steps can stand in for vectors.
Differs  The cell of gradmem_cell.py: four pairs of one letter of sixteen, width 32, one training length for all. The appendix is not in our copy,
         so there are no numbers of the paper to compare with.
Cost     --scale full: 12 cells of 11 to 37 CPU seconds and three seeds, 13 CPU minutes, resumable.

    python experiments/gradmem_memory.py                    train briefly and print
    python experiments/gradmem_memory.py --scale full       train; what has its rows already is passed over
    python experiments/gradmem_memory.py --report           table, figure and verdict from the rows
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

from gradmem_bench import blind
from gradmem_cell import FIGURES, HERE, PAIRS, PLAIN, Cell, Row, exact, options, run, spread

from graven.report import figure, read_lines

SLOTS, STEPS = (1, 2, 4, 8), (1, 2, 3)
CELLS = {f"{slots} vectors, K = {k}": Cell(memory=dataclasses.replace(PLAIN, slots=slots, steps=k)) for slots in SLOTS for k in STEPS}


def whole(rows: list[Row]) -> tuple[list[Row], str]:
    """Rows of the seeds that have every cell, and a sentence on what the others lack."""
    lacking = {
        seed: [name for name in CELLS if not exact([row for row in rows if row["seed"] == seed], name, 0)] for seed in {row["seed"] for row in rows}
    }
    kept = [row for row in rows if not lacking[row["seed"]]]
    left_out = "; ".join(f"seed {seed} is left out, it lacks {', '.join(names)}" for seed, names in sorted(lacking.items()) if names)
    return kept, left_out or ("" if rows else "there are no rows yet: run with --scale full")


def mean(rows: list[Row], slots: int, steps: int) -> float:
    """Over seeds, at the steps of training."""
    values = exact(rows, f"{slots} vectors, K = {steps}", steps)
    return sum(values) / len(values)


def report(rows: list[Row]) -> str:
    """Mean, lowest and highest of the seeds, per cent."""
    lines = ["| vectors | bytes | " + " | ".join(f"K = {k}" for k in STEPS) + " |", "|---|---|" + "---|" * len(STEPS)]
    for slots in SLOTS:
        cells = " | ".join(spread(exact(rows, f"{slots} vectors, K = {k}", k)) for k in STEPS)
        lines.append(f"| {slots} | {128 * slots} | {cells} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> list[str]:
    """What was claimed, from the rows; five points are about the spread of seeds."""
    by_slots = min(mean(rows, 4, k) - mean(rows, 1, k) for k in STEPS)
    by_steps = min(mean(rows, slots, 3) - mean(rows, slots, 1) for slots in SLOTS)
    stands_in = mean(rows, 1, 3) - mean(rows, 4, 1)
    return [
        f"{'holds' if by_slots > 0.05 else 'FAILS'}   four vectors for one gain at least 5 points at every K: {100 * by_slots:+.1f}",
        f"{'holds' if by_steps > 0.05 else 'FAILS'}   three steps for one gain at least 5 points at every number of vectors: {100 * by_steps:+.1f}",
        f"{'holds' if stands_in > -0.05 else 'FAILS'}   one vector, three steps within 5 points of four vectors, one step: {100 * stands_in:+.1f}",
    ]


def draw(rows: list[Row], path: Path) -> None:
    """One curve a number of steps, every seed a dot; dotted: the best answer that ignores the key."""
    with figure(path, width=5.5, height=3.6) as (axes,):
        axes.axhline(100 * blind(PAIRS), color="0.6", lw=1, ls=":")
        for number, k in enumerate(STEPS):
            axes.plot(SLOTS, [100 * mean(rows, slots, k) for slots in SLOTS], "-", color=f"C{number}", label=f"K = {k}")
            for slots in SLOTS:
                values = exact(rows, f"{slots} vectors, K = {k}", k)
                axes.plot([slots] * len(values), [100 * value for value in values], ".", ms=6, color=f"C{number}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SLOTS, [str(slots) for slots in SLOTS])
        axes.set(xlabel="memory vectors of width 32", ylabel="exact match, %", ylim=(0, 101), title="Four pairs, one training length")
        axes.legend(frameon=False)


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "gradmem_memory.jsonl"
    if arguments.report:
        rows = read_lines(place)
    else:
        with tempfile.TemporaryDirectory() as folder:
            target = place if arguments.scale == "full" else Path(folder) / "rows.jsonl"
            rows = run(CELLS, target, seeds=arguments.seed, scale=arguments.scale)
    rows, left_out = whole(rows)
    if left_out:
        print(f"{left_out}.\n")
    if rows:
        print(report(rows) + "\n\n" + "\n".join(verdict(rows)))
        if arguments.report:
            draw(rows, FIGURES / "gradmem_memory.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
