"""What was tried before the settings of RMT, ARMT and LaCT in `gradmem_bench.py` were taken: a weak baseline is a false result. And whether the
memories of vectors learn the task in a model without a convolution.                                           arXiv:2603.13875v2, section 3.2

Claim    KV-retrieval needs no change of the model's architecture. Seed 100, which no other experiment of the bench uses.
Differs  The model, task and batch of gradmem_bench.py, at a constant rate: few pairs until the running exact match passes 0.85, then more, until
         all are passed or a limit of CPU seconds is reached. A guess that ignores the key is right in 53.1 % (two pairs) and 33.7 % (four).
Cost     25 CPU minutes in all, 10 to 100 s a row, 480 s of the cache without a convolution; resumable. Of the committed
         rows 27 were measured by this loop before it stood in a file.

    python experiments/gradmem_tuning.py [--kind RMT --minutes 10]      measure what has no row yet
    python experiments/gradmem_tuning.py --report                       the table
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gradmem_bench import FAST, OWN, PASSED, ROWS, WIDTH, Entry, Row, climb, draw, gradmem, recurrent

from graven.layers.lact import LaCTSpec
from graven.memory.associative import ARMTSpec
from graven.memory.base import size_of
from graven.memory.cache import CacheSpec
from graven.memory.forward import RMTSpec
from graven.memory.kinds import MemorySpec
from graven.report import read_lines, write_lines

PLACE, SEED = ROWS / "gradmem_tuning.jsonl", 100
SMALL: dict[str, Any] = {"tied": True, "embedding_std": 0.3}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting.

    Args:
        entry: What is trained.
        ladder: Numbers of pairs.
        seconds: Of the CPU, after which it ends.
    """

    entry: Entry
    ladder: tuple[int, ...]
    seconds: float


def rmt(rate: float, *, ladder: tuple[int, ...] = (2,), seconds: float = 25, start: float = 1.0, **model: Any) -> Trial:
    return Trial(entry=Entry(spec=RMTSpec(slots=4, start=start), rate=rate, model=model), ladder=ladder, seconds=seconds)


def armt(
    rate: float,
    *,
    slots: int,
    features: int,
    order: int = 1,
    segment: int = 5,
    value_start: float = 1.0,
    ladder: tuple[int, ...] = (1, 2, 4),
    seconds: float = 30,
    **model: Any,
) -> Trial:
    spec = ARMTSpec(slots=slots, features=features, order=order, segment=segment, value_start=value_start)
    return Trial(entry=Entry(spec=spec, rate=rate, model=model), ladder=ladder, seconds=seconds)


def lact(
    *,
    heads: int,
    hidden: int,
    chunk: int = 10,
    muon: bool = False,
    token_rate: float = 1.0,
    convolution: int = 4,
    rate: float = FAST,
    model: Mapping[str, Any] = OWN,
    seconds: float = 14,
) -> Trial:
    spec = LaCTSpec(
        width=WIDTH, heads=heads, hidden=hidden, chunk=chunk, window=4, momentum=False, muon=muon, rate=token_rate, convolution=convolution
    )
    return Trial(entry=recurrent(spec, model={**model, "heads": heads, "key_value_heads": heads}, rate=rate), ladder=(2, 4), seconds=seconds)


def plain(spec: MemorySpec, *, convolution: int) -> Trial:
    """In the model of the bench with its convolution or without, and with time enough for the latter."""
    return Trial(entry=Entry(spec=spec, rate=3e-3, model={"convolution": convolution}), ladder=(2, 4), seconds=600)


PLAIN: dict[str, MemorySpec] = {"KV cache": CacheSpec(), "GradMem K=1": gradmem(1), "GradMem K=2": gradmem(2)}

TRIALS: dict[str, Trial] = {
    **{f"{name}, a convolution": plain(spec, convolution=3) for name, spec in PLAIN.items()},
    **{f"{name}, no convolution": plain(spec, convolution=0) for name, spec in PLAIN.items()},
    "RMT, rate 3e-3, convolution 2, embeddings of spread 0.18": rmt(3e-3, convolution=2, embedding_std=None, seconds=32),
    "RMT, the same, four pairs from the start": rmt(3e-3, convolution=2, embedding_std=None, ladder=(4,), seconds=100),
    "RMT, rate 3e-3, convolution 2": rmt(3e-3, convolution=2, seconds=32),
    "RMT, rate 1e-2, convolution 2": rmt(1e-2, convolution=2),
    "RMT, rate 3e-3, a convolution that begins as a sum": rmt(3e-3, convolution_start=1.0, seconds=40),
    "RMT, rate 3e-3, as twice the sum": rmt(3e-3, convolution_start=2.0, seconds=60),
    "RMT, rate 3e-3, as four times the sum": rmt(3e-3, convolution_start=4.0, seconds=40),
    "RMT, rate 6e-3, 2 heads, start 0.3": rmt(6e-3, start=0.3, heads=2, key_value_heads=2, seconds=20),
    "RMT, rate 1e-2, 1 head, tied embeddings of spread 0.3": rmt(1e-2, heads=1, key_value_heads=1, seconds=20, **SMALL),
    "ARMT, rate 1e-2, 1 slot, 8 features, order 3, two pairs from the start": armt(1e-2, slots=1, features=8, order=3, ladder=(2,), seconds=25),
    "ARMT, rate 1e-2, 1 slot, 16 features, order 1, two pairs from the start": armt(1e-2, slots=1, features=16, ladder=(2,), seconds=25),
    "ARMT, rate 3e-3, 1 slot, 8 features, order 3": armt(3e-3, slots=1, features=8, order=3, seconds=25),
    "ARMT, rate 3e-3, 2 slots, 16 features, order 1": armt(3e-3, slots=2, features=16, seconds=25),
    "ARMT, rate 6e-3, 1 slot, 16 features, order 1, tied embeddings of spread 0.3": armt(6e-3, slots=1, features=16, seconds=25, **SMALL),
    "ARMT, rate 5e-3, 4 slots, 16 features, order 1": armt(5e-3, slots=4, features=16),
    "ARMT, rate 5e-3, 2 slots, 16 features, order 1, 2 heads": armt(5e-3, slots=2, features=16, heads=2, key_value_heads=2),
    "ARMT, rate 3e-3, 4 slots, 16 features, order 2": armt(3e-3, slots=4, features=16, order=2, seconds=25),
    "ARMT, rate 3e-3, 4 slots, 16 features, order 2, segments of two pairs": armt(3e-3, slots=4, features=16, order=2, segment=10),
    "ARMT, rate 4e-3, 4 slots, 16 features, order 3": armt(4e-3, slots=4, features=16, order=3, seconds=35),
    "ARMT, the same, W_v from 0, one pair": armt(4e-3, slots=4, features=16, order=3, value_start=0.0, ladder=(1,), seconds=12),
    "LaCT, 2 heads, hidden 16, token rate 10": lact(heads=2, hidden=16, token_rate=10.0),
    "LaCT, 2 heads, hidden 16, chunk 20": lact(heads=2, hidden=16, chunk=20),
    "LaCT, 2 heads, hidden 16, rate 2e-2": lact(heads=2, hidden=16, rate=2e-2),
    "LaCT, 2 heads, hidden 16, chunk 20, another convolution on the embeddings": lact(heads=2, hidden=16, chunk=20, model=SMALL),
    "LaCT, 2 heads, hidden 16, chunk 20, embeddings of spread 1": lact(heads=2, hidden=16, chunk=20, model={"convolution": 0}),
    "LaCT, 2 heads, hidden 8, chunk 20": lact(heads=2, hidden=8, chunk=20),
    "LaCT, 4 heads, hidden 8": lact(heads=4, hidden=8),
    "LaCT, 1 head, hidden 16": lact(heads=1, hidden=16),
    "LaCT, 1 head, hidden 32": lact(heads=1, hidden=32),
    "LaCT, 1 head, hidden 32, chunk 20": lact(heads=1, hidden=32, chunk=20),
    "LaCT, 1 head, hidden 32, chunk 20, Muon": lact(heads=1, hidden=32, chunk=20, muon=True),
    "LaCT, 1 head, hidden 32, embeddings of spread 1": lact(heads=1, hidden=32, model={"convolution": 0}),
    "LaCT, 1 head, hidden 32, token rate 10": lact(heads=1, hidden=32, token_rate=10.0),
    "LaCT, 1 head, hidden 32, rate 2e-2, embeddings of spread 1": lact(heads=1, hidden=32, rate=2e-2, model={"convolution": 0}),
    "LaCT, 1 head, hidden 32, chunk 5": lact(heads=1, hidden=32, chunk=5),
    "LaCT, 1 head, hidden 32, Muon": lact(heads=1, hidden=32, muon=True),
    "LaCT, 1 head, hidden 32, no convolutions but that on the embeddings": lact(heads=1, hidden=32, convolution=0, model=SMALL, seconds=20),
    "LaCT, 1 head, hidden 32, Muon, no convolutions but that on the embeddings": lact(
        heads=1, hidden=32, convolution=0, muon=True, model=SMALL, seconds=20
    ),
}


def screened(name: str, trial: Trial) -> Row:
    """Train along the ladder."""
    began = time.process_time()
    memory, stages = climb(
        trial.entry,
        SEED,
        trial.ladder,
        draw=draw,
        left=lambda _place, _first, _taken, running: running >= PASSED or time.process_time() - began >= trial.seconds,
    )
    spent = round(time.process_time() - began, 1)
    return {
        "memory": name, "seed": SEED, "bytes": size_of(memory.start(1)), "stages": stages,
        "steps": sum(steps for _, steps, _ in stages), "cpu_seconds": spent, "spec": dataclasses.asdict(trial), "torch": str(torch.__version__),
    }  # fmt: skip


def report(rows: list[Row]) -> str:
    """One line a row."""
    lines = ["| settings | bytes | CPU s | pairs: steps, running exact match |", "|---|---|---|---|"]
    for row in rows:
        stages = "; ".join(f"{pairs}: {steps}, {100 * running:.0f} %" for pairs, steps, running in row["stages"] if steps)
        lines.append(f"| {row['memory']} | {row['bytes']} | {row['cpu_seconds']} | {stages} |")
    return "\n".join(lines)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", nargs="+", default=[*PLAIN, "RMT", "ARMT", "LaCT"])
    parser.add_argument("--minutes", type=float, default=math.inf, help="CPU minutes after which no run is begun")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_lines(PLACE)
    for name, trial in {} if arguments.report else TRIALS.items():
        if name.split(",")[0] in arguments.kind and name not in {row["memory"] for row in rows} and time.process_time() < 60 * arguments.minutes:
            rows.append(screened(name, trial))
            write_lines(PLACE, rows)
            print(name, rows[-1]["stages"], flush=True)
    print(report(sorted(rows, key=lambda row: list(TRIALS).index(row["memory"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
