"""Peak memory and CPU seconds of one meta-gradient: a read loss differentiated through K gradient steps of a write, for all weights.

    python benchmarks/second_order.py                      tests first, then every run of every size; a result file in benchmarks/results
    python benchmarks/second_order.py --report FILE        table, gates and figure of a result file

Runs, all of the same decoder (4 layers, width 128, 8 slots) on the same random tokens:
    sweep                   GradMem as it is: attention, pointwise parts and the reverse sweep of graven
    unrolled                the same parts, every step in one graph
    sweep of plain parts    attention and pointwise parts in plain torch, the reverse sweep
    eager unrolled          the same parts, every step in one graph: the usual way
    SDPA math               the same with torch's scaled_dot_product_attention, whose only kernel with a double backward is MATH
    checkpointed blocks     eager unrolled, each block of the decoder a torch checkpoint (torch refuses one of a whole step: it differentiates inside)
    write                   no meta-gradient: the K steps alone, under no_grad

Each measurement is a forked process of its own, and the runs of one size take turns. Peak is the highest resident set above the one before the work.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.ticker import LogLocator
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from graven.layers import decoder
from graven.layers.decoder import Block, DecoderSpec
from graven.lm.small import Small
from graven.memory import gradient
from graven.memory.gradient import SGD, GradMem, GradMemSpec
from graven.ops.attention import plain_attention
from graven.report import figure, table
from graven.tasks.base import Tokens

ROOT = Path(__file__).parents[1]
TESTS = ("test_inner_loop", "test_pointwise", "test_attention")
SLOTS, VOCABULARY = 8, 66
MODEL = DecoderSpec(vocabulary=VOCABULARY, width=128, layers=4, heads=4, key_value_heads=4, hidden=256, convolution=3, embedding_std=1.0)
LONG = 584  # columns of 96 pairs, where the gates on time and on the peak are
EAGER, SWEEP, UNROLLED, WRITE = "eager unrolled", "sweep", "unrolled", "write"


def plain_rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rotation[0] + torch.cat([-second, first], -1) * rotation[1]


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def plain_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def math_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


@contextmanager
def plain(attention: Callable[..., Tensor] = plain_attention) -> Iterator[None]:
    """The decoder in plain torch."""
    parts = {"attention": attention, "rms_norm": plain_norm, "rotate": plain_rotate, "swiglu": plain_swiglu}
    entropy = mock.patch.object(gradient, "cross_entropy", lambda logits, ids: F.cross_entropy(logits, ids, reduction="none"))
    with mock.patch.multiple(decoder, **parts), entropy:
        yield


def unrolled(memory: GradMem, context: Tokens, steps: int) -> Tensor:
    state = memory.start(len(context.ids))
    prepared = memory.prepare(state, context)
    for taken in range(steps):
        state = memory.step(state, prepared, taken=taken).state
    return state


def swept(memory: GradMem, context: Tokens, steps: int) -> Tensor:
    return memory.write(memory.start(len(context.ids)), context, steps=steps)


def checkpointed(memory: GradMem, context: Tokens, steps: int) -> Tensor:
    forward = Block.forward
    with mock.patch.object(Block, "forward", lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)):
        return unrolled(memory, context, steps)


@torch.no_grad()
def written(memory: GradMem, context: Tokens, steps: int) -> Tensor:
    return swept(memory, context, steps)


RUNS: dict[str, tuple[Callable[[GradMem, Tokens, int], Tensor], Callable[[], AbstractContextManager[None]]]] = {
    SWEEP: (swept, nullcontext),
    UNROLLED: (unrolled, nullcontext),
    "sweep of plain parts": (swept, plain),
    EAGER: (unrolled, plain),
    "SDPA math": (unrolled, lambda: plain(math_attention)),
    "checkpointed blocks": (checkpointed, plain),
    WRITE: (written, nullcontext),
}


def work(name: str, tokens: int, batch: int, steps: int) -> None:
    """One meta-gradient."""
    memory = GradMem(Small(MODEL), GradMemSpec(slots=SLOTS, steps=steps, rule=SGD(), start=0.02, write_head=True))
    context = Tokens.full(torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(0)))
    write, parts = RUNS[name]
    with parts():
        end = write(memory, context, steps)
        if end.requires_grad:
            torch.autograd.grad(end.square().sum(), list(memory.parameters()), allow_unused=True)


def status(field: str) -> float:
    """A field of this process's status, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def forked(name: str, tokens: int, batch: int, steps: int) -> dict[str, float]:
    """CPU seconds and peak of one run in a process of its own, warmed up on a small size."""
    into, out = os.pipe()
    if not (child := os.fork()):
        work(name, 16, 1, 1)
        before, began = status("VmRSS"), time.process_time()
        work(name, tokens, batch, steps)
        os.write(out, json.dumps({"seconds": time.process_time() - began, "peak_mib": status("VmHWM") - before}).encode())
        os._exit(0)
    os.close(out)
    with os.fdopen(into) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        raise SystemExit(f"{name} at {tokens} tokens, K = {steps} died; it may need more memory than there is.")
    return json.loads(said)


def measure(tokens: int, batch: int, steps: list[int], names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Medians of each run; within a turn every run is measured once, one after the other."""
    rows = []
    for k in steps:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                found[name].append(forked(name, tokens, batch, k))
        for name, each in found.items():
            seconds, peaks = [x["seconds"] for x in each], [x["peak_mib"] for x in each]
            row = {"run": name, "length": SLOTS + tokens, "batch": batch, "K": k, "peak_mib": round(statistics.median(peaks), 1)}
            rows.append({**row, "seconds": round(statistics.median(seconds), 3), "least": round(min(seconds), 3), "largest": round(max(seconds), 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def gates(rows: list[dict[str, Any]]) -> list[str]:
    """Each gate that these rows can judge, at every size."""
    lines = []
    for length, batch in sorted({(row["length"], row["batch"]) for row in rows}):
        at = {(row["run"], row["K"]): row for row in rows if (row["length"], row["batch"]) == (length, batch)}
        wanted = [("peak at K = 10 over that at K = 2", "peak_mib", (SWEEP, 10), (SWEEP, 2), 1.25)]
        wanted += [(f"time over that of our own unrolled, K = {k}", "seconds", (SWEEP, k), (UNROLLED, k), 1.4) for k in (2, 5, 10)]
        if length == LONG:
            wanted += [("peak over that of eager unrolled, K = 5", "peak_mib", (SWEEP, 5), (EAGER, 5), 0.2)]
            wanted += [(f"time over that of eager unrolled, K = {k}", "seconds", (SWEEP, k), (EAGER, k), 0.65) for k in (2, 5, 10)]
        for text, field, one, other, gate in wanted:
            if one in at and other in at:
                value = at[one][field] / at[other][field]
                lines.append(f"{'holds' if value <= gate else 'FAILS'}   T = {length}, batch {batch}: {text}: {value:.2f} <= {gate}")
        for k in sorted({k for _, k in at} & {k for name, k in at if name == WRITE} & {k for name, k in at if name == SWEEP}):
            value = at[SWEEP, k]["seconds"] / at[WRITE, k]["seconds"]
            lines.append(
                f"        T = {length}, batch {batch}, K = {k}: {value:.2f} first-order writes; least {3:.1f}, of this sweep {4 - 1 / k:.1f}"
            )
    return lines


def report(rows: list[dict[str, Any]]) -> None:
    """Tables, gates, figure."""
    sizes = sorted({(row["length"], row["batch"]) for row in rows})
    for length, batch in sizes:
        here = [row for row in rows if (row["length"], row["batch"]) == (length, batch)]
        print(f"\nT = {length}, batch {batch}: peak MiB / CPU seconds\n")
        print(table(here, row="run", column="K", value=lambda row: f"{row['peak_mib']:.0f} / {row['seconds']:.2f}"))
    print("\n" + "\n".join(gates(rows)))
    drawn = [size for size in sizes if len({row["K"] for row in rows if (row["length"], row["batch"]) == size}) > 2]
    with figure(ROOT / "docs" / "figures" / "second_order.png", width=7.5, height=3.4, columns=len(drawn)) as axes:
        for panel, (length, batch) in zip(axes, drawn, strict=True):
            here = sorted((row for row in rows if (row["length"], row["batch"]) == (length, batch)), key=lambda row: row["K"])
            for name in [name for name in RUNS if name != WRITE]:
                style = {"lw": 2.5, "color": "black"} if name == SWEEP else {"lw": 1}
                of_run = [row for row in here if row["run"] == name]
                panel.plot([row["K"] for row in of_run], [row["peak_mib"] for row in of_run], "o-", ms=3, label=name, **style)
            panel.set(xlabel="write steps K", ylabel="peak memory, MiB", yscale="log", title=f"T = {length}, batch {batch}", xticks=(1, 2, 5, 10))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:.0f}")
            panel.yaxis.set_minor_formatter("")
        axes[0].legend(frameon=False, fontsize=7, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[104, 584], help="columns, the 8 slots included")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the result file")
    parser.add_argument("--append", type=Path, help="a result file whose rows are kept beside the new ones")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.report:
        return report(json.loads(options.report.read_text())["rows"])
    tests = [sys.executable, "-m", "pytest", "-x", "-q", *(str(ROOT / "tests" / f"{name}.py") for name in TESTS)]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{', '.join(TESTS)}: red; a wrong operation has no speed. Mend it first.")
    torch.set_num_threads(1)
    old = json.loads(options.append.read_text())["rows"] if options.append else []
    rows = old + [row for n in options.lengths for row in measure(n - SLOTS, options.batch, options.steps, options.runs, options.repeats)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    about = {"machine": platform.machine(), "threads": 1, "torch": str(torch.__version__), "dtype": "float32", "commit": commit, "date": today}
    path = ROOT / "benchmarks" / "results" / f"second_order_{options.hardware}_{today}.json"
    path.write_text(json.dumps({"about": {**about, "repeats": options.repeats}, "rows": rows}, indent=1) + "\n")
    return report(rows)


if __name__ == "__main__":
    main()
