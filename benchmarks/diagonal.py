"""The diagonal recurrence beside its definition and two ways to do without a loop over tokens.

    python benchmarks/diagonal.py                                                        about a minute on one CPU core

Runs of one length take turns on one machine; what is reported is the ratio to the definition within a turn: median, least and largest. The
tests of the operation run first: on red there is no number. "powers" holds a^(t - s) for every pair of tokens; "doubling" joins halves in
log2 T rounds over all tokens.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graven.ops.diagonal import diagonal

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("forward", "backward", "double backward")
LOOP = "recurrent"
LONGEST_POWERS = 256  # tokens; beyond, T * T * S numbers and their derivatives do not fit beside the others


def powers(u: Tensor, *, decay: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = sum over s <= t of a^(t - s) u_s, all pairs at once."""
    length = u.shape[1]
    age = torch.arange(length)[:, None] - torch.arange(length)
    weights = torch.where(age[..., None] >= 0, decay ** age.clamp_min(0)[..., None], 0.0)
    h = torch.einsum("tsn,bsn->btn", weights, u)
    return h, h[:, -1]


def doubling(u: Tensor, *, decay: Tensor) -> tuple[Tensor, Tensor]:
    """h_t over the last 1, 2, 4 ... tokens in turn."""
    step, factor = 1, decay
    while step < u.shape[1]:
        u = u + factor * F.pad(u[:, :-step], (0, 0, step, 0))
        step, factor = 2 * step, factor * factor
    return u, u[:, -1]


RUNS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    LOOP: partial(diagonal, form="recurrent"),
    "scan": partial(diagonal, form="scan"),
    "powers": powers,
    "doubling": doubling,
}


def drawn(length: int, *, batch: int, size: int) -> dict[str, Tensor]:
    """Tokens that lie in memory as [T, B, S], as the layers make them, and decays from U(0, 1)."""
    generator = torch.Generator().manual_seed(length)
    u = torch.randn(length, batch, size, generator=generator).transpose(0, 1)
    return {"u": u.requires_grad_(), "decay": torch.rand(size, generator=generator).requires_grad_()}


def work(run: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], what: str) -> None:
    """One pass, and those it needs."""
    if what == "forward":
        with torch.no_grad():
            run(**inputs)
        return
    h, _ = run(**inputs)
    gradients = torch.autograd.grad(h.square().sum(), list(inputs.values()), create_graph=what == "double backward")
    if what == "double backward":
        torch.autograd.grad(sum(g.square().sum() for g in gradients), list(inputs.values()))


def turns(inputs: dict[str, Tensor], what: str, repeats: int) -> list[dict[str, Any]]:
    """Medians of CPU time of each run, and ratios to the definition in the same turn."""
    runs = {name: run for name, run in RUNS.items() if name != "powers" or inputs["u"].shape[1] <= LONGEST_POWERS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            work(run, inputs, what)
            if turn:  # the first is for warmth
                times[name].append(time.process_time() - start)
    rows = []
    for name, own in times.items():
        ratios = [loop / one for loop, one in zip(times[LOOP], own, strict=True)]
        row = {"run": name, "seconds": statistics.median(own), "times_faster": statistics.median(ratios)}
        rows.append(row | {"least": min(ratios), "largest": max(ratios)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the result file")
    options = parser.parse_args()
    tests = [sys.executable, "-m", "pytest", "-x", "-q", str(ROOT / "tests" / "test_diagonal.py")]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("tests/test_diagonal.py is red; a wrong operation has no speed. Mend it first.")
    torch.set_num_threads(1)
    rows = []
    for length in options.lengths:
        inputs = drawn(length, batch=options.batch, size=options.size)
        for what in PASSES:
            rows += [{"length": length, "pass": what, **row} for row in turns(inputs, what, options.repeats)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    about = {
        "options": vars(options), "state_bytes": 4 * options.size, "machine": platform.machine(), "threads": torch.get_num_threads(),
        "torch": str(torch.__version__), "dtype": "float32", "commit": commit, "date": today, "seconds": "of CPU",
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"diagonal_{options.hardware}_{today}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        faster = f"{row['times_faster']:6.1f} x the definition ({row['least']:.1f} to {row['largest']:.1f})"
        print(f"{row['length']:6} {row['pass']:16}{row['run']:10}{1e3 * row['seconds']:9.2f} ms {faster}")


if __name__ == "__main__":
    main()
