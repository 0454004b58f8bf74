"""A GradMem that writes through an adapter and is read by the model as it was published."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from jaxtyping import Float
from torch import Tensor, nn

from graven.lm.adapter import without_adapter
from graven.lm.base import Continuation
from graven.memory.gradient import GradMem
from graven.tasks.base import Tokens


class WriteAdapted(GradMem):
    """As `GradMem`, but that its model's adapter is switched off where the memory is read: by `read`, by `answer`, and inside `reading`.

    Source: the code of Kuratov et al. 2026, arXiv:2603.13875 (an option there); tests/test_adapter.py.
    """

    def read(self, state: Float[Tensor, "B M D"], query: Tokens) -> Float[Tensor, "B T A"]:
        with reading(self):
            return super().read(state, query)

    def answer(self, state: Float[Tensor, "B M D"], query: Tokens, *, most: int, stop: Collection[int]) -> list[Continuation]:
        with reading(self):
            return super().answer(state, query, most=most, stop=stop)


@contextmanager
def reading(memory: object) -> Iterator[None]:
    """A memory's model as it reads, for as long as the block lasts; only one that is adapted to write reads otherwise than it writes."""
    if not isinstance(memory, WriteAdapted):
        yield
        return
    assert isinstance(memory.model, nn.Module)
    with without_adapter(memory.model):
        yield
