"""How an answer is chosen from what a language model predicts: greedily, drawn by chance, or by beams; all at once or token by token.

transformers' `generate` runs the model: from embeddings, with all padding on the left, it gives the tokens that each row gives alone. What it
does not give is here. A draw is made by adding Gumbel noise to the logits and taking the largest, from a generator of each row's own, so that a
row is drawn the same in any company; and a row ends before the first of several strings, found in its text.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from graven.errors import SpecError

Spell = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How an answer is chosen. Greedily where nothing is given; drawn where `temperature`, `top_k` or `top_p` is; by beams where `beams` is.

    Args:
        min_tokens: No end token is taken before so many tokens. Strings in `stop` end an answer at any time.
        temperature: Logits are divided by it before a draw.
        top_k: A draw is among so many of the most probable tokens.
        top_p: A draw is among the most probable tokens that together have this probability.
        seed: Of the draws. Every query draws from the same seed, so that it is answered alike alone and among others.
        beams: Beams of a beam search.
        count: Answers to each query, the beams' best or so many draws.
        stop: An answer ends before the first of these strings.
    Raises:
        SpecError: A number is out of range, or two settings contradict each other.
    """

    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    beams: int = 1
    count: int = 1
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("min_tokens", self.min_tokens, 0), ("top_k", self.top_k, 1), ("beams", self.beams, 1), ("count", self.count, 1)):
            if value is not None and value < least:
                raise SpecError(f"`{name}` is {value}; it must be at least {least}.")
        if self.temperature is not None and not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise SpecError(f"`temperature` is {self.temperature}; it must be above 0. For the most probable answer, leave it out.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SpecError(f"`top_p` is {self.top_p}; it must be above 0 and at most 1.")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise SpecError(f"`seed` is {self.seed}; it must be at least 0 and below 2^63.")
        if "" in self.stop:
            raise SpecError("`stop` holds an empty string, which every answer begins with; leave it out.")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.draws and self.beams > 1:
            raise SpecError("`temperature`, `top_k` or `top_p` asks for a draw and `beams` for a search; give one of the two.")
        if self.seed is not None and not self.draws:
            raise SpecError(f"`seed` is {self.seed} and nothing is drawn; give `temperature`, `top_k` or `top_p` too, or leave it out.")
        if self.count > 1 and not self.draws and self.count > self.beams:
            raise SpecError(f"`count` is {self.count} and a greedy answer is one, {self.beams} beams are {self.beams}; give more `beams`, or draw.")

    @property
    def draws(self) -> bool:
        """Whether answers are drawn by chance."""
        return not self.temperature is self.top_k is self.top_p is None

    @property
    def greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return not self.draws and self.beams == 1

    @property
    def plain(self) -> "Decoding":
        """The greedy way that ends where this one does."""
        return Decoding(min_tokens=self.min_tokens, stop=self.stop)


GREEDY = Decoding()


class Chooser:
    """What `generate` asks before it takes the largest score: ends that come too early are out, and noise makes the largest a draw.

    Args:
        decoding: The settings.
        ends: End tokens.
        rows: Rows of the batch, copies included.
    """

    def __init__(self, decoding: Decoding, ends: Sequence[int], rows: int):
        self.decoding, self.ends = decoding, torch.tensor(list(ends), dtype=torch.long)
        library = import_module("transformers")
        self.warpers = [
            kind(value)
            for kind, value in (
                (library.TemperatureLogitsWarper, decoding.temperature),
                (library.TopKLogitsWarper, decoding.top_k),
                (library.TopPLogitsWarper, decoding.top_p),
            )
            if value is not None
        ]
        first = torch.Generator().manual_seed(decoding.seed or 0)
        seeds = torch.randint(1 << 62, (decoding.count,), generator=first).tolist()
        self.generators = [torch.Generator().manual_seed(seeds[row % decoding.count]) for row in range(rows)] if decoding.draws else []

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B A"]) -> Float[Tensor, "B A"]:
        if input_ids.shape[1] < self.decoding.min_tokens:
            scores = scores.index_fill(1, self.ends.to(scores.device), -math.inf)
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        if not self.generators:
            return scores
        # the largest of log p + noise is a draw from p where the noise is -log(-log u), u uniform
        uniform = torch.stack([torch.rand(scores.shape[1], generator=one, dtype=torch.float64) for one in self.generators])
        return (scores.double() - (-uniform.log()).log().to(scores.device)).to(torch.float64)


@dataclass(frozen=True)
class Said:
    """Ends a row whose text holds one of the strings."""

    strings: tuple[str, ...]
    spell: Spell

    def __call__(self, input_ids: Int[Tensor, "B T"], _: object) -> Bool[Tensor, "B"]:
        texts = [self.spell(row) for row in input_ids.tolist()]
        return torch.tensor([any(string in text for string in self.strings) for text in texts], device=input_ids.device)


@torch.no_grad()
def decode(
    model: Any,
    rows: Float[Tensor, "B T D"],
    mask: Bool[Tensor, "B T"],
    *,
    most: int,
    ends: Collection[int],
    decoding: Decoding,
    spell: Spell,
    streamer: Any = None,
) -> list[list[int]]:
    """What follows each row, `decoding.count` continuations each, side by side.

    Args:
        model: A transformers model. Any for the reason that `graven.lm.pretrained` gives.
        rows: Embeddings, every real column to the right of all padding.
        mask: True at real columns.
        most: Most tokens, at least 1.
        ends: End tokens.
        decoding: How to choose.
        spell: Text of tokens.
        streamer: Is told each new token; for one row and no beams.
    Returns:
        Token ids; an end token is the last of its row, and so is the token that completes a string of `decoding.stop`.
    """
    library, stop = import_module("transformers"), sorted(ends)
    copies = 1 if decoding.beams > 1 else decoding.count
    chooser = Chooser(decoding, stop, len(rows) * copies)
    settings = library.GenerationConfig(
        max_new_tokens=most, do_sample=False, num_beams=decoding.beams, num_return_sequences=decoding.count // copies, pad_token_id=0,
        eos_token_id=stop or None,
    )  # fmt: skip
    found = model.generate(
        inputs_embeds=rows.repeat_interleave(copies, 0),
        attention_mask=mask.long().repeat_interleave(copies, 0),
        generation_config=settings,
        logits_processor=library.LogitsProcessorList([chooser]),
        stopping_criteria=library.StoppingCriteriaList([Said(decoding.stop, spell)] if decoding.stop else []),
        streamer=streamer,
    )
    return [ended(row, ends=ends, stop=decoding.stop, spell=spell) for row in found.tolist()]


def ended(row: list[int], *, ends: Collection[int], stop: Sequence[str], spell: Spell) -> list[int]:
    """A row up to its first end token, or to the token that completes the first of the strings; what stands behind is padding, or too much."""
    length = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
    if any(string in spell(row[:length]) for string in stop):
        length = next(at for at in range(1, length + 1) if any(string in spell(row[:at]) for string in stop))
    return row[:length]


def text_before(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of the strings.

    >>> text_before("red. Blue.", [" B", "."])
    'red'
    """
    return text[: min([found for string in stop if (found := text.find(string)) >= 0], default=len(text))]


class Stream:
    """Tokens of one row as they come, from a thread that runs `generate`.

    Args:
        run: Called in the thread with a streamer for `decode`; what it returns ends the stream.
    """

    def __init__(self, run: Callable[["Stream"], object]):
        self.queue: SimpleQueue[list[int] | BaseException | None] = SimpleQueue()
        self.closed = False
        self.run = run

    def put(self, tokens: Int[Tensor, "*B"]) -> None:
        """A new token, of `generate`; the first call brings the row's own ids, none where it is made of embeddings."""
        if self.closed:
            raise StreamClosedError
        self.queue.put(tokens.flatten().tolist())

    def end(self) -> None:
        """The last token came, of `generate`."""

    def __iter__(self) -> Iterator[int]:
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            while (new := self.queue.get()) is not None:
                if isinstance(new, BaseException):
                    raise new
                yield from new
        finally:
            self.closed = True
            thread.join()

    def _work(self) -> None:
        try:
            self.run(self)
            self.queue.put(None)
        except StreamClosedError:
            pass
        except BaseException as error:  # whatever it is, the one who reads the stream must hear of it
            self.queue.put(error)


class StreamClosedError(Exception):
    """Nobody reads on, so the thread stops at its next token."""
