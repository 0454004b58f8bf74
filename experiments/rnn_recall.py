"""Associative recall with one-hot tokens: is what a gated RNN learns attention, for either gating?          arXiv:2309.01775, appendix D.3

Claim    With input and output gating the trained solution is not attention: a neuron for each value holds its key, and what is read is minus the
         squared difference to the query. With side gating it is attention, in fewer neurons than there are pairs of a key and a value.
Test     The state when the query is read is p + q, p from the past and q from the query token. What is read falls into memory x memory,
         memory x query and query x query. Attention is memory x query, with decays of 1. So: accuracy by that part alone, and shares of the logits.
Differs  Six pairs, and training of minutes, at half the rate of `graven.fit`. The paper looks at weights. A loss of 1e9 stands for one that diverged.
Cost     --scale small: 10 s with imports.  --scale full: 26 s.   (CPU time of one core)

    python experiments/rnn_recall.py [--scale full]      measure and print
    python experiments/rnn_recall.py --report            table, figure and verdict from the rows
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from rnn_common import FIGURES, ROWS, Batch, Runs, asked, resumed, train
from torch import Tensor
from torch.nn import functional as F

from graven.fit import FitSpec
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.report import figure, read_lines, table
from graven.tasks.recall import Recall

Row = dict[str, Any]
TASK = Recall(pairs=6)
SOLVED = 0.99  # accuracy
NAMES = {"input_output": "input and output gating", "side": "side gating"}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it."""

    input_output: tuple[int, ...]
    side: tuple[int, ...]
    seeds: int
    steps: int
    batch: int


SCALES = {
    "small": Scale(input_output=(12,), side=(12,), seeds=2, steps=800, batch=32),
    "full": Scale(input_output=(7, 12, 24), side=(8, 12, 24), seeds=4, steps=1200, batch=32),
}


def recall_batch(runs: int, *, generator: torch.Generator) -> Batch:
    """Sequences and answers, each run's own."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        tokens, target = TASK.sample(runs * size, generator=generator)
        return tokens.unflatten(0, (runs, size)), target.unflatten(0, (runs, size))

    return batch


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all leading axes."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def measure(gating: str, count: int, scale: Scale) -> list[Row]:
    """Rows of one gating and one number of neurons."""
    gates = {"output_gates": count} if gating == "input_output" else {"gating": "side"}
    runs = Runs(GatedRNNSpec(width=TASK.width, hidden=count, out_width=TASK.pairs, **gates), range(scale.seeds))
    generator = torch.Generator().manual_seed(count)
    stamp = train(
        runs,
        recall_batch(scale.seeds, generator=generator),
        FitSpec(steps=scale.steps, rate=5e-3),
        size=scale.batch,
        last=True,
        objective=cross_entropy,
    )
    where = {"point": f"{gating} {count}", "gating": gating, "count": count}
    return [where | {"seed": seed} | parts(layer) | stamp for seed, layer in enumerate(runs.layers())]


@torch.no_grad()
def parts(layer: GatedRNN) -> Row:
    """Accuracy of the whole and of each part alone, and the share of each in the logits without what all logits of a sequence have in common."""
    tokens, target = TASK.sample(4000, generator=torch.Generator().manual_seed(99))
    last = tokens[:, -1:]
    past = layer.hidden(tokens[:, :-1])[:, -1:] * layer.decay
    own = layer.hidden(last)
    joint, memory, query = (layer.read(h, last)[:, 0] for h in (past + own, past, own))
    mixed = joint - memory - query if layer.spec.gating == "input_output" else memory
    split = {"joint": joint, "memory x query": mixed, "query x query": query}
    if layer.spec.gating == "input_output":
        split["memory x memory"] = memory
    centred = {name: logits - logits.mean(1, keepdim=True) for name, logits in split.items()}
    power = centred["joint"].square().mean().clamp(min=1e-30)  # a layer that failed may read 0
    decays = layer.decay
    return {
        "loss": float(F.cross_entropy(joint, target).nan_to_num(1e9)),
        "accuracy": {name: float((logits.argmax(1) == target).float().mean()) for name, logits in centred.items()},
        "share": {name: float(((logits * centred["joint"]).mean() / power).nan_to_num()) for name, logits in centred.items() if name != "joint"},
        "at 1": int((decays == 1).sum()), "at 0": int((decays == 0).sum()), "between": int(((decays > 0) & (decays < 1)).sum()),
    }  # fmt: skip


def verdict(rows: list[Row]) -> list[str]:
    """For either gating: the fewest neurons that some seed and that every seed solves it with, and what the solutions are."""
    lines = []
    for gating, name in NAMES.items():
        here = [row for row in rows if row["gating"] == gating]
        counts = sorted({row["count"] for row in here})
        solved = {count: [row["accuracy"]["joint"] >= SOLVED for row in here if row["count"] == count] for count in counts}
        some, every = (next((c for c in counts if test(solved[c])), None) for test in (any, all))
        good = [row for row in here if row["accuracy"]["joint"] >= SOLVED]
        lines.append(f"{name}: solved by some seed from {some} neurons on, by every seed at {every}; {len(good)} solutions of {len(here)} runs")
        if good:
            alone = [row["accuracy"]["memory x query"] for row in good]
            squares = [row["share"].get("memory x memory", 0.0) for row in good]
            attention = sum(value >= SOLVED for value in alone)
            lines.append(
                f"    memory x query alone: {100 * min(alone):.0f} to {100 * max(alone):.0f} % right; share of memory x memory in the logits "
                f"{min(squares):.2f} to {max(squares):.2f}; read by attention alone: {attention} of {len(good)}"
            )
    return lines


def draw(rows: list[Row]) -> None:
    """Accuracy of the whole and of memory x query alone, against neurons."""
    with figure(FIGURES / "rnn_recall.png", width=8, height=3.2, columns=2) as panels:
        for axes, (gating, name) in zip(panels, NAMES.items(), strict=True):
            here = [row for row in rows if row["gating"] == gating]
            for part, colour, marker in (("joint", "C0", "o"), ("memory x query", "C1", "x"), ("memory x memory", "C3", "+")):
                points = [(row["count"] + 0.15 * row["seed"], row["accuracy"][part]) for row in here if part in row["accuracy"]]
                if points:
                    label = "all that is read" if part == "joint" else f"{part} alone"
                    axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, ms=5)
            axes.axhline(1 / TASK.pairs, color="black", lw=1, ls=":")
            axes.set(title=name, xlabel="hidden neurons", ylabel="accuracy", ylim=(0, 1.03))
            axes.legend(frameon=False, fontsize=7, loc="lower right")


def main() -> int:
    """Measure or report."""
    arguments, scale = asked(SCALES)
    if arguments.report:
        rows = read_lines(ROWS / "rnn_recall.jsonl")
        draw(rows)
    else:
        points = {f"{gating} {count}": (gating, count) for gating in NAMES for count in getattr(scale, gating)}
        rows = resumed("rnn_recall", arguments.scale, list(points), "point", lambda point: measure(*points[point], scale))
    for gating in NAMES:
        here = [{"seed": row["seed"], "neurons": row["count"], "row": row} for row in rows if row["gating"] == gating]
        print(f"\n{NAMES[gating]}: accuracy, of memory x query alone\n")
        print(
            table(
                here,
                row="seed",
                column="neurons",
                value=lambda c: f"{c['row']['accuracy']['joint']:.3f} ({c['row']['accuracy']['memory x query']:.2f})",
            )
        )
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
