"""A small Llama: the decoder that graven trains itself.

RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, tied or separate head; and, where asked for, a causal depthwise
convolution on the token embeddings, which lets the first layer see a whole short key at once. The convolution is not in the model of the
GradMem paper (arXiv:2603.13875): say so wherever a number stands beside theirs.

Source: Touvron et al. 2023, arXiv:2302.13971 (the block); Su et al. 2021, arXiv:2104.09864 (rotary); Shazeer 2020, arXiv:2002.05202 (SwiGLU).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import SpecError
from graven.ops.attention import attention
from graven.ops.pointwise import rms_norm, rotate, swiglu

EPSILON = 1e-6  # under the root of a norm
Cache = tuple[Float[Tensor, "B G _ K"], Float[Tensor, "B G _ K"]]  # rotated keys and values of one layer


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The shape of a `Decoder`.

    Args:
        vocabulary: Number of tokens.
        width: Model width, D; a multiple of 2 * heads.
        layers: Number of blocks.
        heads: Query heads, H.
        key_value_heads: Heads of keys and values; divides `heads`.
        hidden: Width inside the SwiGLU.
        convolution: Tokens that the convolution on the embeddings spans, its own included; 0 for none.
        convolution_start: Every weight of that convolution at the start; torch's own draw where left out. With one number for all, what stands
            somewhere in the window is seen alike wherever it stands: a name in a question as the name in a sentence, the two being unequally far
            from what they ask for (docs/log.md).
        tied: The head is the token embedding.
        embedding_std: Spread of the token embeddings at the start; 1 / sqrt(width) where left out. Behind the first norm only its ratio to the
            spread of a memory matters: see `GradMemSpec.start`.
    Raises:
        SpecError: A number is below 1 (`convolution`: below 0), or one of the conditions above does not hold.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden: int
    convolution: int = 0
    convolution_start: float | None = None
    tied: bool = False
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "key_value_heads", "hidden"):
            if getattr(self, name) < 1:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.embedding_std is not None and not self.embedding_std > 0:
            raise SpecError(f"`embedding_std` is {self.embedding_std}; it must be above 0.")
        if self.convolution_start is not None and not self.convolution:
            raise SpecError(f"`convolution_start` is {self.convolution_start} and there is no convolution; give `convolution`, or leave it out.")
        if self.convolution < 0:
            raise SpecError(f"`convolution` is {self.convolution}; it must be at least 0, which is none.")
        if self.width % (2 * self.heads):
            raise SpecError(f"`width` is {self.width} and `heads` is {self.heads}; `width` must be a multiple of 2 * `heads`.")
        if self.heads % self.key_value_heads:
            raise SpecError(f"`heads` is {self.heads} and `key_value_heads` is {self.key_value_heads}; the second must divide the first.")


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.heads, self.groups, self.head_width = spec.heads, spec.key_value_heads, spec.width // spec.heads
        self.qkv = nn.Linear(spec.width, (self.heads + 2 * self.groups) * self.head_width, bias=False)
        self.out = nn.Linear(spec.width, spec.width, bias=False)

    def forward(
        self, x: Float[Tensor, "B T D"], rotation: tuple[Tensor, Tensor], mask: Tensor | None, before: Cache | None = None
    ) -> tuple[Float[Tensor, "B T D"], Cache]:
        """What every column reads, and the keys and values of these columns; those `before` are seen by all of them."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.heads + 2 * self.groups, self.head_width).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=1)
        own = (rotate(k, rotation), v)
        k, v = own if before is None else (torch.cat([old, new], 2) for old, new in zip(before, own, strict=True))
        o = attention(rotate(q, rotation), k, v, mask=mask, causal=mask is None)
        return self.out(o.transpose(1, 2).flatten(2)), own


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down(swiglu(self.gate_up(x)))


class RMSNorm(nn.RMSNorm):
    """Torch's, with a second derivative that saves less."""

    def __init__(self, width: int):
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return rms_norm(x, self.weight, epsilon=EPSILON)


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.attention_norm = RMSNorm(spec.width)
        self.attention = Attention(spec)
        self.feed_norm = RMSNorm(spec.width)
        self.feed = SwiGLU(spec.width, spec.hidden)

    def forward(
        self, x: Float[Tensor, "B T D"], rotation: tuple[Tensor, Tensor], mask: Tensor | None, before: Cache | None = None
    ) -> tuple[Float[Tensor, "B T D"], Cache]:
        read, own = self.attention(self.attention_norm(x), rotation, mask, before)
        x = x + read
        return x + self.feed(self.feed_norm(x)), own


class Decoder(nn.Module):
    """Token ids or embeddings in, hidden states and logits out; no state, no dropout.

    Source: Touvron et al. 2023, arXiv:2302.13971; the convolution is ours, measured in docs/log.md.
    """

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.convolution = nn.Conv1d(spec.width, spec.width, spec.convolution, groups=spec.width) if spec.convolution else None
        blocks = [Block(spec) for _ in range(spec.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(spec.width)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=spec.width**-0.5)
        if self.convolution is not None and spec.convolution_start is not None:
            nn.init.constant_(self.convolution.weight, spec.convolution_start)
        if spec.embedding_std is not None:
            self.tokens.weight.data *= spec.embedding_std * spec.width**0.5
        for block in blocks:  # the residual stream keeps its scale at any depth
            for last in (block.attention.out, block.feed.down):
                nn.init.normal_(last.weight, std=(2 * spec.layers * spec.width) ** -0.5)
        if spec.tied:
            self.head.weight = self.tokens.weight

    def embed(self, ids: Int[Tensor, "*B T"], *, before: Float[Tensor, "*B W D"] | None = None) -> Float[Tensor, "*B T D"]:
        """Embeddings of tokens that follow each other.

        Args:
            ids: The tokens.
            before: What the convolution sees before the first of them, one column less than it spans; zeros where left out.
        """
        x = self.tokens(ids)
        if self.convolution is None or ids.shape[-1] == 0:
            return x
        rows = F.pad(x, (0, 0, self.spec.convolution - 1, 0)) if before is None else torch.cat([before, x], -2)
        return x + self.convolution(rows.reshape(-1, *rows.shape[-2:]).transpose(1, 2)).transpose(1, 2).reshape(x.shape)

    def hidden(
        self,
        embeddings: Float[Tensor, "B T D"],
        *,
        positions: Int[Tensor, "#B T"] | None = None,
        mask: Bool[Tensor, "#B T T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states after the last norm; the rest as of `run`."""
        return self.run(embeddings, positions=positions, mask=mask)[0]

    def run(
        self,
        embeddings: Float[Tensor, "B T D"],
        *,
        positions: Int[Tensor, "#B T"] | None = None,
        mask: Bool[Tensor, "#B T S"] | None = None,
        before: Sequence[Cache] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], list[Cache]]:
        """Hidden states after the last norm, and the keys and values of every layer.

        Args:
            embeddings: What stands in each column, memory or token.
            positions: Rotary position of each column; behind what stands before it where left out.
            mask: True where a row may see a column, those before included; causal where left out.
            before: Keys and values of every layer that stand before the columns: a cache, or a memory that was never a text.
        """
        if positions is None:
            first = before[0][0].shape[2] if before else 0
            positions = torch.arange(first, first + embeddings.shape[1], device=embeddings.device)[None]
        rotation = angles(positions, self.spec.width // self.spec.heads, embeddings.dtype)
        x, made = embeddings, []
        caches: Sequence[Cache | None] = [None] * len(self.blocks) if before is None else before
        for block, cache in zip(self.blocks, caches, strict=True):
            x, own = block(x, rotation, None if mask is None else mask[:, None], cache)
            made.append(own)
        return self.norm(x), made

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B A"]:
        """The head, on hidden states of any leading shape."""
        return self.head(hidden)


def angles(positions: Int[Tensor, "B T"], width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, [B, 1, T, width] each; base 10 000, halves rotated against each other."""
    # float64: at position 50 000 a float32 product of position and frequency is already off by 4e-3 of a radian.
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
    angle = (positions[..., None] * frequencies).repeat(1, 1, 2)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)
