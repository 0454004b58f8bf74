"""Our own decoder as a language model."""

from collections.abc import Collection

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from graven.layers.decoder import Decoder, DecoderSpec
from graven.lm.base import Continuation, digest, greedy, in_front, sampled_rows
from graven.shapes import check
from graven.tasks.base import Tokens


class Small(nn.Module):
    """Our own decoder as a language model."""

    def __init__(self, spec: DecoderSpec, *, name: str = "small"):
        super().__init__()
        self.decoder = Decoder(spec)
        self.name = name
        self.positions: int | None = None
        self.width = self.hidden_width = spec.width
        self.vocabulary = spec.vocabulary

    @property
    def embedding_scale(self) -> float:
        return float(self.decoder.tokens.weight.detach().std())

    @property
    def head_weight(self) -> Tensor:
        return self.decoder.head.weight

    @property
    def twice_differentiable(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return digest(repr(self.decoder.spec).encode(), sampled_rows(self.decoder.tokens.weight))

    def embed(self, tokens: Tokens) -> Float[Tensor, "B T D"]:
        device = self.head_weight.device
        return in_front(lambda ids, _: self.decoder.embed(ids[..., 0]), tokens.ids.to(device)[..., None], mask=tokens.mask.to(device))

    def hidden(
        self, embeddings: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        check(embeddings=(embeddings, f"B T {self.width}"))
        return in_front(lambda x, at: self.decoder.hidden(x, positions=at), embeddings, mask=mask, positions=positions)

    def logits(self, hidden: Float[Tensor, "*B E"]) -> Float[Tensor, "*B A"]:
        return self.decoder.logits(hidden)

    def generate(self, prefix: Float[Tensor, "B M D"], query: Tokens, *, most: int, stop: Collection[int]) -> list[Continuation]:
        return greedy(self, prefix, query, most=most, stop=stop, head=self.logits)
