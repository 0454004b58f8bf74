"""From what another tool wrote, or an export of graven's, to a memory."""

import os
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from graven.errors import MemoryFileError, MismatchError, Outcome
from graven.exchange.base import json_object, restored
from graven.exchange.peft import CONFIG, read_prompt
from graven.exchange.tensor import read_tensor
from graven.lm.pretrained import Pretrained
from graven.memory.file import About, Base, Memory, Page, about_of
from graven.models.base import made_with

ACCEPTED = "give a prompt-tuning folder of peft or a safetensors file with `inputs_embeds`"


def read_export(place: Path) -> tuple[Float[Tensor, "P S D"], dict[str, str], str]:
    """Vectors, metadata, and what they were read from.

    Raises:
        MemoryFileError: It is nothing that can be a memory.
    """
    if os.path.isdir(place):
        if not (place / CONFIG).is_file():
            raise MemoryFileError(f"the folder {place} holds no adapter: it has no {CONFIG}; {ACCEPTED}.")
        return *read_prompt(place), "a PEFT prompt"
    if place.suffix in (".json", ".pt", ".pth", ".bin"):
        raise MemoryFileError(f"{place} may hold a pickle, which graven never reads; {ACCEPTED}.")
    return *read_tensor(place), "plain vectors"


def imported(place: Path, model: Pretrained) -> Memory:
    """A memory of this model: the very one, where graven exported it; else one of whose text nothing is known.

    Raises:
        MemoryFileError: The place holds nothing that can be a memory, or numbers that are not finite.
        MismatchError: The vectors have another width than the model, or the memory is another model's.
    """
    vectors, metadata, source = read_export(place)
    if not vectors.dtype.is_floating_point or not bool(vectors.isfinite().all()):
        raise MemoryFileError(f"{place} holds vectors of type {vectors.dtype}, or numbers that are not finite; they cannot be a memory.")
    vectors = vectors.float().contiguous()
    if vectors.shape[-1] != model.width:
        raise MismatchError(f"{place} has vectors of width {vectors.shape[-1]} and {model} takes {model.width}; name the right model with --model.")
    memory = restored(vectors, metadata, place)
    if memory is None:
        return Memory(vectors, _unknown(vectors, model, source))
    memory.belongs_to(model)
    return memory


def named_base(place: Path) -> str | None:
    """The model that a place names, where it names one.

    Raises:
        MemoryFileError: As of `read_export`.
    """
    _, metadata, _ = read_export(place)
    if "graven" in metadata:
        return about_of(metadata["graven"], place).base.name
    name = json_object(place / CONFIG).get("base_model_name_or_path") if os.path.isdir(place) else None
    return name if isinstance(name, str) and name else None


def _unknown(vectors: Float[Tensor, "P S D"], model: Pretrained, source: str) -> About:
    """What a file says of vectors that somebody else made."""
    page = Page(tokens=0, recited=0, text_hash="")
    return About(
        kind="text",
        base=Base(name=model.name, fingerprint=model.fingerprint, revision=model.revision),
        slots=vectors.shape[1],
        pages=(page,) * len(vectors),
        rule=f"imported from {source}",
        steps=0,
        losses=(),
        token_accuracy=0.0,
        outcome=Outcome.IMPORTED.name,
        lossless=False,
        seed=0,
        seconds=0.0,
        versions=made_with(),
        objective="unknown",
    )
