"""A guard against second derivatives that are left out without a word.

    x = 2,  f = x^3,  loss = x + f':   d loss / dx = 1 + f'' = 13,   and 1 where the backward of f is cut off from x

A derivative of an `autograd.Function` is whatever its author wrote. One whose backward detaches, or runs under `once_differentiable`, still gives a
gradient for `create_graph=True`; what is built on it is silently wrong. Whether a backward can be differentiated cannot be seen from outside, so
every Function on the way is refused unless its class says so. The operations of PyTorch itself raise where they have no second derivative.

Source: ours; tests/test_second_order.py.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from graven.errors import OrderError


def check_twice_differentiable(output: Tensor, inputs: Sequence[Tensor]) -> None:
    """Refuse to go on if a second derivative of `output` with respect to `inputs` could lose a part: call it before `create_graph=True`.

    Only what lies between them is looked at. It costs about a microsecond for each operation there, and computes nothing.

    Args:
        output: What is about to be differentiated.
        inputs: With respect to what; each requires a gradient.
    Raises:
        OrderError: A Function lies between them that does not have the attribute `twice_differentiable = True`. Set it on a class whose second
            derivative `torch.autograd.gradgradcheck` confirms, with inputs and output gradients that require gradients.
    Source: ours; tests/test_second_order.py.

    >>> import torch
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> y = x**3
    >>> check_twice_differentiable(y, [x])
    >>> (slope,) = torch.autograd.grad(y, x, create_graph=True)
    >>> torch.autograd.grad(x + slope, x)
    (tensor(13.),)
    """
    if output.grad_fn is None:
        return
    ends = {get_gradient_edge(x).node for x in inputs if x.requires_grad}
    for node in _between(output.grad_fn, ends):
        if _is_foreign(node):
            raise OrderError(
                f"a second derivative is asked for through {_name(node)}, whose backward may not be differentiable and would then lose a part "
                "without a word; use an operation made of PyTorch's own, or set `twice_differentiable = True` on its class if gradgradcheck passes."
            )


def _between(start: Any, ends: set[Any]) -> list[Any]:
    """Nodes from `start` on from which a path leads on to an end; each is visited once, however many paths there are."""
    on_way: dict[Any, bool] = {}
    stack = [(start, False)]
    while stack:
        node, is_back = stack.pop()
        # behind the only end there is nothing to find, and possibly every earlier step of a long write
        before = [] if ends == {node} else [other for other, _ in node.next_functions if other is not None]
        if is_back:
            on_way[node] = any(other in ends or on_way[other] for other in before)
        elif node not in on_way:
            on_way[node] = False
            stack.append((node, True))
            stack += [(other, False) for other in before if other not in on_way]
    return [node for node, is_between in on_way.items() if is_between]


def _is_foreign(node: Any) -> bool:
    """Written outside of PyTorch: in Python, or in C++ by `torch::autograd::Function`."""
    made = getattr(node, "_forward_cls", None)
    return "CppNode" in node.name() if made is None else not getattr(made, "twice_differentiable", False)


def _name(node: Any) -> str:
    made = getattr(node, "_forward_cls", None)
    return str(node.name()) if made is None else f"{made.__module__}.{made.__qualname__}"
