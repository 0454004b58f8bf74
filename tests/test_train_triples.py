"""Meta-training on triples: what learns is what the spec says, a run that was stopped ends with the same bits, and its folder writes and answers."""

import dataclasses
import json

import pytest
import torch
import zoo
from safetensors.torch import load_file

import graven
from graven import cli
from graven.answer import Answer
from graven.errors import MismatchError, ModelError, OutputError, SpecError, TextError
from graven.lm.adapter import Adapter
from graven.lm.pretrained import load_pretrained
from graven.memory.gradient import SGD, GradMemSpec
from graven.model import load
from graven.report import read_lines
from graven.several import append, merge, told
from graven.tasks.base import Tokens
from graven.tasks.queries import Query
from graven.tasks.triples import Triples, read_triples
from graven.train import TrainSpec
from graven.train_triples import BaseModel, TriplesSpec, answered, draw_curve, load_trained, new_memory, read_spec, rows_of, train_triples
from graven.training import Optimizer, Stage

STEPS = 5
MEMORY = GradMemSpec(slots=2, steps=1, rule=SGD(rate=1.0))
TOML = """
seed = 3
[task]
kind = "triples"
data = "pairs.jsonl"
template = "w3 {question} w4"
longest = 6
[model]
path = "base"
[adapter]
rank = 2
when = "write"
[memory]
slots = 2
steps = 1
rule = { rate = 1.0 }
[optimizer]
rate = 1e-2
batch = 4
micro_batch = 2
warm_up = 2
[[stage]]
steps = [0, 1, 2]
at_most = 5
"""


@pytest.fixture(autouse=True, scope="module")
def undrawn():
    """A curve is a file: matplotlib takes longer to draw one than a training of five steps. One test draws. One thread, as in every test."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graven.train_triples.draw_curve", lambda path, _: path.write_bytes(b"undrawn"))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny Llama, and triples about the first of two words."""
    folder = tmp_path_factory.mktemp("triples")
    zoo.architecture("llama").save_pretrained(folder / "base")
    zoo.tokenizer().save_pretrained(folder / "base")
    rows = [{"context": f"w{a} w{b}", "query": "w6", "target": f"w{a}"} for a in range(30, 36) for b in range(40, 46)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.toml").write_text(TOML)
    return folder


def spec_of(place, **changes):
    """Two micro-batches, and writes of no steps, which leave some weights without a gradient."""
    base = {
        "seed": 3,
        "task": Triples(kind="triples", data=str(place / "pairs.jsonl"), template="w3 {question} w4", longest=6),
        "model": BaseModel(path=str(place / "base")),
        "adapter": Adapter(rank=2, when="write"),
        "memory": MEMORY,
        "optimizer": Optimizer(rate=1e-2, batch=4, micro_batch=2, warm_up=2),
        "stage": (Stage(steps=(0, 1, 2), at_most=STEPS),),
    }
    return TriplesSpec(**{**base, **changes})


ADAPTERS = {"full": None, "always": Adapter(rank=2), "write": Adapter(rank=2, when="write"), "nothing": Adapter(rank=0)}


@pytest.fixture(scope="module", params=ADAPTERS)
def finished(request, place):
    """A run of each kind that nobody stopped, with its spec."""
    spec = spec_of(place, adapter=ADAPTERS[request.param])
    folder = place / f"run-{request.param}"
    assert train_triples(spec, folder) is not None
    return spec, folder


def bits(folder):
    return (folder / "model.safetensors").read_bytes()


# What learns


def test_a_finished_run_leaves_what_was_trained_and_nothing_else(finished):
    spec, folder = finished
    assert sorted(path.name for path in folder.iterdir()) == ["curve.jsonl", "curve.png", "model.json", "model.safetensors"]
    start = new_memory(spec, load_pretrained(spec.model.path, attention="graven"))
    wanted = {name: weight for name, weight in start.named_parameters() if weight.requires_grad}
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == wanted.keys()
    assert [name for name in saved if torch.equal(saved[name], wanted[name])] == []
    lora, base = [name for name in saved if "lora_" in name], [name for name in saved if name.startswith("model.") and "lora_" not in name]
    assert bool(lora) == (spec.adapter is not None and spec.adapter.rank > 0)
    assert bool(base) == (spec.adapter is None)
    rows = read_lines(folder / "curve.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert len({row["steps"] for row in rows}) > 1
    about = json.loads((folder / "model.json").read_text())
    assert about["trained"]["triples"] == "36 of 36"


@pytest.mark.plain  # a refusal that a shape check comes before
def test_memories_of_triples_are_compared_but_not_joined(finished):
    model = load(finished[1])
    one = model.write("w30 w40")
    assert told(model, one) == model.recite(one).text
    for act in (lambda: append(model, one, "w31 w41"), lambda: merge(model, one, one)):
        with pytest.raises(SpecError, match="write both texts anew"):
            act()


def test_a_curve_is_drawn(tmp_path):
    draw_curve(tmp_path / "c.png", [{"steps": k, "cpu_seconds": 60.0 * k, "loss": 1.0, "exact_match": 0.5} for k in (1, 2, 2)])
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_a_checkpoint_loads_as_it_was_trained(finished):
    spec, folder = finished
    trained = load_trained(folder, name="tiny")
    assert trained.spec == spec
    assert trained.model.name == "tiny"
    assert not any(weight.requires_grad for weight in trained.memory.parameters())
    saved = load_file(folder / "model.safetensors")
    there = dict(trained.memory.named_parameters())
    assert all(torch.equal(value, there[name]) for name, value in saved.items())


def test_the_size_of_a_micro_batch_changes_no_gradient(place):
    losses, states = [], []
    for micro_batch in (1, 4):
        spec = spec_of(place, optimizer=Optimizer(rate=1e-2, batch=4, micro_batch=micro_batch, warm_up=2), stage=(Stage(steps=(1,), at_most=3),))
        folder = place / f"micro-{micro_batch}"
        train_triples(spec, folder)
        losses.append([row["loss"] for row in read_lines(folder / "curve.jsonl")])
        states.append(load_file(folder / "model.safetensors")["initial"])
    for loss, state in zip(losses[1:], states[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-4)
        torch.testing.assert_close(state, states[0], rtol=1e-3, atol=1e-4)


def test_the_loss_is_that_of_each_answer_alone(place):
    spec = spec_of(place, adapter=ADAPTERS["always"])
    base = load_pretrained(spec.model.path, attention="graven")
    memory, rows = new_memory(spec, base), rows_of(base, read_triples(spec.task.data), spec)[::7]
    state = memory.write(memory.start(len(rows)), Tokens.of([row.context for row in rows]))
    losses, right = answered(memory, state, rows)
    for i, row in enumerate(rows):
        logits = memory.read(state[i : i + 1], Tokens.of([row.query + row.target[:-1]]))[0, len(row.query) :].detach()
        own = torch.nn.functional.cross_entropy(logits, torch.tensor(row.target))
        assert losses[i].item() == pytest.approx(own.item(), rel=1e-4)
        assert bool(right[i]) == (logits.argmax(-1).tolist() == row.target)


@pytest.mark.plain
def test_answers_are_learned_through_the_write_and_not_without_one(place):
    """A guess among six answers costs ln 6 = 1.79 nats, half of it a token, because the end is sure."""
    ends = {}
    for name, steps, length in (("written", 1, 60), ("not written", 0, 20)):
        spec = spec_of(
            place, adapter=None, memory=GradMemSpec(slots=4, steps=1, rule=SGD(rate=1.0)),
            optimizer=Optimizer(rate=1e-2, batch=16, micro_batch=16, warm_up=5),
            stage=(Stage(steps=(steps,), at_most=length),), checkpoint_every=1000,
        )  # fmt: skip
        train_triples(spec, place / name)
        ends[name] = sum(row["loss"] for row in read_lines(place / name / "curve.jsonl")[-5:]) / 5
    assert ends["written"] < 0.3
    assert ends["not written"] > 0.89
    model = graven.load(place / "written")
    assert [model.ask(model.write(f"w{a} w41"), "w6").text for a in range(30, 36)] == [f"w{a}" for a in range(30, 36)]


# Stopped, refused


@pytest.mark.parametrize("finished", ["full", "write"], indirect=True)
def test_a_run_that_was_stopped_ends_with_the_same_bits(finished, tmp_path):
    spec, whole = finished
    assert train_triples(spec, tmp_path / "run", stop_after=2) is None
    assert train_triples(spec, tmp_path / "run", resume=True, stop_after=1) is None
    assert train_triples(spec, tmp_path / "run", resume=True) is not None
    assert bits(tmp_path / "run") == bits(whole)
    with pytest.raises(OutputError, match="holds a finished checkpoint"):
        train_triples(spec, whole)


def test_a_run_goes_on_only_with_the_data_it_was_started_with(place, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text((place / "pairs.jsonl").read_text())
    spec = spec_of(place)
    spec = dataclasses.replace(spec, task=dataclasses.replace(spec.task, data=str(data)))
    train_triples(spec, tmp_path / "run", stop_after=1)
    data.write_text(data.read_text().replace("w30", "w50"))
    with pytest.raises(SpecError) as caught:
        train_triples(spec, tmp_path / "run", resume=True)
    assert str(caught.value) == (
        f"the data of the run in {tmp_path}/run has changed since it was started; bring back the old one, or choose another --out."
    )


def test_triples_that_are_too_long_are_left_out_and_counted(place, tmp_path):
    data = tmp_path / "d.jsonl"
    long = {"context": " ".join(["w40"] * 7), "query": "w6", "target": "w40"}
    data.write_text((place / "pairs.jsonl").read_text() + json.dumps(long) + "\n" + json.dumps(long | {"context": "w40", "query": "w6 " * 80}) + "\n")
    spec = spec_of(place)
    said = []
    spec = dataclasses.replace(spec, task=dataclasses.replace(spec.task, data=str(data)))
    train_triples(spec, tmp_path / "run", note=said.append, stop_after=0)
    assert said == ["2 of 38 triples are left out: their context has more than 6 tokens, or no room"]
    data.write_text(json.dumps(long))
    with pytest.raises(TextError, match="none of 1 triples has a context of at most 6 tokens"):
        train_triples(spec, tmp_path / "other", stop_after=0)


def test_a_model_whose_answers_cannot_end_is_refused(place, tmp_path):
    model = zoo.architecture("llama")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(tmp_path / "base")
    zoo.tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="has no end-of-text token"):
        train_triples(spec_of(place, model=BaseModel(path=str(tmp_path / "base"))), tmp_path / "run")


@pytest.mark.parametrize("adapter", [ADAPTERS["write"], ADAPTERS["nothing"]])
def test_what_no_gradient_reaches_is_not_trained(place, adapter):
    with pytest.raises(SpecError, match='`order` is "none", so no gradient goes through the write'):
        spec_of(place, adapter=adapter, memory=GradMemSpec(slots=2, steps=1, order="none"))


def test_a_stage_says_how_many_steps_a_write_takes(place):
    with pytest.raises(SpecError, match=r"needs `steps` in every \[\[stage\]\]"):
        spec_of(place, stage=(Stage(at_most=5),))


def test_an_adapter_that_is_switched_off_serves_one_worker(place, tmp_path):
    with pytest.raises(SpecError, match="`workers` is 2, and an adapter that is switched off to read cannot serve several at once"):
        train_triples(spec_of(place), tmp_path / "run", workers=2)
    train_triples(spec_of(place, adapter=ADAPTERS["always"]), tmp_path / "two", workers=2)
    assert bits(tmp_path / "two") == bits(place / "run-always")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.json").write_text((folder / "model.json").read_text().replace('"rank": 2', '"rank": 3')),
        lambda folder: (folder / "model.json").write_text((folder / "model.json").read_text().replace('"format": 1', '"format": 2')),
    ],
    ids=["no tensors", "empty", "other rank", "other format"],
)
def test_a_checkpoint_that_is_not_whole_is_refused_in_one_line(damage, place, tmp_path):
    folder = place / "run-write"
    for name in ("model.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    damage(tmp_path)
    with pytest.raises(ModelError, match="holds no whole graven checkpoint") as caught:
        graven.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_base_that_has_changed_is_refused(place, tmp_path):
    model = zoo.architecture("qwen2")
    model.save_pretrained(tmp_path / "base")
    zoo.tokenizer().save_pretrained(tmp_path / "base")
    for name in ("model.json", "model.safetensors"):
        (tmp_path / name).write_bytes((place / "run-write" / name).read_bytes())
    text = (tmp_path / "model.json").read_text()
    (tmp_path / "model.json").write_text(text.replace(str(place / "base"), str(tmp_path / "base")))
    with pytest.raises(ModelError, match="which is another model now; bring back the old one"):
        graven.load(tmp_path)


# What a folder is good for


@pytest.mark.parametrize("finished", ["full", "write"], indirect=True)
def test_a_folder_writes_asks_recites_and_verifies(finished, tmp_path):
    _, folder = finished
    model = graven.load(folder)
    memory = model.write("w31 w44 w45 w40 w41 w42 w43")
    assert (len(memory.about.pages), memory.about.slots, memory.about.steps, memory.about.tokens) == (2, 2, 1, 7)
    memory = graven.Memory.load(memory.save(tmp_path / "m.graven"))
    answers = model.ask_many(memory, ["w6", "w7 w8"], max_tokens=3)
    alone = [model.ask(memory, query, max_tokens=3) for query in ("w6", "w7 w8")]
    assert [(answer.query, answer.text) for answer in answers] == [("w6", alone[0].text), ("w7 w8", alone[1].text)]
    assert [answer.log_probability for answer in answers] == pytest.approx([answer.log_probability for answer in alone], abs=1e-4)
    pieces = model.stream(memory, "w6", max_tokens=3)
    assert isinstance(answers[0], Answer)
    assert "".join(pieces) == answers[0].text
    assert model.recite(memory).tokens == 7
    found = model.verify(memory, "w31 w44 w45 w40 w41 w42 w43", questions=[Query("w6", "w31")])
    assert found.shortfalls == ()
    assert found.token_accuracy == memory.about.token_accuracy
    assert found.recited == memory.about.recited
    assert found.fidelity.memory.queries == 1
    with pytest.raises(SpecError, match="was trained to answer questions, not to ask them"):
        model.verify(memory, "w31 w44 w45 w40 w41 w42 w43", probes=2)
    with pytest.raises(SpecError, match="fixed by its training"):
        model.write("w31", rate=0.1)
    with pytest.raises(SpecError, match="was trained with 2; leave `slots` out"):
        graven.load(folder, slots=3)


def test_a_memory_is_read_by_the_published_model_where_nothing_that_reads_was_trained(finished):
    spec, folder = finished
    model, base = graven.load(folder), graven.load(spec.model.path)
    memory = model.write("w31 w44")
    if spec.reads_as_base:
        own = model.ask(memory, "w6", max_tokens=4)
        assert base.ask(memory, spec.task.asked("w6"), max_tokens=4).log_probability == pytest.approx(own.log_probability, abs=1e-4)
    else:
        with pytest.raises(MismatchError):
            base.ask(memory, "w6")


def test_what_stands_around_a_memory_where_it_is_read_is_there_when_it_is_asked(place, tmp_path):
    memory = GradMemSpec(slots=2, steps=1, rule=SGD(rate=1.0), control=1, projection=True, write_head=True)
    trained = train_triples(spec_of(place, memory=memory, adapter=ADAPTERS["nothing"]), tmp_path / "run")
    model = graven.load(tmp_path / "run")
    written = model.write("w31 w44")
    said = trained.memory.answer(written.state, Tokens.of([model.model.encode("w3 w6 w4")]), most=5, stop=model.model.stop)[0]
    assert model.ask(written, "w6", max_tokens=5).log_probability == pytest.approx(sum(said.log_probabilities), abs=1e-4)


# The command line


def test_a_spec_file_names_the_kind_of_training(place, monkeypatch):
    monkeypatch.chdir(place)
    assert read_spec(place / "tiny.toml") == spec_of(place)
    assert isinstance(read_spec(graven.model.SHIPPED / "records.toml"), TrainSpec)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("rank = 2", "rank = -2", "`rank` is -2"),
        ('when = "write"', 'when = "never"', "`tiny.toml.adapter.when` is 'never'; it must be one of 'always', 'write'."),
        ("longest = 6", "longer = 6", "`tiny.toml.task` has the unknown key `longer`"),
        (TOML[TOML.index("[[stage]]") :], "", "`tiny.toml` lacks the key `stage`"),
        ("steps = [0, 1, 2]", "steps = [-1]", "a stage needs `steps` of at least 0 and `at_most` of at least 1."),
        ('path = "base"', 'path = "./none"', "there is no directory './none'"),
        ("pairs.jsonl", "none.jsonl", "there is no file 'none.jsonl'"),
    ],
)
def test_a_training_that_cannot_be_is_one_line(old, new, part, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (tmp_path / "tiny.toml").write_text(TOML.replace(old, new))
    assert cli.main(["train", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_train_write_ask_and_verify_from_the_command_line(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    folder = str(tmp_path / "run")
    assert cli.main(["train", "tiny.toml", "--out", folder]) == 0
    assert capsys.readouterr().out == f"checkpoint: {folder}   use it with: graven write FILE --model {folder} -o OUT\n"
    (tmp_path / "t.txt").write_text("w31 w44")
    assert cli.main(["write", str(tmp_path / "t.txt"), "-o", str(tmp_path / "m"), "--model", folder]) == 0
    capsys.readouterr()
    assert cli.main(["ask", str(tmp_path / "m"), "w6", "--max-tokens", "2", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["answers"][0]["query"] == "w6"
    assert cli.main(["verify", str(tmp_path / "m"), "--against", str(tmp_path / "t.txt")]) == 0
    assert cli.main(["write", str(tmp_path / "t.txt"), "-o", str(tmp_path / "m"), "--model", folder, "--chat"]) == 2
    assert "was trained for its own" in capsys.readouterr().err
