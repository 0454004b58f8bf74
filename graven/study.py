"""Queries that a model asks itself about a text that stands before it, for want of a user's own.

A prompt is a plain string, and the lists below are there to be replaced. Where it has a `{}`, the model goes on behind the text and what stands
before the `{}`; the line that it writes takes the place of the `{}`, and the whole is the query. Where it has none, it is an instruction: it is
given behind the text, and the line that the model writes is the query.

Source: ours, after the self-study of Eyuboglu et al. 2025, arXiv:2506.06266; tests/test_study.py.
"""

from collections.abc import Sequence
from functools import partial

import torch

from graven.errors import SpecError
from graven.lm.cached import Prompted
from graven.lm.chat import halves
from graven.lm.pretrained import Pretrained
from graven.tasks.base import Tokens

PLAIN = ("{}", "\n\nQuestion:{}\nAnswer:", "\n\nIn short:{}", "\n\nQ:{}\nA:")
CHAT = (
    "Ask one short question about the text above. Write the question and nothing else.",
    "Ask for one fact that the text above states. Write the question and nothing else.",
    "Write one instruction that can be followed with the text above alone.",
    "Ask for a summary of one part of the text above. Write the request and nothing else.",
)
LINE_TOKENS = 32
ROUNDS = 4  # a model that repeats itself is asked for as many queries so often before it is given up


def self_study(
    model: Pretrained, text: Sequence[int], *, count: int, prompts: Sequence[str] | None = None, seed: int = 0, chat: bool = False
) -> list[str]:
    """Different queries, drawn from what the model finds probable with the text in front of it; fewer than asked for where it repeats itself.

    Args:
        model: Asks.
        text: Token ids; without any, the model asks about nothing in particular, behind what it begins or else ends a text with.
        count: How many at most.
        prompts: `PLAIN`, or `CHAT` in a chat, where left out; they take turns.
        seed: Of the draws.
        chat: The text stands in the user turn of the model's chat template, and so will the queries.
    Raises:
        SpecError: `count` is below 1, or there is no prompt.
        TextError: Text and query do not fit into the model.
        ModelError: `chat` is set and the model has no template for it.
    """
    prompts = (CHAT if chat else PLAIN) if prompts is None else prompts
    if count < 1 or not prompts:
        raise SpecError(f"`count` is {count} and there are {len(prompts)} prompts; both must be at least 1.")
    before = model.encode(halves(model.tokenizer, "", name=model.name)[0]) if chat else model.opening
    prompted = Prompted(model, model.embed(Tokens.of([[*before, *text] or sorted(model.stop)[:1] or [0]]))[0])
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, None] = {}
    for taken in range(ROUNDS):
        turn = [prompts[i % len(prompts)] for i in range(taken * count, (taken + 1) * count)]
        rows = [model.encode(_asked(model, prompt, chat=chat)) for prompt in turn]
        said = prompted.follow(rows, most=LINE_TOKENS, stop=model.stop, generator=generator, enough=partial(_whole_line, model))
        for prompt, row in zip(turn, said, strict=True):
            line = _line(model.decode([token for token in row.tokens if token not in model.stop]))
            if line.strip():
                found.setdefault(prompt.replace("{}", line) if "{}" in prompt else line.strip())
        if len(found) >= count:
            break
    return list(found)[:count]


def _asked(model: Pretrained, prompt: str, *, chat: bool) -> str:
    """What stands behind the text while the model writes."""
    lead, gap, _ = prompt.partition("{}")
    if gap:  # in a chat, still inside the user turn
        return lead
    return halves(model.tokenizer, f"\n\n{prompt}", name=model.name)[1] if chat else f"\n\n{prompt}\n"


def _whole_line(model: Pretrained, tokens: list[int]) -> bool:
    """Whether what comes after these tokens changes nothing any more."""
    return "\n" in model.decode(tokens).lstrip("\n")


def _line(text: str) -> str:
    """The first line that says something, its line break left out."""
    whole = text.lstrip("\n")
    return whole.partition("\n")[0]
