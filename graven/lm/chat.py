"""Where a memory stands in a conversation: inside the user turn of the model's chat template, before what the user asks.

A template is text, and a memory is not. So the turn is rendered with a mark in the memory's place and cut there, and its halves become tokens
apart from each other, the same way when a memory is written and when it is asked.
"""

from collections.abc import Sequence
from typing import Any

from graven.errors import ModelError

MARK = "\uf8ff[memory]\uf8ff"  # of a private area of Unicode: no text has it


def halves(tokenizer: Any, query: str, *, name: str) -> tuple[str, str]:
    """What the template puts before the memory, and what follows it: the query, the end of the turn and the start of the answer.

    Args:
        tokenizer: Of a Hugging Face model. Any, as in `graven.lm.pretrained`.
        query: What the user asks.
        name: What to call the model in an error.
    Raises:
        ModelError: There is no template, or it does not show what the user says once, as it is.
    Source: ours; tests/test_chat.py.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(f"the tokenizer of {name} has no chat template; leave --chat out, or use a model that was tuned for conversations.")
    turn: Sequence[dict[str, str]] = [{"role": "user", "content": MARK + query}]
    parts = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)).split(MARK)
    if len(parts) != 2 or query.strip() not in parts[1]:
        raise ModelError(f"the chat template of {name} does not show what the user says once, as it is; leave --chat out.")
    return parts[0], parts[1]


def prints_the_date(tokenizer: Any) -> bool:
    """Whether what stands before a memory is another text every day, as with the templates of Llama 3."""
    return "strftime_now" in str(tokenizer.chat_template)  # what transformers gives a template to do it with
