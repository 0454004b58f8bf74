"""What every memory can do, and nothing else about it."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from graven.lm.base import LanguageModel
from graven.tasks.base import Tokens


@runtime_checkable
class Memory(Protocol):
    """Start, write, read. Every function is pure: it returns a new state and leaves the one it was given alone.

    The laws that each memory obeys are in tests/test_memory_laws.py; its row is in tests/cases.py.
    """

    def start(self, batch: int) -> Float[Tensor, "B M D"]:
        """The state before anything was written, float32, one copy a row."""
        ...

    def write(self, state: Float[Tensor, "B M D"], context: Tokens) -> Float[Tensor, "B M D"]:
        """The state after a context, of the same size whatever the length of the context."""
        ...

    def read(self, state: Float[Tensor, "B M D"], query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Where a column is padding, the logits are those after the last real token before it.
        """
        ...


@runtime_checkable
class Prefixed(Protocol):
    """A memory whose state stands before a text as vectors."""

    @property
    def model(self) -> LanguageModel:
        """The language model that it stands in."""
        ...

    @property
    def read_control(self) -> Tensor | None:
        """Learned vectors on either side of the state where it is read, if any."""
        ...

    def prefix(self, state: Float[Tensor, "B M D"], *, control: Tensor | None) -> Float[Tensor, "B S D"]:
        """The vectors that stand before the tokens."""
        ...
