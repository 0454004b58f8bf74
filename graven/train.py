"""Training of a memory and the small model that it is of, through write and read, on a task with known answers.

The loop itself is `graven.training`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from graven import training
from graven.errors import ModelError, SpecError
from graven.layers.decoder import DecoderSpec
from graven.measure import read_episode, right
from graven.memory.base import Trainable, written
from graven.memory.kinds import MemorySpec, make, takes_steps
from graven.report import figure
from graven.settings import build, read_toml
from graven.tasks.babi import Babi
from graven.tasks.base import Episode
from graven.tasks.phonebook import Phonebook
from graven.tasks.retrieval import Retrieval
from graven.tasks.stories import Stories
from graven.training import FORMAT, Job, Optimizer, Part, check_run

__all__ = ["Optimizer", "Stage", "TrainSpec", "Trained", "draw_curve", "load_trained", "longest", "new_memory", "read_spec", "train"]

PADDING = -100  # where a target has no token; counts in no loss


@dataclass(frozen=True, kw_only=True)
class Stage(training.Stage):
    """One stretch of training, as of `training.Stage`.

    Args:
        pairs: Sizes of context, N; one is drawn for each step.
        steps: Left out for memories whose write takes none.
    """

    pairs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.pairs or min(self.pairs) < 1 or min(self.steps, default=0) < 0 or self.at_most < 1:
            raise SpecError("a stage needs `pairs` of at least 1, `steps` of at least 0 and `at_most` of at least 1.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything that a run depends on; the same spec and seed give the same bits on one machine."""

    seed: int
    task: Retrieval | Phonebook | Stories | Babi
    model: DecoderSpec
    memory: MemorySpec
    optimizer: Optimizer
    stage: tuple[Stage, ...]
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        if self.model.vocabulary != self.task.vocabulary:
            raise SpecError(
                f"`model.vocabulary` is {self.model.vocabulary} and the task has {self.task.vocabulary} tokens, its marks included; make them equal."
            )
        check_run(self)
        if any(bool(stage.steps) != takes_steps(self.memory) for stage in self.stage):
            says = "is written in steps; give `steps` in" if takes_steps(self.memory) else "is not written in steps; leave `steps` out of"
            raise SpecError(f'a memory of kind "{self.memory.kind}" {says} every [[stage]].')
        most = max(max(stage.pairs) for stage in self.stage)
        if isinstance(self.task, Retrieval | Phonebook) and most > self.task.keys:
            raise SpecError(f"a stage has {most} `pairs` and the task {self.task.keys} different keys; lower `pairs` or raise `key_length`.")


@dataclass(frozen=True)
class Trained:
    """A finished checkpoint: the memory with its model, and the spec it came from."""

    memory: Trainable[Any]
    spec: TrainSpec
    about: dict[str, Any]


def read_spec(path: Path) -> TrainSpec:
    """A spec from its TOML file.

    Raises:
        SpecError: It is missing, is no TOML, or has a wrong field.
    """
    return build(TrainSpec, read_toml(path), where=path.name)


def longest(spec: training.RunSpec) -> int:
    """Most steps that a run can take."""
    return sum(stage.at_most for stage in spec.stage)


def new_memory(spec: TrainSpec, *, name: str) -> Trainable[Any]:
    """Model and memory at the start of a run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return make(spec.model, spec.memory, name=name, seed=spec.seed)


def train(
    spec: TrainSpec,
    out: Path,
    *,
    resume: bool = False,
    workers: int = 1,
    report: Callable[[dict[str, Any]], None] | None = None,
    stop_after: int | None = None,
) -> Trained | None:
    """Train to the end of the last stage, or for `stop_after` more steps.

    Args:
        spec: What to train.
        out: Folder of the run; made where it is missing.
        resume: Go on from the folder's last whole checkpoint.
        workers: Micro-batches that are computed side by side, a thread each; any number gives the same bits, and so do processes (`training.run`).
        report: Called with each row of the learning curve.
    Returns:
        The checkpoint, or None where `stop_after` came first.
    Raises:
        OutputError: The folder holds a run and `resume` was not asked for, or cannot be written to.
        SpecError: The folder's run is of another spec, `workers` is below 1, or there are more processes than micro-batches.
    """
    memory = new_memory(spec, name=out.name)
    job = Job(spec=spec, weights=dict(memory.named_parameters()), batch=partial(_batch, spec, memory), draw=draw_curve)
    about = training.run(job, out, resume=resume, workers=workers, report=report, stop_after=stop_after)
    return None if about is None else Trained(memory.eval(), spec, about)


def _batch(spec: TrainSpec, memory: Trainable[Any], stage: Stage, generator: torch.Generator) -> tuple[dict[str, Any], list[Callable[[], Part]]]:
    """One batch: a number of pairs, a number of write steps, and the contexts of each micro-batch."""
    pairs = stage.pairs[int(torch.randint(len(stage.pairs), (1,), generator=generator))]
    steps = stage.steps[int(torch.randint(len(stage.steps), (1,), generator=generator))] if stage.steps else None
    size, count = spec.optimizer.micro_batch, spec.optimizer.batch // spec.optimizer.micro_batch
    episodes = [spec.task.sample(size, pairs=pairs, generator=generator) for _ in range(count)]
    tokens = [int(episode.target.mask.sum()) for episode in episodes]
    shares = [count * own / sum(tokens) for own in tokens]  # the loss is the mean over the tokens of the batch, however it is cut
    return {"pairs": pairs, "steps": steps}, [partial(_part, memory, episode, steps, share) for episode, share in zip(episodes, shares, strict=True)]


def _part(memory: Trainable[Any], episode: Episode, steps: int | None, share: float) -> Part:
    """Loss, exact match and gradients of one micro-batch, of which the loss counts `share` times."""
    state = written(memory, memory.start(len(episode.context.ids)), episode.context, steps=steps)
    logits = read_episode(memory, state, episode)
    wanted = episode.target.ids.masked_fill(~episode.target.mask, PADDING)
    loss = share * F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=PADDING)
    gradients = torch.autograd.grad(loss, list(memory.parameters()), allow_unused=True)
    return float(loss.detach()), float(right(logits.detach(), episode).float().mean()), gradients


def load_trained(folder: Path, *, name: str) -> Trained:
    """A finished checkpoint.

    Raises:
        ModelError: The folder holds none, or it is not whole.
    """
    try:
        about = json.loads((folder / "model.json").read_bytes())
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r} and this graven reads {FORMAT}")
        spec = build(TrainSpec, about["spec"], where="model.json")
        memory = new_memory(spec, name=name)
        training.put(load_file(folder / "model.safetensors"), into=dict(memory.named_parameters()))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{folder} holds no whole graven checkpoint ({str(error).splitlines()[0][:120]}); train it again or fetch it anew."
        ) from error
    return Trained(memory.eval(), spec, about)


def draw_curve(path: Path, curve: list[dict[str, Any]]) -> None:
    """Exact match and loss against CPU minutes, one colour for each number of pairs."""
    with figure(path, columns=2) as (left, centre):
        for pairs in sorted({row["pairs"] for row in curve}):
            rows = [row for row in curve if row["pairs"] == pairs]
            minutes = [row["cpu_seconds"] / 60 for row in rows]
            left.plot(minutes, [row["exact_match"] for row in rows], ".", ms=2, label=f"{pairs} pairs")
            centre.plot(minutes, [row["loss"] for row in rows], ".", ms=2)
        left.set(xlabel="CPU minutes", ylabel="exact match", ylim=(0, 1.02))
        centre.set(xlabel="CPU minutes", ylabel="read loss", yscale="log")
        if curve:
            left.legend(markerscale=4, frameon=False)
