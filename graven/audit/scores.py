"""Whether the state holds the sums of an attention: linear readings of accumulators against key-values, and of queries against queries.

Score KV and Score Q are 1 - R^2 of least squares with an intercept, fitted on some sequences and judged on others, all tokens together. By
themselves they prove nothing: neurons in general position span every key-value there can be once there are enough of them. So they come with
the number of neurons, with an untrained layer and with another attention.

Source: Zucchet et al. 2023, arXiv:2309.01775, table 1. Differs: keys are W_K^T W_Q's own singular vectors, so a rank below D asks for no more
than is needed; the paper's W_K x and W_Q x are the same where all ranks are D.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.dimension import NOTHING, REMEMBERS
from graven.audit.forms import input_output
from graven.audit.kernel import Attention
from graven.layers.gated_rnn import GatedRNN

RANK = 1e-9  # below this share of the largest, a singular value of an attention's matrices is 0


class Scores(NamedTuple):
    """1 - R^2, and from how many neurons.

    Args:
        key_value: Of key-values from accumulators.
        query: Of queries from neurons that forget at once.
        accumulators, queries: Numbers of neurons.
    """

    key_value: float
    query: float
    accumulators: int
    queries: int


def scores(layer: GatedRNN, head: Attention, x: Float[Tensor, "B T D"]) -> Scores:
    """Both scores; the first half of the sequences is fitted and the other judged.

    A side with no neurons has the score 1.

    Raises:
        SpecError: A weight is not finite, or the recurrence is dense.
    Source: Zucchet et al. 2023, arXiv:2309.01775, table 1; tests/test_audit.py.
    """
    layer = input_output(layer)
    with torch.no_grad():
        h = layer.hidden(x.double())
    remembers, forgets = layer.decay.detach() > REMEMBERS, layer.decay.detach().abs() <= NOTHING
    key_value, query = _targets(head, x.double())
    return Scores(_unexplained(h[..., remembers], key_value), _unexplained(h[..., forgets], query), int(remembers.sum()), int(forgets.sum()))


def _targets(head: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values times keys [B, T, V K], and queries [B, T, K]."""
    left, sizes, right = torch.linalg.svd(head.key_query)
    rank = int((sizes > RANK * sizes[0]).sum())
    value_sizes, value_rows = torch.linalg.svd(head.w_v, full_matrices=False)[1:]
    values = x @ value_rows[value_sizes > RANK * value_sizes[0]].T
    sums = (values[..., :, None] * (x @ left[:, :rank])[..., None, :]).cumsum(1)
    return sums.flatten(2), x @ right[:rank].T


def _unexplained(neurons: Float[Tensor, "B T S"], wanted: Float[Tensor, "B T F"]) -> float:
    half = len(neurons) // 2
    with_one = torch.cat([neurons, torch.ones_like(neurons[..., :1])], -1)
    weight = torch.linalg.lstsq(with_one[:half].flatten(0, 1), wanted[:half].flatten(0, 1), driver="gelsd").solution
    judged = wanted[half:].flatten(0, 1)
    rest = with_one[half:].flatten(0, 1) @ weight - judged
    return float(rest.square().sum() / (judged - judged.mean(0)).square().sum())
