"""A folder of memories, and which of them a question is about.

Of each text a bag of hashed words is kept in one SQLite file in the folder, `graven.sqlite`, and a question is put to the memory whose bag it
scores best on. A bag is made from the text where `graven write-many` wrote it, and else from what the memory recites, the first time it is needed.
Which entry is stale is decided by size, time and inode of the file, and then by the content hash in it; a cache that is damaged is made anew.
The bag tells of a text what words it has, so the file is as private as the memories.

Records are picked by the hash of the key, which a memory of records keeps.

Source: Robertson and Zaragoza 2009, The probabilistic relevance framework, equation 3.15 (BM25). Against mean hidden states of a language model:
docs/log.md. Tests: tests/test_folder.py.
"""

import hashlib
import math
import os
import re
import sqlite3
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from graven.errors import GravenError, MemoryFileError, OutputError, TextError
from graven.memory.file import Memory
from graven.models.base import key_hash
from graven.report import sweep
from graven.tasks import world

NAME = "graven.sqlite"
SUFFIX = ".graven"
APPLICATION = 0x6772766E  # "grvn": whose file it is
FORMAT = 1
SATURATION, LENGTH = 1.2, 0.75  # k1 and b of BM25, as they are usually set
BEGINNING = 5  # letters
WAIT = 60.0  # seconds for another process to be done with the file

SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, size INTEGER, time INTEGER, inode INTEGER, hash TEXT, length INTEGER, fault TEXT);
CREATE TABLE IF NOT EXISTS piece (piece INTEGER NOT NULL, entry INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (piece, entry)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_entry ON piece (entry);
CREATE TABLE IF NOT EXISTS written (name TEXT PRIMARY KEY, source TEXT NOT NULL, settings TEXT NOT NULL, hash TEXT NOT NULL, row TEXT NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """The memory that a question was put to.

    Args:
        name: Its file.
        score: Of BM25.
        sure: How much better it is than the next: 1 - second score / first. docs/log.md has how often the first is right at each value.
        next: The next best, if any scores at all.
    """

    name: str
    score: float
    sure: float
    next: str | None = None


def pieces(text: str) -> list[str]:
    """Words of a text, letter case and compatibility forms aside, and the beginnings of long ones, which inflected words share.

    >>> pieces("The CAFÉ's ﬁre, burning.")
    ['the', 'café', 's', 'fire', 'burning', 'burni']
    """
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return [piece for word in words for piece in dict.fromkeys((word, word[:BEGINNING]))]


def bag(text: str) -> Counter[int]:
    """Hashed pieces of a text and their counts."""
    return Counter(_hash(piece) for piece in pieces(text))


def bag_of_keys(memory: Memory) -> Counter[int]:
    """Of a memory of records."""
    return Counter(_hash(f"#{key}") for page in memory.about.pages for key in page.keys)


def bag_of_question(question: str) -> Counter[int]:
    """Its pieces, and its key should it be one: of records as it is, of a phone book whatever its case, of a story as `tasks.world` spells it."""
    bare = question.strip().removeprefix("?").removeprefix("!").removesuffix(":").strip()
    keys = {bare, bare.lower()}
    with suppress(TextError):
        keys.add(world.text_of(world.tokens_of(question.strip().removesuffix("?") + "?")))
    return bag(question) + Counter(_hash(f"#{key_hash(key)}") for key in keys)


def _hash(piece: str) -> int:
    """64 bits, with a sign, as SQLite holds them."""
    return int.from_bytes(hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True)


class Index:
    """The SQLite file of a folder.

    Args:
        folder: Where the memories are. One that cannot be written to gets an index that is thrown away afterwards.
    Raises:
        OutputError: There is no such folder, or something else has the name of the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.is_dir():
            raise OutputError(f"{folder} is no folder; give one that holds memories.")
        self.base = self._opened()

    def close(self) -> None:
        """What was not committed is gone."""
        self.base.close()

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> sqlite3.Connection:
        place = self.folder / NAME
        if not self.folder.stat().st_mode & 0o222 or not os.access(self.folder, os.W_OK):  # root could write there; nobody was meant to
            return _copied(place)
        try:
            return _connected(place)
        except sqlite3.OperationalError as error:  # locked, or the disk is full
            raise OutputError(f"cannot use {place}: {error}. Try again, or move it away.") from error
        except sqlite3.DatabaseError:
            place.unlink()  # a damaged cache, or no database at all
            return _connected(place)

    # What is in the folder

    def refresh(self, recite: Callable[[Memory], str]) -> dict[str, str]:
        """Bring the index up to date with the files.

        Args:
            recite: Text of a memory of a text; called only for files whose bag is not known.
        Returns:
            The files that no question can be put to, and why.
        """
        sweep(self.folder, SUFFIX)
        places = {place.name: place for place in self.folder.iterdir() if place.suffix == SUFFIX and not place.name.startswith(".")}
        known = {name: (tuple(stamp), hashed) for name, *stamp, hashed in self.base.execute("SELECT name, size, time, inode, hash FROM entry")}
        for name in known.keys() - places.keys():
            self._forget(name)
        unread: dict[str, str] = {}
        for name in sorted(places):
            try:
                stamp = stamp_of(places[name])
                if name not in known or known[name][0] != stamp:
                    self._read(places[name], known.get(name, ((), None))[1], stamp, recite)
            except UnicodeEncodeError:
                unread[name] = "its name is no Unicode; give it another"
            except (GravenError, OSError) as error:  # its model is not here, or it is gone again: the next time may be another
                self._forget(name)
                unread[name] = str(error)
            self.base.commit()
        return dict(self.base.execute("SELECT name, fault FROM entry WHERE fault IS NOT NULL ORDER BY name")) | unread

    def _read(self, place: Path, hashed: str | None, stamp: tuple[int, ...], recite: Callable[[Memory], str]) -> None:
        """A file that is new or changed."""
        try:
            memory = Memory.load(place)
            if memory.content_hash == hashed:  # touched, or moved here and back
                self.base.execute("UPDATE entry SET size = ?, time = ?, inode = ? WHERE name = ?", (*stamp, place.name))
            elif "distill" in memory.about.objective:
                self.put(place.name, stamp, None, Counter(), fault="it stands in for a prompt and holds no text to pick it by; name the file")
            else:
                self.put(place.name, stamp, memory.content_hash, bag_of_keys(memory) if memory.about.kind == "records" else bag(recite(memory)))
        except MemoryFileError as error:
            self.put(place.name, stamp, None, Counter(), fault=str(error))

    def put(self, name: str, stamp: Sequence[int], hashed: str | None, pieces: Counter[int], *, fault: str | None = None) -> None:
        """An entry in the place of any other of that name; committed by the caller."""
        self._forget(name)
        row = (name, *stamp, hashed, pieces.total(), fault)
        entry = self.base.execute("INSERT INTO entry (name, size, time, inode, hash, length, fault) VALUES (?, ?, ?, ?, ?, ?, ?)", row).lastrowid
        self.base.executemany("INSERT INTO piece VALUES (?, ?, ?)", [(piece, entry, count) for piece, count in pieces.items()])

    def _forget(self, name: str) -> None:
        self.base.execute("DELETE FROM piece WHERE entry IN (SELECT id FROM entry WHERE name = ?)", (name,))
        self.base.execute("DELETE FROM entry WHERE name = ?", (name,))

    # Which memory a question is about

    def pick(self, question: str) -> Picked | None:
        """The memory that a question is about; None where none has a word of it."""
        count, length = self.base.execute("SELECT COUNT(*), AVG(length) FROM entry WHERE fault IS NULL").fetchone()
        scores: defaultdict[int, float] = defaultdict(float)
        lengths: dict[int, int] = {}
        for piece in bag_of_question(question):
            rows = self.base.execute(
                "SELECT entry, count, length FROM piece JOIN entry ON entry.id = piece.entry WHERE piece = ? AND fault IS NULL", (piece,)
            ).fetchall()
            weight = math.log(1 + (count - len(rows) + 0.5) / (len(rows) + 0.5))
            for entry, times, long in rows:
                lengths[entry] = long
                scores[entry] += weight * times * (SATURATION + 1) / (times + SATURATION * (1 - LENGTH + LENGTH * long / length))
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:2]
        if not best:
            return None
        names = [self.base.execute("SELECT name FROM entry WHERE id = ?", (entry,)).fetchone()[0] for entry, _ in best]
        second = best[1][1] if len(best) > 1 else 0.0
        return Picked(name=names[0], score=best[0][1], sure=1 - second / best[0][1], next=names[1] if len(best) > 1 else None)

    # What `graven write-many` did

    def done_with(self, name: str, source: str, settings: str) -> tuple[str, str] | None:
        """Content hash of the memory of this text with these settings and what was told of it, if it was written."""
        asked = (name, source, settings)
        found: tuple[str, str] | None = self.base.execute(
            "SELECT hash, row FROM written WHERE name = ? AND source = ? AND settings = ?", asked
        ).fetchone()
        return found

    def stamp(self, name: str) -> tuple[int | str, ...] | None:
        """Of the file when it was last read or written, and the content hash that it had."""
        return self.base.execute("SELECT size, time, inode, hash FROM entry WHERE name = ?", (name,)).fetchone()

    def note_written(self, name: str, source: str, settings: str, memory: Memory, text: str, row: str) -> None:
        """A text that was written, and its bag, at once."""
        place = self.folder / f"{name}{SUFFIX}"
        pieces = bag_of_keys(memory) if memory.about.kind == "records" else bag(text)
        self.put(place.name, stamp_of(place), memory.content_hash, pieces)
        self.base.execute("INSERT OR REPLACE INTO written VALUES (?, ?, ?, ?, ?)", (name, source, settings, memory.content_hash, row))
        self.base.commit()


def stamp_of(place: Path) -> tuple[int, int, int]:
    """What changes when a file does."""
    found = place.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino - (1 << 64 if found.st_ino >> 63 else 0)


def _connected(place: Path | str) -> sqlite3.Connection:
    """A connection to an index of ours, which is made where there is none.

    Raises:
        sqlite3.DatabaseError: It cannot be opened, or is damaged.
        OutputError: It is the database of another program, or of a later graven.
    """
    base = sqlite3.connect(place, timeout=WAIT)
    try:
        (owner,), (version,) = (base.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
        tables = base.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if tables and (owner != APPLICATION or version != FORMAT):
            raise OutputError(f"{place} is a database of something else, or of another version of graven; move it away.")
        if not tables:
            base.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT}; COMMIT;")
        if (found := base.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        return base
    except BaseException:
        base.close()
        raise


def _copied(place: Path) -> sqlite3.Connection:
    """What can be read of an index, in memory."""
    base = _connected(":memory:")
    if place.is_file():
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(f"{place.absolute().as_uri()}?mode=ro", uri=True)) as there:
            there.backup(base)
    return base


def picked(index: Index, questions: Iterable[str]) -> list[Picked | None]:
    """The memory of each question.

    Raises:
        TextError: The folder holds no memory that a question could be put to.
    """
    with closing(index.base.execute("SELECT 1 FROM entry WHERE fault IS NULL LIMIT 1")) as rows:
        if rows.fetchone() is None:
            raise TextError(f"{index.folder} holds no memory that a question could be put to; write some into it, as NAME{SUFFIX}.")
    return [index.pick(question) for question in questions]
