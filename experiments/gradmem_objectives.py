"""What a frozen model does behind a memory, by what the write descended and by bytes: does it recite, go on from the middle, answer?       ours

Claim    Reconstruction alone makes a frozen model recite, and nothing else. Going on from the middle of the text has to be trained for (`continue`),
         and what the model does with queries as if the text stood there is reached by `distill` only.
Cost     260 000 parameters, 100 steps: 20 CPU seconds a text and size, all five objectives (measured), 4 minutes for the grid of 200 steps.
         SmolLM2-135M: about 15 CPU minutes a text and size (estimated from 1.6 CPU seconds a step of the prompts experiment).

    python experiments/gradmem_objectives.py --model DIR --text FILE [--slots 2 4 8 --texts 3 --steps 300]     measure what has no row yet
    python experiments/gradmem_objectives.py --report                                                          table, figure and verdict

Three measures of each memory: `recited`, the share of the text that the freely running model gives back before its first miss; `continued`, the
share of tokens right in windows that start anywhere, four tokens given; `kl`, the divergence from the model with the whole text in front, on
queries that the model asked itself and that were not trained on. The last has two controls: no text, and the text itself has 0.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graven.distill import SAID_TOKENS, Judge, asked_of, best_start, held_apart
from graven.engrave import hits_of, pursue
from graven.lm import Pretrained, load_pretrained
from graven.lm.cached import Prompted
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.objective import Weighted, continuations, distil, reconstruct
from graven.models.text import TEXT_RATE
from graven.report import figure, read_lines, table, write_lines
from graven.study import self_study
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "gradmem_objectives.jsonl"
KEY = ("model", "source", "text", "slots", "steps")
OBJECTIVES = ("reconstruct", "continue", "distill", "reconstruct + continue", "reconstruct + distill")
MEASURES = {"recited": "share recited", "continued": "share continued from the middle", "kl": "KL to the model with the text, nats"}
TOKENS, QUERIES = 48, 30

Row = dict[str, Any]


def texts_of(model: Pretrained, file: Path, *, count: int) -> list[list[int]]:
    """Pieces that are spread over a file, each from the beginning of a line."""
    text = file.read_text()
    places = [len(text) * (i + 1) // (count + 2) for i in range(count)]
    return [model.encode(text[text.index("\n", place) + 1 :][: 20 * TOKENS])[:TOKENS] for place in places]


def measure(model: Pretrained, ids: list[int], *, slots: int, steps: int, seed: int, rate: float) -> Iterator[Row]:
    """One write of each objective, all from the best of the same four starts at the same rate, and the measures of each."""
    queries = [Query(text) for text in self_study(model, ids, count=QUERIES, seed=seed)]
    train, held_out = held_apart(asked_of(model, queries), seed=seed)
    prompted = Prompted(model, model.embed(Tokens.of([[*model.opening, *ids]]))[0])
    said, judged = ([*prompted.follow([one.ids for one in part], most=SAID_TOKENS, stop=model.stop)] for part in (train, held_out))
    judge, windows = Judge(model, held_out, judged), continuations(ids, seed=seed)
    parts = {"reconstruct": reconstruct(ids), "continue": windows, "distill": distil([one.ids for one in train], said, seed=seed)}
    rule = Adam(rate=rate * model.embedding_scale)
    memory = GradMem(model, GradMemSpec(slots=slots, steps=0, rule=rule, order="none"), seed=seed)
    closed_book = judge(model.embed(Tokens.of([model.opening])))
    for objective in OBJECTIVES:
        began = time.process_time()
        descended = Weighted(tuple((1.0, parts[name]) for name in objective.split(" + ")))
        state = pursue(memory, descended, start=best_start(memory, descended, ids), steps=steps).state
        seconds = time.process_time() - began
        with torch.no_grad():
            _, right = windows.losses(memory, state, range(len(windows.answers)))
        hits, found = hits_of(memory, state, ids), judge(state)
        yield {
            "objective": objective, "slots": slots, "steps": steps, "seed": seed, "rate": rate, "tokens": len(ids), "bytes": 4 * state.numel(),
            "recited": (hits.index(False) if False in hits else len(hits)) / len(hits), "continued": float(right.float().mean()),
            "kl": found.kl, "top_token": found.top_token, "kl_no_text": closed_book.kl, "queries": found.queries,
            "cpu_seconds": round(seconds, 1), "torch": str(torch.__version__),
        }  # fmt: skip


def means(rows: list[Row]) -> dict[tuple[str, int, str], dict[str, float]]:
    """Mean over texts of each measure, by model, bytes and objective."""
    groups = sorted({(row["model"], row["bytes"], row["objective"]) for row in rows})
    by_group = {group: [row for row in rows if (row["model"], row["bytes"], row["objective"]) == group] for group in groups}
    return {group: {name: sum(row[name] for row in own) / len(own) for name in MEASURES} for group, own in by_group.items()}


def verdict(rows: list[Row]) -> list[str]:
    """The claim, for each model and size."""
    found, lines = means(rows), []
    for model, size in sorted({group[:2] for group in found}):
        own = {objective: found[model, size, objective] for objective in OBJECTIVES if (model, size, objective) in found}
        if len(own) < len(OBJECTIVES):
            continue
        for best, measure, sign in ("reconstruct", "recited", 1), ("continue", "continued", 1), ("distill", "kl", -1):
            first = max(("reconstruct", "continue", "distill"), key=lambda objective: sign * own[objective][measure])
            numbers = ", ".join(f"{objective} {own[objective][measure]:.3f}" for objective in own)
            lines.append(f"{'holds' if first == best else 'FAILS'}   {model}, {size} bytes, best at `{measure}` is {best}: {numbers}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Each measure against bytes, a line an objective; one model, the one with the most rows."""
    model = max({row["model"] for row in rows}, key=lambda name: sum(row["model"] == name for row in rows))
    found = means([row for row in rows if row["model"] == model])
    sizes = sorted({group[1] for group in found})
    with figure(path, width=10, height=3.4, columns=3) as panels:
        for axes, (measure, label) in zip(panels, MEASURES.items(), strict=True):
            for mark, objective in zip("os^Dv", OBJECTIVES, strict=True):
                axes.plot(sizes, [found[model, size, objective][measure] for size in sizes], f"{mark}-", ms=4, label=objective)
            axes.set(title=label, xlabel="bytes", xscale="log", xticks=sizes)
            axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
            axes.minorticks_off()
        alone = [row["kl_no_text"] for row in rows if row["model"] == model]
        panels[2].axhline(sum(alone) / len(alone), color="grey", lw=1, ls="--")
        panels[2].annotate("no text", (sizes[0], sum(alone) / len(alone)), xytext=(0, 3), textcoords="offset points", fontsize=7)
        panels[2].set(yscale="log")
        panels[0].legend(frameon=False, fontsize=7)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--text", type=Path, help="texts are cut from this file")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=TEXT_RATE)
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="small: one text, 2 vectors, 5 steps, no rows kept")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = read_lines(PLACE) if arguments.scale == "full" else []
    if arguments.scale == "small":
        arguments.slots, arguments.texts, arguments.steps = [2], 1, 5
    if not arguments.report:
        model = load_pretrained(arguments.model).requires_grad_(False)
        name, done = arguments.name or Path(arguments.model).name, {tuple(row[key] for key in KEY) for row in rows}
        texts = list(enumerate(texts_of(model, arguments.text, count=arguments.texts)))
        for slots, (text, ids) in itertools.product(arguments.slots, texts):
            if (name, arguments.text.stem, text, slots, arguments.steps) not in done:
                found = measure(model, ids, slots=slots, steps=arguments.steps, seed=text, rate=arguments.rate)
                rows += [{"model": name, "source": arguments.text.stem, "text": text, **row} for row in found]
                print(*rows[-len(OBJECTIVES) :], sep="\n", file=sys.stderr, flush=True)
                if arguments.scale == "full":
                    write_lines(PLACE, rows)
    else:
        draw(rows, HERE.parent / "docs" / "figures" / "gradmem_objectives.png")
    for measure_name, label in MEASURES.items():
        cells = [
            {"objective": objective, "size": f"{model}, {size} bytes", "value": value[measure_name]}
            for (model, size, objective), value in means(rows).items()
        ]
        print(f"\n{label}\n\n{table(cells, row='objective', column='size', value=lambda cell: format(cell['value'], '.3f'))}")
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
