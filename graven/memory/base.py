"""What every memory can do, and nothing else about it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.lm.base import LanguageModel
from graven.shapes import check
from graven.tasks.base import Tokens

# One tensor, or a tree of them: everything that outlives a write, batch first. `Any` stands for a state again, a recursion that shape checks lack.
State = Tensor | tuple[Any, ...]
S = TypeVar("S", bound=State)


@runtime_checkable
class Memory(Protocol[S]):
    """Start, write, read. Every function is pure: it returns a new state and leaves the one it was given alone.

    A state is a tensor or a tuple of states, each tensor batch first, floating parts float32. It holds everything that survives a write: also the
    window of a convolution, a chunk that is not full, a normaliser, a counter. The laws that each memory obeys are in tests/test_memory_laws.py;
    its row is in tests/cases.py.
    """

    def start(self, batch: int) -> S:
        """The state before anything was written, one copy a row."""
        ...

    def write(self, state: S, context: Tokens) -> S:
        """The state after a context, of the same size whatever the length of the context."""
        ...

    def read(self, state: S, query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Where a column is padding, the logits are those after the last real token before it.
        """
        ...


@runtime_checkable
class Stepped(Memory[S], Protocol[S]):
    """A memory whose write is so many steps, or so many passes, and may take another number than in training."""

    def write(self, state: S, context: Tokens, *, steps: int | None = None) -> S:
        """The state after a context; `steps` are those of the spec where left out, and none returns the state."""
        ...


@runtime_checkable
class Trainable(Memory[S], Protocol[S]):
    """A memory that is a torch module: what the training loop needs of one."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...

    def eval(self) -> "Trainable[S]": ...


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


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, from left to right."""
    return [state] if isinstance(state, Tensor) else [leaf for part in state for leaf in leaves(part)]


def map_state(f: Callable[[Tensor], Tensor], state: S) -> S:
    """The state with every tensor replaced by what `f` makes of it.

    >>> map_state(lambda x: 2 * x, (torch.ones(1), (torch.ones(2),)))
    (tensor([2.]), (tensor([2., 2.]),))
    """
    return map_states(lambda x, _: f(x), state, state)


def map_states(f: Callable[[Tensor, Tensor], Tensor], one: S, other: S) -> S:
    """The same, of two states of one structure."""
    if isinstance(one, Tensor):
        return f(one, other)  # type: ignore[arg-type, return-value]  # a tensor, as the first is
    return tuple(map_states(f, a, b) for a, b in zip(one, other, strict=True))  # type: ignore[return-value]  # a tuple of states is a state


def written(memory: Memory[S], state: S, context: Tokens, *, steps: int | None) -> S:
    """The state after a write; `steps` is None for memories that take none."""
    return memory.write(state, context) if steps is None else cast("Stepped[S]", memory).write(state, context, steps=steps)


def kept_where_empty(context: Tokens, *, old: S, new: S) -> S:
    """`new`, and `old` bit for bit in rows without a token."""
    written = context.mask.any(-1)
    return map_states(lambda a, b: torch.where(written.view(-1, *[1] * (a.dim() - 1)), b, a), old, new)


def wide(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """As float32, float64 as it is: half precision would lose most of the updates of a memory."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def floats(state: State) -> int:
    """Numbers of the state of one row."""
    return sum(leaf[:1].numel() for leaf in leaves(state))


def size_of(state: State) -> int:
    """Bytes of the state of one row."""
    return sum(leaf[:1].numel() * leaf.element_size() for leaf in leaves(state))


def read_behind(model: LanguageModel, prefix: Float[Tensor, "B M D"], query: Tokens) -> Float[Tensor, "B T A"]:
    """`Memory.read` where the state is vectors that stand before the query.

    Raises:
        ShapeError: Prefix and query differ in rows, or the prefix has another width than the model.
    """
    check(state=(prefix, f"B M {model.width}"), query=(query.ids, "B T"))
    embedded = model.embed(query.aligned())
    hidden = model.hidden(torch.cat([prefix.to(embedded.dtype), embedded], dim=1))[:, prefix.shape[1] - 1 :]
    return model.logits(rows_seen(hidden, query))


def rows_seen(x: Float[Tensor, "B S D"], query: Tokens) -> Float[Tensor, "B T D"]:
    """From what belongs to none, one, two ... real tokens to one row for none, one, two ... columns: padding repeats what stood before it."""
    seen = F.pad(query.mask.cumsum(-1), (1, 0))
    return x.gather(1, seen[..., None].expand(-1, -1, x.shape[-1]))
