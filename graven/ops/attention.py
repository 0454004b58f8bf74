"""Softmax attention in a form that PyTorch can differentiate twice.

    P = softmax(s Q K^T + mask),   O = P V                                   one such pair per head

The fused kernels of PyTorch have no double backward (pytorch#116350), and an inner gradient step that is trained through needs one. This
is the definition: it forms the T x S matrix of every head, so its memory grows with T S.

Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from graven.errors import ShapeError


def attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Float[Tensor, "B H T V"]:
    """Attention of T queries over S keys, exact in value, first and second derivative.

    Args:
        q: Queries, H heads.
        k: Keys, G heads; G divides H, and query head h reads key head h // (H / G).
        v: Values, G heads.
        mask: True where a query may see a key, broadcastable to [B, H, T, S]; joined with `causal`.
        causal: Query t sees key s only if s <= t + S - T: the last query sees every key.
        scale: Factor on the logits, 1 / sqrt(K) where it is left out.
    Returns:
        A row that may see nothing is 0, and so are its gradients.
    Raises:
        ShapeError: G does not divide H.
    Source: Vaswani et al. 2017, equation 1.
    """
    heads, groups, length, width = q.shape[1], k.shape[1], q.shape[2], q.shape[3]
    if heads % groups:
        raise ShapeError(f"`q` has {heads} heads and `k` has {groups}; the second must divide the first. Repeat or drop key heads.")
    if groups != heads:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    logits = (q * (width**-0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    some_see_nothing = mask is not None or (causal and length > k.shape[2])
    if causal:
        past = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - length)
        mask = past if mask is None else mask & past
    if mask is None:
        return logits.softmax(-1) @ v
    # A finite fill, not -inf: a row of -inf is NaN in the forward and in both backwards, even where it is masked out afterwards.
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    if some_see_nothing:
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ v
