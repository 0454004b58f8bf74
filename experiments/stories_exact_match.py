"""Exact match of the shipped `stories` checkpoint: kinds of question, sentences, write steps; and bAbI's own test questions.

Claim    Eight vectors answer what can be asked about a story of ten sentences, whatever kind of question it is, in at least 90 %.
Differs  Table 2 of the GradMem paper (arXiv:2603.13875v2) has one GPT-2 for each task of bAbI; this is one decoder of two layers for all five.
Cost     --scale small: 12 s on one CPU core.  --scale full: 2 min.   (measured)

    python experiments/stories_exact_match.py                    measure small and print
    python experiments/stories_exact_match.py --scale full       measure; what has its rows already is passed over
    python experiments/stories_exact_match.py --report           tables, figure and verdict from the rows
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gradmem_babi import DATA, questions_of
from gradmem_cell import FIGURES, HERE, Row, options
from phonebook_exact_match import mean

import graven
from graven.measure import exact_match, read_episode, right
from graven.models.records import RecordsModel
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.babi import batches
from graven.tasks.stories import KINDS, Stories

SENTENCES, STEPS = (6, 10, 14), (0, 1, 2, 3, 4, 6)
STORIES, QUESTIONS = {"small": 20, "full": 100}, {"small": 20, "full": 300}
BUCKETS = ((0, 10), (10, 20), (20, 40))  # sentences of bAbI's stories: above, and at most
GATE = 0.9


def told(model: RecordsModel, seed: int, scale: str) -> Iterator[Row]:
    """Of each kind and length."""
    for kind in KINDS:
        for sentences in SENTENCES:
            task, began = Stories(kinds=(kind,)), time.process_time()
            found = list(exact_match(model.memory, task, pairs=sentences, steps=STEPS, contexts=STORIES[scale], seed=seed))
            seconds = {"cpu_seconds": round(time.process_time() - began, 2)}
            yield from ({"kind": kind, **dataclasses.asdict(row), **seconds} for row in found)


@torch.no_grad()
def of_babi(model: RecordsModel, scale: str) -> Iterator[Row]:
    """bAbI's test questions, by the length of their stories; they are not drawn, so there is one seed."""
    for task in range(1, 6) if DATA.exists() else ():
        for low, high in BUCKETS:
            stories, began, hits = [s for s in questions_of(task) if low < len(s.sentences) <= high][: QUESTIONS[scale]], time.process_time(), 0
            for episode in batches(stories, 20):
                state = model.memory.write(model.memory.start(len(episode.context.ids)), episode.context)
                hits += int(right(read_episode(model.memory, state, episode), episode).sum())
            if stories:
                found = {"steps": model.memory.spec.steps, "contexts": len(stories), "exact_match": hits / len(stories)}
                yield {"kind": f"QA{task}", "pairs": high, "seed": 0, **found, "cpu_seconds": round(time.process_time() - began, 2)}


def measure(place: Path, seeds: list[int], scale: str) -> list[Row]:
    """Rows of every seed that are not there yet."""
    rows: list[Row] = read_lines(place)
    model = graven.load("stories")
    assert isinstance(model, RecordsModel)
    about = {"memory": "gradmem", "bytes": 4 * model.memory.initial.numel(), "trained": model.memory.spec.steps, "torch": str(torch.__version__)}
    for seed in seeds:
        if not any(row["seed"] == seed and row["kind"] in KINDS for row in rows):
            rows += [about | row for row in told(model, seed, scale)]
            write_lines(place, rows)
    if not any(row["kind"] not in KINDS for row in rows):
        rows += [about | row for row in of_babi(model, scale)]
        write_lines(place, rows)
    return rows


def values(rows: list[Row], kind: str, sentences: int, steps: int) -> list[float]:
    """Exact match of each seed."""
    return [row["exact_match"] for row in rows if (row["kind"], row["pairs"], row["steps"]) == (kind, sentences, steps)]


def verdict(rows: list[Row]) -> list[str]:
    """The gate, of each kind."""
    lines, trained = [], rows[0]["trained"]
    for kind in KINDS:
        worst = min(values(rows, kind, 10, trained))
        lines.append(f"{'holds' if worst >= GATE else 'FAILS'}   {kind}: stories of at most 10 sentences, worst seed {100 * worst:.1f} %")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """One curve a kind, one panel a length."""
    with figure(path, width=9.5, height=3.4, columns=len(SENTENCES)) as panels:
        for axes, sentences in zip(panels, SENTENCES, strict=True):
            for kind in KINDS:
                axes.plot(STEPS, [100 * mean(values(rows, kind, sentences, k)) for k in STEPS], "o-", ms=3, label=kind)
            axes.set(xlabel="write steps K", ylim=(0, 101), title=f"at most {sentences} sentences")
        panels[0].set_ylabel("exact match, %")
        panels[-1].legend(frameon=False, fontsize=7, loc="lower right")


def report(rows: list[Row]) -> None:
    """At the steps of the checkpoint."""
    trained = rows[0]["trained"]
    own = [{"kind": kind, "sentences": n, "exact": mean(values(rows, kind, n, trained))} for kind in KINDS for n in SENTENCES]
    print(f"K = {trained}, %\n" + table(own, row="kind", column="sentences", value=lambda row: f"{100 * row['exact']:.1f}"))
    babi = [{"task": row["kind"], "at most": row["pairs"], "row": row} for row in rows if row["kind"] not in KINDS]
    text = table(babi, row="task", column="at most", value=lambda row: f"{100 * row['row']['exact_match']:.1f} of {row['row']['contexts']}")
    print(f"\nbAbI's test questions by sentences of the story, %\n{text}\n")


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "stories_exact_match.jsonl"
    if arguments.report:
        rows = read_lines(place)
        draw(rows, FIGURES / "stories_exact_match.png")
    elif arguments.scale == "full":
        rows = measure(place, arguments.seed, "full")
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder) / "rows.jsonl", arguments.seed[:1], "small")
    report(rows)
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
