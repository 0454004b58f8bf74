"""The smallest task on which GradMem's numbers part: four pairs of one letter of sixteen, four vectors of width 32, seconds of one core a run.

The experiments `gradmem_ablations.py`, `gradmem_memory.py` and `gradmem_figure4.py` share it. Two layers, and a convolution on the token embeddings
that the paper's model does not have; all keys are asked of every memory. What knows the values
and ignores the key is right in at most 33.7 % (`gradmem_bench.blind`).
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.measure import read_episode, right
from graven.memory.gradient import GradMem, GradMemSpec
from graven.memory.rules import conjugate_gradients
from graven.report import read_lines, write_lines
from graven.tasks.base import Episode, distinct
from graven.tasks.retrieval import Retrieval

HERE = Path(__file__).parent
FIGURES = HERE.parent / "docs" / "figures"
TASK, PAIRS = Retrieval(key_length=1, value_length=1, symbols=16), 4
BATCH, RATE, WARM_UP, LAST_RATE, CLIP = 32, 6e-3, 20, 0.05, 1.0
STEPS = {"small": 30, "full": 200}
CONTEXTS = {"small": 50, "full": 250}
PLAIN = GradMemSpec(slots=4, steps=1, keep=8, write_head=True, start=0.02)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of run.

    Args:
        memory: The memory.
        layers: Of the decoder.
        objective: Context tokens that count in the loss of a write.
        order: Of the pairs in a context: as drawn, or by key.
        meta: How training sees the write: "through" as the spec of the memory says; "reptile" moves the start state to where the write ended
            and trains the weights on read and write loss there; "implicit" takes the end for an optimum.
    """

    memory: GradMemSpec = PLAIN
    layers: int = 2
    objective: str = "all"
    order: str = "drawn"
    meta: str = "through"

    def draw(self, size: int, generator: torch.Generator) -> Episode:
        """Contexts with every key asked."""
        keys = distinct(size, PAIRS, below=TASK.symbols, generator=generator)
        values = torch.randint(TASK.symbols, (size, PAIRS), generator=generator)
        return TASK.episode((keys if self.order == "drawn" else keys.sort(-1).values)[..., None], values[..., None])

    def counted(self, episode: Episode) -> Tensor | None:
        """Tokens that count, all where none are named."""
        return None if self.objective == "all" else episode.values


def new(cell: Cell, seed: int) -> GradMem:
    """Before training."""
    torch.manual_seed(seed)
    sizes = DecoderSpec(
        vocabulary=TASK.vocabulary, width=32, layers=cell.layers, heads=4, key_value_heads=4, hidden=64, convolution=2, embedding_std=1.0
    )
    return GradMem(Small(sizes), cell.memory, seed=seed)


def train(cell: Cell, seed: int, *, steps: int, seconds: float | None = None) -> tuple[GradMem, Row]:
    """So many steps, or as many as fit into so many CPU seconds; the rate falls along a cosine of the share that is done."""
    memory, generator = new(cell, seed), torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, taken, share = time.process_time(), 0, 0.0
    while share < 1:
        rate = RATE * min(1.0, (taken + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        META[cell.meta](memory, cell, cell.draw(BATCH, generator))
        if math.isfinite(float(torch.nn.utils.clip_grad_norm_(memory.parameters(), CLIP))):
            optimizer.step()
        taken += 1
        share = taken / steps if seconds is None else (time.process_time() - began) / seconds
    return memory.eval(), {"steps": taken, "cpu_seconds": round(time.process_time() - began, 2)}


def read_loss(memory: GradMem, state: Tensor, episode: Episode) -> Tensor:
    """Cross entropy of the answers."""
    return F.cross_entropy(read_episode(memory, state, episode).flatten(0, 2), episode.target.ids.flatten())


def through(memory: GradMem, cell: Cell, episode: Episode) -> None:
    """Gradients of the read loss, through the write."""
    state = memory.write(memory.start(BATCH), episode.context, counted=cell.counted(episode))
    read_loss(memory, state, episode).backward()


def written(memory: GradMem, cell: Cell, episode: Episode) -> Tensor:
    """Where the write ends, a constant."""
    with torch.no_grad():
        return memory.write(memory.start(BATCH), episode.context, counted=cell.counted(episode))


def reptile(memory: GradMem, cell: Cell, episode: Episode) -> None:
    """The start state moves to the mean end; the weights descend both losses at the end.

    Source: Nichol et al. 2018, arXiv:1803.02999, equation 1, for the start state.
    """
    state = written(memory, cell, episode)
    (read_loss(memory, state, episode) + write_loss(memory, state, episode).mean()).backward()
    memory.initial.grad = memory.initial.detach() - state.mean(0)


def implicit(memory: GradMem, cell: Cell, episode: Episode) -> None:
    """The end as if it were the minimum of the write loss and |M - M_0|^2 / (2 rate K), with Gauss-Newton products for the Hessian.

    Source: Rajeswaran et al. 2019, arXiv:1909.04630, equation 6.
    """
    state = written(memory, cell, episode).requires_grad_()
    read_loss(memory, state, episode).backward()
    strength = 1 / (memory.spec.rule.rate * memory.spec.steps)
    product = memory.curvature(state, memory.prepare(state, episode.context))
    pulled = conjugate_gradients(lambda v: product(v) + strength * v, state.grad, iterations=3)
    here = state.detach().requires_grad_()
    (slope,) = torch.autograd.grad(write_loss(memory, here, episode).sum(), here, create_graph=True)
    (-(slope * pulled).sum()).backward()
    memory.initial.grad = strength * pulled.sum(0)


def write_loss(memory: GradMem, state: Tensor, episode: Episode) -> Tensor:
    """Of each row, all tokens counted."""
    return memory.reconstruction(state, memory.prepare(state, episode.context))


META: Mapping[str, Callable[[GradMem, Cell, Episode], None]] = {"through": through, "reptile": reptile, "implicit": implicit}


@torch.no_grad()
def trace(memory: GradMem, task: Retrieval, episode: Episode, *, most: int, counted: Tensor | None = None) -> list[Row]:
    """Exact match after 0, 1, ... steps of a write, the loss of the write on keys, values and marks, and the FLOPs of writing one context."""
    contexts = len(episode.context.ids)
    state, moments = memory.start(contexts), None
    prepared = memory.prepare(state, episode.context, counted=counted)
    key = episode.values.roll(-task.key_length - 1, 1)  # `!k:v!`, both of one length: a key stands that much before its value
    at = {"key": key, "value": episode.values, "mark": ~(key | episode.values)}
    with FlopCounterMode(display=False) as counter:
        memory.step(state, prepared)
    flops, rows = counter.get_total_flops() // contexts, []  # all steps cost the same
    for k in range(most + 1):
        exact = float(right(read_episode(memory, state, episode), episode).float().mean())
        step = memory.step(state, prepared, moments, taken=k)
        losses = {f"{name}_loss": float(step.token_losses[where].mean()) for name, where in at.items()}
        rows.append({"evaluated": k, "exact_match": exact, **losses, "write_loss": float(step.loss.mean()), "write_flops": k * flops})
        state, moments = step.state, step.moments
    return rows


def measure(memory: GradMem, cell: Cell, *, contexts: int) -> list[Row]:
    """A trace on fresh contexts, to twice the steps of the longest write here."""
    episode = cell.draw(contexts, torch.Generator().manual_seed(7))
    return trace(memory, TASK, episode, most=6, counted=cell.counted(episode))


def run(cells: Mapping[str, Cell], place: Path, *, seeds: Sequence[int], scale: str, seconds_of: Mapping[str, str] | None = None) -> list[Row]:
    """Rows of every cell and seed; those that `place` has already are passed over, and each is written down at once.

    Args:
        cells: By name.
        place: File of the rows.
        seeds: Of weights and contexts.
        scale: How long to train and measure.
        seconds_of: Cells that get the CPU seconds of another one, of the same seed, in place of a number of steps.
    """
    rows = read_lines(place)
    for seed in seeds:
        for name, cell in cells.items():
            if any((row["cell"], row["seed"]) == (name, seed) for row in rows):
                continue
            other = (seconds_of or {}).get(name)
            seconds = next((row["trained"]["cpu_seconds"] for row in rows if (row["cell"], row["seed"]) == (other, seed)), None)
            memory, trained = train(cell, seed, steps=STEPS[scale], seconds=seconds)
            about = {
                "cell": name, "memory": "gradmem", "pairs": PAIRS, "seed": seed, "bytes": 4 * memory.initial.numel(), "trained": trained,
                "cpu_seconds": trained["cpu_seconds"], "scale": scale, "spec": dataclasses.asdict(cell), "torch": str(torch.__version__),
            }  # fmt: skip
            rows += [about | row for row in measure(memory, cell, contexts=CONTEXTS[scale])]
            write_lines(place, rows)
            own = [row for row in rows if (row["cell"], row["seed"]) == (name, seed)]
            print(name, seed, trained, [round(row["exact_match"], 3) for row in own[:6]], flush=True)
    return rows


def exact(rows: Sequence[Row], name: str, steps: int) -> list[float]:
    """Exact match of each seed of a cell after so many steps of a write."""
    return [row["exact_match"] for row in rows if (row["cell"], row["evaluated"]) == (name, steps)]


def spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest, in per cent.

    >>> spread([0.5, 0.6, 0.7])
    '60.0 (50.0 to 70.0)'
    """
    return f"{100 * sum(values) / len(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def options() -> argparse.Namespace:
    """The command line of the experiments; one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=STEPS, default="small")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true")
    torch.set_num_threads(1)
    return parser.parse_args()
