"""Every memory on one small model and one task, by the same training: what `gradmem_table1.py` and `gradmem_state_matched.py` share, and the loop of
`gradmem_babi.py` and `gradmem_tuning.py`.

Two layers, width 32, and a convolution over three token embeddings, which the paper's model does not have and without which no recurrent memory sees
a key with its value (most recurrent layers here have their own); keys and values of one letter of sixteen; every key is asked of every memory.
Training begins with few pairs and goes on when they are learned. Memories get equal compute: the CPU time of so many training steps of GradMem
K = 2. How many of its own steps that is was measured once, step about step with GradMem's on one machine, and stands in rows/gradmem_bench.jsonl.
What was tried for RMT, ARMT and LaCT is in gradmem_tuning.py; those that had not left the guess in this time have a row with more.

    python experiments/gradmem_bench.py       measure what has no row yet: CPU time of a training step over that of GradMem K = 2
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from graven.cost import cost_of
from graven.layers.decoder import DecoderSpec
from graven.layers.delta_net import DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttentionSpec
from graven.layers.lact import LaCTSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.layers.ttt import TTTSpec
from graven.measure import exact_match, read_episode, right
from graven.memory.associative import ARMTSpec
from graven.memory.base import Trainable, written
from graven.memory.cache import CacheSpec
from graven.memory.forward import RMTSpec
from graven.memory.gradient import GradMemSpec
from graven.memory.kinds import MemorySpec, make, takes_steps
from graven.memory.prefix import PrefixSpec
from graven.memory.recurrent import Mixer, RecurrentSpec
from graven.report import read_lines, write_lines
from graven.tasks.base import Episode
from graven.tasks.retrieval import Retrieval

HERE = Path(__file__).parent
FIGURES, ROWS = HERE.parent / "docs" / "figures", HERE / "rows"
TASK = Retrieval(key_length=1, value_length=1, symbols=16)
WIDTH, BATCH, WARM_UP, LAST_RATE, CLIP = 32, 32, 20, 0.05, 1.0
CONTEXTS = 200
COSTS = ROWS / "gradmem_bench.jsonl"
# pairs; smaller numbers of pairs that are trained first, each until the running exact match passes `PASSED`; training steps of GradMem K = 2 in all
SCALES = {"small": (4, (2,), 160), "medium": (8, (2, 4), 400), "large": (16, (2, 4, 8), 800)}
PASSED, SMOOTHING, LONGEST = 0.85, 0.1, 0.5  # and the share of all training at which the last of the smaller numbers ends
COST_PAIRS = 4  # at which costs are measured

Row = dict[str, Any]


# the model
SIZES = DecoderSpec(vocabulary=TASK.vocabulary, width=WIDTH, layers=2, heads=4, key_value_heads=4, hidden=64, convolution=3, embedding_std=1.0)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One memory of the bench.

    Args:
        spec: What to build.
        rate: Of AdamW.
        base: The model of all memories.
        model: Fields of it that are other ones.
        times: So much more compute than the others: to tell slower from unable.
        first: Numbers of pairs that are trained before those of the scale.
    """

    spec: MemorySpec
    rate: float = 6e-3
    base: DecoderSpec = SIZES
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    times: float = 1.0
    first: tuple[int, ...] = ()

    @property
    def steps(self) -> int | None:
        """Of a write; nothing for memories whose write takes none."""
        return self.spec.steps if takes_steps(self.spec) else None

    @property
    def sizes(self) -> DecoderSpec:
        """The model."""
        return dataclasses.replace(self.base, **self.model)


def gradmem(steps: int, *, slots: int = 4, **settings: Any) -> GradMemSpec:
    return GradMemSpec(slots=slots, steps=steps, write_head=True, start=0.02, keep=8, **settings)


def prefix(steps: int, *, slots: int = 1) -> PrefixSpec:
    """At rates of 1 it stays at chance, at 10 it reaches 38 %, at 40 79 %, at 150 67 % (four pairs, one seed, scale small)."""
    return PrefixSpec(slots=slots, steps=steps, write_head=True, keep=8, rate_keys=40.0, rate_values=40.0, start=0.1)


def rmt(*, slots: int = 4, steps: int = 1, times: float = 1.0) -> Entry:
    """The convolution begins as twice the sum of three tokens: a query is read at a mark, which shows the key before it by the convolution alone.
    With torch's own start two pairs stay at a guess for a thousand steps (gradmem_tuning.py)."""
    return Entry(spec=RMTSpec(slots=slots, steps=steps), rate=3e-3, model={"convolution_start": 2.0}, times=times)


def armt(*, features: int, order: int, **settings: Any) -> Entry:
    """Segments of one pair. At a rate of 1e-2 features die: they are products of rectified numbers, and a read of none has no gradient."""
    return Entry(spec=ARMTSpec(slots=4, features=features, order=order, segment=5, value_start=1.0), rate=4e-3, first=(1,), **settings)


def recurrent(mixer: Mixer, **settings: Any) -> Entry:
    return Entry(spec=RecurrentSpec(mixer=mixer), **settings)


def lact(**settings: Any) -> Entry:
    """One large fast network and convolutions, which halve the steps at two pairs; no Muon, whose steps cost more than it saves."""
    spec = LaCTSpec(width=WIDTH, heads=1, hidden=32, chunk=10, window=4, momentum=False, muon=False, rate=1.0, convolution=4)
    return recurrent(spec, model=OWN | ONE, rate=FAST, **settings)


# recurrent memories train soonest with small, tied embeddings and a larger rate, and have the convolutions of their layers
OWN = {"convolution": 0, "tied": True, "embedding_std": 0.3}
TWO, ONE, EIGHT = ({"heads": heads, "key_value_heads": heads} for heads in (2, 1, 8))
FAST = 1e-2

MEMORIES: dict[str, Entry] = {
    "GradMem K=2": Entry(spec=gradmem(2)),
    "KV cache": Entry(spec=CacheSpec()),
    "RMT": rmt(),
    "DeltaNet": recurrent(DeltaNetSpec(width=WIDTH, heads=2, key_width=16, value_width=16), model=OWN | TWO, rate=FAST),
    "GradMem K=1": Entry(spec=gradmem(1)),
    "first order K=2": Entry(spec=gradmem(2, order="first")),
    "prefix K=2": Entry(spec=prefix(2)),
    "TTT-Linear": recurrent(TTTSpec(width=WIDTH, heads=4), rate=FAST),
    "Mamba-2": recurrent(Mamba2Spec(width=WIDTH, inner=64, heads=4, memory=16), model=OWN | {"key_value_heads": 1}, rate=FAST),
    "ARMT": armt(features=16, order=3),
    "GLA": recurrent(
        GatedLinearAttentionSpec(width=WIDTH, heads=2, key_value_heads=2, key_width=16, value_width=16, convolution=4), model=OWN | TWO, rate=FAST
    ),
    "Mamba": recurrent(MambaSpec(width=WIDTH, inner=64, memory=8, step_rank=2), model=OWN | ONE, rate=FAST),
    "first order K=1": Entry(spec=gradmem(1, order="first")),
    "RMT, 2 writes": rmt(steps=2),
    "LaCT": lact(),
    "RMT, 8 times the compute": rmt(times=8.0),
    "RMT, 2 writes, 8 times the compute": rmt(steps=2, times=8.0),
    "ARMT, 4 times the compute": armt(features=16, order=3, times=4.0),
    "LaCT, 4 times the compute": lact(times=4.0),
}


def blind(pairs: int) -> float:
    """Exact match of the best answer that ignores the key: always the most frequent value of the context.

    A count is above m unless all are at most m, of which the chance is pairs! / symbols^pairs [x^pairs] (sum over j <= m of x^j / j!)^symbols.

    >>> round(blind(2), 4), round(blind(4), 3)
    (0.5312, 0.337)
    """
    expected = 0.0
    for most in range(pairs):
        powers = [1.0] + [0.0] * pairs
        for _ in range(TASK.symbols):
            powers = [sum(powers[n - j] / math.factorial(j) for j in range(min(n, most) + 1)) for n in range(pairs + 1)]
        expected += 1 - powers[pairs] * math.factorial(pairs) / TASK.symbols**pairs
    return expected / pairs


def draw(pairs: int, generator: torch.Generator) -> Episode:
    """A batch of the task."""
    return TASK.sample(BATCH, pairs=pairs, generator=generator)


def new(entry: Entry, seed: int) -> Trainable[Any]:
    """Before training."""
    torch.manual_seed(seed)
    return make(entry.sizes, entry.spec, name="bench", seed=seed)


def step(memory: Trainable[Any], optimizer: torch.optim.Optimizer, episode: Episode, *, steps: int | None) -> float:
    """One step of training; its exact match."""
    logits = read_episode(memory, written(memory, memory.start(len(episode.context.ids)), episode.context, steps=steps), episode)
    loss = F.cross_entropy(logits.flatten(0, 2), episode.target.ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    if math.isfinite(float(torch.nn.utils.clip_grad_norm_(memory.parameters(), CLIP))):
        optimizer.step()
    return float(right(logits.detach(), episode).float().mean())


def optimizer_of(memory: Trainable[Any], entry: Entry) -> torch.optim.Optimizer:
    return torch.optim.AdamW(memory.parameters(), lr=entry.rate, betas=(0.9, 0.95), weight_decay=0.0)


def climb(
    entry: Entry,
    seed: int,
    ladder: Sequence[int],
    *,
    draw: Callable[[int, torch.Generator], Episode],
    left: Callable[[int, int, int, float], bool],
    factor: Callable[[int, int, int], float] = lambda *_: 1.0,
) -> tuple[Trainable[Any], list[list[Any]]]:
    """Train a new memory at sizes of the task that grow.

    Args:
        ladder: Sizes, in order.
        draw: A batch of a size.
        left: Whether a size is left, from its place in the ladder, the step that it began with, this step, and the running exact match.
        factor: Of the rate, after the warm-up; from the first three of these.
    Returns:
        The memory, and of each size its steps and the running exact match at its end.
    """
    memory, generator = new(entry, seed), torch.Generator().manual_seed(1000 + seed)
    optimizer, taken, stages = optimizer_of(memory, entry), 0, list[list[Any]]()
    for place, size in enumerate(ladder):
        first, running = taken, 0.0
        while not left(place, first, taken, running):
            for group in optimizer.param_groups:
                group["lr"] = entry.rate * min(1.0, (taken + 1) / WARM_UP) * factor(place, first, taken)
            running += SMOOTHING * (step(memory, optimizer, draw(size, generator), steps=entry.steps) - running)
            taken += 1
        stages.append([size, taken - first, round(running, 3)])
    return memory, stages


def falling(left: float) -> float:
    """Factor of the rate along a cosine, of the share of the fall that is left.

    >>> falling(1.0), falling(0.0)
    (1.0, 0.05)
    """
    return LAST_RATE + (1 - LAST_RATE) * (1 - math.cos(math.pi * left)) / 2


def run(name: str, entry: Entry, seed: int, *, scale: str, cost: float) -> Row:
    """Train at smaller numbers of pairs until each is learned, then at that of the scale with a rate that falls along a cosine; and measure."""
    pairs, smaller, reference = SCALES[scale]
    ladder, count, began = (*entry.first, *smaller, pairs), max(2, round(entry.times * reference / cost)), time.process_time()
    final = len(ladder) - 1
    ends = [*(round(LONGEST * count * number / final) for number in range(1, len(ladder))), count]
    memory, stages = climb(
        entry,
        seed,
        ladder,
        draw=draw,
        left=lambda place, _, taken, running: taken >= ends[place] or (place < final and running >= PASSED),
        factor=lambda place, first, taken: falling((count - taken) / (count - first)) if place == final else 1.0,
    )
    spent = round(time.process_time() - began, 1)
    about = {"reference": reference, "cost": cost, "stages": stages, "entry": dataclasses.asdict(entry), "torch": str(torch.__version__)}
    steps = sum(taken for _, taken, _ in stages)
    return {
        "memory": name, "pairs": pairs, "seed": seed, **measured(memory, entry, pairs=pairs), "steps": steps, "cpu_seconds": spent, "spec": about,
    }  # fmt: skip


def measured(memory: Trainable[Any], entry: Entry, *, pairs: int) -> Row:
    """Exact match on fresh contexts, with the write of training; bytes and operations of one context."""
    steps = entry.steps
    (row,) = exact_match(memory, TASK, pairs=pairs, steps=None if steps is None else [steps], contexts=CONTEXTS, seed=77)
    cost = cost_of(memory, TASK.sample(1, pairs=pairs, generator=torch.Generator().manual_seed(0)), steps=steps)
    return {
        "exact_match": round(row.exact_match, 4), "standard_error": round(row.standard_error, 4), "bytes": cost.bytes,
        "write_flops": cost.write.total, "read_flops": cost.read.total,
    }  # fmt: skip


def resumed(
    entries: Mapping[str, Entry], place: Path, *, seeds: Sequence[int], scale: str, minutes: float, costs_at: Path | None = None
) -> list[Row]:
    """Rows of every memory and seed; those that stand in `place` are passed over, and every new one is written at once.

    Args:
        minutes: CPU minutes after which no run is begun.
        costs_at: Other rows of costs than `COSTS`.
    """
    rows, costs = read_lines(place), relative_costs(entries, costs_at or COSTS)
    for seed in seeds:
        for name, entry in entries.items():
            if any((row["memory"], row["seed"]) == (name, seed) for row in rows):
                continue
            if time.process_time() > 60 * minutes:
                return rows
            found = run(name, entry, seed, scale=scale, cost=costs[name])
            rows = [*read_lines(place), found]  # another process may have measured other runs
            write_lines(place, rows)
            print(name, seed, {key: found[key] for key in ("exact_match", "bytes", "steps", "cpu_seconds")}, found["spec"]["stages"], flush=True)
    return rows


def relative_costs(entries: Mapping[str, Entry], place: Path) -> dict[str, float]:
    """CPU time of a training step of each memory over that of GradMem K = 2; measured where `place` has no row of it."""
    rows = read_lines(place)
    known = {row["memory"] for row in rows}
    for name, entry in entries.items():
        if name not in known:
            cost = cost_over(entry, MEMORIES["GradMem K=2"], lambda generator: draw(COST_PAIRS, generator))
            rows.append({"memory": name, "pairs": COST_PAIRS, "cost": cost, "torch": str(torch.__version__)})
            write_lines(place, rows)
    return {row["memory"]: row["cost"] for row in rows}


def cost_over(entry: Entry, reference: Entry, sample: Callable[[torch.Generator], Episode], *, rounds: int = 5) -> float:
    """Median CPU time of a training step over that of another memory right before it."""
    own, other = stepper(entry, sample), stepper(reference, sample)
    return round(sorted(own() / other() for _ in range(rounds))[rounds // 2], 3)


def stepper(entry: Entry, sample: Callable[[torch.Generator], Episode]) -> Callable[[], float]:
    """Takes one training step at each call, and gives its CPU seconds; the first is behind it."""
    memory, generator = new(entry, 0), torch.Generator().manual_seed(0)
    optimizer = optimizer_of(memory, entry)

    def once() -> float:
        began = time.process_time()
        step(memory, optimizer, sample(generator), steps=entry.steps)
        return time.process_time() - began

    once()
    return once


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, cost in relative_costs(MEMORIES, COSTS).items():
        print(f"{name:28} {cost:.2f}")
