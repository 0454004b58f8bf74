"""Short SQuAD: questions answered from vectors that a sentence was written into; the sentence is gone.                arXiv:2603.13875v2, table 2

Claim    Meta-trained gradient writes answer what the model alone cannot, more steps better, and better than a write by one forward pass (RMT).
Differs  The paper trains GPT-2 with 124M parameters on all of it with a GPU, 32 vectors, K trained apart; here a LoRA of SmolLM2-135M-Instruct is
         trained for minutes of one CPU core, on sentences of at most 40 tokens, 8 vectors, K drawn from 1 and 2. The scores stand far below the
         paper's for that reason alone; beside each row is how many triples it has seen. Closed book and full context are the model as published;
         K = 0 is the trained model behind its start state, which has seen no sentence: what a memory is worth is the distance to that.
         `loss` is that of the first right answer, nats a token: it moves long before an answer is right.
Cost     CPU s of training, a triple: SmolLM2-135M 2.0 (K = 1) and 3.7 (K = 2), RMT 1.0; stories260K 0.1 and 0.04. Of measuring, a question:
         SmolLM2-135M 1.4 without a write, 2.3, 2.8 and 5.3 at K = 1, 2, 5. --scale small on stories260K: 30 CPU s. The GPU has not been tried.

    python experiments/gradmem_squad.py --model DIR --data DIR [--triples 64 --memories gradmem rmt]     train and measure what has no row yet
    python experiments/gradmem_squad.py --report                                                         table, figure and verdict from the rows
    python experiments/gradmem_squad.py --model DIR --data DIR --device cuda --triples 64000 --batch 64 --slots 32 --longest 128 --dev 10558
                                                                                          the whole of it, for a GPU; never run
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graven import training
from graven.lm import Pretrained, load_pretrained
from graven.lm.adapter import Adapter
from graven.lm.base import score
from graven.memory.gradient import SGD, GradMem, GradMemSpec
from graven.report import figure, read_lines, write_lines
from graven.tasks.base import Tokens
from graven.tasks.triples import Triple, Triples, exact, f1, read_triples
from graven.train_triples import BaseModel, TriplesSpec, Written, batch_of, draw_curve, new_memory, rows_of
from graven.training import Job, Optimizer, Stage

HERE = Path(__file__).parent
PLACE = HERE / "rows" / "gradmem_squad.jsonl"
KEY = ("model", "memory", "steps", "slots", "triples", "dev", "longest", "seed")
PAPER = {"full context": 64.2, "RMT": 42.6, "GradMem K = 1": 38.1, "GradMem, larger K": 54.9}  # GPT-2, exact match in %, table 2
STEPS = {"gradmem": (0, 1, 2, 5), "rmt": (0, 1)}
RATE, CLIP = 0.5, 1.0  # of the write at the start of the training: of four settings the one that lowered the loss (docs/log.md)
ANSWER_TOKENS = 12

Row = dict[str, Any]


class RMT(nn.Module):
    """One forward pass writes: the memory is what the model makes of vectors that stand behind the sentence.

    [M; C; M] -> hidden states; the last m of them, through a linear map that starts as the identity at the size of embeddings, are the memory.
    """

    read_control = None

    def __init__(self, base: GradMem):
        super().__init__()
        self.model, self.initial = base.model, base.initial
        self.map = nn.Parameter(torch.eye(base.model.width))

    def start(self, batch: int) -> Tensor:
        return self.initial.expand(batch, -1, -1)

    def write(self, state: Tensor, context: Tokens, *, steps: int | None = None) -> Tensor:
        for _ in range(1 if steps is None else steps):
            embedded = self.model.embed(context)
            mask = nn.functional.pad(context.mask, (state.shape[1], state.shape[1]), value=True)
            hidden = self.model.hidden(torch.cat([state, embedded, state], 1), mask=mask)[:, -state.shape[1] :]
            hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            state = self.model.embedding_scale * hidden @ self.map
        return state

    def prefix(self, state: Tensor, *, control: Tensor | None) -> Tensor:
        assert control is None
        return state


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training."""

    memory: str
    triples: int
    slots: int
    longest: int
    batch: int
    rate: float
    seed: int
    data: str
    model: str
    device: str

    def spec(self) -> TriplesSpec:
        """As `graven train` takes it."""
        steps = (1, 2) if self.memory == "gradmem" else (1,)
        stage = Stage(steps=steps, at_most=self.triples // self.batch, decay_over=max(2, self.triples // self.batch))
        return TriplesSpec(
            seed=self.seed,
            task=Triples(kind="triples", data=self.data, longest=self.longest),
            model=BaseModel(path=self.model, device=self.device),
            adapter=Adapter(rank=16),
            memory=GradMemSpec(slots=self.slots, steps=2, rule=SGD(rate=RATE, learn="coordinate", clip=CLIP)),
            optimizer=Optimizer(rate=self.rate, batch=self.batch, micro_batch=min(4, self.batch), warm_up=4),
            stage=(stage,),
            checkpoint_every=4,
        )


def trained(base: Pretrained, triples: list[Triple], setting: Setting, folder: Path) -> tuple[Written, float]:
    """A memory after its training, or after as much of it as an earlier call left to do; and the CPU seconds it took."""
    spec = setting.spec()
    memory: Any = new_memory(spec, base)
    if setting.memory == "rmt":
        memory = RMT(memory)
    weights = {name: weight for name, weight in memory.named_parameters() if weight.requires_grad}
    place = folder / f"{setting.memory}-{setting.triples}-{setting.slots}-{setting.longest}-{setting.seed}"
    if not (place / "model.safetensors").exists():
        job = Job(
            spec=spec, weights=weights, batch=partial(batch_of, spec, memory, rows_of(base, triples, spec), [*weights.values()]), draw=draw_curve
        )
        training.run(
            job, place, resume=(place / "resume.safetensors").exists(), workers=1, stop_after=None,
            report=lambda row: print(row, file=sys.stderr, flush=True),
        )  # fmt: skip
    tensors = training.load_file(place / "model.safetensors")
    for name, weight in weights.items():
        weight.data.copy_(tensors[name])
    return memory.requires_grad_(False), read_lines(place / "curve.jsonl")[-1]["cpu_seconds"]


@torch.no_grad()
def scores(model: Pretrained, triples: list[Triple], prefix: Callable[[Triple], Tensor], task: Triples) -> Row:
    """Exact match and F1 in %, of the first line that the model says, and the loss of the first right answer."""
    found = []
    for triple in triples:
        before, query = prefix(triple), Tokens.of([model.encode(task.asked(triple.question))])
        (said,) = model.generate(before, query, most=ANSWER_TOKENS, stop=model.stop)
        text = (model.decode(said.tokens).strip().splitlines() or [""])[0]
        (values,) = score(model, before, query, [model.encode(" " + triple.answers[0])])
        found.append((exact(text, triple.answers), f1(text, triple.answers), -sum(values) / len(values)))
    means = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    errors = (torch.tensor(found, dtype=torch.float64).std(0) / len(found) ** 0.5).tolist()
    return {
        "exact_match": 100 * means[0], "standard_error": 100 * errors[0], "f1": 100 * means[1],
        "loss": means[2], "loss_standard_error": errors[2],
    }  # fmt: skip


def measure(
    setting: Setting, model: Pretrained, dev: list[Triple], train: list[Triple], folder: Path, *, wanted: Callable[[str, int], bool]
) -> list[Row]:
    """Rows of one memory, for every number of steps; or the two bounds."""
    task, rows, cost = setting.spec().task, [], 0.0

    def behind(triple: Triple, *, shown: bool) -> Tensor:
        return model.embed(Tokens.of([[*model.opening, *(model.encode(triple.context) if shown else [])]]))

    ways: dict[tuple[str, int], Callable[[Triple], Tensor]] = {}
    if setting.memory == "none":
        model.to(setting.device)
        ways = {("closed book", 0): partial(behind, shown=False), ("full context", 0): partial(behind, shown=True)}
    else:
        memory, cost = trained(model, train, setting, folder)

        def written(triple: Triple, *, steps: int) -> Tensor:
            context = Tokens.of([model.encode(triple.context)])
            there = Tokens(context.ids.to(setting.device), context.mask.to(setting.device))
            return memory.prefix(memory.write(memory.start(1), there, steps=steps), control=memory.read_control)

        ways = {(setting.memory, k): partial(written, steps=k) for k in STEPS[setting.memory]}
    for (name, steps), prefix in ways.items():
        if wanted(name, steps):
            began = time.process_time()
            row = scores(model, dev, prefix, task)
            seconds = round(time.process_time() - began, 1)
            seen = 0 if setting.memory == "none" else setting.triples
            rows.append({"memory": name, "steps": steps, "triples": seen, **row, "train_cpu_seconds": cost, "cpu_seconds": seconds})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def key_of(row: Row) -> tuple[Any, ...]:
    """What a row is of; the published model has no rate."""
    return (*(row[name] for name in KEY), row["rate"] if row["triples"] else None)


def label(row: Row) -> str:
    """Of a row."""
    name = {"gradmem": "GradMem", "rmt": "RMT"}.get(row["memory"])
    return str(row["memory"]) if name is None else f"{name}, K = {row['steps']}"


def trainings(rows: list[Row]) -> list[tuple[str, int, float, dict[str, Row]]]:
    """Model, triples, rate and the rows of each training by label, those of the published model beside them."""
    groups = sorted({(row["model"], row["triples"], row["rate"]) for row in rows if row["triples"]})
    return [
        (*group, {label(row): row for row in rows if row["model"] == group[0] and (not row["triples"] or (row["triples"], row["rate"]) == group[1:])})
        for group in groups
    ]


def verdict(rows: list[Row]) -> list[str]:
    """The claim in three parts, for each training."""
    lines = []
    for model, triples, rate, own in trainings(rows):
        pairs = [("GradMem, K = 2", "GradMem, K = 0"), ("GradMem, K = 2", "RMT, K = 1"), ("GradMem, K = 5", "GradMem, K = 1")]
        for better, worse in pairs:
            if better in own and worse in own:
                a, b = own[better], own[worse]
                error = (a["standard_error"] ** 2 + b["standard_error"] ** 2) ** 0.5
                word = "holds" if a["exact_match"] - b["exact_match"] > 2 * error else "FAILS"
                lines.append(
                    f"{word}   {model}, {triples} triples at {rate:g}: {better} {a['exact_match']:.1f} against {worse} {b['exact_match']:.1f} "
                    f"(+- {error:.1f}), F1 {a['f1']:.1f} and {b['f1']:.1f}, loss {a['loss']:.2f} and {b['loss']:.2f} nats"
                )
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Loss of the right answer and F1 of every way; one panel a training."""
    found = trainings(rows)
    with figure(path, width=4.2 * len(found), height=3.2, columns=len(found)) as panels:
        for axes, (model, triples, rate, own) in zip(panels, found, strict=True):
            trained = [f"{name}, K = {k}" for name, memory in (("RMT", "rmt"), ("GradMem", "gradmem")) for k in STEPS[memory]]
            names = [name for name in ("closed book", *trained, "full context") if name in own]
            at = torch.arange(len(names)).tolist()
            axes.barh(at, [own[name]["loss"] for name in names], xerr=[own[name]["loss_standard_error"] for name in names], height=0.7)
            axes.set_yticks(at, [f"{name} ({own[name]['f1']:.0f})" for name in names], fontsize=8)
            axes.set(title=f"{model}, {triples} triples at {rate:g}", xlabel="loss of the right answer, nats (F1, %)")


def report(rows: list[Row]) -> None:
    """Table and verdict."""
    heads = ("memory", "triples", "rate", "CPU s of training", "exact match, %", "F1, %", "loss, nats", "model")
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in sorted(rows, key=lambda row: (row["model"], row["triples"], row["rate"])):
        rate = row["rate"] if row["triples"] else "-"
        print(
            f"| {label(row)} | {row['triples']} | {rate} | {row['train_cpu_seconds']:.0f} | {row['exact_match']:.1f} +- {row['standard_error']:.1f} "
            f"| {row['f1']:.1f} | {row['loss']:.3f} +- {row['loss_standard_error']:.3f} | {row['model']} |"
        )
    print("\npaper, GPT-2, exact match: " + ", ".join(f"{name} {value}" for name, value in PAPER.items()))
    print("\n" + "\n".join(verdict(rows)))


def main() -> int:
    """Train, measure or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="directory of a Hugging Face model, or a GGUF file")
    parser.add_argument("--name", help="what to call it in the rows; its file name where left out")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and dev.jsonl")
    parser.add_argument("--memories", nargs="+", choices=("none", "rmt", "gradmem"), default=["none", "rmt", "gradmem"])
    parser.add_argument("--triples", type=int, default=64, help="to train on, counted as often as they are seen")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--longest", type=int, default=40, help="most tokens of a sentence, in training and measuring")
    parser.add_argument("--dev", type=int, default=40, help="questions to measure with, spread over the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "gradmem_squad", help="where trainings stand, to be gone on with")
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="small: 8 triples, 3 questions, no rows kept")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    if arguments.report:
        rows = read_lines(PLACE)
        draw(rows, HERE.parent / "docs" / "figures" / "gradmem_squad.png")
        report(rows)
        return 0
    if arguments.scale == "small":
        arguments.triples, arguments.dev, arguments.slots = 8, 3, 2
    run(arguments, [] if arguments.scale == "small" else read_lines(PLACE))
    return 0


def run(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """What has no row yet."""
    train, dev = (read_triples(str(arguments.data / f"{part}.jsonl")) for part in ("train", "dev"))
    published = load_pretrained(arguments.model)
    short = [triple for triple in dev if len(published.encode(triple.context)) <= arguments.longest]
    dev = [short[i] for i in torch.linspace(0, len(short) - 1, min(arguments.dev, len(short))).long().tolist()]
    common = {name: getattr(arguments, name) for name in ("triples", "slots", "longest", "batch", "rate", "seed", "device")}
    stamp = {"model": arguments.name or Path(arguments.model).name, "slots": arguments.slots, "dev": len(dev)}
    stamp |= {name: common[name] for name in ("longest", "batch", "rate", "seed")} | {"torch": str(torch.__version__)}
    done = {key_of(row) for row in rows}

    def wanted(memory: str, steps: int, *, seen: int) -> bool:
        return key_of(stamp | {"memory": memory, "steps": steps, "triples": seen}) not in done

    for memory in arguments.memories:
        setting = Setting(memory=memory, data=str(arguments.data / "train.jsonl"), model=arguments.model, **common)
        seen = 0 if memory == "none" else arguments.triples
        model = published if memory == "none" else load_pretrained(arguments.model, attention="graven")  # an adapter changes it
        new = measure(setting, model, dev, train, arguments.runs / stamp["model"], wanted=partial(wanted, seen=seen))
        rows += [stamp | row for row in new]
        if arguments.scale == "full":  # another call may have written rows of its own meanwhile
            write_lines(PLACE, [*(row for row in read_lines(PLACE) if row not in rows), *rows])
    report(rows)


if __name__ == "__main__":
    sys.exit(main())
