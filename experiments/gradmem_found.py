"""Does a memory tell what is in it from what is not?                                                             ours

Claim    An answer is in memory where it adds to its probability and costs no more than the text does: `graven.answer.FOUND_GAIN`, `FOUND_LOSS`.
Differs  No paper has this. The stories are drawn from the model itself, so that it would say some of them without the memory too.
Cost     15 CPU seconds on one core; there is one scale.   (measured)

Eight stories of 60 tokens are written into eight vectors each, until they are recited exactly. A memory is asked for what follows the beginnings
of its story, pieces of it, and the same of another story. An answer of eight tokens is right where it is how the story goes on. The thresholds
were chosen on the first four stories; the rates of the other four are held out.

    python experiments/gradmem_found.py --model shared/data/stories260K     measure and write the rows
    python experiments/gradmem_found.py --report                            rates and figure from the rows
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graven.answer import FOUND_GAIN, FOUND_LOSS
from graven.decoding import Decoding
from graven.engrave import engrave
from graven.lm.base import score
from graven.lm.pretrained import load_pretrained
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.report import figure, read_lines, write_lines
from graven.tasks.base import Tokens

HERE = Path(__file__).parent
ROWS = HERE / "rows" / "gradmem_found.jsonl"
STORIES, TOKENS, SLOTS, STEPS, ANSWER, SEED = 8, 60, 8, 300, 8, 1
BEGINNINGS, PIECES, PIECE = (1, 2, 3, 5, 8, 12, 18, 26), 6, 6

Row = dict[str, Any]


def measure(path: str) -> list[Row]:
    """One row an answer."""
    began, model = time.process_time(), load_pretrained(path).requires_grad_(False)
    opening, nothing = model.embed(Tokens.of([model.opening])), Tokens.of([[]])
    drawn = model.generate(opening, nothing, most=TOKENS, stop=(), decoding=Decoding(temperature=0.9, count=STORIES, seed=SEED))
    stories = [story.tokens for story in drawn]
    rule = Adam(rate=0.3 * model.embedding_scale)
    memory = GradMem(model, GradMemSpec(slots=SLOTS, steps=STEPS, rule=rule, order="none", start=0.3))
    done = engrave(memory, Tokens.of(stories), steps=STEPS, until_exact=True)
    losses = [-sum(values) / TOKENS for values in score(model, done.state, Tokens.of([[]] * STORIES), stories)]
    generator, rows = torch.Generator().manual_seed(0), list[Row]()
    for story in range(STORIES):
        starts = torch.randperm(TOKENS - PIECE - ANSWER, generator=generator)[:PIECES].tolist()
        cuts = [(0, length) for length in BEGINNINGS] + [(start, start + PIECE) for start in starts]
        asked = [(own, stories[story if own else (story + 1) % STORIES], *cut) for own in (True, False) for cut in cuts]
        query = Tokens.of([text[a:b] for _, text, a, b in asked])
        said = model.generate(done.state[story].expand(len(asked), -1, -1), query, most=ANSWER, stop=model.stop)
        without = score(model, opening.expand(len(asked), -1, -1), query, [one.whole for one in said])
        for (own, text, start, end), one, alone in zip(asked, said, without, strict=True):
            rows.append({
                "story": story, "own": own, "start": start, "end": end, "tokens": len(one.whole), "loss": losses[story],
                "right": own and one.whole == text[end : end + ANSWER], "log_probability": sum(one.log_probabilities), "without": sum(alone),
            })  # fmt: skip
    stamp = {"seed": SEED, "torch": torch.__version__, "cpu_seconds": round(time.process_time() - began, 1)}
    return [row | stamp for row in rows]


def gain(row: Row) -> float:
    """What the memory adds, nats a token."""
    return (row["log_probability"] - row["without"]) / row["tokens"]


def sure(row: Row) -> float:
    """How sure the model is with it, beside how sure it is of the text: -1 where both are the same."""
    return row["log_probability"] / row["tokens"] / row["loss"]


def rates(rows: list[Row]) -> str:
    """Errors of the rule on some rows."""

    def share(part: list[Row]) -> float:
        return sum(gain(row) >= FOUND_GAIN and sure(row) >= -FOUND_LOSS for row in part) / len(part)

    right, wrong = [row for row in rows if row["right"]], [row for row in rows if not row["right"]]
    foreign = [row for row in rows if not row["own"]]
    return (
        f"{1 - share(right):.1%} of {len(right)} right answers are missed, {share(wrong):.1%} of {len(wrong)} wrong ones pass; "
        f"of another story {share(foreign):.1%} of {len(foreign)}"
    )


def separation(rows: list[Row], measure_of: Any) -> float:
    """Probability that a right answer has more of it than a wrong one: the area under the curve of errors."""
    right, wrong = ([measure_of(row) for row in rows if row["right"] == which] for which in (True, False))
    return sum((a > b) + 0.5 * (a == b) for a in right for b in wrong) / (len(right) * len(wrong))


def draw(rows: list[Row], path: Path) -> None:
    """Every answer, by what the memory adds to it and how sure it leaves the model."""
    with figure(path, width=6.5, height=4.0) as (axes,):
        for label, colour, part in (
            ("another story", "#9a9a9a", [row for row in rows if not row["own"]]),
            ("own story, wrong", "#c8553d", [row for row in rows if row["own"] and not row["right"]]),
            ("own story, right", "#3b6ea5", [row for row in rows if row["right"]]),
        ):
            axes.plot([gain(row) for row in part], [sure(row) for row in part], "o", ms=4, alpha=0.7, color=colour, label=label)
        axes.axvline(FOUND_GAIN, color="black", lw=0.8, ls=":")
        axes.axhline(-FOUND_LOSS, color="black", lw=0.8, ls=":")
        axes.set(
            xlabel="what the memory adds, nats a token",
            ylabel="log probability with it, in losses of the text",
            title="Right answers are sure, not surprising",
        )
        axes.legend(frameon=False, loc="upper right")


def main() -> int:
    """Measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of stories260K")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        if arguments.model is None:
            parser.error("give --model, the directory of stories260K, or --report")
        write_lines(ROWS, measure(arguments.model))
    rows = read_lines(ROWS)
    draw(rows, HERE.parent / "docs" / "figures" / "gradmem_found.png")
    print(f"a gain of {FOUND_GAIN} nats a token, and at most {FOUND_LOSS} times the loss of the text")
    print(f"calibrated on:  {rates([row for row in rows if row['story'] < STORIES // 2])}")
    print(f"held out:       {rates([row for row in rows if row['story'] >= STORIES // 2])}")
    print(
        f"separation of right from wrong by the gain {separation(rows, gain):.2f}, by the log probability {separation(rows, sure):.2f}; chance 0.50"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
