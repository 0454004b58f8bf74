"""Every memory with the same bytes of state, at three sizes and at equal compute.                         arXiv:2603.13875v2, appendix G and H

Claim    At equal bytes and equal training compute GradMem answers more keys than any memory that is written without a gradient of its own.
Differs  The paper's appendices are not in our hands; the design is ours, on the model of gradmem_bench.py. A state counts whole: windows of
         convolutions, normalisers and unfinished chunks too. TTT-Linear was not seen to train below 5.5 kB, LaCT not below 17 kB (both were
         tried); LaCT, and the KV cache, which has no size of its own, are left to table 1. ARMT has 2 features at 1 kB: there each token has one
         feature that is not 0. A state of 6 kB is the natural size of the recurrent memories at this width; in less there is no room for the
         windows of their own convolutions, so there they stand behind that of the embeddings, which trains more slowly.
Cost     --scale small: 7 CPU minutes a seed, 13 to 22 s a run; resumable by --minutes.

    python experiments/gradmem_state_matched.py [--scale medium --seed 0 --minutes 15]       measure what has no row yet
    python experiments/gradmem_state_matched.py --report                                     table, figure and verdict from the rows
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from gradmem_bench import FAST, FIGURES, MEMORIES, ONE, OWN, ROWS, SCALES, WIDTH, Entry, Row, armt, blind, gradmem, prefix, recurrent, resumed, rmt
from gradmem_cell import spread

from graven.layers.delta_net import DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttentionSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.report import figure, read_lines, table

PLACES = {scale: ROWS / f"gradmem_state_matched_{scale}.jsonl" for scale in SCALES}
SLACK = 1.2  # largest over smallest state at one size: whole heads and slots fit no closer
WRITTEN_BY_GRADIENTS = ("GradMem", "prefix")


SMALL = {"tied": True, "embedding_std": 0.3}  # recurrent layers without convolutions of their own, behind that of the embeddings
ENTRIES = {
    "GradMem K=2, 1 kB": Entry(spec=gradmem(2, slots=8)),
    "RMT, 1 kB": rmt(slots=8),
    "ARMT, 1 kB": armt(features=2, order=1),
    "prefix K=2, 1 kB": Entry(spec=prefix(2, slots=2)),
    "DeltaNet, 1 kB": recurrent(DeltaNetSpec(width=WIDTH, heads=4, key_width=6, value_width=4, convolution=1), model=SMALL, rate=FAST),
    "GLA, 1 kB": recurrent(GatedLinearAttentionSpec(width=WIDTH, heads=4, key_value_heads=4, key_width=6, value_width=4), model=SMALL, rate=FAST),
    "Mamba, 1 kB": recurrent(MambaSpec(width=WIDTH, inner=32, memory=2, step_rank=2, convolution=2), model=SMALL | ONE | {"hidden": 32}, rate=FAST),
    "Mamba-2, 1 kB": recurrent(
        Mamba2Spec(width=WIDTH, inner=32, heads=4, memory=3, convolution=1), model=SMALL | {"key_value_heads": 1, "hidden": 32}, rate=FAST
    ),
    "GradMem K=2, 2.5 kB": Entry(spec=gradmem(2, slots=20)),
    "RMT, 2.5 kB": rmt(slots=20),
    "ARMT, 2.5 kB": armt(features=5, order=1),
    "prefix K=2, 2.5 kB": Entry(spec=prefix(2, slots=5)),
    "DeltaNet, 2.5 kB": recurrent(DeltaNetSpec(width=WIDTH, heads=4, key_width=9, value_width=8, convolution=1), model=SMALL, rate=FAST),
    "GLA, 2.5 kB": recurrent(GatedLinearAttentionSpec(width=WIDTH, heads=4, key_value_heads=4, key_width=9, value_width=8), model=SMALL, rate=FAST),
    "Mamba, 2.5 kB": recurrent(MambaSpec(width=WIDTH, inner=32, memory=8, step_rank=2, convolution=2), model=SMALL | ONE | {"hidden": 32}, rate=FAST),
    "Mamba-2, 2.5 kB": recurrent(
        Mamba2Spec(width=WIDTH, inner=32, heads=4, memory=9, convolution=1), model=SMALL | {"key_value_heads": 1, "hidden": 32}, rate=FAST
    ),
    "GradMem K=2, 6 kB": Entry(spec=gradmem(2, slots=48)),
    "RMT, 6 kB": rmt(slots=48),
    "ARMT, 6 kB": armt(features=12, order=1),
    "prefix K=2, 6 kB": Entry(spec=prefix(2, slots=12)),
    "DeltaNet, 6 kB": MEMORIES["DeltaNet"],
    "GLA, 6 kB": MEMORIES["GLA"],
    "Mamba, 6 kB": recurrent(MambaSpec(width=WIDTH, inner=64, memory=9, step_rank=2), model=OWN | ONE, rate=FAST),
    "Mamba-2, 6 kB": recurrent(Mamba2Spec(width=WIDTH, inner=64, heads=4, memory=8), model=OWN | {"key_value_heads": 1}, rate=FAST),
    "TTT-Linear, 6 kB": MEMORIES["TTT-Linear"],
}


def groups(rows: list[Row]) -> dict[tuple[int, str, str], list[Row]]:
    """Rows of every seed, by pairs, size and memory."""
    found: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        name, size = row["memory"].rsplit(", ", 1)
        found.setdefault((row["pairs"], size, name), []).append(row)
    return found


def mean(rows: list[Row]) -> float:
    return 100 * sum(row["exact_match"] for row in rows) / len(rows)


def verdict(rows: list[Row]) -> list[str]:
    """The claim at each number of pairs and each size; and whether the sizes are equal."""
    found, lines = groups(rows), []
    for pairs, size in sorted({key[:2] for key in found}):
        at = {name: own for (n, s, name), own in found.items() if (n, s) == (pairs, size)}
        sizes = [own[0]["bytes"] for own in at.values()]
        equal = max(sizes) <= SLACK * min(sizes)
        lines.append(f"{'holds' if equal else 'FAILS'}   {pairs} pairs, {size}: states of {min(sizes)} to {max(sizes)} bytes")
        others = {name: mean(own) for name, own in at.items() if not name.startswith(WRITTEN_BY_GRADIENTS)}
        if "GradMem K=2" in at and others:
            best, ours = max(others, key=lambda name: others[name]), mean(at["GradMem K=2"])
            lines.append(
                f"{'holds' if ours > others[best] else 'FAILS'}   {pairs} pairs, {size}: GradMem {ours:.1f}, best other {best} {others[best]:.1f}"
            )
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Exact match against bytes, one curve a memory, every seed a small dot; dotted: the best answer that ignores the key."""
    found, sizes = groups(rows), sorted({row["pairs"] for row in rows})
    with figure(path, width=6.2 * len(sizes), height=4.2, columns=len(sizes)) as panels:
        for axes, pairs in zip(panels, sizes, strict=True):
            axes.axhline(100 * blind(pairs), color="0.6", lw=1, ls=":")
            for number, name in enumerate(dict.fromkeys(name for _, _, name in found)):
                curve = sorted((own[0]["bytes"], mean(own)) for (n, _, other), own in found.items() if (n, other) == (pairs, name))
                axes.plot(*zip(*curve, strict=True), "os^Dv<>PX*"[number % 10] + "-", ms=5, color=f"C{number % 10}", label=name)
                seeds = [row for (n, _, other), own in found.items() if (n, other) == (pairs, name) for row in own]
                axes.plot([row["bytes"] for row in seeds], [100 * row["exact_match"] for row in seeds], ".", ms=3, color=f"C{number % 10}")
            axes.set(title=f"{pairs} pairs, equal training compute", xlabel="bytes of state", ylabel="exact match, %", xscale="log", ylim=(0, 103))
            axes.set_xticks([1024, 2560, 6144], ["1 kB", "2.5 kB", "6 kB"])
            axes.minorticks_off()
        panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=PLACES, default="small")
    parser.add_argument("--seed", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--memory", nargs="+", help="names as in the rows; all where left out")
    parser.add_argument("--minutes", type=float, default=math.inf, help="CPU minutes after which no run is begun")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.report:
        rows = [row for place in PLACES.values() if place.exists() for row in read_lines(place)]
        draw(rows, FIGURES / "gradmem_state_matched.png")
    else:
        chosen = {name: ENTRIES[name] for name in arguments.memory or ENTRIES}
        place = PLACES[arguments.scale]
        rows = resumed(chosen, place, seeds=arguments.seed, scale=arguments.scale, minutes=arguments.minutes)
    cells = [
        {"memory": name, "at": f"{pairs} pairs, {size}", "value": f"{spread([row['exact_match'] for row in own])} ({own[0]['bytes']})"}
        for (pairs, size, name), own in groups(rows).items()
    ]
    print(f"exact match, % (bytes)\n{table(cells, row='memory', column='at', value=lambda cell: cell['value'])}\n")
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
