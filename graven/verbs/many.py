"""Many texts at once, by one process or several, and a question to a folder of memories."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graven.errors import SpecError
from graven.verbs.base import SMALL, JsonOption, ModelOption, ProbesOption, note, open_model, progress_bar, show

if TYPE_CHECKING:
    from graven.answer import Answer
    from graven.decoding import Decoding
    from graven.folder import Picked
    from graven.many import Row
    from graven.model import Model

verbs = typer.Typer()


@verbs.command("write-many")
def write_many(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help='A folder of .txt files, or JSON lines of {"text": ..., "name": ...}.')],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder of the memories; what is there already is not written again.")],
    model: ModelOption = None,
    slots: Annotated[int | None, typer.Option(metavar="N", help="Vectors for each page; as of `write`.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="K", help="Most gradient steps of each text; as of `write`.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Step of a frozen model; as of `write`.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="S", help="Seconds for each text.")] = None,
    seed: Annotated[int, typer.Option(help="Of the start vectors.")] = 0,
    objective: Annotated[str | None, typer.Option(metavar="NAME", help="As of `write`, distilling excepted.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="As of `write`.")] = False,
    probes: ProbesOption = 0,
    json: JsonOption = False,
) -> int:
    """Write a folder of texts, a memory file each; go on where an earlier run was stopped. Several processes: torchrun."""
    import torch

    from graven.many import Settings, sources_of
    from graven.many import write_many as write_all
    from graven.model import TextModel
    from graven.processes import alone_by_mistake, here
    from graven.written import Wish

    if mistake := alone_by_mistake():
        note(mistake)
    processes, sources = here(), sources_of(source)
    loaded = open_model("records" if model is None else model, slots=slots)
    wish = Wish(objective=objective, chat=chat, probes=probes if isinstance(loaded, TextModel) else probes or None)  # others ask none
    settings = Settings(wish=wish, slots=slots, steps=steps, rate=rate, seed=seed, deadline=deadline)
    if processes.count > 1 or loaded.size < SMALL:
        torch.set_num_threads(1)
    with progress_bar("writing", total=len(sources), quiet=json) as tick:
        done = iter(range(1, len(sources) + 1))
        rows = write_all(loaded, sources, out, settings, processes=processes, report=lambda row, _: tick(next(done), row.seconds, float("nan")))
    if not processes.first:
        return 0
    show({"path": str(out), **totals(rows), "rows": [asdict(row) for row in rows]}, [total_line(rows, out)], as_json=json)
    for row in rows:
        if row.reason:
            note(f"{row.name}: {row.reason}")
    return 1 if any(row.reason for row in rows) else 0


def totals(rows: "Sequence[Row]") -> dict[str, Any]:
    """Counts, and texts per CPU hour of those that were written now."""
    kinds = {kind: sum(row.kind == kind for row in rows) for kind in ("written", "there", "bad")}
    seconds = sum(row.seconds for row in rows if row.kind == "written")
    return {**kinds, "seconds": round(seconds, 3), "texts_per_cpu_hour": round(3600 * kinds["written"] / seconds, 1) if seconds else None}


def total_line(rows: "Sequence[Row]", out: Path) -> str:
    """The same for a person."""
    found = totals(rows)
    speed = "" if found["texts_per_cpu_hour"] is None else f", {found['texts_per_cpu_hour']:.0f} texts per CPU hour"
    return f"{out}: {found['written']} texts written, {found['there']} there already, {found['bad']} bad{speed}"


def ask_folder(
    folder: Path,
    queries: Sequence[str],
    *,
    model: str | None,
    max_tokens: int | None,
    decoding: "Decoding",
    stream: bool,
    as_json: bool,
) -> int:
    """Answer each query from the memory of a folder that it is about; say which, and how sure that is."""
    if stream:
        raise SpecError(f"--stream prints the answer of one memory, and {folder} is a folder; name the file, or leave --stream out.")
    found = folder_answers(folder, queries, model=model, max_tokens=max_tokens, decoding=decoding)
    lines = [text if len(queries) == 1 else f"{query}\t{text}" for query, _, answers in found for text in ([a.text for a in answers] or [""])]
    facts = [
        {"query": query, **(asdict(answer) if answer is not None else {"text": None}), "memory": None if used is None else asdict(used)}
        for query, used, answers in found
        for answer in [*answers, *([None] if not answers else [])]
    ]
    show({"answers": facts}, lines, as_json=as_json)
    missing = False
    for query, used, answers in found:
        if used is None:
            note(f"none of the memories in {folder} has a word of {query!r}; name the one to ask")
        else:
            after = "" if used.next is None else f", ahead of {used.next} by {used.sure:.0%}"
            note(f"{query!r} went to {used.name}{after}")
        missing |= used is None or not all(answer.known for answer in answers)
        for answer in answers:
            if not answer.known:
                note(f"{query!r} is not in that memory; {answer.text!r} is a guess")
    return 1 if missing else 0


def folder_answers(
    folder: Path, queries: Sequence[str], *, model: str | None, max_tokens: int | None, decoding: "Decoding"
) -> "list[tuple[str, Picked | None, list[Answer]]]":
    """Each query, the memory it went to, and the answers from that one. A model is loaded once, whatever number of memories it has."""
    import sqlite3

    from graven.errors import OutputError
    from graven.folder import NAME, Index, picked
    from graven.memory.file import Memory

    models: dict[str, Model] = {}

    def reader(memory: Memory) -> "Model":
        name = memory.about.base.name if model is None else model
        if name not in models:
            models[name] = open_model(name)
        return models[name]

    try:
        with Index(folder) as index:
            for name, fault in index.refresh(lambda memory: reader(memory).recite(memory).text).items():
                note(f"{name} is left out: {fault}")
            used = picked(index, queries)
    except sqlite3.Error as error:
        raise OutputError(f"cannot use {folder / NAME}: {error}. Try again, or move it away.") from error
    found: list[tuple[str, Picked | None, list[Answer]]] = []
    for query, one in zip(queries, used, strict=True):
        answers: list[Answer] = []
        if one is not None:
            memory = Memory.load(folder / one.name)
            answers = reader(memory).ask_many(memory, [query], max_tokens=max_tokens, decoding=decoding)
        found.append((query, one, answers))
    return found
