"""What `graven.load` gives: names and refusals, records by key, any text by heart, and the same answers however they are asked."""

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import cases
import pytest
import test_train
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

import graven
from graven.errors import GravenError, MismatchError, ModelError, SpecError, TextError
from graven.lm.pretrained import load_pretrained
from graven.memory.file import Memory
from graven.model import PAGE_TOKENS, SHIPPED, RecordsModel, TextModel, check_numbers, cut, load
from graven.tasks.retrieval import CHARACTERS
from graven.train import train

RECORDS = "aB:7x\nc3:Qm\nZz:00\nhi:yo\nk9:Lp\nMe:mo\nry:42\nGr:aV"
KEYS = [line[:2] for line in RECORDS.split("\n")]
VALUES = [line[3:] for line in RECORDS.split("\n")]
WORDS = "w5 w17 w3 w40 w41 w2 w9"  # a sentence to the tokenizer of the zoo


@pytest.fixture(scope="module")
def records():
    return load("records")


@pytest.fixture(scope="module")
def written(records):
    return records.write(RECORDS)


@pytest.fixture
def many(generator):
    """A hundred records."""
    keys = torch.randperm(62 * 62, generator=generator)[:100].tolist()
    values = torch.randint(62 * 62, (100,), generator=generator).tolist()
    return [tuple(CHARACTERS[n // 62] + CHARACTERS[n % 62] for n in pair) for pair in zip(keys, values, strict=True)]


@pytest.fixture(scope="module")
def words():
    """A tiny Llama that eight vectors can make say a few words."""
    return TextModel(cases.sharp(cases.llama()), slots=8)


@pytest.fixture(scope="module")
def sentence(words):
    return words.write(WORDS, steps=300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Hugging Face model directory."""
    folder = tmp_path_factory.mktemp("saved")
    zoo.architecture("llama").save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, GravenError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names


def test_a_shipped_name_a_trained_folder_and_a_model_directory_load(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("graven.train.draw_curve", lambda path, _: path.write_bytes(b""))  # takes longer than the training
    train(test_train.TINY, tmp_path / "run")
    shipped, trained, text = load("records"), load(tmp_path / "run"), load(str(directory))
    assert [type(model) for model in (shipped, trained, text)] == [RecordsModel, RecordsModel, TextModel]
    assert [model.kind for model in (shipped, trained, text)] == ["records", "records", "text"]
    assert [model.name for model in (shipped, trained, text)] == ["records", str(tmp_path / "run"), str(directory)]
    assert load(SHIPPED / "records").write("aa:bb").about.base.fingerprint == shipped.write("aa:bb").about.base.fingerprint


def test_a_relative_path_is_kept_whole_so_that_a_memory_finds_its_model_from_anywhere(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    assert load(directory.name).write("w1 w2", steps=0).about.base.name == str(directory)


@pytest.mark.parametrize("name", ["", " ", "/no/where", "./records-of-nobody", "n" * 300, "n/" * 3000, "a\0b", "tests/test_model.py", "~/x"])
def test_a_name_without_a_model_is_refused_in_a_sentence(name):
    refusal(ModelError, lambda: load(name))


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "holds no model: it has no config.json" in refusal(ModelError, lambda: load(tmp_path))
    (tmp_path / "model.json").write_text("{}")
    assert "holds no whole graven checkpoint" in refusal(ModelError, lambda: load(tmp_path))


@pytest.mark.parametrize("slots", [0, -1, 7, 9])
def test_records_have_the_slots_that_they_were_trained_with(slots):
    assert refusal(SpecError, lambda: load("records", slots=slots)) == f"`slots` is {slots} and records was trained with 8; leave `slots` out."
    assert load("records", slots=8).write("aa:bb").about.slots == 8


@pytest.mark.parametrize(
    ("slots", "sentence"), [(0, "at least 1"), (-3, "at least 1"), (zoo.COLUMNS, "has 64 positions, memory included"), (10**9, "positions")]
)
def test_slots_that_do_not_fit_a_language_model_are_refused(slots, sentence, directory):
    assert sentence in refusal(SpecError, lambda: load(directory, slots=slots))


# Records


def test_every_record_is_answered_from_the_memory_alone(records, written):
    assert [answer.text for answer in records.ask_many(written, KEYS)] == VALUES
    assert (written.about.records, written.about.answered, written.about.kind, written.about.outcome) == (8, 8, "records", "DONE")
    assert written.about.steps == len(written.about.losses) == records.memory.spec.steps
    assert written.state.shape == (1, 8, records.memory.model.width)
    assert written.about.tokens == 8 * 7


@pytest.mark.parametrize("form", ["aB", "aB:", "?!aB:", "!aB:", "?aB", " aB\n"])
def test_a_key_may_be_asked_in_the_form_of_the_paper_or_bare(form, records, written):
    answer = records.ask(written, form)
    assert (answer.query, answer.text) == (form, "7x")
    assert answer.log_probability == records.ask(written, "aB").log_probability


@pytest.mark.parametrize(
    ("query", "sentence"), [("", "has 0 characters"), ("a", "has 1 characters"), ("abc", "has 3"), ("a!", "'!'"), ("aé", "'é'"), ("\0\0", "x00")]
)
def test_a_query_that_is_no_key_is_refused(query, sentence, records, written):
    assert sentence in refusal(TextError, lambda: records.ask(written, query))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text holds no record"),
        (" \n\r\n\t", "the text holds no record"),
        ("Once upon a time there was", "For free text, name a language model: --model PATH."),
        ("aa:bb\ncc", "line 2 is 'cc'"),
        ("aa:bb:cc", "--model PATH"),
        ("aa:bb\naa:cc", "line 2 repeats the key 'aa'"),
        ("aa:bb\ncc:d", "the value 'd' has 1 characters"),
        ("a:bb", "the key 'a' has 1 characters"),
        ("aa:b!", "has the character '!'"),
        ("aa:b\0", "has the character '\\x00'"),
        ("\ufeffaa:bb", "has the character '\\ufeff'"),
        ("a😀:bb", "has the character '😀'"),
        ("שם:bb", "has the character 'ש'"),
        ("aa:\ud800b", "has the character '\\ud800'"),
        ("x" * 100_000, "is 'xxxx"),
    ],
)
def test_a_text_that_is_no_records_is_refused(text, sentence, records):
    message = refusal(TextError, lambda: records.write(text))
    assert sentence in message
    assert len(message) < 300


def test_line_ends_blank_lines_and_blanks_around_do_not_count(records):
    plain = records.write("aa:bb\ncc:dd").state
    for text in ("aa:bb\r\ncc:dd\r\n", "\n\n  aa:bb \n\n\tcc:dd\n"):
        assert torch.equal(records.write(text).state, plain)


def test_a_rate_for_records_is_refused(records):
    assert "was fixed by its training" in refusal(SpecError, lambda: records.write("aa:bb", rate=0.1))


def test_more_records_than_a_page_holds_fill_several(records, many):
    memory = records.write("\n".join(f"{key}:{value}" for key, value in many))
    pages = math.ceil(100 / records.pairs_a_page)
    assert memory.state.shape == (pages, 8, records.memory.model.width)
    assert len(memory.about.pages) == pages
    answers = records.ask_many(memory, [key for key, _ in many])
    assert memory.about.answered == sum(answer.text == value for answer, (_, value) in zip(answers, many, strict=True))
    assert memory.about.answered > 90
    of = [page for page, keys in enumerate(cut(many, records.pairs_a_page)) for _ in keys]
    assert [answer.page for answer in answers] == of
    assert all(answer.known for answer in answers)
    assert not records.ask(memory, next(a + b for a in "XQW5" for b in "tuvw" if a + b not in dict(many))).known


def test_a_page_is_asked_as_if_it_were_alone(records, many):
    text = ["\n".join(f"{key}:{value}" for key, value in part) for part in (many[:32], many[32:64])]
    both = records.write("\n".join(text))
    assert len(both.about.pages) == 2
    for number, part in enumerate(text):
        one = records.write(part)
        torch.testing.assert_close(both.state[number], one.state[0], rtol=1e-3, atol=1e-3)


def test_what_a_records_model_recites_is_told_from_what_was_written(records, written):
    recital = records.recite(written)
    assert recital.tokens == 8 * 7
    assert recital.exact == (recital.text.split() == RECORDS.split())


# Text


def test_a_language_model_recites_what_was_written(words, sentence):
    recital = words.recite(sentence)
    assert (recital.text, recital.exact, recital.tokens) == (WORDS, True, 7)
    assert (sentence.about.outcome, sentence.about.token_accuracy, sentence.about.recited) == ("EXACT", 1.0, 7)
    assert sentence.about.lossless
    assert sentence.about.steps == len(sentence.about.losses) < 300


def test_an_answer_goes_on_behind_the_query(words, sentence):
    answer = words.ask(sentence, "", max_tokens=4)
    assert answer.text == "w5 w17 w3 w40"
    assert answer.log_probability < 0
    # w2 ends an answer of this tokenizer, so it stops there
    assert words.ask(sentence, "w5 w17 w3", max_tokens=20).text == "w40 w41"


def test_a_recital_that_is_not_what_was_written_says_so(words):
    recital = words.recite(words.write(WORDS, steps=0))
    assert not recital.exact
    assert recital.tokens == 7


def test_a_write_leaves_the_weights_alone(words, records):
    for model, text in ((words, WORDS), (records, RECORDS)):
        module = model.memory if isinstance(model, RecordsModel) else model.model
        before = {name: x.clone() for name, x in module.state_dict().items()}
        model.recite(model.write(text, steps=2))
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())


def test_a_text_longer_than_a_page_is_cut_and_recited_page_after_page(words):
    text = " ".join(f"w{(7 * n) % 60 + 30}" for n in range(2 * PAGE_TOKENS + 10))
    memory = words.write(text, steps=2)
    assert [page.tokens for page in memory.about.pages] == [46, 46, 46]
    assert memory.state.shape == (3, 8, 32)
    assert memory.about.tokens == words.recite(memory).tokens == 2 * PAGE_TOKENS + 10


def test_pages_that_are_known_by_heart_make_the_whole_text(words, monkeypatch):
    monkeypatch.setattr("graven.models.text.PAGE_TOKENS", 4)
    text = "w5 w17 w3 w40 w41 w9 w8 w30 w31"
    memory = words.write(text, steps=300)
    assert len(memory.about.pages) == 3
    assert words.recite(memory) == graven.model.Recital(text, True, 9)


def test_a_text_longer_than_the_model_is_cut_to_what_it_takes(directory):
    text = " ".join(f"w{n % 60 + 30}" for n in range(70))
    for slots in (None, 1, 50, 63):
        model = load(directory, slots=slots)
        memory = model.write(text, steps=1)
        assert memory.about.tokens == 70 == model.recite(memory).tokens
        assert memory.about.slots + max(page.tokens for page in memory.about.pages) <= zoo.COLUMNS


def test_slots_follow_from_the_length_where_they_are_left_out(directory):
    assert [load(directory).write("w1 " * n, steps=0).about.slots for n in (1, 8, 9, 40)] == [1, 1, 2, 5]


@pytest.mark.parametrize("text", ["", " ", "\n\t \r\n", "\u2003"])
def test_a_text_without_tokens_is_refused(text, words):
    assert "the text is empty, or the tokenizer makes nothing of it" in refusal(TextError, lambda: words.write(text))


ODD = ["w5", "w0 w2", "a\0b", "w1\r\nw2", "\ufeffw1", "😀", "שלום عربى", "w1 \u200b", "no word of the zoo", "w95 " * 5]


@pytest.mark.parametrize("text", ODD)
def test_any_text_can_be_written_and_one_that_cannot_be_spelled_is_told(text, words):
    memory = words.write(text, steps=1)
    assert memory.about.lossless == (words.model.decode(words.model.encode(text)) == text)
    assert words.recite(memory).tokens == memory.about.tokens > 0


@pytest.mark.parametrize("text", ["\ud800", "w1 \udcff w2"])
def test_half_a_character_is_refused(text, words, sentence):
    for call in (lambda: words.write(text), lambda: words.ask(sentence, text)):
        assert "half of a surrogate pair, which is no character" in refusal(TextError, call)


def test_an_answer_fits_into_the_positions_that_are_left(directory):
    model = load(directory, slots=8)
    memory = model.write("w7", steps=1)
    tight = " ".join(["w3"] * (zoo.COLUMNS - 8 - 2))
    assert len(model.ask(memory, tight).text.split()) <= 2
    assert "and " in refusal(TextError, lambda: model.ask(memory, tight, max_tokens=3))
    message = refusal(TextError, lambda: model.ask(memory, tight + " w3 w3"))
    assert "8 slots, a query of 56 tokens and an answer of up to 1 make 65" in message
    assert message.endswith("has 64 positions; shorten the query or lower --max-tokens.")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_must_be_a_number_above_0(rate, words):
    assert f"`rate` is {rate}; it must be above 0." in refusal(SpecError, lambda: words.write(WORDS, rate=rate))


def test_a_rate_far_too_large_is_told_and_still_makes_a_memory_that_loads(words, tmp_path):
    memory = words.write(WORDS, rate=1e35, steps=5)
    assert memory.about.outcome == "DIVERGED"
    assert torch.equal(Memory.load(memory.save(tmp_path / "a")).state, memory.state)


def test_a_model_that_is_not_finite_is_told():
    model = cases.llama()
    with torch.no_grad():
        model.head_weight.fill_(math.inf)
    assert "the loss of the start state is" in refusal(ModelError, lambda: TextModel(model).write(WORDS, steps=2))


def test_the_state_of_a_half_precision_model_is_float32(directory):
    model = TextModel(load_pretrained(str(directory), dtype="bfloat16"), slots=4)
    assert model.model.model.dtype == torch.bfloat16
    memory = model.write("w5 w6 w7", steps=3)
    assert memory.state.dtype == torch.float32
    assert not torch.equal(memory.state, memory.state.bfloat16().float())
    assert model.recite(memory).tokens == 3


# Both kinds alike


@pytest.fixture(params=["records", "text"])
def kind(request, records, written, words, sentence):
    """A model, a text, its memory, and queries."""
    if request.param == "records":
        return records, RECORDS, written, [*KEYS, "zz", "00"]
    return words, WORDS, sentence, ["", "w5", "w5 w17 w3", "w90 w1", "w5 w17", "w9 " * 20]


def test_many_queries_are_answered_as_one_by_one(kind):
    model, _, memory, queries = kind
    many, single = model.ask_many(memory, queries), [model.ask(memory, query) for query in queries]
    assert [(a.query, a.text, a.page) for a in many] == [(a.query, a.text, a.page) for a in single]
    assert [a.log_probability for a in many] == pytest.approx([a.log_probability for a in single], abs=1e-3)
    assert all(a.log_probability < 0 for a in many)


def test_no_query_has_no_answer(kind):
    model, _, memory, _ = kind
    assert model.ask_many(memory, []) == []


def test_the_same_query_twice_has_the_same_answer(kind):
    model, _, memory, queries = kind
    first, second = model.ask_many(memory, [queries[0]] * 2)
    assert first == dataclasses.replace(second, log_probability=first.log_probability)


def test_more_queries_than_are_run_at_once_are_all_answered_in_order(kind, monkeypatch):
    model, _, memory, queries = kind
    plain = model.ask_many(memory, queries)
    monkeypatch.setattr("graven.answer.ROWS_AT_ONCE", 3)
    assert [(a.query, a.text) for a in model.ask_many(memory, queries)] == [(a.query, a.text) for a in plain]


def test_the_same_seed_gives_the_same_bits(kind):
    model, text, _, _ = kind
    first, second = (model.write(text, steps=3, seed=5) for _ in range(2))
    assert torch.equal(first.state, second.state)
    assert dataclasses.replace(first.about, seconds=0.0) == dataclasses.replace(second.about, seconds=0.0)


def test_another_seed_is_another_start_for_a_frozen_model_and_none_for_a_trained_one(words, records):
    for model, text, same in ((words, WORDS, False), (records, RECORDS, True)):
        assert torch.equal(model.write(text, steps=0, seed=1).state, model.write(text, steps=0, seed=2).state) == same


def test_no_steps_give_the_start_state(kind):
    model, text, _, _ = kind
    memory = model.write(text, steps=0)
    assert (memory.about.steps, memory.about.losses, memory.about.outcome) == (0, (), "DONE")
    start = model.memory.start(1) if isinstance(model, RecordsModel) else model.write("w1", steps=0).state
    assert torch.equal(memory.state, start)


def test_a_deadline_of_no_time_gives_the_start_state(kind):
    model, text, _, _ = kind
    memory = model.write(text, deadline=0.0)
    assert (memory.about.steps, memory.about.outcome) == (0, "LATE" if isinstance(model, RecordsModel) else "DEADLINE")
    assert torch.equal(memory.state, model.write(text, steps=0).state)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": -1}, "`steps` is -1; it must be at least 0"),
        ({"seed": -1}, "`seed` is -1; it must be at least 0 and below 2^63."),
        ({"seed": 1 << 63}, "it must be at least 0 and below 2^63."),
        ({"deadline": -1.0}, "`deadline` is -1.0 seconds; it must be at least 0"),
        ({"deadline": math.nan}, "`deadline` is nan seconds"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, sentence, kind):
    model, text, _, _ = kind
    assert sentence in refusal(SpecError, lambda: model.write(text, **settings))


@given(st.integers(0, 10**6), st.integers(0, (1 << 63) - 1), st.none() | st.floats(0, allow_nan=False))
def test_settings_in_range_pass(steps, seed, deadline):
    check_numbers(steps=steps, seed=seed, deadline=deadline)


@pytest.mark.parametrize("most", [0, -1])
def test_an_answer_has_at_least_one_token(most, kind):
    model, _, memory, queries = kind
    assert refusal(SpecError, lambda: model.ask(memory, queries[0], max_tokens=most)) == f"`max_tokens` is {most}; it must be at least 1."
    assert model.ask(memory, queries[0], max_tokens=1).text


def test_progress_is_told_once_a_step(kind):
    model, text, _, _ = kind
    steps = []
    memory = model.write(text, steps=3, progress=lambda step, *_: steps.append(step))
    assert steps == [1, 2, 3]
    assert memory.about.steps == 3


def test_a_memory_of_another_model_is_refused_by_name(kind, directory):
    model, _, memory, queries = kind
    other = load(directory)
    for call in (lambda: other.ask(memory, queries[0]), lambda: other.ask_many(memory, []), lambda: other.recite(memory)):
        message = refusal(MismatchError, call)
        assert model.name in message
        assert str(directory) in message


def test_asking_and_reciting_leave_the_memory_alone(kind):
    model, _, memory, queries = kind
    before = memory.state.clone()
    model.ask_many(memory, queries)
    model.recite(memory)
    assert torch.equal(memory.state, before)


OTHER_PROCESS = """
import sys, torch
import graven
torch.set_num_threads(1)
memory = graven.Memory.load(sys.argv[1])
print([(a.text, a.log_probability) for a in graven.load(memory.about.base.name).ask_many(memory, sys.argv[2:])])
"""


def test_a_file_opens_in_another_process_with_the_same_answers(records, written, tmp_path):
    place = written.save(tmp_path / "a.graven")
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, place, *KEYS], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[(a.text, a.log_probability) for a in records.ask_many(written, KEYS)]}\n"


def test_a_memory_that_was_saved_and_loaded_answers_alike(kind, tmp_path):
    model, _, memory, queries = kind
    assert model.ask_many(Memory.load(memory.save(tmp_path / "a")), queries) == model.ask_many(memory, queries)


# Pages


@given(st.integers(0, 300), st.integers(1, 130))
def test_pages_hold_every_item_in_order_and_are_nearly_equal(count, most):
    pages = cut(list(range(count)), most)
    assert [item for page in pages for item in page] == list(range(count))
    sizes = [len(page) for page in pages]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(pages) == max(1, math.ceil(count / most))


# A trained language model

STORIES_MODEL = Path(__file__).parents[1] / ".." / "shared" / "data" / "stories260K"

STORIES = [
    'Tom had a small dog. The dog liked to run in the garden. One day the dog found a big bone. Tom was happy and said, "Good dog!" They went home.',
    'One day, a little bird was sad. She wanted to fly, but she was too small. Her mom said, "You can try again." The bird was happy and smiled.',
    'Ben and Mia were playing in the snow. They made a big man with a hat. "Look, he is smiling!" said Mia. Ben was happy too. They went home.',
    'Sam had a red car. He liked to play with it in the yard. One day the car was gone. Sam was sad. His mom looked. "Here it is!" she said.',
]


@pytest.fixture(scope="module")
def stories():
    if not STORIES_MODEL.is_dir():
        pytest.skip("the trained model stories260K is not beside this checkout (shared/data/README.md); the same is tested on random models")
    return load(STORIES_MODEL, slots=8)


@pytest.mark.plain
@pytest.mark.parametrize("story", [*(pytest.param(story, marks=pytest.mark.slow) for story in STORIES[:2]), *STORIES[2:]])
def test_eight_slots_hold_a_story_of_about_61_tokens_exactly(story, stories):
    began = time.process_time()
    memory = stories.write(story, steps=400)
    seconds = time.process_time() - began
    assert 55 <= memory.about.tokens <= 65
    assert memory.about.outcome == "EXACT"
    assert memory.about.steps < 400
    assert memory.state.shape == (1, 8, 64)
    assert stories.recite(memory).text == story
    assert seconds < 20


def test_a_story_is_gone_on_with_from_memory(stories):
    memory = stories.write("Tom had a small dog.", steps=400)
    assert stories.ask(memory, "Tom had", max_tokens=6).text.strip().startswith("a small dog")
    assert stories.recite(memory).text == "Tom had a small dog."


@pytest.mark.parametrize("text", ["<s>", "</s><unk><s>", "a\0b", "a\r\nb", "\ufeffa", "😀", "שלום عربى", " ", "\n", "\t\t", "\u200b"])
def test_a_byte_tokenizer_takes_any_text(text, stories):
    memory = stories.write(text, steps=2)
    assert memory.about.lossless
    assert stories.recite(memory).tokens == memory.about.tokens > 0
