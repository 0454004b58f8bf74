"""What a task hands out: rows of tokens with their masks, in the three parts of the context removal setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from graven.errors import ShapeError

T = TypeVar("T")
Page = tuple[list[int], Sequence[tuple[str, str]]]  # tokens of a page, and the keys that can be asked of it with their values


@dataclass(frozen=True)
class Tokens:
    """Token ids and which of them are real. Padding may stand anywhere in a row and never counts; its id is never read as a token.

    Args:
        ids: Token ids; any valid id where `mask` is False.
        mask: True where a token is real.
    Raises:
        ShapeError: The two differ in shape.
    """

    ids: Int[Tensor, "*B T"]
    mask: Bool[Tensor, "*B T"]

    def __post_init__(self) -> None:
        if self.ids.shape != self.mask.shape:
            raise ShapeError(f"`ids` has shape {tuple(self.ids.shape)} and `mask` {tuple(self.mask.shape)}; give one mask entry per token.")

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Tokens":
        """Rows of any lengths, padded on the right.

        >>> Tokens.of([[5, 6, 7], [8]]).mask.tolist()
        [[True, True, True], [True, False, False]]
        """
        longest = max((len(row) for row in rows), default=0)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(list(row), dtype=torch.long)
            mask[i, : len(row)] = True
        return cls(ids, mask)

    @classmethod
    def full(cls, ids: Int[Tensor, "*B T"]) -> "Tokens":
        """Rows without padding."""
        return cls(ids, torch.ones_like(ids, dtype=torch.bool))

    @property
    def lengths(self) -> Int[Tensor, "*B"]:
        """Real tokens in each row."""
        return self.mask.sum(-1)

    def aligned(self) -> "Tokens":
        """The same rows with every real token moved to the front and columns that are padding everywhere dropped."""
        longest = int(self.lengths.max()) if self.mask.numel() else 0
        order = front(self.mask)
        return Tokens(self.ids.gather(-1, order)[..., :longest], self.mask.gather(-1, order)[..., :longest])

    def flat(self) -> "Tokens":
        """All leading axes as one: [B, Q, T] becomes [B * Q, T]."""
        return Tokens(self.ids.flatten(0, -2), self.mask.flatten(0, -2))

    def row(self, index: int) -> list[int]:
        """The real tokens of one row of [B, T]."""
        return self.ids[index][self.mask[index]].tolist()


@dataclass(frozen=True)
class Episode:
    """One batch of a task: a context to write, queries to ask once it is gone, and what they should answer.

    Args:
        context: [B, T].
        query: [B, Q, T]; several queries are read from one memory.
        target: [B, Q, T].
        values: True at the context tokens that carry what queries ask for, [B, T].
        answer: Tokens at the front of each target that must be right for an exact match; the rest is punctuation.
    """

    context: Tokens
    query: Tokens
    target: Tokens
    values: Bool[Tensor, "B T"]
    answer: int


def front(mask: Bool[Tensor, "*B T"]) -> Int[Tensor, "*B T"]:
    """Column order that brings what is True to the front of each row and keeps the order inside both parts."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)


def rows_at(x: Shaped[Tensor, "*B T D"], order: Int[Tensor, "*B S"]) -> Shaped[Tensor, "*B S D"]:
    """Vectors of each row in another order of columns."""
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))


def distinct(size: int, count: int, *, below: int, generator: torch.Generator) -> Int[Tensor, "B N"]:
    """Rows of different numbers below a bound, every order equally likely."""
    if below <= max(count * count, 4096):
        return torch.rand(size, below, generator=generator).argsort(-1)[:, :count]
    numbers = torch.randint(below, (size, count), generator=generator)
    while True:  # above the square of `count` most rows have no repeat, so drawing the others anew is cheap and keeps them uniform
        ordered = numbers.sort(-1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
        if not repeated.any():
            return numbers
        numbers[repeated] = torch.randint(below, (int(repeated.sum()), count), generator=generator)


def cut(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Pages of nearly equal length, none longer than `most`.

    >>> cut("abcde", 2)
    ['ab', 'cd', 'e']
    """
    count = max(1, math.ceil(len(items) / most))
    bounds = [math.ceil(len(items) * i / count) for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]
