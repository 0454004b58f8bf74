"""Several memories: pages keep their bits, what is lost is measured, and two models never meet."""

import dataclasses
import random

import cases
import pytest
import torch
from asserts import assert_refused

import graven
from graven import cli
from graven.engrave import engrave, hits_of
from graven.errors import MismatchError, Outcome, SpecError, TextError
from graven.memory.file import Memory
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.several import difference, fork, join
from graven.model import TextModel
from graven.several import Settings, append, exact_rows, merge, recited, same_answers, values_of
from graven.tasks.base import Tokens

OLD, NEW = "w5 w17 w3 w40 w41 w9", "w8 w60 w21 w30"
QUIET = Settings(probes=0)


@pytest.fixture(scope="module")
def model():
    return TextModel(cases.sharp(cases.llama()), slots=8)


@pytest.fixture(scope="module")
def old(model):
    return model.write(OLD)


@pytest.fixture(scope="module")
def new(model):
    return model.write(NEW)


@pytest.fixture(scope="module")
def both(model, old, new):
    return merge(model, old, new, settings=QUIET)


@pytest.fixture(scope="module")
def taken(model, old):
    return append(model, old, NEW, into="vectors", settings=QUIET)


@pytest.fixture(scope="module")
def records():
    return graven.load("records")


def lines(numbers, *, seed=0):
    """Records of different keys."""
    draw = random.Random(seed)
    return "\n".join(f"{number:02d}:{draw.randrange(100):02d}" for number in numbers)


# A page more


def test_a_page_more_leaves_every_bit_of_the_others(both, old, new):
    assert torch.equal(both.memory.state, torch.cat([old.state, new.state]))
    assert both.memory.about.pages == old.about.pages + new.about.pages
    assert both.memory.about.outcome == Outcome.EXACT.name


def test_what_a_page_recites_is_what_it_recited(model, both, old, new):
    assert [(kept.recited, kept.lost) for kept in both.kept] == [((old.about.tokens,) * 2, False), ((new.about.tokens,) * 2, False)]
    assert model.recite(both.memory).exact


def test_a_page_that_does_not_hold_its_text_is_said_to_hold_what_it_does(model, old):
    halfway = model.write(NEW, steps=1)
    said = halfway.about.pages[0].recited, halfway.about.token_accuracy
    assert said < (halfway.about.tokens, 1.0)
    kept = merge(model, halfway, old, settings=Settings(probes=1)).kept[0]
    assert (kept.recited, kept.token_accuracy) == ((said[0],) * 2, (said[1],) * 2)


def test_appending_is_merging_with_what_the_text_alone_is_written_as(model, both, old):
    appended = append(model, old, NEW, settings=QUIET)
    assert torch.equal(appended.memory.state, both.memory.state)
    assert [kept.name for kept in appended.kept] == ["old", "new"]


def test_a_joined_memory_survives_a_file(both, tmp_path):
    loaded = Memory.load(both.memory.save(tmp_path / "both"))
    assert loaded.about == both.memory.about
    assert torch.equal(loaded.state, both.memory.state)


def test_answers_are_compared_with_those_of_before(model, both, old):
    asked, same = same_answers(model, old, both.memory, model.model.encode(OLD), Settings(probes=1))
    assert (asked, same in (0.0, 1.0)) == (1, True)
    assert same_answers(model, old, old, model.model.encode(OLD), Settings(probes=1)) == (1, 1.0)
    nothing = Memory(torch.zeros_like(old.state), old.about)
    assert same_answers(model, old, nothing, model.model.encode(OLD), Settings(probes=4))[1] < 1.0
    assert both.kept[0].same_answers is None  # nothing was asked


# The same vectors


def test_vectors_take_a_text_on_and_keep_their_number(model, old, new, taken):
    assert taken.memory.state.shape == old.state.shape
    assert [kept.recited for kept in taken.kept] == [(old.about.tokens,) * 2, (None, new.about.tokens)]
    assert exact_rows(model, taken.memory) == [model.model.encode(OLD) + model.model.encode(NEW)]


def test_descent_on_the_new_text_alone_forgets_the_old_one(model, old, new):
    """Why it is not offered."""
    memory = GradMem(model.model, GradMemSpec(slots=8, steps=300, rule=Adam(rate=0.3 * model.model.embedding_scale), order="none"))
    memory.initial.data.copy_(old.state[0])
    ids = [model.model.encode(text) for text in (OLD, NEW)]
    done = engrave(memory, Tokens.of(ids[1:]), steps=300, until_exact=True)
    assert done.recited == [new.about.tokens]
    assert recited(hits_of(memory, done.state, ids[0]), 0, old.about.tokens) < old.about.tokens


def test_only_the_last_page_takes_a_text_on(model, both, old, new):
    done = append(model, both.memory, "w70", into="vectors", settings=QUIET)
    assert torch.equal(done.memory.state[0], both.memory.state[0])
    assert [page.tokens for page in done.memory.about.pages] == [old.about.tokens, new.about.tokens + len(model.model.encode("w70"))]


def test_what_a_write_that_is_too_short_loses_is_told(model, old):
    done = append(model, old, NEW, into="vectors", settings=dataclasses.replace(QUIET, steps=1, rate=3.0))
    assert not done.kept[0].lost  # the best state is kept, and that is the first one
    assert done.kept[1].recited[1] < done.kept[1].tokens
    assert done.memory.about.outcome != Outcome.EXACT.name


def test_a_memory_that_does_not_hold_its_text_takes_no_other_on(model):
    halfway = model.write(OLD, steps=1)
    assert_refused(SpecError, r"recites \d of the \d tokens of page 1", lambda: append(model, halfway, NEW, into="vectors", settings=QUIET))


def test_merging_into_vectors_is_appending_what_the_second_recites(model, old, new, taken):
    one = merge(model, old, new, into="vectors", settings=QUIET)
    assert torch.equal(one.memory.state, taken.memory.state)


def test_tokens_count_up_to_the_first_miss_of_the_page():
    hits = [True, True, False, True]
    assert [recited(hits, 0, 2), recited(hits, 2, 2), recited(hits, 1, 3)] == [2, 0, 1]


# Records


def test_records_of_both_memories_are_answered(records):
    done = append(records, records.write(lines(range(6))), lines(range(6, 12)))
    assert done.memory.about.records == 12
    assert len(done.memory.about.pages) == 2
    assert [kept.same_answers for kept in done.kept] == [1.0, 1.0]
    assert done.kept[1].answered == (6, 6)


def test_records_written_together_take_the_vectors_of_one_page(records):
    text = lines(range(12))
    old, new = (records.write("\n".join(part)) for part in (text.split("\n")[:6], text.split("\n")[6:]))
    done = merge(records, old, new, into="vectors")
    assert [len(page.keys) for page in done.memory.about.pages] == [12]
    assert values_of(records, done.memory) == dict(line.split(":") for line in text.split("\n"))


def test_records_that_vectors_lose_are_told(records):
    old, new = (records.write(lines(numbers)) for numbers in (range(8), range(8, 16)))
    done = merge(records, old, new, into="vectors", settings=Settings(steps=1))
    assert [kept.answered[0] for kept in done.kept] == [8, 8]
    assert sum(kept.answered[1] for kept in done.kept) == done.memory.about.answered < 16
    assert any(kept.lost for kept in done.kept)


def test_keys_that_cannot_be_found_leave_the_old_records_unmeasured(records, monkeypatch):
    monkeypatch.setattr("graven.quantize.MOST_KEYS", 10)
    old = records.write(lines(range(4)))
    done = append(records, old, lines(range(4, 8)))
    assert [(kept.queries, kept.same_answers) for kept in done.kept] == [(0, None), (4, 1.0)]
    assert not done.kept[0].lost
    assert_refused(SpecError, "of which 0 keys can be found", lambda: append(records, old, lines(range(4, 8)), into="vectors"))


def test_a_key_that_is_there_already_is_refused(records):
    memory = records.write(lines(range(6)))
    assert_refused(TextError, "1 of the keys are in both memories", lambda: append(records, memory, lines(range(5, 8), seed=1)))


# A part, and two side by side


def test_a_fork_of_all_pages_is_the_same_file_and_of_some_those_pages(both, old, new):
    assert fork(both.memory).content_hash == both.memory.content_hash
    assert fork(both.memory, [0, 1]).content_hash == both.memory.content_hash
    turned = fork(both.memory, [1, 0])
    assert torch.equal(turned.state, torch.cat([new.state, old.state]))
    assert fork(both.memory, [1]).about.pages == new.about.pages


def test_pages_that_say_the_same_of_themselves_change_places(old):
    twin = Memory(old.state * 1.01, old.about)
    turned = fork(join(old, twin), [1, 0])
    assert torch.equal(turned.state, torch.cat([twin.state, old.state]))


def test_of_what_was_imported_nothing_is_said_to_be_exact(old):
    nothing = dataclasses.replace(old.about.pages[0], tokens=0, recited=0)
    about = dataclasses.replace(old.about, pages=(nothing,), token_accuracy=0.0, losses=(), steps=0, outcome=Outcome.IMPORTED.name)
    both = join(Memory(old.state, about), Memory(old.state * 2, about))
    part = fork(both, [1])
    assert [memory.about.outcome for memory in (both, part)] == [Outcome.IMPORTED.name] * 2
    assert part.about.token_accuracy == 0.0


@pytest.mark.parametrize("pages", [[], [2], [-1], [0, 0]])
def test_pages_that_are_not_there_are_refused(pages, both):
    assert_refused(SpecError, "name some of 1 to 2", lambda: fork(both.memory, pages))


def test_a_difference_names_pages_that_are_shared_moved_and_only_in_one(both, old, new):
    found = difference(both.memory, fork(both.memory, [1, 0]))
    assert [(pair.one, pair.other, pair.distance) for pair in found.same] == [(0, 1, 0.0), (1, 0, 0.0)]
    assert not found.none
    assert difference(both.memory, old).only_one == (1,)
    assert difference(old, new).only_other == (0,)
    nudged = Memory(old.state * 1.5, old.about)
    assert [pair.distance for pair in difference(old, nudged).same] == pytest.approx([0.5])
    assert difference(old, old).none


# What does not go together


def test_memories_of_different_models_are_refused_with_both_names(model, old):
    base = dataclasses.replace(old.about.base, name="someone/else", fingerprint="cd" * 32)
    foreign = Memory(old.state, dataclasses.replace(old.about, base=base))
    for call in (
        lambda: join(old, foreign),
        lambda: merge(model, old, foreign, settings=QUIET),
        lambda: difference(old, foreign),
        lambda: append(model, foreign, NEW, settings=QUIET),
    ):
        assert_refused(MismatchError, rf"({old.about.base.name}.*someone/else|someone/else.*{old.about.base.name})", call)


def test_memories_that_are_read_in_different_ways_are_refused(model, old):
    other = TextModel(model.model, slots=4).write(NEW, steps=2)
    assert_refused(SpecError, "`slots` is 8 of the first memory and 4 of the second", lambda: join(old, other))
    distilled = Memory(old.state, dataclasses.replace(old.about, objective="distill"))
    assert_refused(SpecError, "distil the longer prompt anew", lambda: append(model, distilled, NEW, settings=QUIET))


# The command line


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_the_verbs_say_what_is_left_and_leave_the_memories_alone(run, tmp_path):
    (tmp_path / "a").write_text(lines(range(4)))
    (tmp_path / "b").write_text(lines(range(4, 8)))
    (tmp_path / "book").write_text("anna:1234")
    assert run("write", "a", "-o", "a.graven")[0] == run("write", "b", "-o", "b.graven")[0] == 0
    before = (tmp_path / "a.graven").read_bytes()
    code, out, _ = run("append", "a.graven", "b", "-o", "ab.graven")
    assert (code, out.splitlines()[1:]) == (
        0, ["old: 100% of 4 answers as before", "new: 4 records answered right (4), 100% of 4 answers as before"]
    )  # fmt: skip
    assert run("merge", "a.graven", "b.graven", "-o", "m.graven")[0] == 0
    assert run("diff", "ab.graven", "m.graven", "--vectors")[:2] == (0, "page 1 = page 1, the same bits\npage 2 = page 2, the same bits\n")
    assert run("fork", "ab.graven", "-o", "f.graven", "--pages", "2")[0] == 0
    code, out, _ = run("diff", "f.graven", "a.graven")
    assert code == 1
    assert out.startswith("page 1 only in f.graven\npage 1 only in a.graven\n--- f.graven\n+++ a.graven\n")
    assert run("ask", "ab.graven", "01", "06")[0] == 0
    assert (tmp_path / "a.graven").read_bytes() == before
    assert run("write", "book", "-o", "p.graven", "--model", "phonebook")[0] == 0
    assert "compare the vectors alone with --vectors" in run("diff", "p.graven", "p.graven")[2]
    for pages in ("0", "x", "2-1", "3"):
        assert run("fork", "ab.graven", "-o", "g.graven", "--pages", pages)[0] == 2
