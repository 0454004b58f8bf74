"""Does a model work with memories? One table and one verdict, from trying.

A model works where vectors stand for tokens in it, a loss has a gradient at them, padding and company change nothing, and it writes from them.
Whether it can be trained through a write, goes on from a cache, or speaks in turns is told beside that, and decides nothing.

Source: ours; tests/test_doctor.py runs it over two dozen architectures and over those that are refused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graven.errors import ModelError
from graven.layers.transformers import OURS, register_attention
from graven.lm.cached import Prompted
from graven.lm.chat import halves
from graven.lm.pretrained import Pretrained, load_pretrained
from graven.lm.probes import (
    RUN,
    Probe,
    lookups,
    probe_attention,
    probe_embeddings,
    probe_gradient,
    probe_ids,
    probe_positions,
    probe_twice,
    reason,
    scale_inside,
    spread,
    tolerance,
)
from graven.tasks.base import Tokens

WRITTEN = 6  # tokens that are written from embeddings


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table.

    Args:
        name: What was looked at.
        ok: All is well; none where there is nothing to judge.
        found: What was found.
        needed: Whether a memory needs it.
    """

    name: str
    ok: bool | None
    found: str
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found.

    Args:
        model: What it was loaded by.
        architecture: Its class in transformers.
        checks: Lines of the table.
    """

    model: str
    architecture: str
    checks: tuple[Check, ...]

    @property
    def works(self) -> bool:
        """Nothing that a memory needs is missing."""
        return all(check.ok is not False for check in self.checks if check.needed)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.works:
            missing = [check.name for check in self.checks if check.needed and check.ok is False]
            return f"{self.model} does not work with memories: {', '.join(missing)}."
        limits = [check.name for check in self.checks if check.ok is False]
        return f"{self.model} works with memories" + (f"; see {', '.join(limits)}." if limits else ".")

    def lines(self) -> list[str]:
        """The table and the verdict, for a person."""
        mark = {True: "yes", False: "no", None: "-"}
        rows = [f"{check.name:<22}{mark[check.ok]:<5}{check.found}" for check in self.checks]
        return [f"{self.model} ({self.architecture})", *rows, self.verdict]


def examine(path: str) -> Diagnosis:
    """A model from a directory, a GGUF file or a hub id.

    Raises:
        ModelError: There is no such model, or it is not whole.
    """
    return diagnosis(load_pretrained(path, checked=False))


def diagnosis(model: Pretrained) -> Diagnosis:
    """All checks of a model that is loaded; its attention is afterwards what it was."""
    runs = probe_embeddings(model)
    whole = all(probe.name != "embeddings" or probe.fault is None or probe.off is not None for probe in runs)
    checks = [_weights(model), *_embeddings(model, runs), _positions(model, whole), *_heads(model, runs)]
    if whole:
        checks += [_gradient(model), _padding(model), _generate(model), *_twice(model), _cache(model)]
    checks += [_template(model), _opening(model)]
    return Diagnosis(model=model.name, architecture=type(model.model).__name__, checks=tuple(checks))


def _weights(model: Pretrained) -> Check:
    """Types and number of the weights; whole numbers or a note of the library say that they are quantized."""
    weights = list(model.model.parameters())
    types = sorted({_type(weight) for weight in weights})
    codes = next((tensor for tensor in (*weights, *model.model.buffers()) if tensor.dim() > 1 and _coded(tensor)), None)
    method = getattr(getattr(model.model.config, "quantization_config", None), "quant_method", None)
    if method is not None or codes is not None:
        how = method if codes is None else _type(codes)
        return Check(name="weights", ok=False, found=f"quantized ({how}): gradients are those of what the library makes of them")
    return Check(name="weights", ok=True, found=f"{sum(weight.numel() for weight in weights):,} in {', '.join(types)}, not quantized")


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _coded(tensor: Tensor) -> bool:
    """Whether numbers are codes; a table of positions has 64 bits and a mask is boolean."""
    return tensor.dtype not in (torch.int64, torch.bool) and (not tensor.is_floating_point() or tensor.dtype.itemsize == 1)


def _embeddings(model: Pretrained, runs: list[Probe]) -> list[Check]:
    """Whether vectors stand for tokens, and if not, what stands between."""
    first, added, scale = runs[0], lookups(model), scale_inside(model)
    inside = "in a way of its own inside its embedding module" if scale is None else f"by {scale:g} inside its embedding module, before a memory"
    where = "not scaled" if scale == 1.0 else f"scaled {inside}"
    outside = _outside_scale(model) if first.off is not None and first.fault else None
    if outside is not None:
        where = f"scaled by {outside:g} for tokens only: vectors would have to be scaled by hand"
    return [
        Check(name="ids equal embeddings", ok=first.fault is None, found=_found(first, "the same logits"), needed=True),
        Check(name="embedding scale", ok=outside is None, found=f"{where}; a token's numbers spread by {model.embedding_scale:.3g}", needed=True),
        Check(name="per-layer embeddings", ok=not added, found=f"vectors do without {', '.join(added)}" if added else "none", needed=True),
    ]


@torch.no_grad()
def _outside_scale(model: Pretrained) -> float | None:
    """The factor of its configuration that makes vectors stand for tokens, if one does."""
    factor = getattr(model.model.config.get_text_config(), "embedding_multiplier", None)
    if factor is None:
        return None
    ids = probe_ids(model)
    expected = model.model(input_ids=ids, use_cache=False).logits
    scaled = model.model(inputs_embeds=factor * model.embed(Tokens.full(ids)), use_cache=False).logits
    return float(factor) if spread(scaled, expected) <= tolerance(model) else None


def _positions(model: Pretrained, whole: bool) -> Check:
    """How many columns, whether positions can be given, and what it sees at once."""
    room = "any number of columns" if model.positions is None else f"{model.positions} columns, memory included"
    try:
        given = ", positions can be given" if whole and probe_positions(model) else ""
    except RUN:
        given = ""
    window = getattr(model.model.config.get_text_config(), "sliding_window", None)
    seen = f"; layers with a window of {window} do not see a memory further back" if window else ""
    return Check(name="positions", ok=None, found=room + given + seen)


def _heads(model: Pretrained, runs: list[Probe]) -> list[Check]:
    """Whether the head is known, what it shares, and whether columns see later ones."""
    tied = model.head_weight.data_ptr() == model.model.get_input_embeddings().weight.data_ptr()
    checks = [Check(name="tied head", ok=None, found="the embedding matrix is the head" if tied else "the head has a matrix of its own")]
    wells = {"head": ("head", "known"), "order": ("order of columns", "none sees later ones")}
    for probe in runs[1:]:
        name, well = wells[probe.name]
        checks.append(Check(name=name, ok=probe.fault is None, found=_found(probe, well), needed=True))
    return checks


def _gradient(model: Pretrained) -> Check:
    probe = probe_gradient(model)
    return Check(name="gradient", ok=probe.fault is None, found=_found(probe, "reaches the embeddings: memories can be written"), needed=True)


@torch.no_grad()
def _padding(model: Pretrained) -> Check:
    """A row beside a longer one, and with holes, is the row alone."""
    ids = probe_ids(model)[0]
    alone = model.hidden(model.embed(Tokens.full(ids[None, :6])))
    rows, mask = torch.stack([ids, torch.zeros_like(ids)]), torch.zeros(2, len(ids), dtype=torch.bool, device=ids.device)
    mask[0], where = True, torch.tensor([1, 2, 4, 7, 8, 11], device=ids.device)
    rows[1, where], mask[1, where] = ids[:6], True
    found = model.hidden(model.embed(Tokens(rows, mask)), mask=mask)[1, where]
    off = spread(found, alone[0])
    return Check(name="padding", ok=off <= tolerance(model), found=f"a padded row is off by {off:.1g} standard deviations", needed=True)


def _generate(model: Pretrained) -> Check:
    """Two queries of different lengths are gone on with from vectors as each of them alone, and as token by token."""
    ids = probe_ids(model)[0].tolist()
    queries = [ids[4:9], ids[9:11]]
    memory = model.embed(Tokens.of([ids[:4]])).detach()
    try:
        both = model.generate(memory.expand(2, -1, -1), Tokens.of(queries), most=WRITTEN, stop=())
        each = [model.generate(memory, Tokens.of([query]), most=WRITTEN, stop=())[0] for query in queries]
    except RUN as error:
        return Check(name="generate", ok=False, found=f"does not go on from embeddings ({reason(error)})", needed=True)
    same = [one.tokens for one in both] == [one.tokens for one in each]
    # in lower precision a batch rounds differently, and the most probable token may be another
    exact = model.model.dtype == torch.float32
    found = "from embeddings, a batch as its rows alone" if same else "from embeddings, a batch otherwise than its rows alone"
    return Check(name="generate", ok=same or not exact, found=found, needed=True)


def _twice(model: Pretrained) -> list[Check]:
    """Which attention can be differentiated twice, which training through a write needs and writing does not."""
    own = model.model.config._attn_implementation
    tried: dict[str, str] = {}
    try:
        for way in dict.fromkeys([own, "eager", OURS]):
            tried[way] = _try_way(model, way)
    finally:
        _set(model, own)
    works = [way for way, fault in tried.items() if not fault]
    found = f"with attention {', '.join(works)}" if works else "with no attention"
    rest = "; ".join(f"{way}: {fault}" for way, fault in tried.items() if fault)
    return [Check(name="double backward", ok=bool(works), found=found + (f" ({rest})" if rest else ""))]


def _try_way(model: Pretrained, way: str) -> str:
    """Why a way of attention cannot be differentiated twice; empty where it can."""
    if way == OURS and (fault := _set(model, way) or probe_attention(model).fault):
        return fault
    if fault := _set(model, way):
        return fault
    try:
        return "" if probe_twice(model) else "has no second derivative"
    except RUN as error:
        return reason(error)


def _set(model: Pretrained, way: str) -> str:
    """Set the attention; why it cannot be set, else empty."""
    register_attention()
    try:
        model.model.set_attn_implementation(way)
    except RUN as error:
        return f"cannot be set ({reason(error)})"
    # some architectures keep the attention that they were built with and only log that they do
    return "" if model.model.config._attn_implementation == way else "cannot be set"


def _cache(model: Pretrained) -> Check:
    exact = Prompted(model, model.embed(Tokens.full(probe_ids(model)))[0].detach()).cache is not None
    found = (
        "a memory is read once for many queries"
        if exact
        else "the model does not go on from a cache as from the vectors; each query reads the memory"
    )
    return Check(name="cached reads", ok=exact, found=found)


def _template(model: Pretrained) -> Check:
    try:
        halves(model.tokenizer, "x", name=model.name)
    except ModelError as error:
        return Check(name="chat template", ok=None, found=str(error).rstrip("."))
    return Check(name="chat template", ok=True, found="a memory stands inside the turn of the user (--chat)")


def _opening(model: Pretrained) -> Check:
    """What the tokenizer puts before a text, and whether the model knows all of its tokens."""
    opening = model.opening
    found = f"the tokenizer puts {model.decode(opening)!r} before a text" if opening else "the tokenizer puts nothing before a text"
    most, known = max(model.tokenizer.get_vocab().values()), len(model.model.get_input_embeddings().weight)
    if most >= known:
        return Check(name="tokens", ok=False, found=f"{found}; it gives token {most} and the model knows {known}")
    return Check(name="tokens", ok=True, found=f"{found}; none stands before a memory")


def _found(probe: Probe, well: str) -> str:
    return well if probe.fault is None else probe.fault
