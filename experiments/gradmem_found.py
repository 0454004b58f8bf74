"""Does a memory tell what is in it from what is not?                                                             ours

Claim    An answer is in memory where it adds to its probability and costs no more than the text does: `graven.answer.FOUND_GAIN`, `FOUND_LOSS`.
Differs  No paper has this. Stories are drawn from the model itself, so that it would say some of them without the memory too.
Cost     stories260K: 2.5 CPU minutes, a text 4 to 8 seconds. SmolLM2-135M: 140 to 150 CPU seconds a text, 215 a distilled one.   (measured)

Eight stories of 60 tokens, or four sentences of Short SQuAD, are written into eight vectors each. A memory is asked for what follows the beginnings
of its text, pieces of it, and the same of another text; SmolLM2 also the questions of Short SQuAD about both. An answer has eight tokens. It is right

    reconstruct, continue   to a beginning or a piece: where piece and answer stand in the memory's own text, so, one behind the other; a story begins
                            as others do, so that this may be so of a piece of another story too
                            to a question: where the question is about the text, and the answer of the data set stands in the answer
    distill                 where the question is about the text, and the answer is what the model says with the text in front

The thresholds are those of `graven.answer`; texts of even number are those to calibrate with, the rates of the others are held out.

    python experiments/gradmem_found.py --model DIR                                                       stories that the model draws
    python experiments/gradmem_found.py --model DIR --name SmolLM2-135M --texts short_squad/dev.jsonl --objective reconstruct distill
    python experiments/gradmem_found.py --report                                                          rates and figure from the rows
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graven.answer import FOUND_GAIN, FOUND_LOSS, Reader
from graven.decoding import Decoding
from graven.distill import RATE, Distillation, asked_of, distil_prompt, held_apart
from graven.fidelity import QUESTION, probe
from graven.lm import Pretrained, load_pretrained
from graven.lm.cached import Prompted
from graven.memory.file import Memory
from graven.models.base import memory_of
from graven.models.text import TextModel
from graven.report import figure, read_lines, write_lines
from graven.study import self_study
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "gradmem_found.jsonl"
SLOTS, ANSWER, SEED = 8, 8, 1
STORIES, TOKENS, SENTENCES, WORDS = 8, 60, 4, range(25, 33)
BEGINNINGS, PIECES, PIECE = (1, 2, 3, 5, 8, 12, 18, 26), 6, 6
STEPS = {"reconstruct": 400, "continue": 200, "distill": 30}
QUERIES = 24  # that the model asks itself for a distilled memory

Row = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """Something to write, and what may be asked about it: question and answer."""

    ids: list[int]
    questions: tuple[tuple[str, str], ...] = ()


def stories_of(model: Pretrained) -> list[Text]:
    """What the model draws."""
    opening = model.embed(Tokens.of([model.opening]))
    drawn = model.generate(opening, Tokens.of([[]]), most=TOKENS, stop=(), decoding=Decoding(temperature=0.9, count=STORIES, seed=SEED))
    return [Text(model.encode(model.decode(story.tokens))) for story in drawn]


def sentences_of(model: Pretrained, file: Path) -> list[Text]:
    """The first contexts of middle length with four questions or more, one a title."""
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        found.setdefault(row["title"], {}).setdefault(row["context"], []).append((row["question"], row["answers"][0]))
    fit = ([(text, asked) for text, asked in own.items() if len(text.split()) in WORDS and len(asked) >= 4] for own in found.values())
    return [Text(model.encode(own[0][0]), tuple(own[0][1][:6])) for own in fit if own][:SENTENCES]


def written(model: Pretrained, ids: list[int], objective: str) -> Memory:
    """One memory, as `graven write` writes it; of a distilled one the controls, which cost as much again, are left out."""
    text = model.decode(ids)
    if objective != "distill":
        return TextModel(model, slots=SLOTS).write(text, objective=objective, steps=STEPS[objective], probes=0)
    asked = asked_of(model, [Query(line) for line in self_study(model, ids, count=QUERIES, prompts=QUESTION)])
    spec = Distillation(
        slots=SLOTS, weights={"distill": 1.0}, steps=STEPS["distill"], rate=RATE, opening=tuple(model.opening), controls=(), until=0.0
    )
    done = distil_prompt(model, ids, *held_apart(asked, seed=0), spec, stop=model.stop)
    return memory_of(done.engraved, Tokens.of([ids]), model=model, kind="text", rule="Adam", seed=0, lossless=True, objective="distill")


def asked_about(model: Pretrained, text: Text, *, own: bool, generator: torch.Generator) -> Iterator[tuple[str, bool, list[int], str | None]]:
    """Kind, whether it is about the memory's own text, tokens and, of a question, the right answer."""
    starts = torch.randperm(len(text.ids) - PIECE - ANSWER, generator=generator)[:PIECES].tolist()
    for kind, cuts in (
        ("beginning", [(0, length) for length in BEGINNINGS if length + ANSWER <= len(text.ids)]),
        ("piece", [(start, start + PIECE) for start in starts]),
    ):
        yield from ((kind, own, text.ids[a:b], None) for a, b in cuts)
    yield from (("question", own, model.encode(f"\n\nQuestion: {question}\nAnswer:"), answer) for question, answer in text.questions)


def measure(model: Pretrained, texts: list[Text], number: int, objective: str) -> list[Row]:
    """One memory; one row an answer."""
    began, text = time.process_time(), texts[number]
    memory = written(model, text.ids, objective)
    wrote = time.process_time()
    reader = Reader(model, memory)
    generator = torch.Generator().manual_seed(number)
    asked = [
        one
        for own, other in ((True, text), (False, texts[(number + 1) % len(texts)]))
        for one in asked_about(model, other, own=own, generator=generator)
    ]
    rows = [ids for _, _, ids, _ in asked]
    said = [one for ((_, one),) in reader.found(rows, most=ANSWER)]
    without = reader.without(rows, [one.whole for one in said])
    prompted = Prompted(model, reader.behind(text.ids)[0])
    behind = [one.tokens for one in prompted.follow(rows, most=ANSWER, stop=model.stop)]
    probing = time.process_time()
    probed = probe(reader, text.ids, count=4, seed=0)
    stamp = {
        "model": model.name, "objective": objective, "text": number, "loss": memory.about.losses[-1], "recited": memory.about.recited / len(text.ids),
        "steps": memory.about.steps, "found": probed and probed.found, "false_found": probed and probed.false_found, "seed": SEED,
        "write_seconds": round(wrote - began, 1), "probe_seconds": round(time.process_time() - probing, 1),
        "cpu_seconds": round(time.process_time() - began, 1), "torch": str(torch.__version__),
    }  # fmt: skip
    return [
        {
            "kind": kind, "own": own, "right": right(model, text.ids, objective, own, ids, answer, one.whole, taught), "tokens": len(one.whole),
            "log_probability": sum(one.log_probabilities), "without": alone, "query": len(ids),
        } | stamp
        for (kind, own, ids, answer), one, alone, taught in zip(asked, said, without, behind, strict=True)
    ]  # fmt: skip


def right(
    model: Pretrained, text: list[int], objective: str, own: bool, ids: list[int], answer: str | None, said: list[int], taught: list[int]
) -> bool:
    """Whether an answer is right in the sense of the head of this file."""
    if objective == "distill":
        return own and said == taught
    if answer is not None:
        return own and answer.lower() in model.decode(said).lower()
    whole = ids + said
    return any(text[at : at + len(whole)] == whole for at in range(len(text)))


def gain(row: Row) -> float:
    """What the memory adds, nats a token."""
    return float(row["log_probability"] - row["without"]) / int(row["tokens"])


def sure(row: Row) -> float:
    """How sure the model is with it, beside how sure it is of the text: -1 where both are the same."""
    return float(row["log_probability"] / row["tokens"] / row["loss"])


def known(row: Row) -> bool:
    """The rule of `graven.answer`."""
    return gain(row) >= FOUND_GAIN and (row["objective"] == "distill" or sure(row) >= -FOUND_LOSS)


def rates(rows: list[Row]) -> str:
    """Errors of the rule on some rows."""
    parts = [row for row in rows if row["right"]], [row for row in rows if not row["right"]]
    missed, passed = (f"{sum(known(row) == bad for row in part)} of {len(part)}" for part, bad in zip(parts, (False, True), strict=True))
    return f"right answers missed {missed}, wrong ones passed {passed}"


def separation(rows: list[Row], of: Callable[[Row], float]) -> float:
    """Probability that a right answer has more of it than a wrong one: the area under the curve of errors."""
    good, bad = ([of(row) for row in rows if row["right"] == which] for which in (True, False))
    return sum((a > b) + 0.5 * (a == b) for a in good for b in bad) / max(1, len(good) * len(bad))


def groups_of(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """By model and objective."""
    names = sorted({(row["model"], row["objective"]) for row in rows}, reverse=True)
    return {name: [row for row in rows if (row["model"], row["objective"]) == name] for name in names}


def lines_of(rows: list[Row]) -> list[str]:
    """Rates of each model and objective, and of what was asked."""
    lines = [f"a gain of {FOUND_GAIN} nats a token and, unless distilled, at most {FOUND_LOSS} times the loss of the text"]
    for (model, objective), own in groups_of(rows).items():
        lines.append(f"\n{model}, {objective}: {len({row['text'] for row in own})} texts, {len(own)} answers")
        lines.append(f"  to calibrate with: {rates([row for row in own if row['text'] % 2 == 0])}")
        lines.append(f"  held out:          {rates([row for row in own if row['text'] % 2])}")
        for kind in sorted({row["kind"] for row in own}):
            about, other = ([row for row in own if row["kind"] == kind and row["own"] == which] for which in (True, False))
            lines.append(f"  {kind:<10} of its text: {rates(about)}; of another text: {rates(other)}")
        lines.append(f"  separation by the gain {separation(own, gain):.2f}, by the log probability {separation(own, sure):.2f}; chance 0.50")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Every answer, by what the memory adds to it and what it costs with it; a panel a model and objective."""
    groups = groups_of(rows)
    with figure(path, width=3.4 * len(groups), height=3.6, columns=len(groups)) as panels:
        for axes, ((model, objective), own) in zip(panels, groups.items(), strict=True):
            unit = [1.0 if objective == "distill" else row["loss"] for row in own]
            cost = {id(row): -row["log_probability"] / row["tokens"] / one for row, one in zip(own, unit, strict=True)}
            for label, colour, part in (
                ("another text, wrong", "#9a9a9a", [row for row in own if not row["own"] and not row["right"]]),
                ("own text, wrong", "#c8553d", [row for row in own if row["own"] and not row["right"]]),
                ("right", "#3b6ea5", [row for row in own if row["right"]]),
            ):
                axes.plot([gain(row) for row in part], [cost[id(row)] for row in part], "o", ms=3, alpha=0.7, color=colour, label=label)
            axes.axvline(FOUND_GAIN, color="black", lw=0.8, ls=":")
            if objective != "distill":
                axes.axhline(FOUND_LOSS, color="black", lw=0.8, ls=":")
            axes.set(title=f"{model}, {objective}", xlabel="what the memory adds, nats a token", yscale="log")
            axes.set_ylabel("cost of the answer, nats a token" if objective == "distill" else "cost of the answer, losses of the text")
            ticks = [tick for tick in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if min(cost.values()) <= tick <= max(cost.values())]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.invert_yaxis()
        panels[0].legend(frameon=False, fontsize=7)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="Short SQuAD; stories are drawn from the model where left out")
    parser.add_argument("--objective", choices=STEPS, nargs="+", default=list(STEPS))
    parser.add_argument("--count", type=int, help="write the first so many texts; all where left out")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        if arguments.model is None:
            parser.error("give --model, the directory of a model, or --report")
        model = load_pretrained(arguments.model).requires_grad_(False)
        model.name = arguments.name or Path(arguments.model).name
        texts = sentences_of(model, arguments.texts) if arguments.texts else stories_of(model)
        for objective in arguments.objective:
            for number in range(arguments.count or len(texts)):
                rows = read_lines(PLACE)
                if (model.name, objective, number) not in {(row["model"], row["objective"], row["text"]) for row in rows}:
                    rows += measure(model, texts, number, objective)
                    print({key: value for key, value in rows[-1].items() if "seconds" in key}, file=sys.stderr, flush=True)
                    write_lines(PLACE, rows)
    rows = read_lines(PLACE)
    draw(rows, HERE.parent / "docs" / "figures" / "gradmem_found.png")
    print("\n".join(lines_of(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
