"""The diagonal recurrence beside its definition and two ways to do without a loop over tokens.

    python benchmarks/diagonal.py                                                        about a minute on one CPU core

Runs of one length take turns on one machine; what is reported is the ratio to the definition within a turn: median, least and largest. The
tests of the operation run first: on red there is no number. "powers" holds a^(t - s) for every pair of tokens; "doubling" joins halves in
log2 T rounds over all tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from turns import LOOP, main, options_of

from graven.ops.diagonal import diagonal

LONGEST_POWERS = 256  # tokens; beyond, T * T * S numbers and their derivatives do not fit beside the others


def powers(u: Tensor, *, decay: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = sum over s <= t of a^(t - s) u_s, all pairs at once."""
    length = u.shape[1]
    age = torch.arange(length)[:, None] - torch.arange(length)
    weights = torch.where(age[..., None] >= 0, decay ** age.clamp_min(0)[..., None], 0.0)
    h = torch.einsum("tsn,bsn->btn", weights, u)
    return h, h[:, -1]


def doubling(u: Tensor, *, decay: Tensor) -> tuple[Tensor, Tensor]:
    """h_t over the last 1, 2, 4 ... tokens in turn."""
    step, factor = 1, decay
    while step < u.shape[1]:
        u = u + factor * F.pad(u[:, :-step], (0, 0, step, 0))
        step, factor = 2 * step, factor * factor
    return u, u[:, -1]


RUNS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    LOOP: partial(diagonal, form="recurrent"),
    "scan": partial(diagonal, form="scan"),
    "powers": powers,
    "doubling": doubling,
}


def drawn(length: int, *, batch: int, size: int) -> dict[str, Tensor]:
    """Tokens that lie in memory as [T, B, S], as the layers make them, and decays from U(0, 1)."""
    generator = torch.Generator().manual_seed(length)
    u = torch.randn(length, batch, size, generator=generator).transpose(0, 1)
    return {"u": u.requires_grad_(), "decay": torch.rand(size, generator=generator).requires_grad_()}


def runs(length: int) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """What fits at a length."""
    return {name: run for name, run in RUNS.items() if name != "powers" or length <= LONGEST_POWERS}


if __name__ == "__main__":
    given = options_of(__doc__.splitlines()[0], lengths=[32, 256, 1024], repeats=15, batch=16, size=100)
    main("diagonal", given, partial(drawn, batch=given.batch, size=given.size), runs, state_bytes=4 * given.size)
