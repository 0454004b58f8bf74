"""How a gradient becomes a step of a write: the part of a memory that can be exchanged.

    plain          M' = M - a g                                    a: one number, or one a coordinate
    momentum       V' = b V + g,   M' = M - a V'
    low rank       M' = M - a (g + A B^T g)                        over all coordinates of a memory together; B = 0 at the start
    Gauss-Newton   M' = M - a (G + c I)^-1 g                       by conjugate gradients, for each row by itself
    Adam           for frozen models

G is the Gauss-Newton matrix of the loss of a write, sum_t w_t J_t^T (diag p_t - p_t p_t^T) J_t with J_t = d logits_t / d M. Every other number of
a step (a, b, A, B) may be learned through the write.

Source: the plain rule Kuratov et al. 2026, arXiv:2603.13875v2, equation 5; Gauss-Newton as in Martens 2010 (ICML), section 4; preconditioning as what
one step can gain, Li et al. 2025, arXiv:2504.04308, equation 5. As rules of a memory: ours, tests/test_rules.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError
from graven.ops.inner_loop import Tensors

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Moments:
    """What a rule carries from step to step, batch first, and how many gradients went into it."""

    parts: Tensors
    count: int

    def kept(self, keep: Tensor) -> "Moments":
        """Of some of the rows."""
        return Moments(tuple(part[keep] for part in self.parts), self.count)


@dataclass(frozen=True)
class At:
    """Where a step stands.

    Args:
        learned: The learned numbers of the rule, by name.
        count: Steps before it.
        beyond: How many steps behind the last one that was trained it is; 0 up to there.
        curvature: Products with the Gauss-Newton matrix; none where the loss is not that of a write.
    """

    learned: Mapping[str, Tensor]
    count: int
    beyond: int = 0
    curvature: Product | None = None


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain gradient steps.

    Args:
        rate: Step size, the start of it where it is learned.
        learn: "no", one "scalar", or one per "coordinate" of the memory.
        clip: Largest Euclidean norm of one row's gradient; no limit where left out.
        settle: Factor on the rate for each step beyond the `steps` of the spec: below 1, a longer write comes to rest near the last step that was
            trained, where a constant rate may walk on past it.
    Raises:
        SpecError: A number is out of range, or `learn` is another word.
    """

    kind: Literal["sgd"] = field(default="sgd", repr=False)
    rate: float = 0.2
    learn: Literal["no", "scalar", "coordinate"] = "no"
    clip: float | None = None
    settle: float = 1.0

    def __post_init__(self) -> None:
        _above_0(self, "rate", "clip")
        if not 0 < self.settle <= 1:
            raise SpecError(f"`settle` is {self.settle}; it must be above 0 and at most 1, which is a constant rate.")
        if self.learn not in ("no", "scalar", "coordinate"):
            raise SpecError(f'`learn` is {self.learn!r}; it must be "no", "scalar" or "coordinate".')

    def learned(self, slots: int, width: int, _: torch.Generator) -> dict[str, Tensor]:
        """What training changes, at the start."""
        return {} if self.learn == "no" else {"rate": torch.full((slots, width) if self.learn == "coordinate" else (), self.rate)}

    def carried(self, _: Tensor) -> Tensors:
        """What the first step is handed."""
        return ()

    def change(self, gradient: Float[Tensor, "B M D"], _: Tensors, at: At) -> tuple[Float[Tensor, "B M D"], Tensors]:
        """What a step subtracts from the state, and what it hands on."""
        if self.clip is not None:
            norm = gradient.flatten(1).norm(dim=1).clamp(min=self.clip)[:, None, None]
            gradient = gradient * (self.clip / norm)
        return self.settle**at.beyond * at.learned.get("rate", self.rate) * gradient, ()


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """Steps along a sum of gradients that forgets; trained through, the sum included.

    Args:
        rate: Step size.
        decay: Share of the sum that is kept; the sum starts at 0.
        learn: Both numbers are learned, from here.
    Raises:
        SpecError: `rate` is not above 0, or `decay` is no share.
    Source: Polyak 1964, the heavy ball; trained through, ours.
    """

    kind: Literal["momentum"] = field(default="momentum", repr=False)
    rate: float = 0.2
    decay: float = 0.5
    learn: bool = False

    def __post_init__(self) -> None:
        _above_0(self, "rate")
        if not 0 <= self.decay < 1:
            raise SpecError(f"`decay` is {self.decay}; it must be at least 0 and below 1.")

    def learned(self, _: int, __: int, ___: torch.Generator) -> dict[str, Tensor]:
        return {"rate": torch.tensor(self.rate), "decay": torch.tensor(self.decay)} if self.learn else {}

    def carried(self, state: Tensor) -> Tensors:
        return (torch.zeros_like(state),)

    def change(self, gradient: Float[Tensor, "B M D"], carried: Tensors, at: At) -> tuple[Float[Tensor, "B M D"], Tensors]:
        velocity = at.learned.get("decay", self.decay) * carried[0] + gradient
        return at.learned.get("rate", self.rate) * velocity, (velocity,)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Plain steps with a learned preconditioner of low rank on all coordinates of a memory together.

    Args:
        rate: Step size; the preconditioner grows from the identity.
        rank: Columns of A and of B.
    Raises:
        SpecError: A number is out of range.
    """

    kind: Literal["low rank"] = field(default="low rank", repr=False)
    rate: float = 0.2
    rank: int = 8

    def __post_init__(self) -> None:
        _above_0(self, "rate")
        if self.rank < 1:
            raise SpecError(f"`rank` is {self.rank}; it must be at least 1.")

    def learned(self, slots: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        size = slots * width
        return {"left": torch.randn(size, self.rank, generator=generator) * size**-0.5, "right": torch.zeros(size, self.rank)}

    def carried(self, _: Tensor) -> Tensors:
        return ()

    def change(self, gradient: Float[Tensor, "B M D"], _: Tensors, at: At) -> tuple[Float[Tensor, "B M D"], Tensors]:
        through = (gradient.flatten(1) @ at.learned["right"]) @ at.learned["left"].T
        return self.rate * (gradient + through.view_as(gradient)), ()


@dataclass(frozen=True, kw_only=True)
class GaussNewton:
    """Damped Gauss-Newton steps. Training sees the gradient in them, and holds the matrix constant: its derivative would be a third one.

    Args:
        rate: Share of the whole step.
        damping: c, in units of the matrix.
        iterations: Of conjugate gradients; each costs a product with the matrix, about two plain steps. What they leave out, the derivative
            leaves out alike.
        learn: The rate is learned.
    Raises:
        SpecError: A number is out of range.
    """

    kind: Literal["gauss-newton"] = field(default="gauss-newton", repr=False)
    rate: float = 1.0
    damping: float = 1.0
    iterations: int = 3
    learn: bool = False

    def __post_init__(self) -> None:
        _above_0(self, "rate", "damping")
        if self.iterations < 1:
            raise SpecError(f"`iterations` is {self.iterations}; it must be at least 1.")

    def learned(self, _: int, __: int, ___: torch.Generator) -> dict[str, Tensor]:
        return {"rate": torch.tensor(self.rate)} if self.learn else {}

    def carried(self, _: Tensor) -> Tensors:
        return ()

    def change(self, gradient: Float[Tensor, "B M D"], _: Tensors, at: At) -> tuple[Float[Tensor, "B M D"], Tensors]:
        product = at.curvature
        if product is None:
            raise SpecError("a Gauss-Newton step needs the loss of a write, and this objective is another; choose another rule.")
        solution: Tensor = _Solved.apply(gradient, lambda v: product(v) + self.damping * v, self.iterations)  # type: ignore[no-untyped-call]
        return at.learned.get("rate", self.rate) * solution, ()


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam on the memory, for frozen models: nothing is trained through its moments here.

    Args:
        rate: Step size.
        betas: Decay of the first and second moment.
        epsilon: Added to the root of the second moment.
    Raises:
        SpecError: `rate` is not above 0.
    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1.
    """

    kind: Literal["adam"] = field(default="adam", repr=False)
    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _above_0(self, "rate")

    def learned(self, _: int, __: int, ___: torch.Generator) -> dict[str, Tensor]:
        return {}

    def carried(self, state: Tensor) -> Tensors:
        return (torch.zeros_like(state), torch.zeros_like(state))

    def change(self, gradient: Float[Tensor, "B M D"], carried: Tensors, at: At) -> tuple[Float[Tensor, "B M D"], Tensors]:
        (beta1, beta2), count = self.betas, at.count + 1
        first = carried[0].lerp(gradient, 1 - beta1)
        second = carried[1].lerp(gradient * gradient, 1 - beta2)
        step = (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + self.epsilon)
        return self.rate * step, (first, second)


Rule = SGD | Momentum | LowRank | GaussNewton | Adam


def conjugate_gradients(product: Product, b: Float[Tensor, "B M D"], *, iterations: int) -> Float[Tensor, "B M D"]:
    """x with A x = b for a symmetric positive matrix A a row, from 0; exact after as many iterations as a row has coordinates.

    Source: Hestenes and Stiefel 1952; a row that is solved, or has b = 0, stays where it is.
    """
    least = torch.finfo(b.dtype).tiny
    x, left, along = torch.zeros_like(b), b, b
    square = _inner(left, left)
    for _ in range(iterations):
        image = product(along)
        length = square / _inner(along, image).clamp(min=least)
        x, left = x + length * along, left - length * image
        square, before = _inner(left, left), square
        along = left + square / before.clamp(min=least) * along
    return x


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)


class _Solved(torch.autograd.Function):
    """A^-1 b with A constant: its own transpose, so backward is the same once more."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, product: Product, iterations: int) -> Tensor:
        ctx.solve = lambda v: conjugate_gradients(product, v, iterations=iterations)
        solution: Tensor = ctx.solve(b)
        return solution

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return ctx.solve(cotangent), None, None


def _above_0(rule: object, *names: str) -> None:
    for name in names:
        number = getattr(rule, name)
        if number is not None and not number > 0:
            raise SpecError(f"`{name}` is {number}; it must be above 0.")


PLAIN = SGD()
