"""Training of a sequence layer on a task that is drawn anew for every batch: what the experiments on gated RNNs share.

One recipe: Adam along a cosine, an L2 penalty in the loss, and after every step the layer's own projection, where it has one. A gated RNN
then reaches decays of exactly 0 and 1. Longer training, with files that survive a kill, is `graven.train`.

Source: ours, from the recipe of Zucchet et al. 2023, arXiv:2309.01775, appendix C.1.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import Outcome, SpecError

Batch = Callable[[], tuple[Tensor, Tensor]]
TAIL = 0.05  # share of the steps whose mean loss is reported


@dataclass(frozen=True, kw_only=True)
class FitSpec:
    """How a layer is trained.

    Args:
        steps: Batches, one step each.
        rate: Of Adam at the first step; falls along a half cosine.
        last_rate: At the last one.
        penalty: Of the sum of squares of every parameter but those that the layer projects.
        free: Names of parameters without penalty.
    Raises:
        SpecError: A number is out of range.
    Differs: the paper uses AdamW from 1e-3 to 1e-6 for 300 000 to a million steps, with decoupled weight decay.
    """

    steps: int
    rate: float = 1e-2
    last_rate: float = 1e-6
    penalty: float = 1e-5
    free: tuple[str, ...] = ("decay", "recurrence")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"`steps` is {self.steps}; it must be at least 1.")
        for name, least in (("rate", self.last_rate), ("last_rate", 0.0), ("penalty", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be finite and at least {least}.")


class Fitted(NamedTuple):
    """How a training went.

    Args:
        loss: Mean of the last twentieth of the steps, without the penalty.
        steps: That were taken.
        cpu_seconds: Of this process.
        outcome: DONE, or DIVERGED where a loss was not finite: the layer then keeps the weights that gave it.
    """

    loss: float
    steps: int
    cpu_seconds: float
    outcome: Outcome


def fit(
    layer: nn.Module,
    batch: Batch,
    spec: FitSpec,
    *,
    read: Callable[[Tensor], Tensor] | None = None,
    objective: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    project: Callable[[], None] | None = None,
) -> Fitted:
    """Train a layer in place.

    Args:
        layer: Any module; `layer(x)` gives (reads, state), or say `read`.
        batch: Draws tokens and targets, every call anew.
        spec: The recipe.
        read: Predictions for tokens; `layer(x)[0]` where left out. One that reads the last token only saves the others' work.
        objective: Of predictions and targets.
        project: Called after every step; `layer.project_` where left out and there is one.
    Source: ours; tests/test_fit.py.
    """
    began = time.process_time()
    read = read or (lambda x: layer(x)[0])
    project = project or getattr(layer, "project_", None)
    optimiser = _optimiser(layer, spec)
    losses: list[float] = []
    for step in range(spec.steps):
        for group in optimiser.param_groups:
            group["lr"] = _rate(step, spec)
        x, target = batch()
        loss = objective(read(x), target)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return Fitted(losses[-1], step, time.process_time() - began, Outcome.DIVERGED)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
        if project is not None:
            project()
    tail = losses[-max(1, round(TAIL * spec.steps)) :]
    return Fitted(sum(tail) / len(tail), spec.steps, time.process_time() - began, Outcome.DONE)


def _optimiser(layer: nn.Module, spec: FitSpec) -> torch.optim.Optimizer:
    """Adam's own weight decay is the gradient of half a squared norm, added to the loss's: twice the penalty."""
    named = dict(layer.named_parameters())
    free = [parameter for name, parameter in named.items() if name.rsplit(".", 1)[-1] in spec.free]
    bound = [parameter for name, parameter in named.items() if name.rsplit(".", 1)[-1] not in spec.free]
    groups = [{"params": bound, "weight_decay": 2 * spec.penalty}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=spec.rate, fused=True)


def _rate(step: int, spec: FitSpec) -> float:
    done = step / max(1, spec.steps - 1)
    return spec.last_rate + 0.5 * (spec.rate - spec.last_rate) * (1 + math.cos(math.pi * done))
