"""The one door to a language model: embed tokens, run embeddings, turn hidden states into logits; and continue a text from a prefix.

Two models stand behind it: `Small`, our own decoder, and `Pretrained`, any causal language model of Hugging Face transformers; each in a
file of its own. What both need is here.

Padding may stand anywhere. Every call brings the real columns of each row to the front, runs, and puts the results back, so a backbone
only ever meets padding on the right, where a causal model cannot see it. Positions count real columns, the memory's included.
What stands at padding must be finite, and means nothing: zero times NaN would still be NaN.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from graven.tasks.base import Tokens, front, rows_at


@runtime_checkable  # for the shape checks of the tests
class LanguageModel(Protocol):
    """What a memory needs of a language model.

    Attributes:
        name: What a user calls it.
        width: Width of its embeddings, and so of the memory, D.
        hidden_width: Width of its hidden states.
        vocabulary: Tokens that it can predict, A.
        positions: Most columns that it takes, memory included; no limit where None.
        embedding_scale: Standard deviation of its token embeddings.
        head_weight: The matrix of its head, [A, hidden_width].
        twice_differentiable: Whether a gradient through it can be differentiated again, which training through a write needs.
    """

    name: str
    width: int
    hidden_width: int
    vocabulary: int
    positions: int | None

    @property
    def embedding_scale(self) -> float: ...

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def twice_differentiable(self) -> bool: ...

    @property
    def fingerprint(self) -> str:
        """Hash of what decides whether a memory fits: configuration, embeddings, tokens."""
        ...

    def embed(self, tokens: Tokens) -> Float[Tensor, "B T D"]:
        """Embeddings of tokens, on the model's device; whatever stands at padding means nothing."""
        ...

    def hidden(
        self, embeddings: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T E"]:
        """Last hidden states. Positions count the real columns where they are left out; whatever stands at padding means nothing.

        Raises:
            ShapeError: `embeddings` has another width than the model.
            ModelError: The model has no positions that can be set.
            TextError: There are more columns than the model takes.
        """
        ...

    def logits(self, hidden: Float[Tensor, "*B E"]) -> Float[Tensor, "*B A"]:
        """Next-token logits of hidden states."""
        ...

    def generate(self, prefix: Float[Tensor, "B M D"], query: Tokens, *, most: int, stop: Collection[int]) -> list["Continuation"]:
        """The most probable token after each other, from a prefix of vectors and the query behind it, one continuation a row.

        Args:
            most: Most tokens.
            stop: A row ends before the first of these tokens.
        Raises:
            TextError: Prefix, query and `most` tokens are more columns than the model takes.
        """
        ...


@dataclass(frozen=True)
class Continuation:
    """What a model wrote.

    Args:
        tokens: Without the one that stopped it.
        log_probabilities: Natural logarithm of each token's probability; that of the token that stopped it comes last.
        end: The token that stopped it, if any did.
    """

    tokens: list[int]
    log_probabilities: list[float]
    end: int | None = None

    @property
    def whole(self) -> list[int]:
        """The tokens and the one that stopped it: one for each probability."""
        return self.tokens if self.end is None else [*self.tokens, self.end]

    @classmethod
    def of(cls, tokens: list[int], log_probabilities: list[float], *, stop: Collection[int]) -> "Continuation":
        """Of tokens whose last one may have stopped them."""
        stopped = tokens[-1:] and tokens[-1] in stop
        return cls(tokens[:-1], log_probabilities, tokens[-1]) if stopped else cls(tokens, log_probabilities)


@torch.no_grad()
def greedy(
    model: LanguageModel,
    prefix: Float[Tensor, "B M D"],
    query: Tokens,
    *,
    most: int,
    stop: Collection[int],
    head: Callable[[Tensor], Tensor],
) -> list[Continuation]:
    """`LanguageModel.generate` by running every row anew for each token: no cache, any head."""
    rows = [query.row(i) for i in range(len(query.ids))]
    tokens, values = [list[int]() for _ in rows], [list[float]() for _ in rows]
    going = list(range(len(rows)))
    for _ in range(most):
        if not going:
            break
        whole = Tokens.of([rows[i] + tokens[i] for i in going])
        embedded = model.embed(whole)
        hidden = model.hidden(torch.cat([prefix[going].to(embedded.dtype), embedded], dim=1))
        last = hidden[torch.arange(len(going)), prefix.shape[1] + whole.lengths - 1]
        best = head(last).float().log_softmax(-1).max(-1)
        for i, value, token in zip(going, best.values.tolist(), best.indices.tolist(), strict=True):
            values[i].append(value)
            tokens[i].append(token)
        going = [i for i in going if tokens[i][-1] not in stop]
    return [Continuation.of(*row, stop=stop) for row in zip(tokens, values, strict=True)]


def predictors(model: LanguageModel, prefix: Float[Tensor, "B M D"], query: Tokens, answers: Sequence[Sequence[int]]) -> list[Float[Tensor, "T E"]]:
    """Hidden states that predict each token of an answer, given the prefix, the query and the tokens of the answer before it.

    Prefix and query together must have a column: something has to predict the first token.
    """
    rows = [query.row(i) for i in range(len(query.ids))]
    tokens = Tokens.of([row + list(answer) for row, answer in zip(rows, answers, strict=True)])
    embedded = model.embed(tokens)
    hidden = model.hidden(torch.cat([prefix.to(embedded.dtype), embedded], dim=1)[:, :-1])
    starts = [prefix.shape[1] + len(row) - 1 for row in rows]
    return [hidden[i, start : start + len(answer)] for i, (start, answer) in enumerate(zip(starts, answers, strict=True))]


@torch.no_grad()
def score(model: LanguageModel, prefix: Float[Tensor, "B M D"], query: Tokens, answers: Sequence[Sequence[int]]) -> list[list[float]]:
    """Natural logarithm of the probability of each token of an answer, given the true ones before it; whatever way the answer was chosen."""
    found = []
    for states, answer in zip(predictors(model, prefix, query, answers), answers, strict=True):
        logits = model.logits(states).float()
        chosen = torch.tensor(list(answer), dtype=torch.long, device=logits.device)
        found.append(logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist())
    return found


def in_front(
    run: Callable[[Tensor, Tensor | None], Tensor],
    x: Tensor,
    *,
    mask: Bool[Tensor, "B T"] | None,
    positions: Int[Tensor, "B T"] | None = None,
) -> Tensor:
    """Run rows with their real columns brought to the front, no wider than the longest, and put the results back where the columns stood."""
    if mask is None or not mask.numel():
        return run(x, positions)
    order, longest = front(mask), max(int(mask.sum(-1).max()), 1)
    if positions is not None:
        positions = positions.masked_fill(~mask, 0)  # whatever stood there may lie beyond a table of positions
    if longest == mask.shape[1] and bool((order[:, 1:] > order[:, :-1]).all()):  # nothing would move
        return run(x, positions)
    there = order[:, :longest]
    back = order.argsort(-1).clamp(max=longest - 1)
    return rows_at(run(rows_at(x, there), None if positions is None else positions.gather(1, there)), back)


def digest(*parts: bytes | bytearray) -> str:
    """Hexadecimal SHA-256 of the parts, each with its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def sampled_rows(weight: Float[Tensor, "A D"], *, rows: int = 64) -> bytes:
    """Evenly spaced rows of a matrix in bfloat16, so that loads in float32 and in bfloat16 hash alike."""
    sample = weight.detach()[evenly(len(weight), rows, device=weight.device)]
    return sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()


def evenly(count: int, most: int, *, device: torch.device) -> Int[Tensor, "A"]:
    """At most so many of the indices below `count`, evenly spaced, with the first and the last."""
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64, device=device).long()


def canonical(config: dict[str, object]) -> bytes:
    """JSON of a configuration without what a save and a load may change."""
    volatile = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path"}
    # by way of JSON, so that the parts of nested configurations lose them too
    kept = json.loads(json.dumps(config), object_hook=lambda part: {k: v for k, v in part.items() if k not in volatile})
    return json.dumps(kept, sort_keys=True).encode()


def without_state(tokenizer: str) -> bytes:
    """A tokenizer's JSON without the padding and truncation that the last call left in it; text that is no JSON as it is."""
    try:
        parts = json.loads(tokenizer)
    except json.JSONDecodeError:
        return tokenizer.encode()
    return json.dumps({**parts, "padding": None, "truncation": None}, sort_keys=True).encode()
