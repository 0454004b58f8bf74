"""Gated linear layers trained on prompts of several tasks, the restarts of a point side by side: what the experiments of arXiv:2504.04308 share.

The restarts of a point learn from the same prompts, each with marks (contextual features) of its own. A token is [x; y; kind], kind one-hot over
data and delimiters, and a restart embeds it by a matrix that puts its marks in the place of the kind. For one layer every map goes through that
matrix, so no restart's tokens are ever written out and one product serves all restarts: a seventh of the time of prompts drawn apart, or less.
"""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graven.construct.wpgd import gate_weight_for
from graven.layers.gated_linear import Gate, GatedLinear, GatedLinearSpec
from graven.report import read_lines, write_lines
from graven.tasks.multitask import Multitask, Prompts
from graven.theory.wpgd import linear_attention_risk, optimum, scalar_gate_optimum

ROWS, FIGURES = Path(__file__).parent / "rows", Path(__file__).parent.parent / "docs" / "figures"
FEATURES = 5
KEPT = 0.8  # of the first token at the start, by the gates of data behind it
HALF_OPEN = 0.5  # gates of delimiters at the start
EARLY = 0.1  # of the usual start: values of all layers but the last, so that training begins as with one layer
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What is trained: the gate; whether prompts have delimiters and tokens contextual features; layers; hidden units of an MLP between them."""

    gate: Gate
    delimiters: bool = True
    marked: bool = True
    layers: int = 1
    hidden: int = 0

    def task(self, *, dimension: int, examples: Sequence[int], correlations: Sequence[float], covariance: Tensor | None = None) -> Multitask:
        """The distribution that it learns from, with a token's kind where its marks belong."""
        return Multitask(
            dimension=dimension,
            examples=tuple(examples),
            query_correlations=tuple(correlations),
            covariance=None if covariance is None else tuple(map(tuple, covariance.tolist())),
            features=(len(examples) + 1) * self.marked,
            delimiters=self.delimiters,
        )


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long: Adam at a rate that falls to 0 along a line, each restart's gradient clipped to a norm if there is one.

    The best restart is picked on other prompts than it is tested on, half as many.
    """

    restarts: int
    steps: int
    rate: float = 1e-2
    batch: int = 256
    test: int = 100_000
    clip: float | None = None


class Runs(nn.Module):
    """R restarts of one layer and a head: weights with a leading axis for restarts."""

    def __init__(self, learner: Learner, task: Multitask, restarts: int, *, generator: torch.Generator):
        super().__init__()
        self.learner = learner
        self.embedding = nn.Buffer(embeddings(learner, task, restarts, generator=generator))
        width = self.embedding.shape[2]

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(restarts, *shape, generator=generator) / width)

        self.q, self.k, self.v, self.head = drawn(width, width), drawn(width, width), drawn(width, width), drawn(width)
        self.gate = None
        if learner.gate != "none":
            self.gate = drawn(width if learner.gate == "value" else 1, width)
            self.gate.data += start_of_gates(self.embedding, task, self.gate.shape[1])

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions [R, B] for tokens [B, T, S]. Only the last token is read: of the others a score, and what the gates leave of it."""
        forms = self.embedding @ self.q.mT @ self.k @ self.embedding.mT
        scores = (tokens @ torch.einsum("bs,rsz->bzr", tokens[:, -1], forms)).transpose(0, 1)[..., None]
        by_row = self.learner.gate == "value"  # where it is not, the head can go before the sum
        values = self._side_by_side(self.v if by_row else self.head[:, None] @ self.v)
        if self.gate is None:
            return (tokens.transpose(0, 1) @ values * scores.squeeze(-1)).sum(0).T
        gates, shape = self._side_by_side(self.gate), self.gate.shape[:2]

        def write_and_gate(token: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
            return (token @ values).unflatten(-1, shape) * score, (token @ gates).sigmoid().unflatten(-1, shape)

        seen, scores = tokens.transpose(0, 1).contiguous(), scores.contiguous()
        # many gates token by token, so that their numbers fit the cache; few gates all at once
        steps = map(write_and_gate, seen, scores) if by_row else zip(*write_and_gate(seen, scores), strict=True)
        state = torch.zeros(())
        for write, gate in steps:
            state = torch.addcmul(write, gate, state)
        return ((state * self.head).sum(-1) if by_row else state.squeeze(-1)).T

    def _side_by_side(self, weight: Tensor) -> Tensor:
        """A map [R, V, D] of the layer as one map [S, R V] of the prompts' tokens."""
        return (self.embedding @ weight.mT).transpose(0, 1).flatten(1)

    def layer(self, run: int) -> GatedLinear:
        """One restart as the layer of the library."""
        width = self.embedding.shape[2]
        layer = GatedLinear(GatedLinearSpec(width=width, key_width=width, value_width=width, gate=self.learner.gate))
        for name, projection in layer.named_children():
            projection.weight.data.copy_(getattr(self, name)[run])
        return layer

    @torch.no_grad()
    def check(self, prompts: Prompts) -> None:
        """Predictions are those of the library's layers."""
        tokens = prompts.tokens
        expected = [self.layer(run)(tokens @ own)[:, -1] @ head for run, (own, head) in enumerate(zip(self.embedding, self.head, strict=True))]
        largest = torch.stack(expected).abs().max().item()
        torch.testing.assert_close(self(tokens), torch.stack(expected), rtol=1e-3, atol=1e-4 * largest)

    @torch.no_grad()
    def weights(self, run: int, prompts: Prompts) -> Tensor:
        """What the label of each example counts for in the prediction, up to P, [B, N]: gates behind it, times value and head of each row."""
        layer, tokens = self.layer(run), prompts.tokens @ self.embedding[run]
        log_gate = layer.log_gate(tokens)
        if log_gate is None:
            log_gate = torch.zeros(*tokens.shape[:2], 1, 1)
        after = F.pad(log_gate[:, 1:, 0].flip(1).cumsum(1).flip(1), (0, 0, 0, 1)).exp()
        rows = layer.v.weight[:, prompts.dimension] * self.head[run]
        return after[:, prompts.places].expand(-1, -1, len(rows)) @ rows


class Deep(nn.Module):
    """R restarts of a stack of the library's layers, each added to what it reads, with MLPs between them where the learner has hidden units."""

    def __init__(self, learner: Learner, task: Multitask, restarts: int, *, generator: torch.Generator):
        super().__init__()
        self.embedding = nn.Buffer(embeddings(learner, task, restarts, generator=generator))
        width = self.embedding.shape[2]
        self.head = nn.Parameter(torch.randn(restarts, width, generator=generator) / width)
        self.stacks = nn.ModuleList(self._stack(learner, width) for _ in range(restarts))
        for weight in self.stacks.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1]
        for own, stack in zip(self.embedding, self.stacks, strict=True):
            for part in stack[:-1]:
                if isinstance(part, GatedLinear):
                    part.v.weight.data *= EARLY
            for part in stack:
                if getattr(part, "gate", None) is not None:
                    part.gate.weight.data += start_of_gates(own[None], task, part.spec.gates)[0]

    @staticmethod
    def _stack(learner: Learner, width: int) -> nn.ModuleList:
        spec = GatedLinearSpec(width=width, key_width=width, value_width=width, gate=learner.gate, form="parallel")
        parts: list[nn.Module] = [GatedLinear(spec)]
        for _ in range(learner.layers - 1):
            if learner.hidden:
                hidden = learner.hidden
                parts.append(nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)))
            parts.append(GatedLinear(spec))
        return nn.ModuleList(parts)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions [R, B] for tokens [B, T, S]."""
        predictions = []
        for own, stack, head in zip(self.embedding, self.stacks, self.head, strict=True):
            x = tokens @ own
            for part in stack:
                x = x + part(x)
            predictions.append(x[:, -1] @ head)
        return torch.stack(predictions)


def embeddings(learner: Learner, task: Multitask, restarts: int, *, generator: torch.Generator) -> Tensor:
    """[R, S, D]: x and y as they are, a kind as its marks, N(0, I), drawn once for a restart."""
    marks = torch.randn(restarts, task.features, FEATURES * learner.marked, generator=generator)
    plain = torch.eye(task.dimension + 1).expand(restarts, -1, -1)
    return torch.cat([F.pad(plain, (0, marks.shape[2])), F.pad(marks, (task.dimension + 1, 0))], dim=1)


def start_of_gates(embedding: Tensor, task: Multitask, gates: int) -> Tensor:
    """Weights [R, G, D] with which gates start nearly open at data and half open at delimiters; 0 where there are no marks to tell by."""
    if not task.features:
        return torch.zeros(1)
    start = torch.full((gates, task.features), HALF_OPEN, dtype=torch.float64)
    start[:, 0] = KEPT ** (1 / task.length)
    marks = embedding[:, -task.features :, task.dimension + 1 :].double()
    return torch.stack([gate_weight_for(start, marks=own, features=task.dimension) for own in marks]).float()


def drawn_prompts(task: Multitask, size: int, *, generator: torch.Generator) -> Prompts:
    """Prompts with kinds, one-hot, for marks."""
    return task.sample(size, generator=generator, marks=torch.eye(task.features) if task.features else None)


@torch.no_grad()
def errors(runs: nn.Module, task: Multitask, size: int, *, generator: torch.Generator) -> Tensor:
    """Squared errors over the variance of a noiseless label, [R, size]."""
    scale, parts = task.covariance_matrix.trace(), []
    for start in range(0, size, 1000):
        prompts = drawn_prompts(task, min(1000, size - start), generator=generator)
        parts.append((runs(prompts.tokens) - prompts.target).square() / scale)
    return torch.cat(parts, 1)


def trained(learner: Learner, task: Multitask, effort: Effort, *, seed: int) -> tuple[Runs | Deep, Row]:
    """All restarts of one point, trained as one model, and what came out."""
    began = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    runs = (Runs if learner.layers == 1 else Deep)(learner, task, effort.restarts, generator=generator)
    if isinstance(runs, Runs):
        runs.check(drawn_prompts(task, 3, generator=generator))
    optimiser = torch.optim.Adam(runs.parameters(), lr=effort.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, effort.steps)
    for _ in range(effort.steps):
        prompts = drawn_prompts(task, effort.batch, generator=generator)
        loss = (runs(prompts.tokens) - prompts.target).square().mean(1).sum()  # a sum over restarts: none feels another
        optimiser.zero_grad()
        loss.backward()
        if effort.clip is not None:
            assert isinstance(runs, Deep)
            for stack in runs.stacks:
                nn.utils.clip_grad_norm_(stack.parameters(), effort.clip)
        optimiser.step()
        schedule.step()
    picked = errors(runs, task, effort.test // 2, generator=generator).mean(1)
    best = int(picked.argmin())
    tested = errors(runs, task, effort.test, generator=generator)[best]
    return runs, {
        "risk": tested.mean().item(), "error": tested.std().item() / effort.test**0.5, "restarts": sorted(picked.tolist()), "best": best,
        "seed": seed, "cpu_seconds": round(time.process_time() - began, 1), "effort": asdict(effort),
        "torch": str(torch.__version__), "machine": platform.machine(),
    }  # fmt: skip


def least_risk(learner: Learner, task: Multitask) -> float:
    """The closed form of the learner's kind, over the variance of a noiseless label. Of one layer, with delimiters where it has gates."""
    among, with_query = task.example_correlations
    world = {"task_correlation": among, "query_correlation": with_query, "covariance": task.covariance_matrix, "noise_variance": 0.0}
    match learner.gate:
        case "none":
            found = linear_attention_risk(**world)
        case "value":
            found = optimum(**world).risk
        case _:
            examples = {"examples": task.examples, "correlations": task.query_correlations, "dimension": task.dimension}
            found = scalar_gate_optimum(**examples, covariance=task.covariance_matrix, noise_variance=0.0).risk
    return float(found / task.covariance_matrix.trace())


def resumed(
    points: Sequence[Any], train: Callable[..., Row], *, key: Callable[[Row], Any], place: Path | None, stale: Callable[[Row], bool] = lambda _: False
) -> list[Row]:
    """A row for every point. Those that `place` holds are passed over, unless they are stale; each new one is written there at once.

    `place` is read again each time, so that several processes can share it.
    """
    rows: dict[Any, Row] = {}
    for point in points:
        rows |= {key(row): row for row in (read_lines(place) if place else [])}
        if point not in rows or stale(rows[point]):
            row = train(*point)
            print(f"{point}: {row['risk']:.4f} in {row['cpu_seconds']} s", file=sys.stderr)
            rows |= {key(row): row for row in (read_lines(place) if place else [])} | {point: row}
            if place:
                write_lines(place, rows.values())
    return [rows[point] for point in points]
