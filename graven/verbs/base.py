"""What verbs share: common options, reading what they are given, and printing: results to standard output, everything else to standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graven.errors import OutputError, TextError
from graven.processes import here

if TYPE_CHECKING:
    from graven.memory.file import Memory
    from graven.model import Model
    from graven.tasks.queries import Query

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="M", help="`records`, `phonebook`, `stories`, a folder of `graven train`, a model directory, a .gguf, a hub id."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ProbesOption = Annotated[
    int | None, typer.Option(metavar="N", help="Questions that the model asks itself about the text, to measure with; 0 asks none.")
]
MemoryArgument = Annotated[Path, typer.Argument(metavar="MEMORY", help="A file that `graven write` made.")]

SMALL = 20_000_000  # parameters


def open_memory(path: Path, model: str | None) -> "tuple[Memory, Model]":
    """A memory and the model that reads it: the one that its file names, where none is given."""
    from graven.memory.file import Memory

    memory = Memory.load(path)
    return memory, open_model(memory.about.base.name if model is None else model)


def open_model(name: str, *, slots: int | None = None) -> "Model":
    """A model, on one thread where it is small: its threads would wait for each other longer than they work, on a busy machine 50 times longer."""
    import torch

    from graven.model import load

    model = load(name, slots=slots)
    if model.size < SMALL:
        torch.set_num_threads(1)
    return model


def read_queries(path: Path) -> "list[Query]":
    """Queries from a file: JSON lines where its name ends in .jsonl, else one a line.

    Raises:
        TextError: It cannot be read, or a line is no query.
    """
    from graven.tasks.queries import parse_queries

    return parse_queries(read_text(str(path)), lines_of_json=path.suffix == ".jsonl")


def read_text(name: str) -> str:
    """A UTF-8 text from a file or from standard input; a byte order mark is no part of it.

    Raises:
        TextError: It cannot be read, or is not UTF-8.
    """
    if name == "-" and sys.stdin is None:
        raise TextError("standard input is closed; give the path of a text file, or open it.")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {name}: {error.strerror}. Give the path of a text file, or - for standard input.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}); convert it first.") from error


def show(facts: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """One JSON object, or lines for a person."""
    say(json.dumps(facts) if as_json else "\n".join(lines))


def say(text: str, *, end: str = "\n") -> None:
    """To standard output, by the first of several processes; what its encoding lacks, and bytes of a file name that are no text, are spelled out.

    Raises:
        OutputError: It takes no more.
    """
    if not here().first or sys.stdout is None:
        return
    encoding = sys.stdout.encoding
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:  # whoever read has read enough
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}.") from error


def note(text: str) -> None:
    """To standard error."""
    print(f"graven: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int, float, float], None]]:
    """A bar on standard error while a terminal watches; yields what to call with step, loss and accuracy."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"), TextColumn("step {task.completed}" + ("/{task.total}" if total else "")),
        TextColumn("loss {task.fields[loss]:.3f}{task.fields[right]}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty() or not here().first,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=total, loss=float("nan"), right="")
        yield lambda step, loss, accuracy: bar.update(task, completed=step, loss=loss, right="" if isnan(accuracy) else f"  right {accuracy:.1%}")
