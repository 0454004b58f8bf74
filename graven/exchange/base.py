"""What exports and imports share: the vectors that stand before a query, results that appear whole or not at all, and the way back to the memory.

An export that keeps every vector also keeps, in the metadata of its safetensors file, what the memory file said of them. An import finds it there
and gives the very memory back; where it is missing, because another tool wrote the file, nothing is known of the text.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from graven.answer import Reader
from graven.errors import MemoryFileError, OutputError, SpecError
from graven.lm.base import digest
from graven.memory.file import Memory, about_of, json_of
from graven.report import ensure_writable
from graven.tasks.base import Tokens

MADE_FROM = "graven_memory"  # metadata of every export: the content hash of the memory
MOST_JSON = 1 << 30  # bytes of a JSON file that is looked into


@dataclass(frozen=True)
class Prefix:
    """What stands before a query.

    Args:
        memory: One page of it, or all.
        vectors: The tokens of a chat template that stand before the memory, as vectors, and the memory behind them.
        reader: What the model and the memory make of a query.
    """

    memory: Memory
    vectors: Float[Tensor, "P S D"]
    reader: Reader

    @property
    def base(self) -> str:
        """What the model was loaded by."""
        return self.memory.about.base.name

    def query(self, text: str) -> Float[Tensor, "T D"]:
        """Vectors of a query as they stand behind the memory: in a chat with the end of the turn."""
        return embedded(self.reader, self.reader.rows([text])[0])


def prefix_of(memory: Memory, reader: Reader, *, page: int | None) -> Prefix:
    """The vectors before a query, of one page where `page` is given.

    Raises:
        SpecError: There is no such page.
    """
    pages = memory.about.pages
    if page is not None:
        if not 0 <= page < len(pages):
            raise SpecError(f"`page` is {page} and this memory has {len(pages)}; give a number from 0 to {len(pages) - 1}.")
        # what was measured of all pages together says nothing of one
        about = memory.about if len(pages) == 1 else replace(memory.about, pages=(pages[page],), fidelity=None, agreement=None)
        memory = Memory(memory.state[page][None], about)
    front = embedded(reader, memory.about.before)
    return Prefix(memory, torch.cat([front.expand(len(memory.state), -1, -1), memory.state], dim=1), reader)


def one_page(memory: Memory, page: int | None, *, what: str) -> int:
    """The page that is exported: the one that is asked for, or the only one.

    Raises:
        SpecError: There are several and none was chosen.
    """
    if page is None and len(memory.about.pages) > 1:
        counts = [held.tokens for held in memory.about.pages]
        raise SpecError(
            f"this memory has {len(counts)} pages, of {', '.join(map(str, counts[:8]))}{' ...' if counts[8:] else ''} tokens, and {what} holds one; "
            f"choose one with --page 0 to {len(counts) - 1}, each into a place of its own."
        )
    return 0 if page is None else page


def embedded(reader: Reader, ids: Sequence[int]) -> Float[Tensor, "T D"]:
    """Vectors of tokens, in float32 on the CPU."""
    vectors: Tensor = reader.model.embed(Tokens.of([list(ids)]))[0].detach().float().cpu()
    return vectors


def container(tensors: dict[str, Tensor], prefix: Prefix, *, exported: str | None) -> bytes:
    """A safetensors file; with `exported`, the name of the tensor that holds every vector, an import gives the memory back."""
    metadata = {"format": "pt", MADE_FROM: prefix.memory.content_hash}
    if exported is not None:
        about = json_of(prefix.memory.about)
        metadata |= {"graven": about, "checksum": digest(about.encode(), tensors[exported].contiguous().numpy().tobytes())}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata)


def restored(vectors: Float[Tensor, "P S D"], metadata: dict[str, str], place: Path) -> Memory | None:
    """The memory that `container` was given, bit for bit; none where the file is not graven's.

    Raises:
        MemoryFileError: It is, and it was changed.
    """
    if "graven" not in metadata:
        return None
    about = about_of(metadata["graven"], place)
    state = vectors[:, len(about.before) :].contiguous()
    checked = digest(metadata["graven"].encode(), vectors.contiguous().numpy().tobytes())
    if metadata.get("checksum") != checked or list(state.shape[:2]) != [len(about.pages), about.slots]:
        raise MemoryFileError(f"{place} does not match its checksum; it was damaged or changed after it was written. Export it anew.")
    return Memory(state, about)


def read_container(place: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        MemoryFileError: It is missing, or no whole safetensors file.
    """
    if not os.path.isfile(place):
        raise MemoryFileError(f"there is no file {place}; give what `graven export` or another tool wrote.")
    try:
        with safe_open(place, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError) as error:
        raise MemoryFileError(f"{place} is no whole safetensors file ({' '.join(str(error).split())[:200]}).") from error


def write_folder(folder: Path, files: dict[str, bytes], *, replaces: Callable[[Path], bool]) -> None:
    """A folder of these files and no others, whole or not at all.

    Args:
        replaces: Whether a folder that stands there is one of graven's own.
    Raises:
        OutputError: Something else stands there, or the place cannot be written to.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and replaces(folder)):
        raise OutputError(f"{folder} exists and graven did not write it, so it is left alone; choose another name.")
    ensure_writable(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        new, old = temporary / "new", temporary / "old"
        new.mkdir()
        for name, data in files.items():
            with (new / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}. Free some space or choose another place.") from error
    finally:
        if (temporary / "old").exists() and not folder.exists():
            (temporary / "old").rename(folder)  # what stood there before, where the new one did not come
        shutil.rmtree(temporary, ignore_errors=True)


def ensure_ours(place: Path, ours: Callable[[Path], bool]) -> None:
    """Pass where a file may be written to `place`: nothing stands there, or an older export of the same kind does.

    Raises:
        OutputError: Something else stands there, or the folder cannot be written to.
    """
    if os.path.lexists(place) and not (os.path.isfile(place) and ours(place)):
        raise OutputError(f"{place} exists and graven did not write it, so it is left alone; choose another name.")
    ensure_writable(place)


def exported_by_graven(place: Path) -> bool:
    """Whether a safetensors file says what memory it was made from."""
    try:
        return MADE_FROM in read_container(place)[1]
    except MemoryFileError:
        return False


def json_object(place: Path) -> dict[str, object]:
    """The object of a JSON file; empty where it has none."""
    try:
        found = json.loads(place.read_bytes()) if place.stat().st_size <= MOST_JSON else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
