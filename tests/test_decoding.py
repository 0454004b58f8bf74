"""How an answer is chosen: settings that contradict each other, draws that are draws and do not depend on their company, beams, ends, streams."""

import math
import threading
from functools import cache

import pytest
import torch
import zoo
from asserts import assert_refused
from transformers import GenerationConfig

from graven.decoding import Chooser, Decoding, Stream, ended, text_before
from graven.errors import SpecError
from graven.lm.base import score
from graven.tasks.base import Tokens

MODELS = ["llama", "mistral", "gpt2", "gpt-neox", "gemma", "qwen3"]
QUERIES = [[5, 17, 3, 40, 41, 9, 8, 30, 31], [9, 8], [60, 61, 5, 7, 3], []]
WAYS = {
    "greedy": Decoding(),
    "drawn": Decoding(temperature=1.3, seed=7),
    "drawn, cut": Decoding(temperature=0.8, top_k=20, top_p=0.9, count=2),
    "beams": Decoding(beams=3, count=2),
    "late": Decoding(min_tokens=5),
    "stopped": Decoding(stop=("7 ", "w4")),
    "beams, stopped": Decoding(beams=2, stop=("w4",)),
}
MOST = 7


@cache
def door(name):
    return zoo.pretrained(name).requires_grad_(False)


@pytest.fixture(params=MODELS)
def model(request):
    return door(request.param)


@pytest.fixture
def llama():
    return door("llama")


@pytest.fixture
def prefix(generator, request):
    """A memory of five vectors for each query."""
    model = request.getfixturevalue("model" if "model" in request.fixturenames else "llama")
    return model.embedding_scale * torch.randn(len(QUERIES), 5, model.width, generator=generator)


# Settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_tokens": -1}, "`min_tokens` is -1; it must be at least 0."),
        ({"top_k": 0}, "`top_k` is 0; it must be at least 1."),
        ({"beams": 0}, "`beams` is 0; it must be at least 1."),
        ({"count": 0}, "`count` is 0; it must be at least 1."),
        ({"temperature": 0.0}, "`temperature` is 0.0; it must be above 0. For the most probable answer, leave it out."),
        ({"temperature": math.nan}, "`temperature` is nan"),
        ({"temperature": math.inf}, "`temperature` is inf"),
        ({"top_p": 0.0}, "`top_p` is 0.0; it must be above 0 and at most 1."),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"temperature": 1.0, "seed": -1}, "`seed` is -1"),
        ({"temperature": 1.0, "seed": 1 << 63}, "it must be at least 0 and below 2\\^63"),
        ({"stop": ("a", "")}, "`stop` holds an empty string"),
        ({"temperature": 1.0, "beams": 2}, "asks for a draw and `beams` for a search; give one of the two."),
        ({"seed": 3}, "`seed` is 3 and nothing is drawn; give `temperature`, `top_k` or `top_p` too"),
        ({"seed": 3, "beams": 2}, "`seed` is 3 and nothing is drawn"),
        ({"count": 2}, "`count` is 2 and a greedy answer is one"),
        ({"count": 3, "beams": 2}, "`count` is 3 .* 2 beams are 2"),
    ],
)
def test_settings_out_of_range_or_against_each_other_are_refused(settings, sentence):
    assert_refused(SpecError, sentence, lambda: Decoding(**settings))


# Draws


def test_draws_have_the_probabilities_of_the_model(generator):
    logits, draws = torch.randn(8, generator=generator), 4000
    way = Decoding(temperature=0.7, count=draws)
    chosen = Chooser(way, [], draws)(torch.zeros(draws, 0, dtype=torch.long), logits.expand(draws, -1)).argmax(-1)
    expected = (logits / 0.7).softmax(-1)
    deviations = (expected * (1 - expected) / draws).sqrt()
    assert ((chosen.bincount(minlength=8) / draws - expected).abs() < 4 * deviations).all()


@pytest.mark.parametrize(
    ("way", "allowed"), [(Decoding(top_k=2, count=500), {0, 1}), (Decoding(top_p=0.75, count=500), {0, 1, 2}), (Decoding(top_p=0.4, count=9), {0})]
)
def test_a_draw_is_among_the_most_probable_tokens(way, allowed):
    probabilities = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    chosen = Chooser(way, [], way.count)(torch.zeros(way.count, 0, dtype=torch.long), probabilities.log().expand(way.count, -1)).argmax(-1)
    assert set(chosen.tolist()) == allowed


def test_another_seed_is_another_draw_and_the_same_seed_the_same(llama, prefix):
    def draw(seed):
        way = Decoding(temperature=2.0, count=3, seed=seed)
        return [row.tokens for row in llama.generate(prefix[:1], Tokens.of(QUERIES[:1]), most=MOST, stop=(), decoding=way)]

    first = draw(1)
    assert first == draw(1) != draw(2)
    assert first[0] != first[1] != first[2]


def test_draws_leave_the_global_generator_alone(llama, prefix):
    before = torch.random.get_rng_state()
    llama.generate(prefix, Tokens.of(QUERIES), most=2, stop=(), decoding=Decoding(temperature=1.0))
    assert torch.equal(torch.random.get_rng_state(), before)


# In company and alone


@pytest.mark.parametrize("way", WAYS)
def test_unequal_queries_side_by_side_are_answered_as_alone(way, model, prefix):
    decoding, stop = WAYS[way], {11, 23}
    together = model.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=stop, decoding=decoding)
    assert len(together) == len(QUERIES) * decoding.count
    for i, query in enumerate(QUERIES):
        rows = together[i * decoding.count : (i + 1) * decoding.count]
        alone = model.generate(prefix[i : i + 1], Tokens.of([query]), most=MOST, stop=stop, decoding=decoding)
        assert [row.whole for row in rows] == [row.whole for row in alone]
        for row in rows:
            (expected,) = score(model, prefix[i : i + 1], Tokens.of([query]), [row.whole])
            assert row.log_probabilities == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3, "num_return_sequences": 3}, {"num_beams": 2, "early": 23}])
def test_the_embeddings_of_a_text_are_continued_like_its_tokens(settings, model):
    ids = [7, 60, 33, 21, 5]
    settings = dict(settings)
    stop = {settings.pop("early")} if "early" in settings else set()
    way = Decoding(beams=settings.get("num_beams", 1), count=settings.get("num_return_sequences", 1))
    config = GenerationConfig(max_new_tokens=MOST, do_sample=False, pad_token_id=0, eos_token_id=sorted(stop) or None, **settings)
    expected = model.model.generate(input_ids=torch.tensor([ids + QUERIES[0]]), generation_config=config)[:, len(ids) + len(QUERIES[0]) :]
    found = model.generate(model.embed(Tokens.of([ids])), Tokens.of(QUERIES[:1]), most=MOST, stop=stop, decoding=way)
    assert [row.whole for row in found] == [ended(row, ends=stop, stop=(), spell=str) for row in expected.tolist()]


def test_no_end_comes_before_the_least_tokens(llama, prefix):
    free = llama.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=())
    stop = {token for row in free for token in row.tokens[:2]}
    late = llama.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=stop, decoding=Decoding(min_tokens=4))
    assert all(len(row.tokens) >= 4 for row in late)
    assert any(len(row.tokens) < 4 for row in llama.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=stop))


def test_a_row_ends_with_the_token_that_completes_a_string(llama, prefix):
    free = llama.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=())
    string = llama.decode(free[0].tokens[2:4])  # spans two tokens
    for row, whole in zip(llama.generate(prefix, Tokens.of(QUERIES), most=MOST, stop=(), decoding=Decoding(stop=(string,))), free, strict=True):
        length = next((at for at in range(1, MOST + 1) if string in llama.decode(whole.tokens[:at])), MOST)
        assert row.tokens == whole.tokens[:length]


def test_a_text_ends_before_the_first_of_the_strings():
    assert text_before("one. two; three", ["; ", ". "]) == "one"
    assert text_before("one", ["two"]) == text_before("one", []) == "one"


# Streams


def test_a_stream_is_the_tokens_of_the_answer(llama, prefix):
    def run(way):
        rows = prefix[:1], Tokens.of(QUERIES[:1])
        tokens = list(Stream(lambda stream: llama.generate(*rows, most=MOST, stop={11}, decoding=way, streamer=stream)))
        assert tokens == llama.generate(*rows, most=MOST, stop={11}, decoding=way)[0].whole

    for way in (Decoding(), Decoding(temperature=1.5, seed=3)):
        run(way)


def test_an_error_in_the_thread_reaches_the_reader():
    def fail(_):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        list(Stream(fail))


def test_a_stream_that_is_left_ends_its_thread(llama, prefix):
    rows, before = (prefix[:1], Tokens.of(QUERIES[:1])), set(threading.enumerate())
    stream = iter(Stream(lambda stream: llama.generate(*rows, most=40, stop=(), streamer=stream)))
    next(stream)
    stream.close()
    assert set(threading.enumerate()) <= before
