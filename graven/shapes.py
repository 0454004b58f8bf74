"""The letters that name axes everywhere in graven, and the one check of a shape.

    B batch      T context tokens   Q queries   H heads       K key width   V value width
    D width      M slots            N pairs     A alphabet    P pages
    L layers     C tasks            G gates     F contextual features

A letter in a public annotation (`Float[Tensor, "B T D"]`) always has this meaning; E and S are said where they stand. jaxtyping reads the
annotations in the tests only (`pytest --jaxtyping-packages=graven,beartype.beartype`); `check` is what a user meets.
"""

import numpy as np
from torch import Tensor

from graven.errors import ShapeError


def check(**named: tuple[Tensor | np.ndarray, str]) -> dict[str, int]:
    """Sizes by letter, or one sentence about the first tensor that does not fit.

    Args:
        named: For each argument its tensor or array and its axes, as in `q=(q, "B T 64")`; a number is an exact size.
    Returns:
        The size of each letter.
    Raises:
        ShapeError: A tensor has another number of axes, or a letter two sizes.
    Source: ours; tests/test_shapes.py.

    >>> import torch
    >>> check(x=(torch.zeros(2, 3), "B T"))
    {'B': 2, 'T': 3}
    """
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in named.items():
        letters = axes.split()
        wanted = "[" + ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in letters) + "]"
        came = tuple(tensor.shape)
        if len(came) != len(letters):
            raise ShapeError(f"`{name}` has shape {came}, which has {len(came)} axes; {len(letters)} were expected: {wanted}. Add or drop axes.")
        for axis, (letter, size) in enumerate(zip(letters, came, strict=True)):
            expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if size != expected:
                raise ShapeError(f"`{name}` has shape {came}; axis {axis} is {size} and {wanted} was expected. Make the sizes agree.")
    return sizes
