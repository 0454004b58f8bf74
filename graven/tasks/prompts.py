"""Few-shot classification prompts with labelled queries, put together from short lists of words.

A prompt is a block of labelled examples, as it stands before every query of somebody who uses a language model as a classifier:

    Review: The soup was cold and bland.
    Sentiment: negative

    Review: ...

A query is the same without its label, which is the answer. No sentence occurs twice in a prompt and its queries.

Source: ours; tests/test_prompts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from graven.errors import SpecError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Classes:
    """One classification task: a sentence is a subject and a predicate of one label.

    Args:
        sentence: Word before the sentence.
        label: Word before the label.
        parts: For each label, subjects and predicates; every subject goes with every predicate.
        end: What ends a sentence.
    """

    sentence: str
    label: str
    parts: dict[str, tuple[Sequence[str], Sequence[str]]]
    end: str = "."

    def sentences(self, label: str) -> list[str]:
        """Every sentence of a label."""
        subjects, predicates = self.parts[label]
        return [f"{subject} {predicate}{self.end}" for subject in subjects for predicate in predicates]


@dataclass(frozen=True)
class Prompt:
    """A block of labelled examples, and queries with their answers.

    Args:
        text: The examples, with the blank line that comes before a query.
        queries: Query and answer; text, query and answer in one are one more example.
    """

    text: str
    queries: list[tuple[str, str]]


THINGS = (
    "The soup", "The room", "The film", "The staff", "The concert", "The phone", "The book", "The hotel", "The jacket", "The coffee",
    "The guide", "The game", "The sofa", "The ride", "The show",
)  # fmt: skip
CLASSES = {
    "sentiment": Classes(
        sentence="Review",
        label="Sentiment",
        parts={
            "positive": (THINGS, (
                "was wonderful and I loved it", "made my whole week", "was better than I had hoped", "is worth every penny", "was a delight",
                "is the best we ever had", "was excellent from start to end", "made us smile all day", "was great and I will come back",
                "is beautiful and well made",
            )),
            "negative": (THINGS, (
                "was awful and I hated it", "ruined my whole week", "was worse than I had feared", "is a waste of money", "was a disappointment",
                "is the worst we ever had", "was terrible from start to end", "made us angry all day", "was bad and I want a refund",
                "is ugly and badly made",
            )),
        },
    ),
    "topic": Classes(
        sentence="Text",
        label="Topic",
        parts={
            "sports": (
                ("The goalkeeper", "Our team", "The young striker", "The champion", "The coach", "The tennis player"),
                ("won the final match", "trained hard for the race", "scored in the last minute", "lost the second set", "broke the world record",
                 "missed the penalty", "was cheered in the stadium", "led the league all season"),
            ),
            "food": (
                ("The chef", "My grandmother", "The baker", "The new restaurant", "Our cook", "The kitchen"),
                ("roasted a chicken with garlic", "made fresh bread and butter", "served a bowl of hot soup", "added more salt to the sauce",
                 "baked a chocolate cake", "fried the onions in oil", "boiled rice for dinner", "cut tomatoes for the salad"),
            ),
            "weather": (
                ("This morning", "By the evening", "In the north", "Along the coast", "All weekend", "Over the hills"),
                ("heavy rain fell for hours", "the wind blew at storm strength", "thick fog hid the sun", "the snow began to melt",
                 "clouds gave way to sunshine", "temperatures dropped below zero", "thunder and lightning were expected",
                 "the heat wave came to an end"),
            ),
            "music": (
                ("The violinist", "The singer", "The orchestra", "The old pianist", "The jazz band", "The choir"),
                ("played a slow melody", "recorded a second album", "tuned up before the concert", "sang the last chorus twice",
                 "performed a new symphony", "wrote a song about home", "kept the rhythm with the drums", "played an encore for the crowd"),
            ),
        },
    ),
    "question": Classes(
        sentence="Question",
        label="Asks for",
        end="?",
        parts={
            "person": (
                ("Who", "Which woman", "Which man", "Which author", "Which king"),
                ("wrote the longest letter", "painted the old chapel", "founded the company", "discovered the island", "won the first prize",
                 "led the expedition", "built the bridge", "invented the machine", "taught at the school", "signed the treaty"),
            ),
            "place": (
                ("Where", "In which city", "In which country", "At what place", "In which town"),
                ("was the treaty signed", "does the river begin", "is the museum", "did the battle take place", "was the painter born",
                 "is the oldest bridge", "did the ship sink", "do the penguins live", "was the first school", "is coffee grown"),
            ),
            "time": (
                ("When", "In what year", "On which day", "In which month", "In which century"),
                ("did the war end", "was the bridge opened", "did the ship arrive", "was the law passed", "does the school year begin",
                 "was the book printed", "did the king die", "was the station built", "did the strike start", "was the treaty signed"),
            ),
            "number": (
                ("How many people", "How many soldiers", "How many children", "How many men", "How many visitors"),
                ("live in the village", "took part in the battle", "were on the ship", "work in the factory", "visited the museum",
                 "joined the army", "crossed the bridge", "survived the storm", "attended the school", "signed the letter"),
            ),
        },
    ),
}  # fmt: skip


def few_shot(name: str, *, examples: int, queries: int, generator: torch.Generator) -> Prompt:
    """A prompt and its queries, labels as even as their number allows.

    Args:
        name: "sentiment", "topic" or "question".
        examples: Labelled examples in the prompt.
        queries: Queries behind it.
        generator: The only source of randomness.
    Raises:
        SpecError: The task is unknown, or has fewer sentences than are asked for.
    """
    if name not in CLASSES:
        raise SpecError(f"there is no few-shot task {name!r}; it must be one of {', '.join(CLASSES)}.")
    task = CLASSES[name]
    labels = list(task.parts)
    drawn = {label: _shuffled(task.sentences(label), generator) for label in labels}
    fewest = min(len(sentences) for sentences in drawn.values())
    for what, count in ("examples", examples), ("queries", queries):
        if count < 1:
            raise SpecError(f"`{what}` is {count}; it must be at least 1.")
    if -(-examples // len(labels)) + -(-queries // len(labels)) > fewest:
        raise SpecError(
            f"{examples} examples and {queries} queries are more than the {fewest} sentences that {name!r} has for a label; ask for fewer."
        )

    def take(count: int) -> list[tuple[str, str]]:
        rows = [(drawn[label].pop(), label) for label in (labels * -(-count // len(labels)))[:count]]
        return _shuffled(rows, generator)

    def query(sentence: str) -> str:
        return f"{task.sentence}: {sentence}\n{task.label}:"

    text = "".join(f"{query(sentence)} {label}\n\n" for sentence, label in take(examples))
    return Prompt(text, [(query(sentence), f" {label}") for sentence, label in take(queries)])


def _shuffled(items: Sequence[T], generator: torch.Generator) -> list[T]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
