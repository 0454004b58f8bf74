"""Stories of a small world: who went where, took what, gave it to whom, and which room lies north of which.

The sentences and questions have the forms of bAbI's tasks QA1 to QA5 (Weston et al. 2015, arXiv:1502.05698), so a model that was trained on stories
from here can be asked about theirs; no sentence of theirs is used. Words are tokens. Lower case throughout; a name is one word.

    QA1  where           mary moved to the office . john went to the garden .                  where is mary ?                        office |
    QA2  carry           ... mary took the milk . mary went to the garden .                    where is the milk ?                    garden |
    QA3  before          ... mary dropped the milk there .                                     where was the milk before the garden ? office |
    QA4  directions      the office is north of the garden . the hallway is ...                what is the office north of ?          garden |
    QA5  give            ... mary gave the milk to john .                                      who received the milk ?                john |
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch

from graven.errors import SpecError, TextError
from graven.tasks.base import Episode, Tokens

Kind = Literal["where", "carry", "before", "directions", "give"]
LEAST: dict[Kind, int] = {"where": 1, "carry": 2, "before": 4, "directions": 1, "give": 6}  # sentences, below which hardly anything can be asked
KINDS: tuple[Kind, ...] = tuple(LEAST)

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
PEOPLE = ("mary", "john", "daniel", "sandra")
GIVERS = ("mary", "fred", "bill", "jeff")
MOVES = ("moved to", "went to", "went back to", "travelled to", "journeyed to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "left", "discarded", "put down")
GIVES = ("gave", "passed", "handed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

END = "|"
WORDS = tuple(
    sorted({
        *PLACES, *OBJECTS, *PEOPLE, *GIVERS, *" ".join((*MOVES, *TAKES, *DROPS, *GIVES)).split(), *OPPOSITE,
        "where", "is", "was", "before", "the", "there", "what", "who", "did", "give", "to", "of", "received",
    })
)  # fmt: skip
VOCABULARY = (*WORDS, ".", "?", END)
NUMBER = {word: i for i, word in enumerate(VOCABULARY)}
NAMES = frozenset((*PEOPLE, *GIVERS))


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
    """Where everybody and everything is, and what of it a reader knows: where a person is, once they have gone somewhere."""

    random: Random
    people: tuple[str, ...]
    place: dict[str, str] = field(default_factory=dict)  # of people and objects
    known: set[str] = field(default_factory=set)  # people whose place was told
    holder: dict[str, str] = field(default_factory=dict)
    been: dict[str, list[str | None]] = field(default_factory=dict)  # places of an object since it was first taken; None where no reader knows
    gifts: list[tuple[str, str, str]] = field(default_factory=list)  # giver, object, receiver

    def __post_init__(self) -> None:
        self.place = {each: self.random.choice(PLACES) for each in (*self.people, *OBJECTS)}

    def move(self) -> str:
        """Somebody goes somewhere else, with all that they hold."""
        person = self.random.choice(self.people)
        self.place[person] = self.random.choice([place for place in PLACES if place != self.place[person]])
        self.known.add(person)
        for thing in [thing for thing, holder in self.holder.items() if holder == person]:
            self._carry(thing, person)
        return f"{person} {self.random.choice(MOVES)} the {self.place[person]} ."

    def handle(self) -> str | None:
        """Somebody takes or drops an object, where that is possible."""
        choices = [(person, thing, True) for thing in OBJECTS if thing not in self.holder for person in self._beside(thing)]
        choices += [(person, thing, False) for thing, person in self.holder.items()]
        if not choices:
            return None
        person, thing, takes = self.random.choice(choices)
        if takes:
            self.holder[thing] = person
            self._carry(thing, person)
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
        self.gifts.append((giver, thing, other))
        return f"{giver} {self.random.choice(GIVES)} the {thing} to {other} ."

    def _beside(self, thing: str) -> list[str]:
        return [person for person in self.people if self.place[person] == self.place[thing]]

    def _carry(self, thing: str, person: str) -> None:
        self.place[thing] = self.place[person]
        where, path = (self.place[person] if person in self.known else None), self.been.setdefault(thing, [])
        if not path or path[-1] != where:
            path.append(where)


def told(kind: Kind, sentences: int, random: Random) -> Story:
    """One story; of directions it has two sentences whatever is asked for.

    Raises:
        SpecError: The kind is unknown.
    """
    if kind not in KINDS:
        raise SpecError(f"the kind of story is {kind!r}; it must be one of {', '.join(KINDS)}.")
    if kind == "directions":
        return _directions(random)
    world = World(random, GIVERS if kind == "give" else PEOPLE)
    shares: dict[Kind, tuple[float, float]] = {"where": (0.0, 0.0), "carry": (0.4, 0.0), "before": (0.4, 0.0), "give": (0.25, 0.35)}
    handled, given = shares[kind]
    lines: list[str] = []
    while len(lines) < sentences:
        draw = random.random()
        line = world.give() if draw < given else world.handle() if draw < given + handled else None
        lines.append(line or world.move())
    ask: dict[Kind, Callable[[World], list[tuple[str, str]]]] = {"where": _where, "carry": _where_things, "before": _before, "give": _gifts}
    return Story(tuple(lines), tuple(ask[kind](world)))


def _where(world: World) -> list[tuple[str, str]]:
    return [(f"where is {person} ?", world.place[person]) for person in world.people if person in world.known]


def _where_things(world: World) -> list[tuple[str, str]]:
    return [(f"where is the {thing} ?", path[-1]) for thing, path in world.been.items() if path[-1] is not None]


def _before(world: World) -> list[tuple[str, str]]:
    """Where an object was before the last time that it came to a place."""
    last = {(thing, place): path[i - 1] for thing, path in world.been.items() for i, place in enumerate(path) if i and place}
    return [(f"where was the {thing} before the {place} ?", where) for (thing, place), where in last.items() if where]


def _gifts(world: World) -> list[tuple[str, str]]:
    """Each question asks for the last gift that fits it."""
    asked: dict[str, str] = {}
    for giver, thing, other in world.gifts:
        asked |= {
            f"what did {giver} give to {other} ?": thing,
            f"who did {giver} give the {thing} to ?": other,
            f"who gave the {thing} to {other} ?": giver,
            f"who gave the {thing} ?": giver,
            f"who received the {thing} ?": other,
        }
    return list(asked.items())


def _directions(random: Random) -> Story:
    """Two facts about three rooms; the middle one lies between them or at a corner."""
    one, middle, other = random.sample(PLACES, 3)
    first, second = random.sample(sorted(OPPOSITE), 2)
    facts = [(one, first, middle), (other, second, middle)]  # one is first of the middle, the other is second of it
    lines, asked = [], []
    for place, way, origin in facts:
        told_as = (place, way, origin) if random.random() < 0.5 else (origin, OPPOSITE[way], place)
        lines.append("the {} is {} of the {} .".format(*told_as))
        for a, w, b in ((place, way, origin), (origin, OPPOSITE[way], place)):
            asked += [(f"what is {w} of the {b} ?", a), (f"what is the {a} {w} of ?", b)]
    random.shuffle(lines)
    return Story(tuple(lines), tuple(asked))


@dataclass(frozen=True, kw_only=True)
class Stories:
    """Draws stories and questions about them; what a story has of sentences is what `pairs` counts elsewhere.

    Args:
        kinds: Kinds of story; each is drawn as often as the others.
        queries: Questions to a story, Q. Some come twice where a story allows fewer; one that allows none is told again.
    Raises:
        SpecError: A kind is unknown, or there is none, or no query.
    """

    kinds: tuple[str, ...] = KINDS
    queries: int = 4
    kind: Literal["stories"] = "stories"

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise SpecError(f"the kind of story is {unknown[0]!r}; it must be one of {', '.join(KINDS)}.")
        if not self.kinds or self.queries < 1:
            raise SpecError("`kinds` is empty or `queries` is below 1; give at least one kind and one query.")

    @property
    def vocabulary(self) -> int:
        """Words and marks."""
        return len(VOCABULARY)

    def sample(self, size: int, *, pairs: int, generator: torch.Generator) -> Episode:
        """A batch of stories of at most `pairs` sentences.

        Args:
            size: Stories, B.
            pairs: Most sentences of a story; its length is uniform from half of them, rounded up.
            generator: The only source of randomness.
        Raises:
            SpecError: In so few sentences hardly anything happens that can be asked about.
        """
        kinds = [kind for kind in KINDS if kind in self.kinds and LEAST[kind] <= pairs]
        if not kinds:
            raise SpecError(
                f"`pairs` is {pairs} and stories of these kinds need {min(LEAST[kind] for kind in KINDS if kind in self.kinds)} sentences."
            )
        random = Random(int(torch.randint(1 << 62, (1,), generator=generator)))
        stories: list[Story] = []
        while len(stories) < size:
            story = told(random.choice(kinds), random.randint((pairs + 1) // 2, pairs), random)
            if story.asked:
                stories.append(story)
        return episode(stories, [drawn(story.asked, self.queries, random) for story in stories])


def drawn(asked: Sequence[tuple[str, str]], count: int, random: Random) -> list[tuple[str, str]]:
    """So many of the questions in random order; all of them before any comes twice."""
    questions: list[tuple[str, str]] = []
    while len(questions) < count:
        questions += random.sample(asked, len(asked))
    return questions[:count]


def episode(stories: Sequence[Story], asked: Sequence[Sequence[tuple[str, str]]]) -> Episode:
    """Stories with as many questions to each as to the others; the answer is one word and its end."""
    context = Tokens.of([tokens_of(story.text) for story in stories])
    query = Tokens.of([tokens_of(question) for questions in asked for question, _ in questions])
    target = torch.tensor([[[NUMBER[answer], NUMBER[END]] for _, answer in questions] for questions in asked])
    shape = (*target.shape[:2], query.ids.shape[-1])
    answers = torch.tensor([NUMBER[word] for word in (*PLACES, *OBJECTS, *NAMES)])
    return Episode(
        context=context,
        query=Tokens(query.ids.view(shape), query.mask.view(shape)),
        target=Tokens.full(target),
        values=context.mask & torch.isin(context.ids, answers),
        answer=1,
    )


def tokens_of(text: str) -> list[int]:
    """A text as words; case does not count.

    Raises:
        TextError: A word or mark is not of this world.
    """
    words = re.findall(r"[a-z]+|[^a-z\s]", text.lower())
    unknown = next((word for word in words if word not in NUMBER or word == END), None)
    if unknown is not None:
        raise TextError(f"{unknown!r} is no word of this small world, which knows {', '.join(WORDS)}. Say it with those.")
    return [NUMBER[word] for word in words]


def text_of(tokens: Sequence[int]) -> str:
    """Words as a text, with names and the first word of a sentence capitalised."""
    text, start = "", True
    for word in (VOCABULARY[token] for token in tokens):
        shown = word.capitalize() if start or word in NAMES else word
        text += shown if word in ".?" or not text else f" {shown}"
        start = word in ".?"
    return text
