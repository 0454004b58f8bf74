"""The one training loop: a memory and the small model that it is of, learned through write and read on a task with known answers.

A run is a folder. `resume.safetensors` holds everything that the next step depends on and is replaced as a whole, so a run that was killed goes
on with `resume=True` and ends with the same bits as one that was not. The finished checkpoint is `model.safetensors` with `model.json`.
"""

import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from graven.errors import ModelError, OutputError, SpecError
from graven.layers.decoder import DecoderSpec
from graven.measure import read_episode, right
from graven.memory.base import Trainable, written
from graven.memory.kinds import MemorySpec, make, takes_steps
from graven.report import figure, read_lines, write_atomically, write_lines
from graven.settings import build, read_toml, table_of
from graven.tasks.base import Episode
from graven.tasks.phonebook import Phonebook
from graven.tasks.retrieval import Retrieval

FORMAT = 1
SMOOTHING = 0.1  # weight of the newest step in the running exact match that gates a stage
PADDING = -100  # where a target has no token; counts in no loss
LAST_RATE = 0.05  # where a cosine ends, as a share of the rate


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stretch of training.

    Args:
        pairs: Sizes of context, N; one is drawn for each step.
        steps: Numbers of write steps, K; one is drawn for each step. Left out for memories that take none.
        at_most: Training steps after which the stage ends in any case.
        until: Running exact match that ends it earlier.
        rate: The optimizer's rate in this stage; that of [optimizer] where left out.
        decay_over: Steps of a cosine along which the rate falls to 5 % of itself; 0 for a constant rate. May be longer than the stage.
    """

    pairs: tuple[int, ...]
    at_most: int
    steps: tuple[int, ...] = ()
    until: float = 2.0
    rate: float | None = None
    decay_over: int = 0

    def __post_init__(self) -> None:
        if not self.pairs or min(self.pairs) < 1 or min(self.steps, default=0) < 0 or self.at_most < 1:
            raise SpecError("a stage needs `pairs` of at least 1, `steps` of at least 0 and `at_most` of at least 1.")
        if self.rate is not None and not self.rate > 0:
            raise SpecError(f"`rate` is {self.rate}; it must be above 0.")
        if self.decay_over and self.decay_over < self.at_most:
            raise SpecError(f"`decay_over` is {self.decay_over} and `at_most` is {self.at_most}; a cosine must last as long as its stage, or be 0.")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW without weight decay.

    Args:
        rate: Its step size after the warm-up.
        batch: Contexts in a step, B.
        micro_batch: Contexts that are in memory at once; small ones are also faster where they fit the cache.
        warm_up: Steps in which the rate rises from 0.
        betas: Decay of the two moments.
        clip: Largest norm of the gradient.
    """

    rate: float = 1e-3
    batch: int = 32
    micro_batch: int = 8
    warm_up: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.micro_batch < 1 or self.batch % self.micro_batch:
            raise SpecError(f"`batch` is {self.batch} and `micro_batch` is {self.micro_batch}; the first must be a multiple of the second.")


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything that a run depends on; the same spec and seed give the same bits on one machine."""

    seed: int
    task: Retrieval | Phonebook
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
        if not self.stage:
            raise SpecError("the spec has no [[stage]]; add at least one.")
        if any(bool(stage.steps) != takes_steps(self.memory) for stage in self.stage):
            says = "is written in steps; give `steps` in" if takes_steps(self.memory) else "is not written in steps; leave `steps` out of"
            raise SpecError(f'a memory of kind "{self.memory.kind}" {says} every [[stage]].')
        most = max(max(stage.pairs) for stage in self.stage)
        if most > self.task.keys:
            raise SpecError(f"a stage has {most} `pairs` and the task {self.task.keys} different keys; lower `pairs` or raise `key_length`.")
        if not 0 <= self.seed < 1 << 40:
            raise SpecError(f"`seed` is {self.seed}; it must be at least 0 and below 2^40.")
        if self.checkpoint_every < 1:
            raise SpecError(f"`checkpoint_every` is {self.checkpoint_every}; it must be at least 1.")


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    running: float = 0.0
    cpu_seconds: float = 0.0


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


def longest(spec: TrainSpec) -> int:
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
        workers: Micro-batches that are computed side by side, a thread each; any number gives the same bits.
        report: Called with each row of the learning curve.
    Returns:
        The checkpoint, or None where `stop_after` came first.
    Raises:
        OutputError: The folder holds a run and `resume` was not asked for, or cannot be written to.
        SpecError: The folder's run is of another spec, or `workers` is below 1.
    """
    if workers < 1:
        raise SpecError(f"`workers` is {workers}; it must be at least 1.")
    memory = new_memory(spec, name=out.name)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=spec.optimizer.rate, betas=spec.optimizer.betas, weight_decay=0.0)
    progress, curve = _open_run(spec, out, memory, optimizer, resume=resume)
    last = None if stop_after is None else progress.step + stop_after
    if not progress.step:  # from here on an interrupted run can be resumed
        _save_run(spec, out, memory, optimizer, progress, curve)
    with ThreadPoolExecutor(workers) as pool:
        while progress.stage < len(spec.stage) and progress.step != last:
            began = time.process_time()
            row = _step(spec, memory, optimizer, progress, pool)
            progress.cpu_seconds += time.process_time() - began
            curve.append({**row, "cpu_seconds": round(progress.cpu_seconds, 2)})
            if report is not None:
                report(curve[-1])
            if progress.step % spec.checkpoint_every == 0:
                _save_run(spec, out, memory, optimizer, progress, curve)
    _save_run(spec, out, memory, optimizer, progress, curve)
    return _finish(spec, out, memory, progress) if progress.stage == len(spec.stage) else None


def _step(spec: TrainSpec, memory: Trainable[Any], optimizer: torch.optim.Optimizer, progress: Progress, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """One step of the optimizer; its batch depends on seed and step alone, so a resumed run sees the same ones."""
    stage, settings = spec.stage[progress.stage], spec.optimizer
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + progress.step)
    pairs = stage.pairs[int(torch.randint(len(stage.pairs), (1,), generator=generator))]
    steps = stage.steps[int(torch.randint(len(stage.steps), (1,), generator=generator))] if stage.steps else None
    rate = (settings.rate if stage.rate is None else stage.rate) * min(1.0, (progress.step + 1) / max(1, settings.warm_up))
    if stage.decay_over:
        rate *= LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress.stage_step / stage.decay_over)) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate
    episodes = [spec.task.sample(settings.micro_batch, pairs=pairs, generator=generator) for _ in range(settings.batch // settings.micro_batch)]
    for parameter in memory.parameters():  # a write of no steps leaves some without a gradient; AdamW must count the step for all alike
        parameter.grad = torch.zeros_like(parameter)
    loss, exact = 0.0, 0.0
    for part_loss, part_exact, gradients in pool.map(lambda episode: _part(memory, episode, steps), episodes):
        loss += part_loss / len(episodes)
        exact += part_exact / len(episodes)
        for parameter, gradient in zip(memory.parameters(), gradients, strict=True):  # in the order of the parts, whichever was done first
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient, alpha=1 / len(episodes))
    norm = float(torch.nn.utils.clip_grad_norm_(memory.parameters(), settings.clip))
    if math.isfinite(norm):  # one bad batch is passed over, and the row says so
        optimizer.step()
    row = {
        "step": progress.step,
        "stage": progress.stage,
        "pairs": pairs,
        "steps": steps,
        "rate": rate,
        "loss": loss,
        "exact_match": exact,
        "norm": norm,
    }
    progress.running += SMOOTHING * (exact - progress.running)
    progress.step += 1
    progress.stage_step += 1
    if progress.stage_step == stage.at_most or progress.running > stage.until:
        progress.stage, progress.stage_step, progress.running = progress.stage + 1, 0, 0.0
    return row


def _part(memory: Trainable[Any], episode: Episode, steps: int | None) -> tuple[float, float, tuple[Tensor | None, ...]]:
    """Loss, exact match and gradients of one micro-batch."""
    state = written(memory, memory.start(len(episode.context.ids)), episode.context, steps=steps)
    logits = read_episode(memory, state, episode)
    wanted = episode.target.ids.masked_fill(~episode.target.mask, PADDING)
    loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=PADDING)
    gradients = torch.autograd.grad(loss, list(memory.parameters()), allow_unused=True)
    return float(loss.detach()), float(right(logits.detach(), episode).float().mean()), gradients


def _open_run(
    spec: TrainSpec, out: Path, memory: Trainable[Any], optimizer: torch.optim.Optimizer, *, resume: bool
) -> tuple[Progress, list[dict[str, Any]]]:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {out}: {error.strerror}. Choose another with --out.") from error
    place = out / "resume.safetensors"
    if not place.exists():
        if (out / "model.safetensors").exists():
            raise OutputError(f"{out} holds a finished checkpoint; choose another folder with --out.")
        if resume:
            raise OutputError(f"{out} holds no run to resume; leave out --resume to start one.")
        return Progress(), []
    if not resume:
        raise OutputError(f"{out} holds an unfinished run; pass --resume to go on with it, or choose another folder with --out.")
    try:
        with safe_open(place, framework="pt") as file:
            about = json.loads(file.metadata()["graven"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise OutputError(f"{place} is damaged ({str(error)[:80]}); the run cannot go on. Start it anew in another folder with --out.") from error
    if about["spec"] != json.loads(json.dumps(table_of(spec))):
        raise SpecError(f"the run in {out} was started from another spec; resume it with that one, or choose another folder with --out.")
    tensors = load_file(place)
    memory.load_state_dict({name.removeprefix("memory."): x for name, x in tensors.items() if name.startswith("memory.")})
    progress = Progress(**about["progress"])
    for name, parameter in memory.named_parameters():
        if f"first.{name}" in tensors:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(about["updates"])),
                "exp_avg": tensors[f"first.{name}"],
                "exp_avg_sq": tensors[f"second.{name}"],
            }
    return progress, [row for row in read_lines(out / "curve.jsonl") if row["step"] < progress.step]


def _save_run(
    spec: TrainSpec, out: Path, memory: Trainable[Any], optimizer: torch.optim.Optimizer, progress: Progress, curve: list[dict[str, Any]]
) -> None:
    """Learning curve, its picture, and everything that the next step depends on."""
    write_lines(out / "curve.jsonl", curve)
    draw_curve(out / "curve.png", curve)
    tensors = {f"memory.{name}": x for name, x in memory.state_dict().items()}
    updates = 0
    for name, parameter in memory.named_parameters():
        if state := optimizer.state.get(parameter):
            tensors |= {f"first.{name}": state["exp_avg"], f"second.{name}": state["exp_avg_sq"]}
            updates = int(state["step"])
    about = {"spec": table_of(spec), "progress": dataclasses.asdict(progress), "updates": updates}
    _save(out / "resume.safetensors", tensors, about)


def _finish(spec: TrainSpec, out: Path, memory: Trainable[Any], progress: Progress) -> Trained:
    about = {
        "format": FORMAT,
        "spec": table_of(spec),
        "trained": {
            "steps": progress.step,
            "cpu_seconds": round(progress.cpu_seconds),
            "torch": str(torch.__version__),
            "machine": platform.machine(),
        },
    }
    write_atomically(out / "model.json", lambda temporary: temporary.write_text(json.dumps(about, indent=1) + "\n"))
    _save(out / "model.safetensors", dict(memory.state_dict()), {})
    (out / "resume.safetensors").unlink()
    return Trained(memory.eval(), spec, about)


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
        memory.load_state_dict(load_file(folder / "model.safetensors"))
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


def _save(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    whole = {name: x.detach().contiguous().clone() for name, x in tensors.items()}
    write_atomically(path, lambda temporary: save_file(whole, temporary, metadata={"graven": json.dumps(about)}))
