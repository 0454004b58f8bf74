"""A memory in 8 or 4 bits, with what that costs: what the model says from the smaller memory beside what it says from the larger one.

No text is needed for it. Of a text each page is recited from both memories; of records every key is asked, which the file knows by its hash.

Source: ours; tests/test_quantize.py, experiments/memory_bits.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

import torch
from jaxtyping import Float
from torch import Tensor

from graven.answer import Reader
from graven.errors import SpecError
from graven.fidelity import beside
from graven.lm.base import Continuation, LanguageModel, predictors
from graven.lm.cached import Followed
from graven.memory.file import About, Agreement, Memory, Quantization
from graven.memory.quantize import GROUP, check_bits, dequantize, quantize
from graven.models.base import key_hash
from graven.models.records import RecordsModel
from graven.models.text import TextModel
from graven.tasks.base import Tokens
from graven.tasks.retrieval import alphabet_of

SPOKEN = 16  # tokens that are compared where a memory is of no text that is known
MOST_KEYS = 1_000_000  # keys are found by trying all of them


@dataclass(frozen=True)
class Said:
    """What was asked of one page, and what two states of it answered.

    Args:
        query: Tokens of each query.
        before, after: Prefix of each query, and what followed it.
    """

    query: Tokens
    before: tuple[Float[Tensor, "N S D"], list[Continuation]]
    after: tuple[Float[Tensor, "N S D"], list[Continuation]]

    @property
    def answers(self) -> list[tuple[list[int], list[int]]]:
        """Tokens of each answer, from the one state and from the other."""
        return [(old.whole, new.whole) for old, new in zip(self.before[1], self.after[1], strict=True)]


def quantized(memory: Memory, model: RecordsModel | TextModel, *, bits: int, group: int = GROUP) -> Memory:
    """The memory in fewer bits; its file says what that changed.

    Args:
        memory: One that is not quantized.
        model: The one that wrote it.
        bits: Of each number, 8 or 4.
        group: Numbers that share a scale of 16 bits.
    Raises:
        SpecError: The memory is quantized already, `bits` or `group` is out of range, or there are too many possible keys to try.
        MismatchError: The memory was written with another model.
    """
    if memory.about.quantization is not None:
        raise SpecError(f"this memory has {memory.about.quantization.bits} bits already; quantize the one that it was made from.")
    check_bits(bits=bits, group=group, width=memory.state.shape[-1])
    state = dequantize(*quantize(memory.state, bits=bits, group=group), bits=bits, group=group)
    said = compared(model, memory, Memory(state, memory.about))
    change = float((state - memory.state).norm() / memory.state.norm().clamp(min=torch.finfo(torch.float32).tiny))
    kept = agreement_of(model.memory.model if isinstance(model, RecordsModel) else model.model, said)
    about = replace(memory.about, version=About.version, quantization=Quantization(bits=bits, group=group, change=change, kept=kept))
    return Memory(state, _still(about, said))


def compared(model: RecordsModel | TextModel, before: Memory, after: Memory) -> list[Said]:
    """What the model says from two states of one memory, page by page.

    Raises:
        SpecError: There are more possible keys of records than can be tried.
        MismatchError: The memory was written with another model.
    """
    if isinstance(model, TextModel):
        prefixes = [Reader(model.model, memory).prefixes for memory in (before, after)]
        lengths = [page.tokens or SPOKEN for page in before.about.pages]
        pairs = zip(*prefixes, lengths, strict=True)
        return [_said(model.model, Tokens.of([[]]), old[None], new[None], most=length, stop=()) for old, new, length in pairs]
    before.belongs_to(model.memory.model)
    gradmem, task = model.memory, model.task
    stop, most = {task.mark("!"), task.mark("|")}, task.value_length + 1
    prefixes = [gradmem.prefix(memory.state, control=gradmem.read_control) for memory in (before, after)]
    queries = [Tokens.of(model.query_rows(keys)) for keys in held_keys(model, before)]
    each = [(query, *(one.expand(len(query.ids), -1, -1) for one in pair)) for query, *pair in zip(queries, *prefixes, strict=True)]
    return [_said(gradmem.model, query, old, new, most=most, stop=stop) for query, old, new in each]


def held_keys(model: RecordsModel, memory: Memory) -> list[list[str]]:
    """The keys of each page, found by trying every possible one against its hashes.

    Raises:
        SpecError: There are too many possible keys.
    """
    task = model.task
    if task.keys > MOST_KEYS:
        raise SpecError(f"{model.name} has {task.keys} possible keys and at most {MOST_KEYS} are tried; measure it with `graven verify` instead.")
    hashes = {key_hash(key): key for key in map("".join, product(alphabet_of(task), repeat=task.key_length))}
    return [[hashes[held] for held in page.keys] for page in memory.about.pages]


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
    return Said(query, *((prefix, model.generate(prefix, query, most=most, stop=stop)) for prefix in prefixes))


def _still(about: About, said: Sequence[Said]) -> About:
    """What is still recited or answered; of records at least so many, where some were wrong before."""
    if about.answered is not None:
        return replace(about, answered=max(0, about.answered - sum(old != new for one in said for old, new in one.answers)))
    common = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*one.answers[0], strict=False))) for one in said]
    return replace(about, pages=tuple(replace(page, recited=min(page.recited, n)) for page, n in zip(about.pages, common, strict=True)))
