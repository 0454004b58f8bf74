"""A prompt that is read once gives what reading it anew before every row gives, in every architecture."""

import pytest
import torch
import zoo
from asserts import assert_refused

from graven.errors import TextError
from graven.lm import cached
from graven.lm.cached import Prompted
from graven.tasks.base import Tokens

ROWS = [[5, 17, 3, 40], [9, 8], [30, 31, 32, 33], [], [7, 7]]
RECURRENT = {"mamba", "mamba2", "jamba", "lfm2"}
ROUNDING = 1e-4  # float32, through two layers


def prompt_of(model, *, length=20):
    """Embeddings of a prompt longer than the windows of the zoo."""
    ids = torch.arange(3, 3 + length)[None] * 7 % zoo.VOCABULARY
    return model.embed(Tokens.full(ids))[0]


def by_definition(model, prefix, row, *, most, stop):
    """Prompt, row and what was said so far, run anew for each token."""
    tokens, hidden = [], []
    for _ in range(most):
        columns = torch.cat([prefix, model.embed(Tokens.of([row + tokens]))[0].to(prefix.dtype)])
        hidden.append(model.hidden(columns[None])[0, -1])
        tokens.append(int(model.logits(hidden[-1]).argmax()))
        if tokens[-1] in stop:
            break
    return tokens, torch.stack(hidden)


@pytest.mark.parametrize("name", zoo.ZOO)
@torch.no_grad()
def test_rows_behind_a_prompt_are_those_of_the_definition(name):
    model = zoo.pretrained(name)
    prefix = prompt_of(model)
    first, _ = by_definition(model, prefix, ROWS[0], most=3, stop=())
    stop = {first[1]}
    prompted = Prompted(model, prefix)
    for row, found in zip(ROWS, prompted.follow(ROWS, most=4, stop=stop), strict=True):
        tokens, hidden = by_definition(model, prefix, row, most=4, stop=stop)
        assert found.tokens == tokens
        assert (found.hidden - hidden).abs().max() <= ROUNDING * hidden.abs().max()
    assert (prompted.cache is None) == (name in RECURRENT), "attention shares its cache, recurrent models do not"


@torch.no_grad()
def test_a_model_without_a_cache_gives_the_same_as_one_with(monkeypatch):
    model = zoo.pretrained("llama")
    shared = Prompted(model, prompt_of(model))
    monkeypatch.setattr(cached, "EXACT", -1.0)
    alone = Prompted(model, prompt_of(model))
    assert alone.cache is None
    assert alone.cache_bytes is None
    for ours, theirs in zip(shared.follow(ROWS, most=3, stop=()), alone.follow(ROWS, most=3, stop=()), strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=ROUNDING, atol=ROUNDING)


def test_the_cache_has_a_key_and_a_value_for_each_column_layer_and_head():
    model = zoo.pretrained("llama")
    assert Prompted(model, prompt_of(model)).cache_bytes == 20 * 2 * 2 * 2 * 8 * 4  # columns, layers, two of them, heads, width, float32


def test_following_leaves_the_prompt_as_it_was():
    model = zoo.pretrained("llama")
    prompted = Prompted(model, prompt_of(model))
    first, second = (prompted.follow(ROWS, most=2, stop=()) for _ in range(2))
    assert [row.tokens for row in first] == [row.tokens for row in second]
    assert prompted.cache.get_seq_length() == 20


def test_what_does_not_fit_into_the_model_is_refused_with_the_numbers():
    model = zoo.pretrained("llama")
    prompted = Prompted(model, prompt_of(model))
    assert len(prompted.follow([[5] * 40], most=5, stop=())[0].tokens) == 5
    assert_refused(TextError, r"20 tokens, a query of 40 and 6 to come make 65 columns.*64", lambda: prompted.follow([[5] * 40], most=6, stop=()))
