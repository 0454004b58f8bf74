"""A prompt that is read once, and rows that are continued behind it.

The keys and values of the prompt are computed once and shared by all rows, whatever their number. Rows run in groups of equal length, so no
padding ever stands between the prompt and a row: behind a sliding window it would count as text. Whether a model continues from a cache as it
would from the text is tried, not assumed: some recurrent ones do not, and those run prompt and row anew for each token.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import TextError
from graven.lm.base import LanguageModel
from graven.tasks.base import Tokens

ROWS_AT_ONCE = 8  # each row that is continued holds a copy of the prompt's keys and values
PROBE = 12  # columns: more than the window of the smallest model of the tests
EXACT = 1e-3  # of the largest hidden state; float32 leaves 1e-5, a forgotten state more than 1e-1


@dataclass(frozen=True)
class Followed:
    """The continuation of one row, and the hidden states that predicted it.

    Args:
        tokens: What follows the row; the token that stopped it comes last.
        hidden: The model's last hidden state before each of them, [E] each.
    """

    tokens: list[int]
    hidden: Float[Tensor, "T E"]


class Prompted:
    """A prompt before rows.

    Args:
        model: Its weights stay as they are.
        prefix: Embeddings of the prompt, at least one column.
    Raises:
        TextError: The prompt has more columns than the model takes.
    Source: ours; tests/test_cached.py compares it with whole rows over two dozen architectures.
    """

    def __init__(self, model: LanguageModel, prefix: Float[Tensor, "S D"]):
        self.model, self.prefix = model, prefix.detach()
        self.backbone: Any = getattr(getattr(model, "model", None), "base_model", None)  # none behind our own decoder
        self.cache: Any = None
        with torch.no_grad():
            if self._continues_exactly():
                self.cache, hidden = self._run(None, self.prefix[None])
            else:
                hidden = model.hidden(self.prefix[None])
        self.last: Float[Tensor, "E"] = hidden[0, -1]

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the prompt's keys and values; None where the model keeps none that it can continue from."""
        if self.cache is None:
            return None
        kept = [part for layer in self.cache.layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None)) if part is not None]
        return sum(part.numel() * part.element_size() for part in kept)

    @torch.no_grad()
    def follow(
        self,
        rows: Sequence[Sequence[int]],
        *,
        most: int,
        stop: Collection[int],
        generator: torch.Generator | None = None,
        enough: Callable[[list[int]], bool] | None = None,
    ) -> list[Followed]:
        """The most probable tokens behind the prompt and each row, at least one.

        Args:
            most: Most tokens, at least 1.
            stop: A row ends with the first of these.
            generator: Tokens are drawn as probable as they are, where it is given.
            enough: Rows that run side by side end early where this is true of the tokens of each.
        Raises:
            TextError: Prompt, row and continuation are more columns than the model takes.
        """
        longest, room = max((len(row) for row in rows), default=0), self.model.positions
        if room is not None and (columns := len(self.prefix) + longest + most - 1) > room:
            raise TextError(
                f"a prompt of {len(self.prefix)} tokens, a query of {longest} and {most} to come make {columns} columns, and {self.model.name} "
                f"has positions for {room}; shorten them, or use a model with a longer context."
            )
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        done: dict[int, Followed] = {}
        while order:
            group = [i for i in order[:ROWS_AT_ONCE] if len(rows[i]) == len(rows[order[0]])]
            order = order[len(group) :]
            done |= zip(group, self._group([list(rows[i]) for i in group], most=most, stop=stop, generator=generator, enough=enough), strict=True)
        return [done[i] for i in range(len(rows))]

    def _group(
        self,
        rows: list[list[int]],
        *,
        most: int,
        stop: Collection[int],
        generator: torch.Generator | None,
        enough: Callable[[list[int]], bool] | None,
    ) -> list[Followed]:
        """Rows of one length, side by side."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(rows))
        given, tokens, hidden = rows, [list[int]() for _ in rows], list[Tensor]()
        for taken in range(most):
            if not any(given):  # an empty query: the prompt itself predicts what comes
                last = self.last.expand(len(rows), -1)
            elif cache is not None:
                seen = len(self.prefix) + (len(rows[0]) + taken - 1 if taken else 0)
                cache, run = self._run(cache, self._embed(given), seen=seen)
                last = run[:, -1]
            else:
                whole = [row + own for row, own in zip(rows, tokens, strict=True)]
                last = self.model.hidden(torch.cat([self.prefix.expand(len(rows), -1, -1), self._embed(whole)], dim=1))[:, -1]
            hidden.append(last)
            logits = self.model.logits(last).float()
            drawn = logits.argmax(-1) if generator is None else torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0]
            chosen = drawn.tolist()
            for row, token in zip(tokens, chosen, strict=True):
                row.append(token)
            if all(any(token in stop for token in row) or (enough is not None and enough(row)) for row in tokens):
                break
            given = [[token] for token in chosen]
        lengths = [next((at + 1 for at, token in enumerate(row) if token in stop), len(row)) for row in tokens]
        states = torch.stack(hidden, dim=1)
        return [Followed(row[:length], state[:length]) for row, state, length in zip(tokens, states, lengths, strict=True)]

    def _embed(self, rows: list[list[int]]) -> Float[Tensor, "B T D"]:
        return self.model.embed(Tokens.of(rows)).to(self.prefix.dtype)

    def _run(self, cache: Any, embedded: Float[Tensor, "B T D"], *, seen: int = 0) -> tuple[Any, Float[Tensor, "B T E"]]:
        """Cache and hidden states after more columns, `seen` of which went before."""
        rows, columns = embedded.shape[:2]
        given: dict[str, Any] = {}
        if cache is not None:
            at = torch.arange(seen, seen + columns, device=embedded.device).expand(rows, -1)
            given = {"cache": cache, "position_ids": at, "attention_mask": torch.ones(rows, seen + columns, dtype=torch.long, device=embedded.device)}
        out = self.backbone(inputs_embeds=embedded, use_cache=True, **given)
        return out.cache, out.last_hidden_state

    def _continues_exactly(self) -> bool:
        """Whether two copies of a piece of the prompt, cut in two, give what the whole piece gives."""
        if self.backbone is None or len(self.prefix) < 2:
            return False
        piece = self.prefix[None, :PROBE].expand(2, -1, -1)
        half, whole = piece.shape[1] // 2, self.model.hidden(piece)
        try:
            cache, _ = self._run(None, piece[:1, :half])
            cache.batch_repeat_interleave(2)
            cache, end = self._run(cache, piece[:, half:-1], seen=half) if piece.shape[1] - half > 1 else (cache, None)
            _, last = self._run(cache, piece[:, -1:], seen=piece.shape[1] - 1)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):  # it keeps no cache, or not one that can be shared
            return False
        found = last if end is None else torch.cat([end, last], dim=1)
        off = (found - whole[:, half:]).abs().max() / whole.abs().max()
        return bool(off <= EXACT)
