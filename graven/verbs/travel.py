"""Verbs that take a memory somewhere else: to other tools and back, and into fewer bits."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from graven.verbs.base import JsonOption, MemoryArgument, ModelOption, note, open_memory, open_model, read_text, show

verbs = typer.Typer()


@verbs.command("export")
def export(
    memory: MemoryArgument,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="peft, cartridge, vllm, vllm-chat or tensor.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="A folder for peft and cartridge, a file for the others.")],
    model: ModelOption = None,
    question: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What stands behind the memory in a body or a tensor; may be given several times.")
    ] = None,
    page: Annotated[int | None, typer.Option(metavar="N", help="The page of several, counted from 0.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Most tokens that a server answers; 64.")] = None,
    json: JsonOption = False,
) -> int:
    """Write a memory in the format of PEFT, vLLM or any tensor library."""
    from graven.exchange.exporting import exported

    done = exported(*open_memory(memory, model), to, out, questions=question or (), page=page, max_tokens=max_tokens)
    pages = "" if done.pages == 1 else f"{done.pages} pages of "
    behind = f", {done.questions} with a question behind" if done.questions else ""
    show(asdict(done), [f"{out}: {pages}{done.vectors} vectors for {to}{behind}, {done.bytes} bytes"], as_json=json)
    return 0


@verbs.command("import")
def import_(
    place: Annotated[Path, typer.Argument(metavar="DIR_OR_FILE", help="A prompt-tuning folder of PEFT, or a safetensors file of `inputs_embeds`.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The memory file to write.")],
    model: ModelOption = None,
    json: JsonOption = False,
) -> int:
    """Make a memory of what another tool wrote."""
    from graven.errors import ModelError, SpecError
    from graven.exchange.importing import imported, named_base
    from graven.memory.file import ensure_replaceable
    from graven.model import TextModel

    ensure_replaceable(out)
    name = named_base(place) if model is None else model
    if name is None:
        raise SpecError(f"{place} names no model; name the one whose vectors it holds with --model.")
    reader = open_model(name)
    if not isinstance(reader, TextModel):
        raise ModelError(f"{name} reads records with parts of its own, and vectors of another tool mean nothing to it; name a language model.")
    memory = imported(place, reader.model)
    memory.save(out)
    about, shape = memory.about, list(memory.state.shape)
    facts = {"path": str(out), "model": about.base.name, "shape": shape, "bytes": memory.bytes, "rule": about.rule, "tokens": about.tokens}
    known = f"{about.tokens} tokens of text" if about.tokens else "a text that is not known"
    show(facts | {"content_hash": memory.content_hash}, [f"{out}: {shape[0]} x {shape[1]} vectors of {about.base.name}, of {known}"], as_json=json)
    return 0


@verbs.command("quantize")
def quantize(
    memory: MemoryArgument,
    bits: Annotated[int, typer.Option(metavar="B", help="Of each number, 8 or 4.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The memory file to write.")],
    against: Annotated[str | None, typer.Option(metavar="FILE", help="The text that was written, to measure with; few records need it.")] = None,
    steps: Annotated[
        int, typer.Option(metavar="K", help="Most steps on what is recited, until the smaller memory recites it too; for texts that are exact.")
    ] = 0,
    model: ModelOption = None,
    json: JsonOption = False,
) -> int:
    """Write a memory in fewer bits and measure what that costs; exit 1 where something that it says changed."""
    from graven.memory.file import ensure_replaceable
    from graven.quantize import quantized

    ensure_replaceable(out)
    before, reader = open_memory(memory, model)
    text = None if against is None else read_text(against)
    after = quantized(before, reader, bits=bits, against=text, steps=steps)
    after.save(out)
    how = after.about.quantization
    assert how is not None
    kept, what = how.kept, "answers" if after.about.kind == "records" else "recitals"
    same = round((kept.exact or 0) * kept.queries)
    facts = {"path": str(out), "bytes_before": before.bytes, "bytes": after.bytes, "file_bytes": out.stat().st_size, **asdict(how)}
    line = (
        f"{out}: {bits} bits, {after.bytes} bytes of {before.bytes}; {same} of {kept.queries} {what} are the same, top token {kept.top_token:.1%}, "
        f"KL {kept.kl:.2g} nats a token"
    )
    show(facts, [line], as_json=json)
    if kept.exact != 1:
        settling = after.about.kind == "text" and 0 < before.about.tokens == before.about.recited  # as `settled` wants it
        advice = "give more --steps (100), or keep the larger memory" if settling else "keep the larger memory, or use 8 bits"
        note(f"not all {what} are the same as before; {advice}")
    return 0 if kept.exact == 1 else 1
