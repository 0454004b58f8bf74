"""Stories and bAbI: a reader that only knows the words replays each story and must come to the same answers."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from graven import cli
from graven.errors import SpecError, TextError
from graven.measure import exact_match
from graven.model import load
from graven.settings import build
from graven.several import append, merge, values_of
from graven.tasks.babi import Babi, batches, leaked, read_babi
from graven.tasks.stories import KINDS, Stories, Story, drawn, episode, kind_of, told
from graven.tasks.world import END, NUMBER, OPPOSITE, PLACES, VOCABULARY, text_of, tokens_of
from graven.train import TrainSpec, train

DATA = Path(__file__).parents[2] / "shared" / "data" / "babi"


def solved(story: Story, question: str) -> str:
    """The answer, from a replay that shares nothing with the generator but the words."""
    place, holder, been, gifts, facts = {}, {}, {}, [], []

    def carried(thing, where):
        place[thing] = where
        if been.setdefault(thing, [where])[-1] != where:
            been[thing].append(where)

    for sentence in story.sentences:
        words = [word for word in sentence.lower().replace(".", " ").split() if word != "there"]
        if words[0] == "the":
            _, a, _, way, _, _, b = words
            facts += [(a, way, b), (b, OPPOSITE[way], a)]
        elif words[-1] in PLACES:
            place[words[0]] = words[-1]
            for thing in [thing for thing, who in holder.items() if who == words[0]]:
                carried(thing, words[-1])
        elif words[-2] == "to":
            gifts.append((words[0], words[-3], words[-1]))
            holder[words[-3]] = words[-1]
        elif words[1] in ("got", "took", "grabbed", "picked"):
            holder[words[-1]] = words[0]
            carried(words[-1], place.get(words[0]))
        else:
            holder.pop(words[-1], None)
    match question.lower().replace("?", "").split():
        case ["where", "is", "the", thing]:
            return place[thing]
        case ["where", "is", person]:
            return place[person]
        case ["where", "was", "the", thing, "before", "the", where]:
            path = been[thing]
            return path[len(path) - 1 - path[::-1].index(where) - 1]
        case ["what", "is", way, "of", "the", b]:
            return next(x for x, w, y in facts if (w, y) == (way, b))
        case ["what", "is", "the", a, way, "of"]:
            return next(y for x, w, y in facts if (x, w) == (a, way))
        case ["what", "did", a, "give", "to", b]:
            return [thing for x, thing, y in gifts if (x, y) == (a, b)][-1]
        case ["who", "did", a, "give", "the", thing, "to"]:
            return [y for x, t, y in gifts if (x, t) == (a, thing)][-1]
        case ["who", "gave", "the", thing, "to", b]:
            return [x for x, t, y in gifts if (t, y) == (thing, b)][-1]
        case ["who", "gave", "the", thing]:
            return [x for x, t, y in gifts if t == thing][-1]
        case ["who", "received", "the", thing]:
            return [y for x, t, y in gifts if t == thing][-1]
    raise AssertionError(question)


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_what_a_replay_of_the_story_says(kind):
    random, asked = Random(1), 0
    for _ in range(200):
        story = told(kind, random.randint(1, 16), random)
        for question, answer in story.asked:
            assert solved(story, question) == answer, (story.text, question)
        asked += len(story.asked)
    assert asked > 50


@pytest.mark.skipif(not DATA.exists(), reason="the bAbI files are not beside the project")
@pytest.mark.parametrize("task", [1, 2, 3, 4, 5])
def test_the_same_replay_answers_babi_so_both_mean_the_same(task):
    stories = read_babi(next((DATA / "en").glob(f"qa{task}_*_test.txt")))
    assert len(stories) == 1000
    assert [solved(story, story.asked[0][0]) for story in stories[:300]] == [story.asked[0][1] for story in stories[:300]]


@pytest.mark.skipif(not DATA.exists(), reason="the bAbI files are not beside the project")
@pytest.mark.parametrize(("task", "count"), [(1, 16), (4, 741)])
def test_test_items_that_stand_in_training_are_counted(task, count):
    train, test = (read_babi(next((DATA / folder).glob(f"qa{task}_*_{part}.txt"))) for folder, part in (("en-10k", "train"), ("en", "test")))
    assert leaked(train, test) == count


def test_a_batch_holds_the_stories_their_questions_and_one_word_answers(generator):
    batch = Stories(queries=3).sample(8, pairs=10, generator=generator)
    assert batch.query.ids.shape[:2] == batch.target.ids.shape[:2] == (8, 3)
    assert (batch.target.ids[..., 1] == NUMBER[END]).all()
    for i in range(8):
        story = Story(tuple(f"{line.strip()} ." for line in text_of(batch.context.row(i)).split(".") if line.strip()), ())
        for j in range(3):
            question = text_of(batch.query.ids[i, j][batch.query.mask[i, j]].tolist())
            assert solved(story, question) == VOCABULARY[batch.target.ids[i, j, 0]]
    assert batch.values[~batch.context.mask].sum() == 0


def test_the_same_generator_tells_the_same_stories():
    one, other = (Stories().sample(4, pairs=8, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one.context.ids, other.context.ids)
    assert torch.equal(one.query.ids, other.query.ids)


def test_only_kinds_that_fit_into_so_few_sentences_are_told(generator):
    batch = Stories(kinds=("where", "give")).sample(20, pairs=3, generator=generator)
    assert (batch.query.ids[..., 0] == NUMBER["where"]).all()
    with pytest.raises(SpecError, match="need 6 sentences"):
        Stories(kinds=("give",)).sample(1, pairs=3, generator=generator)


def test_kinds_are_told_as_often_as_they_are_named_however_seldom_a_story_allows_their_question(generator):
    told_of = Counter()
    for _ in range(4):
        batch = Stories(kinds=("where", "before", "give", "give"), queries=1).sample(100, pairs=6, generator=generator)
        told_of.update(
            kind_of(" ".join(VOCABULARY[token] for token in row[mask]))
            for row, mask in zip(batch.query.ids[:, 0], batch.query.mask[:, 0], strict=True)
        )
    assert sum(told_of.values()) == 400
    for kind, share in (("where", 100), ("before", 100), ("give", 200)):
        assert abs(told_of[kind] - share) < 50  # five standard errors


def test_every_question_comes_once_before_any_comes_twice():
    asked = [(f"where is {person} ?", "garden") for person in ("daniel", "john", "mary")]
    assert sorted(drawn(asked, 3, Random(0), own="where")) == asked
    assert len(drawn(asked, 7, Random(0), own="where")) == 7
    kinds = [kind_of(question) for question, _ in drawn([*asked, ("where is the milk ?", "garden")], 4, Random(0), own="carry")]
    assert kinds == ["carry", "where"] * 2


@pytest.mark.plain
@pytest.mark.parametrize(
    ("settings", "message"), [({"kinds": ("chess",)}, "kind of story is 'chess'"), ({"kinds": ()}, "empty"), ({"queries": 0}, "below 1")]
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        Stories(**settings)
    with pytest.raises(SpecError, match="kind of story"):
        told("chess", 3, Random(0))


def test_text_and_tokens_are_each_others_inverse():
    text = "Mary went to the garden. The office is north of the kitchen. Where is Mary?"
    assert text_of(tokens_of(text)) == text


def test_a_word_of_another_world_is_refused():
    for text in ("Mary flew to the moon.", "Mary | garden", "Mary went, home."):
        with pytest.raises(TextError, match="no word of this small world"):
            tokens_of(text)


FILE = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
1 John moved to the office.
2 Where is John?\toffice\t1
"""


def test_a_babi_file_is_read_question_by_question(tmp_path):
    (tmp_path / "qa1.txt").write_text(FILE)
    stories = read_babi(tmp_path / "qa1.txt")
    assert [(len(story.sentences), story.asked) for story in stories] == [
        (2, (("Where is Mary?", "bathroom"),)),
        (1, (("Where is John?", "office"),)),
    ]
    task = Babi(file=str(tmp_path / "qa1.txt"))
    batch = task.sample(5, pairs=1, generator=torch.Generator().manual_seed(0))
    assert [text_of(batch.context.row(i)) for i in range(5)] == ["John moved to the office."] * 5
    assert sum(len(part.context.ids) for part in batches(stories * 3, 4)) == 6
    with pytest.raises(SpecError, match="raise `pairs`"):
        task.sample(1, pairs=0, generator=torch.Generator())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mary moved.\n", "line 1: 'Mary moved.' does not begin"),
        ("1 Mary moved.\n2 Where is Mary?\tmoon\t1\n", "line 2: the answer 'moon'"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_babi_file_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "a.txt").write_text(text)
    with pytest.raises(TextError, match=message):
        read_babi(tmp_path / "a.txt")


def test_an_episode_pads_questions_of_unequal_length():
    stories = [Story(("mary moved to the garden .",), ()), Story(("john got the milk .",), ())]
    batch = episode(stories, [[("where is mary ?", "garden")], [("where was the milk before the garden ?", "office")]])
    assert batch.query.mask.sum(-1).flatten().tolist() == [4, 8]
    assert batch.context.mask.sum(-1).tolist() == [6, 5]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of stories that was hardly trained; its model knows what can be asked all the same."""
    sizes = {"vocabulary": len(VOCABULARY), "width": 16, "layers": 1, "heads": 2, "key_value_heads": 2, "hidden": 32, "convolution": 7}
    table = {
        "seed": 0,
        "task": {"kind": "stories", "kinds": ["where"], "queries": 2, "everything": True},
        "model": sizes,
        "memory": {"slots": 2, "steps": 1},
        "optimizer": {"batch": 2, "micro_batch": 2},
        "stage": [{"pairs": [3], "steps": [1], "at_most": 2}],
    }
    folder = tmp_path_factory.mktemp("stories") / "run"
    train(build(TrainSpec, table, where="spec"), folder)
    return load(folder)


STORY = "Mary went to the garden. John took the milk.\nmary moved to the office. John travelled to the kitchen."
ANSWERS = {"Where is Mary?": "office", "Where is John?": "kitchen", "Where is the milk?": "kitchen"}


def test_a_story_is_one_page_and_is_asked_what_a_reader_could_answer(trained):
    assert dict(trained.task.parse(STORY)) == ANSWERS
    written = trained.write(STORY * 9)
    assert (len(written.about.pages), written.about.records) == (1, 3)
    assert [answer.known for answer in trained.ask_many(written, ["where is mary", "Where is Daniel?"])] == [True, False]
    assert trained.verify(written, STORY * 9).answered == written.about.answered
    assert set(values_of(trained, trained.write(STORY))) == set(ANSWERS)  # found again by their hashes


def test_a_story_is_not_joined_to_another(trained):
    written = trained.write(STORY)
    for act in (lambda: append(trained, written, STORY), lambda: merge(trained, written, written)):
        with pytest.raises(SpecError, match="a story is one page"):
            act()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mary the garden.", "'mary the garden' is no sentence"),
        ("Mary went to the garden", "sentences that end with a full stop"),
        ("Mary went to the garden. Where is Mary?", "questions are asked later"),
        ("", "sentences that end with a full stop"),
        ("Mary took the milk.", "nothing can be asked"),
        ("Mary flew to the garden.", "'flew' is no word"),
    ],
)
def test_what_is_no_story_is_refused(text, message, trained):
    with pytest.raises(TextError, match=message):
        trained.write(text)


@pytest.mark.parametrize("question", ["Who is Mary?", "garden", "Where is Mary? Where is John?", "Where is the garden?"])
def test_what_is_no_question_of_this_world_is_refused(question, trained):
    written = trained.write(STORY)
    with pytest.raises(TextError, match="no question of this small world"):
        trained.ask(written, question)


# The shipped checkpoint


@pytest.fixture(scope="module")
def shipped():
    return load("stories")


def test_the_shipped_model_answers_a_story_told_by_people(shipped):
    text = "Mary went to the garden. John moved to the office. Mary took the milk. Mary travelled to the kitchen. Sandra went to the hallway."
    asked = {"Where is Mary?": "kitchen", "Where is the milk?": "kitchen", "Where was the milk before the kitchen?": "garden"}
    written = shipped.write(text)
    assert {answer.query: answer.text for answer in shipped.ask_many(written, list(asked))} == asked
    assert written.state.shape == (1, 8, 64)


def test_the_shipped_model_knows_where_people_are_in_stories_of_ten_sentences(shipped):
    (row,) = exact_match(shipped.memory, Stories(kinds=("where",)), pairs=10, steps=[shipped.memory.spec.steps], contexts=40, seed=1)
    assert row.exact_match >= 0.95


def test_the_command_line_writes_a_story_and_answers(tmp_path, capsys):
    (tmp_path / "story.txt").write_text("Mary went to the garden.\nMary took the milk.\nMary moved to the office.\n")
    out = str(tmp_path / "story.graven")
    assert cli.main(["write", str(tmp_path / "story.txt"), "-o", out, "--model", "stories"]) == 0
    assert "3 of 3 queries answered from the memory alone" in capsys.readouterr().out
    assert cli.main(["ask", out, "Where is Mary?"]) == 0
    assert capsys.readouterr().out == "office\n"
    assert cli.main(["ask", out, "Where is John?"]) == 1
    assert "'Where is John?' is not a key of this memory" in capsys.readouterr().err
