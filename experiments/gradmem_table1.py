"""Exact match of every memory by pairs and by bytes, at equal compute.                                       arXiv:2603.13875v2, table 1

Claim    At the same bytes a memory that is written by gradient steps through which training sees holds more pairs than one written by forward
         passes; repeated forward writes add little; without the second derivative hardly anything is learned. The KV cache is the upper bound.
Differs  --scale small, medium and large are the model of gradmem_bench.py: two layers, width 32, one-letter keys and values, and a convolution on
         the embeddings; four vectors; four, eight or sixteen pairs, after a curriculum of fewer. Compute is the CPU time of 160, 400 or 800
         training steps of GradMem K = 2 for every memory (`steps` and `cpu_seconds` are in each row); ARMT and LaCT have a second row with four
         times as much, RMT with eight times, for with once they stand at a guess at four pairs. --scale paper is the paper's model, task and
         grid, without a convolution; every memory takes the same number of training steps there.
Cost     --scale small: 13 to 21 CPU seconds a memory and seed, 60 to 72 with four times the compute, 130 with eight times.
         --scale medium: 50 to 70 s, 240 and 400 with more compute.  --scale large: 140 to 260 s, 1400 to 1600 with eight times.
         --scale paper: see `--estimate`, which takes about five CPU minutes.

    python experiments/gradmem_table1.py [--scale medium --seed 0 --memory RMT --minutes 15]        measure what has no row yet
    python experiments/gradmem_table1.py --scale paper --memory RMT --pairs 8 --seed 0 --train-steps 200     go on with one cell for so many steps
    python experiments/gradmem_table1.py --scale paper --estimate         CPU hours of each cell of the paper's grid, from one micro-batch a size
    python experiments/gradmem_table1.py --report                         tables, figure and verdict from the rows
"""

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gradmem_bench import FIGURES, MEMORIES, ROWS, SCALES, Row, blind, gradmem, resumed
from gradmem_cell import spread

from graven.cost import cost_of
from graven.layers.decoder import DecoderSpec
from graven.layers.mamba import MambaSpec
from graven.measure import exact_match
from graven.memory.associative import ARMTSpec
from graven.memory.cache import CacheSpec
from graven.memory.forward import RMTSpec
from graven.memory.kinds import MemorySpec, takes_steps
from graven.memory.recurrent import RecurrentSpec
from graven.memory.rules import SGD
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.retrieval import Retrieval
from graven.train import Optimizer, Stage, TrainSpec, load_trained, train

SEEDS = (0, 1, 2)
PLACES = {scale: ROWS / f"gradmem_table1_{scale}.jsonl" for scale in (*SCALES, "paper")}
RUNS = Path("runs") / "gradmem_table1"
ESTIMATES = ROWS / "gradmem_table1_estimate.jsonl"
GRID = (4, 8, 16, 32, 64, 96)
PAPER_BATCH, MICRO = 64, 8
# per cent by pairs; the paper's table 1, means of three runs
PAPER = {
    "KV cache": (100, 100, 99.8, 99.8, 96.5, 98.8), "Mamba": (99.9, 98.9, 98.7, 90.2, 95.2, 92.2), "ARMT": (99.0, 98.5, 97.4, 54.9, 22.6, 15.2),
    "RMT": (100, 100, 45.5, 44.3, 19.3, 12.9), "GradMem K=1": (100, 99.7, 96.3, 86.9, 58.6, 32.6), "GradMem K=2": (100, 100, 99.6, 98.3, 72.8, 34.2),
    "GradMem K=5": (100, 100, 100, 99.9, 99.1, 88.4),
}  # fmt: skip
FAMILIES = (("written by gradients", ("GradMem", "prefix", "first order")), ("written by a forward pass", ("RMT", "ARMT", "KV")), ("recurrent", ()))
# rates of the authors' code, by pairs
ALPHA = {4: 0.04, 8: 0.04, 16: 0.04, 32: 0.12, 64: 0.08, 96: 0.08}


def large(name: str, pairs: int) -> MemorySpec:
    """A memory of the paper's table."""
    if name.startswith("GradMem"):
        return dataclasses.replace(gradmem(int(name[-1]), slots=8, rule=SGD(rate=ALPHA[pairs])), start=1.0)
    return {
        "KV cache": CacheSpec(), "RMT": RMTSpec(slots=8), "ARMT": ARMTSpec(slots=8, features=32, segment=7),
        "Mamba": RecurrentSpec(mixer=MambaSpec(width=128, inner=256, memory=16, step_rank=8)),
    }[name]  # fmt: skip


def paper_spec(name: str, pairs: int, seed: int, *, steps: int, micro_batch: int = MICRO) -> TrainSpec:
    """The paper's model and training, with its curriculum from the smallest number of pairs on."""
    memory, task = large(name, pairs), Retrieval()
    heads = {"heads": 1, "key_value_heads": 1, "hidden": 256} if name == "Mamba" else {"heads": 4, "key_value_heads": 4, "hidden": 344}
    taken = (memory.steps,) if takes_steps(memory) else ()  # type: ignore[union-attr]  # those that take steps have the field
    ladder = [size for size in GRID if size <= pairs]
    stages = tuple(
        Stage(pairs=(size,), steps=taken, at_most=steps if size == pairs else steps // 4, until=0.98 if size < pairs else 2.0) for size in ladder
    )
    return TrainSpec(
        seed=seed, task=task, model=DecoderSpec(vocabulary=task.vocabulary, width=128, layers=4, **heads), memory=memory,
        optimizer=Optimizer(rate=1e-4, batch=PAPER_BATCH, micro_batch=micro_batch, warm_up=10_000), stage=stages, checkpoint_every=50,
    )  # fmt: skip


def paper_cell(name: str, pairs: int, seed: int, *, steps: int, stop_after: int, micro_batch: int) -> list[Row]:
    """Go on with one cell; its row once its training is over."""
    folder = RUNS / f"{name.replace(' ', '_')}_{pairs}_{seed}"
    spec = paper_spec(name, pairs, seed, steps=steps, micro_batch=micro_batch)
    if not (folder / "model.json").exists() and train(spec, folder, resume=folder.exists(), stop_after=stop_after) is None:
        return []
    trained = load_trained(folder, name=name)
    taken = [trained.spec.memory.steps] if takes_steps(trained.spec.memory) else None  # type: ignore[union-attr]  # as above
    (row,) = exact_match(trained.memory, spec.task, pairs=pairs, steps=taken, contexts=200, seed=77)
    cost = cost_of(trained.memory, spec.task.sample(1, pairs=pairs, generator=torch.Generator().manual_seed(0)), steps=taken[0] if taken else None)
    about = trained.about["trained"]
    return [{
        "memory": name, "pairs": pairs, "seed": seed, "exact_match": row.exact_match, "standard_error": row.standard_error, "bytes": cost.bytes,
        "write_flops": cost.write.total, "read_flops": cost.read.total, "steps": about["steps"], "cpu_seconds": about["cpu_seconds"],
        "spec": trained.about["spec"], "torch": about["torch"],
    }]  # fmt: skip


def seconds_of(name: str, pairs: int) -> float:
    """CPU seconds of a training step of the paper's batch: of a second micro-batch, times the micro-batches of a batch."""
    spec = paper_spec(name, pairs, 0, steps=8)
    few = dataclasses.replace(spec.optimizer, batch=spec.optimizer.micro_batch)
    curve: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        train(dataclasses.replace(spec, stage=spec.stage[-1:], optimizer=few), Path(folder) / "run", stop_after=2, report=curve.append)
    return (curve[1]["cpu_seconds"] - curve[0]["cpu_seconds"]) * spec.optimizer.batch / few.batch


def through_three(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """The parabola through the last three points, at another place.

    >>> through_three((4, 1, 2, 3), (0.0, 1.0, 4.0, 9.0), 5)
    25.0
    """
    x, y = sizes[-3:], values[-3:]
    return sum(y[i] * math.prod((size - x[j]) / (x[i] - x[j]) for j in range(3) if j != i) for i in range(3))


def estimates(place: Path, *, steps: int, most: float) -> list[Row]:
    """CPU hours of each cell of the paper's grid at most, every stage of its curriculum at its own cost.

    Args:
        place: File of the rows; those that are there are passed over.
        steps: Of the last stage.
        most: CPU seconds that a micro-batch may be expected to take; where it would be more, the cost is extrapolated in the number of pairs.
    """
    rows = read_lines(place)
    for name in PAPER:
        own = [row for row in rows if row["memory"] == name]
        for pairs in GRID[len(own) :]:
            sizes, costs, began = [row["pairs"] for row in own], [row["seconds_a_step"] for row in own], time.process_time()
            expected = through_three(sizes, costs, pairs) if len(own) >= 3 else 0.0
            measured = expected <= most * PAPER_BATCH / MICRO
            costs.append(round(seconds_of(name, pairs) if measured else expected, 3))
            taken = {stage.pairs[0]: stage.at_most for stage in paper_spec(name, pairs, 0, steps=steps).stage}
            hours = sum(taken[size] * cost for size, cost in zip(taken, costs, strict=True)) / 3600
            spent = round(time.process_time() - began, 1)
            own.append({
                "memory": name, "pairs": pairs, "seconds_a_step": costs[-1], "measured": measured, "steps": taken, "hours": round(hours, 1),
                "cpu_seconds": spent, "torch": str(torch.__version__),
            })  # fmt: skip
            rows.append(own[-1])
            write_lines(place, rows)
            print(own[-1], flush=True)
    return rows


def means(rows: list[Row]) -> dict[tuple[str, int], list[float]]:
    """Exact match of every seed, by memory and pairs."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["memory"], row["pairs"]), []).append(row["exact_match"])
    return found


ABOVE = (  # better, worse, by at least so much
    ("GradMem K=2", "GradMem K=1", 0.0), ("GradMem K=1", "RMT", 0.1), ("GradMem K=2", "RMT, 8 times the compute", 0.1),
    ("GradMem K=1", "first order K=1", 0.3), ("GradMem K=2", "first order K=2", 0.3),
)  # fmt: skip


def verdict(rows: list[Row]) -> list[str]:
    """The claims, for each number of pairs, on means over seeds."""
    found = {key: sum(values) / len(values) for key, values in means(rows).items()}
    gates = []
    for pairs in sorted({pairs for _, pairs in found}):
        at = {memory: 100 * value for (memory, size), value in found.items() if size == pairs}
        for better, worse, least in ABOVE:
            if better in at and worse in at:
                text = f"{pairs} pairs: {better} over {worse} by {100 * least:.0f} points: {at[better]:.1f} against {at[worse]:.1f}"
                gates.append((at[better] - at[worse] > 100 * least, text))
        for compute in ("", ", 8 times the compute"):
            one, two = f"RMT{compute}", f"RMT, 2 writes{compute}"
            if one in at and two in at:
                gain = at[two] - at[one]
                gates.append((gain < 10, f"{pairs} pairs{compute}: a second forward write adds less than 10 points: {gain:+.1f}"))
        if "KV cache" in at:
            best, name = max((value, memory) for memory, value in at.items() if memory != "KV cache")
            gates.append((at["KV cache"] >= best, f"{pairs} pairs: nothing is above the KV cache, {at['KV cache']:.1f}: {name}, {best:.1f}"))
    return [f"{'holds' if good else 'FAILS'}   {text}" for good, text in gates]


def family(name: str) -> int:
    """Which of `FAMILIES` a memory belongs to."""
    return next((number for number, (_, starts) in enumerate(FAMILIES) if name.startswith(starts)), len(FAMILIES) - 1)


def draw(rows: list[Row], path: Path) -> None:
    """One line a memory, the best on top: every seed a dot, their mean a bar; dotted: the best answer that ignores the key."""
    sizes = sorted({row["pairs"] for row in rows})
    with figure(path, width=6.4 * len(sizes), height=5.0, columns=len(sizes)) as panels:
        for axes, pairs in zip(panels, sizes, strict=True):
            found = {name: [row for row in rows if (row["memory"], row["pairs"]) == (name, pairs)] for name, size in means(rows) if size == pairs}
            names = sorted(found, key=lambda name: sum(row["exact_match"] for row in found[name]) / len(found[name]))
            axes.axvline(100 * blind(pairs), color="0.6", lw=1, ls=":")
            for place, name in enumerate(names):
                values = [100 * row["exact_match"] for row in found[name]]
                axes.plot(values, [place] * len(values), ".", ms=6, color=f"C{family(name)}")
                axes.plot([sum(values) / len(values)], [place], "|", ms=13, mew=2.5, color=f"C{family(name)}")
            axes.set_yticks(range(len(names)), [f"{name}, {found[name][0]['bytes']} bytes" for name in names], fontsize=8)
            axes.set(title=f"{pairs} pairs", xlabel="exact match, %", xlim=(0, 103))
        for number, (label, _) in enumerate(FAMILIES):
            panels[0].plot([], [], "o", color=f"C{number}", label=label)
        panels[0].legend(frameon=False, fontsize=8, loc="lower right")


def report(rows: list[Row], title: str) -> str:
    """A line for each memory, the best first, for each number of pairs."""
    lines = []
    for pairs in sorted({row["pairs"] for row in rows}):
        lines += [f"{title}, {pairs} pairs", "", "| memory | bytes | exact match, % (worst and best seed) | seeds | steps | CPU s | write, MFLOP |"]
        lines.append("|---|---|---|---|---|---|---|")
        of = {name: values for (name, size), values in means(rows).items() if size == pairs}
        for name in sorted(of, key=lambda name: -sum(of[name]) / len(of[name])):
            own = [row for row in rows if (row["memory"], row["pairs"]) == (name, pairs)]
            seconds = sum(row["cpu_seconds"] for row in own) / len(own)
            facts = f"{len(own)} | {own[0]['steps']} | {seconds:.0f} | {own[0]['write_flops'] / 1e6:.1f}"
            value = spread(of[name]) if len(own) > 1 else f"{100 * own[0]['exact_match']:.1f}"
            lines.append(f"| {name} | {own[0]['bytes']} | {value} | {facts} |")
        lines.append(f"\nA memory that knows the values and ignores the key is right in {100 * blind(pairs):.1f} %.\n" if title in SCALES else "")
    return "\n".join(lines)


def together(rows: list[Row]) -> str:
    """A line for each memory with all numbers of pairs side by side; the best at eight pairs first."""
    found, sizes = means(rows), sorted({row["pairs"] for row in rows})
    size_of = {row["memory"]: row["bytes"] for row in sorted(rows, key=lambda row: -row["pairs"])}  # of the fewest pairs

    def cell(name: str, pairs: int) -> str:
        values = [100 * value for value in found.get((name, pairs), [])]
        if len(values) < 2:
            return f"{values[0]:.1f}" if values else ""
        few = "" if len(values) == len(SEEDS) else f", {len(values)} seeds"
        return f"{sum(values) / len(values):.1f} ({min(values):.0f} to {max(values):.0f}){few}"

    def rank(name: str) -> float:
        values = found.get((name, 8), [0.0])
        return -sum(values) / len(values)

    lines = ["| memory | bytes | " + " | ".join(f"{pairs} pairs" for pairs in sizes) + " |", "|---" * (2 + len(sizes)) + "|"]
    lines += [f"| {name} | {size_of[name]} | " + " | ".join(cell(name, pairs) for pairs in sizes) + " |" for name in sorted(size_of, key=rank)]
    return "\n".join([*lines, "| what ignores the key | | " + " | ".join(f"{100 * blind(pairs):.1f}" for pairs in sizes) + " |"])


def paper(arguments: argparse.Namespace) -> None:
    """Go on with cells of the paper's grid."""
    rows = read_lines(PLACES["paper"])
    settings = {"steps": arguments.most, "stop_after": arguments.train_steps, "micro_batch": arguments.micro_batch}
    for name, pairs, seed in product(arguments.memory or PAPER, arguments.pairs, arguments.seed):
        if not any((row["memory"], row["pairs"], row["seed"]) == (name, pairs, seed) for row in rows):
            rows += paper_cell(name, pairs, seed, **settings)
            write_lines(PLACES["paper"], rows)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=PLACES, default="small")
    parser.add_argument("--seed", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--memory", nargs="+")
    parser.add_argument("--pairs", type=int, nargs="+", choices=GRID, default=GRID)
    parser.add_argument("--train-steps", type=int, default=10**6, help="training steps of this call, for each cell of the paper's grid")
    parser.add_argument("--most", type=int, default=100_000, help="training steps of a cell of the paper's grid, its curriculum apart")
    parser.add_argument("--micro-batch", type=int, default=MICRO, help="contexts at once, of a batch of 64; 32 is faster at four pairs, 8 from 16 on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="CPU minutes after which no run is begun")
    parser.add_argument("--seconds", type=float, default=20.0, help="of --estimate: CPU seconds of a micro-batch above which it is extrapolated")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.estimate:
        cells = estimates(ESTIMATES, steps=arguments.most, most=arguments.seconds)
        print(table(cells, row="memory", column="pairs", value=lambda cell: f"{'' if cell['measured'] else '~'}{cell['hours']:.0f}"))
        return 0
    if arguments.scale == "paper" and not arguments.report:
        paper(arguments)
        return 0
    if not arguments.report:
        chosen = {name: MEMORIES[name] for name in arguments.memory or MEMORIES}
        place = PLACES[arguments.scale]
        found = {arguments.scale: resumed(chosen, place, seeds=arguments.seed, scale=arguments.scale, minutes=arguments.minutes)}
    else:
        found = {scale: read_lines(place) for scale, place in PLACES.items() if place.exists()}
        bench = [row for scale in SCALES for row in found.get(scale, [])]
        draw(bench, FIGURES / "gradmem_table1.png")
        print(f"exact match, % (worst and best seed)\n{together(bench)}\n")
    for scale, rows in found.items():
        print(report(rows, scale))
        print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
