"""Several processes on one piece of work, as `torchrun` starts them.

Each knows its number from the environment; accelerate connects them on first use, over gloo on CPUs. One process needs none of it and starts at once.

    torchrun --nproc_per_node 2 --no-python graven train spec.toml

`accelerate launch --cpu --num_processes 2` starts one process and says nothing (accelerate 1.15), so that is told here.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from graven.errors import SpecError

T = TypeVar("T")
R = TypeVar("R")

LONGEST = timedelta(days=7)  # that a process waits for another; a text may take hours


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Args:
        index: Its number, from 0.
        count: How many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and saves."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part: every `count`-th, so that a list in order of length is split evenly."""
        return list(items[self.index :: self.count])

    def wait(self) -> None:
        """For all others to come here."""
        if self.count > 1:
            _state(self.count).wait_for_everyone()

    def gather(self, item: T) -> list[T]:
        """What every process has, in order of their numbers."""
        if self.count == 1:
            return [item]
        _state(self.count)
        import torch.distributed as distributed

        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, item)
        return found

    def together(self, work: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """Results for all items in their order, each computed by one of the processes. What comes from another process holds the same bits."""
        parts = self.gather(work(self.share(items)))
        return [parts[at % self.count][at // self.count] for at in range(len(items))]


ALONE = Processes()


def here() -> Processes:
    """This process, as torchrun numbered it; the only one where it did not.

    Raises:
        SpecError: There are several and accelerate is not installed.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) < 2:
        return ALONE
    if find_spec("accelerate") is None:
        raise SpecError("torchrun started several processes, and connecting them takes the package accelerate; run `pip install accelerate`.")
    return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def alone_by_mistake() -> str | None:
    """A sentence for who started one process through accelerate and meant more; None where nothing speaks for that."""
    if "RANK" in os.environ or not any(name.startswith("ACCELERATE_") for name in os.environ):
        return None
    return (
        "accelerate launch started one process, as it does on CPUs whatever --num_processes says; "
        "for several, run `torchrun --nproc_per_node N --no-python graven ...`"
    )


def _state(count: int) -> Any:
    """The connection, made on first use; accelerate keeps one for each process."""
    state = import_module("accelerate").PartialState(cpu=True, timeout=LONGEST)
    assert state.num_processes == count, f"accelerate counts {state.num_processes} processes and torchrun started {count}"
    return state
