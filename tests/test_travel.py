"""The verbs that take a memory elsewhere and look at a model: what they print, how they exit, and what they refuse in one line."""

import json
import shlex

import cases
import pytest
import test_cli
import zoo
from safetensors.torch import load_file, save_file

from graven import cli
from graven.memory.file import Memory

pytestmark = pytest.mark.plain  # what the verbs call has its shapes checked in tests of its own
WORDS = "w5 w17 w3 w40 w41 w9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model directory, and memories of words and of records."""
    folder = tmp_path_factory.mktemp("travel")
    cases.sharp(cases.llama()).model.save_pretrained(folder / "model")
    zoo.tokenizer().save_pretrained(folder / "model")
    (folder / "words.txt").write_text(WORDS)
    (folder / "records.txt").write_text(test_cli.RECORDS)
    assert cli.main(shlex.split(f"write {folder}/words.txt -o {folder}/t.graven --model {folder}/model --slots 8")) == 0
    assert cli.main(shlex.split(f"write {folder}/records.txt -o {folder}/r.graven")) == 0
    return folder


@pytest.fixture
def run(folder, capsys, tmp_path, monkeypatch):
    """Exit status, standard output and standard error of a command line; `M` stands for the folder of the module."""
    monkeypatch.chdir(tmp_path)

    def call(line):
        capsys.readouterr()
        code = cli.main([word.replace("M/", f"{folder}/") for word in shlex.split(line)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("to", "vectors"), [("peft", "8 vectors for peft, "), ("cartridge", "8 vectors for cartridge, "), ("tensor", "for tensor, ")]
)
def test_an_export_says_what_it_wrote(to, vectors, run):
    code, out, err = run(f"export M/t.graven --to {to} -o out")
    assert (code, err) == (0, "")
    assert vectors in out
    assert out.endswith(" bytes\n")


def test_an_export_comes_back_and_recites(run, folder):
    assert run("export M/t.graven --to peft -o adapter")[0] == 0
    code, out, _ = test_cli.only_object(run("import adapter -o back.graven --json"))
    assert code == 0
    assert out["content_hash"] == Memory.load(folder / "t.graven").content_hash
    assert run("recite back.graven") == (0, WORDS + "\n", "")


def test_a_body_and_a_tensor_hold_the_questions(run, tmp_path):
    _, out, _ = test_cli.only_object(run("export M/t.graven --to vllm -o b.json --question w5 --question 'w6 w7' --max-tokens 9 --json"))
    assert (out["format"], out["questions"], out["vectors"]) == ("vllm", 2, 8)
    body = json.loads((tmp_path / "b.json").read_text())
    assert (len(body["prompt_embeds"]), body["max_tokens"]) == (2, 9)
    assert "with a question behind" in run("export M/t.graven --to tensor -o t.safetensors --question w5 --question 'w6 w7'")[1]
    assert load_file(tmp_path / "t.safetensors")["attention_mask"].tolist() == [[0] + [1] * 9, [1] * 10]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("export M/t.graven --to gguf -o a", ["`to` is 'gguf'; it must be one of peft, cartridge, vllm, vllm-chat, tensor."]),
        ("export M/t.graven --to peft", ["Missing option '-o' / '--out'"]),
        ("export M/r.graven --to peft -o a", ["this memory holds records, which only the trained parts of records can read"]),
        ("export M/t.graven --to peft -o a --model records", ["was written with", "and records is no frozen language model"]),
        ("export M/t.graven --to peft -o nowhere/a", ["cannot write nowhere/a", "Choose a folder that exists"]),
        ("export nothing --to peft -o a", ["there is no file nothing"]),
        ("import M/model -o a", ["holds no adapter"]),
        ("import nothing -o a", ["there is no file nothing"]),
        ("import M/words.txt -o M/words.txt", ["exists and is no memory that can be read, so it is left alone"]),
        ("quantize M/t.graven --bits 3 -o a", ["`bits` is 3; it must be 8 or 4."]),
        ("quantize M/t.graven --bits 8 -o M/words.txt", ["exists and is no memory that can be read, so it is left alone"]),
        ("doctor nothing/here/at/all", ["there is no directory 'nothing/here/at/all'"]),
        ("doctor M/words.txt", ["is a file and no GGUF file"]),
    ],
)
def test_wrong_use_is_one_line(line, parts, run, folder):
    test_cli.assert_one_line(run(line), *parts)
    assert (folder / "words.txt").read_text() == WORDS


def test_vectors_without_a_name_need_a_model(run, tmp_path):
    assert run("export M/t.graven --to tensor -o t.safetensors")[0] == 0
    whole = load_file(tmp_path / "t.safetensors")
    save_file({"inputs_embeds": whole["inputs_embeds"]}, tmp_path / "bare.safetensors")
    test_cli.assert_one_line(run("import bare.safetensors -o a"), "bare.safetensors names no model; name the one whose vectors it holds with --model")
    test_cli.assert_one_line(run("import bare.safetensors -o a --model records"), "reads records with parts of its own")
    code, out, _ = run("import bare.safetensors -o a --model M/model")
    assert (code, out.split(" of ")[-1]) == (0, "a text that is not known\n")
    assert "imported from plain vectors" in run("inspect a")[1]
    assert run("ask a w5 --max-tokens 3 --model M/model")[0] in (0, 1)


def test_a_quantized_memory_is_smaller_and_says_so(run, tmp_path):
    code, out, err = run("quantize M/r.graven --bits 4 -o small.graven")
    assert (code, err) == (0, "")
    assert out.startswith("small.graven: 4 bits, 576 bytes of 4096; 8 of 8 answers are the same, top token 100.0%, KL ")
    assert "quantized       4 bits in groups of 32; 8 of 8 stayed the same" in run("inspect small.graven")[1]
    assert run("ask small.graven aB Gr") == (0, "aB\t7x\nGr\taV\n", "")
    _, facts, _ = test_cli.only_object(run("quantize M/r.graven --bits 8 -o small.graven --json"))
    assert facts["file_bytes"] == (tmp_path / "small.graven").stat().st_size < 4096
    assert (facts["bytes_before"], facts["bytes"], facts["kept"]["exact"]) == (4096, 1088, 1.0)


def test_a_quantized_memory_that_lost_something_exits_1(run, monkeypatch):
    monkeypatch.setattr("graven.memory.quantize.largest_code", lambda _: 1)  # three values a number: too coarse to recite
    code, out, err = run("quantize M/t.graven --bits 8 -o small.graven")
    assert code == 1
    assert "0 of 1 recitals are the same" in out
    assert "not all recitals are the same as before; give more --steps (100)" in err


def test_the_doctor_prints_a_table_and_a_verdict(run):
    code, out, err = run("doctor M/model")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("works with memories.")
    code, facts, _ = test_cli.only_object(run("doctor M/model --json"))
    assert (code, facts["works"], facts["architecture"]) == (0, True, "LlamaForCausalLM")
    assert all(set(check) == {"name", "ok", "found", "needed"} for check in facts["checks"])


def test_the_doctor_exits_1_where_a_model_does_not_work(run, tmp_path):
    zoo.build("Gemma3TextConfig", zoo.WIDE | {"use_bidirectional_attention": True}, seed=0).save_pretrained(tmp_path / "both")
    zoo.tokenizer().save_pretrained(tmp_path / "both")
    code, out, err = run("doctor both")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == "both does not work with memories: order of columns, padding."
