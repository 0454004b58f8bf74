"""Attention needs decays of exactly 1. What is left of it where training may not reach them?               ours, on arXiv:2309.01775, section 4

Claim    None in the paper. Exponential parametrisations never reach 1, and LRU and Mamba start below 0.999; so decays are held at <= 0.999 and
         0.99 in training, on sequences of 32 tokens, and the trained layer is compared with its teacher.
Test     Relative loss, and of the layer's polynomial: the distance to the teacher's, and the share of its energy that some attention explains. Beside
         it the loss of the teacher where every sum decays at the ceiling: sum_s ceiling^(t - s) v_s k_s^T in place of the sum, at the best scale.
Differs  The recipe of `graven.fit`; each seed has a teacher of its own.
Cost     --scale small: 12 s with imports.  --scale full: 25 s.   (CPU time of one core)

    python experiments/rnn_lambda.py [--scale full]      measure and print
    python experiments/rnn_lambda.py --report            table, figure and verdict from the rows
"""

import itertools
import sys
from dataclasses import dataclass
from statistics import geometric_mean, mean
from typing import Any

import numpy as np
import torch
from rnn_common import FIGURES, ROWS, Runs, asked, relative_losses, resumed, teachers_batch, train
from torch import Tensor

from graven.audit.kernel import Attention, best_kernel, kernel_forms
from graven.audit.polynomial import distance, polynomial
from graven.fit import FitSpec
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.report import figure, read_lines, table
from graven.tasks.teacher import Teacher

Row = dict[str, Any]
CEILINGS = (1.0, 0.999, 0.99)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of it."""

    dimension: int
    hidden: int
    seeds: int
    steps: int
    ceilings: tuple[float, ...]


SCALES = {
    "small": Scale(dimension=2, hidden=16, seeds=2, steps=800, ceilings=(1.0, 0.99)),
    "full": Scale(dimension=3, hidden=24, seeds=4, steps=1600, ceilings=CEILINGS),
}


def measure(ceiling: float, scale: Scale) -> list[Row]:
    """Rows of one ceiling."""
    teachers = [Teacher.random(dimension=scale.dimension, generator=torch.Generator().manual_seed(seed)) for seed in range(scale.seeds)]
    runs = Runs(GatedRNNSpec(width=scale.dimension, hidden=scale.hidden, output_gates=scale.hidden), range(scale.seeds), ceiling=ceiling)
    runs.project_()
    batch = teachers_batch(teachers, generator=torch.Generator().manual_seed(7))
    stamp = train(runs, batch, FitSpec(steps=scale.steps), size=16)
    losses = relative_losses(runs, batch, sequences=2000)
    return [
        {"ceiling": ceiling, "seed": seed, "loss": loss, "decayed": decayed_loss(teacher, ceiling), **against(layer, teacher, ceiling)} | stamp
        for seed, (loss, layer, teacher) in enumerate(zip(losses, runs.layers(), teachers, strict=True))
    ]


def decayed_loss(teacher: Teacher, ceiling: float) -> float:
    """Relative loss of the teacher with every sum decaying, at the best scale."""
    x = torch.randn(4000, teacher.length, teacher.w_v.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y, decayed = teacher.read(x), decayed_reads(teacher, x, ceiling)
    scale = (y * decayed).sum() / decayed.square().sum()
    return float((y - scale * decayed).square().sum() / y.square().sum())


def decayed_reads(teacher: Teacher, x: Tensor, ceiling: float) -> Tensor:
    """What the teacher would read from decaying sums."""
    t = torch.arange(teacher.length, dtype=torch.float64)
    decay = (ceiling ** (t[:, None] - t).clamp(min=0)).tril()
    return ((x @ teacher.key_query @ x.mT).mT * decay) @ (x @ teacher.w_v.T) / teacher.power**0.5


def against(layer: GatedRNN, teacher: Teacher, ceiling: float) -> Row:
    """Distance of polynomials to the teacher; energy that attention explains; and decays at, near and below the ceiling."""
    found = polynomial(layer, length=teacher.length)
    wanted = polynomial(kernel_forms(Attention.of(teacher).kernel), length=teacher.length)
    decays = layer.decay.detach()
    return {
        "distance": distance(found, wanted),
        "energy": best_kernel(found, width=layer.spec.width).energy,
        "at ceiling": int((decays >= ceiling - 1e-7).sum()),
        "at 0": int((decays == 0).sum()),
        "between": int(((decays > 0) & (decays < ceiling - 1e-7)).sum()),
    }


def constant_error(ceiling: float, count: int, *, length: int = 32) -> float:
    """What so many decays at most the ceiling, mixed by the best weights, leave of a sum without decay: share of power, all pairs of tokens alike.

    Several accumulators for one sum can undo the decay: 2 c^k - (2 c - 1)^k is 1 up to (k (1 - c))^2. The least over a grid of decays.
    """
    lags = np.arange(length)
    pairs = (length - lags) ** 0.5
    tried = itertools.combinations([ceiling - (1 - ceiling) * below for below in (0, 0.5, 1, 2, 4)], count)
    errors = []
    for decays in tried:
        powers = np.stack([decay**lags for decay in decays], 1) * pairs[:, None]
        left = powers @ np.linalg.lstsq(powers, pairs, rcond=None)[0] - pairs
        errors.append(float(left @ left / (pairs @ pairs)))
    return min(errors)


def verdict(rows: list[Row]) -> list[str]:
    """One line a ceiling, means over seeds."""
    lines = []
    for ceiling in sorted({row["ceiling"] for row in rows}, reverse=True):
        here = [row for row in rows if row["ceiling"] == ceiling]
        loss, decayed = geometric_mean([row["loss"] for row in here]), mean(row["decayed"] for row in here)
        lines.append(
            f"decays <= {ceiling}: relative loss {loss:.1e} (sums that all decay: {decayed:.1e}), polynomial distance "
            f"{geometric_mean([row['distance'] for row in here]):.3f}, energy of attention {min(row['energy'] for row in here):.4f} at least, "
            f"{mean(row['at ceiling'] for row in here):.1f} decays at the ceiling, {mean(row['between'] for row in here):.1f} between"
        )
        if ceiling < 1:
            able = ", ".join(f"{count}: {constant_error(ceiling, count):.0e}" for count in (1, 2, 3))
            lines.append(f"    what accumulators for one sum can undo, error left by their number: {able}")
    return lines


def draw(rows: list[Row]) -> None:
    """Losses and distances against the ceiling."""
    places = {ceiling: place for place, ceiling in enumerate(CEILINGS)}
    with figure(FIGURES / "rnn_lambda.png", width=8, height=3.2, columns=2) as (left, right):
        for row in rows:
            place = places[row["ceiling"]] + 0.06 * row["seed"]
            left.plot(place, row["loss"], "o", color="C0", label="trained" if row is rows[0] else None)
            left.plot(place, max(row["decayed"], 1e-12), "_", color="C3", label="all sums decay" if row is rows[0] else None)
            right.plot(place, row["distance"], "o", color="C0")
        left.set(yscale="log", ylim=(1e-6, 1), title="relative loss", xlabel="decays at most")
        right.set(yscale="log", title="polynomial distance to the teacher", xlabel="decays at most")
        left.legend(frameon=False)
        for axes in (left, right):
            axes.set_xticks(list(places.values()), [str(ceiling) for ceiling in places])


def main() -> int:
    """Measure or report."""
    arguments, scale = asked(SCALES)
    if arguments.report:
        rows = read_lines(ROWS / "rnn_lambda.jsonl")
        draw(rows)
    else:
        rows = resumed("rnn_lambda", arguments.scale, scale.ceilings, "ceiling", lambda ceiling: measure(ceiling, scale))
    print(table(rows, row="seed", column="ceiling", value=lambda row: f"{row['loss']:.1e} ({row['distance']:.3f})"))
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
