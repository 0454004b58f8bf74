"""GradMem whose state is a key-value prefix: p keys and p values in every layer, which stand before a text and were never one.

    L(P; C)  = mean over i of  -log f(t_i | P, t_<i)                                one value a row; a learned vector predicts t_1
    K <- K - rate_keys * dL/dK,   V <- V - rate_values * dL/dV,   k = 0 .. K-1       (write; weights as they are)
    f(Y | P, Q)                                                                      (read; the context is gone)

Trained through its own steps as GradMem is. Keys are kept as attention reads them, behind the rotation to the positions 0 .. p-1: for plain gradient
steps that is the same as before it, for the rotation is orthogonal. Context and query both start at position p. Gradients of keys and values differ
in size, so each has a rate.

Source: Kuratov et al. 2026, arXiv:2603.13875v2, equations 5 to 8, with the per-layer memory that its appendix J names: that text is not in our
copy, so the design is ours. Frozen slots: Eyuboglu et al. 2025, arXiv:2506.06266, section 4.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from graven.errors import SpecError
from graven.lm.small import Small
from graven.memory.base import rows_seen, wide
from graven.ops.inner_loop import Tensors, descend
from graven.ops.pointwise import cross_entropy
from graven.shapes import check
from graven.tasks.base import Tokens

KeysValues = tuple[Float[Tensor, "B L G M K"], Float[Tensor, "B L G M K"]]


@dataclass(frozen=True, kw_only=True)
class PrefixSpec:
    """What a `Prefix` is.

    Args:
        slots: Keys and values in each layer, M.
        steps: Gradient steps of a write, K, where a write names no other number.
        rate_keys: Step size of the keys; at 0 they are learned and never written.
        rate_values: Step size of the values.
        frozen: So many first slots are learned and never written: a place for attention that wants nothing.
        order: What training sees of the steps: "second" everything; "first" the steps, with their gradients held constant.
        keep: Steps whose graph stays in memory from a write to its backward pass; with K or more nothing is computed twice.
        write_head: Reconstruct through a head of its own, a copy of the model's at the start.
        start: Spread of the learned start keys and values; those of a fresh decoder have about 1.
    Raises:
        SpecError: A number is out of range, or nothing could ever be written.
    """

    slots: int
    steps: int
    rate_keys: float = 1.0
    rate_values: float = 1.0
    frozen: int = 0
    order: Literal["second", "first"] = "second"
    keep: int = 1
    write_head: bool = False
    start: float = 1.0
    kind: Literal["prefix"] = "prefix"

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "steps": 0, "frozen": 0, "keep": 0, "rate_keys": 0, "rate_values": 0}.items():
            if not getattr(self, name) >= least:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least {least}.")
        if self.frozen >= self.slots or self.rate_keys == self.rate_values == 0:
            raise SpecError(
                f"`frozen` is {self.frozen} of {self.slots} `slots`, `rate_keys` {self.rate_keys} and `rate_values` {self.rate_values}; "
                "nothing could be written. Leave a slot and a rate above 0."
            )
        if not self.start > 0:
            raise SpecError(f"`start` is {self.start}; it must be above 0.")
        if self.order not in ("second", "first"):
            raise SpecError(f'`order` is {self.order!r}; it must be "second" or "first".')


class Prefix(nn.Module):
    """The memory. `model` is a part of it and trains with it. Its state is (keys, values), float32.

    Args:
        model: The decoder that the prefix stands in.
        spec: What to build.
        seed: Of the start state.
    """

    def __init__(self, model: Small, spec: PrefixSpec, *, seed: int = 0):
        super().__init__()
        self.model, self.spec = model, spec
        sizes, generator = model.decoder.spec, torch.Generator().manual_seed(seed)
        shape = (sizes.layers, sizes.key_value_heads, spec.slots, sizes.width // sizes.heads)
        self.keys, self.values = (nn.Parameter(spec.start * torch.randn(shape, generator=generator)) for _ in range(2))
        self.begin = nn.Parameter(model.embedding_scale * torch.randn(1, model.width, generator=generator))
        self.write_head = nn.Linear(model.width, model.vocabulary, bias=False) if spec.write_head else None
        if self.write_head is not None:
            self.write_head.weight.data.copy_(model.head_weight)

    def start(self, batch: int) -> KeysValues:
        """The learned start keys and values, one copy a row."""
        return self.keys.expand(batch, *self.keys.shape), self.values.expand(batch, *self.values.shape)

    def write(self, state: KeysValues, context: Tokens, *, steps: int | None = None) -> KeysValues:
        """K gradient steps on the loss of reconstructing the context, each row for itself.

        Args:
            state: Left as it is.
            context: Padding may stand anywhere; a row without tokens keeps its state.
            steps: K, the spec's where left out; may exceed the K of training.
        Raises:
            ShapeError: State and context differ in rows.
            SpecError: `steps` is negative.
        """
        steps = self.spec.steps if steps is None else steps
        tokens = self._aligned(state, context)
        embedded = self.model.embed(tokens)

        def loss(variables: Tensors, inputs: Tensors) -> Tensor:
            return self._losses((variables[0], variables[1]), *inputs)

        second = 0 if self.spec.order == "first" else None
        inputs, leaves = (embedded, _shares(tokens, embedded), tokens.ids), list(self.parameters())
        (keys, values), _ = descend(state, loss, self._update, steps=steps, parameters=leaves, inputs=inputs, second=second, keep=self.spec.keep)
        return keys, values

    def read(self, state: KeysValues, query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query.

        Raises:
            ShapeError: State and query differ in rows.
        """
        hidden = self._hidden(state, self.model.embed(self._aligned(state, query)))
        return self.model.logits(rows_seen(hidden, query))

    def write_loss(self, state: KeysValues, context: Tokens) -> Float[Tensor, "B"]:
        """What a write descends, nats a token: 0 for a row without one."""
        tokens = self._aligned(state, context)
        embedded = self.model.embed(tokens)
        return self._losses(state, embedded, _shares(tokens, embedded), tokens.ids).sum(-1)

    def _aligned(self, state: KeysValues, tokens: Tokens) -> Tokens:
        layers, groups, slots, width = self.keys.shape
        axes = f"B {layers} {groups} {slots} {width}"
        check(tokens=(tokens.ids, "B T"), keys=(state[0], axes), values=(state[1], axes))
        return tokens.aligned()

    def _losses(self, state: KeysValues, embedded: Tensor, weight: Tensor, ids: Tensor) -> Float[Tensor, "B T"]:
        """Weighted cross entropy of every token."""
        hidden = self._hidden(state, embedded[:, :-1])[:, : ids.shape[1]]
        logits = self.model.logits(hidden) if self.write_head is None else self.write_head(hidden)
        return cross_entropy(logits.flatten(0, 1), ids.flatten()).view(ids.shape) * weight

    def _hidden(self, state: KeysValues, embedded: Float[Tensor, "B T D"]) -> Float[Tensor, "B S D"]:
        """Hidden states of the vector before the tokens and of the tokens."""
        x = torch.cat([self.begin.expand(len(embedded), -1, -1), embedded], 1)
        return self.model.decoder.run(x, before=list(zip(*(part.unbind(1) for part in state), strict=True)))[0]

    def _update(self, _: int, variables: Tensors, gradients: Tensors, carried: Tensors) -> tuple[Tensors, Tensors]:
        written = (torch.arange(self.spec.slots, device=self.keys.device) >= self.spec.frozen)[:, None]
        rates = (self.spec.rate_keys, self.spec.rate_values)
        return tuple(x - rate * written * g for x, g, rate in zip(variables, gradients, rates, strict=True)), carried


def _shares(tokens: Tokens, embedded: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """Of each token in the loss of its row; 0 of padding."""
    mask = tokens.mask.to(wide(embedded).dtype)
    return mask / mask.sum(-1, keepdim=True).clamp(min=1.0)
