"""Associative recall: pairs of a key and a value, then a key; the answer is its value.

One-hot, three keys and three values, every one once in a sequence (a column a token, the query last, its answer 1):

    key     2 0 1   0            as vectors [one-hot of the key; one-hot of the value], the query's value 0
    value   0 1 2   .

With integer tokens and several queries, two pairs and two queries in ten tokens, `_` a blank; the answer stands where its key is asked:

    token   k3 v1 k0 v2  _  k0  _  _ k3  _         target   .  .  .  .  .  v2  .  .  v1  .

Source: Zucchet et al. 2023, arXiv:2309.01775, appendix D.3 (one-hot); Arora et al. 2023, arXiv:2312.04927, section 3.2 (several queries).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from graven.errors import SpecError
from graven.tasks.base import Tokens, distinct


class OneHot(NamedTuple):
    """A batch of sequences.

    Args:
        tokens: [key; value] one-hot, the query last.
        target: The value of the query's key.
    """

    tokens: Float[Tensor, "B T D"]
    target: Int[Tensor, "B"]


class Queries(NamedTuple):
    """A batch of sequences of token ids.

    Args:
        tokens: Without padding.
        target: The id that answers the query at this place; 0 where none is asked.
        asked: Where one is.
    """

    tokens: Tokens
    target: Int[Tensor, "B T"]
    asked: Bool[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True)
class Recall:
    """One-hot recall of as many pairs as there are keys and values.

    Args:
        pairs: N.
    Raises:
        SpecError: There is no pair.
    """

    pairs: int = 6

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise SpecError(f"`pairs` is {self.pairs}; it must be at least 1.")

    @property
    def width(self) -> int:
        """Entries of a token."""
        return 2 * self.pairs

    def sample(self, size: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> OneHot:
        """A batch of sequences of N + 1 tokens, B of them."""
        n = self.pairs
        keys, values = (distinct(size, n, below=n, generator=generator) for _ in range(2))
        asked = torch.randint(n, (size, 1), generator=generator)
        tokens = torch.zeros(size, n + 1, self.width, dtype=dtype)
        tokens[:, :n] = torch.cat([F.one_hot(keys, n), F.one_hot(values, n)], -1).to(dtype)
        tokens[:, n, :n] = F.one_hot(keys.gather(1, asked)[:, 0], n).to(dtype)
        return OneHot(tokens, values.gather(1, asked)[:, 0])


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall:
    """Recall with integer tokens: pairs at the front, then queries at random places among blanks.

    Args:
        keys: Different keys; ids 0 to keys - 1.
        values: Different values; ids from `keys` on. The blank is the last id.
        pairs: Of a sequence, N. Keys are unique in it, values free.
        queries: Keys asked, Q, each at most once.
        length: Tokens of a sequence, T.
    Raises:
        SpecError: A number is out of range, or the sequence is too short for its pairs and queries.
    Differs: the paper draws how far a query lies from its pair from a power law; here all places are equally likely.
    """

    keys: int = 64
    values: int = 64
    pairs: int = 8
    queries: int = 8
    length: int = 64

    def __post_init__(self) -> None:
        for name in ("keys", "values", "pairs", "queries", "length"):
            if getattr(self, name) < 1:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.pairs > self.keys:
            raise SpecError(f"`pairs` is {self.pairs} and there are {self.keys} different keys; lower `pairs` or raise `keys`.")
        if self.queries > self.pairs:
            raise SpecError(f"`queries` is {self.queries} and a sequence has {self.pairs} pairs; ask at most every key once.")
        if self.length < 2 * self.pairs + self.queries:
            raise SpecError(f"`length` is {self.length} and pairs and queries need {2 * self.pairs + self.queries} tokens; raise `length`.")

    @property
    def blank(self) -> int:
        """The id that means nothing."""
        return self.keys + self.values

    @property
    def vocabulary(self) -> int:
        """Keys, values and the blank."""
        return self.keys + self.values + 1

    def sample(self, size: int, *, generator: torch.Generator) -> Queries:
        """A batch of sequences, B of them."""
        front = 2 * self.pairs
        keys = distinct(size, self.pairs, below=self.keys, generator=generator)
        values = self.keys + torch.randint(self.values, (size, self.pairs), generator=generator)
        asked = distinct(size, self.queries, below=self.pairs, generator=generator)
        places = front + distinct(size, self.queries, below=self.length - front, generator=generator)
        ids = torch.full((size, self.length), self.blank)
        ids[:, :front] = torch.stack([keys, values], -1).flatten(1)
        ids.scatter_(1, places, keys.gather(1, asked))
        target = torch.zeros_like(ids).scatter_(1, places, values.gather(1, asked))
        where = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places, torch.ones_like(places, dtype=torch.bool))
        return Queries(Tokens.full(ids), target, where)
