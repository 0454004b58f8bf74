"""What benchmarks of a recurrence share: forms of one operation take turns on one machine, and the ratio to its definition is the result."""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("forward", "backward", "double backward")
LOOP = "recurrent"  # the definition

Run = Callable[..., tuple[Tensor, Tensor]]


def work(run: Run, inputs: dict[str, Tensor], what: str) -> None:
    """One pass, and those it needs."""
    if what == "forward":
        with torch.no_grad():
            run(**inputs)
        return
    read, _ = run(**inputs)
    gradients = torch.autograd.grad(read.square().sum(), list(inputs.values()), create_graph=what == "double backward")
    if what == "double backward":
        torch.autograd.grad(sum(g.square().sum() for g in gradients), list(inputs.values()))


def turns(runs: dict[str, Run], inputs: dict[str, Tensor], what: str, repeats: int) -> list[dict[str, Any]]:
    """Medians of CPU time of each run, and ratios to the definition in the same turn."""
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


def options_of(description: str, *, lengths: list[int], repeats: int, **numbers: int) -> argparse.Namespace:
    """The command line: lengths, repeats, and one option for each number that the operation has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the result file")
    return parser.parse_args()


def main(
    op: str, options: argparse.Namespace, drawn: Callable[[int], dict[str, Tensor]], runs: Callable[[int], dict[str, Run]], *, state_bytes: int
) -> None:
    """Tests first, then every length and pass; a dated file in results, and a line for each row.

    Args:
        op: Its name, and that of its tests.
        drawn: Inputs of a length.
        runs: What is measured at a length; the definition among it.
        state_bytes: Of one row.
    """
    tests = [sys.executable, "-m", "pytest", "-x", "-q", str(ROOT / "tests" / f"test_{op}.py")]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"tests/test_{op}.py is red; a wrong operation has no speed. Mend it first.")
    torch.set_num_threads(1)
    rows = []
    for length in options.lengths:
        inputs = drawn(length)
        for what in PASSES:
            rows += [{"length": length, "pass": what, **row} for row in turns(runs(length), inputs, what, options.repeats)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    about = {
        "options": vars(options), "state_bytes": state_bytes, "machine": platform.machine(), "threads": torch.get_num_threads(),
        "torch": str(torch.__version__), "dtype": "float32", "commit": commit, "date": today, "seconds": "of CPU",
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"{op}_{options.hardware}_{today}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        faster = f"{row['times_faster']:6.1f} x the definition ({row['least']:.1f} to {row['largest']:.1f})"
        print(f"{row['length']:6} {row['pass']:16}{row['run']:16}{1e3 * row['seconds']:9.2f} ms {faster}")
