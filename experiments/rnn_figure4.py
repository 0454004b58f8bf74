"""Figure 4: which recurrent layers learn attention, and which in-context linear regression, by their parameters.              arXiv:2309.01775

Claim    (A, teacher-student) gated RNN, diagonal or dense, below LRU In+Out, below two LRUs, below LSTM and GRU; In+Out with an MLP in place
         of its GLUs far above In+Out with them. (B, regression) LSTM and GRU go below one gradient step, the GRU lowest; of the LRUs the one
         with MLPs highest.
Differs  d = 4 and 16 tokens for A, where the paper has 6 and 32; two budgets of parameters, one for B; seconds of training (1000 steps for A, 8000
         for B); one rate for all. The paper prints no numbers beside its figure, so it is its order that is checked here.
Cost     --scale small: 7 s.  --scale full: 28 runs of 5 s and 14 of 35 s.   (CPU time of one core)

    python experiments/rnn_figure4.py [--scale full]  measure and print
    python experiments/rnn_figure4.py --report        table, figure and verdict from the rows
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from rnn_common import FIGURES, ROWS, resumed
from torch import Tensor, nn

from graven.fit import FitSpec, fit
from graven.layers.base import Chain
from graven.layers.classic import Classic, ClassicSpec
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.layers.lru import LRU, LRUSpec
from graven.report import figure, read_lines, table
from graven.tasks.regression import Regression
from graven.tasks.teacher import Teacher
from graven.theory.regression import best_loss

Row = dict[str, Any]
TASK = Regression()
DIMENSION, LENGTH = 4, 16
STEP = best_loss(examples=TASK.examples, dimension=TASK.dimension, kurtosis=9 / 5, weight_variance=TASK.weight_variance)  # 0.0945946
Make = Callable[[int, int, int, torch.Generator], nn.Module]


def gated(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return GatedRNN(GatedRNNSpec(width=width, hidden=n, output_gates=n, out_width=reads), generator)


def dense(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return GatedRNN(GatedRNNSpec(width=width, hidden=n, output_gates=n, out_width=reads, recurrence="dense"), generator)


def lru(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return Chain(LRU(LRUSpec(width=w, hidden=n, inner=n, out_width=e, phase=PHASE), generator) for w, e in ((width, n), (n, reads)))


def in_out(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return LRU(LRUSpec(width=width, hidden=n, inner=n, out_width=reads, gating="in_out", phase=PHASE), generator)


def in_out_mlp(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return LRU(LRUSpec(width=width, hidden=n, inner=n, out_width=reads, gating="in_out", unit="mlp", phase=PHASE), generator)


def lstm(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return Classic(ClassicSpec(width=width, hidden=n, cell="lstm", out_width=reads), generator)


def gru(width: int, n: int, reads: int, generator: torch.Generator) -> nn.Module:
    return Classic(ClassicSpec(width=width, hidden=n, cell="gru", out_width=reads), generator)


PHASE = 0.3  # radians; slow turns, as for long memories
LAYERS: dict[str, Make] = {
    "gated RNN": gated,
    "gated RNN, dense": dense,
    "LRU In+Out": in_out,
    "two LRUs": lru,
    "LRU In+Out, MLP": in_out_mlp,
    "LSTM": lstm,
    "GRU": gru,
}
ORDER_A = ["gated RNN", "LRU In+Out", "two LRUs", "LSTM"]  # as the paper has it, best first
TASKS = {"teacher": "teacher-student", "regression": "in-context regression"}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it."""

    seeds: int
    steps: dict[str, int]  # of each task
    budgets: tuple[int, ...]
    rate: float = 5e-3
    sequences: int = 2000


SCALES = {
    "small": Scale(seeds=1, steps={"teacher": 30, "regression": 30}, budgets=(1500,), sequences=500),
    "full": Scale(seeds=2, steps={"teacher": 1000, "regression": 8000}, budgets=(1500, 6000)),  # after 1000 steps regression has hardly begun
}


def cells_of(scale: Scale) -> list[tuple[str, int]]:
    """Tasks and budgets; regression, which takes long, at the largest budget only."""
    return [("teacher", budget) for budget in scale.budgets] + [("regression", max(scale.budgets))]


def sized(make: Make, width: int, reads: int, budget: int, seed: int) -> nn.Module:
    """The largest of its kind within a budget of parameters."""

    def layer(n: int) -> nn.Module:
        return make(width, n, reads, torch.Generator().manual_seed(seed))

    n = 2
    while sum(p.numel() for p in layer(n + 1).parameters()) <= budget:
        n += 1
    return layer(n)


def measure(point: str, scale: Scale) -> list[Row]:
    """One training."""
    task, name, budget, seed = (part.strip() for part in point.split("; "))
    generator = torch.Generator().manual_seed(int(seed))
    if task == "teacher":
        teacher = Teacher.random(dimension=DIMENSION, generator=generator, length=LENGTH)
        layer, size = sized(LAYERS[name], DIMENSION, DIMENSION, int(budget), int(seed)), 16

        def batch(_: Regression, count: int) -> tuple[Tensor, Tensor]:
            return teacher.sample(count, generator=generator)
    else:
        layer, size = sized(LAYERS[name], TASK.width, TASK.outputs, int(budget), int(seed)), 32

        def batch(world: Regression, count: int) -> tuple[Tensor, Tensor]:
            drawn = world.sample(count, generator=generator)
            return drawn.tokens, drawn.target

    def read(x: Tensor) -> Tensor:
        return layer(x)[0] if task == "teacher" else layer(x)[0][:, -1]

    spec = FitSpec(steps=scale.steps[task], rate=scale.rate)
    fitted = fit(layer, lambda: batch(TASK, size), spec, read=read)
    with torch.no_grad():
        errors = [(y - read(x)).square().mean().item() / power(y, task) for x, y in (batch(w, scale.sequences) for w in (TASK, TASK.doubled()))]
    row = {"point": point, "task": task, "layer": name, "budget": int(budget), "seed": int(seed), "outcome": fitted.outcome.name}
    row |= {"parameters": sum(p.numel() for p in layer.parameters()), "loss": errors[0], "other_loss": errors[1]}
    print(f"{point}: {errors[0]:.3e} in {fitted.cpu_seconds:.1f} s", file=sys.stderr, flush=True)
    return [row | {"cpu_seconds": round(fitted.cpu_seconds, 2), "torch": str(torch.__version__), "scale": asdict(scale)}]


def power(target: Tensor, task: str) -> float:
    """What an error is divided by: the power of the target for the teacher; 2, for half of the error is the paper's loss, for regression."""
    return target.square().mean().item() if task == "teacher" else 2.0


def losses(rows: list[Row], task: str, layer: str) -> list[float]:
    """Of every seed at the largest budget that all layers were trained at."""
    done = [{row["budget"] for row in rows if (row["task"], row["layer"]) == (task, name)} for name in LAYERS]
    shared = set.intersection(*done)
    return [row["loss"] for row in rows if shared and (row["task"], row["layer"], row["budget"]) == (task, layer, max(shared))]


def verdict(rows: list[Row]) -> list[str]:
    """The paper's order, pair by pair: it holds where every seed of the one lies below every seed of the other, and is open with one seed."""
    pairs = [("teacher", a, b) for a, b in pairwise(ORDER_A)]
    pairs += [("teacher", "LRU In+Out", "LRU In+Out, MLP"), ("teacher", "two LRUs", "GRU"), ("regression", "GRU", "LSTM")]
    pairs += [("regression", "LSTM", "gated RNN"), ("regression", "LRU In+Out", "LRU In+Out, MLP")]
    lines = []
    for task, low, high in pairs:
        one, other = losses(rows, task, low), losses(rows, task, high)
        if not one or not other:
            continue
        word = "holds" if max(one) < min(other) else "FAILS" if min(one) > max(other) else "open "
        word = word if min(len(one), len(other)) > 1 else "open "
        lines.append(f"{word}   {task}: {low} ({min(one):.2g} to {max(one):.2g}) below {high} ({min(other):.2g} to {max(other):.2g})")
    for layer in ("LSTM", "GRU"):
        found = losses(rows, "regression", layer)
        if not found:
            continue
        word = "open " if len(found) < 2 or min(found) < STEP < max(found) else "holds" if max(found) < STEP else "FAILS"
        lines.append(f"{word}   regression: {layer} ({min(found):.4f} to {max(found):.4f}) below one gradient step ({STEP:.4f})")
    return lines


def draw(rows: list[Row]) -> None:
    """Loss over parameters, one panel a task."""
    with figure(FIGURES / "rnn_figure4.png", width=10, height=3.6, columns=2) as panels:
        for axes, task in zip(panels, TASKS, strict=True):
            for colour, layer in enumerate(LAYERS):
                own = [row for row in rows if (row["task"], row["layer"]) == (task, layer)]
                axes.plot([r["parameters"] for r in own], [r["loss"] for r in own], "o", ms=4, color=f"C{colour}")
                budgets = sorted({row["budget"] for row in own})
                if not own:
                    continue
                middle = [sorted(r["loss"] for r in own if r["budget"] == b)[sum(r["budget"] == b for r in own) // 2] for b in budgets]
                places = [next(r["parameters"] for r in own if r["budget"] == b) for b in budgets]
                axes.plot(places, middle, "o-", ms=4, color=f"C{colour}", label=layer)
            axes.set(
                xscale="log",
                yscale="log",
                xlim=(1e3, 1e4),
                xlabel="parameters",
                title="teacher-student" if task == "teacher" else "in-context regression",
            )
        panels[0].set_ylabel("loss / power of the target")
        panels[1].set_ylabel("half of the mean squared error")
        panels[1].axhline(STEP, color="C7", ls="--", label="one gradient step")
        panels[1].legend(frameon=False, fontsize=7, bbox_to_anchor=(1.02, 1))


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    torch.set_num_threads(1)
    if arguments.report:
        rows = read_lines(ROWS / "rnn_figure4.jsonl")
        draw(rows)
    else:
        grid = [(seed, task, budget, name) for seed in range(scale.seeds) for task, budget in cells_of(scale) for name in LAYERS]
        points = [f"{task}; {name}; {budget}; {seed}" for seed, task, budget, name in grid]
        rows = resumed("rnn_figure4", arguments.scale, points, "point", lambda point: measure(point, scale))
    cells = [row | {"column": f"{row['task']}, {row['budget']}, seed {row['seed']}"} for row in rows]
    print(table(cells, row="layer", column="column", value=lambda row: f"{row['loss']:.2e}"))
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
