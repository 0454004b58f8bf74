"""Every kind of memory that can be trained, by the spec that describes it: what `[memory] kind = "..."` may name."""

import dataclasses
from collections.abc import Callable
from typing import Any

from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.associative import ARMT, ARMTSpec
from graven.memory.base import Trainable
from graven.memory.cache import CacheSpec, KVCache
from graven.memory.forward import RMT, RMTSpec
from graven.memory.gradient import GradMem, GradMemSpec
from graven.memory.prefix import Prefix, PrefixSpec
from graven.memory.recurrent import Recurrent, RecurrentSpec

# The first is the one that a table without `kind` means. A new kind is one more member and one more maker.
MemorySpec = GradMemSpec | RMTSpec | CacheSpec | RecurrentSpec | ARMTSpec | PrefixSpec

# From the sizes of the model, the spec, a name for errors, and a seed for the start state; the rest draws from torch's global generator.
MAKERS: dict[type, Callable[[DecoderSpec, Any, str, int], Trainable[Any]]] = {
    GradMemSpec: lambda sizes, spec, name, seed: GradMem(Small(sizes, name=name), spec, seed=seed),
    RMTSpec: lambda sizes, spec, name, seed: RMT(Small(sizes, name=name), spec, seed=seed),
    ARMTSpec: lambda sizes, spec, name, seed: ARMT(Small(sizes, name=name), spec, seed=seed),
    PrefixSpec: lambda sizes, spec, name, seed: Prefix(Small(sizes, name=name), spec, seed=seed),
    RecurrentSpec: lambda sizes, spec, name, seed: Recurrent(sizes, spec, seed=seed),  # noqa: ARG005  # it has no language model to name
    CacheSpec: lambda sizes, _, name, seed: KVCache(Small(sizes, name=name), seed=seed),
}


def make(sizes: DecoderSpec, spec: MemorySpec, *, name: str, seed: int) -> Trainable[Any]:
    """A new memory.

    Args:
        sizes: Of the model behind the memory, or of the memory itself where it is a recurrent model.
        spec: Its class says which memory.
        name: What to call the model.
        seed: Of the start state.
    """
    return MAKERS[type(spec)](sizes, spec, name, seed)


def takes_steps(spec: MemorySpec) -> bool:
    """Whether the memory's write is so many steps: its spec has `steps`."""
    return "steps" in {field.name for field in dataclasses.fields(spec)}
