"""One door to all exports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graven.answer import Reader
from graven.errors import MismatchError, SpecError
from graven.exchange.base import Prefix, one_page, prefix_of
from graven.exchange.peft import write_cartridge, write_prompt
from graven.exchange.tensor import write_tensor
from graven.exchange.vllm import ANSWER_TOKENS, chat_body, completions_body, write_body
from graven.memory.file import Memory
from graven.models.base import Model
from graven.models.text import TextModel

FORMATS = ("peft", "cartridge", "vllm", "vllm-chat", "tensor")
ASKED = ("vllm", "vllm-chat", "tensor")  # formats that can hold questions
BODIES = {"vllm": completions_body, "vllm-chat": chat_body}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written where.

    Args:
        format: One of `FORMATS`.
        path: Folder or file.
        vectors: Before a query, a page: those of the memory and, in a chat, of the tokens before it.
        pages: Of the memory that are in it.
        questions: That are in it.
        bytes: Of all files.
        memory: Content hash of what was exported.
    """

    format: str
    path: str
    vectors: int
    pages: int
    questions: int
    bytes: int
    memory: str


def exported(
    memory: Memory, model: Model, to: str, out: Path, *, questions: Sequence[str] = (), page: int | None = None, max_tokens: int | None = None
) -> Exported:
    """A memory in the format of another tool.

    Args:
        memory: Of a text; what a quantized one stands for is exported in float32.
        model: The one that wrote it.
        to: One of `FORMATS`.
        out: Folder or file to write.
        questions: That stand behind the memory, for a server or a tensor.
        page: Counted from 0; only a tensor without questions holds several.
        max_tokens: Of the answer that a server gives; 64 where left out.
    Raises:
        SpecError: The format is unknown, or cannot hold what is asked for.
        MismatchError: The memory was written with another model.
        ModelError: Vectors or keys and values of this model do not mean the same elsewhere.
        OutputError: Something stands at `out` that graven did not write, or it cannot be written to.
    """
    if to not in FORMATS:
        raise SpecError(f"`to` is {to!r}; it must be one of {', '.join(FORMATS)}.")
    base = memory.about.base.name
    if memory.about.kind == "records":
        raise SpecError(f"this memory holds records, which only the trained parts of {base} can read; texts of language models are exported.")
    if not isinstance(model, TextModel):
        raise MismatchError(
            f"this memory was written with {base}, and {model.name} is no frozen language model; only memories of those are exported. Name the right "
            "model with --model."
        )
    if questions and to not in ASKED:
        raise SpecError(f"questions are given and {to} holds none; ask them where the adapter is loaded, or export to {', '.join(ASKED)}.")
    if max_tokens is not None and to not in BODIES:
        raise SpecError(f"`max_tokens` is given and {to} asks for no answer; leave it out.")
    if to != "tensor" or questions:
        page = one_page(memory, page, what=to if to != "tensor" else "a tensor with questions")
    prefix = prefix_of(memory, Reader(model.model, memory), page=page)
    _write(prefix, to, out, questions, ANSWER_TOKENS if max_tokens is None else max_tokens)
    files = [out] if out.is_file() else list(out.iterdir())
    return Exported(
        format=to, path=str(out), vectors=prefix.vectors.shape[1], pages=len(prefix.vectors), questions=len(questions),
        bytes=sum(file.stat().st_size for file in files), memory=prefix.memory.content_hash,
    )  # fmt: skip


def _write(prefix: Prefix, to: str, out: Path, questions: Sequence[str], max_tokens: int) -> None:
    if to in BODIES:
        write_body(BODIES[to](prefix, questions, max_tokens=max_tokens), out)
    elif to == "tensor":
        write_tensor(prefix, questions, out)
    else:
        {"peft": write_prompt, "cartridge": write_cartridge}[to](prefix, out)
