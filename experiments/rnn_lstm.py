"""Why do plain LSTMs not learn attention: can they not, or are they not found?        ours; an open question of arXiv:2309.01775, section 4.3

Claim    The paper: an LSTM can be attention (appendix B.3) and trained ones are not (figure 4A). Tested here: LSTMs of one size are trained
         alike from their construction, from points nearer and farther, and from the usual start. If the first end far below the last,
         optimisation is what fails; if the first rise, training does not stay at the construction.
Differs  d = 3, 16 tokens, 1000 steps. The construction at three scales: a small one is exact and sharp, a large one blunt. Points on the way:
         normal noise on every gate weight, as a share of the root mean square of its matrix. Every start, the usual one too, gets the
         readout of least squares, for noise breaks the sums that the readout of the construction cancels.
Cost     --scale small: 5 s.  --scale full: 36 runs of 3 s.   (CPU time of one core)

    python experiments/rnn_lstm.py [--scale full]     measure and print
    python experiments/rnn_lstm.py --report           table, figure and verdict from the rows
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rnn_common import FIGURES, ROWS, resumed
from torch import Tensor

from graven.construct.attention import attention_to_lstm
from graven.fit import FitSpec, fit
from graven.layers.classic import Classic, ClassicSpec
from graven.report import figure, read_lines, table
from graven.tasks.teacher import Teacher

Row = dict[str, Any]
DIMENSION, LENGTH = 3, 16
CELLS = 4 * DIMENSION**2
AWAY = {  # scale of the construction, noise
    "at 0.05": (0.05, 0.0),
    "at 0.2": (0.2, 0.0),
    "at 0.5": (0.5, 0.0),
    "near 0.5": (0.5, 0.1),
    "far 0.5": (0.5, 0.5),
}
STARTS = [*AWAY, "usual"]
RIDGE = 1e-10  # of the readout, as a share of the mean square of the cells
CLEAR = 10.0  # times lower is a verdict


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it."""

    seeds: int
    steps: int
    rates: tuple[float, ...]
    batch: int
    sequences: int


SCALES = {
    "small": Scale(seeds=1, steps=50, rates=(1e-3,), batch=16, sequences=500),
    "full": Scale(seeds=2, steps=1000, rates=(1e-4, 1e-3, 1e-2), batch=16, sequences=2000),
}


def started(start: str, teacher: Teacher, generator: torch.Generator) -> Classic:
    """The layer before training, its readout fitted."""
    layer = Classic(ClassicSpec(width=DIMENSION, hidden=CELLS, cell="lstm"), generator)
    if start in AWAY:
        scale, noise = AWAY[start]
        scaled = teacher.w_v / teacher.power**0.5
        layer = attention_to_lstm(scaled, teacher.w_k, teacher.w_q, scale=scale).float()
        with torch.no_grad():
            for parameter in layer.cells.parameters():
                spread = parameter.square().mean().sqrt() if parameter.dim() > 1 else scale * (parameter.abs() < 1)
                parameter += noise * spread * torch.randn(parameter.shape, generator=generator)
    fit_readout_(layer, *teacher.sample(500, generator=generator))
    return layer


@torch.no_grad()
def fit_readout_(layer: Classic, x: Tensor, target: Tensor) -> None:
    """The readout of least squares, in float64."""
    cells = layer.cells(x)[0].flatten(0, 1).double()
    gram = cells.mT @ cells
    gram += RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    layer.readout.weight.copy_(torch.linalg.solve(gram, cells.mT @ target.flatten(0, 1).double()).mT)


@torch.no_grad()
def relative_loss(layer: Classic, teacher: Teacher, scale: Scale, seed: int) -> float:
    """On fresh tokens, over the power of the same targets."""
    x, target = teacher.sample(scale.sequences, generator=torch.Generator().manual_seed(seed))
    return ((layer(x)[0] - target).square().sum() / target.square().sum()).item()


def measure(point: str, scale: Scale) -> list[Row]:
    """One training."""
    start, rate, seed = point.split(", ")[0], float(point.split(", ")[1]), int(point.split(", ")[2])
    generator = torch.Generator().manual_seed(seed)
    teacher = Teacher.random(dimension=DIMENSION, generator=generator, length=LENGTH)
    layer = started(start, teacher, generator)
    before = {name: p.detach().clone() for name, p in layer.cells.named_parameters()}
    first = relative_loss(layer, teacher, scale, 1000 + seed)
    fitted = fit(layer, lambda: teacher.sample(scale.batch, generator=generator), FitSpec(steps=scale.steps, rate=rate, penalty=0.0))
    moved = {name: p.detach() - before[name] for name, p in layer.cells.named_parameters()}
    row = {
        "point": point, "start": start, "rate": rate, "seed": seed,
        "before": first, "after": relative_loss(layer, teacher, scale, 1000 + seed), "outcome": fitted.outcome.name,
        "moved": (sum(m.square().sum() for m in moved.values()) / sum(b.square().sum() for b in before.values())).sqrt().item(),
    }  # fmt: skip
    fit_readout_(layer, *teacher.sample(500, generator=generator))
    row["refitted"] = relative_loss(layer, teacher, scale, 1000 + seed)
    print(f"{point}: {first:.2e} -> {row['after']:.2e}, {row['refitted']:.2e} in {fitted.cpu_seconds:.1f} s", file=sys.stderr, flush=True)
    return [row | {"cpu_seconds": round(fitted.cpu_seconds, 2), "torch": str(torch.__version__), "scale": asdict(scale)}]


def best(rows: list[Row], start: str) -> dict[int, float]:
    """The loss of every seed at the best rate, the readout fitted once more."""
    own = [row for row in rows if row["start"] == start]
    return {seed: min(row["refitted"] for row in own if row["seed"] == seed) for seed in sorted({row["seed"] for row in own})}


def verdict(rows: list[Row]) -> list[str]:
    """Whether some start of the construction ends far below the usual one in every seed, and which starts training stays at."""
    usual, lines, holds = best(rows, STARTS[-1]), [], False
    for start in AWAY:
        ratios = [usual[seed] / loss for seed, loss in best(rows, start).items() if seed in usual]
        if not ratios:
            continue
        holds |= min(ratios) > CLEAR and len(ratios) > 1
        word = "below" if min(ratios) > CLEAR else "not clearly below"
        lines.append(f"{start}: ends {word} the usual start, {min(ratios):.3g} to {max(ratios):.3g} times, {len(ratios)} seeds")
        for rate in sorted({row["rate"] for row in rows}):
            if kept := [row["refitted"] / row["before"] for row in rows if (row["start"], row["rate"]) == (start, rate)]:
                lines.append(f"    rate {rate}: {'stays' if max(kept) < 2 else 'is left'}, loss after over before {min(kept):.3g} to {max(kept):.3g}")
    return [*lines, f"{'holds' if holds else 'open '}   at this length of training the failure of LSTMs is one of optimisation"]


def draw(rows: list[Row]) -> None:
    """Losses before and after by start, all seeds."""
    with figure(FIGURES / "rnn_lstm.png", width=7.0, height=3.4) as (axes,):
        for rate, colour in zip(sorted({row["rate"] for row in rows}), ("C0", "C1", "C3"), strict=False):
            own = [row for row in rows if row["rate"] == rate]
            axes.plot(
                [STARTS.index(row["start"]) for row in own], [row["refitted"] for row in own], "o", color=colour, ms=5, label=f"after, rate {rate}"
            )
        axes.plot([STARTS.index(row["start"]) for row in rows], [row["before"] for row in rows], "_", color="C7", ms=14, label="before training")
        axes.set(yscale="log", ylabel="loss / power of the target", title=f"An LSTM of {CELLS} cells and attention, d = {DIMENSION}")
        axes.set_xticks(range(len(STARTS)), STARTS)
        axes.legend(frameon=False)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--start", choices=STARTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    torch.set_num_threads(1)
    if arguments.report:
        rows = read_lines(ROWS / "rnn_lstm.jsonl")
        draw(rows)
    else:
        points = [f"{start}, {rate}, {seed}" for seed in range(scale.seeds) for start in arguments.start or STARTS for rate in scale.rates]
        rows = resumed("rnn_lstm", arguments.scale, points, "point", lambda point: measure(point, scale))
    cells = [row | {"column": f"{row['rate']}, seed {row['seed']}"} for row in rows]
    print(table(cells, row="start", column="column", value=lambda row: f"{row['before']:.1e} -> {row['refitted']:.1e}"))
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
