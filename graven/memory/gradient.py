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
from torch.nn import functional as F

from graven.errors import ModelError, SpecError
from graven.lm.base import Continuation, LanguageModel, greedy
from graven.ops.inner_loop import Tensors, descend
from graven.ops.pointwise import cross_entropy
from graven.shapes import check
from graven.tasks.base import Tokens, front


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain gradient steps.

    Args:
        rate: Step size, the start of it where it is learned.
        learn: "no", one "scalar", or one per "coordinate" of the memory.
        clip: Largest Euclidean norm of one row's gradient; no limit where left out.
        settle: Factor on the rate for each step beyond the `steps` of the spec: below 1, a longer write comes to rest near the last step that was
            trained, where a constant rate may walk on past it.
    """

    rate: float = 0.2
    learn: Literal["no", "scalar", "coordinate"] = "no"
    clip: float | None = None
    settle: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam on the memory, for frozen models. It keeps moments, so nothing can be trained through it here.

    Args:
        rate: Step size.
        betas: Decay of the first and second moment.
        epsilon: Added to the root of the second moment.
    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1.
    """

    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8


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
        projection: A learned linear map, the identity at the start, between the state and the model.
        start: Spread of the start state, in that of the model's embeddings. Behind a first RMSNorm the gradient grows as 1 / |M|, so a small
            start lets the first step fill the memory: trained small decoders leave the plateau "any of the values" sooner (docs/log.md).
    Raises:
        SpecError: A number is out of range, or `order` and `rule` contradict each other.
    """

    slots: int
    steps: int
    rule: SGD | Adam = SGD()
    order: Literal["second", "first", "none"] = "second"
    last: int | None = None
    keep: int = 1
    rows: int | None = None
    write_head: bool = False
    control: int = 0
    projection: bool = False
    start: float = 1.0

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "steps": 0, "control": 0, "last": 1, "keep": 0, "rows": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"`{name}` is {value}; it must be at least {least}.")
        if not self.start > 0:  # zeros are NaN behind a first RMSNorm
            raise SpecError(f"`start` is {self.start}; it must be above 0.")
        for name, number in (("rate", self.rule.rate), ("clip", self.rule.clip if isinstance(self.rule, SGD) else None)):
            if number is not None and not number > 0:
                raise SpecError(f"`{name}` is {number}; it must be above 0.")
        if isinstance(self.rule, SGD) and not 0 < self.rule.settle <= 1:
            raise SpecError(f"`settle` is {self.rule.settle}; it must be above 0 and at most 1, which is a constant rate.")
        if self.order not in ("second", "first", "none"):
            raise SpecError(f'`order` is {self.order!r}; it must be "second", "first" or "none".')
        if self.last is not None and self.order != "second":
            raise SpecError(f'`last` is {self.last} and `order` is "{self.order}"; only second order can be cut short. Leave `last` out.')
        if isinstance(self.rule, SGD) and self.rule.learn not in ("no", "scalar", "coordinate"):
            raise SpecError(f'`learn` is {self.rule.learn!r}; it must be "no", "scalar" or "coordinate".')
        if isinstance(self.rule, SGD) and self.rule.learn != "no" and self.order == "none":
            raise SpecError(f'`order` is "none" and `learn` is "{self.rule.learn}"; a rate cannot learn from steps that training does not see.')
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
        moments: What Adam carries to the next step.
    """

    loss: Float[Tensor, "B"]
    token_losses: Float[Tensor, "B T"]
    hits: Bool[Tensor, "B T"]
    state: Float[Tensor, "B M D"]
    moments: "Moments | None"


@dataclass(frozen=True)
class Moments:
    """Adam's running moments of the gradient and of its square, and how many gradients they have seen."""

    first: Float[Tensor, "B M D"]
    second: Float[Tensor, "B M D"]
    count: int


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
        self.rate = None
        if isinstance(spec.rule, SGD) and spec.rule.learn != "no":
            shape = (spec.slots, model.width) if spec.rule.learn == "coordinate" else ()
            self.rate = nn.Parameter(torch.full(shape, spec.rule.rate))

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
        check(state=(state, f"B M {self.model.width}"), query=(query.ids, "B T"))
        front_first = query.aligned()
        hidden = self._hidden(state, self.model.embed(front_first), control=self.read_control)
        # column j of the query has been preceded by so many real tokens; padding repeats what stood before it
        seen = F.pad(query.mask.cumsum(-1), (1, 0))
        return self.model.logits(hidden.gather(1, seen[..., None].expand(-1, -1, hidden.shape[-1])))

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
        state, moments = self._update(state, gradient, moments, taken)
        return Step(loss.detach(), losses.detach(), hits, state, moments)

    def _trained_write(self, state: Float[Tensor, "B M D"], context: Prepared, steps: int) -> Float[Tensor, "B M D"]:
        """The same steps, as one node of the graph of whatever is trained through them."""
        second = 0 if self.spec.order == "first" else self.spec.last
        tokens = context.tokens

        def loss(variables: Tensors, inputs: Tensors) -> Tensor:
            embedded, weight, ids, mask = inputs
            losses, _ = self._reconstruct(variables[0], Prepared(Tokens(ids, mask), embedded, weight))
            return losses * weight

        def update(taken: int, variables: Tensors, gradients: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
            return (self._update(variables[0], gradients[0], None, taken)[0],), ()

        inputs, leaves = (context.embedded, context.weight, tokens.ids, tokens.mask), list(self.parameters())
        (state,), _ = descend(
            (state,), loss, update, steps=steps, parameters=leaves, inputs=inputs, second=second, keep=self.spec.keep, rows=self.spec.rows
        )
        return state

    def _reconstruct(self, state: Float[Tensor, "B M D"], context: Prepared) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        hidden = self._hidden(state, context.embedded[:, :-1], control=self.write_control)
        logits = self._write_logits(hidden[:, : context.tokens.ids.shape[1]])
        ids, mask = context.tokens.ids, context.tokens.mask
        losses = cross_entropy(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
        return losses * mask, (logits.argmax(-1) == ids) & mask

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
    ) -> tuple[Float[Tensor, "B M D"], Moments | None]:
        """State and moments after the rule took one step, `taken` of which went before."""
        return self._update(state, gradient, moments, taken)

    def _update(self, state: Tensor, gradient: Tensor, moments: Moments | None, taken: int) -> tuple[Tensor, Moments | None]:
        rule = self.spec.rule
        if isinstance(rule, SGD):
            if rule.clip is not None:
                norm = gradient.flatten(1).norm(dim=1).clamp(min=rule.clip)[:, None, None]
                gradient = gradient * (rule.clip / norm)
            settled = rule.settle ** max(0, taken + 1 - self.spec.steps)
            return state - settled * (rule.rate if self.rate is None else self.rate) * gradient, None
        if moments is None:
            moments = Moments(torch.zeros_like(state), torch.zeros_like(state), 0)
        (beta1, beta2), count = rule.betas, moments.count + 1
        first = moments.first.lerp(gradient, 1 - beta1)
        second = moments.second.lerp(gradient * gradient, 1 - beta2)
        step = (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + rule.epsilon)
        return state - rule.rate * step, Moments(first, second, count)


def wide(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """As float32, float64 as it is: half precision would lose most of the updates of a memory."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def detached(context: Prepared) -> Prepared:
    """The same context as a constant."""
    return Prepared(context.tokens, context.embedded.detach(), context.weight)
