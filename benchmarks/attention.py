"""Attention and its two derivatives beside what PyTorch offers: processor time, and memory above the inputs.

    python benchmarks/attention.py                                                       about ten minutes on one idle CPU core

One layer of attention, float32, causal, one thread. A forward, a first derivative of a weighted sum that is kept for another
(`create_graph=True`), and a second derivative of a weighted sum of that one. The forms take turns; what is reported is the median of the ratios to
"eager" of the same turn. Memory is the peak of the resident set above that of the inputs, in a process of its own for each number.

    eager             softmax(q k^T + mask) v, as the models of transformers do it
    math              scaled_dot_product_attention under SDPBackend.MATH, the only form of it that can be differentiated twice
    checkpointed      eager in blocks of 128 query rows, each under torch.utils.checkpoint
    graven            graven.ops.attention.attention
    graven, blocks    the same without the forward kernel of PyTorch
    flash             scaled_dot_product_attention as PyTorch chooses; it has no second derivative
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from graven.ops import attention as ours
from graven.report import figure

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("forward", "backward", "double backward")
EAGER = "eager"
ROWS = 128  # of a checkpointed block


def eager(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """Rows of attention, the first of them that of query `first`."""
    end = first + q.shape[2]
    hidden = torch.full((q.shape[2], end), torch.finfo(q.dtype).min).triu(1 + first)
    return ((q @ k[:, :, :end].mT) * q.shape[3] ** -0.5 + hidden).softmax(-1) @ v[:, :, :end]


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([checkpoint(eager, x, k, v, i * ROWS, use_reentrant=False) for i, x in enumerate(q.split(ROWS, dim=2))], dim=2)


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernel, ours._is_fused = ours._is_fused, lambda *_: False
    try:
        return ours.attention(q, k, v)
    finally:
        ours._is_fused = kernel


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


FORMS: dict[str, Callable[..., Tensor]] = {
    EAGER: eager, "math": math, "checkpointed": checkpointed, "graven": ours.attention, "graven, blocks": blocks, "flash": flash,
}  # fmt: skip


def inputs(batch: int, length: int, heads: int, width: int) -> list[Tensor]:
    """q, k, v, and what stands before the output and the three gradients in the two sums."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(batch, heads, length, width, generator=generator).requires_grad_(i < 3) for i in range(7)]


def seconds(form: str, parts: list[Tensor]) -> list[float]:
    """Processor time of each pass."""
    q, k, v, weight, *weights = parts
    marks = [time.process_time()]
    out = FORMS[form](q, k, v)
    marks.append(time.process_time())
    first = torch.autograd.grad(out, (q, k, v), weight, create_graph=form != "flash")
    marks.append(time.process_time())
    if form != "flash":
        torch.autograd.grad(first, (q, k, v), weights)
        marks.append(time.process_time())
    return [end - start for start, end in itertools.pairwise(marks)]


def turns(parts: list[Tensor], repeats: int) -> list[dict[str, Any]]:
    """One row for every form: seconds of each pass and of all, and ratios to eager of the same turn."""
    times: dict[str, list[list[float]]] = {form: [] for form in FORMS}
    for turn in range(repeats + 1):  # the first warms up
        for form, rows in times.items():
            row = seconds(form, parts)
            rows += [[*row, sum(row)]] if turn else []
    found = []
    for form, rows in times.items():
        names = [*PASSES[: len(rows[0]) - 1], "all"]
        row: dict[str, Any] = {"form": form, "seconds": {name: statistics.median(r[i] for r in rows) for i, name in enumerate(names)}}
        if form != "flash":
            ratios = {name: [r[i] / e[i] for r, e in zip(rows, times[EAGER], strict=True)] for i, name in enumerate(names)}
            row["of_eager"] = {name: {"median": statistics.median(x), "least": min(x), "largest": max(x)} for name, x in ratios.items()}
        found.append(row)
    return found


def resident() -> float:
    """Peak of the resident set in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak(form: str, batch: int, length: int, heads: int, width: int) -> float:
    """MiB above the inputs over all passes, in this process. A first run in small brings in what any run needs."""
    seconds(form, inputs(1, 8, heads, width))
    parts = inputs(batch, length, heads, width)
    before = resident()
    seconds(form, parts)
    return resident() - before


def peaks(lengths: list[int], heads: int, width: int) -> dict[tuple[str, int], float]:
    """Of every form and length at batch 1, each in a fresh process; before anything else has run in this one."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return {(form, length): pool.apply(peak, (form, 1, length, heads, width)) for length in lengths for form in FORMS}


def floor(batch: int, length: int, heads: int, width: int) -> dict[str, float]:
    """Billions of multiplications and additions of the matrix products over the entries that `causal` leaves: 2, 5 and 12 products of 2 K each."""
    entries = batch * heads * length * (length + 1) / 2
    return {name: products * 2 * width * entries / 1e9 for name, products in zip(PASSES, (2, 5, 12), strict=True)}


def product_rate(width: int) -> float:
    """Billions of operations a second that one product of a block reaches here."""
    left, right, out = torch.randn(1, 128, width), torch.randn(1, 1024, width), torch.empty(1, 128, 1024)
    best = 0.0
    for _ in range(50):
        start = time.process_time()
        for _ in range(20):
            torch.bmm(left, right.mT, out=out)
        best = max(best, 20 * 2 * width * out.numel() / (time.process_time() - start) / 1e9)
    return best


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    with figure(path) as (axes,):
        for form in FORMS:
            mine = [row for row in rows if row["form"] == form and "MiB" in row]
            axes.plot([row["length"] for row in mine], [row["MiB"] for row in mine], marker="o", label=form)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak MiB above the inputs")
        axes.set_xticks([row["length"] for row in rows if row["form"] == EAGER], [str(row["length"]) for row in rows if row["form"] == EAGER])
        axes.minorticks_off()
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[104, 584, 3080])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 4, 1], help="of each length for times; for memory it is 1")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the result file")
    options = parser.parse_args()
    tests = [sys.executable, "-m", "pytest", "-x", "-q", str(ROOT / "tests" / "test_attention.py")]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("tests/test_attention.py is red; a wrong operation has no speed. Mend it first.")
    torch.set_num_threads(1)
    held = peaks(options.lengths, options.heads, options.width)
    print({f"{form} {length}": round(value, 1) for (form, length), value in held.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for batch, length in zip(options.batches, options.lengths, strict=True):
        sizes = length, options.heads, options.width
        for row in turns(inputs(batch, *sizes), options.repeats):
            rows.append({"length": length, "batch": batch, "GFLOP_floor": floor(batch, *sizes), **row, "MiB": held[row["form"], length]})
            ratio = row.get("of_eager", {})
            shown = "  ".join(f"{name} {1e3 * s:.1f} ms ({ratio[name]['median']:.2f})" if ratio else f"{name} {1e3 * s:.1f} ms"
                              for name, s in row["seconds"].items())  # fmt: skip
            print(f"{length:5} x {batch:<3}{row['form']:15}{rows[-1]['MiB']:8.1f} MiB  {shown}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    about = {
        "options": vars(options), "GFLOPS_of_a_product": product_rate(options.width), "machine": platform.machine(), "threads": 1,
        "torch": str(torch.__version__), "dtype": "float32", "commit": commit, "date": today,
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / f"attention_{options.hardware}_{today}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    draw(rows, ROOT / "docs" / "figures" / "attention_memory.png")


if __name__ == "__main__":
    main()
