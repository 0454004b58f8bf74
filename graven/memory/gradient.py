"""GradMem: a context is written into m prefix vectors of a language model by a few gradient steps on the loss of reconstructing it.

    L(M; C)  = mean over counted i of  -log f(t_i | [M; t_<i])                    one value a row; the last slot predicts t_1
    M_(k+1)  = M_k - rate * grad L(M_k; C),   k = 0 .. K-1                        (write; weights as they are)
    f(Y | [M_K; Q])                                                               (read; the context is gone)

Trained through its own steps: the read loss is differentiated with respect to the weights and to M_0, through the gradients of the write, by the
reverse sweep of `ops.inner_loop`: exactly, in memory that does not grow with K.

Source: Kuratov et al. 2026, arXiv:2603.13875v2, equations 5 to 8. Differs: the loss is a mean, as in the authors' code, not the paper's sum.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from graven.errors import ModelError, SpecError
from graven.lm.base import Continuation, LanguageModel, greedy
from graven.memory.base import read_behind
from graven.memory.base import wide as wide
from graven.memory.rules import PLAIN, At, GaussNewton, LowRank, Product, Rule
from graven.memory.rules import SGD as SGD
from graven.memory.rules import Adam as Adam
from graven.memory.rules import Moments as Moments
from graven.ops.inner_loop import Tensors, descend
from graven.ops.pointwise import cross_entropy
from graven.shapes import check
from graven.tasks.base import Tokens, front


@dataclass(frozen=True, kw_only=True)
class GradMemSpec:
    """What a `GradMem` is.

    Args:
        slots: Memory vectors, M.
        steps: Gradient steps of a write, K, where a write names no other number.
        rule: How a gradient becomes a step.
        order: What training sees of the steps: "second" everything; "first" the steps, with their gradients held constant; "none" nothing.
        last: Second order for so many last steps, first order for those before; for all where left out.
        keep: Steps whose graph stays in memory from a write to its backward pass; with K or more nothing is computed twice.
        rows: Contexts whose graph of a step is in memory at once; all where left out.
        write_head: Reconstruct through a head of its own, a copy of the model's at the start.
        control: Learned vectors on either side of the memory, other ones for writing than for reading.
        weigh: Tokens of the context have learned weights in the loss of a write, all 1 at the start: twice the sigmoid of a linear map of what is
            embedded. One step with the right weights is what *Gating is Weighting* says a gate can gain (arXiv:2504.04308).
        projection: A learned linear map, the identity at the start, between the state and the model.
        start: Spread of the start state, in that of the model's embeddings. Behind a first RMSNorm the gradient grows as 1 / |M|, so a small
            start lets the first step fill the memory: trained small decoders leave the plateau "any of the values" sooner (docs/log.md).
    Raises:
        SpecError: A number is out of range, or `order` and `rule` contradict each other.
    """

    slots: int
    steps: int
    rule: Rule = PLAIN
    order: Literal["second", "first", "none"] = "second"
    last: int | None = None
    keep: int = 1
    rows: int | None = None
    write_head: bool = False
    control: int = 0
    weigh: bool = False
    projection: bool = False
    start: float = 1.0
    kind: Literal["gradmem"] = "gradmem"

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "steps": 0, "control": 0, "last": 1, "keep": 0, "rows": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"`{name}` is {value}; it must be at least {least}.")
        if not self.start > 0:  # zeros are NaN behind a first RMSNorm
            raise SpecError(f"`start` is {self.start}; it must be above 0.")
        if self.order not in ("second", "first", "none"):
            raise SpecError(f'`order` is {self.order!r}; it must be "second", "first" or "none".')
        if self.last is not None and self.order != "second":
            raise SpecError(f'`last` is {self.last} and `order` is "{self.order}"; only second order can be cut short. Leave `last` out.')
        learn = getattr(self.rule, "learn", "no")
        if self.order == "none" and (isinstance(self.rule, LowRank) or learn not in ("no", False)):
            what = "its preconditioner" if isinstance(self.rule, LowRank) else f'`learn` is "{learn}"; a rate'
            raise SpecError(f'`order` is "none" and {what} cannot learn from steps that training does not see.')
        if isinstance(self.rule, GaussNewton) and self.rows is not None:
            raise SpecError(f"`rows` is {self.rows} and the rule is Gauss-Newton, whose matrix is that of all rows; leave `rows` out.")
        if isinstance(self.rule, Adam) and self.order != "none":
            raise SpecError(f'`order` is "{self.order}" and the rule is Adam, whose moments are not trained through; use SGD, or order="none".')


@dataclass(frozen=True)
class Prepared:
    """A context as every step of a write needs it: real tokens in front, embedded once."""

    tokens: Tokens
    embedded: Float[Tensor, "B T D"]
    weight: Float[Tensor, "B T"]


@dataclass(frozen=True)
class Step:
    """One gradient step.

    Args:
        loss: Of the state that the step started from, [B].
        token_losses: What it is the mean of: cross entropy of each token in nats, [B, T], 0 at padding.
        hits: Tokens that this state's most probable prediction gets right, given the true tokens before it; [B, T], False at padding.
        state: After the step.
        moments: What the rule carries to the next step.
    """

    loss: Float[Tensor, "B"]
    token_losses: Float[Tensor, "B T"]
    hits: Bool[Tensor, "B T"]
    state: Float[Tensor, "B M D"]
    moments: Moments


class GradMem(nn.Module):
    """The memory. `model` is a part of it and trains with it.

    Args:
        model: The language model behind the memory.
        spec: What to build.
        seed: Of the start state.
        before: Tokens that stand in front of the memory, in writing and in reading: what a chat template begins a turn with.
    Raises:
        ModelError: The order is "second" and the model's attention cannot be differentiated twice.
    """

    def __init__(self, model: LanguageModel, spec: GradMemSpec, *, seed: int = 0, before: Sequence[int] = ()):
        super().__init__()
        if spec.order == "second" and not model.twice_differentiable:
            raise ModelError(f'{model.name} cannot be differentiated twice and `order` is "second"; load it with attention="graven".')
        self.model, self.spec, self.before = model, spec, tuple(before)
        generator = torch.Generator().manual_seed(seed)
        scale = model.embedding_scale

        def vectors(*shape: int) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, model.width, generator=generator))

        self.initial = vectors(spec.slots)
        self.initial.data *= spec.start
        self.write_control, self.read_control = (vectors(2, spec.control) if spec.control else None for _ in range(2))
        self.projection = nn.Parameter(torch.eye(model.width)) if spec.projection else None
        self.write_head = nn.Linear(model.hidden_width, model.vocabulary, bias=False) if spec.write_head else None
        if self.write_head is not None:
            self.write_head.weight.data.copy_(model.head_weight)
        self.token_weight = nn.Parameter(torch.zeros(model.width)) if spec.weigh else None
        self.register_parameter("rate", None)
        learned = spec.rule.learned(spec.slots, model.width, generator)
        for name, value in learned.items():
            self.register_parameter(name, nn.Parameter(value))
        self._learned = tuple(learned)

    def start(self, batch: int) -> Float[Tensor, "B M D"]:
        """The learned start state, one copy a row; float32, or float64 where the model is."""
        return wide(self.initial).expand(batch, -1, -1)

    def write(
        self,
        state: Float[Tensor, "B M D"],
        context: Tokens,
        *,
        steps: int | None = None,
        counted: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """K gradient steps on the loss of reconstructing the context, each row for itself.

        Args:
            state: Left as it is.
            context: Padding may stand anywhere; a row without tokens keeps its state.
            steps: K, the spec's where left out; may exceed the K of training.
            counted: Tokens whose prediction counts in the loss; all where left out.
        Raises:
            ShapeError: The parts do not fit each other.
            SpecError: `steps` is negative.
        Source: Kuratov et al. 2026, arXiv:2603.13875v2, equation 5.
        """
        steps = self.spec.steps if steps is None else steps
        if steps < 0:
            raise SpecError(f"`steps` is {steps}; it must be at least 0.")
        prepared = self.prepare(state, context, counted=counted)
        if self.spec.order != "none" and torch.is_grad_enabled():
            return self._trained_write(state, prepared, steps)
        moments = None
        for taken in range(steps):
            step = self.step(state, prepared, moments, taken=taken)
            state, moments = step.state, step.moments
        return state

    def read(self, state: Float[Tensor, "B M D"], query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Raises:
            ShapeError: State and query differ in rows, or the state has another width.
        Source: Kuratov et al. 2026, arXiv:2603.13875v2, equation 6.
        """
        check(state=(state, f"B M {self.model.width}"))
        return read_behind(self.model, self.prefix(state, control=self.read_control), query)

    def recite(self, state: Float[Tensor, "B M D"], lengths: list[int]) -> list[list[int]]:
        """What the model reproduces of each context when it runs freely from the memory, so many tokens of each row.

        Source: ours. It feeds on its own output, so one wrong token derails the rest; `Step.hits` is the teacher-forced counterpart.
        """
        nothing = Tokens.of([[] for _ in lengths])
        prefix, most = self.prefix(state, control=self.write_control), max(lengths, default=0)
        if self.write_head is None:
            rows = self.model.generate(prefix, nothing, most=most, stop=())
        else:
            rows = greedy(self.model, prefix, nothing, most=most, stop=(), head=self._write_logits)
        return [row.tokens[:length] for row, length in zip(rows, lengths, strict=True)]

    def answer(self, state: Float[Tensor, "B M D"], query: Tokens, *, most: int, stop: Collection[int]) -> list[Continuation]:
        """The most probable continuation of each query behind its memory."""
        return self.model.generate(self.prefix(state, control=self.read_control), query, most=most, stop=stop)

    def prepare(self, state: Float[Tensor, "B M D"], context: Tokens, *, counted: Bool[Tensor, "B T"] | None = None) -> Prepared:
        """What the steps of one write share."""
        named = {"state": (state, f"B M {self.model.width}"), "context": (context.ids, "B T")}
        if counted is not None:
            named["counted"] = (counted, "B T")
        check(**named)
        weight = context.mask if counted is None else context.mask & counted
        tokens = context.aligned()
        weight = weight.gather(-1, front(context.mask))[:, : tokens.ids.shape[1]]
        embedded = self.model.embed(tokens)
        weight = weight.to(wide(embedded).dtype)
        if self.token_weight is not None:
            shares = weight / weight.sum(-1, keepdim=True).clamp(min=1.0)
            return Prepared(tokens, embedded, shares * 2 * (wide(embedded) @ self.token_weight).sigmoid())
        return Prepared(tokens, embedded, weight / weight.sum(-1, keepdim=True).clamp(min=1.0))

    def step(self, state: Float[Tensor, "B M D"], context: Prepared, moments: Moments | None = None, *, taken: int = 0) -> Step:
        """The step of a write that comes after `taken` others. Under `torch.no_grad` nothing is kept for a backward pass, whatever the order."""
        order = self.spec.order if torch.is_grad_enabled() else "none"
        second = order == "second"
        with torch.enable_grad():
            here = state if second and state.requires_grad else state.detach().requires_grad_()
            losses, hits = self._reconstruct(here, context if second else detached(context))
            loss = (losses * context.weight).sum(-1)
            (gradient,) = torch.autograd.grad(loss.sum(), here, create_graph=second)
        if order == "none":
            state = state.detach()
        state, moments = self._update(state, gradient, moments, taken, context)
        return Step(loss.detach(), losses.detach(), hits, state, moments)

    def _trained_write(self, state: Float[Tensor, "B M D"], context: Prepared, steps: int) -> Float[Tensor, "B M D"]:
        """The same steps, as one node of the graph of whatever is trained through them."""
        second = 0 if self.spec.order == "first" else self.spec.last
        tokens = context.tokens

        def loss(variables: Tensors, inputs: Tensors) -> Tensor:
            embedded, weight, ids, mask = inputs
            losses, _ = self._reconstruct(variables[0], Prepared(Tokens(ids, mask), embedded, weight))
            return losses * weight

        def update(taken: int, variables: Tensors, gradients: Tensors, carried: Tensors) -> tuple[Tensors, Tensors]:
            new, moments = self._update(variables[0], gradients[0], Moments(carried, taken), taken, context)
            return (new,), moments.parts

        inputs, leaves = (context.embedded, context.weight, tokens.ids, tokens.mask), list(self.parameters())
        (state,), _ = descend(
            (state,), loss, update, steps=steps, parameters=leaves, inputs=inputs, carried=self.spec.rule.carried(state), second=second,
            keep=self.spec.keep, rows=self.spec.rows,
        )  # fmt: skip
        return state

    def reconstruction(self, state: Float[Tensor, "B M D"], context: Prepared) -> Float[Tensor, "B"]:
        """The loss that a write descends, of each row; differentiable twice in everything."""
        return (self._reconstruct(state, context)[0] * context.weight).sum(-1)

    def _reconstruct(self, state: Float[Tensor, "B M D"], context: Prepared) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        logits = self._predictions(state, context)
        ids, mask = context.tokens.ids, context.tokens.mask
        losses = cross_entropy(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
        return losses * mask, (logits.argmax(-1) == ids) & mask

    def _predictions(self, state: Float[Tensor, "B M D"], context: Prepared) -> Float[Tensor, "B T A"]:
        hidden = self._hidden(state, context.embedded[:, :-1], control=self.write_control)
        return self._write_logits(hidden[:, : context.tokens.ids.shape[1]])

    def curvature(self, state: Float[Tensor, "B M D"], context: Prepared) -> Product:
        """Products with the Gauss-Newton matrix of the loss at a state, all of it constant: J v is the derivative of J^T u in u."""
        with torch.enable_grad():
            here = state.detach().requires_grad_()
            logits = self._predictions(here, detached(context))
            dummy = torch.zeros_like(logits).requires_grad_()
            (pulled,) = torch.autograd.grad(logits, here, dummy, create_graph=True)
        p, weight = logits.detach().softmax(-1), context.weight.detach()[..., None]

        def product(v: Tensor) -> Tensor:
            (tangent,) = torch.autograd.grad(pulled, dummy, v, retain_graph=True)
            by = weight * p * (tangent - (p * tangent).sum(-1, keepdim=True))
            return torch.autograd.grad(logits, here, by, retain_graph=True)[0]

        return product

    def _write_logits(self, hidden: Float[Tensor, "*B E"]) -> Float[Tensor, "*B A"]:
        """What a write predicts with: its own head, which is float32 whatever the model is, or the model's."""
        return wide(self.model.logits(hidden)) if self.write_head is None else self.write_head(hidden.to(self.write_head.weight.dtype))

    def _hidden(self, state: Float[Tensor, "B M D"], embedded: Float[Tensor, "B T D"], *, control: Tensor | None) -> Float[Tensor, "B S E"]:
        """Hidden states from the last vector before the tokens on: the predictions of every token and of one more."""
        prefix = self.prefix(state, control=control)
        hidden = self.model.hidden(torch.cat([prefix.to(embedded.dtype), embedded], dim=1))
        return hidden[:, prefix.shape[1] - 1 :]

    def prefix(self, state: Float[Tensor, "B M D"], *, control: Tensor | None) -> Float[Tensor, "B S D"]:
        """The vectors that stand before the tokens: the memory, mapped where the spec says so, between its control vectors, behind `before`."""
        prefix = state if self.projection is None else state @ self.projection
        if control is not None:
            before, after = (part.expand(len(state), -1, -1) for part in control)
            prefix = torch.cat([before, prefix, after], dim=1)
        if self.before:
            fixed = self.model.embed(Tokens.of([self.before])).expand(len(state), -1, -1)
            prefix = torch.cat([fixed.to(prefix.dtype), prefix], dim=1)
        return prefix

    def update(
        self, state: Float[Tensor, "B M D"], gradient: Float[Tensor, "B M D"], moments: Moments | None = None, *, taken: int = 0
    ) -> tuple[Float[Tensor, "B M D"], Moments]:
        """State and moments after the rule took one step, `taken` of which went before."""
        return self._update(state, gradient, moments, taken, None)

    def _update(self, state: Tensor, gradient: Tensor, moments: Moments | None, taken: int, context: Prepared | None) -> tuple[Tensor, Moments]:
        rule = self.spec.rule
        moments = Moments(rule.carried(state), 0) if moments is None else moments
        curvature = self.curvature(state, context) if context is not None and isinstance(rule, GaussNewton) else None
        learned = {name: self.get_parameter(name) for name in self._learned}
        at = At(learned, moments.count, beyond=max(0, taken + 1 - self.spec.steps), curvature=curvature)
        change, parts = rule.change(gradient, moments.parts, at)
        return state - change, Moments(parts, moments.count + 1)


def detached(context: Prepared) -> Prepared:
    """The same context as a constant."""
    return Prepared(context.tokens, context.embedded.detach(), context.weight.detach())
