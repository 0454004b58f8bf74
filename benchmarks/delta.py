"""The delta rule in chunks beside the loop over tokens that defines it.

    python benchmarks/delta.py                                                           about two minutes on one CPU core

Runs of one length take turns on one machine; what is reported is the ratio to the definition within a turn: median, least and largest. The
tests of the operation run first: on red there is no number. Unit keys, rates from U(0, 1), one gate a head.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from turns import LOOP, main, options_of

from graven.ops.delta import delta

RUNS = {LOOP: partial(delta, form="recurrent")} | {f"chunks of {size}": partial(delta, form="chunk", chunk=size) for size in (16, 32, 64)}


def drawn(length: int, *, batch: int, heads: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(batch, length, heads, width, generator=generator) for _ in range(3))
    beta, logits = torch.rand(batch, length, heads, generator=generator), torch.randn(batch, length, heads, generator=generator)
    inputs = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "beta": beta, "log_gate": F.logsigmoid(logits) / 4}
    return {name: x.requires_grad_() for name, x in inputs.items()}


if __name__ == "__main__":
    given = options_of(__doc__.splitlines()[0], lengths=[64, 256, 1024], repeats=5, batch=1, heads=4, width=32)
    sizes = {"batch": given.batch, "heads": given.heads, "width": given.width}
    main("delta", given, partial(drawn, **sizes), lambda _: RUNS, state_bytes=4 * given.heads * given.width**2)
