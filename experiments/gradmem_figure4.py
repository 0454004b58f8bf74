"""More steps of a write at evaluation than in training, and what is written of keys and of values.               arXiv:2603.13875v2, figure 4

Claim    More steps than in training help; values are reconstructed better than keys; the loss of the write goes with exact match.
Differs  The shipped `records` checkpoint (trained at K = 2 to 5, whose rate halves with each step beyond) on 8, 16 and 32 pairs, and the cells
         "plain, K = ..." of gradmem_ablations.py, whose rate does not fall. Not the paper's model.
Cost     --scale small: 20 s on one CPU core.  --scale full: 2 min.   (measured)

    python experiments/gradmem_figure4.py                    measure small and print
    python experiments/gradmem_figure4.py --scale full       measure; what has its rows already is passed over
    python experiments/gradmem_figure4.py --report           table, figure and verdict from the rows
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gradmem_cell import FIGURES, HERE, Row, options, trace
from scipy.stats import spearmanr

import graven
from graven.report import figure, read_lines, table, write_lines

PAIRS, MOST, TRAINED = (8, 16, 32), 10, 5
CONTEXTS = {"small": 4, "full": 16}
SMALL_CELLS = ("plain, K = 1", "plain, K = 2", "plain, K = 3")


def measure(place: Path, seeds: list[int], contexts: int, sizes: Sequence[int] = PAIRS) -> list[Row]:
    """Rows of every size and seed that are not there yet."""
    rows: list[Row] = read_lines(place)
    model = graven.load("records")
    for pairs in sizes:
        for seed in seeds:
            if not any((row["pairs"], row["seed"]) == (pairs, seed) for row in rows):
                began = time.process_time()
                episode = model.task.sample(contexts, pairs=pairs, generator=torch.Generator().manual_seed(400 + seed))
                found = trace(model.memory, model.task, episode, most=MOST)
                about = {"memory": "gradmem", "cell": "records", "pairs": pairs, "seed": seed, "contexts": contexts, "torch": str(torch.__version__)}
                about |= {"bytes": 4 * model.memory.initial.numel(), "cpu_seconds": round(time.process_time() - began, 2)}
                rows += [about | row for row in found]
                write_lines(place, rows)
    return rows


def mean(rows: list[Row], name: str, **where: object) -> float:
    """Of a number over the rows that agree with `where`."""
    values = [row[name] for row in rows if all(row[key] == value for key, value in where.items())]
    return float(sum(values) / len(values))


def verdict(rows: list[Row]) -> list[str]:
    """What was claimed, from the rows."""
    gain = {n: mean(rows, "exact_match", pairs=n, evaluated=MOST) - mean(rows, "exact_match", pairs=n, evaluated=TRAINED) for n in PAIRS}
    better = all(mean(rows, "value_loss", pairs=n, evaluated=TRAINED) < mean(rows, "key_loss", pairs=n, evaluated=TRAINED) for n in PAIRS)
    of_value, of_key = (spearmanr([row[f"{name}_loss"] for row in rows], [row["exact_match"] for row in rows]).statistic for name in ("value", "key"))
    losses = ", ".join(f"{n} pairs: {100 * gain[n]:+.1f}" for n in PAIRS)
    return [
        f"{'holds' if min(gain.values()) >= -0.01 else 'FAILS'}   K = {MOST} for {TRAINED} loses no more than a point; points: {losses}",
        f"{'holds' if better else 'FAILS'}   values are reconstructed better than keys at K = {TRAINED}",
        f"{'holds' if of_value < -0.8 else 'FAILS'}   rank correlation of loss on values and exact match {of_value:.2f} < -0.8; keys {of_key:.2f}",
    ]


def draw(rows: list[Row], small: list[Row], path: Path) -> None:
    """Exact match and losses against steps, then one against the other."""
    steps = range(MOST + 1)
    with figure(path, width=12.0, height=3.6, columns=3) as (left, centre, right_axes):
        for pairs in PAIRS:
            left.plot(steps, [100 * mean(rows, "exact_match", pairs=pairs, evaluated=k) for k in steps], "o-", ms=3, label=f"records, {pairs} pairs")
            right_axes.plot(
                [row["value_loss"] for row in rows if row["pairs"] == pairs], [100 * row["exact_match"] for row in rows if row["pairs"] == pairs], "."
            )
        for name, style in zip(SMALL_CELLS, ("--", "-.", ":"), strict=True):
            if own := [row for row in small if row["cell"] == name]:
                most = range(max(row["evaluated"] for row in own) + 1)
                left.plot(most, [100 * mean(own, "exact_match", evaluated=k) for k in most], style, color="grey", label=f"small cell, {name[7:]}")
        left.axvspan(2, TRAINED, color="grey", alpha=0.15, lw=0)
        left.set(xlabel="write steps K", ylabel="exact match, %", title="grey band: steps of `records` in training", ylim=(0, 101))
        left.legend(frameon=False, fontsize=7)
        for name in ("key", "value", "mark"):
            centre.plot(steps, [mean(rows, f"{name}_loss", pairs=32, evaluated=k) for k in steps], "o-", ms=3, label=name)
        centre.set(xlabel="write steps K", ylabel="loss of the write, nats a token", title="32 pairs, by token")
        centre.legend(frameon=False)
        right_axes.set(xlabel="loss on value tokens, nats", ylabel="exact match, %", title="every K, seed and size")


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "gradmem_figure4.jsonl"
    if arguments.report:
        rows, ablations = read_lines(place), HERE / "rows" / "gradmem_ablations.jsonl"
        draw(rows, read_lines(ablations), FIGURES / "gradmem_figure4.png")
    elif arguments.scale == "full":
        rows = measure(place, arguments.seed, CONTEXTS["full"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder) / "rows.jsonl", arguments.seed[:1], CONTEXTS["small"])
    shown = [{"K": k, "pairs": n, "exact": mean(rows, "exact_match", pairs=n, evaluated=k)} for n in PAIRS for k in range(MOST + 1)]
    print(table(shown, row="K", column="pairs", value=lambda row: f"{100 * row['exact']:.1f}") + "\n\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
