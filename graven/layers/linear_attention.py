"""Linear self-attention: no softmax, no scale; heads side by side.

    S_t = S_(t-1) + v_t k_t^T,    y_t = S_t q_t,    v = W_V x, k = W_K x, q = W_Q x

Source: Zucchet et al. 2023, arXiv:2309.01775, equation 1.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from graven.layers.base import at_least_one, entered
from graven.ops.gated_linear import gated_linear


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec:
    """The shape of a `LinearAttention`.

    Args:
        width: Of a token, D.
        key_width: Of a head, K; `width` where left out.
        value_width: Of a head, V; `width` where left out.
        heads: H. The output has H * V entries a token.
    Raises:
        SpecError: A number is below 1.
    """

    width: int
    key_width: int | None = None
    value_width: int | None = None
    heads: int = 1

    def __post_init__(self) -> None:
        at_least_one(width=self.width, key_width=self.keys, value_width=self.values, heads=self.heads)

    @property
    def keys(self) -> int:
        """Width of a key."""
        return self.width if self.key_width is None else self.key_width

    @property
    def values(self) -> int:
        """Width of a value."""
        return self.width if self.value_width is None else self.value_width


class LinearAttention(nn.Module):
    """The layer of equation 1; `w_v` [H, V, D], `w_k` and `w_q` [H, K, D] start at N(0, 1 / D).

    `GatedLinear` with no gate computes the same; this one holds the matrices as the paper and the constructions write them.
    """

    def __init__(self, spec: LinearAttentionSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec

        def drawn(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(spec.heads, rows, spec.width, generator=generator, dtype=dtype) * spec.width**-0.5)

        self.w_v, self.w_k, self.w_q = drawn(spec.values), drawn(spec.keys), drawn(spec.keys)

    def forward(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "B H K V"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B H K V"]]:
        """What every token reads, E = H * V, and the state after the last one, keys first.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        spec = self.spec
        x = entered(x, width=spec.width, mask=mask, state=(state, f"B {spec.heads} {spec.keys} {spec.values}"))
        v, k, q = (torch.einsum("btd,hed->bthe", x, weight) for weight in (self.w_v, self.w_k, self.w_q))
        y, end = gated_linear(q, k, v, state=state)
        return y.flatten(2), end
