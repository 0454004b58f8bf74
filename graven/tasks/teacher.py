"""A teacher to be imitated: causal linear self-attention with given weights, on normal tokens.

    y_t = (sum_(s <= t) v_s k_s^T) q_t,      v = W_V x,  k = W_K x,  q = W_Q x,      x ~ N(0, I)

Its power grows as t^2, so a loss means nothing without it: targets come divided by the root of their exact mean power, and a mean squared
error is then a share of it.

Source: Zucchet et al. 2023, arXiv:2309.01775, equation 1 and section 4.1; power and form space are ours, docs/theory.md.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError
from graven.shapes import check

TOLERANCE = 1e-9  # below this share of the largest, a singular value is 0


class Ranks(NamedTuple):
    """How many independent sums over the past and readings of the token a teacher needs: the least neurons that can hold it.

    Args:
        accumulators: Rank of its form space on the side of the past.
        queries: Rank on the side of the token that reads.
        smallest: Least nonzero singular value on either side, as a share of the largest of its side. Training stalls near its square.
    """

    accumulators: int
    queries: int
    smallest: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """One teacher, which draws tokens and what it reads from them.

    Args:
        w_v, w_k, w_q: Its matrices, float64.
        length: Tokens of a sequence.
    Raises:
        ShapeError: The matrices do not fit each other.
        SpecError: They are not finite or give nothing but 0, or `length` is below 1.
    """

    w_v: Float[Tensor, "V D"]
    w_k: Float[Tensor, "K D"]
    w_q: Float[Tensor, "K D"]
    length: int = 32

    def __post_init__(self) -> None:
        check(w_v=(self.w_v, "V D"), w_k=(self.w_k, "K D"), w_q=(self.w_q, "K D"))
        for name in ("w_v", "w_k", "w_q"):
            if not bool(getattr(self, name).isfinite().all()):
                raise SpecError(f"`{name}` has an entry that is not finite; give numbers.")
            object.__setattr__(self, name, getattr(self, name).detach().double())
        if self.length < 1:
            raise SpecError(f"`length` is {self.length}; it must be at least 1.")
        if not self.power > 0:
            raise SpecError("W_V or W_K^T W_Q is 0, so this teacher reads 0 always; give matrices whose product is not.")

    @classmethod
    def random(cls, *, dimension: int, generator: torch.Generator, rank: int | None = None, length: int = 32) -> "Teacher":
        """Three matrices with entries N(0, 1 / D), and all but the `rank` largest singular values of each set to 0.

        Raises:
            SpecError: `dimension` is below 1, or `rank` is not between 1 and `dimension`.
        Source: Zucchet et al. 2023, arXiv:2309.01775, section 4.2 (rank 6 of 12).
        """
        if dimension < 1:
            raise SpecError(f"`dimension` is {dimension}; it must be at least 1.")
        rank = dimension if rank is None else rank
        if not 1 <= rank <= dimension:
            raise SpecError(f"`rank` is {rank} and `dimension` is {dimension}; a rank is between 1 and that.")

        def drawn() -> Tensor:
            left, values, right = torch.linalg.svd(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))
            values[rank:] = 0.0
            return left * values @ right / dimension**0.5

        return cls(w_v=drawn(), w_k=drawn(), w_q=drawn(), length=length)

    @property
    def key_query(self) -> Float[Tensor, "D D"]:
        """W_K^T W_Q: all of keys and queries that is seen from outside."""
        return self.w_k.T @ self.w_q

    @cached_property
    def power(self) -> float:
        """Exact mean square of what is read, over outputs and the tokens of a sequence: the squared scale of the targets."""
        values, m = self.w_v.T @ self.w_v, self.key_query
        square, symmetric, trace = m @ m.T, (m + m.T) / 2, m.trace()
        unit = torch.eye(len(m), dtype=torch.float64)
        # E S N S, E S M x x^T M^T x x^T and E (x^T M x)^2 x x^T for the sum S over k earlier tokens, by Isserlis' theorem
        cross = m @ (trace * unit + m + m.T)
        own = (trace**2 + 2 * (symmetric @ symmetric).trace()) * unit + 4 * trace * symmetric + 8 * symmetric @ symmetric
        total = torch.zeros_like(m)
        for k in range(self.length):
            total += k * (k + 1) * square + k * square.trace() * unit + k * (cross + cross.T) + own
        return float((values @ total).trace() / (self.length * len(self.w_v)))

    @property
    def ranks(self) -> Ranks:
        """Ranks of the third-order form (w_v)_i (x x^T) W_K^T W_Q x: one side symmetric in the two entries of an earlier token."""
        form = torch.einsum("ia,bc->abic", self.w_v, self.key_query)
        symmetric = (form + form.transpose(0, 1)) / 2
        # in an isometric basis of symmetric matrices the off-diagonal entries have weight sqrt 2; the full flattening has the same spectrum
        sides = (symmetric.flatten(2).flatten(0, 1), symmetric.movedim(-1, 0).flatten(1))
        shares = [values / values[0] for values in map(torch.linalg.svdvals, sides)]
        kept = [share[share > TOLERANCE] for share in shares]
        return Ranks(len(kept[0]), len(kept[1]), min(float(share[-1]) for share in kept))

    def read(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """What the teacher reads, divided by the root of its power; in the dtype of the tokens."""
        check(x=(x, f"B T {self.w_v.shape[1]}"))
        return attend(x, w_v=self.w_v.to(x.dtype) / self.power**0.5, key_query=self.key_query.to(x.dtype))

    def sample(self, size: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Tokens [B, T, D] and what the teacher reads from them [B, T, V]."""
        x = torch.randn(size, self.length, self.w_v.shape[1], generator=generator, dtype=dtype)
        return x, self.read(x)


def attend(x: Float[Tensor, "*R B T D"], *, w_v: Float[Tensor, "*R V D"], key_query: Float[Tensor, "*R D D"]) -> Float[Tensor, "*R B T V"]:
    """Causal linear self-attention from W_V and W_K^T W_Q; several teachers at once where there is a leading axis for them.

    Source: Zucchet et al. 2023, arXiv:2309.01775, equation 1.
    """
    w_v, key_query = w_v.unsqueeze(-3), key_query.unsqueeze(-3)
    return (x @ key_query @ x.mT).mT.tril() @ (x @ w_v.mT)  # row t, column s of the first: x_s^T W_K^T W_Q x_t
