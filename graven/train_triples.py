"""Meta-training of a pretrained model on triples: the answer to a question is learned through the write of its context, which is then gone.

    loss = mean over triples of   -mean_j log f(y_j | [M_K(C); q, y_<j]),   M_K(C) as in memory/gradient.py, y ends with the model's end token

What learns is the memory's own part (its start, and whatever its spec adds) and, of the model, all weights, a low-rank adapter, or nothing. The
loop, and the folder of a run, are those of `graven.training`. Source: Kuratov et al. 2026, arXiv:2603.13875v2, equations 5 to 8 and section 4.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from graven import training
from graven.answer import encode_behind
from graven.errors import ModelError, SpecError, TextError
from graven.lm.adapter import Adapter, add_adapter
from graven.lm.base import digest, predictors
from graven.lm.pretrained import Pretrained, load_pretrained
from graven.memory.adapted import WriteAdapted, reading
from graven.memory.base import Prefixed
from graven.memory.gradient import GradMem, GradMemSpec
from graven.memory.objective import log_probabilities
from graven.report import figure
from graven.settings import build, read_toml
from graven.tasks.base import Tokens
from graven.tasks.triples import Triple, Triples, read_triples
from graven.train import TrainSpec
from graven.train import read_spec as read_records_spec
from graven.train import train as train_records
from graven.training import FORMAT, Job, Optimizer, Part, Stage, check_run

KIND = "triples"


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that a training starts from.

    Args:
        path: Directory in the format of `save_pretrained`, `.gguf` file or hub id.
        attention: What can be differentiated twice; "eager" is for architectures that take no attention from outside.
        device: Of torch: "cpu", or "cuda" for a GPU.
    """

    path: str
    attention: Literal["graven", "eager"] = "graven"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class TriplesSpec:
    """Everything that a training on triples depends on, beside the data and the model themselves.

    Args:
        seed: Of the start state, the adapter and the batches, whose triples are drawn with replacement.
        task: The data.
        model: What is trained.
        memory: How it is written.
        optimizer: AdamW.
        stage: One after the other.
        adapter: What is trained of the model; all of its weights where left out.
        checkpoint_every: Training steps between two checkpoints.
    Raises:
        SpecError: Something that is to be trained is out of reach of the gradient, or a number is out of range.
    """

    seed: int
    task: Triples
    model: BaseModel
    memory: GradMemSpec
    optimizer: Optimizer
    stage: tuple[Stage, ...]
    adapter: Adapter | None = None
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        check_run(self)
        if not all(stage.steps for stage in self.stage):
            raise SpecError("a memory that is written in steps needs `steps` in every [[stage]].")
        if self.memory.order == "none" and self.adapter is not None and (self.adapter.rank == 0 or self.adapter.when == "write"):
            what = "the start state" if self.adapter.rank == 0 else "an adapter that is there only for the write"
            raise SpecError(f'`order` is "none", so no gradient goes through the write, and {what} cannot learn; use "second" or "first".')

    @property
    def write_adapted(self) -> bool:
        """Whether the memory is written through an adapter and read without it."""
        return self.adapter is not None and self.adapter.rank > 0 and self.adapter.when == "write"

    @property
    def reads_as_base(self) -> bool:
        """Whether the model as it was published reads the memory just as the trained one does."""
        frozen = self.adapter is not None and (self.adapter.rank == 0 or self.adapter.when == "write")
        return frozen and not self.memory.projection and not self.memory.control


@runtime_checkable  # for the shape checks of the tests
class Written(Prefixed, Protocol):
    """A memory of vectors that can be trained on triples."""

    @property
    def initial(self) -> Float[Tensor, "M D"]:
        """The start state of one row."""
        ...

    def start(self, batch: int) -> Float[Tensor, "B M D"]:
        """The start state, one copy a row."""
        ...

    def write(self, state: Float[Tensor, "B M D"], context: Tokens, *, steps: int | None = None) -> Float[Tensor, "B M D"]:
        """The state after a context."""
        ...


class Row(NamedTuple):
    """A triple as token ids; the target ends with the model's end token."""

    context: list[int]
    query: list[int]
    target: list[int]


@dataclass(frozen=True)
class TrainedTriples:
    """A finished checkpoint: the memory with its model, and the spec it came from."""

    memory: GradMem
    spec: TriplesSpec
    about: dict[str, Any]

    @property
    def model(self) -> Pretrained:
        """The language model behind the memory."""
        assert isinstance(self.memory.model, Pretrained)
        return self.memory.model


def read_spec(path: Path) -> TrainSpec | TriplesSpec:
    """The spec of any training from its TOML file; the `kind` of its task tells which. A local path to a model or data becomes an absolute one.

    Raises:
        SpecError: It is missing, is no TOML, or has a wrong field.
    """
    table = read_toml(path)
    task = table.get("task")
    if not isinstance(task, dict) or task.get("kind") != KIND:
        return read_records_spec(path)
    spec = build(TriplesSpec, table, where=path.name)
    found = replace(spec.model, path=absolute(spec.model.path))
    return replace(spec, model=found, task=replace(spec.task, data=absolute(spec.task.data)))


def train(
    spec: TrainSpec | TriplesSpec,
    out: Path,
    *,
    resume: bool = False,
    workers: int = 1,
    report: Callable[[dict[str, Any]], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> None:
    """Any training, to its end."""
    if isinstance(spec, TriplesSpec):
        train_triples(spec, out, resume=resume, workers=workers, report=report, note=note)
    else:
        train_records(spec, out, resume=resume, workers=workers, report=report)


def train_triples(
    spec: TriplesSpec,
    out: Path,
    *,
    resume: bool = False,
    workers: int = 1,
    report: Callable[[dict[str, Any]], None] | None = None,
    note: Callable[[str], None] | None = None,
    stop_after: int | None = None,
) -> TrainedTriples | None:
    """Train to the end of the last stage, or for `stop_after` more steps.

    Args:
        spec: What to train.
        out: Folder of the run; made where it is missing.
        resume: Go on from the folder's last whole checkpoint.
        workers: Micro-batches that are computed side by side, a thread each; any number gives the same bits.
        report: Called with each row of the learning curve.
        note: Called with what a person should know, such as how many triples are too long.
        stop_after: Steps, for a run in pieces.
    Returns:
        The checkpoint, or None where `stop_after` came first.
    Raises:
        OutputError: As of `training.run`.
        SpecError: The same, or several workers would share an adapter that is switched off to read.
        TextError: The data cannot be read, or no triple fits.
        ModelError: The model cannot be trained through a write.
    """
    if spec.write_adapted and workers > 1:
        raise SpecError(f"`workers` is {workers}, and an adapter that is switched off to read cannot serve several at once; leave it out.")
    triples = read_triples(spec.task.data, split=spec.task.split)
    base = load_pretrained(spec.model.path, attention=spec.model.attention)
    memory, rows = new_memory(spec, base), rows_of(base, triples, spec)
    if note is not None and len(rows) < len(triples):
        note(f"{len(triples) - len(rows)} of {len(triples)} triples are left out: their context has more than {spec.task.longest} tokens, or no room")
    weights = {name: weight for name, weight in memory.named_parameters() if weight.requires_grad}
    origin = {"data": digest(repr(rows).encode()), "model": base.fingerprint, "triples": f"{len(rows)} of {len(triples)}"}
    job = Job(spec=spec, weights=weights, batch=partial(batch_of, spec, memory, rows, list(weights.values())), draw=draw_curve, origin=origin)
    about = training.run(job, out, resume=resume, workers=workers, report=report, stop_after=stop_after)
    return None if about is None else _marked(TrainedTriples(memory.requires_grad_(False), spec, about))


def new_memory(spec: TriplesSpec, base: Pretrained) -> GradMem:
    """Model and memory at the start of a run; what is to be trained wants gradients.

    Args:
        spec: What to make.
        base: Becomes a part of the memory, and gets the adapter.
    """
    if spec.adapter is not None:
        base.requires_grad_(False)
        if spec.adapter.rank:
            add_adapter(base.model, spec.adapter, seed=spec.seed)
    base.to(spec.model.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # of the write head and whatever else torch draws
        memory = (WriteAdapted if spec.write_adapted else GradMem)(base, spec.memory, seed=spec.seed)
    return memory.to(spec.model.device)


def rows_of(model: Pretrained, triples: Sequence[Triple], spec: TriplesSpec) -> list[Row]:
    """Those triples that fit, as token ids.

    Raises:
        ModelError: The model has no end token, so an answer could not end.
        TextError: No triple fits.
    """
    if not model.stop:
        raise ModelError(f"{model} has no end-of-text token, so it cannot learn where an answer ends; set `eos_token_id` in its configuration.")
    ends, taken = [min(model.stop)], spec.memory.slots + 2 * spec.memory.control
    room = None if model.positions is None else model.positions - taken
    found = []
    for triple in triples:
        asked = spec.task.asked(triple.question)
        query = model.encode(asked)
        target = encode_behind(model, query, asked, " " + triple.answers[0], what="an answer")
        row = Row(model.encode(triple.context), query, target + ends)
        fits = room is None or max(len(row.context), len(row.query) + len(row.target)) <= room
        if fits and 0 < len(row.context) <= spec.task.longest and row.query:
            found.append(row)
    if not found:
        raise TextError(f"none of {len(triples)} triples has a context of at most {spec.task.longest} tokens; raise `longest`, or give others.")
    return found


def answered(memory: Prefixed, state: Float[Tensor, "B M D"], rows: Sequence[Row]) -> tuple[Float[Tensor, "B"], Bool[Tensor, "B"]]:
    """Loss of each row's answer, the mean over its tokens in nats; and whether every token of it is the most probable one, given those before."""
    with reading(memory):
        prefix = memory.prefix(state, control=memory.read_control)
        hidden = predictors(memory.model, prefix, Tokens.of([row.query for row in rows]), [row.target for row in rows])
        said = log_probabilities(memory.model, torch.cat(hidden))
    wanted = torch.tensor(list(chain(*(row.target for row in rows))), device=said.device)
    each, ends = F.nll_loss(said, wanted, reduction="none"), list(accumulate(len(row.target) for row in rows))[:-1]
    hits = (said.argmax(-1) == wanted).tensor_split(ends)
    return torch.stack([one.mean() for one in each.tensor_split(ends)]), torch.stack([one.all() for one in hits])


def batch_of(
    spec: TriplesSpec, memory: Written, rows: Sequence[Row], weights: list[nn.Parameter], stage: Stage, generator: torch.Generator
) -> tuple[dict[str, Any], list[Callable[[], Part]]]:
    """Triples of one step as a `training.Job` wants them, those of like length together, because padding costs as much as text."""
    steps = stage.steps[int(torch.randint(len(stage.steps), (1,), generator=generator))]
    drawn = torch.randint(len(rows), (spec.optimizer.batch,), generator=generator).tolist()
    order, size = sorted(drawn, key=lambda i: len(rows[i].context)), spec.optimizer.micro_batch
    groups = [[rows[i] for i in order[first : first + size]] for first in range(0, len(order), size)]
    return {"steps": steps}, [partial(_part, memory, weights, group, steps) for group in groups]


def _part(memory: Written, weights: list[nn.Parameter], rows: Sequence[Row], steps: int) -> Part:
    """Loss, exact match and gradients of one micro-batch."""
    context, device = Tokens.of([row.context for row in rows]), memory.initial.device
    state = memory.write(memory.start(len(rows)), Tokens(context.ids.to(device), context.mask.to(device)), steps=steps)
    losses, right = answered(memory, state, rows)
    loss = losses.mean()
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(loss.detach()), float(right.float().mean()), gradients


def load_trained(folder: Path, *, name: str) -> TrainedTriples:
    """A finished checkpoint.

    Raises:
        ModelError: The folder holds none, it is not whole, or the model that it was trained from is gone or another.
    """
    try:
        about = json.loads((folder / "model.json").read_bytes())
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r} and this graven reads {FORMAT}")
        spec, tensors = build(TriplesSpec, about["spec"], where="model.json"), load_file(folder / "model.safetensors")
        origin = about["trained"]["model"]
    except (OSError, KeyError, TypeError, ValueError, SafetensorError, RuntimeError) as error:
        raise _not_whole(folder, error) from error
    base = load_pretrained(spec.model.path, attention=spec.model.attention)
    if base.fingerprint != origin:
        raise ModelError(f"{folder} was trained from {spec.model.path}, which is another model now; bring back the old one, or train it again.")
    base.name = name
    memory = new_memory(replace(spec, model=replace(spec.model, device="cpu")), base)
    weights = {key: weight for key, weight in memory.named_parameters() if weight.requires_grad}
    try:
        training.put(tensors, into=weights)
    except ValueError as error:
        raise _not_whole(folder, error) from error
    return _marked(TrainedTriples(memory.requires_grad_(False), spec, about))


def is_triples(folder: Path) -> bool:
    """Whether the checkpoint in a folder is one of triples; False, too, where it cannot be read."""
    try:
        return json.loads((folder / "model.json").read_bytes())["spec"]["task"].get("kind") == KIND
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def absolute(name: str) -> str:
    """A path that is there, from the root; any other name as it is."""
    return str(Path(name).resolve()) if os.path.exists(name) else name


def draw_curve(path: Path, curve: list[dict[str, Any]]) -> None:
    """Loss and exact match against CPU minutes, one colour for each number of write steps."""
    with figure(path, columns=2) as (left, right):
        for steps in sorted({row["steps"] for row in curve}):
            rows = [row for row in curve if row["steps"] == steps]
            minutes = [row["cpu_seconds"] / 60 for row in rows]
            left.plot(minutes, [row["loss"] for row in rows], ".", ms=3, label=f"{steps} steps")
            right.plot(minutes, [row["exact_match"] for row in rows], ".", ms=3)
        left.set(xlabel="CPU minutes", ylabel="loss of the answer, nats a token")
        right.set(xlabel="CPU minutes", ylabel="exact match, teacher-forced", ylim=(0, 1.02))
        if curve:
            left.legend(markerscale=3, frameon=False)


def _marked(trained: TrainedTriples) -> TrainedTriples:
    """With a fingerprint of its own, where only the trained model reads what it wrote."""
    if not trained.spec.reads_as_base:
        shared = trained.memory.state_dict(keep_vars=True)
        changed = [x for name, x in sorted(shared.items()) if not name.startswith("model.") or "lora_" in name or trained.spec.adapter is None]
        trained.model.mark = digest(*(x.detach().cpu().float().numpy().tobytes() for x in changed))
    return trained


def _not_whole(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"{folder} holds no whole graven checkpoint ({str(error).splitlines()[0][:120]}); train it again or fetch it anew.")
