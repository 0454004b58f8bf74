"""The key-value cache: keys and values of every token in every layer. Nothing is thrown away, so it is the upper bound of what a state can hold;
and the one memory here whose state grows with its context.

A query stands behind the context as if the two were one text: positions go on, and the convolution of the embeddings sees the tokens before.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from graven.layers.decoder import Cache
from graven.lm.small import Small
from graven.memory.base import rows_seen, wide
from graven.shapes import check
from graven.tasks.base import Tokens, front, rows_at

# window of the convolution [B W D], last hidden state [B D], columns [B], keys and values of each layer; zeros behind the columns of a row
CacheState = tuple[Float[Tensor, "B W D"], Float[Tensor, "B D"], Int[Tensor, "B"], tuple[Cache, ...]]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a `KVCache` is: nothing but its model."""

    kind: Literal["cache"] = "cache"


class KVCache(nn.Module):
    """The memory. `model` is a part of it and trains with it. One learned vector stands before every context, to predict its first token.

    Args:
        model: The decoder whose keys and values are kept.
        seed: Of that vector.
    """

    def __init__(self, model: Small, *, seed: int = 0):
        super().__init__()
        self.model = model
        self.begin = nn.Parameter(model.embedding_scale * torch.randn(1, 1, model.width, generator=torch.Generator().manual_seed(seed)))

    def start(self, batch: int) -> CacheState:
        """The cache of the one learned vector, a copy a row."""
        hidden, layers = self.model.decoder.run(self.begin.expand(batch, -1, -1))
        window = hidden.new_zeros(batch, max(self.model.decoder.spec.convolution - 1, 0), self.model.width)
        layers = [(wide(k), wide(v)) for k, v in layers]
        return window, wide(hidden[:, 0]), torch.ones(batch, dtype=torch.long, device=hidden.device), tuple(layers)

    def write(self, state: CacheState, context: Tokens) -> CacheState:
        """The cache with the columns of the context behind those that it had.

        Raises:
            ShapeError: State and context differ in rows.
        """
        hidden, window, layers, tokens = self._run(state, context)
        old, new = state[2], state[2] + tokens.lengths
        last = torch.cat([state[1][:, None], hidden], 1).gather(1, tokens.lengths[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
        kept = torch.cat([_columns(old, state[3][0][0].shape[2]), tokens.mask], 1)
        return window, last, new, tuple((_packed(k, kept), _packed(v, kept)) for k, v in layers)

    def read(self, state: CacheState, query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Raises:
            ShapeError: State and query differ in rows.
        """
        hidden, *_ = self._run(state, query)
        return self.model.logits(rows_seen(torch.cat([state[1][:, None], hidden], 1), query))

    def _run(self, state: CacheState, tokens: Tokens) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B W D"], list[Cache], Tokens]:
        """Tokens behind a cache: hidden states, the new window, keys and values of old and new columns, and the tokens with padding behind."""
        window, _, columns, layers = state
        check(window=(window, f"B W {self.model.width}"), tokens=(tokens.ids, "B T"))
        tokens, decoder = tokens.aligned(), self.model.decoder
        embedded = decoder.embed(tokens.ids, before=window)
        behind = torch.cat([window, decoder.tokens(tokens.ids)], 1)
        at = tokens.lengths[:, None] + torch.arange(window.shape[1], device=behind.device)
        positions = columns[:, None] + torch.arange(tokens.ids.shape[1], device=behind.device)
        seen = _columns(columns, layers[0][0].shape[2])
        mask = None if bool(seen.all()) else _behind(seen, tokens.ids.shape[1])
        if not tokens.ids.shape[1]:
            return embedded, window, list(layers), tokens
        hidden, own = decoder.run(embedded, positions=positions, mask=mask, before=layers)
        whole = [(torch.cat([a, wide(k)], 2), torch.cat([b, wide(v)], 2)) for (a, b), (k, v) in zip(layers, own, strict=True)]
        return wide(hidden), rows_at(behind, at), whole, tokens


def _columns(count: Int[Tensor, "B"], most: int) -> Bool[Tensor, "B T"]:
    """True at so many first columns of each row."""
    return torch.arange(most, device=count.device) < count[:, None]


def _behind(seen: Bool[Tensor, "B S"], length: int) -> Bool[Tensor, "B T _"]:
    """What columns behind others see: of those what `seen` says, of themselves what came before."""
    own = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    return torch.cat([seen[:, None].expand(-1, length, -1), own.expand(len(seen), -1, -1)], 2)


def _packed(x: Float[Tensor, "B G T K"], kept: Bool[Tensor, "B T"]) -> Float[Tensor, "B G _ K"]:
    """The kept columns of each row in front, zeros behind them, no wider than the longest row."""
    longest = int(kept.sum(-1).max()) if kept.numel() else 0
    order = front(kept)[:, :longest]
    mask = kept.gather(1, order)[:, None, :, None]
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) * mask
