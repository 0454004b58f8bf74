"""The command line. A verb parses, calls one function, and prints: results to standard output, everything else to standard error.

Exit 0 done, 1 the result fell short of what was asked, 2 wrong use (one line, no traceback), 130 interrupted.
"""

import sys
from collections.abc import Generator, Sequence
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from graven.errors import GravenError, Outcome, SpecError
from graven.verbs import doctor, many, several, travel
from graven.verbs.base import (
    JsonOption,
    MemoryArgument,
    ModelOption,
    ProbesOption,
    note,
    open_memory,
    open_model,
    progress_bar,
    read_queries,
    read_text,
    say,
    show,
)

if TYPE_CHECKING:
    from graven.answer import Answer
    from graven.memory.file import Memory, Quantization

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(several.verbs)
app.add_typer(many.verbs)
app.add_typer(travel.verbs)
app.add_typer(doctor.verbs)

INTERRUPTED = 130  # what typer makes of Ctrl-C


@app.command()
def demo(
    png: Annotated[Path, typer.Option("--png", metavar="FILE", help="Where the picture goes.")] = Path("graven-demo.png"),
) -> int:
    """Write 16 records into 8 vectors, step by step, and answer every query from memory."""
    from graven.demo import draw, run
    from graven.model import RecordsModel, load
    from graven.report import ensure_writable

    ensure_writable(png)
    model = load("records")
    assert isinstance(model, RecordsModel)
    shown = run(model)
    draw(shown, png)
    count = len(shown.answers)
    say(f"{count} records ({shown.text_bytes} bytes of text) into {shown.states.shape[1]} vectors ({shown.memory_bytes} bytes)\n")
    for step, (loss, right) in enumerate(zip(shown.losses, shown.right, strict=True)):
        say(f"step {step}   write loss {loss:.3f}   {'#' * right}{'.' * (count - right)}  {right}/{count} answered")
    say("\nThe text is gone. From the memory alone:\n")
    cells = [f"{key} -> {text} {'ok' if good else 'WRONG'}" for key, text, good in shown.answers]
    for first in range(0, count, 4):
        say("   ".join(f"{cell:<14}" for cell in cells[first : first + 4]).rstrip())
    times = shown.cache_bytes / shown.memory_bytes
    say(f"\nmemory {shown.memory_bytes} bytes, KV cache of the same text {shown.cache_bytes} bytes ({times:.0f} times)")
    say(f"picture: {png}")
    return 0 if all(good for _, _, good in shown.answers) else 1


@app.command()
def write(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A UTF-8 text, or - for standard input.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The memory file to write.")],
    model: ModelOption = None,
    slots: Annotated[int | None, typer.Option(metavar="N", help="Vectors for each page, from the length of the text; 8 for a distilled one.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="K", help="Most gradient steps; the model's own number; frozen 1000, distilling 60.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Step of a frozen model, in spreads of embeddings; 0.3, distilling 0.1.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="S", help="Stop after so many seconds and keep the best so far.")] = None,
    seed: Annotated[int, typer.Option(help="Of the start vectors.")] = 0,
    objective: Annotated[
        str | None, typer.Option(metavar="NAME", help="`reconstruct`, `continue`, `distill`, or a sum: reconstruct=1,continue=0.5. reconstruct.")
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What will be asked behind a distilled prompt; left out, the model asks itself.")
    ] = None,
    study_prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the model asks itself with, a prompt a line; {} stands for what it writes.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The memory stands inside the user turn of the model's chat template.")] = False,
    probes: ProbesOption = None,
    json: JsonOption = False,
) -> int:
    """Write a text into a memory file. With `records` (the default): one `key:value` a line; with `stories`: a story of its small world."""
    from graven.memory.file import ensure_replaceable
    from graven.tasks.queries import parse_prompts
    from graven.written import Wish, facts_of, lines_of, shortfalls, written

    text = read_text(file)
    wish = Wish(
        objective=objective,
        queries=None if queries is None else read_queries(queries),
        study_prompts=None if study_prompts is None else parse_prompts(read_text(str(study_prompts)), lines_of_json=study_prompts.suffix == ".jsonl"),
        chat=chat,
        probes=probes,
    )
    ensure_replaceable(out)
    with progress_bar("writing", quiet=json) as tick:
        done = written(
            open_model("records" if model is None else model, slots=slots),
            text,
            wish,
            steps=steps,
            rate=rate,
            seed=seed,
            deadline=deadline,
            progress=tick,
        )
    done.memory.save(out)
    show(facts_of(done, out), lines_of(done, out), as_json=json)
    short, warnings = shortfalls(done)
    for line in [*warnings, *short]:
        note(line)
    return 1 if short else 0


@app.command()
def ask(
    memory: MemoryArgument,
    query: Annotated[list[str], typer.Argument(metavar="QUERY...", help="A key, a question, or the beginning of a text.")],
    model: ModelOption = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Most tokens of an answer; 64, or a value's length.")] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", metavar="N", help="No end before so many tokens.")] = 0,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="Draw the answer; logits are divided by T.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", help="Draw among the K most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", help="Draw among the tokens that together have probability P.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    beams: Annotated[int, typer.Option(metavar="N", help="Search with so many beams.")] = 1,
    count: Annotated[int, typer.Option(metavar="N", help="Answers to each query, drawn or of the beams.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="An answer ends before this text; may be given several times.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer to one query as it comes.")] = False,
    json: JsonOption = False,
) -> int:
    """Answer queries from a memory alone."""
    from dataclasses import asdict

    from graven.answer import rule_of
    from graven.decoding import Decoding

    decoding = Decoding(
        min_tokens=min_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, beams=beams, count=count, stop=tuple(stop or ())
    )
    if isdir(memory):
        return many.ask_folder(memory, query, model=model, max_tokens=max_tokens, decoding=decoding, stream=stream, as_json=json)
    if stream and (json or len(query) > 1):
        raise SpecError("--stream prints the answer to one query as it comes; ask one query, and leave --json out.")
    loaded, reader = open_memory(memory, model)
    rule = rule_of(loaded.about) if loaded.about.kind == "text" else None
    if stream:
        answers = [streamed(reader.stream(loaded, query[0], max_tokens=max_tokens, decoding=decoding))]
    else:
        answers = reader.ask_many(loaded, query, max_tokens=max_tokens, decoding=decoding)
        lines = [a.text if len(answers) == 1 else f"{a.query}\t{a.text}" for a in answers]
        show({"answers": [asdict(a) for a in answers], "rule": rule and asdict(rule)}, lines, as_json=json)
    unknown = [a for a in answers if not a.known]
    for a in unknown:
        if rule is None:
            note(f"{a.query!r} is not a key of this memory; {a.text!r} is a guess")
        else:
            sure = f"of log probability {a.log_probability:.2f} with it and {a.log_probability_without:.2f} without"
            note(f"{a.query!r} is not in memory; {a.text!r}, {sure}, is a guess; {rule.errors}")
    return 1 if unknown else 0


@app.command()
def recite(memory: MemoryArgument, model: ModelOption = None, json: JsonOption = False) -> int:
    """What the model reproduces from the memory when it runs freely."""
    loaded, reader = open_memory(memory, model)
    recital = reader.recite(loaded)
    show({"text": recital.text, "exact": recital.exact, "tokens": recital.tokens}, [recital.text], as_json=json)
    if not recital.exact:
        about = loaded.about
        note(f"not the text that was written: at the write, {about.recited} of {about.tokens} tokens were reproduced before the first miss")
    return 0 if recital.exact else 1


@app.command()
def verify(
    memory: MemoryArgument,
    against: Annotated[str, typer.Option(metavar="FILE", help="The text that was written, or - for standard input.")],
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions to measure with, as of `write --queries`; the model asks its own where left out.")
    ] = None,
    probes: ProbesOption = None,
    model: ModelOption = None,
    json: JsonOption = False,
) -> int:
    """Measure a memory anew against its text; exit 1 where it falls short of what its file says."""
    from dataclasses import asdict

    from graven.fidelity import verified_lines

    text, asked = read_text(against), None if questions is None else read_queries(questions)
    loaded, reader = open_memory(memory, model)
    found = reader.verify(loaded, text, questions=asked, probes=probes)
    show({"path": str(memory), **asdict(found)}, verified_lines(found, loaded.about), as_json=json)
    for line in found.shortfalls:
        note(line)
    return 1 if found.shortfalls else 0


@app.command()
def inspect(memory: MemoryArgument, json: JsonOption = False) -> int:
    """Everything that a memory file says of itself; no model is loaded."""
    from dataclasses import asdict

    from graven.memory.file import Memory

    loaded = Memory.load(memory)
    facts = {
        "path": str(memory), **asdict(loaded.about), "tokens": loaded.about.tokens, "bytes": loaded.bytes, "recited_tokens": loaded.about.recited,
        "content_hash": loaded.content_hash,
    }  # fmt: skip
    show(facts, inspect_lines(loaded), as_json=json)
    return 0


@app.command()
def train(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; runs/<name of the spec>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in that folder.")] = False,
    workers: Annotated[int, typer.Option(metavar="N", help="Micro-batches side by side, a core each; the result is the same.")] = 1,
) -> int:
    """Meta-train a memory: of a small model on records or stories, or of a language model on texts, questions and answers."""
    import torch

    from graven.train import TrainSpec, longest
    from graven.train_triples import read_spec
    from graven.train_triples import train as run_training

    settings = read_spec(spec)
    if isinstance(settings, TrainSpec):
        torch.set_num_threads(1)  # as in `open_model`; more cores are for --workers
    folder = out or Path("runs") / spec.stem
    with progress_bar("training", total=longest(settings)) as tick:
        run_training(
            settings, folder, resume=resume, workers=workers, note=note, report=lambda row: tick(row["step"] + 1, row["loss"], row["exact_match"])
        )
    bench = isinstance(settings, TrainSpec) and settings.memory.kind != "gradmem"
    say(f"checkpoint: {folder}" + ("" if bench else f"   use it with: graven write FILE --model {folder} -o OUT"))
    return 0


@app.command()
def audit(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A gated RNN that `graven.audit.checkpoint.save_layer` wrote.")],
    teacher: Annotated[Path | None, typer.Option(metavar="FILE", help="The attention it should be; its own nearest one.")] = None,
    length: Annotated[int, typer.Option(metavar="T", help="Tokens of a sequence, as in training.")] = 32,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put audit.txt, audit.json and audit.png.")] = None,
    json: JsonOption = False,
) -> int:
    """Find out what a recurrent layer computes: attention, a gradient step, or neither."""
    import torch

    from graven.audit.checkpoint import load_layer, load_teacher
    from graven.audit.explain import explain

    torch.set_num_threads(1)  # as in `open_model`
    layer, head = load_layer(checkpoint), None if teacher is None else load_teacher(teacher)
    report = explain(layer, head, length=length)
    if out is not None:
        report.save(out)
    show(report.facts(), [report.text()], as_json=json)
    return 1 if report.kind == "neither" else 0


@app.command()
def size(
    rank: Annotated[int, typer.Option(metavar="R", help="Effective rank of the attention.")],
    form: Annotated[str, typer.Option(metavar="F", help="naive, symmetric, symmetric_fast, low_rank, minimal, side or side_symmetric.")] = "minimal",
    width: Annotated[int | None, typer.Option(metavar="D", help="Of a token; twice the rank for low_rank and minimal, the rank for others.")] = None,
    json: JsonOption = False,
) -> int:
    """How many neurons a gated RNN needs to be attention of some rank, and how many to give one that shall learn it."""
    from graven.theory.capacity import provision

    found = provision(rank=rank, form=cast("Any", form), width=width)
    facts = {"rank": rank, "form": form, "width": found.width, "needed": found.needed._asdict(), "provided": found.provided._asdict()}
    lines = [
        f"{name:<12} {count.hidden} hidden neurons, {count.output_gates} outputs, {count.parameters} parameters"
        for name, count in (("needed", found.needed), ("to train", found.provided))
    ]
    show(facts, lines, as_json=json)
    return 0


def inspect_lines(memory: "Memory") -> list[str]:
    """Metadata for a person."""
    from graven.fidelity import lines_of

    about = memory.about
    return [
        f"kind            {about.kind}, format {about.version}",
        f"model           {about.base.name}" + (f" at {about.base.revision}" if about.base.revision else ""),
        f"fingerprint     {about.base.fingerprint}",
        f"memory          {len(about.pages)} x {about.slots} vectors, {memory.bytes} bytes",
        f"text            {about.tokens} tokens",
        f"written by      {about.rule}, {about.steps} steps, seed {about.seed}, {about.seconds:.1f} s, {', '.join(about.versions)}",
        f"descended       {about.objective}" + (f", behind {len(about.before)} tokens of the chat template" if about.chat else ""),
        f"loss            {about.losses[0]:.4f} -> {about.losses[-1]:.4f} nats a token" if about.losses else "loss            no step was taken",
        f"fidelity        recites {about.recited} of {about.tokens} tokens; teacher-forced accuracy {about.token_accuracy:.4f}",
        *([] if about.fidelity is None else [f"                {line}" for line in lines_of(about.fidelity)]),
        *([] if about.answered is None else [f"answers         {about.answered} of {records_in(memory)} queries"]),
        *([] if about.quantization is None else [f"quantized       {quantized_line(about.quantization)}"]),
        f"outcome         {Outcome[about.outcome].value}",
        f"content hash    {memory.content_hash}",
        "A memory can reproduce its text by design: keep this file as you would keep the text.",
    ]


def quantized_line(how: "Quantization") -> str:
    """How a memory was made smaller and what that cost."""
    kept = how.kept
    same = round((kept.exact or 0) * kept.queries)
    return f"{how.bits} bits in groups of {how.group}; {same} of {kept.queries} stayed the same, KL {kept.kl:.2g} nats a token"


def records_in(memory: "Memory") -> int:
    """Records of a memory of kind `records`."""
    return memory.about.records or 0


def streamed(pieces: "Generator[str, None, Answer]") -> "Answer":
    """Print an answer as it comes."""
    while True:
        try:
            say(next(pieces), end="")
        except StopIteration as end:
            say("")
            answer: Answer = end.value
            return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = int(app(words or ["--help"], prog_name="graven", standalone_mode=False) or 0)
    except GravenError as error:
        note(" ".join(str(error).split()))
        return 2
    except typer.TyperException as error:
        note(f"{' '.join(error.format_message().split()).rstrip('.')}. Try graven --help.")
        return 2
    if code == INTERRUPTED:
        note("interrupted; no half-written file is left, and a training goes on with --resume")
    return code


if __name__ == "__main__":
    sys.exit(main())
