"""When a memory pays: the cost of a write, of a query, and from how many queries on the two are less together.     arXiv:2603.13875v2, appendix D

Claim    A write by gradient steps costs many passes over the context, a read from eight vectors less than one that sees the context: from some number
         of queries on a memory is cheaper than the context in front of every query. Against a cached context it takes far more queries.
Differs  The paper's appendix is not in our hands; the design is ours. Operations are counted as they run (graven/cost.py); CPU seconds are medians of
         interleaved calls. Queries come one at a time. A query is read through to its answer's last token: of the `records` checkpoint the value and
         its mark, of a frozen model one token behind eight of a query.
Cost     3 CPU minutes for everything that is committed; the `records` part alone takes 1.   (measured)

    python experiments/gradmem_amortised.py [--model DIR]       measure: the shipped checkpoint, and a frozen model where one is named
    python experiments/gradmem_amortised.py --report            table, figure and verdict from the rows

Four ways to answer n queries: a memory, W + n R; a memory whose own keys and values are kept after the first read, W + n K; the whole context in
front of every query, n F; a cached context, C + n S. The memory pays from n = W / (F - K) queries on, against the cache from (W - C) / (S - K).
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import graven
from graven.cost import counted
from graven.lm import Pretrained, Small, load_pretrained
from graven.lm.cached import Prompted
from graven.memory.cache import KVCache
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.models.text import TEXT_RATE, TEXT_START
from graven.report import figure, read_lines, table, write_lines
from graven.tasks.base import Tokens

HERE = Path(__file__).parent
PLACE, PICTURE = HERE / "rows" / "gradmem_amortised.jsonl", HERE.parent / "docs" / "figures" / "gradmem_amortised.png"
PAIRS, CHECKPOINT_STEPS = (4, 8, 16, 32), 5
LENGTHS, FROZEN_STEPS, QUERY, SLOTS = (64, 128, 256, 448), 100, 8, 8
ROUNDS = 3
Row = dict[str, Any]
WAYS = ("write", "read", "kept_read", "full", "cache", "cached_read")  # W, R, K, F, C, S


@torch.no_grad()
def timed(calls: dict[str, Callable[[], object]]) -> Row:
    """Operations of each call, and its median CPU seconds over rounds in which every call is made once."""
    operations = {f"{name}_flops": counted(call)[1].total for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return operations | {f"{name}_seconds": round(statistics.median(found), 6) for name, found in seconds.items()}


def queries_until_it_pays(row: Row, unit: str) -> tuple[float, float]:
    """From how many queries on, against the whole context and against the cached one; infinite where a read of the memory costs no less."""
    w, _, k, f, c, s = (row[f"{way}_{unit}"] for way in WAYS)
    return (w / (f - k) if f > k else math.inf), (max(0.0, w - c) / (s - k) if s > k else math.inf)


def of_checkpoint(pairs: int) -> Row:
    """The shipped checkpoint, and a cache of the same decoder."""
    model = graven.load("records")
    memory, task, decoder = model.memory, model.task, model.memory.model
    assert isinstance(decoder, Small)
    episode = task.sample(1, pairs=pairs, generator=torch.Generator().manual_seed(0))
    asked = Tokens.full(torch.cat([episode.query.ids[:, 0], episode.target.ids[:, 0, :-1]], -1))
    cache, state = KVCache(decoder), memory.write(memory.start(1), episode.context, steps=CHECKPOINT_STEPS)
    whole = cache.write(cache.start(1), episode.context)
    _, kept = decoder.decoder.run(memory.prefix(state, control=memory.read_control))
    costs = timed({
        "write": lambda: memory.write(memory.start(1), episode.context, steps=CHECKPOINT_STEPS),
        "read": lambda: memory.read(state, asked),
        "kept_read": lambda: decoder.logits(decoder.decoder.run(decoder.embed(asked), before=kept)[0]),
        "full": lambda: cache.read(cache.write(cache.start(1), episode.context), asked),
        "cache": lambda: cache.write(cache.start(1), episode.context),
        "cached_read": lambda: cache.read(whole, asked),
    })  # fmt: skip
    return {"model": "records", "tokens": episode.context.ids.shape[1], "pairs": pairs, "steps": CHECKPOINT_STEPS, "bytes": 4 * state.numel()} | costs


def of_frozen(model: Pretrained, name: str, tokens: int) -> Row:
    """A frozen model, eight vectors, Adam; the cost does not depend on what the tokens say."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.vocabulary, (1, tokens + QUERY), generator=generator)
    context, query = Tokens.full(ids[:, :tokens]), Tokens.full(ids[:, tokens:])
    rule = Adam(rate=TEXT_RATE * model.embedding_scale)
    memory = GradMem(model, GradMemSpec(slots=SLOTS, steps=FROZEN_STEPS, rule=rule, order="none", start=TEXT_START))
    embedded, state = model.embed(context)[0], memory.start(1).detach()
    prompted, kept, row = Prompted(model, embedded), Prompted(model, memory.prefix(state, control=None)[0]), [query.row(0)]
    costs = timed({
        "write": lambda: memory.write(memory.start(1), context),
        "read": lambda: memory.read(state, query),
        "kept_read": lambda: kept.follow(row, most=1, stop=()),
        "full": lambda: Prompted(model, embedded).follow(row, most=1, stop=()),
        "cache": lambda: Prompted(model, embedded),
        "cached_read": lambda: prompted.follow(row, most=1, stop=()),
    })  # fmt: skip
    return {"model": name, "tokens": tokens, "pairs": None, "steps": FROZEN_STEPS, "bytes": 4 * state.numel()} | costs


def verdict(rows: list[Row]) -> list[str]:
    """Where the memory pays, by operations and by seconds."""
    lines = []
    for row in rows:
        for unit, what in (("flops", "operations"), ("seconds", "CPU seconds")):
            full, cached = queries_until_it_pays(row, unit)
            against = "never pays" if math.isinf(cached) else f"pays from {math.ceil(cached):,} queries on"
            begins = "never pays" if math.isinf(full) else f"pays from {math.ceil(full):,} queries on"
            good = "holds" if full < cached else "FAILS"
            lines.append(f"{good}   {row['model']}, {row['tokens']} tokens, {what}: {begins} against the context, {against} against a cached one")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Operations against queries, the longest context of each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with figure(path, width=5.2 * len(models), height=3.6, columns=len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            row = max((row for row in rows if row["model"] == model), key=lambda row: row["tokens"])
            w, r, k, f, c, s = (row[f"{way}_flops"] for way in WAYS)
            counts = [10 ** (i / 20) for i in range(101)]
            for label, fixed, each in (
                ("memory", w, r),
                ("memory, keys and values kept", w, k),
                ("context every time", 0, f),
                ("cached context", c, s),
            ):
                axes.plot(counts, [fixed + n * each for n in counts], label=label)
            for n in queries_until_it_pays(row, "flops"):
                if n <= counts[-1]:
                    axes.axvline(n, color="grey", lw=0.8, ls=":")
            axes.set(title=f"{model}, {row['tokens']} tokens, K = {row['steps']}", xlabel="queries", xscale="log", yscale="log")
        panels[0].set_ylabel("operations")
        panels[0].legend(frameon=False)


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="small: one size, no rows kept")
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_lines(PLACE) if PLACE.exists() and arguments.scale == "full" else []
    if not arguments.report:
        done = {(row["model"], row["tokens"]) for row in rows}
        sizes = PAIRS if arguments.scale == "full" else PAIRS[:1]
        new = [of_checkpoint(pairs) for pairs in sizes if ("records", pairs * 7) not in done]
        if arguments.model:
            name, model = arguments.name or Path(arguments.model).name, load_pretrained(arguments.model).requires_grad_(False)
            new += [of_frozen(model, name, tokens) for tokens in LENGTHS if (name, tokens) not in done]
        rows += [row | {"seed": 0, "torch": str(torch.__version__)} for row in new]
        if arguments.scale == "full":
            write_lines(PLACE, rows)
    else:
        draw(rows, PICTURE)
    units = {"operations": ("flops", lambda x: f"{x:.3g}"), "CPU milliseconds": ("seconds", lambda x: f"{1000 * x:.3g}")}
    for title, (unit, shown) in units.items():
        cells = [{"row": f"{row['model']}, {row['tokens']}", "way": way, "value": shown(row[f"{way}_{unit}"])} for row in rows for way in WAYS]
        print(f"{title}\n{table(cells, row='row', column='way', value=lambda cell: cell['value'])}\n")
    print("\n".join(verdict(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
