"""A write as the command line speaks of it: what was wished for, what came of it, in facts, in lines, and where it fell short."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graven.distill import Distilled
from graven.errors import Outcome, SpecError
from graven.fidelity import lines_of as fidelity_lines
from graven.memory.file import Agreement, Memory
from graven.memory.objective import weights_of
from graven.model import Model, TextModel
from graven.tasks.queries import Query

MEASURES = ("queries", "kl", "top_token", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a write should descend, and where its memory should stand.

    Args:
        objective: As `graven.memory.objective.weights_of` reads it; the model's own where left out.
        queries: For an objective with "distill" in it; the model asks itself where left out.
        study_prompts: What the model is asked for queries with, where it asks itself; its own list where left out.
        chat: In the user turn of the chat template.
        probes: Questions that the model asks itself to measure the memory with; the model's own number where left out.
    """

    objective: str | None = None
    queries: Sequence[Query] | None = None
    study_prompts: Sequence[str] | None = None
    chat: bool = False
    probes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A memory, and of a distilled one how well it stands in for its prompt."""

    memory: Memory
    distilled: Distilled | None = None


def written(
    model: Model,
    text: str,
    wish: Wish,
    *,
    steps: int | None,
    rate: float | None,
    seed: int,
    deadline: float | None,
    progress: Callable[[int, float, float], None],
) -> Written:
    """Write as wished.

    Raises:
        SpecError: The wish contradicts itself, or the model takes none.
    """
    weights = {} if wish.objective is None else weights_of(wish.objective)
    if wish.queries is not None and "distill" not in weights:
        raise SpecError("--queries is given and nothing is distilled; add --objective distill.")
    if wish.study_prompts is not None and ("distill" not in weights or wish.queries is not None):
        reason = "nothing is distilled; add --objective distill" if "distill" not in weights else "so is --queries; give one of the two"
        raise SpecError(f"--study-prompts is given and {reason}.")
    if wish.probes is not None and "distill" in weights:
        raise SpecError("--probes is given and a distilled memory is measured on the queries that are held out; leave it out.")
    if not isinstance(model, TextModel):
        if wish.objective is not None or wish.chat or wish.probes is not None:
            option = "--objective" if wish.objective is not None else "--chat" if wish.chat else "--probes"
            raise SpecError(f"{option} is for frozen models, and {model.name} was trained for its own; name a language model with --model.")
        return Written(memory=model.write(text, steps=steps, rate=rate, seed=seed, deadline=deadline, progress=progress))
    common: dict[str, Any] = {"steps": steps, "rate": rate, "seed": seed, "deadline": deadline, "progress": progress, "chat": wish.chat}
    if "distill" in weights:
        memory, distilled = model.distill(text, wish.queries, objective=wish.objective or "distill", prompts=wish.study_prompts, **common)
        return Written(memory=memory, distilled=distilled)
    return Written(memory=model.write(text, objective=wish.objective or "reconstruct", probes=wish.probes, **common))


def facts_of(done: Written, out: Path) -> dict[str, Any]:
    """Everything, for a program."""
    about = done.memory.about
    facts = {
        "path": str(out), "kind": about.kind, "model": about.base.name, "tokens": about.tokens, "slots": about.slots, "pages": len(about.pages),
        "bytes": done.memory.bytes, "steps": about.steps, "seconds": round(about.seconds, 3), "loss": list(about.losses),
        "token_accuracy": about.token_accuracy, "recited_tokens": about.recited, "answered": about.answered, "outcome": about.outcome,
        "objective": about.objective, "chat": about.chat, "fidelity": None if about.fidelity is None else asdict(about.fidelity),
    }  # fmt: skip
    if done.distilled is None:
        return facts
    controls = {name: _measures(found) for name, found in done.distilled.controls.items()}
    return facts | {
        "held_out": _measures(done.distilled.held_out), "controls": controls, "full_prompt": {"accuracy": done.distilled.full_prompt},
        "saved": asdict(done.distilled.saved),
    }  # fmt: skip


def lines_of(done: Written, out: Path) -> list[str]:
    """What a person wants to know."""
    about = done.memory.about
    pages = "" if len(about.pages) == 1 else f"{len(about.pages)} pages of "
    lines = [f"{out}: {about.tokens} tokens in {pages}{about.slots} vectors, {done.memory.bytes} bytes, {about.steps} steps, {about.seconds:.1f} s"]
    if done.distilled is not None:
        return [*lines, *_report(done.distilled)]
    if about.answered is not None:
        return [*lines, f"{about.answered} of {about.records or 0} queries answered from the memory alone"]
    recital = f"recites {about.recited} of {about.tokens} tokens before the first miss (teacher-forced accuracy {about.token_accuracy:.1%})"
    return [*lines, recital, *([] if about.fidelity is None else fidelity_lines(about.fidelity))]


def shortfalls(done: Written) -> tuple[list[str], list[str]]:
    """Where a write fell short of what was asked, and what else should be known."""
    about, warnings = done.memory.about, list[str]()
    if not about.lossless and done.distilled is None:
        warnings.append("the tokenizer cannot spell this text exactly; what is recited will differ where it could not")
    if about.answered is not None and about.steps and about.answered < (about.records or 0):
        missing = (about.records or 0) - about.answered
        return [f"{missing} queries are not answered right; give a larger --steps, or write less"], warnings
    if Outcome[about.outcome] not in (Outcome.DONE, Outcome.EXACT, Outcome.CLOSE):
        return [Outcome[about.outcome].value], warnings
    if done.distilled is not None:
        name, other = min(done.distilled.controls.items(), key=lambda control: control[1].kl)
        if done.distilled.held_out.kl >= other.kl:
            name = name.replace("_", " ")
            return [f"the memory is no closer to the full prompt than the control {name!r}; give more queries, --steps or --slots"], warnings
    return [], warnings


def _measures(found: Agreement) -> dict[str, Any]:
    return {name: getattr(found, name) for name in MEASURES}


def _report(distilled: Distilled) -> list[str]:
    """The memory and its controls against the full prompt, and what each query saves."""
    saved, held_out = distilled.saved, distilled.held_out
    rows = {"memory": held_out, **{name.replace("_", " "): found for name, found in distilled.controls.items()}}
    kept = "" if saved.bytes is None else f", {saved.bytes / 1e6:.2f} MB of keys and values"
    return [
        f"against the full prompt, on {held_out.queries} queries that were not trained on:",
        f"{'':14}{'KL, nats':>10}{'top token':>12}{'accuracy':>11}",
        *[f"{name:14}{found.kl:10.3f}{found.top_token:12.1%}{_share(found.accuracy):>11}" for name, found in rows.items()],
        f"{'full prompt':14}{0:10.3f}{1:12.1%}{_share(distilled.full_prompt):>11}",
        f"a query saves {saved.tokens} tokens, {saved.flops / 1e9:.3g} GFLOP{kept}; the write has paid after {saved.paid_after} queries",
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
