"""vLLM: the JSON body of a request, with the memory as `prompt_embeds`; the server runs with `--enable-prompt-embeds`.

The completions body holds the whole prompt as vectors: what a chat template puts before the memory, the memory, and the question with the end of its
turn. The chat body holds the memory alone among the parts of what the user says, and the server applies the template; how the server's tokens fall at
the seam is its own affair, so the completions body is the exact one. Vectors are base64 of what `torch.save` makes of a tensor [T, D]; graven writes
such bytes and never reads them, for they are a pickle. The salt, of the memory's hash, keeps the server from taking the keys and values of one memory
for those of another (vllm-project/vllm, issue 56655).

Source: docs.vllm.ai, features/prompt_embeds, and vllm's `renderers/embed_utils.py`, read, not run; tests/test_exchange.py has golden files.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import ModelError, SpecError
from graven.exchange.base import Prefix, ensure_ours, json_object
from graven.lm.probes import scale_inside
from graven.report import write_atomically

ANSWER_TOKENS = 64


def completions_body(prefix: Prefix, questions: Sequence[str], *, max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """Of `/v1/completions`: one prompt a question, or the memory alone where there is none.

    Raises:
        ModelError: Servers differ in what they do to vectors of this architecture.
    """
    _same_everywhere(prefix)
    (vectors,) = prefix.vectors
    prompts = [encoded(torch.cat([vectors, prefix.query(question)])) for question in questions] or [encoded(vectors)]
    return {"model": prefix.base, "prompt": None, "prompt_embeds": prompts if len(prompts) > 1 else prompts[0]} | _settings(prefix, max_tokens)


def chat_body(prefix: Prefix, questions: Sequence[str], *, max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """Of `/v1/chat/completions`: the memory and one question behind it.

    Raises:
        SpecError: The memory does not stand in a chat, or there are several questions.
        ModelError: As of `completions_body`.
    """
    if not prefix.memory.about.chat:
        raise SpecError("this memory was written outside a chat; export it to vllm, or write it anew with --chat.")
    if len(questions) > 1:
        raise SpecError(f"there are {len(questions)} questions and the body of a chat holds one; make a body for each, or export to vllm.")
    _same_everywhere(prefix)
    part = {"type": "prompt_embeds", "data": encoded(prefix.memory.state[0])}
    said = [part, *({"type": "text", "text": question} for question in questions)]
    return {"model": prefix.base, "messages": [{"role": "user", "content": said}]} | _settings(prefix, max_tokens)


def encoded(vectors: Float[Tensor, "T D"]) -> str:
    """Base64 of what `torch.save` writes of the vectors; the same bytes each time."""
    data = io.BytesIO()
    # a copy of its own: a slice would bring along all that it was cut from, and a parameter would stay one
    torch.save(vectors.detach().float().cpu().contiguous().clone(), data)
    return base64.b64encode(data.getvalue()).decode()


def write_body(body: dict[str, Any], place: Path) -> None:
    """One JSON object.

    Raises:
        OutputError: Something stands there that graven did not write, or the place cannot be written to.
    """
    ensure_ours(place, lambda there: "cache_salt" in json_object(there))
    write_atomically(place, lambda temporary: temporary.write_text(json.dumps(body)))


def _settings(prefix: Prefix, max_tokens: int) -> dict[str, Any]:
    if max_tokens < 1:
        raise SpecError(f"`max_tokens` is {max_tokens}; it must be at least 1.")
    return {"max_tokens": max_tokens, "temperature": 0.0, "cache_salt": prefix.memory.content_hash}


def _same_everywhere(prefix: Prefix) -> None:
    """vLLM's Gemma and Gemma 2 multiply vectors once more by what Hugging Face's embedding module has multiplied them by; its Gemma 3 does not."""
    scale = scale_inside(prefix.reader.model)
    if scale != 1.0:
        factor = "in a way of its own" if scale is None else f"by {scale:g}"
        raise ModelError(
            f"{prefix.reader.model} scales its embeddings {factor} before the memory, and not every vLLM leaves vectors as they are there; "
            "export the memory to peft or as a tensor."
        )
