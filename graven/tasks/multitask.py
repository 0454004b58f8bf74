"""Regression on a prompt of several tasks: examples (x, y = beta_k . x + noise) of one task after the other, then a query of its own task.

Two tasks of two examples with delimiters and contextual features, a column a token; each is [x; y; c]:

    x  x11 x12  0  x21 x22  0   x
    y  y11 y12  0  y21 y22  0   0          target  beta . x + noise
    c  c_0 c_0 c_1 c_0 c_0 c_2 c_0         c_0 marks data, c_k the end of task k

One task with correlation 1 is plain in-context regression.

Source: Li et al. 2025, arXiv:2504.04308, definitions 1 and 2, section 5.1 and equation 22.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from graven.errors import SpecError
from graven.shapes import check


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts.

    Args:
        tokens: Each [x; y; c].
        target: What the query's label is.
        places: Columns of the examples, in order.
        dimension: Of x, so that tokens can be taken apart.
    """

    tokens: Float[Tensor, "B T D"]
    target: Float[Tensor, "B"]
    places: Int[Tensor, "N"]
    dimension: int

    @property
    def features(self) -> Float[Tensor, "B N K"]:
        """x of the examples."""
        return self.tokens[:, self.places, : self.dimension]

    @property
    def labels(self) -> Float[Tensor, "B N"]:
        """y of the examples."""
        return self.tokens[:, self.places, self.dimension]

    @property
    def query(self) -> Float[Tensor, "B K"]:
        """x of the query."""
        return self.tokens[:, -1, : self.dimension]


@dataclass(frozen=True, kw_only=True)
class Multitask:
    """A distribution of prompts.

    Args:
        dimension: Of x.
        examples: Of each task, in the order of the prompt; a task may have none.
        query_correlations: r_k, of each task with the query's.
        task_correlations: Of the tasks with each other; uncorrelated where left out.
        covariance: Of x; the identity where left out.
        noise_variance: Of every label, the query's included.
        features: Width p of the contextual features; 0 for none.
        delimiters: Each task ends with a token without data.
    Raises:
        SpecError: A number is out of range, parts do not fit each other, or no tasks can have such correlations.
    """

    dimension: int
    examples: tuple[int, ...]
    query_correlations: tuple[float, ...]
    task_correlations: tuple[tuple[float, ...], ...] | None = None
    covariance: tuple[tuple[float, ...], ...] | None = None
    noise_variance: float = 0.0
    features: int = 0
    delimiters: bool = True

    def __post_init__(self) -> None:
        for name, value, least in (("dimension", self.dimension, 1), ("features", self.features, 0), ("noise_variance", self.noise_variance, 0.0)):
            if not value >= least:
                raise SpecError(f"`{name}` is {value}; it must be at least {least}.")
        if not self.examples or min(self.examples) < 0:
            raise SpecError(f"`examples` is {self.examples}; give one number of at least 0 for every task.")
        if len(self.query_correlations) != len(self.examples):
            raise SpecError(f"`query_correlations` has {len(self.query_correlations)} entries and there are {self.tasks} tasks; give one each.")
        for name, matrix, size in (("covariance", self.covariance, self.dimension), ("task_correlations", self.task_correlations, self.tasks)):
            if matrix is not None and (len(matrix) != size or {len(row) for row in matrix} != {size}):
                raise SpecError(f"`{name}` is not {size} rows of {size} numbers; give that many.")
        _root(self.covariance_matrix, what="`covariance`")
        joint = self._joint()
        if not np.allclose(np.diag(joint), 1):
            raise SpecError("`task_correlations` has a diagonal entry other than 1; a task correlates with itself by 1.")
        _root(joint, what="`task_correlations` bordered by `query_correlations`")

    @property
    def tasks(self) -> int:
        """How many tasks the context has."""
        return len(self.examples)

    @property
    def width(self) -> int:
        """Entries of a token."""
        return self.dimension + 1 + self.features

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return sum(self.examples) + self.tasks * self.delimiters + 1

    @property
    def covariance_matrix(self) -> Float[np.ndarray, "K K"]:
        """Sigma."""
        return np.eye(self.dimension) if self.covariance is None else np.array(self.covariance, dtype=np.float64)

    @property
    def example_correlations(self) -> tuple[Float[np.ndarray, "N N"], Float[np.ndarray, "N"]]:
        """R and r, one row an example."""
        owner = np.repeat(np.arange(self.tasks), self.examples)
        joint = self._joint()
        return joint[np.ix_(owner, owner)], joint[owner, -1]

    def marks(self, *, generator: torch.Generator) -> Float[Tensor, "C F"]:
        """c_0, c_1 ... c_K, standard normal. Drawn once for a run, not once for a prompt."""
        return torch.randn(self.tasks + 1, self.features, generator=generator, dtype=torch.float64)

    def sample(
        self, size: int, *, generator: torch.Generator, marks: Float[Tensor, "*B C F"] | None = None, dtype: torch.dtype = torch.float32
    ) -> Prompts:
        """A batch of prompts.

        Args:
            size: Prompts, B.
            generator: The only source of randomness.
            marks: Contextual features, one row for data and one for each task's delimiter; needed where there are features. [C, F] for all
                prompts, or [B, C, F] for each its own.
            dtype: Of what comes back. Numbers are drawn in float64, so both dtypes get the same prompts.
        Raises:
            SpecError: Marks are missing, or given for no features.
            ShapeError: There are not as many as tasks and one more, or they have another width.
        Source: Li et al. 2025, arXiv:2504.04308, definition 2 and equation 22.
        """
        if (marks is not None) != (self.features > 0):
            raise SpecError(f"`marks` is {'missing' if marks is None else 'given'} and `features` is {self.features}; draw them with `task.marks`.")
        places, ends = self._layout()
        tokens = torch.zeros(size, self.length, self.width, dtype=torch.float64)
        owner = torch.arange(self.tasks).repeat_interleave(torch.tensor(self.examples))
        data = torch.cat([places, torch.tensor([self.length - 1])])
        x, y = self._examples(size, torch.cat([owner, torch.tensor([self.tasks])]), generator=generator)
        tokens[:, data, : self.dimension] = x
        tokens[:, places, self.dimension] = y[:, :-1]
        if marks is not None:
            own = marks[None] if marks.ndim == 2 else marks
            check(marks=(own, f"B {self.tasks + 1} {self.features}"))
            tokens[:, data, self.dimension + 1 :] = own[:, :1].double()
            tokens[:, ends, self.dimension + 1 :] = own[:, 1 : 1 + len(ends)].double()
        return Prompts(tokens.to(dtype), y[:, -1].to(dtype), places, self.dimension)

    def _examples(self, size: int, owner: Tensor, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Features and labels of examples of the tasks named, the query's last."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        root = torch.from_numpy(_root(self._joint(), what="correlations"))
        betas = root @ normal(size, self.tasks + 1, self.dimension)
        x = normal(size, len(owner), self.dimension) @ torch.from_numpy(_root(self.covariance_matrix, what="covariance")).T
        return x, (x * betas[:, owner]).sum(-1) + self.noise_variance**0.5 * normal(size, len(owner))

    def _layout(self) -> tuple[Tensor, Tensor]:
        """Columns of the examples and of the delimiters."""
        places: list[int] = []
        ends: list[int] = []
        column = 0
        for count in self.examples:
            places += range(column, column + count)
            column += count
            if self.delimiters:
                ends.append(column)
                column += 1
        return torch.tensor(places, dtype=torch.long), torch.tensor(ends, dtype=torch.long)

    def _joint(self) -> np.ndarray:
        among = np.eye(self.tasks) if self.task_correlations is None else np.array(self.task_correlations, dtype=np.float64)
        with_query = np.array(self.query_correlations, dtype=np.float64)[:, None]
        return np.block([[among, with_query], [with_query.T, np.ones((1, 1))]])


def _root(matrix: np.ndarray, *, what: str) -> np.ndarray:
    """A with A A^T = matrix."""
    values, vectors = np.linalg.eigh(matrix)
    if not np.allclose(matrix, matrix.T) or values[0] < -1e-9 * len(matrix):
        raise SpecError(f"{what} has the eigenvalue {values[0]:.3g} or is not symmetric; it must be symmetric and positive semidefinite.")
    root: np.ndarray = vectors * np.sqrt(np.maximum(values, 0.0))
    return root
