"""How far eight vectors go: pairs held at 99 % against write steps, and bits of values in the state against bits in the pairs.

Claim    The `records` checkpoint holds the more pairs the more steps are taken. Beyond the 32 pairs of its training exact match falls, while
         the bits of values that are read back still grow: whole values are lost, not the memory.
Differs  Ours, not of the paper. A value is two characters of 62, 11.9 bits. What a state says of the values of its context is measured by the head
         of the write: log2 62 less the cross entropy of each value token, a lower bound on the bits that are there. Values are drawn, so what stands
         before one says nothing about it. The state is 8 x 128 float32, 32 768 bits; training went up to 32 pairs.
Cost     --scale small: 1 min on one CPU core.  --scale full: 4 min; --seed splits it.   (measured)

    python experiments/gradmem_capacity.py                    measure small and print
    python experiments/gradmem_capacity.py --scale full       measure; what has its rows already is passed over
    python experiments/gradmem_capacity.py --report           table, figure and verdict from the rows
"""

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
from gradmem_cell import FIGURES, HERE, Row, options
from gradmem_figure4 import MOST, mean, measure

from graven.report import figure, read_lines, table

PAIRS, STEPS, HELD = (8, 16, 24, 32, 40, 48, 64), (1, 2, 3, 5, 7, 10), 0.99
CONTEXTS = {"small": 2, "full": 8}
VALUE_BITS, STATE_BITS, TRAINED_PAIRS = 2 * math.log2(62), 8 * 128 * 32, 32


def held(rows: list[Row], steps: int) -> float:
    """Pairs at which exact match falls below 99 %, on straight lines between the sizes; the largest if it never does, 0 if it always is."""
    exact = [mean(rows, "exact_match", pairs=n, evaluated=steps) for n in PAIRS]
    below = next((i for i, value in enumerate(exact) if value < HELD), None)
    if below is None:
        return float(PAIRS[-1])
    return 0.0 if below == 0 else float(np.interp(-HELD, [-exact[below - 1], -exact[below]], [PAIRS[below - 1], PAIRS[below]]))


def bits(rows: list[Row], pairs: int, steps: int) -> float:
    """Of values, in the state."""
    return pairs * max(0.0, VALUE_BITS - 2 * mean(rows, "value_loss", pairs=pairs, evaluated=steps) / math.log(2))


def verdict(rows: list[Row]) -> list[str]:
    """What was claimed, from the rows."""
    by_steps = [held(rows, k) for k in STEPS]
    most = max((bits(rows, n, MOST), n) for n in PAIRS)
    inside, outside = bits(rows, TRAINED_PAIRS, MOST), bits(rows, PAIRS[-1], MOST)
    return [
        f"{'holds' if by_steps == sorted(by_steps) else 'FAILS'}   pairs held at 99 % grow with the steps: "
        + ", ".join(f"K = {k}: {value:.0f}" for k, value in zip(STEPS, by_steps, strict=True)),
        f"{'holds' if outside > inside else 'FAILS'}   bits read back of {PAIRS[-1]} pairs, twice those of training: {outside:.0f} for {inside:.0f}",
        f"most bits of values read back: {most[0]:.0f} of {most[1]} pairs, {100 * most[0] / STATE_BITS:.1f} % of the bits of the state",
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Exact match, pairs held, bits."""
    with figure(path, width=12.0, height=3.6, columns=3) as (left, centre, right_axes):
        for k in STEPS:
            left.plot(PAIRS, [100 * mean(rows, "exact_match", pairs=n, evaluated=k) for n in PAIRS], "o-", ms=3, label=f"K = {k}")
            right_axes.plot(PAIRS, [bits(rows, n, k) for n in PAIRS], "o-", ms=3, label=f"K = {k}")
        for axes in (left, right_axes):
            axes.axvline(TRAINED_PAIRS, color="grey", lw=0.8)
            axes.set(xlabel="pairs")
            axes.legend(frameon=False, fontsize=7)
        left.set(ylabel="exact match, %", ylim=(0, 101), title="grey line: the most pairs of training")
        centre.plot(range(1, MOST + 1), [held(rows, k) for k in range(1, MOST + 1)], "o-", color="black")
        centre.set(xlabel="write steps K", ylabel="pairs held at 99 %", ylim=(0, None))
        right_axes.plot(PAIRS, [n * VALUE_BITS for n in PAIRS], color="black", lw=0.8, label="in the pairs")
        right_axes.set(ylabel="bits of values", title="black: in the pairs; the state has 32 768")


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "gradmem_capacity.jsonl"
    if arguments.report:
        rows = read_lines(place)
        draw(rows, FIGURES / "gradmem_capacity.png")
    elif arguments.scale == "full":
        rows = measure(place, arguments.seed, CONTEXTS["full"], PAIRS)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder) / "rows.jsonl", arguments.seed[:1], CONTEXTS["small"], PAIRS)
    shown = [{"K": k, "pairs": n, "exact": mean(rows, "exact_match", pairs=n, evaluated=k)} for n in PAIRS for k in STEPS]
    print(table(shown, row="K", column="pairs", value=lambda row: f"{100 * row['exact']:.1f}") + "\n\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
