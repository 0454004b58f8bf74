"""Every answer can be found by looking, and nothing else is asked."""

import pytest
import torch
from asserts import assert_refused

from graven.errors import SpecError
from graven.tasks.recall import MultiQueryRecall, Recall


def test_every_key_and_value_comes_once_and_the_answer_is_the_value_of_the_key(generator):
    task = Recall(pairs=5)
    tokens, target = task.sample(50, generator=generator)
    assert tokens.shape == (50, 6, task.width) == (50, 6, 10)
    assert torch.equal(tokens[:, :5].sum(1), torch.ones(50, 10))
    assert torch.equal(tokens[:, 5, :5].sum(1), torch.ones(50))
    assert not tokens[:, 5, 5:].any()
    scores = torch.einsum("btk,bk->bt", tokens[:, :5, :5], tokens[:, 5, :5])
    assert torch.equal(torch.einsum("bt,btv->bv", scores, tokens[:, :5, 5:]).argmax(1), target)


def test_every_pair_is_asked_for_and_every_pairing_occurs(generator):
    """All 3 * 3 * 3 of place, key and value, in 2000 sequences: the rarest is expected 74 times."""
    tokens, target = Recall(pairs=3).sample(2000, generator=generator)
    place = torch.einsum("btk,bk->bt", tokens[:, :3, :3], tokens[:, 3, :3]).argmax(1)
    counts = torch.bincount(9 * place + 3 * tokens[:, 3, :3].argmax(1) + target, minlength=27)
    assert counts.min() > 35


def test_the_answer_of_every_query_stands_behind_its_key(generator):
    task = MultiQueryRecall(keys=10, values=4, pairs=6, queries=3, length=20)
    tokens, target, asked = task.sample(40, generator=generator)
    assert tokens.ids.shape == (40, 20)
    assert tokens.mask.all()
    assert (asked.sum(1) == 3).all()
    assert not asked[:, :12].any()
    assert task.blank == task.vocabulary - 1
    assert (tokens.ids[:, 12:][~asked[:, 12:]] == task.blank).all()
    assert not target[~asked].any()
    for row in range(40):
        pairs = dict(tokens.ids[row, :12].reshape(6, 2).tolist())
        assert len(pairs) == 6
        assert all(0 <= key < 10 <= value < 14 for key, value in pairs.items())
        queried = tokens.ids[row][asked[row]].tolist()
        assert len(set(queried)) == 3
        assert [pairs[key] for key in queried] == target[row][asked[row]].tolist()


def test_a_sequence_may_have_no_room_left(generator):
    tokens, _, asked = MultiQueryRecall(keys=3, values=1, pairs=3, queries=3, length=9).sample(5, generator=generator)
    assert (asked[:, 6:]).all()
    assert (tokens.ids < 4).all()


def test_the_same_seed_gives_the_same_sequences():
    one, two = (MultiQueryRecall().sample(2, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.tokens.ids, two.tokens.ids)
    assert torch.equal(one.target, two.target)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("`pairs` is 0", lambda: Recall(pairs=0)),
        ("`queries` is 0", lambda: MultiQueryRecall(queries=0)),
        ("there are 4 different keys", lambda: MultiQueryRecall(keys=4, pairs=5)),
        ("a sequence has 2 pairs", lambda: MultiQueryRecall(pairs=2, queries=3)),
        ("need 24 tokens", lambda: MultiQueryRecall(length=23)),
    ],
)
def test_a_task_that_cannot_be_is_refused(words, make):
    assert_refused(SpecError, words, make)
