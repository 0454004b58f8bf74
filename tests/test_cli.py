"""The command line: what each verb prints where, how it exits, and that whatever a user can get wrong is one line."""

import io
import json
import math
import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import cases
import pytest
import test_train
import torch
import zoo

from graven import cli
from graven.errors import Outcome
from graven.memory.file import About, Memory
from graven.report import read_lines

RECORDS = "aB:7x\nc3:Qm\nZz:00\nhi:yo\nk9:Lp\nMe:mo\nry:42\nGr:aV\n"
WORDS = "w5 w17 w3 w40 w41 w9"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Every test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Exit status, standard output and standard error of a command line."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model directory of a tiny Llama that can be taught a few words."""
    folder = tmp_path_factory.mktemp("saved")
    cases.sharp(cases.llama()).model.save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def memory(place, run):
    """The file `m.graven` of eight records."""
    (place / "records.txt").write_text(RECORDS)
    assert run("write", "records.txt", "-o", "m.graven")[0] == 0
    return "m.graven"


@pytest.fixture
def text(place, run, directory):
    """The file `t.graven` of a few words."""
    (place / "words.txt").write_text(WORDS)
    assert run("write", "words.txt", "-o", "t.graven", "--model", directory, "--slots", 8)[0] == 0
    return "t.graven"


def assert_one_line(result, *parts):
    """Wrong use: exit 2, nothing on standard output, one line on standard error that holds the parts."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("graven: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def only_object(result):
    """The object of a `--json` run, and that nothing else is on standard output."""
    code, out, err = result
    assert out.count("\n") == 1
    return code, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")), err


# The program


def test_no_verb_and_help_show_the_verbs(run):
    shown = run("--help")
    assert shown == run()
    assert (shown[0], shown[2]) == (0, "")
    for verb in ("demo", "write", "ask", "recite", "verify", "inspect", "train"):
        assert f"  {verb}  " in shown[1]
        assert run(verb, "--help")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nope"], "No such option: --nope. Try graven --help."),
        (["nope"], "No such command 'nope'. Try graven --help."),
        (["ask"], "Missing argument 'MEMORY'. Try graven --help."),
        (["ask", "m"], "Missing argument 'QUERY...'. Try graven --help."),
        (["recite"], "Missing argument 'MEMORY'."),
        (["inspect"], "Missing argument 'MEMORY'."),
        (["train"], "Missing argument 'SPEC'."),
        (["write", "x"], "Missing option '-o' / '--out'."),
        (["write", "-o", "y"], "Missing argument 'FILE'."),
        (["write", "x", "-o", "y", "--slots", "many"], "Invalid value for '--slots'"),
        (["write", "x", "-o", "y", "--rate", "fast"], "Invalid value for '--rate'"),
        (["write", "x", "-o", "y", "--colour", "red"], "No such option: --colour"),
        (["write", "x", "y", "-o", "z"], "unexpected extra argument"),
        (["ask", "m", "q", "--max-tokens", "1.5"], "Invalid value for '--max-tokens'"),
        (["inspect", "m", "--model", "x"], "No such option: --model"),
    ],
)
def test_a_command_that_cannot_be_read_is_one_line(arguments, part, run):
    assert_one_line(run(*arguments), part)


HELP = "import sys, graven.cli; code = graven.cli.main(['--help']); print(code, 'torch' in sys.modules, 'rich.console' in sys.modules)"


def test_help_is_there_at_once_and_without_torch():
    """Seen: about 0.15 s; the bound is for a machine that is busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1].split()[:2] == ["0", "False"]
    assert done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_reader_that_leaves_is_no_error(memory):
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "graven.cli", "inspect", memory]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_error_of_our_own_shows_its_traceback(run, memory, monkeypatch):
    monkeypatch.setattr(Memory, "load", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("inspect", memory)


# write


def test_write_says_what_a_person_wants_to_know(run, place):
    (place / "records.txt").write_text(RECORDS)
    code, out, err = run("write", "records.txt", "-o", "m.graven")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("m.graven: 56 tokens in 8 vectors, 4096 bytes, ")
    assert second == "8 of 8 queries answered from the memory alone"
    assert sorted(path.name for path in place.iterdir()) == ["m.graven", "records.txt"]


def test_write_gives_one_object_for_machines(run, place):
    (place / "records.txt").write_text(RECORDS)
    code, facts, err = only_object(run("write", "records.txt", "-o", "m.graven", "--json"))
    assert (code, err) == (0, "")
    assert {"path", "kind", "model", "tokens", "slots", "bytes", "steps", "seconds", "loss", "token_accuracy", "recited_tokens"} <= set(facts)
    about = Memory.load("m.graven").about
    assert (facts["path"], facts["kind"], facts["model"], facts["tokens"], facts["slots"], facts["bytes"]) == (
        "m.graven", "records", "records", 56, 8, 4096,
    )  # fmt: skip
    assert facts["loss"] == list(about.losses)
    assert len(facts["loss"]) == facts["steps"] == about.steps > 0
    assert facts["recited_tokens"] == about.recited


def test_write_with_a_language_model_says_how_much_it_recites(run, place, directory):
    (place / "words.txt").write_text(WORDS)
    code, out, err = run("write", "words.txt", "-o", "t.graven", "--model", directory, "--slots", 8)
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "recites 6 of 6 tokens before the first miss (teacher-forced accuracy 100.0%)"
    code, facts, _ = only_object(run("write", "words.txt", "-o", "t.graven", "--model", directory, "--slots", 8, "--json"))
    assert (code, facts["kind"], facts["model"], facts["recited_tokens"], facts["token_accuracy"]) == (0, "text", str(directory), 6, 1.0)


@pytest.mark.parametrize("data", [RECORDS.encode(), RECORDS.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + RECORDS.encode()])
def test_write_reads_standard_input_whatever_its_line_ends_and_byte_order_mark(data, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("write", "-", "-o", "m.graven")[0] == 0
    assert Memory.load("m.graven").about.answered == 8


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ["the text holds no record; give at least one `key:value` line."]),
        (b"\n\n", ["the text holds no record"]),
        (b"Once upon a time\n", ["line 1 is 'Once upon a time'", "--model PATH"]),
        (b"aa:bb\n\xff\xfe:cc", ["t.txt is not UTF-8 (byte 0xff at offset 6); convert it first."]),
        (b"aa:b\x00", ["has the character '\\x00'"]),
        ("aa:é1".encode(), ["has the character 'é'; this model knows letters and digits only."]),
        (b"aa:bb\naa:cc", ["line 2 repeats the key 'aa'"]),
    ],
)
def test_a_text_that_cannot_be_written_is_one_line_and_no_file(data, parts, run, place):
    (place / "t.txt").write_bytes(data)
    assert_one_line(run("write", "t.txt", "-o", "m.graven"), *parts)
    assert_one_line(run("write", "t.txt", "-o", "m.graven", "--json"), *parts)
    assert [path.name for path in place.iterdir()] == ["t.txt"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.txt", "-o", "m"], "cannot read missing.txt: No such file or directory."),
        ([".", "-o", "m"], "cannot read .: Is a directory."),
        (["r.txt", "-o", "missing/m"], "cannot write missing/m: No such file or directory."),
        (["r.txt", "-o", "locked/m"], "cannot write locked/m: its folder is read-only."),
        (["r.txt", "-o", "r.txt"], "r.txt exists and is no memory that can be read, so it is left alone; choose another name."),
        (["r.txt", "-o", "."], ". is a folder; give the name of a file to write."),
        (["r.txt", "-o", "/dev/null"], "/dev/null exists and is no memory"),
        (["r.txt", "-o", "n" * 300], "File name too long"),
        (["r.txt", "-o", "m", "--slots", "0"], "`slots` is 0 and records was trained with 8"),
        (["r.txt", "-o", "m", "--slots", "100"], "`slots` is 100 and records was trained with 8"),
        (["r.txt", "-o", "m", "--steps", "-1"], "`steps` is -1; it must be at least 0"),
        (["r.txt", "-o", "m", "--rate", "0"], "`rate` is 0.0"),
        (["r.txt", "-o", "m", "--deadline", "-1"], "`deadline` is -1.0 seconds"),
        (["r.txt", "-o", "m", "--deadline", "nan"], "`deadline` is nan seconds"),
        (["r.txt", "-o", "m", "--seed", "-1"], "`seed` is -1"),
        (["r.txt", "-o", "m", "--seed", str(1 << 70)], "`seed` is "),
        (["r.txt", "-o", "m", "--model", "./nowhere"], "there is no directory './nowhere'"),
        (["r.txt", "-o", "m", "--model", "locked"], "the directory locked holds no model"),
        (["r.txt", "-o", "m", "--model", "r.txt"], "r.txt is a file and no GGUF file"),
        (["r.txt", "-o", "m", "--model", ""], "there is no directory ''"),
    ],
)
def test_a_write_that_cannot_be_is_one_line_and_changes_nothing(arguments, part, run, place):
    (place / "r.txt").write_text(RECORDS)
    (place / "locked").mkdir(mode=0o555)
    assert_one_line(run("write", *arguments), part)
    assert sorted(path.name for path in place.iterdir()) == ["locked", "r.txt"]
    assert (place / "r.txt").read_text() == RECORDS
    assert list((place / "locked").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--slots", "0"], "`slots` is 0; it must be at least 1."),
        (["--slots", "128"], "has 128 positions, memory included; ask for fewer slots"),
        (["--rate", "0"], "`rate` is 0.0; it must be above 0. The default is 0.3."),
        (["--rate", "nan"], "`rate` is nan"),
    ],
)
def test_an_option_that_does_not_fit_a_language_model_is_one_line(options, part, run, place, directory):
    (place / "w.txt").write_text(WORDS)
    assert_one_line(run("write", "w.txt", "-o", "m", "--model", directory, *options), part)
    assert not (place / "m").exists()


def test_standard_output_that_takes_no_more_and_input_that_is_closed_are_one_line(run, place, capsys, monkeypatch):
    (place / "r.txt").write_text(RECORDS)
    run("write", "r.txt", "-o", "m")
    full = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(full, "flush", lambda: os.stat(place / "nowhere"), raising=False)
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(["inspect", "m"]) == 2
    assert capsys.readouterr().err == "graven: cannot write to standard output: No such file or directory.\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["inspect", "m"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["write", "-", "-o", "m"]) == 2
    assert capsys.readouterr().err == "graven: standard input is closed; give the path of a text file, or open it.\n"
    assert cli.main(["ask", "n" * 300, "k"]) == 2
    assert capsys.readouterr().err.startswith("graven: there is no file nnn")


def test_no_steps_write_the_start_state(run, place, directory):
    for model, words in (("records", RECORDS), (directory, WORDS)):
        (place / "t.txt").write_text(words)
        code, facts, err = only_object(run("write", "t.txt", "-o", "m", "--model", model, "--steps", 0, "--json"))
        assert (code, facts["steps"], facts["loss"], facts["outcome"], err) == (0, 0, [], "DONE", "")


def test_a_write_that_falls_short_exits_1_says_why_and_keeps_its_file(run, place, directory):
    (place / "w.txt").write_text(WORDS)
    for options, outcome in (
        (["--steps", 1], Outcome.STEPS),
        (["--deadline", 0], Outcome.DEADLINE),
        (["--rate", 1e39, "--steps", 5], Outcome.DIVERGED),
    ):
        code, out, err = run("write", "w.txt", "-o", "m", "--model", directory, *options)
        assert (code, err) == (1, f"graven: {outcome.value}\n")
        assert out.startswith("m: 6 tokens in 1 vectors")
        assert Memory.load("m").about.outcome == outcome.name


def test_records_that_a_deadline_or_few_steps_left_unanswered_are_told(run, place):
    (place / "r.txt").write_text(RECORDS)
    code, out, err = run("write", "r.txt", "-o", "m", "--deadline", 0)
    assert (code, err) == (1, f"graven: {Outcome.LATE.value}\n")
    many = "".join(f"{a}{b}:{b}{a}\n" for a in "abcdefgh" for b in "ijklmnop")
    (place / "r.txt").write_text(many)
    code, out, err = run("write", "r.txt", "-o", "m", "--steps", 1)
    answered = Memory.load("m").about.answered
    assert answered < 64
    assert code == 1
    assert f"{answered} of 64 queries answered" in out
    assert err == f"graven: {64 - answered} queries are not answered right; give a larger --steps, or write less\n"


def test_a_text_that_the_tokenizer_cannot_spell_is_told(run, place, directory):
    (place / "w.txt").write_text("hello")
    _, _, err = run("write", "w.txt", "-o", "m", "--model", directory, "--steps", 0)
    assert err == "graven: the tokenizer cannot spell this text exactly; what is recited will differ where it could not\n"


def test_an_older_memory_is_replaced(run, place, memory):
    before = (place / memory).read_bytes()
    (place / "other.txt").write_text("aa:bb")
    assert run("write", "other.txt", "-o", memory)[0] == 0
    assert (place / memory).read_bytes() != before


def test_a_file_is_readable_by_whoever_may_read_files(place, memory):
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((place / memory).stat().st_mode) == 0o666 & ~umask


# ask


def test_one_answer_is_printed_bare_and_several_with_their_queries(run, memory):
    assert run("ask", memory, "aB") == (0, "7x\n", "")
    assert run("ask", memory, "aB", "?!Me:") == (0, "aB\t7x\n?!Me:\tmo\n", "")


def test_answers_for_machines(run, memory):
    code, facts, err = only_object(run("ask", memory, "aB", "Me", "--json"))
    assert (code, err) == (0, "")
    assert list(facts) == ["answers", "rule"]
    assert facts["rule"] is None  # of records: a key is there or not
    assert [(a["query"], a["text"]) for a in facts["answers"]] == [("aB", "7x"), ("Me", "mo")]
    told = {"query", "text", "log_probability", "log_probability_without", "page", "known"}
    assert all(set(a) == told and a["known"] and -0.7 < a["log_probability"] < 0 for a in facts["answers"])


def test_a_key_that_is_not_there_gets_a_guess_a_sentence_and_exits_1(run, memory):
    code, out, err = run("ask", memory, "zz")
    assert (code, len(out), err) == (1, 3, f"graven: 'zz' is not a key of this memory; '{out.strip()}' is a guess\n")
    code, facts, _ = only_object(run("ask", memory, "zz", "--json"))
    assert (code, facts["answers"][0]["text"]) == (1, out.strip())


def test_every_key_that_is_not_there_is_told_and_all_that_are_there_pass(run, memory):
    absent = [a + b for a in "XQW5" for b in "tuvw"]
    code, _, err = run("ask", memory, *absent, "aB")
    assert code == 1
    assert err.count("is not a key of this memory") == len(err.splitlines()) == len(absent)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["aBc"], "the query 'aBc' has 3 characters; this model takes 2."),
        (["a!"], "has the character '!'"),
        (["aB", ""], "the query '' has 0 characters"),
        ([os.fsdecode(b"\xff\xfe")], "has the character '\\udcff'"),
        (["aB", "--max-tokens", "0"], "`max_tokens` is 0; it must be at least 1."),
        (["aB", "--model", "./nowhere"], "there is no directory './nowhere'"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(arguments, part, run, memory):
    assert_one_line(run("ask", memory, *arguments), part)
    assert_one_line(run("ask", memory, *arguments, "--json"), part)


def test_a_text_is_gone_on_with(run, text):
    assert run("ask", text, "w5 w17", "--max-tokens", 3) == (0, "w3 w40 w41\n", "")
    assert_one_line(run("ask", text, "w1 " * 200), "has 128 positions; shorten the query or lower --max-tokens.")
    assert_one_line(run("ask", text, os.fsdecode(b"\xff")), "the query has U+DCFF, half of a surrogate pair")


def test_an_answer_is_searched_for_drawn_ended_or_told_as_it_comes(run, text):
    assert run("ask", text, "w5 w17", "--max-tokens", 3, "--beams", 2) == (0, "w3 w40 w41\n", "")
    assert run("ask", text, "w5 w17", "--max-tokens", 3, "--top-k", 1, "--seed", 4) == (0, "w3 w40 w41\n", "")
    assert run("ask", text, "w5 w17", "--max-tokens", 3, "--stop", " w41", "--stop", "w90") == (0, "w3 w40\n", "")
    assert run("ask", text, "w5 w17", "--max-tokens", 3, "--stream") == (0, "w3 w40 w41\n", "")
    code, out, _ = run("ask", text, "w5 w17", "w3", "--max-tokens", 3, "--temperature", 0.5, "--count", 2)
    assert code in (0, 1)
    assert [line.split("\t")[0] for line in out.splitlines()] == ["w5 w17", "w5 w17", "w3", "w3"]


def test_an_answer_that_the_memory_does_not_change_is_told(run, text, monkeypatch):
    monkeypatch.setattr("graven.answer.FOUND_GAIN", 1e9)
    rule = only_object(run("ask", text, "w5 w17", "--max-tokens", 3, "--json"))[1]["rule"]
    assert rule.keys() == {"gain", "cost", "missed", "passed"}
    for options in ([], ["--stream"]):
        code, out, err = run("ask", text, "w5 w17", "--max-tokens", 3, *options)
        assert (code, out) == (1, "w3 w40 w41\n")
        assert err.startswith("graven: 'w5 w17' is not in memory; 'w3 w40 w41', of log probability -")
        assert f"this was said of {rule['missed']:.0%} of right answers" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--tempereture", "1"], "No such option: --tempereture"),
        (["--temperature", "0"], "`temperature` is 0.0; it must be above 0."),
        (["--seed", "3"], "`seed` is 3 and nothing is drawn"),
        (["--beams", "2", "--top-p", "0.5"], "give one of the two"),
        (["--count", "2"], "a greedy answer is one"),
        (["--min-tokens", "9", "--max-tokens", "3"], "`min_tokens` is 9 and an answer has at most 3 tokens"),
        (["--stream", "--json"], "--stream prints the answer to one query as it comes"),
        (["--stream", "--beams", "2"], "only one answer comes token by token"),
        (["w3", "--stream"], "ask one query"),
    ],
)
def test_settings_of_an_answer_that_cannot_be_are_one_line(options, part, run, text):
    assert_one_line(run("ask", text, "w5 w17", *options), part)


def test_records_are_answered_in_one_way(run, memory):
    assert_one_line(run("ask", memory, "aB", "--temperature", "1"), "answers a key with its most probable value and in no other way")
    assert run("ask", memory, "aB", "--stream") == (0, "7x\n", "")


def test_the_wrong_model_is_refused_by_name(run, memory, text, directory):
    for verb, arguments in (("ask", ["aB"]), ("recite", [])):
        assert_one_line(
            run(verb, memory, *arguments, "--model", directory), "written with records (fingerprint ", f"and {directory} has fingerprint "
        )
        assert_one_line(run(verb, text, *arguments, "--model", "records"), f"written with {directory}", "and records has fingerprint ")


# recite


def test_recite_gives_the_text_and_says_whether_it_is_whole(run, text, directory):
    assert run("recite", text) == (0, f"{WORDS}\n", "")
    assert only_object(run("recite", text, "--json")) == (0, {"text": WORDS, "exact": True, "tokens": 6}, "")
    run("write", "words.txt", "-o", "start", "--model", directory, "--steps", 0)
    code, out, err = run("recite", "start")
    recited = Memory.load("start").about.recited
    assert code == 1
    assert len(out.split()) == 6
    assert err == f"graven: not the text that was written: at the write, {recited} of 6 tokens were reproduced before the first miss\n"
    code, facts, _ = only_object(run("recite", "start", "--json"))
    assert (code, facts["exact"], facts["text"]) == (1, False, out.removesuffix("\n"))


def test_a_terminal_without_the_letters_still_shows_the_text(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    cli.say("naïve 😀 \udcff")
    assert stream.buffer.getvalue() == b"na\\xefve \\U0001f600 \\udcff\n"


# verify


def test_a_memory_is_verified_against_its_text(run, place, text, memory):
    code, out, err = run("verify", text, "--against", "words.txt")
    assert (code, err) == (0, "")
    assert out == "recites 6 of 6 tokens before the first miss (6)\nteacher-forced accuracy 1.0000 (1.0000)\n"
    assert run("verify", memory, "--against", "records.txt") == (0, "8 of 8 queries answered from the memory alone (8)\n", "")
    (place / "questions.txt").write_text("w5 w17\tw3\nw60\n")
    code, facts, err = only_object(run("verify", text, "--against", "words.txt", "--questions", "questions.txt", "--json"))
    assert (code, err, facts["recited"], facts["shortfalls"]) == (0, "", 6, [])
    assert facts["fidelity"]["memory"]["queries"] == 2
    assert facts["fidelity"]["memory"]["accuracy"] == 1.0
    code, out, _ = run("verify", text, "--against", "words.txt", "--probes", 2)
    assert code == 0
    assert "closed book" in out


def test_a_memory_that_falls_short_of_its_file_exits_1(run, text):
    written = Memory.load(text)
    Memory(written.state.flip(1), written.about).save("worse")
    code, out, err = run("verify", "worse", "--against", "words.txt")
    assert code == 1
    assert "of 6 tokens before the first miss (6)" in out
    assert "tokens are recited exactly, and the file says 6\n" in err


def test_what_cannot_be_verified_is_one_line(run, place, text, memory):
    (place / "other.txt").write_text("w5 w6")
    assert_one_line(run("verify", text, "--against", "other.txt"), "the text has 2 tokens and 6 were written; give the very text that was.")
    assert_one_line(run("verify", text, "--against", "missing"), "cannot read missing")
    assert_one_line(run("verify", text), "Missing option '--against'")
    assert_one_line(run("verify", memory, "--against", "records.txt", "--probes", "2"), "is asked every key")


@pytest.mark.usefixtures("text")
def test_a_write_tells_what_it_measured(run, directory):
    code, out, _ = run("write", "words.txt", "-o", "p.graven", "--model", directory, "--slots", 8, "--probes", 2)
    assert code == 0
    assert out.splitlines()[3].split() == ["same", "answer", "same", "token", "KL", "nats", "a", "token"]
    assert "closed book" in run("inspect", "p.graven")[1]
    code, facts, _ = only_object(run("write", "words.txt", "-o", "p.graven", "--model", directory, "--slots", 8, "--probes", 2, "--json"))
    assert facts["fidelity"]["closed_book"]["queries"] == 2
    assert_one_line(run("write", "records.txt", "-o", "r.graven", "--probes", 2), "cannot read records.txt")


# inspect


def test_inspect_shows_everything_and_needs_no_model(run, memory, text, monkeypatch):
    def gone(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("graven.model.load", gone)
    for name, kind, tokens in ((memory, "records", 56), (text, "text", 6)):
        code, out, err = run("inspect", name)
        assert (code, err) == (0, "")
        assert out.startswith(f"kind            {kind}, format {About.version}\n")
        assert out.endswith("A memory can reproduce its text by design: keep this file as you would keep the text.\n")
        loaded = Memory.load(name)
        code, facts, err = only_object(run("inspect", name, "--json"))
        assert (code, err) == (0, "")
        assert (facts["kind"], facts["tokens"], facts["bytes"], facts["content_hash"]) == (kind, tokens, loaded.bytes, loaded.content_hash)
        assert facts["base"] == {"name": loaded.about.base.name, "fingerprint": loaded.about.base.fingerprint, "revision": None}
        assert facts["pages"][0]["text_hash"] == loaded.about.pages[0].text_hash
        assert loaded.content_hash in out


def test_inspect_of_a_memory_without_steps(run, place):
    (place / "r.txt").write_text(RECORDS)
    run("write", "r.txt", "-o", "m", "--steps", 0)
    assert "loss            no step was taken" in run("inspect", "m")[1]


@pytest.mark.parametrize("verb", ["inspect", "recite", "ask"])
@pytest.mark.parametrize("data", [None, b"", b"aB:7x\n", b"\x80\x04.", "cut", "flipped"])
def test_a_file_that_is_no_memory_is_one_line(verb, data, run, place, memory):
    whole = (place / memory).read_bytes()
    if data is not None:
        (place / "f").write_bytes({"cut": whole[:-1], "flipped": whole[:-1] + bytes([whole[-1] ^ 1])}.get(data, data))
    assert_one_line(run(verb, "f", *(["aB"] if verb == "ask" else [])), " f")


# Interrupted


def interrupt_at(step):
    """A progress bar at which a user presses Ctrl-C."""

    def tick(now, *_):
        if now == step:
            raise KeyboardInterrupt

    return tick


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C at the third step of whatever runs next."""
    plain = cli.progress_bar

    @contextmanager
    def bar(*arguments, **settings):
        with plain(*arguments, **settings):
            yield interrupt_at(3)

    monkeypatch.setattr(cli, "progress_bar", bar)
    monkeypatch.setattr("graven.train.draw_curve", lambda path, _: path.write_bytes(b""))  # takes longer than a tiny training
    return lambda: monkeypatch.setattr(cli, "progress_bar", plain)


INTERRUPTED = "graven: interrupted; no half-written file is left, and a training goes on with --resume\n"


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("older", [False, True])
def test_an_interrupted_write_leaves_no_file_or_the_old_one(older, run, place):
    (place / "r.txt").write_text(RECORDS)
    before = None
    if older:
        Memory(torch.ones(1, 8, 4), Memory.load(made(place)).about).save("m")
        before = (place / "m").read_bytes()
    assert run("write", "r.txt", "-o", "m") == (130, "", INTERRUPTED)
    assert (place / "m").exists() == older
    assert not older or (place / "m").read_bytes() == before
    assert sorted(path.name for path in place.iterdir()) == (["m", "r.txt"] if older else ["r.txt"])


def made(place):
    """Some memory in a folder beside."""
    import graven

    return graven.load("records").write("aa:bb").save(place.parent / f"{place.name}.made")


def test_an_interrupted_training_is_resumed_to_the_same_bits(run, place, interrupted):
    (place / "tiny.toml").write_text(test_train.TOML.replace("checkpoint_every = 4", "checkpoint_every = 2"))
    assert run("train", "tiny.toml", "--out", "stopped") == (130, "", INTERRUPTED)
    assert sorted(path.name for path in (place / "stopped").iterdir()) == ["curve.jsonl", "curve.png", "resume.safetensors"]
    interrupted()
    assert_one_line(run("train", "tiny.toml", "--out", "stopped"), "holds an unfinished run; pass --resume to go on with it")
    assert run("train", "tiny.toml", "--out", "stopped", "--resume")[0] == 0
    assert run("train", "tiny.toml", "--out", "whole")[0] == 0
    assert (place / "stopped" / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()


# train


def test_train_leaves_a_model_that_writes_and_answers(run, place):
    (place / "tiny.toml").write_text(test_train.TOML)
    code, out, err = run("train", "tiny.toml")
    assert (code, err) == (0, "")
    assert out == "checkpoint: runs/tiny   use it with: graven write FILE --model runs/tiny -o OUT\n"
    assert len(read_lines(place / "runs" / "tiny" / "curve.jsonl")) == test_train.STEPS
    (place / "r.txt").write_text("a:b\nc:d")
    assert run("write", "r.txt", "-o", "m", "--model", "runs/tiny")[0] in (0, 1)  # twelve steps teach it nothing
    code, facts, _ = only_object(run("ask", "m", "a", "--json"))
    assert facts["answers"][0]["query"] == "a"
    assert_one_line(run("write", "r.txt", "-o", "m2", "--model", "runs/tiny", "--slots", 3), "was trained with 2; leave `slots` out.")
    assert_one_line(run("train", "tiny.toml"), "runs/tiny holds a finished checkpoint; choose another folder with --out.")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.toml"], "cannot read missing.toml: No such file or directory."),
        (["."], "cannot read .: Is a directory."),
        (["bad.toml"], "bad.toml is no TOML file"),
        (["wrong.toml"], "`wrong.toml` has the unknown key `sead`"),
        (["tiny.toml", "--resume"], "runs/tiny holds no run to resume; leave out --resume to start one."),
        (["tiny.toml", "--out", "bad.toml"], "cannot make the folder bad.toml: File exists."),
    ],
)
def test_a_training_that_cannot_be_is_one_line(arguments, part, run, place):
    (place / "tiny.toml").write_text(test_train.TOML)
    (place / "wrong.toml").write_text(test_train.TOML.replace("seed", "sead"))
    (place / "bad.toml").write_text("seed = = 3")
    assert_one_line(run("train", *arguments), part)


# demo


def test_the_demo_answers_sixteen_records_and_leaves_a_picture(run, place):
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "16 records (95 bytes of text) into 8 vectors (4096 bytes)"
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[-1].endswith("16/16 answered")
    assert len([line for line in steps if line.endswith("16/16 answered")]) < len(steps)  # not from the start
    assert out.count(" ok") == 16
    assert lines[-1] == "picture: graven-demo.png"
    assert (place / "graven-demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in place.iterdir()] == ["graven-demo.png"]


@pytest.mark.parametrize(("png", "part"), [("locked/a.png", "its folder is read-only"), ("missing/a.png", "No such file or directory")])
def test_a_picture_that_cannot_be_written_is_told_before_the_work(png, part, run, place, monkeypatch):
    monkeypatch.setattr("graven.demo.run", lambda _: pytest.fail("the work was done"))
    (place / "locked").mkdir(mode=0o555)
    assert_one_line(run("demo", "--png", png), f"cannot write {png}", part)


# The helper


def test_two_lines_are_not_one():
    for result in ((2, "", "graven: a\nb\n"), (1, "", "graven: a\n"), (2, "x", "graven: a\n"), (2, "", "a\n")):
        with pytest.raises(AssertionError):
            assert_one_line(result)


def test_the_bar_is_silent_where_no_terminal_watches(capsys):
    with cli.progress_bar("writing", total=3) as tick:
        tick(1, math.nan, 0.5)
    assert capsys.readouterr() == ("", "")
