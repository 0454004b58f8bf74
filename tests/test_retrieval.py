"""Key-value retrieval: what `sample` draws, and the way from text to tokens and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graven.errors import ShapeError, SpecError, TextError
from graven.tasks.base import Tokens, front, rows_at
from graven.tasks.retrieval import CHARACTERS, Retrieval, alphabet_of, digits_of, distinct

ONE = Retrieval(key_length=1, value_length=1, symbols=62)
TWO = Retrieval()
WIDE = Retrieval(key_length=1, value_length=1, symbols=512)
TASKS = [ONE, TWO, WIDE, Retrieval(key_length=3, value_length=2, symbols=4), Retrieval(key_length=1, value_length=4, symbols=8)]
SIGMAS = 5.0  # a fair count strays further once in two million draws


def pairs_of(task, context):
    """Keys and values of one context, read off its tokens one pair at a time; every mark is checked on the way."""
    found = {}
    for at in range(0, len(context), task.pair_length):
        pair = context[at : at + task.pair_length]
        key, value = pair[1 : 1 + task.key_length], pair[2 + task.key_length : -1]
        assert pair == [task.mark("!"), *key, task.mark(":"), *value, task.mark("!")]
        assert max(key + value) < task.symbols
        assert tuple(key) not in found
        found[tuple(key)] = tuple(value)
    return found


def test_the_picture_in_the_docstring_is_true():
    episode = ONE.episode(digits_of(["a", "d"])[None], digits_of(["a", "x"])[None])
    assert ONE.text_of(episode.context.row(0)) == "!a:a!!d:x!"
    assert "".join(".*"[on] for on in episode.values[0].tolist()) == "...*....*."
    assert ONE.text_of(episode.query.ids[0, 1].tolist()) == "?!d:"
    assert ONE.text_of(episode.target.ids[0, 1].tolist()) == "x!|"
    assert episode.answer == 1


def test_two_characters_are_read_from_left_to_right():
    episode = TWO.episode(digits_of(["ab"])[None], digits_of(["z9"])[None])
    assert [TWO.text_of(x) for x in (episode.context.row(0), episode.query.ids[0, 0].tolist(), episode.target.ids[0, 0].tolist())] == [
        "!ab:z9!", "?!ab:", "z9!|",
    ]  # fmt: skip
    assert episode.answer == 2


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("size", "pairs"), [(3, 1), (2, 7), (3, 8), (0, 2)])
def test_every_key_is_unique_asked_once_and_answered_by_its_value(task, size, pairs, generator):
    episode = task.sample(size, pairs=pairs, generator=generator)
    assert episode.context.ids.shape == (size, pairs * task.pair_length)
    assert episode.query.ids.shape == (size, pairs, task.key_length + 3)
    assert episode.target.ids.shape == (size, pairs, task.value_length + 2)
    for b in range(size):
        found = pairs_of(task, episode.context.row(b))
        asked = [tuple(query[2:-1]) for query in episode.query.ids[b].tolist()]
        assert asked == list(found)
        for query, target in zip(episode.query.ids[b].tolist(), episode.target.ids[b].tolist(), strict=True):
            assert query == [task.mark("?"), task.mark("!"), *query[2:-1], task.mark(":")]
            assert target == [*found[tuple(query[2:-1])], task.mark("!"), task.mark("|")]
            assert len(target) == episode.answer + 2


@pytest.mark.parametrize("task", TASKS)
def test_the_mask_of_values_selects_the_values_in_order(task, generator):
    episode = task.sample(2, pairs=5, generator=generator)
    for b in range(2):
        values = [token for value in pairs_of(task, episode.context.row(b)).values() for token in value]
        assert episode.context.ids[b][episode.values[b]].tolist() == values


def test_fewer_queries_ask_different_keys_of_the_context(generator):
    episode = TWO.sample(20, pairs=6, queries=4, generator=generator)
    for b in range(20):
        found = pairs_of(TWO, episode.context.row(b))
        asked = {
            tuple(query[2:-1]): tuple(target[:2]) for query, target in zip(episode.query.ids[b].tolist(), episode.target.ids[b].tolist(), strict=True)
        }
        assert len(asked) == 4
        assert asked.items() <= found.items()


def test_no_pairs_and_no_queries_are_an_empty_episode(generator):
    assert TWO.sample(2, pairs=0, generator=generator).context.ids.shape == (2, 0)
    assert TWO.sample(2, pairs=3, queries=0, generator=generator).query.ids.shape == (2, 0, 5)


def test_a_context_can_hold_every_key_there_is(generator):
    assert len(pairs_of(ONE, ONE.sample(1, pairs=62, generator=generator).context.row(0))) == 62


def test_the_same_seed_gives_the_same_tokens():
    one, same, other = (TWO.sample(2, pairs=5, generator=torch.Generator().manual_seed(seed)).context.ids for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_512_symbols_are_all_used_and_the_marks_come_after_them(generator):
    episode = WIDE.sample(40, pairs=200, generator=generator)
    assert WIDE.vocabulary == 516
    assert episode.context.ids.unique().tolist() == [*range(512), WIDE.mark("!"), WIDE.mark(":")]
    assert [WIDE.mark(character) for character in "!:?|"] == [512, 513, 514, 515]


@pytest.mark.parametrize(
    ("count", "below"),
    [(0, 5), (1, 1), (5, 5), (3, 4096), (3, 5000), (64, 4097), (0, 5000), (1100, 4401), (1000, 62**3)],
    ids=lambda n: str(n),
)
def test_distinct_numbers_are_distinct_and_below_the_bound(count, below, generator):
    numbers = distinct(4, count, below=below, generator=generator)
    assert numbers.shape == (4, count)
    assert all(len(set(row)) == count and set(row) <= set(range(below)) for row in numbers.tolist())


@pytest.mark.parametrize("below", [20, 20_000])
def test_distinct_numbers_are_uniform(below, generator):
    """Both ways of drawing: each twentieth of the range is hit equally often, at the first and at the last place."""
    rows = 4000
    numbers = distinct(rows, 12, below=below, generator=generator) * 20 // below
    deviation = (rows * 0.05 * 0.95) ** 0.5
    for place in (0, -1):
        assert (numbers[:, place].bincount(minlength=20) - rows / 20).abs().max() < SIGMAS * deviation


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: Retrieval(symbols=0), "`symbols` is 0; it must be at least 1."),
        (lambda _: Retrieval(key_length=0), "`key_length` is 0; it must be at least 1."),
        (
            lambda _: Retrieval(value_length=11),
            "`value_length` is 11; with 62 symbols there are more than 2^63 of them. Lower one of the two.",
        ),
        (lambda g: ONE.sample(1, pairs=63, generator=g), "`pairs` is 63 and there are 62 different keys; lower `pairs` or raise `key_length`."),
        (lambda g: ONE.sample(1, pairs=-1, generator=g), "`pairs` is -1 and there are 62 different keys; lower `pairs` or raise `key_length`."),
        (lambda g: ONE.sample(1, pairs=3, queries=4, generator=g), "`queries` is 4 and a context has 3 pairs; ask at most every key once."),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, sentence, generator):
    with pytest.raises(SpecError) as caught:
        make(generator)
    assert str(caught.value) == sentence


# Text


@pytest.mark.parametrize("text", ["ab:cd\nef:gh", "ab:cd\r\nef:gh\r\n", "\n\n  ab:cd  \n\t\nef:gh\n\n"])
def test_records_are_one_a_line_whatever_ends_the_lines(text):
    assert TWO.parse(text) == [("ab", "cd"), ("ef", "gh")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text holds no record; give at least one `key:value` line."),
        (" \n\r\n", "the text holds no record; give at least one `key:value` line."),
        (
            "ab:cd\nefgh",
            "line 2 is 'efgh', and this model takes one `key:value` a line. For free text, name a language model: --model PATH.",
        ),
        (
            "ab:cd:ef",
            "line 1 is 'ab:cd:ef', and this model takes one `key:value` a line. For free text, name a language model: --model PATH.",
        ),
        ("\nabc:de", "line 2: the key 'abc' has 3 characters; this model takes 2. Use keys and values of that length."),
        ("ab:c", "line 1: the value 'c' has 1 characters; this model takes 2. Use keys and values of that length."),
        (":cd", "line 1: the key '' has 0 characters; this model takes 2. Use keys and values of that length."),
        ("ab: c", "line 1: the value ' c' has the character ' '; this model knows letters and digits only. Spell it with those."),
        ("äb:cd", "line 1: the key 'äb' has the character 'ä'; this model knows letters and digits only. Spell it with those."),
        ("ab:cd\nef:gh\nab:xy", "line 3 repeats the key 'ab'; keys must be unique. Drop one of the two lines."),
    ],
)
def test_a_text_that_is_no_list_of_records_is_refused_with_its_line(text, sentence):
    with pytest.raises(TextError) as caught:
        TWO.parse(text)
    assert str(caught.value) == sentence


def test_a_long_line_is_cut_in_the_message():
    with pytest.raises(TextError) as caught:
        TWO.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


def test_a_smaller_alphabet_names_its_characters():
    with pytest.raises(TextError) as caught:
        Retrieval(key_length=1, value_length=1, symbols=4).parse("a:z")
    assert str(caught.value) == "line 1: the value 'z' has the character 'z'; this model knows the characters abcd only. Spell it with those."


@pytest.mark.parametrize("call", [lambda: WIDE.parse("a:b"), lambda: WIDE.key_of("a"), lambda: WIDE.text_of([0])])
def test_a_task_with_more_symbols_than_characters_has_no_text(call):
    with pytest.raises(TextError, match=r"^this model has 512 symbols and text has 62 characters for them\. Use token ids, or another model\.$"):
        call()


@pytest.mark.parametrize("query", ["ab", "ab:", "?!ab:", "?ab", "!ab:", "  ab \n"])
def test_a_query_may_carry_its_marks_or_not(query):
    assert TWO.key_of(query) == "ab"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("", "the query '' has 0 characters; this model takes 2. Use keys and values of that length."),
        ("abc", "the query 'abc' has 3 characters; this model takes 2. Use keys and values of that length."),
        ("a?", "the query 'a?' has the character '?'; this model knows letters and digits only. Spell it with those."),
    ],
)
def test_a_query_that_is_no_key_is_refused(query, sentence):
    with pytest.raises(TextError) as caught:
        TWO.key_of(query)
    assert str(caught.value) == sentence


@given(st.data())
def test_text_becomes_tokens_and_the_same_text_again(data):
    task = Retrieval(
        key_length=data.draw(st.integers(1, 3)), value_length=data.draw(st.integers(1, 3)), symbols=data.draw(st.integers(2, len(CHARACTERS)))
    )
    word = {length: st.text(st.sampled_from(alphabet_of(task)), min_size=length, max_size=length) for length in (task.key_length, task.value_length)}
    records = list(data.draw(st.dictionaries(word[task.key_length], word[task.value_length], min_size=1, max_size=task.symbols)).items())
    assert task.parse("\n".join(f"{key}:{value}" for key, value in records)) == records
    keys, values = (digits_of(parts)[None] for parts in zip(*records, strict=True))
    episode = task.episode(keys, values)
    assert task.text_of(episode.context.row(0)) == "".join(f"!{key}:{value}!" for key, value in records)
    assert [task.text_of(row) for row in episode.target.ids[0].tolist()] == [f"{value}!|" for _, value in records]


# Rows of tokens


def test_rows_of_any_lengths_are_padded_on_the_right():
    tokens = Tokens.of([[5, 6, 7], [], [8]])
    assert tokens.mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert [tokens.row(i) for i in range(3)] == [[5, 6, 7], [], [8]]
    assert tokens.lengths.tolist() == [3, 0, 1]


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_rows_without_tokens_have_no_columns(rows):
    tokens = Tokens.of(rows)
    assert tokens.ids.shape == (len(rows), 0)
    assert tokens.aligned().ids.shape == (len(rows), 0)


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=6, max_size=6), min_size=1, max_size=4))
def test_aligned_rows_keep_their_tokens_and_drop_what_is_padding_everywhere(cells):
    ids, mask = (torch.tensor([[cell[part] for cell in row] for row in cells]) for part in (0, 1))
    tokens = Tokens(ids, mask)
    aligned = tokens.aligned()
    assert [aligned.row(i) for i in range(len(cells))] == [[token for token, real in row if real] for row in cells]
    assert aligned.ids.shape[1] == max(sum(real for _, real in row) for row in cells)
    assert (aligned.mask[:, 1:] <= aligned.mask[:, :-1]).all()
    rows = rows_at(ids[..., None], front(mask))[..., 0]
    assert torch.equal(rows[:, : aligned.ids.shape[1]], aligned.ids)


def test_flat_rows_are_the_rows_one_after_another(generator):
    ids = torch.randint(9, (2, 3, 4), generator=generator)
    assert Tokens.full(ids).flat().ids.tolist() == [row for part in ids.tolist() for row in part]


@pytest.mark.plain
def test_ids_and_mask_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"^`ids` has shape \(2, 3\) and `mask` \(2, 2\); give one mask entry per token\.$"):
        Tokens(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool))
