"""RMT: a context is written into m vectors by a forward pass, which has no feedback on what it wrote.

    [M; C; M] -> hidden states;   M' = the last m of them, after the last norm          one write; causal, positions count through
    f(Y | [R M'; Q])                                                                    read; R is linear, the identity at the start

The vectors in front are what was there before, those behind see all of the context and become what is there now. A write of K passes runs K
times over the same context, and every pass replaces the memory. Training goes through all passes.

Source: Bulatov et al. 2022, arXiv:2207.06881, section 3, for several segments; Kuratov et al. 2026, arXiv:2603.13875v2, for one context, repeated
writes, control vectors and maps. Differs: R is the identity at the start, where their map before a read starts at random: seen to train sooner.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import ModelError, SpecError
from graven.lm.base import LanguageModel
from graven.memory.base import kept_where_empty, read_behind, wide
from graven.shapes import check
from graven.tasks.base import Tokens


@dataclass(frozen=True, kw_only=True)
class RMTSpec:
    """What an `RMT` is.

    Args:
        slots: Memory vectors, M.
        steps: Passes of a write, K, where a write names no other number.
        read_map: A learned affine map, the identity at the start, on the memory before it is read. Hidden states after a norm have another size than
            token embeddings, and this map can undo it.
        write_map: A learned affine map, random at the start, on the memory before it is written.
        residual: From the second pass on the memory gets the layer norm of the new one added, instead of being replaced by it.
        control: Learned vectors before the memory and behind it, other ones for writing than for reading.
        start: Spread of the start state, in that of the model's embeddings.
    Raises:
        SpecError: A number is out of range.
    """

    slots: int
    steps: int = 1
    read_map: bool = True
    write_map: bool = False
    residual: bool = False
    control: int = 0
    start: float = 1.0
    kind: Literal["rmt"] = "rmt"

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "steps": 0, "control": 0}.items():
            if getattr(self, name) < least:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least {least}.")
        if not self.start > 0:
            raise SpecError(f"`start` is {self.start}; it must be above 0.")


class RMT(nn.Module):
    """The memory. `model` is a part of it and trains with it.

    Args:
        model: The language model that writes and reads.
        spec: What to build.
        seed: Of the start state and of a write map.
    Raises:
        ModelError: The model's hidden states have another width than its embeddings, so they cannot stand before a text.
    """

    def __init__(self, model: LanguageModel, spec: RMTSpec, *, seed: int = 0):
        super().__init__()
        if model.hidden_width != model.width:
            raise ModelError(f"{model.name} has hidden states of width {model.hidden_width} and embeddings of {model.width}; RMT needs them equal.")
        self.model, self.spec = model, spec
        generator, width = torch.Generator().manual_seed(seed), model.width

        def vectors(*shape: int) -> nn.Parameter:
            return nn.Parameter(model.embedding_scale * torch.randn(*shape, width, generator=generator))

        self.initial = vectors(spec.slots)
        self.initial.data *= spec.start
        self.write_control, self.read_control = (vectors(2, spec.control) if spec.control else None for _ in range(2))
        self.read_map = _affine(torch.eye(width)) if spec.read_map else None
        self.write_map = _affine((2 * torch.rand(width, width, generator=generator) - 1) * width**-0.5) if spec.write_map else None
        self.norm = nn.LayerNorm(width) if spec.residual else None

    def start(self, batch: int) -> Float[Tensor, "B M D"]:
        """The learned start state, one copy a row; float32, or float64 where the model is."""
        return wide(self.initial).expand(batch, -1, -1)

    def write(self, state: Float[Tensor, "B M D"], context: Tokens, *, steps: int | None = None) -> Float[Tensor, "B M D"]:
        """K passes over the context, each row for itself; with no residual each replaces the memory.

        Args:
            state: Left as it is.
            context: Padding may stand anywhere; a row without tokens keeps its state.
            steps: K, the spec's where left out; none returns the state.
        Raises:
            ShapeError: The parts do not fit each other.
            SpecError: `steps` is negative.
        """
        steps = self.spec.steps if steps is None else steps
        if steps < 0:
            raise SpecError(f"`steps` is {steps}; it must be at least 0.")
        check(state=(state, f"B {self.spec.slots} {self.model.width}"), context=(context.ids, "B T"))
        tokens = context.aligned()
        embedded, new = self.model.embed(tokens), state
        for taken in range(steps):
            out = self._passed(new, embedded, tokens)
            new = out if self.norm is None or not taken else new + wide(self.norm(out))
        return kept_where_empty(context, old=state, new=new)

    def read(self, state: Float[Tensor, "B M D"], query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Raises:
            ShapeError: State and query differ in rows, or the state has another shape.
        """
        check(state=(state, f"B {self.spec.slots} {self.model.width}"))
        mapped = state if self.read_map is None else self.read_map(state.to(self.read_map.weight.dtype))
        return read_behind(self.model, self._controlled(mapped, self.read_control), query)

    def _passed(self, state: Tensor, embedded: Tensor, tokens: Tokens) -> Float[Tensor, "B M D"]:
        """Hidden states of the vectors behind the context. `LanguageModel.hidden` closes the gap that padding leaves before them."""
        mapped = state if self.write_map is None else self.write_map(state.to(self.write_map.weight.dtype))
        before = self._controlled(mapped, self.write_control)
        behind = before[:, : before.shape[1] - self.spec.control]  # a control vector introduces the memory, as in front
        x = torch.cat([before.to(embedded.dtype), embedded, behind.to(embedded.dtype)], 1)
        mask = F.pad(tokens.mask, (before.shape[1], behind.shape[1]), value=True)
        return wide(self.model.hidden(x, mask=mask)[:, -self.spec.slots :])

    def _controlled(self, state: Tensor, control: Tensor | None) -> Float[Tensor, "B S D"]:
        """The memory between its control vectors."""
        if control is None:
            return state
        before, after = (part.expand(len(state), -1, -1) for part in control)
        return torch.cat([before, state, after], dim=1)


def _affine(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape)
    layer.weight.data.copy_(weight)
    nn.init.zeros_(layer.bias)
    return layer
