"""The memory file: one safetensors container, and nothing else is ever read.

The tensor `state` holds the slots of each page, [P, M, D] float32. The metadata entry `graven` is the JSON of an `About`, and `checksum` the
SHA-256 of that JSON and of the tensor's bytes. A file is written to a temporary name and renamed.

Source: ours; the container is documented at https://huggingface.co/docs/safetensors. Tests: tests/test_file.py.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graven.errors import MemoryFileError, MismatchError, OutputError, SpecError
from graven.lm.base import digest
from graven.report import ensure_writable, write_atomically
from graven.settings import build

VERSION = 1
MOST_BYTES = 1 << 32  # no memory is this large; a file that is was not written by graven


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that a memory belongs to.

    Args:
        name: What it was loaded by.
        revision: Commit of a hub model; none where it came from this machine.
        fingerprint: Hash of its configuration, embeddings and tokens.
    """

    name: str
    fingerprint: str
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one page of the memory was written with, and how well it holds.

    Args:
        tokens: Tokens of its text.
        recited: Length of the prefix that the model reproduces exactly when it runs freely from the memory.
        text_hash: SHA-256 of its token ids: tells whether a recited text is the right one, without keeping the text.
    """

    tokens: int
    recited: int
    text_hash: str


@dataclass(frozen=True, kw_only=True)
class About:
    """Everything that a memory file says of itself.

    Args:
        kind: "records" or "text".
        base: The model that wrote it.
        slots: Vectors of each page, M.
        pages: One for each row of the state.
        rule: How it was written, in words and numbers.
        steps: Gradient steps taken.
        losses: Mean loss before each step, in nats a token.
        token_accuracy: Share of tokens right when the model is given the true ones before.
        outcome: How the write ended.
        lossless: The tokens decode to the very text that was written; False where the tokenizer cannot spell it.
        records: Records written; none for a text.
        answered: How many of them gave their value back right after the write.
        seed: Of the start.
        seconds: Wall clock of the write.
        versions: Of what wrote it.
    """

    kind: str
    base: Base
    slots: int
    pages: tuple[Page, ...]
    rule: str
    steps: int
    losses: tuple[float, ...]
    token_accuracy: float
    outcome: str
    lossless: bool
    seed: int
    seconds: float
    versions: tuple[str, ...]
    records: int | None = None
    answered: int | None = None
    version: int = VERSION

    @property
    def tokens(self) -> int:
        """Tokens written, all pages together."""
        return sum(page.tokens for page in self.pages)

    @property
    def recited(self) -> int:
        """Length of the prefix of the whole text that is reproduced exactly when the model runs freely."""
        total = 0
        for page in self.pages:
            total += page.recited
            if page.recited < page.tokens:
                break
        return total


@dataclass(frozen=True)
class Memory:
    """Slots and what is known of them. It can reproduce its text by design: treat the file as you would treat the text.

    Args:
        state: One set of slots a page.
        about: Everything else.
    """

    state: Float[Tensor, "P M D"]
    about: About

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return self.state.numel() * self.state.element_size()

    @property
    def content_hash(self) -> str:
        """SHA-256 of metadata and state."""
        return digest(_json(self.about).encode(), self.state.contiguous().numpy().tobytes())

    def belongs_to(self, *, fingerprint: str, name: str) -> None:
        """Pass where the model is the one that wrote the memory.

        Raises:
            MismatchError: It is another one; the sentence names both.
        """
        base = self.about.base
        if base.fingerprint != fingerprint:
            raise MismatchError(
                f"this memory was written with {base.name} (fingerprint {base.fingerprint[:12]}) and {name} has fingerprint {fingerprint[:12]}; "
                "vectors of one model mean nothing to another. Name the right model with --model, or write the memory anew."
            )

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            OutputError: The folder is missing or cannot be written to.
        """
        target = Path(path)
        metadata = {"graven": _json(self.about), "checksum": self.content_hash}
        write_atomically(target, lambda temporary: save_file({"state": self.state.contiguous()}, temporary, metadata=metadata))
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; a state that comes back is bit for bit the one that was saved.

        Raises:
            MemoryFileError: The file is missing, truncated, changed, not finite, of an unknown version, or no memory at all.
        """
        place = Path(path)
        try:
            size = os.stat(place).st_size if place.is_file() else -1
            if size < 0:
                raise MemoryFileError(f"there is no file {place}; give the path of a memory that `graven write` made.")
            if size > MOST_BYTES:
                raise MemoryFileError(f"{place} has {size} bytes, and no memory is larger than {MOST_BYTES}; this is another kind of file.")
            with safe_open(place, framework="pt") as file:
                metadata = file.metadata() or {}
                if "graven" not in metadata or list(file.keys()) != ["state"]:
                    raise MemoryFileError(f"{place} is a safetensors file and no memory; give a file that `graven write` made.")
                about = _about(metadata["graven"], place)
                state = file.get_tensor("state")
        except (SafetensorError, OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, MemoryFileError):
                raise
            raise MemoryFileError(f"{place} is no whole memory file ({error}); it was cut short, changed, or never was one. Write it anew.") from error
        memory = cls(state, about)
        memory._verify(place, metadata.get("checksum"))
        return memory

    def _verify(self, place: Path, checksum: str | None) -> None:
        wanted = [len(self.about.pages), self.about.slots]
        if self.state.dtype != torch.float32 or self.state.dim() != 3 or list(self.state.shape[:2]) != wanted:
            raise MemoryFileError(
                f"{place} has a state of {self.state.dtype} and shape {list(self.state.shape)}, and its metadata speak of "
                f"{wanted[0]} pages of {wanted[1]} float32 slots; the file was changed. Write it anew."
            )
        if not bool(torch.isfinite(self.state).all()):
            raise MemoryFileError(f"{place} holds numbers that are not finite; the write that made it failed. Write it anew with a lower --rate.")
        if checksum != self.content_hash:
            raise MemoryFileError(f"{place} does not match its checksum; it was damaged or changed after it was written. Write it anew.")


def ensure_replaceable(path: Path) -> None:
    """Pass where a memory may be written to `path`: nothing stands there, or an older memory does. Asked before long work, not after it.

    Raises:
        OutputError: Something else stands there, or the folder cannot be written to.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    if path.exists():
        try:
            Memory.load(path)
        except MemoryFileError as error:
            raise OutputError(f"{path} exists and is no memory, so it is left alone; choose another name.") from error
    ensure_writable(path)


def _json(about: About) -> str:
    return json.dumps(dataclasses.asdict(about), sort_keys=True)


def _about(text: str, place: Path) -> About:
    fields: Any = json.loads(text)
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise MemoryFileError(f"{place} has format version {version!r} and this graven reads version {VERSION}; install the graven that wrote it.")
    try:
        about = build(About, fields, where="metadata")
    except SpecError as error:
        raise MemoryFileError(f"{place} has damaged metadata: {error}") from error
    if not all(math.isfinite(x) for x in (about.token_accuracy, about.seconds)):
        raise MemoryFileError(f"{place} has metadata that are not finite; the file was changed. Write it anew.")
    return about
