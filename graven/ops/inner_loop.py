"""K steps on an inner loss, and the exact derivative of where they end, in memory that does not grow with K.

    g_k = grad L(x_k),   x_(k+1) = U_k(x_k, g_k),   k = 0 .. K-1                                (S9)

Training through such steps needs d Outer(x_K) / d x_0 and d Outer / d w for every weight w that L and U read. Autograd gets them from the graphs of
all K steps at once. Here the steps are kept as x_0 .. x_(K-1) alone, and the backward pass visits them from the last to the first: it makes the graph
of one step again, and pulls lambda = d Outer / d x_(k+1) through it,

    (lambda_k, d_w) = vjp of [ x_k, w -> U_k(x_k, grad L(x_k)) ] with lambda_(k+1),   w.grad += d_w          (S10)

which holds the Hessian-vector products H_xx mu and H_wx mu, mu = vjp of U in g. Nothing is approximated: the unrolled sum in another order.
One graph lives at a time. That of the last step is still there when the backward pass begins, so it is not made again: (8 K - 2) / (6 K) of the
work of the unrolled form, where a checkpoint of every step takes 9 / 6.

Useful wherever a gradient is trained through: memories, MAML, penalties on gradients.
Source: ours in this form; the sweep is reverse-mode differentiation with recomputation, Griewank and Walther 2008, chapter 12; the inner steps
are those of Finn et al. 2017, arXiv:1703.03400, equation 1. Proved against the unrolled form in tests/test_inner_loop.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from graven.errors import OrderError, ShapeError, SpecError
from graven.ops.second_order import check_twice_differentiable

Tensors = tuple[Tensor, ...]
Loss = Callable[[Tensors, Tensors], Tensor]
Update = Callable[[int, Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
Extent = Literal["none", "update", "whole"]  # of the graph that is made of a step


def descend(
    variables: Sequence[Tensor],
    loss: Loss,
    update: Update,
    *,
    steps: int,
    parameters: Sequence[Tensor] = (),
    inputs: Sequence[Tensor] = (),
    carried: Sequence[Tensor] = (),
    second: int | None = None,
    keep: int = 1,
    rows: int | None = None,
) -> tuple[Tensors, Tensors]:
    """Variables, and what the update carries, after K steps; once differentiable, exactly and with one step's graph at a time.

    Both functions must be pure, and see tensors that need a gradient only as arguments or in `parameters`. What they draw from torch's global
    generators is drawn again alike; a generator of their own is not rewound. Under `torch.no_grad` nothing is kept.

    Args:
        variables: What is descended on, x_0; left as they are.
        loss: Of (variables, inputs), a tensor of any shape that is summed.
        update: Of (step, variables, gradients, carried): the new variables and the new carried tensors, in the same order and shapes.
        steps: K.
        parameters: Leaves that `loss` or `update` read beside their arguments, in any order; a repeated one counts once.
        inputs: Further arguments of the loss, such as data or what was computed from parameters before the loop.
        carried: What the update hands from step to step, such as moments; floating point.
        second: Second order for so many last steps; the gradients of those before are held constant. All steps where left out, 0 is first order.
        keep: Graphs of so many last steps (of `rows` rows) stay until the backward pass: more memory, less to do again; K is the unrolled form.
        rows: Rows of all variables, inputs and carried tensors (axis 0) that are in memory at once; for a loss whose rows do not meet.
    Raises:
        SpecError: A number is out of range; `loss` or `update` reads a leaf that needs a gradient and is not in `parameters`: its second-order
            gradient would be lost.
        ShapeError: An update returns other shapes than it got, or `rows` is given and rows differ.
        OrderError: The loss goes through an `autograd.Function` that could drop its second derivative; in the backward pass, too, where a second
            derivative of the end is asked for.
        RuntimeError: In the backward pass: a tensor was changed in place since the loop.
    Differs from MAML as published: any update, and memory of one step instead of K.
    Source: ours; equations S9 and S10.

    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> (end,), _ = descend((x,), lambda v, _: w * v[0] ** 2, lambda k, v, g, c: ((v[0] - 0.1 * g[0],), c), steps=2, parameters=[w])
    >>> end.sum().backward()
    >>> [round(number.item(), 4) for number in (end, x.grad, w.grad)]       # x (1 - 0.2 w)^2, its slope in x, its slope in w
    [0.32, 0.16, -0.32]
    """
    for name, number, least in (("steps", steps, 0), ("second", second, 0), ("keep", keep, 0), ("rows", rows, 1)):
        if number is not None and number < least:
            raise SpecError(f"`{name}` is {number}; it must be at least {least}.")
    state, arguments = (*variables, *carried), tuple(inputs)
    if rows is not None and len({x.shape[:1] for x in (*state, *arguments)}) > 1:
        shapes = [tuple(x.shape) for x in (*state, *arguments)]
        raise ShapeError(f"`rows` is {rows} and the tensors have shapes {shapes}; they must agree in the size of axis 0.")
    leaves = tuple(dict.fromkeys(p for p in parameters if p.requires_grad))  # tied weights come twice, and must count once
    loop = _Loop(
        loss=loss, update=update, steps=steps, first=0 if second is None else max(0, steps - second), keep=keep, rows=rows,
        variables=len(variables), parameters=leaves, wanted=tuple(x.requires_grad for x in arguments),
    )  # fmt: skip
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*state, *arguments, *leaves)):
        state = _Sweep.apply(loop, len(state), *state, *arguments, *leaves)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        state = loop.run(state, arguments)
    return state[: len(variables)], state[len(variables) :]


@dataclass
class _Graph:
    """One step of some rows: leaves that stand for its arguments, and what it made of them."""

    leaves: Tensors
    ends: Tensors

    def pull(self, cotangents: Sequence[Tensor], parameters: Tensors, *, again: bool) -> list[Tensor | None]:
        """Gradients of <ends, cotangents> in the leaves and in the parameters; `again` where the graph must outlive it."""
        pairs = [(end, by) for end, by in zip(self.ends, cotangents, strict=True) if end.requires_grad]
        ends, by = [end for end, _ in pairs], [cotangent for _, cotangent in pairs]
        places = (*self.leaves, *parameters)
        at = [x for x in places if x.requires_grad]
        found = iter(torch.autograd.grad(ends, at, by, allow_unused=True, retain_graph=again) if ends else [None] * len(at))
        return [next(found) if x.requires_grad else None for x in places]


@dataclass(kw_only=True)
class _Loop:
    """What one call was asked for, and what it keeps for its backward pass. A state is the variables and then the carried tensors."""

    loss: Loss
    update: Update
    steps: int
    first: int  # steps of first order, which come before those of second
    keep: int
    rows: int | None
    variables: int
    parameters: Tensors
    wanted: tuple[bool, ...]  # inputs that need a gradient
    trail: list[Tensors] = field(default_factory=list)  # the state before each step
    drawn: dict[tuple[int, int], "_Surroundings"] = field(default_factory=dict)
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)

    def run(self, state: Tensors, inputs: Tensors, *, record: bool = False) -> Tensors:
        """All steps; `record` for a backward pass."""
        state, parts = tuple(x.detach() for x in state), self.parts(state)
        for k in range(self.steps):
            made = []
            for i, part in enumerate(parts):
                kept = (self.steps - k) * len(parts) - i <= self.keep
                graph: Extent = "none" if not record else "update" if k < self.first else "whole" if kept else "none"
                if record:
                    self.drawn[k, i] = _Surroundings.now(state[0].device)
                step = self.step(k, _rows(state, part), _rows(inputs, part), graph=graph, checked=record)
                if graph != "none":
                    self.graphs[k, i] = step
                made.append(tuple(x.detach() for x in step.ends))
            if record:
                self.trail.append(state)
            state = _joined(made)
        return state

    def sweep(self, inputs: Tensors, cotangents: Tensors) -> list[Tensor | None]:
        """Gradients of the start, the inputs and the parameters."""
        parts, states = self.parts(cotangents), len(cotangents)
        of_inputs: list[Tensor | None] = [torch.zeros_like(x) if wanted else None for x, wanted in zip(inputs, self.wanted, strict=True)]
        of_parameters: list[Tensor | None] = [None] * len(self.parameters)
        for k in reversed(range(self.steps)):
            pulled = []
            for i, part in reversed(list(enumerate(parts))):  # the graphs that were kept first: they leave room for the others
                graph = self.graph(k, i, part, inputs)
                found = graph.pull(_rows(cotangents, part), self.parameters, again=k < self.first)
                pulled.append(tuple(torch.zeros_like(x) if g is None else g for x, g in zip(graph.leaves, found[:states], strict=False)))
                for total, g in zip(of_inputs, found[states : states + len(inputs)], strict=True):
                    if total is not None and g is not None:
                        _at(total, part).add_(g)
                of_parameters = [_sum(a, b) for a, b in zip(of_parameters, found[states + len(inputs) :], strict=True)]
            cotangents = _joined(pulled[::-1])
        return [*cotangents, *of_inputs, *of_parameters]

    def parts(self, state: Tensors) -> list[slice | None]:
        """Rows that go together; None is all of them."""
        if self.rows is None or len(state[0]) <= self.rows:
            return [None]
        return [slice(i, i + self.rows) for i in range(0, len(state[0]), self.rows)]

    def graph(self, k: int, i: int, part: slice | None, inputs: Tensors) -> _Graph:
        """The graph of a step: the one that was kept, or made again from where the step began."""
        if k < self.first:
            return self.graphs[k, i]
        kept = self.graphs.pop((k, i), None)
        if kept is not None:
            return kept
        with self.drawn[k, i].again():
            return self.step(k, _rows(self.trail[k], part), _rows(inputs, part), graph="whole", checked=True)

    def step(self, k: int, state: Tensors, inputs: Tensors, *, graph: Extent, checked: bool) -> _Graph:
        """One step of some rows, from leaves of its own."""
        whole = graph == "whole"
        variables = tuple(x.detach().requires_grad_() for x in state[: self.variables])
        carried = tuple(x.detach().requires_grad_(graph != "none") for x in state[self.variables :])
        inputs = tuple(x.detach().requires_grad_(whole and wanted) for x, wanted in zip(inputs, self.wanted, strict=True))
        with torch.enable_grad():
            loss = self.loss(variables, inputs).sum()
            if whole and k == self.steps - 1:
                check_twice_differentiable(loss, variables)
            gradients = torch.autograd.grad(loss, variables, create_graph=whole, materialize_grads=True)
        with torch.set_grad_enabled(graph != "none"):
            new, new_carried = self.update(k, variables, gradients, carried)
        ends, leaves = (*new, *new_carried), (*variables, *carried, *inputs)
        came, expected = [tuple(x.shape) for x in ends], [tuple(x.shape) for x in state]
        if came != expected:
            raise ShapeError(f"`update` returned shapes {came} for {expected}; it must keep number, order and shapes.")
        if checked and k == self.steps - 1:
            self.check_leaves(ends if k < self.first else (loss, *ends), leaves)
        return _Graph(leaves, ends)

    def check_leaves(self, ends: Tensors, leaves: Tensors) -> None:
        """Every leaf below the ends must be one whose gradient is collected: autograd would pass over any other without a word."""
        known, nodes = {id(x) for x in (*leaves, *self.parameters)}, [end.grad_fn for end in ends if end.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise SpecError(
                    f"`loss` or `update` reads a tensor of shape {tuple(leaf.shape)} that needs a gradient and is not in `parameters`: its "
                    "second-order gradient would be lost. Add it there, or pass what was computed from it in `inputs`."
                )
            new = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= new
            nodes += new


class _Sweep(torch.autograd.Function):
    """The steps as one node of the outer graph."""

    @staticmethod
    def forward(ctx: Any, loop: _Loop, states: int, *tensors: Tensor) -> Tensors:
        inputs = tensors[states : states + len(loop.wanted)]
        ctx.loop, ctx.inputs = loop, slice(states, states + len(inputs))
        ctx.save_for_backward(*tensors)  # which also notices a weight that changed in between
        return loop.run(tensors[:states], inputs, record=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else what depends on this gradient would lose its share without a word
            raise OrderError("`descend` has a first derivative, and a second was asked for (create_graph=True); unroll the steps for it.")
        return (None, None, *ctx.loop.sweep(ctx.saved_tensors[ctx.inputs], cotangents))


@dataclass(frozen=True)
class _Surroundings:
    """What a step depends on beside its arguments: torch's global generators and autocast."""

    device: torch.device
    random: Tensor
    random_there: Tensor | None
    autocast: tuple[torch.dtype, bool]

    @classmethod
    def now(cls, device: torch.device) -> "_Surroundings":
        there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), there, (torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)))

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were, for as long as the block lasts."""
        dtype, enabled = self.autocast
        with torch.random.fork_rng([self.device] if self.random_there is not None else []):
            torch.set_rng_state(self.random)
            if self.random_there is not None:
                torch.cuda.set_rng_state(self.random_there, self.device)
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield


def _at(x: Tensor, part: slice | None) -> Tensor:
    return x if part is None else x[part]


def _rows(tensors: Tensors, part: slice | None) -> Tensors:
    return tensors if part is None else tuple(x[part] for x in tensors)


def _joined(parts: Sequence[Tensors]) -> Tensors:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(rows) for rows in zip(*parts, strict=True))


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more  # not in place: a gradient may be the cotangent itself
