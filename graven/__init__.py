"""Sequence-model memory that is written by gradient descent.

>>> import graven
>>> model = graven.load("records")
>>> memory = model.write("k1:v1\\nk2:v2")
>>> model.ask(memory, "k2").text
'v2'
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graven.memory.file import Memory
    from graven.model import Answer, Model, Recital, load

__all__ = ["Answer", "Memory", "Model", "Recital", "load"]


def __getattr__(name: str) -> object:
    # torch takes a second to import, and `graven --help` must not wait for it
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'graven' has no attribute {name!r}")
    return getattr(import_module("graven.memory.file" if name == "Memory" else "graven.model"), name)
