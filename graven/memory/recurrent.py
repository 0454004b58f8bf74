"""A recurrent language model as a memory: what its layers carry on is the state, writing is reading the context.

    write   tokens -> embeddings (-> a causal convolution) -> blocks -> what the blocks carry on
    read    [begin; query] -> the same from that state -> norm -> head
    block   x + mixer(norm(x)), then x + SwiGLU(norm(x));     of Mamba and Mamba-2: x + mixer(norm(x))

`begin` is one learned vector: what is predicted before the first token of a query has to stand on something.

Source: ours, of the mixers' papers; see the layers. Norms, SwiGLU, convolution and start of the weights are those of `layers.decoder`, with the mixer
in the place of attention; a Mamba is that of Hugging Face transformers (`lm.state_space`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from graven.errors import SpecError
from graven.layers.base import Convolution
from graven.layers.decoder import DecoderSpec, RMSNorm, SwiGLU
from graven.layers.delta_net import DeltaNet, DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttention, GatedLinearAttentionSpec
from graven.layers.lact import LaCT, LaCTSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.layers.ttt import TTT, TTTSpec
from graven.lm.state_space import new_state_space
from graven.memory.base import State, rows_seen
from graven.shapes import check
from graven.tasks.base import Tokens

Mixer = DeltaNetSpec | GatedLinearAttentionSpec | TTTSpec | LaCTSpec | MambaSpec | Mamba2Spec

# Mixers of our own blocks. Each is called (x, state, mask) -> (y, state), as every layer of `layers`, and has `start(batch)`; where not all that it
# has read may be in effect yet, `flush(state)` gives the state in which it is.
MIXERS: dict[type[Any], Callable[[Any, torch.Generator], nn.Module]] = {
    DeltaNetSpec: DeltaNet,
    GatedLinearAttentionSpec: GatedLinearAttention,
    TTTSpec: TTT,
    LaCTSpec: LaCT,
}


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """What a `Recurrent` is.

    Args:
        mixer: What mixes tokens in each block.
    """

    mixer: Mixer
    kind: Literal["recurrent"] = "recurrent"


@runtime_checkable  # for the shape checks of the tests
class Body(Protocol):
    """The language model without its state."""

    def start(self, batch: int) -> tuple[Any, ...]: ...

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]: ...

    def run(self, x: Tensor, state: tuple[Any, ...], mask: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]: ...

    def flush(self, state: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B A"]: ...


class Block(nn.Module):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x)); carries on what its mixer does."""

    def __init__(self, sizes: DecoderSpec, mixer: nn.Module, generator: torch.Generator):
        super().__init__()
        self.mixer_norm, self.feed_norm = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.mixer, self.feed = mixer, SwiGLU(sizes.width, sizes.hidden)
        nn.init.normal_(self.feed.gate_up.weight, std=sizes.width**-0.5, generator=generator)
        nn.init.normal_(self.feed.down.weight, std=(2 * sizes.layers * sizes.width) ** -0.5, generator=generator)  # as in the decoder

    def forward(self, x: Float[Tensor, "B T D"], state: Any, mask: Bool[Tensor, "B T"] | None) -> tuple[Float[Tensor, "B T D"], Any]:
        y, state = self.mixer(self.mixer_norm(x), state, mask)
        x = x + y
        return x + self.feed(self.feed_norm(x)), state


class Blocks(nn.Module):
    """Embedding, blocks, norm and head around mixers of `layers`."""

    def __init__(self, sizes: DecoderSpec, mixer: Any, generator: torch.Generator):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, MIXERS[type(mixer)](mixer, generator), generator) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for part in (self.head, self.tokens):
            nn.init.normal_(part.weight, std=sizes.width**-0.5, generator=generator)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def start(self, batch: int) -> tuple[Any, ...]:
        return tuple(_plain(mixer.start(batch)) for mixer in self._mixers())

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return self.tokens(ids)

    def run(self, x: Float[Tensor, "B T D"], state: tuple[Any, ...], mask: Bool[Tensor, "B T"] | None) -> tuple[Tensor, tuple[Any, ...]]:
        ends = []
        for block, old in zip(self.blocks, state, strict=True):
            x, new = block(x, old, mask)
            ends.append(_plain(new))
        return x, tuple(ends)

    def flush(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        pairs = zip(self._mixers(), state, strict=True)
        return tuple(_plain(mixer.flush(old)) if hasattr(mixer, "flush") else old for mixer, old in pairs)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B A"]:
        return self.head(self.norm(hidden))

    def _mixers(self) -> list[Any]:
        return [cast("Any", block).mixer for block in self.blocks]


class Recurrent(nn.Module):
    """The memory. Its state: the window of the convolution on the embeddings, if there is one, and what each block carries on.

    Args:
        sizes: Of the model. Of a Mamba, which has no SwiGLU, `hidden` is the inner width; `heads` and `key_value_heads` are the heads of the mixer
            and those that share keys and values (Mamba-2: `groups`), 1 where it has none.
        spec: What to build.
        seed: Of the weights.
    Raises:
        SpecError: What `sizes` and the mixer both say differs.
    """

    def __init__(self, sizes: DecoderSpec, spec: RecurrentSpec, *, seed: int = 0):
        super().__init__()
        check_sizes(sizes, spec.mixer)
        self.sizes, self.spec = sizes, spec
        generator = torch.Generator().manual_seed(seed)
        if isinstance(spec.mixer, MambaSpec | Mamba2Spec):
            self.body: nn.Module = new_state_space(sizes, spec.mixer, generator=generator)
        else:
            self.body = Blocks(sizes, spec.mixer, generator)
        embedding = next(part for part in self.body.modules() if isinstance(part, nn.Embedding))
        if sizes.embedding_std is not None:
            nn.init.normal_(embedding.weight, std=sizes.embedding_std, generator=generator)
        spread = float(embedding.weight.detach().std())
        self.begin = nn.Parameter(spread * torch.randn(sizes.width, generator=generator))
        self.convolution = Convolution(sizes.width, sizes.convolution) if sizes.convolution else None
        if self.convolution is not None:  # as torch starts one, but from our generator
            for parameter in self.convolution.parameters():
                nn.init.uniform_(parameter, -(sizes.convolution**-0.5), sizes.convolution**-0.5, generator=generator)
            if sizes.convolution_start is not None:
                nn.init.constant_(self.convolution.weight, sizes.convolution_start)

    def start(self, batch: int) -> State:
        """Nothing read yet, or what the mixers learned to begin with."""
        window = () if self.convolution is None else (self.convolution.start(batch),)
        return (*window, *self._body.start(batch))

    def write(self, state: State, context: Tokens) -> State:
        """The state after every real token of the context was read. Writing in two parts is writing once.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        check(context=(context.ids, "B T"))
        context = context.aligned()
        return self._run(state, self._body.embed(context.ids), context.mask)[1]

    def read(self, state: State, query: Tokens) -> Float[Tensor, "B T A"]:
        """Logits of the next token after none, one, two ... columns of the query: one more than the query has columns.

        Raises:
            ShapeError: The parts do not fit each other.
        """
        check(query=(query.ids, "B T"))
        aligned = query.aligned()
        embedded = self._body.embed(aligned.ids)
        begin = self.begin.to(embedded.dtype).expand(len(embedded), 1, -1)
        mask = torch.cat([aligned.mask.new_ones(len(embedded), 1), aligned.mask], 1)
        hidden, _ = self._run(self._flushed(state), torch.cat([begin, embedded], 1), mask)
        return self._body.logits(rows_seen(hidden, query))

    def _flushed(self, state: State) -> State:
        """The state with all that was read in effect: a context ends where it is asked about."""
        assert isinstance(state, tuple)
        first = 0 if self.convolution is None else 1
        return (*state[:first], *self._body.flush(state[first:]))

    def _run(self, state: State, x: Tensor, mask: Tensor) -> tuple[Tensor, State]:
        """Real tokens stand in front."""
        assert isinstance(state, tuple)
        seen = None if bool(mask.all()) else mask
        if self.convolution is None:
            return self._body.run(x, state, seen)
        y, window = self.convolution(x, state[0], seen)
        hidden, ends = self._body.run(x + y, state[1:], seen)
        return hidden, (window, *ends)

    @property
    def _body(self) -> Body:
        return cast("Body", self.body)


def check_sizes(sizes: DecoderSpec, mixer: Any) -> None:
    """Pass where the sizes of a model and of its mixers agree.

    Raises:
        SpecError: They do not; the sentence names both numbers.
    """
    heads = getattr(mixer, "heads", 1)
    said = {
        "width": ("width", mixer.width),
        "heads": ("heads", heads),
        "key_value_heads": ("groups", mixer.groups) if isinstance(mixer, Mamba2Spec) else ("heads", getattr(mixer, "key_value_heads", heads)),
    }
    if isinstance(mixer, MambaSpec | Mamba2Spec):
        said["hidden"] = ("inner", mixer.inner)
    for name, (theirs, number) in said.items():
        if getattr(sizes, name) != number:
            raise SpecError(f"`{name}` of the model is {getattr(sizes, name)} and `{theirs}` of its {mixer.kind} mixer is {number}; make them equal.")


def _plain(state: Any) -> Any:
    """The same tree in plain tuples, which every mixer takes back."""
    return state if isinstance(state, Tensor) else tuple(_plain(part) for part in state)
