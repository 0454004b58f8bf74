"""What a memory costs: bytes of its state, floating-point operations of a write and of a read, counted while they run.

Counted is what is computed, backward passes of a write included, down to the operations that torch dispatches. A multiply-add is 2. An elementwise
operation, a reduction or a normalisation counts 1 for each number of its largest tensor, a root or an exponential as much as a sum. What moves or
makes numbers without arithmetic (views, copies, gathers, masks) counts nothing. Nothing is taken off for numbers that a mask hides: of causal
attention both halves are computed by a small model, and both count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graven.errors import SpecError
from graven.memory.base import Memory, size_of, written
from graven.tasks.base import Episode, Tokens

T = TypeVar("T")
MOVES = {"where", "masked_fill", "clone", "copy"}  # without arithmetic, though torch tags them as elementwise
REDUCTIONS = {
    "sum", "mean", "var", "amax", "amin", "argmax", "max", "logsumexp", "linalg_vector_norm", "cumsum", "_softmax", "_softmax_backward_data",
    "_log_softmax", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "log_sigmoid_forward", "log_sigmoid_backward",
}  # fmt: skip


@dataclass(frozen=True)
class Operations:
    """Floating-point operations.

    Args:
        products: Of matrix products and convolutions.
        rest: Of everything else.
    """

    products: int
    rest: int

    @property
    def total(self) -> int:
        return self.products + self.rest


@dataclass(frozen=True)
class Cost:
    """What one context costs a memory.

    Args:
        bytes: Of the state of one row.
        write: Operations of writing the context.
        read: Operations of reading one query and its answer.
    """

    bytes: int
    write: Operations
    read: Operations


def counted(call: Callable[[], T]) -> tuple[T, Operations]:
    """What a call returns, and the operations that it took.

    >>> counted(lambda: torch.ones(2, 3) @ torch.ones(3, 4) + 1)[1]
    Operations(products=48, rest=8)
    """
    with _Counter() as counter:
        result = call()
    return result, Operations(counter.products, counter.rest)


@torch.no_grad()
def cost_of(memory: Memory[Any], episode: Episode, *, steps: int | None = None) -> Cost:
    """Of the first context of an episode and of its first query.

    Args:
        steps: Of the write; None for memories that take none.
    """
    context = Tokens(episode.context.ids[:1], episode.context.mask[:1])
    asked = Tokens(*(torch.cat([getattr(episode.query, part)[:1, 0], getattr(episode.target, part)[:1, 0, :-1]], -1) for part in ("ids", "mask")))
    state, write = counted(lambda: written(memory, memory.start(1), context, steps=steps))
    _, read = counted(lambda: memory.read(state, asked))
    return Cost(size_of(state), write, read)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Adds up what every operation costs, from the shapes that it is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.products = self.rest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.removesuffix("_")
        if (product := PRODUCTS.get(name)) is not None:
            self.products += product(args, out)
        elif "attention" in name:
            raise SpecError(f"`{name}` is a kernel whose operations are not known here; count a model on a CPU, or with eager attention.")
        elif (torch.Tag.pointwise in function.tags and name not in MOVES) or name in REDUCTIONS:
            touched = [x.numel() for x in tree_leaves((args, out)) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
            self.rest += max(touched, default=0)
        return out


def _matrices(left: Tensor, right: Tensor) -> int:
    """[.., M, K] by [.., K, N]."""
    return 2 * left.numel() * right.shape[-1]


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    """Of a kernel [out, in / groups, span]."""
    return 2 * out.numel() * math.prod(args[1].shape[1:])


def _convolution_backward(args: tuple[Any, ...], out: tuple[Tensor | None, ...]) -> int:
    """As much as forward for the gradient of the input, and for that of the kernel."""
    return sum(2 * args[0].numel() * math.prod(args[2].shape[1:]) for gradient in out[:2] if gradient is not None)


def _attention(args: tuple[Any, ...], _: Any) -> int:
    """Queries by keys and weights by values: [B, H, T, K] and [B, H, S, K]."""
    q, k, v = args[:3]
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])


def _attention_backward(args: tuple[Any, ...], _: Any) -> int:
    """The weights anew, their gradient, and those of queries, keys and values."""
    q, k, v = args[1:4]
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (3 * k.shape[-1] + 2 * v.shape[-1])


PRODUCTS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "mm": lambda args, _: _matrices(args[0], args[1]),
    "bmm": lambda args, _: _matrices(args[0], args[1]),
    "addmm": lambda args, _: _matrices(args[1], args[2]),
    "baddbmm": lambda args, _: _matrices(args[1], args[2]),
    "addbmm": lambda args, _: _matrices(args[1], args[2]),
    "mv": lambda args, _: 2 * args[0].numel(),
    "addmv": lambda args, _: 2 * args[1].numel(),
    "dot": lambda args, _: 2 * args[0].numel(),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "linalg_solve_triangular": lambda args, _: args[0].numel() * args[1].shape[-1],  # half of a square one
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
