"""What a memory is worth beside its text and beside nothing, and whether that still holds."""

import dataclasses

import cases
import pytest
import torch
import zoo
from asserts import assert_refused

from graven.answer import Reader
from graven.errors import MismatchError, SpecError, TextError
from graven.fidelity import PROBE_TOKENS, PROBES, agreeing, fidelity, found_share, lines_of, probe, same_text, shortfalls, token_accuracy
from graven.lm import Pretrained
from graven.lm.cached import Prompted
from graven.memory.file import Memory
from graven.model import TextModel, load
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

WORDS = "w5 w17 w3 w40 w41 w60 w9"
QUESTIONS = [Query("w5 w17"), Query("w3"), Query("w90 w1 w8", answer="w7")]


@pytest.fixture(scope="module")
def model():
    return TextModel(cases.sharp(cases.llama()), slots=8)


@pytest.fixture(scope="module")
def memory(model):
    return model.write(WORDS, steps=300, probes=3)


@pytest.fixture(scope="module")
def ids(model):
    return model.model.encode(WORDS)


@pytest.fixture(scope="module")
def reader(model, memory):
    return Reader(model.model, memory)


# Against the definition


def defined(model, prefix, query, said):
    """Log probabilities of the tokens that follow a prefix and a query, one forward over the whole row."""
    row = torch.cat([prefix, model.embed(Tokens.of([[*query, *said]]))[0]])[None]
    with torch.no_grad():
        return model.logits(model.hidden(row))[0, len(prefix) + len(query) - 1 : -1].log_softmax(-1)


def test_the_measures_are_those_of_their_definition(model, reader, ids):
    found, lm = fidelity(reader, ids, QUESTIONS), model.model
    kls, top, values, exact = [], [], [], []
    for query in QUESTIONS:
        row, empty = lm.encode(query.text), torch.zeros(0, lm.width)
        text = lm.embed(Tokens.of([ids]))[0]
        (taught,) = lm.generate(text[None], Tokens.of([row]), most=8, stop=lm.stop)
        (said,) = lm.generate(reader.prefixes, Tokens.of([row]), most=8, stop=lm.stop)
        wanted, other = defined(lm, text, row, taught.whole), defined(lm, reader.prefixes[0], row, taught.whole)
        alone = defined(lm, empty, row, taught.whole)
        kls += (wanted.exp() * (wanted - other)).sum(-1).tolist()
        top += [token == int(best) for token, best in zip(taught.whole, alone.argmax(-1), strict=True)]
        values += wanted.gather(-1, torch.tensor(taught.whole)[:, None])[:, 0].tolist()
        exact.append(taught.whole == said.whole)
    assert found.memory.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert found.closed_book.top_token == pytest.approx(sum(top) / len(top))
    assert found.full_context.log_probability == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert found.memory.exact == sum(exact) / 3
    assert found.memory.queries == 3


def test_the_text_agrees_with_itself(reader, ids):
    full = fidelity(reader, ids, QUESTIONS).full_context
    assert (full.kl, full.top_token, full.exact) == (0.0, 1.0, 1.0)


def test_a_memory_that_is_the_text_itself_agrees_with_the_text(model, ids):
    start = model.write(WORDS, steps=0)
    perfect = Memory(model.model.embed(Tokens.of([ids])), dataclasses.replace(start.about, slots=len(ids)))
    found = fidelity(Reader(model.model, perfect), ids, QUESTIONS)
    assert (found.memory.top_token, found.memory.exact) == (1.0, 1.0)
    assert found.memory.kl == pytest.approx(0.0, abs=1e-4)
    assert found.closed_book.kl > 0.1


def test_an_answer_is_right_where_the_given_one_stands_in_it(model, reader, ids):
    lm = model.model
    texts = [lm.decode(row.tokens) for row in lm.generate(reader.prefixes.expand(2, -1, -1), Tokens.of([[5, 17], [3]]), most=8, stop=lm.stop)]
    right = [Query("w5 w17", answer=texts[0].upper().split()[1]), Query("w3", answer="nothing of the kind")]
    assert fidelity(reader, ids, right).memory.accuracy == 0.5
    assert fidelity(reader, ids, QUESTIONS[:2]).memory.accuracy is None


def test_no_question_is_no_measure(reader, ids):
    assert_refused(SpecError, "there is no question to measure with", lambda: fidelity(reader, ids, []))


# At the write


def numbers(measured):
    """All numbers of a fidelity."""
    parts = (part if isinstance(part, tuple) else (part,) for part in dataclasses.astuple(measured))
    return [number for part in parts for number in part if number is not None]


def test_a_write_keeps_what_it_measured_and_asks_the_same_questions_again(memory, reader, ids, tmp_path):
    kept, anew = memory.about.fidelity, probe(reader, ids, count=3, seed=0)
    assert numbers(kept) == pytest.approx(numbers(anew), rel=1e-5, abs=1e-6)  # sums in float32 depend on where in memory a tensor lies
    assert kept.memory.queries == kept.closed_book.queries == kept.full_context.queries == 3
    assert 0 <= kept.found <= 1
    assert 0 <= kept.false_found <= 1
    assert Memory.load(memory.save(tmp_path / "m")).about.fidelity == kept


def test_no_questions_are_asked_where_none_are_wanted(model):
    assert model.write("w5 w6", steps=0, probes=0).about.fidelity is None
    assert_refused(SpecError, "`probes` is -1; it must be at least 0", lambda: model.write("w5 w6", steps=0, probes=-1))
    assert PROBES > 0


def test_a_text_that_does_not_fit_into_the_model_beside_a_question_is_written_without_one(tmp_path):
    zoo.architecture("gpt2").save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    long = " ".join(f"w{n % 60 + 30}" for n in range(60))
    small = load(tmp_path, slots=4)
    written = small.write(long, steps=0, probes=2)
    assert written.about.fidelity is None
    assert_refused(TextError, "has positions for 64", lambda: small.verify(written, long, questions=[Query("w5")]))


def test_every_page_is_asked_and_the_text_is_all_of_them(model, monkeypatch):
    monkeypatch.setattr("graven.models.text.PAGE_TOKENS", 4)
    written = model.write(WORDS, steps=2, probes=2)
    assert len(written.about.pages) == 2
    assert written.about.fidelity.memory.queries == 2


# Verified


def test_a_memory_that_is_as_it_was_falls_short_of_nothing(model, memory, tmp_path):
    found = model.verify(Memory.load(memory.save(tmp_path / "m")), WORDS)
    assert (found.token_accuracy, found.recited, found.shortfalls) == (1.0, 7, ())
    assert found.fidelity == memory.about.fidelity


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_a_memory_that_changed_falls_short(model, memory, scale):
    found = model.verify(Memory(memory.state.flip(1) * scale, memory.about), WORDS, probes=0)
    assert found.recited < 7
    assert any(line == f"{found.recited} tokens are recited exactly, and the file says 7" for line in found.shortfalls)
    assert any(line.startswith("teacher-forced accuracy is ") for line in found.shortfalls)
    assert found.fidelity is None


def test_answers_that_agree_less_fall_short(memory):
    then = memory.about.fidelity
    better = dataclasses.replace(then, memory=dataclasses.replace(then.memory, exact=1.0, top_token=1.0))
    worse = dataclasses.replace(then, memory=dataclasses.replace(then.memory, exact=0.5, top_token=0.25))
    about = dataclasses.replace(memory.about, fidelity=better)
    assert shortfalls(about, token_accuracy=1.0, recited=7, probed=better) == ()
    assert shortfalls(about, token_accuracy=1.0, recited=7, probed=None) == ()
    assert shortfalls(about, token_accuracy=1.0, recited=7, probed=worse) == (
        "50.0% of the whole answers are those with the full text, and the file says 100.0%",
        "25.0% of the answer tokens are those with the full text, and the file says 100.0%",
    )


def test_given_questions_are_measured_and_held_against_nothing(model, memory):
    found = model.verify(memory, WORDS, questions=QUESTIONS)
    assert found.fidelity.memory.queries == 3
    assert found.fidelity.memory.accuracy is not None
    assert found.shortfalls == ()
    assert_refused(SpecError, "both given", lambda: model.verify(memory, WORDS, questions=QUESTIONS, probes=2))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{WORDS} w1", "the text has 8 tokens and 7 were written"),
        (WORDS.replace("w3", "w4"), "page 1 of 1 of the text is another"),
        ("", "is empty"),
    ],
)
def test_another_text_is_refused(text, sentence, model, memory):
    assert_refused(TextError, sentence, lambda: model.verify(memory, text))


def test_a_memory_of_another_model_is_refused(memory):
    other = TextModel(Pretrained(zoo.architecture("gpt2"), zoo.tokenizer(), name="gpt2"))
    assert_refused(MismatchError, "gpt2", lambda: other.verify(memory, WORDS))


def test_records_are_verified_by_every_key():
    records = load("records")
    written = records.write("aB:7x\nc3:Qm")
    assert records.verify(written, "aB:7x\nc3:Qm").answered == 2
    spoilt = Memory(-written.state, written.about)
    found = records.verify(spoilt, "aB:7x\nc3:Qm")
    assert found.shortfalls == (f"{found.answered} queries are answered, and the file says 2",)
    assert_refused(TextError, "is another", lambda: records.verify(written, "aB:7x\nc3:Qn"))
    assert_refused(SpecError, "is asked every key", lambda: records.verify(written, "aB:7x", probes=1))


# Parts


def test_the_accuracy_of_pages_is_the_share_of_their_tokens(reader, ids):
    assert token_accuracy(reader, [ids]) == 1.0
    wrong = [*ids[:-1], 11]
    assert token_accuracy(reader, [wrong]) == pytest.approx(6 / 7)
    assert agreeing(ids, wrong) == 6
    assert agreeing([], []) == 0


def test_a_text_is_told_page_by_page(memory, ids):
    assert same_text(ids, memory.about) == [ids]


def test_lines_show_memory_nothing_and_text_side_by_side(reader, ids):
    lines = lines_of(fidelity(reader, ids, QUESTIONS, ["w8 w1"]))
    assert [line.split("  ")[0] for line in lines[2:5]] == ["memory", "closed book", "full context"]
    assert lines[1].endswith("right")
    assert "of those to questions of no text" in lines[-1]


def test_what_is_found_is_found_where_there_is_something():
    """A model that sees the memory, and one whose layers add nothing."""
    seeing, plain = TextModel(cases.sharp(cases.llama()), slots=8), zoo.architecture("llama")
    for layer in plain.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    blind = TextModel(Pretrained(plain, zoo.tokenizer(), name="blind"), slots=4)
    readers = [Reader(one.model, one.write("w5 w17 w3 w40 w41 w9", steps=steps)) for one, steps in ((seeing, 300), (blind, 0))]
    assert [found_share(reader, [[5], [5, 17], [5, 17, 3]]) for reader in readers] == [1.0, 0.0]


def test_a_right_answer_may_be_longer_than_a_probe(model, memory):
    reader = Reader(model.model, memory)
    ids = model.model.encode(WORDS)
    rows = reader.rows(["w5"])
    (said,) = Prompted(model.model, reader.behind(ids)[0]).follow(rows, most=2 * PROBE_TOKENS, stop=model.model.stop)
    assert len(said.tokens) > PROBE_TOKENS
    found = fidelity(reader, ids, [Query("w5", model.model.decode(said.tokens))])
    assert found.full_context.accuracy == 1.0
