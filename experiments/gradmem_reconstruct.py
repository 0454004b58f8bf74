"""How many tokens a memory vector holds: reconstruction into a frozen model against vectors, tokens and steps.      arXiv:2603.13875v2, appendix I

Claim    Vectors of a frozen model can be optimised until it recites a text exactly; how many tokens a vector holds depends on steps and text.
Differs  The paper's appendix has Llama 3.2 with 1B and 3B parameters, 1 or 2 vectors and 1 or 2 steps of a meta-trained start; here nothing is
         trained, Adam takes as many steps as it needs, and the models are small. The numbers do not compare line by line.
Cost     260 000 parameters: 0.5 to 15 CPU seconds a row, 2 CPU minutes for its grid of 30 (measured); SmolLM2-135M, 32 tokens, 200 steps: about
         2 CPU minutes a row (estimated from its 0.5 CPU seconds for 128 tokens forward).

    python experiments/gradmem_reconstruct.py --model DIR --text FILE [--slots 4 8 --tokens 32 --texts 2 --steps 600]     measure what has no row yet
    python experiments/gradmem_reconstruct.py --model DIR                      the same on texts that the model draws itself
    python experiments/gradmem_reconstruct.py --report                         table, figure and verdict from the rows
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graven.engrave import engrave
from graven.lm import Pretrained, load_pretrained
from graven.lm.cached import Prompted
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.models.text import TEXT_RATE, TEXT_START
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.base import Tokens

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "gradmem_reconstruct.jsonl"
KEY = ("model", "source", "slots", "tokens", "text", "steps")

Row = dict[str, Any]


def texts_of(model: Pretrained, file: Path | None, *, tokens: int, count: int) -> list[list[int]]:
    """Pieces that are spread over a file, or drawn from the model behind what it begins a text with."""
    if file is None:
        prompted = Prompted(model, model.embed(Tokens.of([model.opening or [0]]))[0])
        drawn = prompted.follow([[]] * count, most=tokens, stop=(), generator=torch.Generator().manual_seed(0))
        return [one.tokens for one in drawn]
    text = file.read_text()
    places = [len(text) * (i + 1) // (count + 2) for i in range(count)]
    return [model.encode(text[text.index("\n", place) + 1 :][: 20 * tokens])[:tokens] for place in places]


def measure(model: Pretrained, name: str, ids: list[int], *, source: str, text: int, slots: int, steps: int) -> Row:
    """One write."""
    rule = Adam(rate=TEXT_RATE * model.embedding_scale)
    memory = GradMem(model, GradMemSpec(slots=slots, steps=0, rule=rule, order="none", start=TEXT_START), seed=text)
    began = time.process_time()
    done = engrave(memory, Tokens.of([ids]), steps=steps, until_exact=True)
    return {
        "model": name, "source": source, "slots": slots, "tokens": len(ids), "text": text, "steps": steps, "seed": text,
        "taken": len(done.losses), "outcome": done.outcome.name, "recited": done.recited[0], "token_accuracy": done.token_accuracy,
        "bytes": 4 * done.state.numel(), "cpu_seconds": round(time.process_time() - began, 2), "torch": str(torch.__version__),
    }  # fmt: skip


def cell(rows: list[Row]) -> str:
    """Steps to an exact copy of each text, or how much of it is recited."""
    return ", ".join(str(row["taken"]) if row["outcome"] == "EXACT" else f"({row['recited']})" for row in rows)


def verdict(rows: list[Row]) -> list[str]:
    """For each model and source the most tokens a vector that every text reached exactly."""
    lines = []
    for group in sorted({(row["model"], row["source"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["source"]) == group]
        sizes = {(row["slots"], row["tokens"]) for row in own}
        exact = [size for size in sizes if all(row["outcome"] == "EXACT" for row in own if (row["slots"], row["tokens"]) == size)]
        best = max(exact, key=lambda size: size[1] / size[0], default=None)
        found = "nothing exact" if best is None else f"{best[1] / best[0]:g} tokens a vector ({best[1]} in {best[0]}) are recited exactly"
        lines.append(f"{'FAILS' if best is None else 'holds'}   {group[0]}, {group[1]}: {found}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Steps to an exact copy against tokens a vector; hollow where the steps ran out."""
    groups = sorted({(row["model"], row["source"]) for row in rows})
    with figure(path, width=4.2 * len(groups), height=3.6, columns=len(groups)) as panels:
        for axes, group in zip(panels, groups, strict=True):
            own = [row for row in rows if (row["model"], row["source"]) == group]
            for colour, tokens in zip(("C0", "C1", "C2", "C3"), sorted({row["tokens"] for row in own}), strict=False):
                for exact in (True, False):
                    here = [row for row in own if row["tokens"] == tokens and (row["outcome"] == "EXACT") == exact]
                    x, y = [row["tokens"] / row["slots"] for row in here], [row["taken"] for row in here]
                    axes.plot(x, y, "o", ms=5, color=colour, mfc=colour if exact else "none", label=f"{tokens} tokens" if exact else None)
            axes.set(xscale="log", xlabel="tokens a vector", title=f"{group[0]}, {group[1]}", ylim=(0, None))
            axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
            axes.legend(frameon=False)
        panels[0].set_ylabel("steps to an exact copy (hollow: not exact)")


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--text", type=Path, help="texts are cut from this file; drawn from the model where left out")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="small: one text of 16 tokens, 40 steps, no rows kept")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = read_lines(PLACE) if arguments.scale == "full" else []
    if arguments.scale == "small":
        arguments.slots, arguments.tokens, arguments.texts, arguments.steps = [4], [16], 1, 40
    if not arguments.report:
        model, done = load_pretrained(arguments.model), {tuple(row[key] for key in KEY) for row in rows}
        name, source = arguments.name or Path(arguments.model).name, arguments.text.stem if arguments.text else "its own"
        for tokens in arguments.tokens:
            for text, ids in enumerate(texts_of(model, arguments.text, tokens=tokens, count=arguments.texts)):
                for slots in arguments.slots:
                    if slots <= tokens and (name, source, slots, tokens, text, arguments.steps) not in done:
                        rows.append(measure(model, name, ids, source=source, text=text, slots=slots, steps=arguments.steps))
                        print(rows[-1], file=sys.stderr, flush=True)
                        if arguments.scale == "full":
                            write_lines(PLACE, rows)
    else:
        draw(rows, HERE.parent / "docs" / "figures" / "gradmem_reconstruct.png")
    for group in sorted({(row["model"], row["source"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["source"]) == group]
        sizes = sorted({(row["tokens"], row["slots"]) for row in own})
        cells = [{"vectors": m, "tokens": n, "cell": cell([row for row in own if (row["tokens"], row["slots"]) == (n, m)])} for n, m in sizes]
        print(f"\n{group[0]}, {group[1]}: steps to an exact copy of each text, or (tokens recited)\n")
        print(table(cells, row="vectors", column="tokens", value=lambda found: found["cell"]))
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
