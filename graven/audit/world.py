"""On what a layer is judged, and how far from attention is too far."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.kernel import Attention
from graven.errors import ShapeError, SpecError
from graven.shapes import check

DISTANCE = 0.1  # a layer farther than this from every attention is none: a hundredth of its squared coefficients is something else
SEQUENCES = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """On what a layer is judged: fresh tokens, and which of them read.

    Args:
        tokens: Fresh sequences, float64.
        blank: Entries that are 0 in the last token, which is then the only one that reads.
        seed: Of everything that is drawn.
    """

    tokens: Float[Tensor, "B T D"]
    blank: tuple[int, ...]
    seed: int

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens.shape[1]

    def read(self, y: Float[Tensor, "B T E"]) -> Float[Tensor, "N E"]:
        """What counts of what is read."""
        return y[:, -1] if self.blank else y.flatten(0, 1)


def fresh_tokens(tokens: Tensor | None, *, width: int, length: int, blank: tuple[int, ...], seed: int) -> Tensor:
    """Given tokens in float64, or drawn ones, N(0, I).

    Raises:
        ShapeError: Tokens were given that have another width.
        SpecError: They are not finite, or `blank` names an entry that there is not.
    """
    if tokens is not None:
        check(tokens=(tokens, f"B T {width}"))
        if not bool(tokens.isfinite().all()):
            raise SpecError("`tokens` has an entry that is not finite; give numbers.")
        return tokens.detach().double()
    if bad := [entry for entry in blank if not 0 <= entry < width]:
        raise SpecError(f"`blank` names entry {bad[0]} and a token has {width}; entries count from 0.")
    drawn = torch.randn(SEQUENCES, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if blank:
        drawn[:, -1, list(blank)] = 0.0
    return drawn


def check_widths(teacher: Attention, *, width: int, outputs: int) -> None:
    """Pass where a teacher takes and reads what a layer does.

    Raises:
        ShapeError: It does not.
    """
    reads, takes = teacher.w_v.shape
    if (takes, reads) != (width, outputs):
        raise ShapeError(
            f"the teacher takes tokens of width {takes} and reads {reads}, and the layer takes {width} and reads {outputs}; "
            "give the teacher that the layer was trained on."
        )
