"""Many texts, a memory file each: what was done stays done, and one bad text never stops the rest.

Texts are written one at a time, so that each file holds the state that `graven write` of the same text and settings gives, bit for bit; several
processes take a share each (`torchrun`). Rows of a batch would be faster, but not the same bits: a matrix product of other sizes rounds otherwise
(docs/log.md has which sizes do not).

A file is written to a temporary name and renamed, and only then noted in the folder's index (`graven.folder`). Killed between the two, a run
writes that one text again; a text that was noted, whose file is still the one that was written, is not written again.

Source: ours; tests/test_many.py.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from graven.errors import GravenError, OutputError, SpecError, TextError
from graven.folder import NAME, SUFFIX, Index, stamp_of
from graven.lm.base import digest
from graven.memory.file import Memory, ensure_replaceable
from graven.models.base import Model
from graven.models.records import RecordsModel
from graven.models.text import TextModel
from graven.processes import ALONE, Processes
from graven.report import sweep
from graven.written import Wish, shortfalls, written

PLAIN = Wish()
LONGEST_NAME = 200  # bytes; file systems take 255, and a temporary name is longer


@dataclass(frozen=True)
class Source:
    """One text to write.

    Args:
        name: Of its memory, without the suffix.
        read: Gives the text, or raises a TextError.
        size: Bytes, roughly: long texts are dealt out evenly.
    """

    name: str
    read: Callable[[], str]
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one text.

    Args:
        name: Of its memory.
        kind: "written", "there" from an earlier run, or "bad".
        reason: Why it could not be written, or where its memory falls short.
        tokens: Of the text.
        seconds: CPU seconds of this process.
    """

    name: str
    kind: str
    reason: str = ""
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of every write; those of the model where left out."""

    wish: Wish = PLAIN
    slots: int | None = None
    steps: int | None = None
    rate: float | None = None
    seed: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if "distill" in (self.wish.objective or ""):
            raise SpecError("distilling takes queries of its own for each text; write such prompts one by one.")

    def key(self, model: Model) -> str:
        """What decides the bits of a memory, apart from the text: settings and model."""
        fingerprint = model.memory.model.fingerprint if isinstance(model, RecordsModel) else cast("TextModel", model).model.fingerprint
        return json.dumps({**asdict(self), "fingerprint": fingerprint}, sort_keys=True)


def sources_of(place: Path) -> list[Source]:
    """The texts of a folder (its .txt files) or of a JSON-lines file (`{"text": ..., "name": ...}` a line; the name may be left out).

    Raises:
        TextError: There is no such folder or file, or no text in it.
    """
    if os.path.isdir(place):  # of `os.path`, which takes a name that is too long for one that is not there
        found = [Source(path.stem, partial(_text, path), os.path.getsize(path) if path.exists() else 0) for path in sorted(place.glob("*.txt"))]
    else:
        try:
            lines = place.read_bytes().split(b"\n")
        except OSError as error:
            raise TextError(f"cannot read {place}: {error.strerror}. Give a folder of .txt files, or a file of JSON lines.") from error
        found = [_line(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise TextError(f"{place} holds no text; give a folder of .txt files, or a file of JSON lines.")
    return _told_apart(found)


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """The second text of a name, and a text whose name no file can have, are bad ones."""
    seen: set[str] = set()
    kept = []
    for source in sources:
        name, reason = source.name, ""
        if not name or name.startswith(".") or not 0 < _bytes_of(name) <= LONGEST_NAME or any(c in name for c in "/\\\0"):
            reason = f"{name!r} is no name of a file; letters, digits and up to {LONGEST_NAME} bytes were expected."
        elif name in seen:
            reason = f"the name {name!r} was there before; give every text its own."
        seen.add(name)
        kept.append(replace(source, read=_refusing(reason)) if reason else source)
    return kept


def _bytes_of(name: str) -> int:
    """Of a name of a file; 0 where no file system has it."""
    try:
        return len(os.fsencode(name))
    except UnicodeEncodeError:
        return 0


def _refusing(reason: str) -> Callable[[], str]:
    def refuse() -> str:
        raise TextError(reason)

    return refuse


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TextError(f"cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TextError(f"is not UTF-8 (at byte {error.start}); convert it first.") from error


def _line(number: int, line: bytes) -> Source:
    try:
        row = json.loads(line)
        name, text = row.get("name", f"{number:06d}"), row["text"]
        if not isinstance(name, str) or not isinstance(text, str) or set(row) - {"name", "text"}:
            raise TypeError
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        reason = f'line {number} is not {{"text": "...", "name": "..."}} with perhaps no name and nothing else.'
        return Source(f"{number:06d}", _refusing(reason))
    return Source(name, lambda: text, len(line))


def write_many(
    model: Model,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    processes: Processes = ALONE,
    report: Callable[[Row, int], None] | None = None,
) -> list[Row]:
    """Write every text that is not there yet.

    Args:
        model: Writes.
        sources: The texts.
        out: Folder of the memories; made where it is missing.
        settings: Of every write.
        processes: This process among those that share the work.
        report: Called with each row of this process and the number of texts that it will have.
    Returns:
        A row for each text in their order; in all processes but the first only those of its own.
    Raises:
        OutputError: The folder cannot be written to.
        SpecError: A setting is wrong, for whatever text.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {out}: {error.strerror}. Choose another.") from error
    if processes.first:
        sweep(out, SUFFIX)
        with Index(out):  # one process makes it, the others find it
            pass
    processes.wait()
    order = sorted(range(len(sources)), key=lambda at: -sources[at].size) if processes.count > 1 else range(len(sources))
    mine = processes.share(order)
    try:
        with Index(out) as index:
            rows = {at: _one(model, sources[at], out, settings, index, report, len(mine)) for at in mine}
    except sqlite3.Error as error:
        raise OutputError(f"cannot use {out / NAME}: {error}. Try again, or move it away.") from error
    found = {at: row for part in processes.gather(rows) for at, row in part.items()}
    return [found[at] for at in sorted(found)] if processes.first else list(rows.values())


def _one(model: Model, source: Source, out: Path, settings: Settings, index: Index, report: Callable[[Row, int], None] | None, of: int) -> Row:
    began = time.process_time()
    try:
        row = _written(model, source, out, settings, index)
    except (SpecError, sqlite3.Error):
        raise  # so would every other text
    except GravenError as error:
        row = Row(name=source.name, kind="bad", reason=" ".join(str(error).split()))
    except (RuntimeError, ValueError, MemoryError, LookupError, TypeError, OSError) as error:  # whatever it did to the model, the others go on
        row = Row(name=source.name, kind="bad", reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    row = replace(row, seconds=time.process_time() - began)
    if report is not None:
        report(row, of)
    return row


def _written(model: Model, source: Source, out: Path, settings: Settings, index: Index) -> Row:
    text, place, key = source.read(), out / f"{source.name}{SUFFIX}", settings.key(model)
    hashed = digest(text.encode("utf-8", "surrogatepass"))
    noted = index.done_with(source.name, hashed, key)
    if noted is not None and _is_there(place, noted[0], index):
        return replace(Row(**json.loads(noted[1])), kind="there")
    ensure_replaceable(place)
    done = written(
        model, text, settings.wish, steps=settings.steps, rate=settings.rate, seed=settings.seed, deadline=settings.deadline, progress=_nothing
    )
    done.memory.save(place)
    row = Row(name=source.name, kind="written", reason="; ".join(shortfalls(done)[0]), tokens=done.memory.about.tokens)
    index.note_written(source.name, hashed, key, done.memory, text, json.dumps(asdict(row)))
    return row


def _is_there(place: Path, hashed: str, index: Index) -> bool:
    """Whether the file is still the one that was written; read only where it is not the one that the index knows by that hash."""
    try:
        return index.stamp(place.name) == (*stamp_of(place), hashed) or Memory.load(place).content_hash == hashed
    except (OSError, GravenError):
        return False


def _nothing(*_: float) -> None:
    """No bar for each single text."""
