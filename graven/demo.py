"""What `graven demo` shows: sixteen records go into eight vectors, step by step, and come out again."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from graven.measure import read_episode, right
from graven.model import RecordsModel
from graven.report import figure
from graven.tasks.base import Episode
from graven.tasks.retrieval import Retrieval

RECORDS = (
    "aB:7x", "c3:Qm", "Zz:00", "hi:yo", "k9:Lp", "Me:mo", "ry:42", "Gr:aV", "eN:in", "so:ul", "TT:tt", "1a:b2", "xY:9W", "up:dn", "No:ah", "q0:Oq",
)  # fmt: skip


@dataclass(frozen=True)
class Demo:
    """Numbers of one write.

    Args:
        states: Memory after 0, 1, ... K steps.
        losses: Reconstruction loss of each, nats a token.
        right: Records that each answers.
        confidence: Probability of the right value of each record under each state.
        answers: Value that the last state gives for each key, and whether it is the right one.
        memory_bytes: Of the memory.
        text_bytes: Of the text.
        cache_bytes: Of the KV cache that the same model would keep of the same text, float32.
    """

    states: Float[Tensor, "S M D"]
    losses: list[float]
    right: list[int]
    confidence: Float[Tensor, "S N"]
    answers: list[tuple[str, str, bool]]
    memory_bytes: int
    text_bytes: int
    cache_bytes: int


@torch.no_grad()
def run(model: RecordsModel, records: tuple[str, ...] = RECORDS) -> Demo:
    """Write the records one step at a time and read all of them after each."""
    assert isinstance(model.task, Retrieval)
    pairs = model.task.parse("\n".join(records))
    episode = model.task.episode_of([pairs])
    memory = model.memory
    state = memory.start(1)
    prepared = memory.prepare(state, episode.context)
    states, losses, hits, confidence = [], [], [], []
    for taken in range(memory.spec.steps + 1):
        step = memory.step(state, prepared, taken=taken)
        logits = read_episode(memory, state, episode)
        states.append(state[0])
        losses.append(float(step.loss))
        hits.append(int(right(logits, episode).sum()))
        confidence.append(value_probability(logits, episode)[0])
        state = step.state
    written = model.write("\n".join(records))
    found = model.ask_many(written, [key for key, _ in pairs])
    spec = model.spec.model
    heads = spec.key_value_heads * spec.width // spec.heads
    return Demo(
        states=torch.stack(states),
        losses=losses,
        right=hits,
        confidence=torch.stack(confidence),
        answers=[(key, answer.text, answer.text == value) for answer, (key, value) in zip(found, pairs, strict=True)],
        memory_bytes=written.bytes,
        text_bytes=len("\n".join(records).encode()),
        cache_bytes=2 * spec.layers * heads * episode.context.ids.shape[1] * 4,
    )


def value_probability(logits: Float[Tensor, "B Q S A"], episode: Episode) -> Float[Tensor, "B Q"]:
    """Probability of each whole value."""
    chosen = logits.log_softmax(-1).gather(-1, episode.target.ids[..., None])[..., 0]
    return chosen[..., : episode.answer].sum(-1).exp()


def draw(demo: Demo, path: Path) -> None:
    """Which record is in memory after which step, what the write loss did, and the vectors themselves."""
    steps = range(len(demo.losses))
    records = demo.confidence.shape[1]
    with figure(path, width=11.0, height=3.8, columns=3) as (left, centre, right_axes):
        image = left.imshow(demo.confidence.T.numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        left.set(xlabel="gradient steps", ylabel="record", title="probability of the right value", xticks=list(steps))
        left.set_yticks(range(records), [record for record, _, _ in demo.answers], fontsize=6, family="monospace")
        left.grid(visible=False)
        left.figure.colorbar(image, ax=left, shrink=0.8)
        centre.bar(steps, demo.right, color="#3b6ea5")
        centre.set(xlabel="gradient steps", ylabel=f"records answered of {records}", title="answers, and the loss they came from", xticks=list(steps))
        loss_axes = centre.twinx()
        loss_axes.plot(steps, demo.losses, "o-", color="#c8553d")
        loss_axes.set_ylabel("write loss, nats a token", color="#c8553d")
        change = demo.states[-1] - demo.states[0]
        limit = float(change.abs().quantile(0.99))
        image = right_axes.imshow(change.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        right_axes.set(xlabel="coordinate", ylabel="slot", title="what the write changed", yticks=range(len(change)))
        right_axes.grid(visible=False)
        right_axes.figure.colorbar(image, ax=right_axes, shrink=0.8)
