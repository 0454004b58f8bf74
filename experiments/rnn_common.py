"""Gated RNNs of one shape trained side by side, one a seed: on one core a step of eight of them costs little more than a step of one.

The experiments `rnn_*.py` share it. Every run has weights, tokens and targets of its own; the loss is a sum over runs, so none feels another.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graven.fit import FitSpec, fit
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.ops.diagonal import diagonal
from graven.report import read_lines, write_lines
from graven.tasks.regression import Regression
from graven.tasks.teacher import Teacher, attend

S = TypeVar("S")
Batch = Callable[[int], tuple[Tensor, Tensor]]
HERE = Path(__file__).parent
FIGURES = HERE.parent / "docs" / "figures"
ROWS = HERE / "rows"


class Runs(nn.Module):
    """R gated RNNs as one: the states of all are one diagonal recurrence of R * n entries. `check_read` holds it to the layers.

    Args:
        spec: Of each.
        seeds: Of the first weights, one a run.
        ceiling: Largest decay that the projection lets be.
    """

    def __init__(self, spec: GatedRNNSpec, seeds: Sequence[int], *, ceiling: float = 1.0):
        super().__init__()
        self.spec, self.ceiling = spec, ceiling
        layers = [GatedRNN(spec, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        for name, _ in layers[0].named_parameters():
            self.register_parameter(name, nn.Parameter(torch.stack([layer.get_parameter(name).detach() for layer in layers])))

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        """Reads [R, B, T, E] for tokens [R, B, T, D]; those of the last token only where `last`."""
        runs, size, length, _ = x.shape
        rows = x.transpose(1, 2).flatten(1, 2)
        u = (_affine(rows, self.w_in1) * _affine(rows, self.w_in2)).transpose(0, 1).reshape(length, size, -1)
        h = diagonal(u.transpose(0, 1), decay=self.decay.flatten())[0].transpose(0, 1)
        h = (h[-1:] if last else h).reshape(-1, runs, self.spec.hidden).transpose(0, 1)
        if self.spec.gating == "side":
            gated = _affine(rows[:, -size:] if last else rows, self.w_side) * h
        else:
            gated = (h @ self.w_out1.mT) * (h @ self.w_out2.mT)
        return (gated @ self.readout.mT).unflatten(1, (-1, size)).transpose(1, 2)

    @torch.no_grad()
    def project_(self) -> None:
        """Decays to the nearest ones in [0, ceiling]."""
        self.decay.clamp_(0.0, self.ceiling)

    def layers(self) -> list[GatedRNN]:
        """The runs as layers."""
        result = [GatedRNN(self.spec) for _ in self.decay]
        for run, layer in enumerate(result):
            layer.load_state_dict({name: parameter.detach()[run] for name, parameter in self.named_parameters()})
        return result

    @torch.no_grad()
    def check_read(self, x: Tensor) -> None:
        """The same from the layers, one by one."""
        for own, tokens, layer in zip(self(x), x, self.layers(), strict=True):
            torch.testing.assert_close(own, layer(tokens)[0], rtol=1e-4, atol=1e-4)


def _affine(x: Tensor, weight: Tensor) -> Tensor:
    """[R, N, D] by [R, n, D + 1], whose last column acts on the constant 1."""
    return torch.baddbmm(weight[:, None, :, -1], x, weight[..., :-1].mT)


def train(
    runs: Runs,
    batch: Batch,
    spec: FitSpec,
    *,
    size: int,
    last: bool = False,
    objective: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> dict[str, Any]:
    """Train a group in place; what to stamp on the row of each run, CPU seconds of a run being those of the group over their number.

    Args:
        batch: Draws [R, size, T, D] and targets for a size.
        size: Sequences of a step, each run's own.
        last: The target is that of the last token.
    """
    runs.check_read(batch(2)[0])
    fitted = fit(
        runs,
        lambda: batch(size),
        spec,
        read=lambda x: read(runs, x, last=last),
        objective=lambda y, target: len(target) * objective(y, target),
    )
    seconds = fitted.cpu_seconds / len(runs.decay)
    return {"steps": fitted.steps, "size": size, "outcome": fitted.outcome.name, "cpu_seconds": round(seconds, 2), "torch": str(torch.__version__)}


def read(runs: Runs, x: Tensor, *, last: bool) -> Tensor:
    """All reads, or those of the last token without their axis."""
    return runs(x, last=True)[:, :, 0] if last else runs(x)


@torch.no_grad()
def relative_losses(runs: Runs, batch: Batch, *, sequences: int) -> list[float]:
    """Mean squared error of every run on fresh tokens over the power of the same targets: a ratio, for the powers have heavy tails."""
    parts = [batch(min(500, sequences)) for _ in range(max(1, sequences // 500))]
    errors = sum((runs(x) - target).square().sum((1, 2, 3)) for x, target in parts)
    return (errors / sum(target.square().sum((1, 2, 3)) for _, target in parts)).tolist()


def teachers_batch(teachers: Sequence[Teacher], *, generator: torch.Generator) -> Batch:
    """Batches of several teachers, each with tokens of its own, targets of power 1."""
    w_v = torch.stack([teacher.w_v / teacher.power**0.5 for teacher in teachers]).float()
    key_query = torch.stack([teacher.key_query for teacher in teachers]).float()
    length = teachers[0].length

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(teachers), size, length, w_v.shape[-1], generator=generator)
        return x, attend(x, w_v=w_v, key_query=key_query)

    return batch


def prompts_batch(task: Regression, runs: int, *, generator: torch.Generator) -> Batch:
    """Prompts of in-context regression, each run's own."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        prompts = task.sample(runs * size, generator=generator)
        return prompts.tokens.unflatten(0, (runs, size)), prompts.target.unflatten(0, (runs, size))

    return batch


@torch.no_grad()
def paired_excess(runs: Runs, task: Regression, rate: float, *, prompts: int, seed: int) -> list[tuple[float, float]]:
    """How far the loss of every run lies above that of one gradient step on the same prompts, with its standard error.

    The loss is half of the mean squared error over outputs. Pairing cancels most of the noise of the prompts.
    """
    generator, parts = torch.Generator().manual_seed(seed), []
    for _ in range(max(1, prompts // 5000)):
        drawn = task.sample(min(5000, prompts), generator=generator)
        step = rate * torch.einsum("bne,bnk,bk->be", drawn.labels, drawn.features, drawn.query)
        own = torch.stack([layer.read(layer.hidden(drawn.tokens)[:, -1:], drawn.tokens[:, -1:])[:, 0] for layer in runs.layers()])
        parts.append(((own - drawn.target).square() - (step - drawn.target).square()).mean(-1) / 2)
    difference = torch.cat(parts, 1)
    return [(row.mean().item(), row.std().item() / len(row) ** 0.5) for row in difference]


def asked(scales: Mapping[str, S]) -> tuple[argparse.Namespace, S]:
    """What the command line asks for, `scale` and `report`, and the scale itself; one thread from here on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=scales, default="small")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return arguments, scales[arguments.scale]


def resumed(name: str, scale: str, points: Sequence[Any], key: str, measure: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of every point; those that stand in the file of the full scale are passed over, and every new one is written at once."""
    place = ROWS / f"{name}.jsonl"
    rows = read_lines(place) if scale == "full" else []
    done = {repr(row[key]) for row in rows}
    for point in points:
        if repr(point) not in done:
            rows += measure(point)
            if scale == "full":
                write_lines(place, rows)
    return rows
