"""bAbI question answering, from files of the published format (Weston et al. 2015, arXiv:1502.05698); QA1 to QA5, whose words `world` knows.

    1 Mary moved to the bathroom.
    2 John went to the hallway.
    3 Where is Mary? \t bathroom \t 1

A line with a tab is a question about the sentences before it; the count starts anew with each story. Every question is an item of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import torch

from graven.errors import SpecError, TextError
from graven.tasks.base import Episode
from graven.tasks.stories import Story, episode
from graven.tasks.world import NUMBER, WorldTask, tokens_of


def read_babi(path: Path) -> list[Story]:
    """Each question of a file with the sentences before it, one story an item.

    Raises:
        TextError: The file cannot be read, or a line is not of the format or not of QA1 to QA5.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read {path}: {error}. Give the path of a bAbI file, for instance qa1_single-supporting-fact_train.txt.") from error
    stories, sentences = [], list[str]()
    for number, line in enumerate(filter(str.strip, lines), start=1):
        count, _, rest = line.strip().partition(" ")
        if not count.isdigit() or not rest:
            raise TextError(f"{path.name}, line {number}: {line[:40]!r} does not begin with its number in the story; this is no bAbI file.")
        if count == "1":
            sentences = []
        said, *answer = rest.split("\t")
        tokens_of(said)
        if not answer:
            sentences.append(said.strip())
            continue
        word = answer[0].strip().lower()
        if word not in NUMBER:
            raise TextError(f"{path.name}, line {number}: the answer {answer[0]!r} is no word of QA1 to QA5; those are the tasks that can be read.")
        stories.append(Story(tuple(sentences), ((said.strip(), word),)))
    return stories


def leaked(train: Sequence[Story], test: Sequence[Story]) -> int:
    """Test items whose sentences and question also stand in training."""
    seen = {(story.sentences, story.asked[0][0]) for story in train}
    return sum((story.sentences, story.asked[0][0]) in seen for story in test)


@dataclass(frozen=True, kw_only=True)
class Babi(WorldTask):
    """Draws stories from a file, each with the one question that stands behind it.

    Args:
        file: Path of a training file.
    """

    file: str
    kind: Literal["babi"] = "babi"

    def sample(self, size: int, *, pairs: int, generator: torch.Generator) -> Episode:
        """A batch of stories of at most `pairs` sentences.

        Raises:
            TextError: The file cannot be read.
            SpecError: It has no story so short.
        """
        stories = [story for story in _of_file(self.file) if len(story.sentences) <= pairs]
        if not stories:
            raise SpecError(f"{self.file} has no question about {pairs} sentences or fewer; raise `pairs`.")
        random = Random(int(torch.randint(1 << 62, (1,), generator=generator)))
        chosen = [random.choice(stories) for _ in range(size)]
        return episode(chosen, [story.asked for story in chosen])


def batches(stories: Sequence[Story], size: int) -> Iterator[Episode]:
    """Every item once, stories of similar length side by side."""
    ordered = sorted(stories, key=lambda story: len(story.text))
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        yield episode(part, [story.asked for story in part])


@cache
def _of_file(file: str) -> tuple[Story, ...]:
    return tuple(read_babi(Path(file)))
