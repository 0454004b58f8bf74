"""Exact match of the shipped `records` checkpoint against write steps and pairs.             arXiv:2603.13875v2, table 1 and figure 4

Claim    Eight vectors answer every key of 16 pairs after at most five gradient steps, and steps beyond training help or do no harm.
Differs  Two layers instead of four, and a convolution on the token embeddings: these numbers do not compare with the paper's line by line.
Cost     --scale small: 2 min on one CPU core.  --scale full: 11 min; --pairs and --seed split it over processes.   (measured)

    python experiments/records_exact_match.py                               measure small and print
    python experiments/records_exact_match.py --scale full [--pairs 16]     measure; what has its rows already is passed over
    python experiments/records_exact_match.py --report                      table, figure and verdict from the rows
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

import graven
from graven.measure import exact_match
from graven.report import figure, read_lines, table, write_lines

HERE = Path(__file__).parent
PAIRS, STEPS, SEEDS = (4, 8, 16, 24, 32), range(11), (101, 102, 103)
CONTEXTS = {"small": 50, "full": 300}
TRAINED = 5  # write steps of the checkpoint's spec

Row = dict[str, float]


def measure(pairs: int, seed: int, contexts: int) -> list[Row]:
    """Rows of one size of context and one seed, every number of steps."""
    model = graven.load("records")
    began = time.process_time()
    rows = list(exact_match(model.memory, model.task, pairs=pairs, steps=STEPS, contexts=contexts, seed=seed))
    seconds = round((time.process_time() - began) / len(rows), 1)
    return [{"memory": "gradmem", **dataclasses.asdict(row), "bytes": 4 * model.memory.initial.numel(), "cpu_seconds": seconds} for row in rows]


def pooled(rows: list[Row]) -> dict[tuple[int, int], float]:
    """Mean over seeds for each number of pairs and steps."""
    sizes = sorted({(row["pairs"], row["steps"]) for row in rows})
    by_size = {size: [row["exact_match"] for row in rows if (row["pairs"], row["steps"]) == size] for size in sizes}
    return {size: sum(values) / len(values) for size, values in by_size.items()}


def verdict(rows: list[Row]) -> list[str]:
    """Each gate, and whether every seed passes it."""

    def worst(pairs: int) -> float:
        return min(row["exact_match"] for row in rows if row["pairs"] == pairs and row["steps"] == TRAINED)

    means = pooled(rows)
    loss = max(means[n, TRAINED] - means[n, k] for n in PAIRS for k in STEPS if k >= TRAINED)
    gates = [
        (f"16 pairs, K = {TRAINED}, worst seed {worst(16):.4f} >= 0.99", worst(16) >= 0.99),
        (f"32 pairs, K = {TRAINED}, worst seed {worst(32):.4f} >= 0.95", worst(32) >= 0.95),
        (f"K from {TRAINED} to 10, largest loss {100 * loss:.2f} <= 1 point", loss <= 0.01),
    ]
    return [f"{'holds' if good else 'FAILS'}   {text}" for text, good in gates]


def draw(rows: list[Row], path: Path) -> None:
    """One curve a size of context."""
    means = pooled(rows)
    with figure(path, width=6.5, height=3.6) as (axes,):
        for pairs in PAIRS:
            axes.plot(STEPS, [100 * means[pairs, k] for k in STEPS], "o-", ms=3, label=f"{pairs} pairs")
        axes.axvspan(2, TRAINED, color="grey", alpha=0.15, lw=0, label="steps in training")
        axes.set(xlabel="write steps K", ylabel="exact match, %", ylim=(0, 101), xticks=STEPS, title="One checkpoint, eight vectors, 4096 bytes")
        axes.legend(frameon=False, loc="lower right")


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=CONTEXTS, default="small")
    parser.add_argument("--pairs", type=int, choices=PAIRS, nargs="+", default=PAIRS)
    parser.add_argument("--seed", type=int, choices=SEEDS, nargs="+", default=SEEDS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cells = [(pairs, seed) for pairs in arguments.pairs for seed in arguments.seed]
    places = {(pairs, seed): HERE / "rows" / f"records_exact_match_{pairs}_{seed}.jsonl" for pairs, seed in cells}
    if arguments.report:
        rows = [row for cell in cells for row in read_lines(places[cell])]
        draw(rows, HERE.parent / "docs" / "figures" / "records_exact_match.png")
    elif arguments.scale == "small":
        rows = [row for pairs, seed in cells for row in measure(pairs, seed, CONTEXTS["small"])]
    else:
        for cell in cells:
            if not places[cell].exists():
                write_lines(places[cell], measure(*cell, CONTEXTS["full"]))
        return 0
    means = pooled(rows)
    shown = [{"K": k, "pairs": pairs, "exact": value} for (pairs, k), value in means.items()]
    print(table(shown, row="K", column="pairs", value=lambda row: f"{100 * row['exact']:.1f}"))
    if {(n, k) for n in PAIRS for k in STEPS} <= set(means):
        print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
