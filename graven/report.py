"""Rows in; JSON lines, table or figure out. Never imports torch."""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from graven.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

Row = Mapping[str, Any]
MARK = ".tmp-"  # of a temporary file
LEFT_BEHIND = 600.0  # seconds; a temporary file is filled and renamed in far less


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: readers see the old file or the whole new one.

    Raises:
        OutputError: The folder is missing or cannot be written to.
    """
    temporary = _temporary_beside(path)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())  # what was private stays private
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}. Free some space or choose another place.") from error
    finally:
        temporary.unlink(missing_ok=True)


def ensure_writable(path: Path) -> None:
    """Pass where a file can be written at `path`: asked before long work, not after it.

    Raises:
        OutputError: The folder is missing or cannot be written to.
    """
    _temporary_beside(path).unlink()


def sweep(folder: Path, suffix: str) -> None:
    """Remove what killed processes left behind: temporary files of `write_atomically` for targets of that suffix, older than any write takes.

    An ordinary exception, Ctrl-C included, leaves none; SIGKILL and a power cut between two system calls can.
    """
    leftover = re.compile(rf"\..+{re.escape(suffix)}{re.escape(MARK)}[a-z0-9_]{{8}}")
    for place in folder.iterdir():
        if leftover.fullmatch(place.name):
            with suppress(OSError):  # another process sweeps too, or the folder is not ours to change
                if time.time() - place.stat().st_mtime > LEFT_BEHIND:
                    place.unlink()


def _temporary_beside(path: Path) -> Path:
    advice = "Choose a folder that exists and that you may write to."
    try:
        if not path.parent.stat().st_mode & 0o222:  # root could write there; nobody was meant to
            raise OutputError(f"cannot write {path}: its folder is read-only. {advice}")
        handle, name = tempfile.mkstemp(prefix=f".{path.name}{MARK}", dir=path.parent)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}. {advice}") from error
    os.close(handle)
    return Path(name)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """JSON lines, one row each, atomically. What is not finite becomes null: strict JSON has no word for it."""
    finite = ({key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()} for row in rows)
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in finite)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def table(rows: Sequence[Row], *, row: str, column: str, value: Callable[[Row], str]) -> str:
    """A Markdown table with one line for each value of `row` and one column for each value of `column`."""
    across = sorted({r[column] for r in rows})
    lines = [f"| {row} | " + " | ".join(str(c) for c in across) + " |", "|---" * (len(across) + 1) + "|"]
    for key in sorted({r[row] for r in rows}):
        cells = {r[column]: value(r) for r in rows if r[row] == key}
        lines.append(f"| {key} | " + " | ".join(cells.get(c, "") for c in across) + " |")
    return "\n".join(lines)


@contextmanager
def figure(path: Path, *, width: int | float = 7.0, height: int | float = 3.6, columns: int = 1, rows: int = 1) -> "Iterator[list[Axes]]":
    """Axes to draw on, row by row, saved as a PNG at `path` when the block ends.

    Raises:
        OutputError: The file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):
        canvas, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
        try:
            yield list(axes.flat)
            write_atomically(path, lambda temporary: canvas.savefig(temporary, format="png", dpi=150))
        finally:
            plt.close(canvas)
