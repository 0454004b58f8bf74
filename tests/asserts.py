"""What several tests assert, in words. Each has a test in which it fails: tests/test_asserts.py."""

import re
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from graven.memory.base import State, leaves


def assert_refused(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    """The call raises this error in one sentence that matches."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert re.search(words, message), f"{words!r} is not in {message!r}"
    assert "\n" not in message


def assert_near(found: Iterable[Tensor], wanted: Iterable[Tensor], *, tolerance: float) -> None:
    """Tensors pairwise equal up to a tolerance relative to the largest entry of what was wanted; NaN equals nothing."""
    for index, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape, f"tensor {index}: shape {tuple(x.shape)} for {tuple(y.shape)}"
        if x.numel():
            error = (x.double() - y.double()).abs().max().item()
            limit = tolerance * max(y.double().abs().max().item(), 1.0)
            assert error <= limit, f"tensor {index} is off by {error:.3g}, more than {limit:.3g}"
            assert torch.isfinite(x).all(), f"tensor {index} is not finite"


def assert_equal_states(found: State, wanted: State) -> None:
    """Bit for bit the same, tensor by tensor."""
    for index, (x, y) in enumerate(zip(leaves(found), leaves(wanted), strict=True)):
        assert torch.equal(x, y), f"tensor {index} differs"
