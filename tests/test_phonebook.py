"""A phone book: what `sample` draws, and the way from what people type to tokens and back."""

import pytest

from graven.errors import SpecError, TextError
from graven.measure import exact_match
from graven.model import load
from graven.tasks.phonebook import CHARACTERS, Phonebook

BOOK = Phonebook()


def text(tokens):
    return "".join(CHARACTERS[token] for token in tokens)


def entries(context):
    """Names and numbers of one context, read off its text."""
    assert context[0] == context[-1] == "\n"
    return [tuple(line.split(":")) for line in context[1:-1].split("\n")]


def test_the_picture_in_the_docstring_is_true():
    episode = BOOK.episode_of([[("anna", "5550"), ("bo", "123456")]])
    assert text(episode.context.row(0)) == "\nanna:5550\nbo:123456\n"
    assert "".join(".*"[on] for on in episode.values[0].tolist()) == "......*****...*******"
    assert text(episode.query.ids[0, 1][episode.query.mask[0, 1]].tolist()) == "\nbo:"
    assert text(episode.target.ids[0, 1][episode.target.mask[0, 1]].tolist()) == "123456\n"


@pytest.mark.parametrize(("size", "pairs"), [(3, 1), (2, 8), (0, 2)])
def test_every_name_is_unique_asked_once_and_answered_by_its_number(size, pairs, generator):
    episode = Phonebook(similar=0.5).sample(size, pairs=pairs, generator=generator)
    for b in range(size):
        found = entries(text(episode.context.row(b)))
        asked = [text(row[mask].tolist()) for row, mask in zip(episode.query.ids[b], episode.query.mask[b], strict=True)]
        said = [text(row[mask].tolist()) for row, mask in zip(episode.target.ids[b], episode.target.mask[b], strict=True)]
        assert asked == [f"\n{name}:" for name, _ in found]
        assert said == [f"{number}\n" for _, number in found]
        assert len({name for name, _ in found}) == pairs


def test_all_lengths_are_drawn_and_no_other(generator):
    episode = BOOK.sample(40, pairs=8, generator=generator)
    found = [entry for b in range(40) for entry in entries(text(episode.context.row(b)))]
    assert {len(name) for name, _ in found} == set(range(3, 9))
    assert {len(number) for _, number in found} == set(range(3, 7))


def test_similar_names_differ_in_one_letter_from_another(generator):
    def near(task):
        books = [[name for name, _ in entries(text(row))] for row in map(task.sample(30, pairs=8, generator=generator).context.row, range(30))]
        return sum(
            any(len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1 for b in book if b != a) for book in books for a in book
        )

    assert near(Phonebook(similar=0.5)) > 60
    assert near(Phonebook(similar=0.0)) == 0


def test_fewer_queries_ask_different_names_of_the_context(generator):
    episode = BOOK.sample(10, pairs=6, queries=4, generator=generator)
    for b in range(10):
        asked = [text(row[mask].tolist()) for row, mask in zip(episode.query.ids[b], episode.query.mask[b], strict=True)]
        assert len(set(asked)) == 4
        assert set(asked) <= {f"\n{name}:" for name, _ in entries(text(episode.context.row(b)))}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: Phonebook(name_lengths=(3, 2)), "`name_lengths` is (3, 2); the shortest must be at least 1 and the longest no less."),
        (lambda _: Phonebook(number_lengths=(0, 2)), "`number_lengths` is (0, 2); the shortest must be at least 1 and the longest no less."),
        (lambda _: Phonebook(similar=1.0), "`similar` is 1.0; it must be at least 0 and below 1."),
        (
            lambda g: Phonebook(name_lengths=(1, 4)).sample(1, pairs=27, generator=g),
            "`pairs` is 27 and there are 26 names of the shortest length; lower `pairs` or raise `name_lengths`.",
        ),
        (lambda g: BOOK.sample(1, pairs=3, queries=4, generator=g), "`queries` is 4 and a context has 3 pairs; ask at most every name once."),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, sentence, generator):
    with pytest.raises(SpecError) as caught:
        make(generator)
    assert str(caught.value) == sentence


# Text


@pytest.mark.parametrize("typed", ["anna:5550\nbob:0123", "Anna: 5550\nBOB :0123\n", "\r\n  anna : 5550 \r\n\t\nbob:0123\r\n\r\n"])
def test_entries_are_read_as_people_type_them(typed):
    assert BOOK.parse(typed) == [("anna", "5550"), ("bob", "0123")]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("", "the text holds no entry; give at least one `name: number` line."),
        (
            "anna 5550",
            "line 1 is 'anna 5550', and this model takes one `name: number` a line. For free text, name a language model: --model PATH.",
        ),
        ("\nal: 5550", "line 2: the name 'al' has 2 characters; this model takes 3 to 8. Shorten or lengthen it."),
        ("alexandra: 1", "line 1: the name 'alexandra' has 9 characters; this model takes 3 to 8. Shorten or lengthen it."),
        ("anna: 55", "line 1: the number '55' has 2 characters; this model takes 3 to 6. Shorten or lengthen it."),
        ("anna: 555-12", "line 1: the number '555-12' has the character '-'; this model knows digits there. Spell it with those."),
        ("Zoë: 5550", "line 1: the name 'zoë' has the character 'ë'; this model knows the letters a to z there. Spell it with those."),
        (
            "anna: 5550\nAnna: 5551",
            "line 2 repeats the name 'anna'; names must be unique, and capitals make no difference. Drop one line.",
        ),
    ],
)
def test_a_text_that_is_no_phone_book_is_refused_with_its_line(typed, sentence):
    with pytest.raises(TextError) as caught:
        BOOK.parse(typed)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("query", ["alice", "Alice", " ALICE : "])
def test_a_query_is_a_name_however_it_is_written(query):
    assert BOOK.key_of(query) == "alice"


def test_a_query_that_is_no_name_is_refused():
    with pytest.raises(TextError, match=r"^the query '7' has the character '7'; this model knows the letters a to z there\."):
        BOOK.key_of("7")


def test_a_context_is_the_text_between_line_breaks():
    assert BOOK.lines_of(BOOK.context_of([("anna", "5550"), ("bob", "0123")])) == "anna:5550\nbob:0123"


# The shipped checkpoint


@pytest.fixture(scope="module")
def model():
    return load("phonebook")


BOOK_TEXT = "Alice: 555012\nBob: 4711\nannabel : 90210\nCharlie:123\ndora: 31415\n"


def test_eight_entries_pass_the_gate_on_fresh_contexts(model):
    (row,) = exact_match(model.memory, Phonebook(), pairs=8, steps=[model.memory.spec.steps], contexts=25, seed=1)
    assert row.exact_match >= 0.95


def test_a_book_is_written_and_asked_as_people_type_it(model):
    memory = model.write(BOOK_TEXT)
    answers = model.ask_many(memory, ["alice", "BOB", " Annabel: ", "charlie", "Dora"])
    assert [answer.text for answer in answers] == ["555012", "4711", "90210", "123", "31415"]
    assert all(answer.known for answer in answers)
    assert memory.about.records == memory.about.answered == 5
    assert not model.ask(memory, "Zoe").known


def test_a_longer_book_is_cut_into_pages(model):
    memory = model.write(
        "\n".join(f"{name}: {number}" for name, number in zip(["ann", "ben", "cleo"] + [f"{c}oe" for c in "dfghijk"], range(100, 110), strict=True))
    )
    assert [len(page.keys) for page in memory.about.pages] == [5, 5]
    assert model.ask(memory, "doe").page == 0
    assert model.ask(memory, "koe").page == 1


def test_a_book_is_verified_against_its_text(model):
    memory = model.write(BOOK_TEXT)
    assert model.verify(memory, BOOK_TEXT).answered == 5
    with pytest.raises(TextError, match="is another"):
        model.verify(memory, BOOK_TEXT.replace("4711", "4712"))


def test_what_a_book_recites_is_said_to_be_inexact_where_it_is(model):
    recital = model.recite(model.write("alice: 555012"))
    assert not recital.exact
    assert recital.tokens == len("\nalice:555012\n")
