"""Every form of gated linear attention beside the plain loop, and beside the naive formula of flash-linear-attention.

    python benchmarks/gated_linear.py --gates key --lengths 256 1024 4096 16384 --repeats 2 --limit 3      one CPU minute
    python benchmarks/gated_linear.py                                                                      several CPU minutes
    python benchmarks/gated_linear.py --draw benchmarks/results/FILE.json                                   the figure in docs/figures, from a result

Runs of one length take turns on one machine; what is reported is the ratio to the loop within a turn: median, least and largest. A run that
would take longer than `--limit` or hold more than `--memory` is left out and the result says so. Seconds are those of the core, not of the clock,
on a CPU. The tests of the operation run first: on red there is
no number.
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

from graven.ops.gated_linear import gated_linear
from graven.report import figure

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("forward", "backward", "double backward")
LOOP = "recurrent"
GROWTH = 4.0  # how much longer a run may take at the next length than at this one: quadratic forms at twice the length


def naive(q: Tensor, k: Tensor, v: Tensor, *, log_gate_k: Tensor) -> tuple[Tensor, Tensor]:
    """The formula that flash-linear-attention tests its kernels by: h <- exp(g) h + k v^T, o = sum over keys of q h."""
    h = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    reads = []
    # unbound once: to index every token, as they do, costs a gradient of the full length for each, and 2 GB at T = 1024 when differentiated twice
    for q_t, k_t, v_t, gate in zip(*(x.unbind(1) for x in (q, k, v, log_gate_k)), strict=True):
        h = h * gate.exp()[..., None] + k_t[..., None] * v_t[..., None, :]
        reads.append((q_t[..., None] * h).sum(-2))
    return torch.stack(reads, 1), h


RUNS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    LOOP: partial(gated_linear, form="recurrent"),
    "chunk": partial(gated_linear, form="chunk"),
    "parallel": partial(gated_linear, form="parallel"),
    "naive of flash-linear-attention": naive,
}


def drawn(length: int, *, gate: str, heads: int, width: int, device: str) -> dict[str, Tensor]:
    """Inputs as a trained layer has them: gates mostly near 1, some strong."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, length, heads, width, generator=generator) / width**0.5 for _ in range(3))
    logits = torch.randn(1, length, heads, width if gate == "key" else 1, generator=generator)
    inputs = {"q": q, "k": k, "v": v, "log_gate_k": torch.nn.functional.logsigmoid(logits) / 4}
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def work(run: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], what: str) -> None:
    """One pass, and those it needs."""
    if what == "forward":
        with torch.no_grad():
            run(**inputs)
        return
    o, state = run(**inputs)
    loss = o.square().sum() + state.square().sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()), create_graph=what == "double backward")
    if what == "double backward":
        torch.autograd.grad(sum(g.square().sum() for g in gradients), list(inputs.values()))


def seconds(run: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], what: str) -> float:
    on_gpu = inputs["q"].is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    clock = time.perf_counter if on_gpu else time.process_time  # one thread: what others do on the machine does not count
    start = clock()
    work(run, inputs, what)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def held_bytes(name: str, inputs: dict[str, Tensor], what: str) -> int:
    """About what a run holds at most: loops a state for every token, the parallel form every pair, each some times over for derivatives."""
    _, length, heads, width = inputs["q"].shape
    gates = inputs["log_gate_k"].shape[-1]
    numbers = {"parallel": length**2 * (gates + 2), "chunk": 16 * length * width}.get(name, length * width**2)
    return 4 * heads * numbers * {"forward": 2, "backward": 6, "double backward": 24}[what]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for every run, length, gate and pass."""
    rows: list[dict[str, Any]] = []
    for gate in options.gates:
        slow: dict[tuple[str, str], float] = {}
        for length in sorted(options.lengths):
            inputs = drawn(length, gate=gate, heads=options.heads, width=options.width, device=options.device)
            for what in PASSES:
                small = [name for name in RUNS if held_bytes(name, inputs, what) <= options.memory * 2**30]
                fits = [name for name in small if slow.get((name, what), 0.0) * GROWTH <= options.limit]
                new = turns(fits, inputs, what, options.repeats)
                rows += [{"gate": gate, "length": length, "pass": what, **row} for row in new]
                slow |= {(row["run"], what): row["seconds"] for row in new}
                for name in sorted(RUNS.keys() - set(fits)):
                    slow[name, what] = options.limit  # left out here, so left out at every greater length
                    why = "memory" if name not in small else "time"
                    rows.append({"gate": gate, "length": length, "pass": what, "run": name, "left_out": why})
    return rows


def turns(names: list[str], inputs: dict[str, Tensor], what: str, repeats: int) -> list[dict[str, Any]]:
    """Medians of each run, and ratios to the loop of the same turn."""
    for name in names:
        work(RUNS[name], inputs, what)
    times = {name: [0.0] * repeats for name in names}
    for turn in range(repeats):
        for name in names:
            times[name][turn] = seconds(RUNS[name], inputs, what)
    rows = []
    for name in names:
        row = {"run": name, "seconds": statistics.median(times[name]), "tokens_per_second": inputs["q"].shape[1] / statistics.median(times[name])}
        if LOOP in times:
            ratios = [loop / own for loop, own in zip(times[LOOP], times[name], strict=True)]
            row |= {"times_faster": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds against length, one panel a pass, key gates; a slope of one is a cost that grows with T."""
    with figure(path, width=9, height=3.2, columns=len(PASSES)) as panels:
        for axes, what in zip(panels, PASSES, strict=True):
            for colour, name in zip(("C7", "C3", "C0", "C2"), RUNS, strict=True):
                here = [r for r in rows if (r["gate"], r["pass"], r["run"]) == ("key", what, name) and "seconds" in r]
                axes.plot([r["length"] for r in here], [r["seconds"] for r in here], "o-", ms=3, lw=1, color=colour, label=name)
            axes.set(title=what, xlabel="T", xscale="log", yscale="log")
        panels[0].set_ylabel("CPU seconds")
        panels[0].legend(frameon=False, fontsize=7)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--gates", nargs="+", choices=["key", "scalar"], default=["key", "scalar"])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="of keys and values of a head")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=6.0, help="seconds that one run may take")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB that one run may hold")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the result file")
    parser.add_argument("--draw", type=Path, help="a result file, to be drawn and not measured")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.draw:
        draw(json.loads(options.draw.read_text())["rows"], ROOT / "docs" / "figures" / "gated_linear_cost.png")
        return
    tests = [sys.executable, "-m", "pytest", "-x", "-q", str(ROOT / "tests" / "test_gated_linear.py")]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("tests/test_gated_linear.py is red; a wrong operation has no speed. Mend it first.")
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows = measure(options)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    about = {
        "options": {name: value for name, value in vars(options).items() if name != "draw"},
        "state_bytes": 4 * options.heads * options.width**2,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(), "torch": str(torch.__version__), "dtype": "float32", "commit": commit, "date": today,
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"gated_linear_{options.hardware}_{today}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        if "left_out" in row:
            found = f"left out: {row['left_out']}"
        else:
            faster = f"{row['times_faster']:6.1f} x the loop ({row['least']:.1f} to {row['largest']:.1f})" if "times_faster" in row else ""
            found = f"{1e3 * row['seconds']:9.1f} ms {faster}"
        print(f"{row['gate']:7}{row['length']:6} {row['pass']:16}{row['run']:33}{found}")


if __name__ == "__main__":
    main()
