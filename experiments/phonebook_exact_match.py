"""Exact match of the shipped `phonebook` checkpoint: entries, write steps, names that differ in one letter.

Claim    Eight vectors answer eight entries, names of 3 to 8 letters and numbers of 3 to 6 digits, with at least 95 % exact match, the end of the
         number included.
Differs  Nothing of the kind is in the GradMem paper (arXiv:2603.13875v2), whose keys and values have one length.
Cost     --scale small: 12 s on one CPU core.  --scale full: 1 min.   (measured)

    python experiments/phonebook_exact_match.py                    measure small and print
    python experiments/phonebook_exact_match.py --scale full       measure; what has its rows already is passed over
    python experiments/phonebook_exact_match.py --report           table, figure and verdict from the rows
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import torch
from gradmem_cell import FIGURES, HERE, Row, options

import graven
from graven.measure import exact_match
from graven.models.records import RecordsModel
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.phonebook import Phonebook

PAIRS, STEPS, SIMILAR = (4, 8, 12), (0, 1, 2, 3, 4, 6, 8, 10), (0.0, 0.5)
CONTEXTS = {"small": 20, "full": 30}
GATE = 0.95


def free_running(model: RecordsModel, task: Phonebook, *, pairs: int, contexts: int, generator: torch.Generator) -> float:
    """Share of numbers that are answered from the memory alone, token after token until the line ends, as `ask` does."""
    right = 0
    for _ in range(contexts):
        context = task.sample(1, pairs=pairs, generator=generator).context.row(0)
        book = task.lines_of(context)
        written = model.write(book)
        entries = task.parse(book)
        answers = model.ask_many(written, [name for name, _ in entries])
        right += sum(answer.text == number for answer, (_, number) in zip(answers, entries, strict=True))
    return right / (contexts * pairs)


def measure(place: Path, seeds: list[int], contexts: int) -> list[Row]:
    """Rows of every size, share of similar names and seed that are not there yet."""
    rows: list[Row] = read_lines(place)
    model = graven.load("phonebook")
    assert isinstance(model, RecordsModel)
    about = {"memory": "gradmem", "bytes": 4 * model.memory.initial.numel(), "trained": model.memory.spec.steps, "torch": str(torch.__version__)}
    for pairs, similar, seed in ((n, share, seed) for n in PAIRS for share in SIMILAR for seed in seeds):
        if any((row["pairs"], row["similar"], row["seed"]) == (pairs, similar, seed) for row in rows):
            continue
        task, began = Phonebook(similar=similar), time.process_time()
        found = [dataclasses.asdict(row) for row in exact_match(model.memory, task, pairs=pairs, steps=STEPS, contexts=contexts, seed=seed)]
        # more entries than a page holds are cut into pages by `write`, and are another thing
        free = {} if pairs > model.pairs_a_page else {
            "free_running": free_running(model, task, pairs=pairs, contexts=contexts // 5, generator=torch.Generator().manual_seed(100 + seed))
        }  # fmt: skip
        seconds = {"cpu_seconds": round(time.process_time() - began, 2)}
        rows += [about | {"similar": similar} | row | free | seconds for row in found]
        write_lines(place, rows)
    return rows


def values(rows: list[Row], name: str, pairs: int, similar: float, steps: int) -> list[float]:
    """A number of each seed."""
    return [row[name] for row in rows if (row["pairs"], row["similar"], row["steps"]) == (pairs, similar, steps) and name in row]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def verdict(rows: list[Row]) -> list[str]:
    """The gate, for any names and for similar ones."""
    trained = rows[0]["trained"]
    lines = []
    for similar, what in zip(SIMILAR, ("names drawn freely", "half of the names one letter from another"), strict=True):
        forced, free = (min(values(rows, name, 8, similar, trained)) for name in ("exact_match", "free_running"))
        good = forced >= GATE and free >= GATE
        lines.append(f"{'holds' if good else 'FAILS'}   8 entries, {what}: worst seed {100 * forced:.1f} %, running freely {100 * free:.1f} %")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """One curve a number of entries."""
    with figure(path, width=6.5, height=3.6) as (axes,):
        for pairs in PAIRS:
            for similar, style in zip(SIMILAR, ("o-", "o:"), strict=True):
                curve = [100 * mean(values(rows, "exact_match", pairs, similar, k)) for k in STEPS]
                axes.plot(STEPS, curve, style, ms=3, color=f"C{PAIRS.index(pairs)}", label=f"{pairs} entries" if similar == 0 else None)
        axes.axhline(100 * GATE, color="grey", lw=0.8)
        axes.set(xlabel="write steps K", ylabel="exact match, %", ylim=(0, 101), title="A phone book in eight vectors; dotted: similar names")
        axes.legend(frameon=False, loc="lower right")


def main() -> int:
    """Measure or report."""
    arguments = options()
    place = HERE / "rows" / "phonebook_exact_match.jsonl"
    if arguments.report:
        rows = read_lines(place)
        draw(rows, FIGURES / "phonebook_exact_match.png")
    elif arguments.scale == "full":
        rows = measure(place, arguments.seed, CONTEXTS["full"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder) / "rows.jsonl", arguments.seed[:1], CONTEXTS["small"])
    shown = [{"K": k, "entries": n, "exact": mean(values(rows, "exact_match", n, 0.0, k))} for n in PAIRS for k in STEPS]
    print(table(shown, row="K", column="entries", value=lambda row: f"{100 * row['exact']:.1f}") + "\n\n" + "\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
