"""How faithful a memory is: beside its text and beside nothing, on questions about the text; and whether that still holds.

The questions are given, or the model asks them itself with the text in front of it (`graven.study`). What it answers behind the whole text is
the measure; the memory and the model alone are held against it, token by token and answer by answer. Questions that the model asks without any
text tell how often an answer is said to be in memory that cannot be.

Source: ours; tests/test_fidelity.py. Probe questions as in the self-study of Eyuboglu et al. 2025, arXiv:2506.06266, which trains on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from graven.answer import Reader
from graven.errors import SpecError, TextError
from graven.lm.base import LanguageModel, predictors
from graven.lm.cached import Followed, Prompted
from graven.memory.file import About, Agreement, Fidelity, Memory, text_hash
from graven.study import CHAT, self_study
from graven.tasks.base import Tokens
from graven.tasks.queries import Query

PROBES = 4  # questions of each kind that a write asks; 30 CPU seconds on 135 million parameters, where writing 40 tokens takes 80 (docs/log.md)
PROBE_TOKENS, SPARE = 8, 3  # of an answer; more where the longest right answer would not leave so many
QUESTION = ("\n\nQuestion:{}\nAnswer:",)  # one prompt, so that all questions are written side by side
ROWS_AT_ONCE = 8  # logits of so many answers at once


def probe(reader: Reader, text: Sequence[int], *, count: int, seed: int) -> Fidelity | None:
    """Fidelity on questions that the model asks itself, `count` with the text in front of it and as many without.

    Args:
        reader: The memory.
        text: Token ids of what was written, all pages together.
        count: Questions of each kind, at least 1; fewer where the model repeats itself.
        seed: Of the questions; the same seed asks the same ones.
    Returns:
        None where text and question do not fit into the model together, or the model asks nothing.
    Raises:
        SpecError: `count` is below 1.
    """
    if count < 1:
        raise SpecError(f"`probes` is {count}; it must be at least 0, which asks none.")
    try:
        prompts = CHAT[:1] if reader.chat else QUESTION
        asked = self_study(reader.model, text, count=count, prompts=prompts, seed=seed, chat=reader.chat)
        foreign = self_study(reader.model, [], count=count, prompts=prompts, seed=seed, chat=reader.chat)
        return fidelity(reader, text, [Query(line) for line in asked], foreign) if asked else None
    except TextError:
        return None


def fidelity(reader: Reader, text: Sequence[int], queries: Sequence[Query], foreign: Sequence[str] = ()) -> Fidelity:
    """Memory, model alone and model with the whole text, on the same questions.

    Args:
        reader: The memory.
        text: Token ids of what was written.
        queries: At least one. An answer is right where the right one stands in it, letter case aside.
        foreign: Questions that the text does not answer.
    Raises:
        SpecError: There is no query.
        TextError: Text and question do not fit into the model together.
    """
    if not queries:
        raise SpecError("there is no question to measure with; give at least one.")
    model, rows = reader.model, reader.rows([query.text for query in queries])
    # an answer must have room for the right one and a word before it
    most = max([PROBE_TOKENS, *(len(model.encode(query.answer)) + SPARE for query in queries if query.answer is not None)])
    taught = Prompted(model, reader.behind(text)[0]).follow(rows, most=most, stop=model.stop)
    said = [one for (one,) in reader.found(rows, most=most)]
    alone = model.generate(reader.bare.expand(len(rows), -1, -1), Tokens.of(rows), most=most, stop=model.stop)

    def against(prefixes: Tensor, answers: list[list[int]]) -> Agreement:
        return agreement(reader, taught, _states(reader, prefixes, rows, taught), answers, queries)

    return Fidelity(
        memory=against(torch.stack([reader.prefixes[page] for page, _ in said]), [one.whole for _, one in said]),
        closed_book=against(reader.bare.expand(len(rows), -1, -1), [one.whole for one in alone]),
        full_context=agreement(reader, taught, [one.hidden for one in taught], [one.tokens for one in taught], queries),
        found=found_share(reader, rows),
        false_found=found_share(reader, reader.rows(foreign)) if foreign else None,
    )


@torch.no_grad()
def agreement(
    reader: Reader, taught: Sequence[Followed], states: Sequence[Tensor], answers: Sequence[list[int]], queries: Sequence[Query]
) -> Agreement:
    """How predictions and answers agree with those of the model behind the whole text.

    Args:
        reader: The memory.
        taught: Answers behind the text, and the hidden states that predicted them.
        states: Hidden states that predict the same answers otherwise, [T, E] each.
        answers: What was answered otherwise.
        queries: The questions, some perhaps with their right answers.
    """
    model = reader.model
    known = [(query.answer, model.decode(ids)) for query, ids in zip(queries, answers, strict=True) if query.answer is not None]
    kl, top_token, log_probability = beside(model, taught, states)
    return Agreement(
        queries=len(queries),
        kl=kl,
        top_token=top_token,
        accuracy=sum(right.strip().lower() in text.lower() for right, text in known) / len(known) if known else None,
        exact=sum(one.tokens == ids for one, ids in zip(taught, answers, strict=True)) / len(taught),
        log_probability=log_probability,
    )


@torch.no_grad()
def beside(model: LanguageModel, taught: Sequence[Followed], states: Sequence[Tensor]) -> tuple[float, float, float]:
    """Divergence, share of most probable tokens and log probability of answers whose tokens other hidden states predict."""
    kls, top, values = [list[float]() for _ in range(3)]
    for one, other in zip(taught, states, strict=True):
        wanted, found = (model.logits(hidden).float().log_softmax(-1) for hidden in (one.hidden, other))
        ids = torch.tensor(one.tokens, device=found.device)
        kls += (wanted.exp() * (wanted - found)).sum(-1).clamp(min=0.0).tolist()  # below 0 by rounding only
        top += (found.argmax(-1) == ids).float().tolist()
        values += found.gather(-1, ids[:, None])[:, 0].tolist()
    return sum(kls) / len(kls), sum(top) / len(top), sum(values) / len(values)


def _states(reader: Reader, prefixes: Tensor, rows: Sequence[Sequence[int]], taught: Sequence[Followed]) -> list[Tensor]:
    """Hidden states that predict the answers behind other prefixes."""
    found: list[Tensor] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        found += predictors(reader.model, prefixes[part], Tokens.of(rows[part]), [one.tokens for one in taught[part]])
    return found


def found_share(reader: Reader, rows: Sequence[Sequence[int]]) -> float:
    """Share of rows whose answer is said to be in memory."""
    said = [one for ((_, one),) in reader.found(rows, most=PROBE_TOKENS)]
    without = reader.without(rows, [one.whole for one in said])
    return sum(reader.rule.holds(one, alone) for one, alone in zip(said, without, strict=True)) / len(rows)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A memory measured anew, against its text.

    Args:
        token_accuracy: Teacher-forced; none for records.
        recited: Length of the prefix of the whole text that is reproduced exactly; none for records.
        answered: Records that gave their value back; none for a text.
        fidelity: On questions; none where none were asked, or the text does not fit into the model.
        shortfalls: Where it is worse than the file says, in words.
    """

    token_accuracy: float | None = None
    recited: int | None = None
    answered: int | None = None
    fidelity: Fidelity | None = None
    shortfalls: tuple[str, ...] = ()


def verify(reader: Reader, memory: Memory, text: Sequence[int], *, questions: Sequence[Query] | None, probes: int | None) -> Verified:
    """A text's memory measured anew.

    Args:
        reader: Of the memory.
        memory: What the file says of itself is in it.
        text: Token ids of the very text that was written.
        questions: To measure with; the model asks its own where left out, the same ones as at the write.
        probes: How many it asks; as many as at the write where left out.
    Raises:
        TextError: The text is another one, or does not fit into the model together with a question that is given.
    """
    about = memory.about
    pages = same_text(text, about)
    recited = [agreeing(recite(reader, i, len(page)), page) for i, page in enumerate(pages)]
    anew = replace(about, pages=tuple(replace(page, recited=length) for page, length in zip(about.pages, recited, strict=True)))
    asked = 0 if about.fidelity is None else about.fidelity.memory.queries
    if questions is not None:
        measured: Fidelity | None = fidelity(reader, text, questions)
    else:
        count = asked if probes is None else probes
        measured = probe(reader, text, count=count, seed=about.seed) if count else None
    accuracy = token_accuracy(reader, pages)
    same = measured is not None and measured.memory.queries == asked  # a model that repeats itself asks fewer than it was told to, and others
    comparable = measured if questions is None and probes in (None, asked) and same else None
    return Verified(
        token_accuracy=accuracy,
        recited=anew.recited,
        fidelity=measured,
        shortfalls=shortfalls(about, token_accuracy=accuracy, recited=anew.recited, probed=comparable),
    )


def recite(reader: Reader, page: int, tokens: int) -> list[int]:
    """What the model reproduces of a page when it runs freely."""
    return reader.model.generate(reader.prefixes[page : page + 1], Tokens.of([[]]), most=tokens, stop=())[0].tokens


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning of two rows of equal length.

    >>> agreeing([5, 6, 7], [5, 6, 8])
    2
    """
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def same_text(text: Sequence[int], about: About) -> list[Sequence[int]]:
    """The pages of a text, as they were written.

    Raises:
        TextError: It is another text.
    """
    ends = [0, *accumulate(page.tokens for page in about.pages)]
    if len(text) != ends[-1]:
        raise TextError(f"the text has {len(text)} tokens and {ends[-1]} were written; give the very text that was.")
    pages = [text[a:b] for a, b in pairwise(ends)]
    for number, (page, held) in enumerate(zip(pages, about.pages, strict=True), start=1):
        if text_hash(page) != held.text_hash:
            raise TextError(f"page {number} of {len(pages)} of the text is another than the one that was written; give the very text that was.")
    return pages


@torch.no_grad()
def token_accuracy(reader: Reader, pages: Sequence[Sequence[int]]) -> float:
    """Share of tokens that are the most probable ones behind the memory, given the true ones before."""
    right = 0
    for prefix, page in zip(reader.prefixes, pages, strict=True):
        (states,) = predictors(reader.model, prefix[None], Tokens.of([[]]), [page])
        right += int((reader.model.logits(states).argmax(-1).cpu() == torch.tensor(page)).sum())
    return right / sum(map(len, pages))


def shortfalls(about: About, *, token_accuracy: float, recited: int, probed: Fidelity | None) -> tuple[str, ...]:
    """Where new measures of a text's memory fall short of those in its file; `probed` on the same questions as the file's, or None."""
    found = []
    if recited < about.recited:
        found.append(f"{recited} tokens are recited exactly, and the file says {about.recited}")
    if round(token_accuracy * about.tokens) < round(about.token_accuracy * about.tokens):
        found.append(f"teacher-forced accuracy is {token_accuracy:.4f}, and the file says {about.token_accuracy:.4f}")
    if probed is not None and about.fidelity is not None:
        now, then = probed.memory, about.fidelity.memory
        for name, new, old in (("whole answers", now.exact, then.exact), ("answer tokens", now.top_token, then.top_token)):
            if new is not None and old is not None and new < old - 1e-9:
                found.append(f"{new:.1%} of the {name} are those with the full text, and the file says {old:.1%}")
    return tuple(found)


def lines_of(measured: Fidelity) -> list[str]:
    """For a person: memory, nothing and text side by side."""
    rows = {"memory": measured.memory, "closed book": measured.closed_book, "full context": measured.full_context}
    answered = measured.memory.accuracy is not None
    head = f"{'':14}{'same answer':>12}{'same token':>12}{'KL':>8}{'nats a token':>14}" + (f"{'right':>8}" if answered else "")
    lines = [f"on {measured.memory.queries} questions about the text, beside the model with the full text:", head]
    for name, row in rows.items():
        right = f"{row.accuracy:8.1%}" if row.accuracy is not None else ""
        lines.append(f"{name:14}{row.exact or 0.0:12.1%}{row.top_token:12.1%}{row.kl:8.3f}{row.log_probability or 0.0:14.3f}{right}")
    foreign = "" if measured.false_found is None else f", and {measured.false_found:.0%} of those to questions of no text"
    return [*lines, f"{measured.found:.0%} of the answers are said to be in memory{foreign}"]


def verified_lines(found: Verified, about: About) -> list[str]:
    """For a person: what was measured, with what the file says in brackets."""
    if found.answered is not None:
        return [f"{found.answered} of {about.records or 0} queries answered from the memory alone ({about.answered or 0})"]
    return [
        f"recites {found.recited} of {about.tokens} tokens before the first miss ({about.recited})",
        f"teacher-forced accuracy {found.token_accuracy or 0.0:.4f} ({about.token_accuracy:.4f})",
        *([] if found.fidelity is None else lines_of(found.fidelity)),
    ]
