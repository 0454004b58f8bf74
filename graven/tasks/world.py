"""The small world of stories: its words, its sentences, and what can be asked once they are read.

The sentences and questions have the forms of bAbI's tasks QA1 to QA5 (Weston et al. 2015, arXiv:1502.05698); no sentence of theirs is used. Words are
tokens. Lower case throughout; a name is one word.

    QA1  where           mary moved to the office . john went to the garden .                  where is mary ?                        office |
    QA2  carry           ... mary took the milk . mary went to the garden .                    where is the milk ?                    garden |
    QA3  before          ... mary dropped the milk there .                                     where was the milk before the garden ? office |
    QA4  directions      the office is north of the garden . the hallway is ...                what is the office north of ?          garden |
    QA5  give            ... mary gave the milk to john .                                      who received the milk ?                john |
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from graven.errors import TextError
from graven.tasks.base import Page

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
PEOPLE = ("mary", "john", "daniel", "sandra")
GIVERS = ("mary", "fred", "bill", "jeff")
NAMES = tuple(dict.fromkeys((*PEOPLE, *GIVERS)))
MOVES = ("moved to", "went to", "went back to", "travelled to", "journeyed to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "left", "discarded", "put down")
GIVES = ("gave", "passed", "handed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

END = "|"
WORDS = tuple(
    sorted({
        *PLACES, *OBJECTS, *NAMES, *" ".join((*MOVES, *TAKES, *DROPS, *GIVES)).split(), *OPPOSITE,
        "where", "is", "was", "before", "the", "there", "what", "who", "did", "give", "to", "of", "received",
    })
)  # fmt: skip
VOCABULARY = (*WORDS, ".", "?", END)
NUMBER = {word: i for i, word in enumerate(VOCABULARY)}
MENTIONED = (*PLACES, *OBJECTS, *NAMES)  # what an answer can be


def _form(*parts: Sequence[str] | str) -> re.Pattern[str]:
    """A sentence: words that stand there, and groups of which one does."""
    return re.compile(" ".join(part if isinstance(part, str) else f"({'|'.join(part)})" for part in parts) + "( there)?")


MOVE = _form(NAMES, MOVES, "the", PLACES)
TAKE = _form(NAMES, TAKES, "the", OBJECTS)
DROP = _form(NAMES, DROPS, "the", OBJECTS)
GIFT = _form(NAMES, GIVES, "the", OBJECTS, "to", NAMES)
FACT = _form("the", PLACES, "is", tuple(OPPOSITE), "of", "the", PLACES)

QUESTIONS = (  # every one that this world knows
    *(f"where is {person} ?" for person in NAMES),
    *(f"where is the {thing} ?" for thing in OBJECTS),
    *(f"where was the {thing} before the {place} ?" for thing, place in product(OBJECTS, PLACES)),
    *(f"what is {way} of the {place} ?" for way, place in product(OPPOSITE, PLACES)),
    *(f"what is the {place} {way} of ?" for way, place in product(OPPOSITE, PLACES)),
    *(f"what did {giver} give to {other} ?" for giver, other in product(NAMES, NAMES) if giver != other),
    *(f"who did {giver} give the {thing} to ?" for giver, thing in product(NAMES, OBJECTS)),
    *(f"who gave the {thing} to {other} ?" for thing, other in product(OBJECTS, NAMES)),
    *(f"who gave the {thing} ?" for thing in OBJECTS),
    *(f"who received the {thing} ?" for thing in OBJECTS),
)


@dataclass
class Reading:
    """What a reader knows: nobody's place before it was told, and an object's from when somebody whose place is known took it.

    Args:
        answers: By question; each asks for the last thing that fits it.
        place: Of people.
        holder: Of objects.
        at: Where an object is, once it was taken; None where no reader knows.
    """

    answers: dict[str, str] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    at: dict[str, str | None] = field(default_factory=dict)

    def read(self, sentence: str) -> None:
        """One sentence, without its stop.

        Raises:
            TextError: It has none of the forms of this world.
        """
        if found := MOVE.fullmatch(sentence):
            person, _, place, _ = found.groups()
            self.place[person] = self.answers[f"where is {person} ?"] = place
            for thing in [thing for thing, holder in self.holder.items() if holder == person]:
                self._carry(thing, place)
        elif found := TAKE.fullmatch(sentence):
            person, _, thing, _ = found.groups()
            self.holder[thing] = person
            self._carry(thing, self.place.get(person))
        elif found := DROP.fullmatch(sentence):
            self.holder.pop(found[3], None)
        elif found := GIFT.fullmatch(sentence):
            self._give(found[1], found[3], found[4])
        elif found := FACT.fullmatch(sentence):
            place, way, origin, _ = found.groups()
            for a, w, b in ((place, way, origin), (origin, OPPOSITE[way], place)):
                self.answers |= {f"what is {w} of the {b} ?": a, f"what is the {a} {w} of ?": b}
        else:
            raise TextError(
                f"{sentence!r} is no sentence of this small world, whose people go to places, take, drop and give things, as in "
                "'Mary went to the garden.', 'Mary took the milk.', 'Mary gave the milk to Fred.', 'The office is north of the garden.'"
            )

    def _give(self, giver: str, thing: str, other: str) -> None:
        self.holder[thing] = other
        self.answers |= {
            f"what did {giver} give to {other} ?": thing,
            f"who did {giver} give the {thing} to ?": other,
            f"who gave the {thing} to {other} ?": giver,
            f"who gave the {thing} ?": giver,
            f"who received the {thing} ?": other,
        }

    def _carry(self, thing: str, place: str | None) -> None:
        if thing in self.at and self.at[thing] == place:
            return
        before, self.at[thing] = self.at.get(thing), place
        self._answer(f"where is the {thing} ?", place)
        if place is not None:
            self._answer(f"where was the {thing} before the {place} ?", before)

    def _answer(self, question: str, answer: str | None) -> None:
        if answer is None:
            self.answers.pop(question, None)
        else:
            self.answers[question] = answer


def asked_of(sentences: Sequence[str]) -> list[tuple[str, str]]:
    """Every question that a reader of these sentences can answer, in the order of `QUESTIONS`, with the answer.

    Args:
        sentences: As `sentences_of` gives them.
    Raises:
        TextError: A sentence has none of the forms of this world.
    """
    reading = Reading()
    for sentence in sentences:
        reading.read(sentence.removesuffix(" ."))
    return [(question, reading.answers[question]) for question in QUESTIONS if question in reading.answers]


def sentences_of(text: str) -> list[str]:
    """Sentences of a text as words with a space between, each with its stop.

    Raises:
        TextError: A word or mark is not of this world, or the last sentence has no stop, or there is no sentence.
    """
    words = [VOCABULARY[token] for token in tokens_of(text)]
    if not words or words[-1] != "." or "?" in words:
        raise TextError(f"a story is sentences that end with a full stop, and questions are asked later; this one ends {text.strip()[-40:]!r}.")
    return [f"{part.strip()} ." for part in " ".join(words).split(".")[:-1]]


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


class WorldTask:
    """What a task of this world knows of texts: what is asked of a story are the questions that a reader could answer."""

    @property
    def vocabulary(self) -> int:
        """Words and marks."""
        return len(VOCABULARY)

    @property
    def answer_length(self) -> int:
        """Tokens of an answer, its end included."""
        return 2

    @property
    def ends(self) -> frozenset[int]:
        """The token that ends an answer."""
        return frozenset((NUMBER[END],))

    def parse(self, text: str) -> list[tuple[str, str]]:
        """Every question that a reader of the story can answer, as people type it, with the answer.

        Raises:
            TextError: A word, a mark or a sentence is not of this world, or nothing can be asked.
        """
        asked = asked_of(sentences_of(text))
        if not asked:
            raise TextError("nothing can be asked about this story: nobody is said to be anywhere. Say where somebody goes.")
        return [(self.key_of(question), self.text_of([NUMBER[answer]])) for question, answer in asked]

    def key_of(self, query: str) -> str:
        """The question that a user means, as people type it: neither case nor a missing question mark makes it another.

        Raises:
            TextError: A word is not of this world, or it is no question that this world knows.
        """
        tokens = tokens_of(query.strip().removesuffix("?") + "?")
        if " ".join(VOCABULARY[token] for token in tokens) not in QUESTIONS:
            raise TextError(
                f"{query.strip()!r} is no question of this small world; ask 'Where is Mary?', 'Where is the milk?', 'Where was the milk before the "
                "garden?', 'What is north of the garden?', 'What is the garden north of?', 'Who gave the milk to Fred?', 'Who received the milk?', "
                "'What did Bill give to Fred?' or 'Who did Bill give the milk to?'"
            )
        return text_of(tokens)

    def pages(self, text: str, *, most: int) -> list[Page]:  # noqa: ARG002  # what comes later changes what came before
        """A story in one page, however long.

        Raises:
            TextError: As of `parse`.
        """
        return [(tokens_of(text), self.parse(text))]

    def query_of(self, key: str) -> list[int]:
        """Tokens of a question."""
        return tokens_of(key)

    def text_of(self, tokens: Sequence[int]) -> str:
        """An answer as people type it."""
        return " ".join(word.capitalize() if word in NAMES else word for word in (VOCABULARY[token] for token in tokens))

    def lines_of(self, tokens: Sequence[int]) -> str:
        """A story as people type it."""
        return text_of(tokens)
