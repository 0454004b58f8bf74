"""A phone book: write N names with their numbers, then give back the number of a name. Both are as long as they happen to be.

Two entries as tokens (each character is one, `.` stands for a line break):

    context   . a n n a : 5 5 5 0 . b o : 1 2 3 4 5 6 .      values   . . . . . . * * * * * . . . . * * * * * * *
    query     . b o :                                        target   1 2 3 4 5 6 .

Names are unique within a context. A query begins as a line of the context does, so reading sees what writing saw; a line break ends an answer.

Source: ours, after the retrieval of Kuratov et al. 2026, arXiv:2603.13875, section 3.1, whose keys and values have one length.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from graven.errors import SpecError, TextError
from graven.tasks.base import Episode, Page, Tokens, cut

LETTERS, DIGITS, MARKS = string.ascii_lowercase, string.digits, "\n:"
CHARACTERS = LETTERS + DIGITS + MARKS


@dataclass(frozen=True, kw_only=True)
class Phonebook:
    """Lengths of names and numbers; `sample` draws contexts of any number of entries.

    Args:
        name_lengths: Letters in a name, shortest and longest; every length equally likely.
        number_lengths: Digits in a number, likewise.
        similar: Share of names that differ in one letter from another of their context, as Anna and Anne do.
    Raises:
        SpecError: A length is below 1, a range is empty, or `similar` is no share.
    """

    kind: Literal["phonebook"] = field(default="phonebook", repr=False)
    name_lengths: tuple[int, int] = (3, 8)
    number_lengths: tuple[int, int] = (3, 6)
    similar: float = 0.0

    def __post_init__(self) -> None:
        for name in ("name_lengths", "number_lengths"):
            shortest, longest = getattr(self, name)
            if not 1 <= shortest <= longest:
                raise SpecError(f"`{name}` is {(shortest, longest)}; the shortest must be at least 1 and the longest no less.")
        if not 0 <= self.similar < 1:
            raise SpecError(f"`similar` is {self.similar}; it must be at least 0 and below 1.")

    @property
    def vocabulary(self) -> int:
        """Letters, digits, the line break and the colon, in this order."""
        return len(CHARACTERS)

    @property
    def keys(self) -> int:
        """How many different names there are of each length, the fewest: a context holds no more entries."""
        return len(LETTERS) ** self.name_lengths[0]

    @property
    def answer_length(self) -> int:
        """Most tokens of an answer, its end included."""
        return self.number_lengths[1] + 1

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(encoded(MARKS))

    def sample(self, size: int, *, pairs: int, generator: torch.Generator, queries: int | None = None) -> Episode:
        """A batch of contexts with their queries.

        Args:
            size: Contexts, B.
            pairs: Entries in each, N.
            generator: The only source of randomness.
            queries: Names asked of each context, Q, drawn without replacement; every name, in the order of the context, where left out.
        Raises:
            SpecError: More entries than different names of the shortest length, or more queries than entries.
        """
        if not 0 <= pairs <= self.keys:
            raise SpecError(f"`pairs` is {pairs} and there are {self.keys} names of the shortest length; lower `pairs` or raise `name_lengths`.")
        if queries is not None and not 0 <= queries <= pairs:
            raise SpecError(f"`queries` is {queries} and a context has {pairs} pairs; ask at most every name once.")
        books = [list(zip(self._names(pairs, generator), self._numbers(pairs, generator), strict=True)) for _ in range(size)]
        asked = None if queries is None else [torch.randperm(pairs, generator=generator)[:queries].tolist() for _ in range(size)]
        return self.episode_of(books, asked=asked)

    def episode_of(self, books: Sequence[Sequence[tuple[str, str]]], *, asked: Sequence[Sequence[int]] | None = None) -> Episode:
        """The context, queries and targets of given entries; `asked` picks the entries that are queried, all of them where left out.

        Every book has as many entries, and as many are asked of each.
        """
        picked = books if asked is None else [[book[i] for i in which] for book, which in zip(books, asked, strict=True)]
        context = Tokens.of([self.context_of(book) for book in books])
        values = Tokens.of([[0] + [int(on) for name, number in book for on in [0] * (len(name) + 1) + [1] * (len(number) + 1)] for book in books])
        query, target = (
            _rows_of([[row(*entry) for entry in book] for book in picked])
            for row in (lambda name, _: self.query_of(name), lambda _, number: encoded(number + "\n"))
        )
        return Episode(context=context, query=query, target=target, values=values.ids.bool(), answer=target.ids.shape[-1])

    def context_of(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a book."""
        return encoded("\n" + "".join(f"{name}:{number}\n" for name, number in pairs))

    def pages(self, text: str, *, most: int) -> list[Page]:
        """A text in pages of at most so many records.

        Raises:
            TextError: As of `parse`.
        """
        return [(self.context_of(page), page) for page in cut(self.parse(text), most)]

    def query_of(self, name: str) -> list[int]:
        """Tokens of a query."""
        return encoded(f"\n{name}:")

    def parse(self, text: str) -> list[tuple[str, str]]:
        """Entries of a text with one `name: number` a line, as people type it: capitals are small letters, spaces around either part do not count,
        blank lines are passed over.

        Raises:
            TextError: A line is no entry, has a name or a number of another length or with other characters, or a name that was there;
                or there is no line at all.
        """
        found: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            parts = [part.strip() for part in line.split(":")]
            if len(parts) != 2:
                raise TextError(
                    f"line {number} is {line.strip()[:40]!r}, and this model takes one `name: number` a line. "
                    "For free text, name a language model: --model PATH."
                )
            name, value = self._name(parts[0], what=f"line {number}: the name"), parts[1]
            _check_part(value, what=f"line {number}: the number", alphabet=DIGITS, known="digits", lengths=self.number_lengths)
            if name in found:
                raise TextError(f"line {number} repeats the name {name!r}; names must be unique, and capitals make no difference. Drop one line.")
            found[name] = value
        if not found:
            raise TextError("the text holds no entry; give at least one `name: number` line.")
        return list(found.items())

    def key_of(self, query: str) -> str:
        """The name that a user's query means: `alice`, `Alice` and ` alice: ` are one.

        Raises:
            TextError: It has another length than names have, or other characters.
        """
        return self._name(query.strip().removesuffix(":").strip(), what="the query")

    def text_of(self, ids: Sequence[int]) -> str:
        """Tokens as characters."""
        return "".join(CHARACTERS[token] for token in ids)

    def lines_of(self, ids: Sequence[int]) -> str:
        """A context as a user writes it, one entry a line."""
        return self.text_of(ids)[1:-1]

    def _name(self, part: str, *, what: str) -> str:
        _check_part(part.lower(), what=what, alphabet=LETTERS, known="the letters a to z", lengths=self.name_lengths)
        return part.lower()

    def _names(self, count: int, generator: torch.Generator) -> list[str]:
        """Different names, some of them near to another one."""
        found: list[str] = []
        near = torch.rand(count, generator=generator) < self.similar
        while len(found) < count:
            name = self._word(LETTERS, self.name_lengths, generator)
            if found and near[len(found)]:
                other = found[_below(len(found), generator)]
                at = _below(len(other), generator)
                name = other[:at] + LETTERS[_below(len(LETTERS), generator)] + other[at + 1 :]
            if name not in found:
                found.append(name)
        return [found[i] for i in torch.randperm(count, generator=generator).tolist()]

    def _numbers(self, count: int, generator: torch.Generator) -> list[str]:
        return [self._word(DIGITS, self.number_lengths, generator) for _ in range(count)]

    def _word(self, alphabet: str, lengths: tuple[int, int], generator: torch.Generator) -> str:
        length = lengths[0] + _below(lengths[1] - lengths[0] + 1, generator)
        return "".join(alphabet[i] for i in torch.randint(len(alphabet), (length,), generator=generator).tolist())


def encoded(text: str) -> list[int]:
    """Characters of a book as tokens."""
    return [CHARACTERS.index(character) for character in text]


def _check_part(part: str, *, what: str, alphabet: str, known: str, lengths: tuple[int, int]) -> None:
    strange = next((character for character in part if character not in alphabet), None)
    if strange is not None:
        raise TextError(f"{what} {part[:40]!r} has the character {strange!r}; this model knows {known} there. Spell it with those.")
    if not lengths[0] <= len(part) <= lengths[1]:
        raise TextError(f"{what} {part[:40]!r} has {len(part)} characters; this model takes {lengths[0]} to {lengths[1]}. Shorten or lengthen it.")


def _below(bound: int, generator: torch.Generator) -> int:
    return int(torch.randint(bound, (1,), generator=generator))


def _rows_of(rows: Sequence[Sequence[Sequence[int]]]) -> Tokens:
    """[B, Q, T] of rows of rows; every row has as many."""
    queries = len(rows[0]) if rows else 0
    flat = Tokens.of([row for part in rows for row in part])
    return Tokens(*(x.view(len(rows), queries, x.shape[-1]) for x in (flat.ids, flat.mask)))
