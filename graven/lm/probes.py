"""What is tried on a language model before vectors are put in front of it, and what is found.

`Pretrained` asks at load and refuses; `graven doctor` asks and reports. Nothing is taken from a list of architectures: each probe runs the model.
Differences are in standard deviations of what was expected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from graven.errors import OrderError
from graven.layers.transformers import OURS, counted
from graven.lm.base import LanguageModel
from graven.ops.second_order import check_twice_differentiable
from graven.tasks.base import Tokens

RUN = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)  # what a model raises over what it does not take
COLUMNS = 12  # of a probe: more than the window of the smallest model of the tests


if TYPE_CHECKING:

    class Wrapped(LanguageModel, Protocol):
        """A language model with a transformers model inside."""

        model: Any  # transformers' annotations do not hold up under mypy
else:
    Wrapped = Any  # a check of the protocol reads `twice_differentiable`, which asks a probe, which would be checked


@dataclass(frozen=True)
class Probe:
    """One thing that was tried.

    Args:
        name: What was tried.
        fault: What to say of the model where it failed, after its name and without a full stop; none where all is well.
        off: Largest difference that was found, in standard deviations; none where nothing was compared.
    """

    name: str
    fault: str | None
    off: float | None = None


@torch.no_grad()
def probe_embeddings(model: Wrapped) -> list[Probe]:
    """Whether the model runs from embeddings as from tokens, has a head that is known, and lets no column see later ones."""
    ids = probe_ids(model)
    expected = model.model(input_ids=ids, use_cache=False).logits
    embedded = model.embed(Tokens.full(ids))
    try:
        whole = model.model(inputs_embeds=embedded, use_cache=False).logits
        hidden, start = model.hidden(embedded), model.hidden(embedded[:, :6])
        ours = model.logits(hidden)
    except RUN as error:
        return [Probe("embeddings", f"does not run from embeddings ({reason(error)}), so memory vectors cannot reach it")]
    foreign = "scales or augments its embeddings inside, so memory vectors would not mean to it what tokens do"
    found = []
    for name, got, wanted, fault in (
        ("embeddings", whole, expected, foreign),
        ("head", ours, expected, "has a head that graven does not know, so its hidden states cannot be turned into logits"),
        ("order", start, hidden[:, :6], "lets a column see later ones, so nothing can be written or answered one token after another"),
    ):
        off = spread(got, wanted)
        found.append(Probe(name, None if off <= tolerance(model) else f"{fault} (a probe is off by {off:.2g} standard deviations)", off))
    return found


@torch.no_grad()
def probe_attention(model: Wrapped) -> Probe:
    """Whether it asks for the attention that was set, graven's, and gives it to do what its own does: some architectures do neither."""
    ids = torch.arange(min(COLUMNS, model.vocabulary), device=model.model.device).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    calls: list[str] = []
    try:
        with counted(calls):
            got = model.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        model.model.set_attn_implementation("eager")
        expected = model.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        model.model.set_attn_implementation(OURS)
    except RUN as error:
        return Probe("attention", f"takes no attention from outside ({reason(error)})")
    off = spread(got[mask.bool()], expected[mask.bool()])
    if not calls:
        return Probe("attention", "never calls the attention that it is given", off)
    if not off <= tolerance(model):
        fault = f"computes something else with graven's attention than with its own (off by {off:.2g} standard deviations)"
        return Probe("attention", fault, off)
    return Probe("attention", None, off)


def probe_gradient(model: Wrapped) -> Probe:
    """Whether a loss has a gradient at the embeddings, which every write needs."""
    x = model.embed(Tokens.full(probe_ids(model)[:, :4])).detach().requires_grad_()
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(model.hidden(x).float().square().sum(), x)
    except RUN as error:
        return Probe("gradient", f"gives its embeddings no gradient ({reason(error)}), so nothing can be written")
    if not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return Probe("gradient", "gives its embeddings a gradient that is zero or not finite, so nothing can be written")
    return Probe("gradient", None)


def probe_twice(model: Wrapped) -> bool:
    """Whether that gradient can be differentiated again.

    False, too, where an operation of the model could drop a part of it without a word, as Bloom's GELU does.
    """
    x = model.model.get_input_embeddings()(torch.arange(4, device=model.model.device)[None]).detach().requires_grad_()
    with torch.enable_grad():
        loss = model.hidden(x).square().sum()
        try:
            check_twice_differentiable(loss, [x])
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.autograd.grad(gradient.square().sum(), x)
        except OrderError:
            return False
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            return False
    return True


@torch.no_grad()
def probe_positions(model: Wrapped) -> bool:
    """Whether positions that are given count: some architectures take them as an argument and drop them without a word."""
    close = torch.arange(4, device=model.model.device)[None]
    x = model.model.get_input_embeddings()(close).detach()
    given = [{"position_ids": at, "attention_mask": torch.ones_like(at)} for at in (close, 2 * close)]
    first, second = (model.model.base_model(inputs_embeds=x.to(model.model.dtype), use_cache=False, **one).last_hidden_state for one in given)
    return not torch.equal(first, second)


@torch.no_grad()
def scale_inside(model: Wrapped) -> float | None:
    """Factor between the rows of the embedding matrix and what the embedding module gives; none where it is no one factor.

    Gemma multiplies by the square root of its width there; memory vectors stand behind it and are never multiplied.
    """
    embedding, ids = model.model.get_input_embeddings(), probe_ids(model)
    given, rows = embedding(ids).float(), nn.functional.embedding(ids, embedding.weight).float()
    factor = float((given * rows).sum() / rows.square().sum())
    return round(factor, 6) if spread(given, factor * rows) <= tolerance(model) else None


@torch.no_grad()
def lookups(model: Wrapped) -> list[str]:
    """Embedding modules that are asked for tokens and not for vectors, the input's apart: what they add, vectors do without."""
    ids, own = probe_ids(model), model.model.get_input_embeddings()
    modules = {name: module for name, module in model.model.named_modules() if isinstance(module, nn.Embedding) and module is not own}

    def called(run: Callable[[], object]) -> set[str]:
        names: set[str] = set()
        hooks = [module.register_forward_hook(lambda *_, name=name: names.add(name)) for name, module in modules.items()]
        try:
            run()
        except RUN:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return names

    embedded = model.embed(Tokens.full(ids))
    by_ids = called(lambda: model.model(input_ids=ids, use_cache=False))
    return sorted(by_ids - called(lambda: model.model(inputs_embeds=embedded, use_cache=False)))


def probe_ids(model: Wrapped) -> Tensor:
    """Tokens of a probe, [1, 12]; the same each time."""
    return torch.randint(model.vocabulary, (1, COLUMNS), generator=torch.Generator().manual_seed(0)).to(model.model.device)


def tolerance(model: Wrapped) -> float:
    """Of a probe, in standard deviations."""
    return 1e-3 if model.model.dtype in (torch.float32, torch.float64) else 0.1


def spread(got: Float[Tensor, "*B A"], expected: Float[Tensor, "*B A"]) -> float:
    """Largest difference, in standard deviations of what was expected."""
    return float((got.float() - expected.float()).abs().max() / expected.float().std().clamp(min=1e-6))


def reason(error: BaseException) -> str:
    """First sentence of what an error says, or what to do where its cause is the network or the spelling; without a full stop."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    kinds = {type(link).__name__ for link in chain}
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}:
        return "it is not on this machine and the hub cannot be reached; give the path of a model directory, or connect once to fetch it"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return "there is no such directory, and no such model on the hub; check the spelling"
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0][:200].rstrip(" .:")
