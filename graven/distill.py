"""A long prompt in a few vectors: what a frozen model does with the prompt in front of a query, it should do with the memory in front of it.

The teacher is the model with the whole prompt, read once; what it says to each query is computed once. The student is the same model with the
memory. A third of the queries is never trained on; on it the memory is measured, beside no prompt, random vectors, and the same number of vectors
that were written by reconstructing the prompt with as many tokens run.

Source: ours, after context distillation; on given queries or, after Eyuboglu et al. 2025, arXiv:2506.06266, on the model's own (`graven.study`).
Tests: tests/test_distill.py.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from graven.answer import encode, encode_behind
from graven.engrave import Engraved, engraved_of, pursue
from graven.errors import TextError
from graven.lm.base import LanguageModel, predictors
from graven.lm.cached import Followed, Prompted
from graven.lm.chat import halves
from graven.lm.pretrained import Pretrained
from graven.memory.file import Agreement
from graven.memory.gradient import Adam, GradMem, GradMemSpec, wide
from graven.memory.objective import Objective, Predict, Weighted, distil, log_probabilities, part_of, reconstruct
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

ROWS_AT_ONCE = 8
LEAST_QUERIES = 3
STARTS = 4
SAID_TOKENS = 16  # of each answer of the model that is matched, where no answers are given
STEPS = 60
UNTIL = 0.01
CONTROLS = ("no_prompt", "random", "reconstruct")
RATE = 0.1  # in standard deviations of the model's embeddings, a step; falls to nothing

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A query in tokens.

    Args:
        ids: As it stands behind the prompt; at least one.
        answer: What should follow; none where nobody knows.
    """

    ids: list[int]
    answer: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How to distil.

    Args:
        slots: Memory vectors, fewer than the prompt has tokens.
        weights: Of each objective; "distill" among them.
        steps: Adam steps.
        rate: Of the first step, in standard deviations of the model's embeddings; it falls to nothing in a straight line.
        seed: Of the start, the order of the queries and which are held out.
        deadline: Seconds after which no further step is taken; the control has as many.
        before: Tokens in front of prompt and memory: what a chat template begins a turn with.
        opening: Tokens in front of a prompt, and of a query without one: what the tokenizer begins a text with. A memory stands where they would.
        until: The write ends early where the mean loss over an epoch is below this, in nats.
        controls: Which of "no_prompt", "random" and "reconstruct" to measure beside the memory; the last takes as long as the write.
        reconstruct_start: Spread of the start of the control that reconstructs, in that of the model's embeddings.
        reconstruct_rate: Of its steps.
    """

    slots: int
    weights: Mapping[str, float]
    steps: int = STEPS
    rate: float = RATE
    seed: int = 0
    deadline: float | None = None
    before: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    until: float = UNTIL
    controls: tuple[str, ...] = CONTROLS
    reconstruct_start: float = 0.3
    reconstruct_rate: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What each query is spared, and what the write cost.

    Args:
        tokens: Of the prompt, less the slots: columns that a query need not run.
        bytes: Of keys and values that need not be kept; None where the model keeps none that it can continue from.
        flops: 2 a weight of the backbone and token, attention scores and head left out, for a query that would run the prompt anew.
        write_tokens: Tokens run by the write, backward passes counted like forward ones; the controls are not the write's.
        paid_after: Queries after which the write has run fewer tokens than prompts would have. Where a server keeps the prompt's keys and values,
            a query runs no prompt, and what is saved is `bytes`.
    Source: 2 a weight and token, Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """

    tokens: int
    bytes: int | None
    flops: int
    write_tokens: int
    paid_after: int


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """A memory of a prompt, and how well it stands in for it.

    Args:
        engraved: The state, one row, how it came about, and how much of the prompt itself it gives back.
        held_out: The memory against the full prompt.
        controls: The same of "no_prompt", "random" and "reconstruct".
        full_prompt: Accuracy of the full prompt itself, where answers are given.
        saved: What it saves.
    """

    engraved: Engraved
    held_out: Agreement
    controls: dict[str, Agreement]
    full_prompt: float | None
    saved: Saved


def distil_prompt(
    model: LanguageModel,
    prompt: Sequence[int],
    train: Sequence[Asked],
    held_out: Sequence[Asked],
    spec: Distillation,
    *,
    stop: frozenset[int],
    progress: Callable[[int, float], None] | None = None,
) -> Distilled:
    """Write a prompt into a memory and measure it.

    Args:
        model: Frozen; teacher and student.
        prompt: Token ids, more than there are slots.
        train: Queries to learn from.
        held_out: Queries to measure with.
        spec: How.
        stop: Tokens that end an answer.
        progress: Called before each step with its number and its loss.
    Raises:
        TextError: The prompt has no more tokens than the memory has vectors, or does not fit into the model with its queries.
    """
    began = time.monotonic()
    if len(prompt) <= spec.slots:
        raise TextError(f"the prompt has {len(prompt)} tokens and the memory {spec.slots} vectors, so nothing would be saved; lower --slots.")
    prompted = Prompted(model, model.embed(Tokens.of([[*spec.opening, *spec.before, *prompt]]))[0])
    said = prompted.follow([asked.ids for asked in train], most=_most([*train, *held_out]), stop=stop)
    taught = distil([asked.ids for asked in train], said, seed=spec.seed)
    objective, columns = _objective(taught, prompt, spec)
    memory = _memory(model, spec, rate=spec.rate)
    start = best_start(memory, objective, prompt)
    epoch = math.ceil(len(train) / taught.rows_a_step)
    left = None if spec.deadline is None else max(0.0, spec.deadline - (time.monotonic() - began))
    done = pursue(memory, objective, start=start, steps=spec.steps, until=(spec.until, epoch), deadline=left, progress=progress)
    seconds = time.monotonic() - began
    judge = Judge(model, held_out, prompted.follow([asked.ids for asked in held_out], most=_most(held_out), stop=stop))
    run = len(prompt) + sum(len(asked.ids) + len(one.tokens) for asked, one in zip(train, said, strict=True))
    run += math.ceil((STARTS + 2 * len(done.losses)) * columns)
    return Distilled(
        engraved=engraved_of(memory, [done], [list(prompt)], seconds=seconds),
        held_out=judge(memory.prefix(done.state, control=None)),
        controls=_controls(judge, memory, prompt, columns=columns * len(done.losses), spec=spec),
        full_prompt=judge.full_prompt,
        saved=_saved(prompted, len(prompt), spec.slots, write_tokens=run),
    )


def asked_of(model: Pretrained, queries: Sequence[Query], *, chat: bool = False) -> list[Asked]:
    """Queries in tokens. An answer that does not begin with a blank gets one, as tokenizers expect of a next word; in a chat it is stripped.

    Raises:
        TextError: There are fewer than three, or the tokenizer makes nothing of one.
    """
    if len(queries) < LEAST_QUERIES:
        raise TextError(f"there are {len(queries)} queries and {LEAST_QUERIES} are needed, as a third is held out to measure with; give more.")
    asked = []
    for query in queries:
        behind, answer = halves(model.tokenizer, query.text, name=model.name)[1] if chat else query.text, query.answer
        if answer is not None:
            blank = "" if chat or answer[:1].isspace() or behind[-1:].isspace() else " "
            answer = answer.strip() if chat else blank + answer
        ids = encode(model, behind, what="a query")
        one = Asked(ids, None if answer is None else encode_behind(model, ids, behind, answer, what="an answer"))
        if not one.ids or one.answer == []:
            raise TextError(f"the tokenizer makes nothing of the {'answer to' if one.ids else 'query'} {query.text[:40]!r}; spell it otherwise.")
        asked.append(one)
    return asked


def held_apart(asked: Sequence[T], *, seed: int) -> tuple[list[T], list[T]]:
    """What is trained on, and the third that is not, drawn by chance.

    >>> held_apart(["a", "b", "c", "d"], seed=0)
    (['b', 'd', 'c'], ['a'])
    """
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(seed)).tolist()
    count = len(asked) // 3
    return [asked[i] for i in order[count:]], [asked[i] for i in order[:count]]


class Judge:
    """Held-out queries and what the full prompt says to them.

    Args:
        model: Teacher and student.
        asked: The queries.
        said: What the model says to each behind the prompt.
    """

    def __init__(self, model: LanguageModel, asked: Sequence[Asked], said: Sequence[Followed]):
        self.model = model
        self.queries = [one.ids for one in asked]
        # one token behind each query at least, so that there is a prediction to look at
        self.answers = [one.answer or own.tokens[:1] for one, own in zip(asked, said, strict=True)]
        self.answered = [one.answer is not None for one in asked]
        self.taught: Float[Tensor, "Q E"] = torch.stack([own.hidden[0] for own in said])
        right = [own.tokens[: len(one.answer)] == one.answer for one, own in zip(asked, said, strict=True) if one.answer is not None]
        self.full_prompt = sum(right) / len(right) if right else None

    @torch.no_grad()
    def __call__(self, prefix: Float[Tensor, "B S D"]) -> Agreement:
        """How the vectors before a query, if any, stand in for the prompt."""
        kls: list[float] = []
        top: list[bool] = []
        right: list[bool] = []
        for first in range(0, len(self.queries), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            queries, answers = Tokens.of(self.queries[part]), self.answers[part]
            predicted = predictors(self.model, prefix.expand(len(answers), -1, -1), queries, answers)
            said, taught = (log_probabilities(self.model, states) for states in (torch.stack([own[0] for own in predicted]), self.taught[part]))
            kls += (taught.exp() * (taught - said)).sum(-1).clamp(min=0.0).tolist()  # below 0 by rounding only
            top += (taught.argmax(-1) == said.argmax(-1)).tolist()
            best = [self.model.logits(states).argmax(-1).tolist() for states in predicted]
            right += [own == answer for own, answer, known in zip(best, answers, self.answered[part], strict=True) if known]
        count = len(self.queries)
        return Agreement(queries=count, kl=sum(kls) / count, top_token=sum(top) / count, accuracy=sum(right) / len(right) if right else None)


@torch.no_grad()
def best_start(memory: GradMem, objective: Objective, prompt: Sequence[int]) -> Float[Tensor, "B M D"]:
    """Of four starts the one of least loss: the last tokens of the prompt, tokens spread over it, the means of its pieces, random vectors.

    The last tokens are one example of a few-shot block, and already say in which form to answer (docs/log.md).
    """
    slots = memory.spec.slots
    embedded = wide(memory.model.embed(Tokens.of([prompt]))[0])
    spread = embedded[torch.linspace(0, len(prompt) - 1, slots).long()]
    means = torch.stack([piece.mean(0) for piece in embedded.tensor_split(slots)])
    starts = [embedded[-slots:][None], spread[None], means[None], memory.start(1)]
    return min(starts, key=lambda state: float(objective.loss(memory, state, step=0)))


def _memory(model: LanguageModel, spec: Distillation, *, rate: float, start: float = 1.0) -> GradMem:
    return GradMem(
        model,
        GradMemSpec(slots=spec.slots, steps=0, rule=Adam(rate=rate * model.embedding_scale), order="none", start=start),
        seed=spec.seed,
        before=spec.before,
    )


def _objective(taught: Predict, prompt: Sequence[int], spec: Distillation) -> tuple[Objective, float]:
    """What is descended, and how many columns one step of it runs."""
    parts = {name: taught if name == "distill" else part_of(name, prompt, seed=spec.seed) for name in spec.weights}
    columns = sum(part.columns_a_step(prefix=len(spec.before) + spec.slots) for part in parts.values())
    return Weighted(tuple((spec.weights[name], part) for name, part in parts.items())), columns


def _controls(judge: Judge, memory: GradMem, prompt: Sequence[int], *, columns: float, spec: Distillation) -> dict[str, Agreement]:
    """The same measure of nothing, of random vectors, and of vectors that reconstruct the prompt, written with as many columns run."""

    def rebuilt() -> Float[Tensor, "B M D"]:
        rebuilder, text = _memory(judge.model, spec, rate=spec.reconstruct_rate, start=spec.reconstruct_start), reconstruct(prompt)
        steps = round(columns / text.columns_a_step(prefix=len(spec.before) + spec.slots))
        return memory.prefix(pursue(rebuilder, text, start=rebuilder.start(1), steps=steps, deadline=spec.deadline).state, control=None)

    prefixes = {
        "no_prompt": lambda: judge.model.embed(Tokens.of([[*spec.opening, *spec.before]])),
        "random": lambda: memory.prefix(memory.start(1), control=None),
        "reconstruct": rebuilt,
    }
    return {name: judge(prefixes[name]()) for name in spec.controls}


def _most(asked: Sequence[Asked]) -> int:
    """Tokens of an answer of the model that are looked at: one more than the longest known answer has, so that its end is among them."""
    lengths = [len(one.answer) + 1 for one in asked if one.answer is not None]
    return max(lengths) if len(lengths) == len(asked) else max([SAID_TOKENS, *lengths])


def _saved(prompted: Prompted, tokens: int, slots: int, *, write_tokens: int) -> Saved:
    fewer, kept = tokens - slots, prompted.cache_bytes
    return Saved(
        tokens=fewer,
        bytes=None if kept is None else kept * fewer // len(prompted.prefix),
        flops=2 * weights_a_token(prompted.model) * fewer,
        write_tokens=write_tokens,
        paid_after=math.ceil(write_tokens / fewer),
    )


def weights_a_token(model: LanguageModel) -> int:
    """Weights that a token is multiplied with: the matrices, embeddings and head left out, and of experts those that a token goes to."""
    assert isinstance(model, nn.Module)
    apart = {id(model.head_weight)} | {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    config = getattr(getattr(model, "model", None), "config", None)  # of transformers; our own decoder has no experts
    chosen: int | None = None if config is None else getattr(config.get_text_config(), "num_experts_per_tok", None)

    def taken(name: str, weight: nn.Parameter) -> int:
        if chosen is None or ".experts." not in name or weight.dim() != 3:  # [experts, out, in]
            return weight.numel()
        return weight.numel() * min(chosen, len(weight)) // len(weight)

    return sum(taken(name, weight) for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in apart)
