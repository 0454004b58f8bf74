"""A memory in 8 or 4 bits, with what that costs: what the model says from the smaller memory beside what it says from the larger one.

Of a text each page is recited from both memories; no text is needed for that, and where it is given, what is recited is held against it. Of records
every key is asked: those of the text where it is given, else all possible keys are held against the hashes of the file.

Source: ours; tests/test_quantize.py, experiments/memory_bits.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

import torch
from jaxtyping import Float
from torch import Tensor

from graven.answer import Reader, encode
from graven.errors import SpecError, TextError
from graven.fidelity import beside, same_text
from graven.lm.base import Continuation, LanguageModel, predictors
from graven.lm.cached import Followed
from graven.memory.file import About, Agreement, Memory, Quantization
from graven.memory.gradient import Adam, GradMem, GradMemSpec
from graven.memory.quantize import GROUP, check_bits, dequantize, quantize
from graven.models.base import Model, key_hash
from graven.models.records import RecordsModel
from graven.models.text import TEXT_RATE, TextModel
from graven.tasks.base import Tokens
from graven.tasks.retrieval import Retrieval, alphabet_of
from graven.tasks.world import QUESTIONS, WorldTask

SPOKEN = 16  # tokens that are compared where a memory is of no text that is known
SETTLING = 0.1  # of the rate of a write: the vectors are there already
EVERY = 5  # steps between two recitals
MOST_KEYS = 1_000_000  # keys are found by trying all of them


@dataclass(frozen=True)
class Said:
    """What was asked of one page, and what two states of it answered.

    Args:
        query: Tokens of each query.
        before, after: Prefix of each query, and what followed it.
        text: Tokens that should be recited, where they are known.
    """

    query: Tokens
    before: tuple[Float[Tensor, "N S D"], list[Continuation]]
    after: tuple[Float[Tensor, "N S D"], list[Continuation]]
    text: Sequence[int] | None = None

    @property
    def answers(self) -> list[tuple[list[int], list[int]]]:
        """Tokens of each answer, from the one state and from the other."""
        return [(old.whole, new.whole) for old, new in zip(self.before[1], self.after[1], strict=True)]


def quantized(memory: Memory, model: Model, *, bits: int, group: int = GROUP, against: str | None = None, steps: int = 0) -> Memory:
    """The memory in fewer bits; its file says what that changed.

    Args:
        memory: One that is not quantized.
        model: The one that wrote it.
        bits: Of each number, 8 or 4.
        group: Numbers that share a scale of 16 bits.
        against: The text that was written; needed for records with many possible keys.
        steps: Most steps that the vectors take, on what they recite, until the smaller memory recites it too; only where the text is recited exactly.
    Raises:
        SpecError: The memory is quantized already, a setting is out of range, the text is needed, or there is nothing exact to take steps on.
        TextError: The text is another one.
        MismatchError: The memory was written with another model.
    """
    if memory.about.quantization is not None:
        raise SpecError(f"this memory has {memory.about.quantization.bits} bits already; quantize the one that it was made from.")
    if not isinstance(model, RecordsModel | TextModel):
        raise SpecError(f"memories of kind {model.kind!r} are not quantized: what they lose by it cannot be measured yet.")
    check_bits(bits=bits, group=group, width=memory.state.shape[-1])
    state = _smaller(memory.state, bits, group) if steps == 0 else settled(memory, model, bits=bits, group=group, steps=steps)
    said = compared(model, memory, Memory(state, memory.about), against=against)
    change = float((state - memory.state).norm() / memory.state.norm().clamp(min=torch.finfo(torch.float32).tiny))
    kept = agreement_of(model.memory.model if isinstance(model, RecordsModel) else model.model, said)
    about = replace(memory.about, version=About.version, quantization=Quantization(bits=bits, group=group, change=change, kept=kept))
    return Memory(state, _still(about, said))


def settled(memory: Memory, model: RecordsModel | TextModel, *, bits: int, group: int, steps: int) -> Float[Tensor, "P M D"]:
    """The smaller state after as few steps of Adam as make the model recite from it what it recites from the memory; the last one where none does.

    A gradient is taken at the smaller state and moves the larger one, which is rounded anew.

    Raises:
        SpecError: `steps` is below 0, or the text is not recited exactly.
    Source: ours; the gradient is the straight-through one of Bengio et al. 2013, arXiv:1308.3432.
    """
    about = memory.about
    if steps < 0 or not isinstance(model, TextModel) or not about.tokens or about.recited < about.tokens:
        raise SpecError(
            f"`steps` is {steps} and the memory recites {about.recited} of {about.tokens} tokens; steps need a text that is recited exactly."
        )
    rule = Adam(rate=SETTLING * TEXT_RATE * model.model.embedding_scale)
    gradmem = GradMem(model.model, GradMemSpec(slots=about.slots, steps=steps, rule=rule, order="none"), before=about.before)
    lengths = [page.tokens for page in about.pages]
    rows = gradmem.recite(memory.state, lengths)
    context, state, moments = gradmem.prepare(memory.state, Tokens.of(rows)), memory.state, None
    for taken in range(steps + 1):
        small = _smaller(state, bits, group)
        if taken == steps or (taken % EVERY == 0 and gradmem.recite(small, lengths) == rows):
            break
        step = gradmem.step(small, context, moments, taken=taken)
        state, moments = state + (step.state - small), step.moments
    return small


def compared(model: RecordsModel | TextModel, before: Memory, after: Memory, *, against: str | None = None) -> list[Said]:
    """What the model says from two states of one memory, page by page.

    Raises:
        SpecError: There are more possible keys of records than can be tried, and no text is given.
        TextError: The text is another one than was written.
        MismatchError: The memory was written with another model.
    """
    if isinstance(model, TextModel):
        prefixes, pages = [Reader(model.model, memory).prefixes for memory in (before, after)], before.about.pages
        texts = [None] * len(pages) if against is None else same_text(encode(model.model, against, what="the text"), before.about)
        nothing, parts = Tokens.of([[]]), zip(*prefixes, pages, texts, strict=True)
        said = [(_said(model.model, nothing, old[None], new[None], most=page.tokens or SPOKEN, stop=()), text) for old, new, page, text in parts]
        return [replace(one, text=text) for one, text in said]
    before.belongs_to(model.memory.model)
    gradmem, task = model.memory, model.task
    prefixes = [gradmem.prefix(memory.state, control=gradmem.read_control) for memory in (before, after)]
    queries = [Tokens.of(model.query_rows(keys)) for keys in held_keys(model, before, against=against)]
    each = [(query, *(one.expand(len(query.ids), -1, -1) for one in pair)) for query, *pair in zip(queries, *prefixes, strict=True)]
    return [_said(gradmem.model, query, old, new, most=task.answer_length, stop=task.ends) for query, old, new in each]


def held_keys(model: RecordsModel, memory: Memory, *, against: str | None = None) -> list[list[str]]:
    """The keys of each page, those of the text where it is given; else found by trying every possible one against the hashes.

    Raises:
        SpecError: There are too many possible keys.
        TextError: The text lacks a key.
    """
    task = model.task
    if against is not None:
        possible = [key for key, _ in task.parse(against)]
    elif isinstance(task, Retrieval) and task.keys <= MOST_KEYS:
        possible = list(map("".join, product(alphabet_of(task), repeat=task.key_length)))
    elif isinstance(task, WorldTask):
        possible = list(map(task.key_of, QUESTIONS))
    else:
        raise SpecError(f"{model.name} has too many possible keys to try them all; give the text that was written with --against.")
    hashes = {key_hash(key): key for key in possible}
    lacking = sum(held not in hashes for page in memory.about.pages for held in page.keys)
    if lacking:
        raise TextError(f"the text lacks {lacking} of the keys that were written; give the very text that this memory holds.")
    return [[hashes[held] for held in page.keys] for page in memory.about.pages]


def _smaller(state: Float[Tensor, "P M D"], bits: int, group: int) -> Float[Tensor, "P M D"]:
    return dequantize(*quantize(state, bits=bits, group=group), bits=bits, group=group)


def agreement_of(model: LanguageModel, said: Sequence[Said]) -> Agreement:
    """How close the second state comes to the first, over all pages."""
    taught, states = list[Followed](), list[Tensor]()
    for one in said:
        answers = [old for old, _ in one.answers]
        wanted, found = (predictors(model, prefix, one.query, answers) for prefix, _ in (one.before, one.after))
        taught += [Followed(answer, hidden) for answer, hidden in zip(answers, wanted, strict=True)]
        states += found
    kl, top_token, log_probability = beside(model, taught, states)
    same = [old == new for one in said for old, new in one.answers]
    return Agreement(queries=len(same), kl=kl, top_token=top_token, exact=sum(same) / len(same), log_probability=log_probability)


@torch.no_grad()
def _said(model: LanguageModel, query: Tokens, *prefixes: Tensor, most: int, stop: Collection[int]) -> Said:
    before, after = ((prefix, model.generate(prefix, query, most=most, stop=stop)) for prefix in prefixes)
    return Said(query, before, after)


def _still(about: About, said: Sequence[Said]) -> About:
    """What is still recited or answered; of records at least so many, where some were wrong before."""
    if about.answered is not None:
        return replace(about, answered=max(0, about.answered - sum(old != new for one in said for old, new in one.answers)))
    recited = [_common(*one.answers[0]) if one.text is None else _common(one.text, one.answers[0][1]) for one in said]
    known = [min(page.recited, n) if one.text is None else n for page, n, one in zip(about.pages, recited, said, strict=True)]
    return replace(about, pages=tuple(replace(page, recited=n) for page, n in zip(about.pages, known, strict=True)))


def _common(row: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, other, strict=False)))
