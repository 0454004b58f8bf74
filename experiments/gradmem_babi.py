"""Questions about bAbI's stories, QA1 to QA5, from every memory at equal compute.                               arXiv:2603.13875v2, table 2

Claim    A memory written by gradient steps answers QA1 and QA4 always and QA2, QA3 and QA5 in 80 to 99 %, as RMT and ARMT do: on short stories with
         one question each memories hardly differ.
Differs  The paper trains GPT-2 of 124 million weights, pretrained, on the 10 000 questions of each task. Here a decoder of two layers of width 64
         begins at nothing for each task, words are tokens, and training is on stories that `graven.tasks.stories` tells, of at most ten sentences,
         of QA2 and QA3 with questions about people and things beside the task's own. No story of bAbI is trained on; what leaks where one trains
         on its own files is printed by --report. Measured are bAbI's own test questions: those whose story is no longer than those of training (all
         of QA1 and QA4, 307, 36 and 278 of the 1000 of QA2, QA3 and QA5) and, apart, those of up to twice that length; 300 of each at most. A
         convolution over seven embeddings that begins as their sum is part of every memory. Compute is that of 250 to 350 training steps of
         GradMem K = 2 (`STEPS`). Nothing is tuned: ARMT and LaCT have other settings than the tuned ones of gradmem_bench.py.
Cost     --scale full: 80 to 115 CPU seconds a memory and task; resumable. Committed: seed 0 of QA1, QA4, QA5; three of QA1, seed 1. (measured)

    python experiments/gradmem_babi.py [--scale full --memory RMT --seed 0 --minutes 30]        train and measure what has no row yet
    python experiments/gradmem_babi.py --report                                                 table, figure and verdict from the rows
"""

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gradmem_bench import CLIP, FIGURES, LAST_RATE, ROWS, WARM_UP, Row
from gradmem_cell import spread
from torch.nn import functional as F

from graven.cost import cost_of
from graven.layers.decoder import DecoderSpec
from graven.layers.delta_net import DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttentionSpec
from graven.layers.lact import LaCTSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.layers.ttt import TTTSpec
from graven.measure import read_episode, right
from graven.memory.associative import ARMTSpec
from graven.memory.base import Trainable, written
from graven.memory.cache import CacheSpec
from graven.memory.forward import RMTSpec
from graven.memory.gradient import GradMemSpec
from graven.memory.kinds import MemorySpec, make, takes_steps
from graven.memory.prefix import PrefixSpec
from graven.memory.recurrent import RecurrentSpec
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.babi import batches, leaked, read_babi
from graven.tasks.stories import KINDS, Stories, Story
from graven.tasks.world import VOCABULARY

DATA = Path(__file__).parents[2] / "shared" / "data" / "babi"
# sentences of training, by task; each size is left when it is learned, or when it took half of the steps that were left
LADDERS = {1: (4, 6, 8, 10), 2: (2, 3, 4, 6, 8, 10), 3: (4, 6, 8, 10), 4: (2,), 5: (6, 8, 10)}
STEPS = {1: 300, 2: 350, 3: 250, 4: 300, 5: 250}  # training steps of GradMem K = 2; other memories take as many as cost the same
HANGING = (2, 3)  # tasks whose answers hang on where people are, who are asked for too
SCALES = {"small": (0.02, 20), "full": (1.0, 300)}  # share of the steps, and most questions of each task and length
WIDTH, BATCH, PASSED, SMOOTHING, LONGEST = 64, 32, 0.8, 0.1, 10
LENGTHS = {"short": (0, LONGEST), "longer": (LONGEST, 2 * LONGEST)}  # sentences above, and at most
# per cent; the paper's table 2
PAPER = {
    "full context": (100, 100, 99.8, 100, 99.4), "Mamba-130m": (100, 100, 96.7, 100, 99.7), "RMT": (100, 93.9, 87.9, 100, 93.9),
    "ARMT": (100, 93.8, 92.3, 100, 98.9), "GradMem K=1": (100, 94.2, 80.0, 100, 99.2),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One memory: what to build, the rate of AdamW, and what of the model is another."""

    spec: MemorySpec
    rate: float = 3e-3
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> DecoderSpec:
        """The model."""
        shape = {"width": WIDTH, "layers": 2, "heads": 4, "key_value_heads": 4, "hidden": 2 * WIDTH, "convolution": 7, "convolution_start": 0.5}
        return DecoderSpec(**{"vocabulary": len(VOCABULARY), "embedding_std": 1.0, **shape, **self.model})

    @property
    def steps(self) -> int | None:
        """Of the write."""
        return self.spec.steps if takes_steps(self.spec) else None  # type: ignore[union-attr]  # those that take steps have the field


def gradmem(steps: int) -> Entry:
    return Entry(spec=GradMemSpec(slots=8, steps=steps, write_head=True, start=0.02, keep=8))


HEADS = {"heads": 4, "key_width": 16, "value_width": 16}
MEMORIES = {
    "GradMem K=2": gradmem(2),
    "KV cache": Entry(spec=CacheSpec()),
    "RMT": Entry(spec=RMTSpec(slots=8)),
    "DeltaNet": Entry(spec=RecurrentSpec(mixer=DeltaNetSpec(width=WIDTH, convolution=1, **HEADS))),
    "GradMem K=1": gradmem(1),
    "GLA": Entry(spec=RecurrentSpec(mixer=GatedLinearAttentionSpec(width=WIDTH, key_value_heads=4, **HEADS))),
    "prefix K=2": Entry(spec=PrefixSpec(slots=2, steps=2, write_head=True, keep=8, rate_keys=40.0, rate_values=40.0, start=0.1)),
    "Mamba-2": Entry(spec=RecurrentSpec(mixer=Mamba2Spec(width=WIDTH, inner=128, heads=4, memory=16)), model={"key_value_heads": 1}),
    "Mamba": Entry(spec=RecurrentSpec(mixer=MambaSpec(width=WIDTH, inner=128, memory=8, step_rank=4)), model={"heads": 1, "key_value_heads": 1}),
    "TTT-Linear": Entry(spec=RecurrentSpec(mixer=TTTSpec(width=WIDTH, heads=4))),
    "ARMT": Entry(spec=ARMTSpec(slots=4, features=8, order=1, segment=8)),
    "LaCT": Entry(spec=RecurrentSpec(mixer=LaCTSpec(width=WIDTH, heads=4, hidden=16, chunk=8, window=8, momentum=False, rate=0.1))),
}


def new(entry: Entry, seed: int) -> Trainable[Any]:
    """Before training."""
    torch.manual_seed(seed)
    return make(entry.sizes, entry.spec, name="bench", seed=seed)


def stories_of(task: int) -> Stories:
    """What a task is trained on."""
    return Stories(kinds=(KINDS[task - 1],), queries=4, everything=task in HANGING)


def step(memory: Trainable[Any], entry: Entry, optimizer: torch.optim.Optimizer, *, task: int, sentences: int, generator: torch.Generator) -> float:
    """One step of training; its exact match."""
    episode = stories_of(task).sample(BATCH, pairs=sentences, generator=generator)
    logits = read_episode(memory, written(memory, memory.start(BATCH), episode.context, steps=entry.steps), episode)
    optimizer.zero_grad()
    F.cross_entropy(logits.flatten(0, 2), episode.target.ids.flatten()).backward()
    if math.isfinite(float(torch.nn.utils.clip_grad_norm_(memory.parameters(), CLIP))):
        optimizer.step()
    return float(right(logits.detach(), episode).float().mean())


def optimizer_of(memory: Trainable[Any], entry: Entry) -> torch.optim.Optimizer:
    return torch.optim.AdamW(memory.parameters(), lr=entry.rate, betas=(0.9, 0.95), weight_decay=0.0)


def seconds_of(entry: Entry) -> float:
    """CPU seconds of one training step, the second one."""
    memory, generator = new(entry, 0), torch.Generator().manual_seed(0)
    optimizer = optimizer_of(memory, entry)
    for _ in range(2):
        began = time.process_time()
        step(memory, entry, optimizer, task=1, sentences=LONGEST, generator=generator)
    return time.process_time() - began


def cost(entry: Entry, *, rounds: int = 5) -> float:
    """Median CPU time of a training step over that of GradMem K = 2, measured one about the other."""
    return sorted(seconds_of(entry) / seconds_of(MEMORIES["GradMem K=2"]) for _ in range(rounds))[rounds // 2]


def train(entry: Entry, task: int, seed: int, *, steps: int) -> tuple[Trainable[Any], list[list[float]]]:
    """Through the sizes, so many steps in all; the rate falls along a cosine over the last third.

    Returns:
        The memory, and of each size its sentences, its steps, and the running exact match at its end.
    """
    memory, generator = new(entry, seed), torch.Generator().manual_seed(1000 + seed)
    optimizer, ladder, taken, stages = optimizer_of(memory, entry), LADDERS[task], 0, list[list[float]]()
    for place, sentences in enumerate(ladder, start=1):
        first, running, final = taken, 0.0, place == len(ladder)
        last = steps if final else taken + max(1, (steps - taken) // 2)
        while taken < last and (final or running < PASSED):
            left = min(1.0, (steps - taken) / (steps / 3))
            rate = entry.rate * min(1.0, (taken + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * (1 - math.cos(math.pi * left)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
            running += SMOOTHING * (step(memory, entry, optimizer, task=task, sentences=sentences, generator=generator) - running)
            taken += 1
        stages.append([sentences, taken - first, round(running, 3)])
    return memory.eval(), stages


@torch.no_grad()
def answered(memory: Trainable[Any], entry: Entry, stories: Sequence[Story]) -> float | None:
    """Exact match; None where there is no story."""
    hits = 0
    for episode in batches(stories, 20):
        state = written(memory, memory.start(len(episode.context.ids)), episode.context, steps=entry.steps)
        hits += int(right(read_episode(memory, state, episode), episode).sum())
    return round(hits / len(stories), 4) if stories else None


def measure(memory: Trainable[Any], entry: Entry, stories: Sequence[Story], *, most: int) -> Row:
    """Exact match on test questions of each length, and how many there were."""
    groups = {name: [s for s in stories if low < len(s.sentences) <= high][:most] for name, (low, high) in LENGTHS.items()}
    short, longer = groups["short"], groups["longer"]
    found = {"exact_match": answered(memory, entry, short), "longer_exact_match": answered(memory, entry, longer)}
    return {**found, "questions": len(short), "longer_questions": len(longer)}


def questions_of(task: int) -> list[Story]:
    """bAbI's own test questions of a task."""
    return read_babi(next((DATA / "en").glob(f"qa{task}_*_test.txt")))


def run(name: str, task: int, seed: int, *, scale: str, relative: float) -> Row:
    """One memory, task and seed."""
    entry, (share, most) = MEMORIES[name], SCALES[scale]
    began = time.process_time()
    memory, stages = train(entry, task, seed, steps=max(len(LADDERS[task]), round(share * STEPS[task] / relative)))
    spent = round(time.process_time() - began, 1)
    counted = cost_of(memory, stories_of(1).sample(1, pairs=LONGEST, generator=torch.Generator().manual_seed(0)), steps=entry.steps)
    about = {"cost": relative, "stages": stages, "entry": dataclasses.asdict(entry), "torch": str(torch.__version__)}
    return {
        "memory": name, "task": f"QA{task}", "seed": seed, **measure(memory, entry, questions_of(task), most=most), "pairs": LADDERS[task][-1],
        "bytes": counted.bytes, "write_flops": counted.write.total, "steps": sum(int(n) for _, n, _ in stages), "cpu_seconds": spent, "spec": about,
    }  # fmt: skip


def mean(rows: Sequence[Row], memory: str, task: int, what: str = "exact_match") -> float:
    values = [row[what] for row in rows if (row["memory"], row["task"]) == (memory, f"QA{task}")]
    return 100 * sum(values) / len(values)


def shared(rows: Sequence[Row], *memories: str) -> list[int]:
    """Tasks of which each of these memories has rows."""
    found = {(row["memory"], row["task"]) for row in rows}
    return [task for task in LADDERS if all((memory, f"QA{task}") in found for memory in memories)]


def verdict(rows: list[Row]) -> list[str]:
    """What the paper's table says, of stories no longer than those of training and of the tasks that have rows."""
    lines = []
    for name in ("GradMem K=2", "RMT", "KV cache"):
        if {1, 4} <= set(shared(rows, name)):
            low = min(mean(rows, name, task) for task in (1, 4))
            lines.append(f"{'holds' if low >= 99 else 'FAILS'}   {name} answers QA1 and QA4 in at least 99 %: the lower one {low:.1f}")
    if tasks := shared(rows, "GradMem K=1", "GradMem K=2"):
        gain = sum(mean(rows, "GradMem K=2", task) - mean(rows, "GradMem K=1", task) for task in tasks) / len(tasks)
        lines.append(f"{'holds' if gain < 2 else 'FAILS'}   a second step gains less than 2 points on the mean of the tasks: {gain:+.1f}")
    if tasks := shared(rows, "RMT", "GradMem K=2"):
        most = max(abs(mean(rows, "GradMem K=2", task) - mean(rows, "RMT", task)) for task in tasks)
        lines.append(f"{'holds' if most < 10 else 'FAILS'}   GradMem and RMT differ by less than 10 points on every task: {most:.1f}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """A group of bars for each task; every seed a dot."""
    names, tasks = list(dict.fromkeys(row["memory"] for row in rows)), sorted({row["task"] for row in rows})
    wide = 0.8 / len(names)
    with figure(path, width=11, height=3.8) as (axes,):
        for number, name in enumerate(names):
            for task in shared(rows, name):
                at = tasks.index(f"QA{task}") + (number - (len(names) - 1) / 2) * wide
                bar = axes.bar(at, mean(rows, name, task), wide, color=f"C{number % 10}", alpha=1.0 if number < 10 else 0.5)
                if task == 1:
                    bar.set_label(name)
                own = [100 * row["exact_match"] for row in rows if (row["memory"], row["task"]) == (name, f"QA{task}")]
                axes.plot([at] * len(own), own, "k.", ms=2)
        axes.set(ylabel="exact match, %", ylim=(0, 101), xticks=range(len(tasks)), title=f"bAbI, stories of at most {LONGEST} sentences")
        axes.set_xticklabels(tasks)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def report(rows: list[Row]) -> None:
    """Scores of short stories and of all, compute, and what leaks where one trains on bAbI's own files."""
    for what, title in (("exact_match", f"stories of at most {LONGEST} sentences"), ("longer_exact_match", f"of at most {2 * LONGEST}")):
        groups: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row[what] is not None:
                groups.setdefault((row["memory"], row["task"]), []).append(row[what])
        cells = [{"memory": memory, "task": task, "value": spread(values)} for (memory, task), values in groups.items()]
        print(f"{title}: exact match, % (worst and best seed)\n{table(cells, row='memory', column='task', value=lambda c: c['value'])}\n")
    facts = [{"memory": row["memory"], "fact": fact, "value": f"{row[fact]:,}"} for row in rows for fact in ("bytes", "steps", "cpu_seconds")]
    print(table(facts, row="memory", column="fact", value=lambda c: c["value"]))
    paper = [{"memory": name, "task": f"QA{task}", "value": str(found[task - 1])} for name, found in PAPER.items() for task in LADDERS]
    print(f"\nthe paper's table 2 (GPT-2, trained on bAbI)\n{table(paper, row='memory', column='task', value=lambda c: c['value'])}\n")
    print("questions, and of longer stories:", {row["task"]: (row["questions"], row["longer_questions"]) for row in rows})
    for task in (1, 2, 4, 5) if DATA.exists() else ():
        count = leaked(read_babi(next((DATA / "en-10k").glob(f"qa{task}_*_train.txt"))), questions_of(task))
        print(f"QA{task}: {count} of 1000 test questions stand in the 10 000 of training with the same story; nobody here saw those")


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--seed", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument("--task", type=int, nargs="+", choices=LADDERS, default=list(LADDERS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="CPU minutes after which no run is begun")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = ROWS / "gradmem_babi.jsonl" if arguments.report or arguments.scale == "full" else Path(folder) / "rows.jsonl"
        rows = read_lines(place)
        for seed, name in () if arguments.report else product(arguments.seed, arguments.memory):
            missing = [task for task in arguments.task if not any((r["memory"], r["task"], r["seed"]) == (name, f"QA{task}", seed) for r in rows)]
            relative = round(cost(MEMORIES[name]), 3) if missing else 1.0
            for task in missing:
                if time.process_time() < 60 * arguments.minutes:
                    found = run(name, task, seed, scale=arguments.scale, relative=relative)
                    rows = [*read_lines(place), found]  # another process may have measured other cells
                    write_lines(place, rows)
                    print(name, f"QA{task}", seed, found["exact_match"], found["longer_exact_match"], found["spec"]["stages"], flush=True)
        if arguments.report:
            draw(rows, FIGURES / "gradmem_babi.png")
        report(rows)
        print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
