"""Language modelling behind a memory: cross entropy of the second half of a chunk, the first half in vectors.       arXiv:2603.13875v2, table 2

Claim    A memory of the first 128 tokens lowers the cross entropy of the next 128: below that without context, and below that behind as many of
         the last tokens as it has vectors.
Differs  The paper meta-trains GPT-2 with 124M parameters on WikiText and takes plain steps on 32 vectors; here the model is frozen, Adam takes K
         steps, and SmolLM2-135M and stories260K stand in for GPT-2. Only the order of the numbers compares, not their size. Tokens 129 to 255
         count: without context nothing stands before token 128, so it is given. One control has the room of the memory: the last m tokens of the
         first half. `distill` matches the model behind the first half on what it itself draws there.
Cost     SmolLM2-135M, 10 steps, 32 vectors, three chunks: 190 CPU s of writes, 63 a chunk; stories260K, eight chunks, 8 and 32 vectors, 10 and 100
         steps: 140 CPU s. 350 CPU s in all (measured). --scale small on stories260K: 8 CPU s.

    python experiments/gradmem_lm.py --model DIR --text FILE [--slots 32 --steps 15 --objectives reconstruct]     measure what has no row yet
    python experiments/gradmem_lm.py --report                                       table, figure and verdict from the rows
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graven.distill import best_start
from graven.engrave import pursue
from graven.lm import Pretrained, load_pretrained
from graven.lm.base import predictors
from graven.lm.cached import Prompted
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.objective import Objective, Predict, continuations, log_probabilities, reconstruct
from graven.models.text import TEXT_RATE
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.base import Tokens

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "gradmem_lm.jsonl"
KEY = ("model", "source", "chunk", "memory", "slots", "steps")
OBJECTIVES = ("reconstruct", "continue", "distill")
GOLDEN = 0.6180339887  # multiples of it, without their whole part, are spread evenly however many there are
HALF, DRAWN, DRAWN_TOKENS, ROWS_A_STEP = 128, 4, 32, 2
PAPER = {"no context": 3.20, "full context": 2.72, "RMT": 2.91, "GradMem K = 1": 2.92, "GradMem, larger K": 2.91}  # GPT-2, table 2

Row = dict[str, Any]


def chunks_of(model: Pretrained, file: Path, *, count: int) -> list[list[int]]:
    """Chunks of 256 tokens, spread over a file, each from the beginning of a line; the first ones are the same whatever their number."""
    text = file.read_text()
    places = [int(len(text) * ((i + 1) * GOLDEN % 0.98)) for i in range(count)]
    return [model.encode(text[text.index("\n", place) + 1 :][: 16 * HALF])[: 2 * HALF] for place in places]


@torch.no_grad()
def cross_entropy(model: Pretrained, prefix: torch.Tensor, second: list[int]) -> float:
    """Mean over the second half but its first token, in nats."""
    (hidden,) = predictors(model, prefix, Tokens.of([second[:1]]), [second[1:]])
    said = log_probabilities(model, hidden)
    return -float(said.gather(-1, torch.tensor(second[1:])[:, None]).mean())


def objective_of(name: str, model: Pretrained, first: list[int], *, seed: int) -> Objective:
    """What a write descends; for `distill` the model first draws continuations of the first half."""
    if name == "reconstruct":
        return reconstruct(first)
    if name == "continue":
        windows = continuations(first, length=DRAWN_TOKENS, seed=seed)
        return Predict(windows.queries, windows.answers, rows_a_step=ROWS_A_STEP, seed=seed)
    prompted = Prompted(model, model.embed(Tokens.of([[*model.opening, *first]]))[0])
    drawn = prompted.follow([[]] * DRAWN, most=DRAWN_TOKENS, stop=(), generator=torch.Generator().manual_seed(seed))
    return Predict([[]] * DRAWN, [one.tokens for one in drawn], [one.hidden for one in drawn], rows_a_step=ROWS_A_STEP, seed=seed)


def bounds(model: Pretrained, ids: list[int], *, slots: list[int]) -> list[Row]:
    """Nothing, everything, and the last tokens alone."""
    first, second = ids[:HALF], ids[HALF:]
    before = {("no context", 0): [], ("full context", HALF): first, **{("last tokens", m): first[-m:] for m in slots}}
    rows = []
    for (name, size), part in before.items():
        embedded = model.embed(Tokens.of([[*model.opening, *part]]))
        rows.append({"memory": name, "slots": size, "steps": 0, "cross_entropy": cross_entropy(model, embedded, second)})
    return rows


def written(model: Pretrained, ids: list[int], *, memory: str, slots: int, steps: int, seed: int) -> Row:
    """One write by one objective, from the best of four starts."""
    began = time.process_time()
    first, second = ids[:HALF], ids[HALF:]
    gradmem = GradMem(model, GradMemSpec(slots=slots, steps=0, rule=Adam(rate=TEXT_RATE * model.embedding_scale), order="none"), seed=seed)
    objective = objective_of(memory, model, first, seed=seed)
    start = best_start(gradmem, objective, first)
    done = pursue(gradmem, objective, start=start, steps=steps)
    return {
        "memory": memory, "slots": slots, "steps": steps, "cross_entropy": cross_entropy(model, done.state, second),
        "cross_entropy_start": cross_entropy(model, start, second), "loss_first": done.losses[0], "loss_last": done.losses[-1],
        "outcome": done.outcome.name, "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def means(rows: list[Row]) -> dict[tuple[str, str, int, int], float]:
    """Mean cross entropy by model, memory, slots and steps, over the chunks of which the model has every row."""
    found: dict[tuple[str, str, int, int], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row["model"], row["memory"], row["slots"], row["steps"]), {})[row["chunk"]] = row["cross_entropy"]
    whole = {model: set.intersection(*(set(own) for key, own in found.items() if key[0] == model)) for model in {key[0] for key in found}}
    return {key: sum(own[i] for i in whole[key[0]]) / len(whole[key[0]]) for key, own in found.items() if whole[key[0]]}


def verdict(rows: list[Row]) -> list[str]:
    """Each memory against no context and against the last tokens, chunk by chunk: a mean gain counts where it is above two standard errors."""
    lines = []
    for key in sorted(key for key in means(rows) if key[1] in OBJECTIVES):
        own = {row["chunk"]: row["cross_entropy"] for row in rows if (row["model"], row["memory"], row["slots"], row["steps"]) == key}
        gains = {}
        for other, size in (("no context", 0), ("the last tokens", key[2])):
            name = other.removeprefix("the ")
            there = {row["chunk"]: row["cross_entropy"] for row in rows if (row["model"], row["memory"], row["slots"]) == (key[0], name, size)}
            values = torch.tensor([there[chunk] - value for chunk, value in own.items()], dtype=torch.float64)
            gains[other] = float(values.mean()), float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("inf")
        word = "holds" if all(gain > 2 * error for gain, error in gains.values()) else "FAILS"
        told = ", ".join(f"{gain:+.3f} +- {error:.3f} over {other}" for other, (gain, error) in gains.items())
        lines.append(f"{word}   {label(key)}, {key[0]}: nats a token gained {told}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Cross entropy of each way of remembering, a panel a model."""
    found, models = means(rows), sorted({row["model"] for row in rows})
    with figure(path, width=5 * len(models), height=3.6, columns=len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            own = sorted(((value, key) for key, value in found.items() if key[0] == model), reverse=True)
            labels = [label(key) for _, key in own]
            for at, (value, key) in enumerate(own):
                axes.plot(value, at, "o", color="C1" if key[1] in OBJECTIVES else "C0")
            axes.set_yticks(range(len(own)), labels, fontsize=7)
            axes.set(title=model, xlabel="cross entropy of tokens 129 to 255, nats")


def label(key: tuple[str, str, int, int]) -> str:
    """Of a way of remembering."""
    _, memory, slots, steps = key
    if memory in OBJECTIVES:
        return f"{memory}, {slots} vectors, {steps} steps"
    return f"the last {slots} tokens" if memory == "last tokens" else memory


def report(rows: list[Row]) -> None:
    """Table and verdict."""
    cells = [{"memory": label(key), "model": key[0], "value": value} for key, value in means(rows).items()]
    print(f"\ncross entropy, nats a token\n\n{table(cells, row='memory', column='model', value=lambda cell: format(cell['value'], '.3f'))}")
    print("\npaper, GPT-2: " + ", ".join(f"{name} {value}" for name, value in PAPER.items()))
    print("\n" + "\n".join(verdict(rows)))


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--text", type=Path, help="chunks are cut from this file")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[32])
    parser.add_argument("--steps", type=int, nargs="+", default=[15])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="small: one chunk, 2 vectors, 2 steps, no rows kept")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = read_lines(PLACE) if arguments.scale == "full" else []
    if arguments.scale == "small":
        arguments.slots, arguments.chunks, arguments.steps = [2], 1, [2]
    if arguments.report:
        draw(rows, HERE.parent / "docs" / "figures" / "gradmem_lm.png")
        report(rows)
        return 0
    model = load_pretrained(arguments.model).requires_grad_(False)
    stamp = {"model": arguments.name or Path(arguments.model).name, "source": arguments.text.stem, "torch": str(torch.__version__)}
    done = {tuple(row[key] for key in KEY) for row in rows}

    def is_new(chunk: int, row: Row) -> bool:
        return (stamp["model"], stamp["source"], chunk, row["memory"], row["slots"], row["steps"]) not in done

    def keep(chunk: int, new: list[Row]) -> None:
        rows.extend({**stamp, "chunk": chunk, "seed": chunk, **row} for row in new if is_new(chunk, row))
        print(*rows[-len(new) :], sep="\n", file=sys.stderr, flush=True)
        if arguments.scale == "full":
            write_lines(PLACE, rows)

    for chunk, ids in enumerate(chunks_of(model, arguments.text, count=arguments.chunks)):
        keep(chunk, bounds(model, ids, slots=arguments.slots))
        for memory, slots, steps in itertools.product(arguments.objectives, arguments.slots, arguments.steps):
            if is_new(chunk, {"memory": memory, "slots": slots, "steps": steps}):
                keep(chunk, [written(model, ids, memory=memory, slots=slots, steps=steps, seed=chunk)])
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
