"""Plain tensors: a safetensors file that any framework can put in front of a model.

    inputs_embeds   [B, T, D] float32   rows as the model takes them: the memory, and the question behind it where there is one
    attention_mask  [B, T] int64        1 for a column that is there; padding is on the left, zeros
    position_ids    [B, T] int64        columns that are there, counted from 0; 0 at padding

Without a question there is one row a page and no padding, and `read_tensor` gives the memory back.

Source: ours; the names are those of transformers, so `model.generate(inputs_embeds=..., attention_mask=...)` continues each row.
Tests: tests/test_exchange.py.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from graven.errors import MemoryFileError
from graven.exchange.base import Prefix, container, ensure_ours, exported_by_graven, read_container
from graven.report import write_atomically

EMBEDDINGS = "inputs_embeds"


def tensors_of(prefix: Prefix, questions: Sequence[str]) -> dict[str, Tensor]:
    """One row a question; the pages of the memory, one a row, where there is none. Only one page can be asked."""
    rows = [torch.cat([prefix.vectors[0], prefix.query(question)]) for question in questions] or list(prefix.vectors)
    longest = max(map(len, rows))
    mask = torch.stack([pad(torch.ones(len(row), dtype=torch.long), (longest - len(row), 0)) for row in rows])
    return {
        EMBEDDINGS: torch.stack([pad(row, (0, 0, longest - len(row), 0)) for row in rows]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


def write_tensor(prefix: Prefix, questions: Sequence[str], place: Path) -> None:
    """A file of these tensors.

    Raises:
        OutputError: Something stands there that graven did not write, or the place cannot be written to.
    """
    data = container(tensors_of(prefix, questions), prefix, exported=None if questions else EMBEDDINGS)
    ensure_ours(place, exported_by_graven)
    write_atomically(place, lambda temporary: temporary.write_bytes(data))


def read_tensor(place: Path) -> tuple[Float[Tensor, "P S D"], dict[str, str]]:
    """Vectors and metadata of such a file; a matrix alone is one page.

    Raises:
        MemoryFileError: It has no vectors, or it has padding, so that its rows are no pages.
    """
    tensors, metadata = read_container(place)
    vectors = tensors.get(EMBEDDINGS)
    if vectors is None or vectors.dim() not in (2, 3) or not vectors.numel():
        held = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "nothing"
        raise MemoryFileError(f"{place} has no `{EMBEDDINGS}` [M, D] or [P, M, D], but {held}; name the vectors so.")
    mask = tensors.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise MemoryFileError(f"{place} has padding, so its rows are of several lengths and no pages of one memory; export without questions.")
    return vectors if vectors.dim() == 3 else vectors[None], metadata
