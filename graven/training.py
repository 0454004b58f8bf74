"""The loop that every training shares: AdamW with warm-up and cosine, micro-batches side by side, and a folder that survives a kill.

A run is a folder. `resume.safetensors` holds everything that the next step depends on and is replaced as a whole, so a run that was killed goes
on with `resume=True` and ends with the same bits as one that was not. The finished checkpoint is `model.safetensors` with `model.json`.
What is trained, and on what, is a `Job`.
"""

import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from graven.errors import OutputError, SpecError
from graven.processes import Processes, here
from graven.report import read_lines, write_atomically, write_lines
from graven.settings import table_of

FORMAT = 1
SMOOTHING = 0.1  # weight of the newest step in the running exact match that gates a stage
LAST_RATE = 0.05  # where a cosine ends, as a share of the rate

Part = tuple[float, float, Sequence[Tensor | None]]  # loss, exact match, and a gradient for each weight, of one micro-batch
Curve = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stretch of training.

    Args:
        steps: Numbers of write steps, K; one is drawn for each step.
        at_most: Training steps after which the stage ends in any case.
        until: Running exact match that ends it earlier.
        rate: The optimizer's rate in this stage; that of [optimizer] where left out.
        decay_over: Steps of a cosine along which the rate falls to 5 % of itself; 0 for a constant rate. May be longer than the stage.
    """

    at_most: int
    steps: tuple[int, ...] = ()
    until: float = 2.0
    rate: float | None = None
    decay_over: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, default=0) < 0 or self.at_most < 1:
            raise SpecError("a stage needs `steps` of at least 0 and `at_most` of at least 1.")
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


@runtime_checkable  # for the shape checks of the tests
class RunSpec(Protocol):
    """What the loop reads of a spec; the spec is a frozen dataclass."""

    @property
    def seed(self) -> int: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def stage(self) -> Sequence[Stage]: ...
    @property
    def checkpoint_every(self) -> int: ...


def check_run(spec: RunSpec) -> None:
    """Pass where the loop can run a spec.

    Raises:
        SpecError: It has no stage, or a number is out of range.
    """
    if not spec.stage:
        raise SpecError("the spec has no [[stage]]; add at least one.")
    if not 0 <= spec.seed < 1 << 40:
        raise SpecError(f"`seed` is {spec.seed}; it must be at least 0 and below 2^40.")
    if spec.checkpoint_every < 1:
        raise SpecError(f"`checkpoint_every` is {spec.checkpoint_every}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Args:
        spec: A frozen dataclass.
        weights: What the optimizer moves, and what a checkpoint holds.
        batch: Draws the batch of one step from (stage, generator): facts for the row of the curve, and a call for each micro-batch.
        draw: Draws the curve to a PNG.
        origin: What else the result depends on, such as the hash of a data file; a run resumes only where it is the same.
    """

    spec: RunSpec
    weights: Mapping[str, nn.Parameter]
    batch: Callable[[Any, torch.Generator], tuple[dict[str, Any], list[Callable[[], Part]]]]
    draw: Callable[[Path, Curve], None]
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    running: float = 0.0
    cpu_seconds: float = 0.0


def run(
    job: Job, out: Path, *, resume: bool, workers: int, report: Callable[[dict[str, Any]], None] | None, stop_after: int | None
) -> dict[str, Any] | None:
    """Train to the end of the last stage, or for `stop_after` more steps.

    Args:
        job: What to train.
        out: Folder of the run; made where it is missing.
        resume: Go on from the folder's last whole checkpoint.
        workers: Micro-batches that are computed side by side, a thread each; any number gives the same bits. Processes that torchrun started share
            the micro-batches too, with the same bits again, as long as each runs on one thread; the first of them saves.
        report: Called with each row of the learning curve.
    Returns:
        What `model.json` of the finished checkpoint says, or None where `stop_after` came first.
    Raises:
        OutputError: The folder holds a run and `resume` was not asked for, or cannot be written to.
        SpecError: The folder's run is of another spec, `workers` is below 1, or there are more processes than micro-batches.
    """
    if workers < 1:
        raise SpecError(f"`workers` is {workers}; it must be at least 1.")
    settings, processes = job.spec.optimizer, here()
    if processes.count > (parts := settings.batch // settings.micro_batch):
        raise SpecError(f"torchrun started {processes.count} processes and a step has {parts} micro-batches to share; start at most {parts}.")
    optimizer = torch.optim.AdamW(job.weights.values(), lr=settings.rate, betas=settings.betas, weight_decay=0.0)
    progress, curve = _open(job, out, optimizer, resume=resume)
    processes.wait()  # all have seen the folder as it was
    last = None if stop_after is None else progress.step + stop_after
    if not progress.step and processes.first:  # from here on an interrupted run can be resumed
        _save(job, out, optimizer, progress, curve)
    with ThreadPoolExecutor(workers) as pool:
        while progress.stage < len(job.spec.stage) and progress.step != last:
            began = time.process_time()
            row = _step(job, optimizer, progress, pool, processes)
            progress.cpu_seconds += time.process_time() - began
            curve.append({**row, "cpu_seconds": round(progress.cpu_seconds, 2)})
            if report is not None:
                report(curve[-1])
            if progress.step % job.spec.checkpoint_every == 0 and processes.first:
                _save(job, out, optimizer, progress, curve)
    if processes.first:
        _save(job, out, optimizer, progress, curve)
    done = _finish(job, out, progress, save=processes.first) if progress.stage == len(job.spec.stage) else None
    processes.wait()  # until the checkpoint is whole
    return done


def _step(job: Job, optimizer: torch.optim.Optimizer, progress: Progress, pool: ThreadPoolExecutor, processes: Processes) -> dict[str, Any]:
    """One step of the optimizer; its batch depends on seed and step alone, so a resumed run sees the same ones."""
    stage, settings, weights = job.spec.stage[progress.stage], job.spec.optimizer, list(job.weights.values())
    facts, parts = job.batch(stage, torch.Generator().manual_seed(job.spec.seed * 1_000_003 + progress.step))
    for group in optimizer.param_groups:
        group["lr"] = rate = _rate(stage, settings, progress)
    for parameter in weights:  # a write of no steps leaves some without a gradient; AdamW must count the step for all alike
        parameter.grad = torch.zeros_like(parameter)
    loss, exact = 0.0, 0.0
    found = processes.together(lambda mine: list(pool.map(lambda part: part(), mine)), parts)
    for part_loss, part_exact, gradients in found:
        loss += part_loss / len(parts)
        exact += part_exact / len(parts)
        for parameter, gradient in zip(weights, gradients, strict=True):  # in the order of the parts, whichever was done first
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient, alpha=1 / len(parts))
    norm = float(torch.nn.utils.clip_grad_norm_(weights, settings.clip))
    if math.isfinite(norm):  # one bad batch is passed over, and the row says so
        optimizer.step()
    row = {"step": progress.step, "stage": progress.stage, **facts, "rate": rate, "loss": loss, "exact_match": exact, "norm": norm}
    progress.running += SMOOTHING * (exact - progress.running)
    progress.step += 1
    progress.stage_step += 1
    if progress.stage_step == stage.at_most or progress.running > stage.until:
        progress.stage, progress.stage_step, progress.running = progress.stage + 1, 0, 0.0
    return row


def _rate(stage: Stage, settings: Optimizer, progress: Progress) -> float:
    rate = (settings.rate if stage.rate is None else stage.rate) * min(1.0, (progress.step + 1) / max(1, settings.warm_up))
    if stage.decay_over:
        rate *= LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress.stage_step / stage.decay_over)) / 2
    return rate


def _open(job: Job, out: Path, optimizer: torch.optim.Optimizer, *, resume: bool) -> tuple[Progress, Curve]:
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
    if about["spec"] != json.loads(json.dumps(table_of(job.spec))):
        raise SpecError(f"the run in {out} was started from another spec; resume it with that one, or choose another folder with --out.")
    for what, found in job.origin.items():
        if about.get("origin", {}).get(what) != found:
            raise SpecError(f"the {what} of the run in {out} has changed since it was started; bring back the old one, or choose another --out.")
    tensors = load_file(place)
    for name, parameter in job.weights.items():
        parameter.data.copy_(tensors[f"memory.{name}"])
        if f"first.{name}" in tensors:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(about["updates"])),
                "exp_avg": tensors[f"first.{name}"].to(parameter.device),
                "exp_avg_sq": tensors[f"second.{name}"].to(parameter.device),
            }
    progress = Progress(**about["progress"])
    return progress, [row for row in read_lines(out / "curve.jsonl") if row["step"] < progress.step]


def _save(job: Job, out: Path, optimizer: torch.optim.Optimizer, progress: Progress, curve: Curve) -> None:
    """Learning curve, its picture, and everything that the next step depends on."""
    write_lines(out / "curve.jsonl", curve)
    job.draw(out / "curve.png", curve)
    tensors: dict[str, Tensor] = {f"memory.{name}": x for name, x in job.weights.items()}
    updates = 0
    for name, parameter in job.weights.items():
        if state := optimizer.state.get(parameter):
            tensors |= {f"first.{name}": state["exp_avg"], f"second.{name}": state["exp_avg_sq"]}
            updates = int(state["step"])
    about = {"spec": table_of(job.spec), "origin": dict(job.origin), "progress": dataclasses.asdict(progress), "updates": updates}
    save_tensors(out / "resume.safetensors", tensors, about)


def _finish(job: Job, out: Path, progress: Progress, *, save: bool) -> dict[str, Any]:
    about = {
        "format": FORMAT,
        "spec": table_of(job.spec),
        "trained": {
            "steps": progress.step,
            "cpu_seconds": round(progress.cpu_seconds),
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            **job.origin,
        },
    }
    if save:
        write_atomically(out / "model.json", lambda temporary: temporary.write_text(json.dumps(about, indent=1) + "\n"))
        save_tensors(out / "model.safetensors", job.weights, {})
        (out / "resume.safetensors").unlink()
    return about


def put(tensors: Mapping[str, Tensor], *, into: Mapping[str, nn.Parameter]) -> None:
    """Weights of a finished checkpoint where they belong; one that has two names, as a tied head has, is stored once.

    Raises:
        ValueError: They are others than are wanted.
    """
    if tensors.keys() != into.keys() or any(weight.shape != tensors[name].shape for name, weight in into.items()):
        raise ValueError("its weights are not those of its spec")
    for name, weight in into.items():
        weight.data.copy_(tensors[name])


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """A safetensors file, whole or not at all, with `about` in its metadata."""
    whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    write_atomically(path, lambda temporary: save_file(whole, temporary, metadata={"graven": json.dumps(about)}))
