"""Key-value retrieval: write N pairs, then give back the value of a key.

Two pairs with one-letter keys and values, as tokens (each character is one):

    context   ! k : a ! ! d : x !           values   . . . * . . . . * .
    query     ? ! d :                       target   x ! |

Keys are unique within a context; values are free. A query starts with `?`, an answer ends with `!|`.

Source: Kuratov et al. 2026, arXiv:2603.13875, section 3.1 (their data N*-K2V2-V62: two characters each over 62).
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from graven.errors import SpecError, TextError
from graven.tasks.base import Episode, Page, Tokens, cut, distinct

CHARACTERS = string.ascii_letters + string.digits
PUNCTUATION = "!:?|"
MOST = (1 << 63) - 1  # keys or values, which are drawn by their numbers


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """The shape of keys, values and alphabet; `sample` draws contexts of any number of pairs.

    Args:
        key_length: Tokens in a key.
        value_length: Tokens in a value.
        symbols: Size of the alphabet of keys and values, A - 4.
    Raises:
        SpecError: A number is below 1.
    """

    kind: Literal["retrieval"] = field(default="retrieval", repr=False)
    key_length: int = 2
    value_length: int = 2
    symbols: int = 62

    def __post_init__(self) -> None:
        for name in ("key_length", "value_length", "symbols"):
            if getattr(self, name) < 1:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        for name in ("key_length", "value_length"):
            if self.symbols ** getattr(self, name) > MOST:
                raise SpecError(
                    f"`{name}` is {getattr(self, name)}; with {self.symbols} symbols there are more than 2^63 of them. Lower one of the two."
                )

    @property
    def vocabulary(self) -> int:
        """Alphabet and the four marks `!`, `:`, `?`, `|`, in this order."""
        return self.symbols + len(PUNCTUATION)

    @property
    def keys(self) -> int:
        """How many different keys there are: the most pairs that a context can hold."""
        return self.symbols**self.key_length

    @property
    def pair_length(self) -> int:
        """Tokens of one pair in a context, its marks included."""
        return self.key_length + self.value_length + 3

    def mark(self, character: str) -> int:
        """Token of one of the four marks."""
        return self.symbols + PUNCTUATION.index(character)

    @property
    def answer_length(self) -> int:
        """Most tokens of an answer, its end included."""
        return self.value_length + 1

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset({self.mark("!"), self.mark("|")})

    def sample(self, size: int, *, pairs: int, generator: torch.Generator, queries: int | None = None) -> Episode:
        """A batch of contexts with their queries.

        Args:
            size: Contexts, B.
            pairs: Pairs in each, N.
            generator: The only source of randomness.
            queries: Keys asked of each context, Q, drawn without replacement; every key, in the order of the context, where left out.
        Raises:
            SpecError: More pairs than different keys, or more queries than pairs.
        """
        if not 0 <= pairs <= self.keys:
            raise SpecError(f"`pairs` is {pairs} and there are {self.keys} different keys; lower `pairs` or raise `key_length`.")
        if queries is not None and not 0 <= queries <= pairs:
            raise SpecError(f"`queries` is {queries} and a context has {pairs} pairs; ask at most every key once.")
        keys = self._digits(distinct(size, pairs, below=self.keys, generator=generator), self.key_length)
        values = self._digits(torch.randint(self.symbols**self.value_length, (size, pairs), generator=generator), self.value_length)
        return self.episode(keys, values, asked=None if queries is None else distinct(size, queries, below=pairs, generator=generator))

    def episode(self, keys: Int[Tensor, "B N K"], values: Int[Tensor, "B N V"], *, asked: Int[Tensor, "B Q"] | None = None) -> Episode:
        """The context, queries and targets of given pairs; `asked` picks the pairs that are queried, all of them where left out."""
        bang, colon, ask, end = (torch.full((*keys.shape[:2], 1), self.mark(character), dtype=torch.long) for character in PUNCTUATION)
        context = torch.cat([bang, keys, colon, values, bang], -1).flatten(1)
        at_value = torch.zeros(self.pair_length, dtype=torch.bool)
        at_value[self.key_length + 2 : -1] = True
        query, target = torch.cat([ask, bang, keys, colon], -1), torch.cat([values, bang, end], -1)
        if asked is not None:
            query, target = (x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1])) for x in (query, target))
        return Episode(
            context=Tokens.full(context),
            query=Tokens.full(query),
            target=Tokens.full(target),
            values=at_value.repeat(keys.shape[1]).expand(context.shape),
            answer=self.value_length,
        )

    def episode_of(self, books: Sequence[Sequence[tuple[str, str]]]) -> Episode:
        """The same of pairs as text, as many in each context; every key is asked."""
        keys, values = (torch.stack([digits_of([pair[part] for pair in book]) for book in books]) for part in (0, 1))
        return self.episode(keys, values)

    def context_of(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of records."""
        return self.episode_of([pairs]).context.row(0)

    def pages(self, text: str, *, most: int) -> list[Page]:
        """A text in pages of at most so many records.

        Raises:
            TextError: As of `parse`.
        """
        return [(self.context_of(page), page) for page in cut(self.parse(text), most)]

    def query_of(self, key: str) -> list[int]:
        """Tokens of a query."""
        return [self.mark("?"), self.mark("!"), *digits_of([key]).flatten().tolist(), self.mark(":")]

    def parse(self, text: str) -> list[tuple[str, str]]:
        """Pairs of a text, `parse_records`."""
        return parse_records(text, self)

    def key_of(self, query: str) -> str:
        """The key that a user's query names, with or without the marks of the task: `ab`, `ab:` and `?!ab:` are one.

        Raises:
            TextError: It is no key of the task.
        """
        key = query.strip().removeprefix("?").removeprefix("!").removesuffix(":")
        _check_part(key, what="the query", length=self.key_length, alphabet=alphabet_of(self))
        return key

    def text_of(self, ids: Sequence[int]) -> str:
        """Tokens as characters."""
        characters = alphabet_of(self) + PUNCTUATION
        return "".join(characters[token] for token in ids)

    def lines_of(self, ids: Sequence[int]) -> str:
        """A context as a user writes it, one record a line."""
        return self.text_of(ids)[1:-1].replace("!!", "\n")

    def _digits(self, numbers: Int[Tensor, "B N"], length: int) -> Int[Tensor, "B N K"]:
        return torch.stack([numbers // self.symbols**place % self.symbols for place in reversed(range(length))], -1)


def parse_records(text: str, task: Retrieval) -> list[tuple[str, str]]:
    """Pairs from text with one `key:value` a line; blank lines are passed over.

    Raises:
        TextError: A line is not `key:value`, has another length than the task's, a character outside its alphabet, or a key that was there;
            or there is no line at all.
    """
    alphabet = alphabet_of(task)
    pairs: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        key, colon, value = line.strip().partition(":")
        if not colon or ":" in value:
            raise TextError(
                f"line {number} is {line.strip()[:40]!r}, and this model takes one `key:value` a line. "
                "For free text, name a language model: --model PATH."
            )
        for what, part, length in (("key", key, task.key_length), ("value", value, task.value_length)):
            _check_part(part, what=f"line {number}: the {what}", length=length, alphabet=alphabet)
        if key in pairs:
            raise TextError(f"line {number} repeats the key {key!r}; keys must be unique. Drop one of the two lines.")
        pairs[key] = value
    if not pairs:
        raise TextError("the text holds no record; give at least one `key:value` line.")
    return list(pairs.items())


def alphabet_of(task: Retrieval) -> str:
    """The characters that stand for the symbols of a task, in order.

    Raises:
        TextError: It has more symbols than there are characters, so it speaks in token ids only.
    """
    if task.symbols > len(CHARACTERS):
        raise TextError(f"this model has {task.symbols} symbols and text has {len(CHARACTERS)} characters for them. Use token ids, or another model.")
    return CHARACTERS[: task.symbols]


def digits_of(parts: Sequence[str]) -> Int[Tensor, "N K"]:
    """Keys or values of equal length as alphabet indices."""
    return torch.tensor([[CHARACTERS.index(character) for character in part] for part in parts], dtype=torch.long)


def _check_part(part: str, *, what: str, length: int, alphabet: str) -> None:
    strange = next((character for character in part if character not in alphabet), None)
    if strange is not None:
        known = "letters and digits" if alphabet == CHARACTERS else f"the characters {alphabet}"
        raise TextError(f"{what} {part[:40]!r} has the character {strange!r}; this model knows {known} only. Spell it with those.")
    if len(part) != length:
        raise TextError(f"{what} {part[:40]!r} has {len(part)} characters; this model takes {length}. Use keys and values of that length.")
