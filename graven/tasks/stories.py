"""Stories of a small world, told at random: who went where, took what, gave it to whom, and which room lies north of which.

What is asked about a story is what a reader of its sentences can answer (`world`), so a model that was trained on stories from here can be asked
about those of bAbI (`babi`), and about a user's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import Literal

import torch

from graven.errors import SpecError
from graven.tasks.base import Episode, Tokens
from graven.tasks.world import (
    DROPS,
    END,
    GIVERS,
    GIVES,
    MENTIONED,
    MOVES,
    NUMBER,
    OBJECTS,
    OPPOSITE,
    PEOPLE,
    PLACES,
    TAKES,
    WorldTask,
    asked_of,
    tokens_of,
)

Kind = Literal["where", "carry", "before", "directions", "give"]
LEAST: dict[Kind, int] = {"where": 1, "carry": 2, "before": 4, "directions": 1, "give": 6}  # sentences, below which hardly anything can be asked
KINDS: tuple[Kind, ...] = tuple(LEAST)
SHARES: dict[Kind, tuple[float, float]] = {  # of sentences that handle an object, and that hand one over
    "where": (0.0, 0.0), "carry": (0.4, 0.0), "before": (0.4, 0.0), "give": (0.25, 0.35),
}  # fmt: skip


@dataclass(frozen=True)
class Story:
    """One text and what can be asked about it.

    Args:
        sentences: In order, each with its full stop.
        asked: Questions with their one-word answers.
    """

    sentences: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join(self.sentences)


@dataclass
class World:
    """Where everybody and everything is, told or not."""

    random: Random
    people: tuple[str, ...]
    place: dict[str, str] = field(default_factory=dict)  # of people and objects
    holder: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {each: self.random.choice(PLACES) for each in (*self.people, *OBJECTS)}

    def move(self) -> str:
        """Somebody goes somewhere else, with all that they hold."""
        person = self.random.choice(self.people)
        where = self.random.choice([place for place in PLACES if place != self.place[person]])
        self.place |= dict.fromkeys((person, *(thing for thing, holder in self.holder.items() if holder == person)), where)
        return f"{person} {self.random.choice(MOVES)} the {where} ."

    def handle(self) -> str | None:
        """Somebody takes or drops an object, where that is possible."""
        choices = [(person, thing, True) for thing in OBJECTS if thing not in self.holder for person in self._beside(thing)]
        choices += [(person, thing, False) for thing, person in self.holder.items()]
        if not choices:
            return None
        person, thing, takes = self.random.choice(choices)
        if takes:
            self.holder[thing] = person
        else:
            del self.holder[thing]
        there = " there" if self.random.random() < 0.2 else ""
        return f"{person} {self.random.choice(TAKES if takes else DROPS)} the {thing}{there} ."

    def give(self) -> str | None:
        """Somebody hands what they hold to somebody in the same place."""
        choices = [(giver, thing, other) for thing, giver in self.holder.items() for other in self._beside(thing) if other != giver]
        if not choices:
            return None
        giver, thing, other = self.random.choice(choices)
        self.holder[thing] = other
        return f"{giver} {self.random.choice(GIVES)} the {thing} to {other} ."

    def _beside(self, thing: str) -> list[str]:
        return [person for person in self.people if self.place[person] == self.place[thing]]


def told(kind: Kind, sentences: int, random: Random) -> Story:
    """One story, with all that can be asked about it; of directions it has two sentences whatever is asked for.

    Raises:
        SpecError: The kind is unknown.
    """
    _known(kind)
    lines = _directions(random) if kind == "directions" else _events(kind, sentences, random)
    return Story(tuple(lines), tuple(asked_of(lines)))


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise SpecError(f"the kind of story is {kind!r}; it must be one of {', '.join(KINDS)}.")


def _events(kind: Kind, sentences: int, random: Random) -> list[str]:
    world, lines = World(random, GIVERS if kind == "give" else PEOPLE), list[str]()
    handled, given = SHARES[kind]
    while len(lines) < sentences:
        draw = random.random()
        line = world.give() if draw < given else world.handle() if draw < given + handled else None
        lines.append(line or world.move())
    return lines


def _directions(random: Random) -> list[str]:
    """Two facts about three rooms in a line, each told from either end."""
    one, middle, other = random.sample(PLACES, 3)
    way = random.choice(sorted(OPPOSITE))
    facts = [(one, way, middle), (middle, way, other)]
    told_as = [fact if random.random() < 0.5 else (fact[2], OPPOSITE[fact[1]], fact[0]) for fact in facts]
    random.shuffle(told_as)
    return ["the {} is {} of the {} .".format(*fact) for fact in told_as]


def kind_of(question: str) -> Kind:
    """The kind of story that is named for such questions."""
    first, second, third = question.split()[:3]
    if first == "where":
        return "before" if second == "was" else "carry" if third == "the" else "where"
    return "directions" if second == "is" else "give"


@dataclass(frozen=True, kw_only=True)
class Stories(WorldTask):
    """Draws stories and questions about them; what a story has of sentences is what `pairs` counts elsewhere.

    Args:
        kinds: Kinds of story, drawn as often as they are named.
        queries: Questions to a story, Q. Some come twice where a story allows fewer. A story that allows none of its own kind is told again, as
            one of the same kind.
        everything: Ask whatever a story answers, where half of the questions are what its own kind is named for, in place of these alone. Where a
            thing is hangs on where its holder is, and is hardly learned where nobody is asked for (docs/log.md).
    Raises:
        SpecError: A kind is unknown, or there is none, or no query.
    """

    kinds: tuple[Kind, ...] = KINDS
    queries: int = 4
    everything: bool = False
    kind: Literal["stories"] = "stories"

    def __post_init__(self) -> None:
        for kind in self.kinds:
            _known(kind)
        if not self.kinds or self.queries < 1:
            raise SpecError("`kinds` is empty or `queries` is below 1; give at least one kind and one query.")

    def sample(self, size: int, *, pairs: int, generator: torch.Generator) -> Episode:
        """A batch of stories of at most `pairs` sentences.

        Args:
            size: Stories, B.
            pairs: Most sentences of a story; its length is uniform from half of them, rounded up, among stories that allow a question of their kind.
            generator: The only source of randomness.
        Raises:
            SpecError: In so few sentences hardly anything happens that can be asked about.
        """
        kinds = [kind for kind in self.kinds if LEAST[kind] <= pairs]
        if not kinds:
            raise SpecError(f"`pairs` is {pairs} and stories of these kinds need {min(LEAST[kind] for kind in self.kinds)} sentences.")
        random = Random(int(torch.randint(1 << 62, (1,), generator=generator)))
        stories, questions = list[Story](), list[list[tuple[str, str]]]()
        for kind in random.choices(kinds, k=size):
            own: list[tuple[str, str]] = []
            while not own:
                story = told(kind, random.randint((pairs + 1) // 2, pairs), random)
                own = [pair for pair in story.asked if kind_of(pair[0]) == kind]
            stories.append(story)
            questions.append(drawn(story.asked if self.everything else own, self.queries, random, own=kind))
        return episode(stories, questions)


def drawn(asked: Sequence[tuple[str, str]], count: int, random: Random, *, own: Kind) -> list[tuple[str, str]]:
    """So many of the questions in random order, one of its own kind before each of another; all of a kind before any of it comes twice."""
    decks: dict[Kind, list[tuple[str, str]]] = {}
    for pair in asked:
        decks.setdefault(kind_of(pair[0]), []).append(pair)
    left, questions = dict[Kind, list[tuple[str, str]]](), list[tuple[str, str]]()
    others = random.sample([kind for kind in decks if kind != own], len(decks) - (own in decks))
    order = [kind for other in others for kind in (own, other)] or [own]
    for kind in islice(cycle([kind for kind in order if kind in decks]), count):
        if not left.get(kind):
            left[kind] = random.sample(decks[kind], len(decks[kind]))
        questions.append(left[kind].pop())
    return questions


def episode(stories: Sequence[Story], asked: Sequence[Sequence[tuple[str, str]]]) -> Episode:
    """Stories with as many questions to each as to the others; the answer is one word and its end."""
    context = Tokens.of([tokens_of(story.text) for story in stories])
    query = Tokens.of([tokens_of(question) for questions in asked for question, _ in questions])
    target = torch.tensor([[[NUMBER[answer], NUMBER[END]] for _, answer in questions] for questions in asked])
    shape = (*target.shape[:2], query.ids.shape[-1])
    answers = torch.tensor([NUMBER[word] for word in MENTIONED])
    return Episode(
        context=context,
        query=Tokens(query.ids.view(shape), query.mask.view(shape)),
        target=Tokens.full(target),
        values=context.mask & torch.isin(context.ids, answers),
        answer=1,
    )
