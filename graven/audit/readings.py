"""The audit of a layer that is known by what it reads only: the nearest attention, fitted to fresh sequences and judged on others.

Source: ours; tests/test_audit.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from graven.audit.kernel import Attention, best_attention, fitted_kernel, read_kernel
from graven.audit.report import Finding, Kind, Report
from graven.audit.world import DISTANCE, check_widths, fresh_tokens
from graven.errors import ShapeError, SpecError

Layer = Callable[[Tensor], object]


def by_readings(layer: Layer, head: Attention | None, *, length: int, tokens: Tensor | None, seed: int) -> Report:
    """The audit of a layer whose weights mean something else; arguments and errors as those of `graven.audit.explain.explain`."""
    width = _width(layer, head, tokens)
    x = fresh_tokens(tokens, width=width, length=length, blank=(), seed=seed)
    y = _black_box(layer, x)
    found = fitted_kernel(x, y)
    if head is not None:
        check_widths(head, width=width, outputs=y.shape[2])
    near = head or best_attention(found.kernel)
    whose = "the teacher" if head is not None else "the nearest attention"
    wanted = near.read(x[len(x) // 2 :])
    loss = float((y[len(x) // 2 :] - wanted).square().mean() / wanted.square().mean())
    beyond = _beyond_counting(x, y, found.kernel)
    noise = fitted_kernel(x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]).energy
    findings = (
        Finding(name="relative loss", value=loss, threshold=DISTANCE**2, meaning=f"mean squared difference from {whose}, by its power"),
        Finding(
            name="kernel energy", value=found.energy, threshold=1 - DISTANCE**2, controls={"sequences shuffled": noise},
            meaning="share of the power that one attention kernel explains, on sequences that it was not fitted to",
        ),
        Finding(
            name="beyond counting", value=beyond, threshold=1 - DISTANCE,
            meaning="the same share of what is left by linear maps of a token and of a token times its place, which remember nothing",
        ),
    )  # fmt: skip
    several = head is None and loss > DISTANCE**2 and found.energy >= 1 - DISTANCE**2
    passed = (several or loss <= DISTANCE**2) and beyond >= 1 - DISTANCE
    name = "attention with several heads" if several else "attention"
    verdict = (
        f"{name}, as a function: {found.energy:.4%} of the power is one kernel's; neurons are counted in a gated RNN only"
        if passed
        else f"neither: counting the tokens explains it as well, and the kernel only {beyond:.1%} of what that leaves"
        if beyond < 1 - DISTANCE and (several or loss <= DISTANCE**2)
        else f"neither: relative loss {loss:.3g} against {whose}; {DISTANCE**2:.2g} is the most that counts"
    )
    reference = found.kernel if several else near.kernel
    kind: Kind = "attention" if passed else "neither"
    return Report(
        kind=kind, verdict=verdict, findings=findings, stages=(), dimension=None, kernel=found.kernel, reference=reference, before=None, after=None
    )


def _beyond_counting(x: Tensor, y: Tensor, kernel: Tensor) -> float:
    """Share that a kernel explains of what a count of the tokens leaves: a sum over many tokens hardly differs from its mean times their number."""
    place = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None].expand(len(x), -1, 1)
    features, half = torch.cat([place * x, x, place, torch.ones_like(place)], -1), len(x) // 2
    counted = torch.linalg.lstsq(features[:half].flatten(0, 1), y[:half].flatten(0, 1)).solution
    left = (y[half:] - features[half:] @ counted).square().sum()
    rest = (y[half:] - read_kernel(kernel, x[half:])).square().sum()
    return max(0.0, 1.0 - float(rest / left.clamp(min=torch.finfo(x.dtype).tiny)))


def _width(layer: Layer, head: Attention | None, tokens: Tensor | None) -> int:
    """Of a token, from whatever says it."""
    if isinstance(layer, nn.RNNBase):
        if not layer.batch_first:
            raise SpecError(f"this {type(layer).__name__} takes tokens as [T, B, D]; make it with `batch_first=True`.")
        return layer.input_size
    spec = getattr(layer, "spec", None)
    for width in (getattr(spec, "width", None), None if head is None else head.w_v.shape[1], None if tokens is None else tokens.shape[-1]):
        if isinstance(width, int):
            return width
    raise SpecError(f"nothing tells how wide the tokens of this {type(layer).__name__} are; give `tokens` or a `teacher`.")


def _black_box(layer: Layer, x: Tensor) -> Tensor:
    """What a layer reads, in the dtype of its weights and then in float64."""
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), x.dtype) if isinstance(layer, nn.Module) else x.dtype
    with torch.no_grad():
        out = layer(x.to(dtype))
    y = out[0] if isinstance(out, tuple) else out
    if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[:2] != x.shape[:2]:
        came = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ShapeError(f"the layer gave {came} for tokens of shape {tuple(x.shape)}; reads [B, T, E] were expected, alone or first of a tuple.")
    if not bool(y.isfinite().all()) or not bool(y.any()):
        raise SpecError("what the layer reads is not finite, or 0 always; there is nothing to compare.")
    return y.double()
