"""In-context linear regression: a prompt of examples [x; y] with y = W x, W new for every prompt, then a query [x; 0].

    x   x_1  x_2 ... x_T  x
    y   y_1  y_2 ... y_T  0          target  W x

The loss of the paper is half of the mean squared error over outputs. Several tasks in one prompt, with noise: `graven.tasks.multitask`.

Source: Zucchet et al. 2023, arXiv:2309.01775, section 5.1.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError

Law = Literal["uniform", "normal"]


@dataclass(frozen=True)
class RegressionPrompts:
    """A batch of prompts.

    Args:
        tokens: Each [x; y]; the last one, the query, [x; 0].
        target: What the query's y is.
        dimension: Of x, so that tokens can be taken apart.
    """

    tokens: Float[Tensor, "B T D"]
    target: Float[Tensor, "B E"]
    dimension: int

    @property
    def features(self) -> Float[Tensor, "B N K"]:
        """x of the examples."""
        return self.tokens[:, :-1, : self.dimension]

    @property
    def labels(self) -> Float[Tensor, "B N E"]:
        """y of the examples."""
        return self.tokens[:, :-1, self.dimension :]

    @property
    def query(self) -> Float[Tensor, "B K"]:
        """x of the query."""
        return self.tokens[:, -1, : self.dimension]


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A distribution of prompts.

    Args:
        dimension: Of x.
        outputs: Of y.
        examples: Of a prompt; it has one token more.
        law: Of the entries of x, with mean 0 and variance 1: "uniform" on [-sqrt 3, sqrt 3], kurtosis 9/5, or "normal", kurtosis 3.
        weight_variance: Of the entries of W, which are normal.
    Raises:
        SpecError: A number is out of range, or the law is unknown.
    """

    dimension: int = 3
    outputs: int = 3
    examples: int = 12
    law: Law = "uniform"
    weight_variance: float = 1 / 3

    def __post_init__(self) -> None:
        for name, least in (("dimension", 1), ("outputs", 1), ("examples", 0)):
            if getattr(self, name) < least:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least {least}.")
        if self.law not in ("uniform", "normal"):
            raise SpecError(f'`law` is {self.law!r}; it must be "uniform" or "normal".')
        if not 0 < self.weight_variance < math.inf:
            raise SpecError(f"`weight_variance` is {self.weight_variance}; it must be above 0 and finite.")

    @property
    def width(self) -> int:
        """Entries of a token."""
        return self.dimension + self.outputs

    def doubled(self) -> "Regression":
        """The same with twice the variance of W: what the paper tests on."""
        return dataclasses.replace(self, weight_variance=2 * self.weight_variance)

    def sample(self, size: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> RegressionPrompts:
        """A batch of prompts, B of them. Numbers are drawn in `dtype`."""
        shape = (size, self.examples + 1, self.dimension)
        if self.law == "uniform":
            x = (2 * torch.rand(*shape, generator=generator, dtype=dtype) - 1) * 3**0.5
        else:
            x = torch.randn(*shape, generator=generator, dtype=dtype)
        weights = self.weight_variance**0.5 * torch.randn(size, self.outputs, self.dimension, generator=generator, dtype=dtype)
        y = x @ weights.mT
        target = y[:, -1].clone()
        y[:, -1] = 0.0
        return RegressionPrompts(torch.cat([x, y], -1), target, self.dimension)
