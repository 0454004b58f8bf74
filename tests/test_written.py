"""`graven write` with an objective: what it prints, what it stores, where it falls short, and what it refuses."""

import json

import cases
import pytest
import zoo

import graven
from graven import cli
from graven.distill import Distilled, Saved
from graven.engrave import Engraved
from graven.errors import Outcome
from graven.memory.file import Agreement, Memory
from graven.written import Wish, Written, lines_of, shortfalls, written

PROMPT = " ".join(f"w{7 * n % 40 + 50}" for n in range(24))  # w2 and w0 are special tokens, which are found inside longer words too
QUERIES = [(f"w{n} w{n + 1}", f"w{n + 2}") for n in range(30, 45)]
TEMPLATE = "w90 {% for m in messages %}{{ m['content'] }} w91{% endfor %}{% if add_generation_prompt %} w92 {% endif %}"
SMALL = ["--slots", "4", "--steps", "4"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model directory of a tiny Llama with a chat template."""
    folder = tmp_path_factory.mktemp("saved")
    cases.sharp(cases.llama()).model.save_pretrained(folder)
    tokenizer = zoo.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "queries.txt").write_text("".join(f"{query}\t{answer}\n" for query, answer in QUERIES))
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps({"query": query, "answer": answer}) + "\n" for query, answer in QUERIES))
    return tmp_path


@pytest.fixture
def run(capsys, directory):
    def call(*arguments, model=directory):
        capsys.readouterr()
        code = cli.main(["write", "prompt.txt", "-o", "p.graven", *([] if model is None else ["--model", str(model)]), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


DISTILL = ["--objective", "distill", "--queries", "queries.txt", *SMALL]


def test_a_distilled_prompt_is_reported_beside_its_controls(run):
    code, out, err = run(*DISTILL, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["held_out"]["queries"] == len(QUERIES) // 3
    assert set(facts["held_out"]) == {"queries", "kl", "top_token", "accuracy"}
    assert set(facts["controls"]) == {"no_prompt", "random", "reconstruct"}
    assert all(set(control) == set(facts["held_out"]) for control in facts["controls"].values())
    assert set(facts["saved"]) == {"tokens", "bytes", "flops", "write_tokens", "paid_after"}
    assert (facts["objective"], facts["chat"], facts["slots"], facts["steps"], facts["outcome"]) == ("distill", False, 4, 4, "DONE")
    about = Memory.load("p.graven").about
    assert (about.objective, about.pages[0].tokens, len(about.pages)) == ("distill", 24, 1)
    assert about.agreement == Agreement(**facts["held_out"])


def test_queries_in_plain_text_and_in_json_lines_give_the_same_memory(run):
    hashes = []
    for file in "queries.txt", "queries.jsonl":
        assert run("--objective", "distill", "--queries", file, *SMALL)[0] == 0
        hashes.append(Memory.load("p.graven").state.tolist())
    assert hashes[0] == hashes[1]


def test_a_person_reads_a_table(run):
    code, out, err = run(*DISTILL)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("p.graven: 24 tokens in 4 vectors, 512 bytes, 4 steps, ")
    assert lines[1] == "against the full prompt, on 5 queries that were not trained on:"
    assert [line[:13].strip() for line in lines[3:8]] == ["memory", "no prompt", "random", "reconstruct", "full prompt"]
    assert lines[7].split()[2:4] == ["0.000", "100.0%"]
    assert lines[8].startswith("a query saves 20 tokens, ")


def test_without_queries_the_model_asks_itself(run, monkeypatch):
    monkeypatch.setattr("graven.models.text.OWN_QUERIES", 9)
    code, out, _ = run("--objective", "distill", *SMALL, "--json")
    facts = json.loads(out)
    assert code in (0, 1)  # four steps may not be enough
    assert facts["held_out"]["queries"] == 3
    assert facts["held_out"]["accuracy"] is None


def test_a_file_replaces_what_the_model_asks_itself_with(run, place, directory, monkeypatch):
    monkeypatch.setattr("graven.models.text.OWN_QUERIES", 9)
    (place / "ask.jsonl").write_text('"w7 w8{}"\n')
    states = []
    for more in ["--study-prompts", "ask.jsonl"], []:
        assert run("--objective", "distill", *SMALL, *more)[0] in (0, 1)  # four steps may not be enough
        states.append(Memory.load("p.graven").state)
    memory, _ = graven.load(directory, slots=4).distill(PROMPT, steps=4, prompts=["w7 w8{}"])
    assert memory.state.equal(states[0])
    assert not memory.state.equal(states[1])


def test_in_a_chat_prompt_and_query_stand_in_the_user_turn(run, directory):
    code, _, _ = run(*DISTILL, "--chat")
    memory = Memory.load("p.graven")
    assert code in (0, 1)  # four steps may not be enough
    assert memory.about.chat is True
    assert list(memory.about.before) == [90]
    assert graven.load(directory).ask(memory, "w30 w31", max_tokens=2).text


@pytest.mark.parametrize("objective", ["continue", "reconstruct=1,continue=0.5"])
def test_other_objectives_take_every_step(run, objective):
    code, out, _ = run("--objective", objective, *SMALL, "--json")
    facts = json.loads(out)
    assert (code, facts["objective"], facts["steps"], facts["outcome"]) == (0, objective, 4, "DONE")
    assert "held_out" not in facts


def test_a_text_is_recited_from_inside_a_chat(run, directory, place):
    (place / "prompt.txt").write_text("w5 w17 w3 w40")
    assert run("--slots", "4", "--chat")[0] == 0
    model, memory = graven.load(directory), Memory.load("p.graven")
    assert memory.about.recited == 4
    assert model.recite(memory).text == "w5 w17 w3 w40"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--objective", "recite"], "the objective 'recite' is unknown"),
        (["--queries", "queries.txt"], "--queries is given and nothing is distilled; add --objective distill."),
        (["--objective", "continue", "--queries", "queries.txt"], "nothing is distilled"),
        (["--objective", "distill", "--queries", "none.txt"], "cannot read none.txt"),
        (["--objective", "distill", "--queries", "prompt.txt"], "there are 1 queries and 3 are needed"),
        (["--objective", "distill", "--queries", "queries.txt", "--slots", "24"], "the prompt has 24 tokens and the memory 24 vectors"),
        (["--study-prompts", "queries.txt"], "--study-prompts is given and nothing is distilled; add --objective distill."),
        ([*DISTILL, "--study-prompts", "queries.txt"], "--study-prompts is given and so is --queries; give one of the two."),
        ([*DISTILL, "--rate", "0"], "`rate` is 0.0"),
        ([*DISTILL, "--steps", "-1"], "`steps` is -1"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_one_line(run, arguments, words, place):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not (place / "p.graven").exists()


@pytest.mark.parametrize(("arguments", "option"), [(["--objective", "distill"], "--objective"), (["--chat"], "--chat")])
def test_a_trained_model_takes_no_objective(run, arguments, option):
    code, out, err = run(*arguments, model=None)
    assert (code, out) == (2, "")
    assert err.startswith(f"graven: {option} is for frozen models, and records was trained for its own")


def test_a_model_without_a_template_has_no_chat(tmp_path, run):
    cases.llama().model.save_pretrained(tmp_path / "mute")
    zoo.tokenizer().save_pretrained(tmp_path / "mute")
    code, _, err = run(*DISTILL, "--chat", model=tmp_path / "mute")
    assert code == 2
    assert "has no chat template; leave --chat out" in err


def distilled(directory, *, kl, outcome=Outcome.DONE):
    """What a write would give whose held-out divergence is `kl` where no prompt has 2."""
    memory = written(
        graven.load(directory, slots=4), PROMPT, Wish(objective="reconstruct"), steps=0, rate=None, seed=0, deadline=None, progress=lambda *_: None
    ).memory
    engraved = Engraved(memory.state, [], 0.0, [0], outcome, 0.0)
    controls = {"no_prompt": Agreement(queries=3, kl=2.0, top_token=0.5)}
    saved = Saved(tokens=20, bytes=None, flops=10**9, write_tokens=100, paid_after=5)
    held_out = Agreement(queries=3, kl=kl, top_token=0.5)
    return Written(memory=memory, distilled=Distilled(engraved=engraved, held_out=held_out, controls=controls, full_prompt=None, saved=saved))


def test_a_memory_that_is_no_better_than_a_control_falls_short(directory):
    assert shortfalls(distilled(directory, kl=1.9)) == ([], [])
    (line,), _ = shortfalls(distilled(directory, kl=2.0))
    assert line.startswith("the memory is no closer to the full prompt than the control 'no prompt'")


def test_a_model_that_keeps_nothing_saves_no_bytes(directory, tmp_path):
    assert lines_of(distilled(directory, kl=1.0), tmp_path)[-1] == "a query saves 20 tokens, 1 GFLOP; the write has paid after 5 queries"
