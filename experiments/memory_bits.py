"""What fewer bits a number cost a memory: answers of the `records` checkpoint, recitals of stories260K.                            ours

Claim    8 bits cost nothing that can be measured; 4 bits cost answers little and exact recitals much, for one wrong token derails what follows.
         (Set before the run. The first half does not hold for a memory whose write ended with the first exact recital: half of those are lost.)
Differs  No paper has this. Codes and scales are those of `graven quantize` (groups of 32); one scale for a whole vector stands beside it.
Cost     39 CPU seconds of records, 43 of stories; there is one scale.   (measured)

Records: 100 contexts of 32 pairs for each of three seeds, K = 5. Stories: eight of 60 tokens, drawn from the model, in eight vectors each; written
until they are recited exactly, and once with all 400 steps taken, which leaves more room for an error.

    python experiments/memory_bits.py [--model shared/data/stories260K]     measure what has no row yet; stories only where the model is given
    python experiments/memory_bits.py --report                              table, figure and verdict from the rows
"""

import argparse
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graven
from graven.decoding import Decoding
from graven.engrave import engrave
from graven.lm import Pretrained, load_pretrained
from graven.measure import read_episode, right
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.quantize import dequantize, quantize
from graven.model import RecordsModel
from graven.models.text import TEXT_RATE, TEXT_START
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.base import Tokens

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "memory_bits.jsonl"
FORMS = {"32": None, "8": (8, 32), "4": (4, 32), "8, a scale a vector": (8, 1 << 20), "4, a scale a vector": (4, 1 << 20)}
PAIRS, CONTEXTS, STEPS, SEEDS = 32, 100, 5, (101, 102, 103)
STORIES, TOKENS, SLOTS, MOST, DRAWN = 8, 60, 8, 400, 2

Row = dict[str, Any]


def in_form(state: Tensor, form: str) -> Tensor:
    """The state in fewer bits."""
    how = FORMS[form]
    if how is None:
        return state
    bits, group = how
    group = min(group, state.shape[-1])
    return dequantize(*quantize(state, bits=bits, group=group), bits=bits, group=group)


def change(small: Tensor, state: Tensor) -> float:
    """Root mean square of what was done to the numbers, as a share of their own."""
    return float((small - state).norm() / state.norm())


def measure_records(seed: int) -> list[Row]:
    """Share of keys of 32 pairs whose value comes back whole, in each form."""
    model = graven.load("records")
    assert isinstance(model, RecordsModel)
    began = time.process_time()
    episode = model.task.sample(CONTEXTS, pairs=PAIRS, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        state = model.memory.write(model.memory.start(CONTEXTS), episode.context, steps=STEPS).detach()
        rows = []
        for form in FORMS:
            small = in_form(state, form)
            share = float(right(read_episode(model.memory, small, episode), episode).float().mean())
            rows.append({"what": "records", "bits": form, "seed": seed, "share": share, "change": change(small, state)})
    return [row | {"cpu_seconds": round(time.process_time() - began, 1), "torch": str(torch.__version__)} for row in rows]


def measure_stories(model: Pretrained, *, until_exact: bool) -> list[Row]:
    """Share of stories that are recited exactly, and tokens before the first miss, in each form."""
    began, what = time.process_time(), "stories, until exact" if until_exact else f"stories, {MOST} steps"
    opening = model.embed(Tokens.of([model.opening]))
    drawn = model.generate(opening, Tokens.of([[]]), most=TOKENS, stop=(), decoding=Decoding(temperature=0.9, count=STORIES, seed=DRAWN))
    texts = [one.tokens for one in drawn]
    rule = Adam(rate=TEXT_RATE * model.embedding_scale)
    memory = GradMem(model, GradMemSpec(slots=SLOTS, steps=MOST, rule=rule, order="none", start=TEXT_START))
    done = engrave(memory, Tokens.of(texts), steps=MOST, until_exact=until_exact)
    rows = []
    for form in FORMS:
        small = in_form(done.state, form)
        said = memory.recite(small, [TOKENS] * STORIES)
        recited = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True))) for pair in zip(said, texts, strict=True)]
        rows.append({
            "what": what, "bits": form, "seed": DRAWN, "share": sum(n == TOKENS for n in recited) / STORIES, "change": change(small, done.state),
            "recited": sum(recited) / STORIES, "loss": done.losses[-1],
        })  # fmt: skip
    return [row | {"cpu_seconds": round(time.process_time() - began, 1), "torch": str(torch.__version__)} for row in rows]


def means(rows: list[Row]) -> dict[tuple[str, str], float]:
    """Mean share over seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["what"], row["bits"]), []).append(row["share"])
    return {cell: sum(values) / len(values) for cell, values in found.items()}


def verdict(rows: list[Row]) -> list[str]:
    """Each gate, set before the run."""
    share, kinds = means(rows), sorted({row["what"] for row in rows})
    lost = {(what, bits): share[what, "32"] - share[what, bits] for what in kinds for bits in FORMS}
    stories = [what for what in kinds if what != "records"]
    gates = [
        (f"records, 8 bits: loses {100 * lost['records', '8']:.2f} <= 0.2 points", lost["records", "8"] <= 0.002),
        (f"records, 4 bits: loses {100 * lost['records', '4']:.2f} <= 2 points", lost["records", "4"] <= 0.02),
        *((f"{what}, 8 bits: loses {100 * lost[what, '8']:.0f} points of stories, none allowed", lost[what, "8"] <= 0) for what in stories),
        *((f"{what}, 4 bits: loses {100 * lost[what, '4']:.0f} >= 50 points of stories", lost[what, "4"] >= 0.5) for what in stories),
    ]
    return [f"{'holds' if good else 'FAILS'}   {text}" for text, good in gates]


def draw(rows: list[Row], path: Path) -> None:
    """A group of bars for each thing that was measured."""
    share, kinds = means(rows), sorted({row["what"] for row in rows})
    with figure(path, width=6.5, height=3.4) as (axes,):
        for place, (form, colour) in enumerate(zip(FORMS, ("#3b6ea5", "#6f9fc8", "#c8553d", "#bcd2e5", "#e8b4a8"), strict=True)):
            at = [index + 0.16 * (place - 2) for index in range(len(kinds))]
            axes.bar(
                at,
                [100 * share[what, form] for what in kinds],
                width=0.15,
                color=colour,
                label=" bits, ".join(form.split(", ")) if ", " in form else f"{form} bits",
            )
        axes.set(xticks=range(len(kinds)), xticklabels=kinds, ylabel="right or recited exactly, %", ylim=(0, 135))
        axes.set_title("What fewer bits cost a memory")
        axes.legend(frameon=False, ncol=3, loc="upper center", fontsize=8)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of stories260K")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_lines(PLACE)
    done = {(row["what"], row["seed"]) for row in rows}
    if not arguments.report:
        for seed in SEEDS:
            if ("records", seed) not in done:
                rows += measure_records(seed)
                write_lines(PLACE, rows)
        for until_exact in (True, False) if arguments.model else ():
            if ("stories, until exact" if until_exact else f"stories, {MOST} steps", DRAWN) not in done:
                rows += measure_stories(load_pretrained(arguments.model).requires_grad_(False), until_exact=until_exact)
                write_lines(PLACE, rows)
    draw(rows, HERE.parent / "docs" / "figures" / "memory_bits.png")
    shown = [{"what": what, "bits": bits, "share": value} for (what, bits), value in means(rows).items()]
    print(table(shown, row="what", column="bits", value=lambda row: f"{100 * row['share']:.1f}"))
    print("\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
