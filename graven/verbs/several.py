"""Verbs over several memories: one text more, two in one, a part of one, two side by side."""

import re
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from graven.errors import SpecError
from graven.verbs.base import (
    JsonOption,
    MemoryArgument,
    ModelOption,
    ProbesOption,
    note,
    open_memory,
    open_model,
    progress_bar,
    read_text,
    show,
)

if TYPE_CHECKING:
    from graven.memory.file import Memory
    from graven.memory.several import Difference
    from graven.model import Model, RecordsModel, TextModel
    from graven.models.base import ProgressCall
    from graven.several import Changed, Kept, Settings

verbs = typer.Typer()

OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The memory file to write; may be the one that was read.")]
IntoOption = Annotated[
    Literal["page", "vectors"],
    typer.Option(help="A page more, or the vectors that are there, which descend on what they recite and the new text together."),
]
StepsOption = Annotated[int | None, typer.Option(metavar="K", help="Most gradient steps of what is written; as of `write`.")]
RateOption = Annotated[float | None, typer.Option(metavar="R", help="Step of a frozen model; as of `write`.")]
DeadlineOption = Annotated[float | None, typer.Option(metavar="S", help="Stop after so many seconds and keep the best so far.")]
SeedOption = Annotated[int, typer.Option(help="Of the start vectors and of the questions.")]


@verbs.command()
def append(
    memory: MemoryArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A UTF-8 text, or - for standard input.")],
    out: OutOption,
    into: IntoOption = "page",
    model: ModelOption = None,
    steps: StepsOption = None,
    rate: RateOption = None,
    deadline: DeadlineOption = None,
    seed: SeedOption = 0,
    probes: ProbesOption = None,
    json: JsonOption = False,
) -> int:
    """Write one text more into a memory; say what is left of the old one. Exit 1 where something is lost."""
    from graven.memory.file import ensure_replaceable
    from graven.several import append as append_text

    text = read_text(file)
    ensure_replaceable(out)
    loaded, reader = open_memory(memory, model)
    with progress_bar("appending", quiet=json) as tick:
        settings = settings_of(steps=steps, rate=rate, deadline=deadline, seed=seed, probes=probes, progress=tick)
        done = append_text(cast("TextModel | RecordsModel", reader), loaded, text, into=into, settings=settings)
    return _told(done, out, as_json=json)


@verbs.command()
def merge(
    one: Annotated[Path, typer.Argument(metavar="A", help="A memory.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another memory of the same model.")],
    out: OutOption,
    into: IntoOption = "page",
    model: ModelOption = None,
    steps: StepsOption = None,
    rate: RateOption = None,
    deadline: DeadlineOption = None,
    seed: SeedOption = 0,
    probes: ProbesOption = None,
    json: JsonOption = False,
) -> int:
    """Two memories of one model in one file; say what is left of each text. Exit 1 where something is lost."""
    from graven.memory.file import ensure_replaceable
    from graven.several import merge as merge_memories

    ensure_replaceable(out)
    first, second, reader = open_both(one, other, model)
    with progress_bar("merging", quiet=json) as tick:
        settings = settings_of(steps=steps, rate=rate, deadline=deadline, seed=seed, probes=probes, progress=tick)
        done = merge_memories(cast("TextModel | RecordsModel", reader), first, second, into=into, settings=settings, names=(str(one), str(other)))
    return _told(done, out, as_json=json)


@verbs.command()
def fork(
    memory: MemoryArgument,
    out: OutOption,
    pages: Annotated[str | None, typer.Option(metavar="P", help="Only these, in this order: 2, 1-3, 4,1.")] = None,
    json: JsonOption = False,
) -> int:
    """A memory of its own from all or some pages of another, bit for bit; no model is loaded."""
    from graven.memory.file import Memory, ensure_replaceable
    from graven.memory.several import fork as fork_memory

    ensure_replaceable(out)
    forked = fork_memory(Memory.load(memory), None if pages is None else numbers(pages))
    forked.save(out)
    about, hashed = forked.about, forked.content_hash
    facts = {"path": str(out), "pages": len(about.pages), "tokens": about.tokens, "bytes": forked.bytes, "content_hash": hashed}
    show(facts, [f"{out}: {_size(forked)}, content hash {hashed}"], as_json=json)
    return 0


@verbs.command()
def diff(
    one: Annotated[Path, typer.Argument(metavar="A", help="A memory.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another memory of the same model.")],
    model: ModelOption = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="Compare the files alone; no model is loaded, and nothing is recited.")] = False,
    json: JsonOption = False,
) -> int:
    """Two memories page by page: vectors, settings, and what each recites. Exit 1 where they differ."""
    from graven.memory.file import Memory
    from graven.memory.several import difference
    from graven.several import told

    first, second = Memory.load(one), Memory.load(other)
    found = difference(first, second)
    recited: list[str] | None = None
    if not vectors:
        reader = cast("TextModel | RecordsModel", open_model(first.about.base.name if model is None else model))
        recited = recited_lines(told(reader, first), told(reader, second), names=(str(one), str(other)))
    facts = {
        "same": found.none,
        "pages": [asdict(pair) | {"distance": pair.distance if isfinite(pair.distance) else None} for pair in found.same],
        "only": [list(found.only_one), list(found.only_other)],
        "fields": found.fields,
        "recited": recited,
    }
    show(facts, [*diff_lines(found, names=(str(one), str(other))), *(recited or [])], as_json=json)
    return 0 if found.none and not recited else 1


def open_both(one: Path, other: Path, model: str | None) -> "tuple[Memory, Memory, Model]":
    """Two memories and the model of both, which is loaded only where they have one."""
    from graven.memory.file import Memory
    from graven.memory.several import ensure_one_model

    first, second = Memory.load(one), Memory.load(other)
    ensure_one_model(first, second)
    return first, second, open_model(first.about.base.name if model is None else model)


def settings_of(
    *, steps: int | None, rate: float | None, deadline: float | None, seed: int, probes: int | None, progress: "ProgressCall"
) -> "Settings":
    """Of a write that changes a memory."""
    from graven.several import PROBES, Settings

    asked = PROBES if probes is None else probes
    return Settings(steps=steps, rate=rate, deadline=deadline, seed=seed, probes=asked, progress=progress)


def numbers(pages: str) -> list[int]:
    """Pages counted from 0, from a list counted from 1.

    >>> numbers("2,4-5")
    [1, 3, 4]

    Raises:
        SpecError: It is no such list.
    """
    found: list[int] = []
    for part in pages.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise SpecError(f"`pages` is {pages!r}; numbers from 1 were expected, as in 2 or 1-3,5.")
        found += range(int(match[1]) - 1, int(match[2] or match[1]))
        if len(found) > 1_000_000:
            raise SpecError(f"`pages` is {pages!r}; no memory has so many.")
    return found


def _told(done: "Changed", out: Path, *, as_json: bool) -> int:
    from graven.errors import Outcome

    done.memory.save(out)
    about = done.memory.about
    facts = {
        "path": str(out), "pages": len(about.pages), "slots": about.slots, "tokens": about.tokens, "bytes": done.memory.bytes,
        "outcome": about.outcome, "kept": [{**asdict(kept), "lost": kept.lost} for kept in done.kept],
    }  # fmt: skip
    show(facts, [f"{out}: {_size(done.memory)}", *[kept_line(kept) for kept in done.kept]], as_json=as_json)
    lost = [kept.name for kept in done.kept if kept.lost]
    for name in lost:
        note(f"a part of the text {name!r} came back before and does not now; raise --steps, or use --into page")
    short = Outcome[about.outcome] not in (Outcome.DONE, Outcome.EXACT, Outcome.CLOSE)
    if short:
        note(Outcome[about.outcome].value)
    return 1 if lost or short else 0


def _size(memory: "Memory") -> str:
    about = memory.about
    pages = "" if len(about.pages) == 1 else f"{len(about.pages)} pages of "
    return f"{about.tokens} tokens in {pages}{about.slots} vectors, {memory.bytes} bytes"


def kept_line(kept: "Kept") -> str:
    """What is left of a text, with what was there before in brackets."""
    parts: list[str] = []
    if kept.recited is not None and kept.token_accuracy is not None:
        (was, now), (right_before, right) = kept.recited, kept.token_accuracy
        parts.append(f"recites {now} of {kept.tokens} tokens ({'-' if was is None else was})")
        parts.append(f"teacher-forced accuracy {right:.1%} ({'-' if right_before is None else f'{right_before:.1%}'})")
    if kept.answered is not None:
        parts.append(f"{kept.answered[1]} records answered right ({kept.answered[0]})")
    if kept.same_answers is not None:
        parts.append(f"{kept.same_answers:.0%} of {kept.queries} answers as before")
    return f"{kept.name}: " + (", ".join(parts) or "not measured")


def diff_lines(found: "Difference", *, names: tuple[str, str]) -> list[str]:
    """Pages and settings, for a person."""
    lines = [f"page {pair.one + 1} = page {pair.other + 1}, {_apart(pair.distance)}" for pair in found.same]
    for name, pages in zip(names, (found.only_one, found.only_other), strict=True):
        lines += [f"page {page + 1} only in {name}" for page in pages]
    return [*lines, *[f"{name}: {a!r}, {b!r}" for name, (a, b) in found.fields.items()]]


def _apart(distance: float) -> str:
    return "the same bits" if distance == 0.0 else f"the same text, vectors apart by {distance:.3g} of their norm"


def recited_lines(one: str, other: str, *, names: tuple[str, str]) -> list[str]:
    """A unified difference of two recitals, a word a line where there is but one line; none where they are equal."""
    from difflib import unified_diff

    several = "\n" in one or "\n" in other
    before, after = (text.splitlines() if several else text.split() for text in (one, other))
    return list(unified_diff(before, after, names[0], names[1], lineterm="", n=1))
