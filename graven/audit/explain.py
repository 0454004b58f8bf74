"""What a trained recurrent layer computes: every measure in order, each with its threshold and its control, and a verdict in words.

A gated RNN is read from its weights, exactly. Any other layer is known by what it reads: its nearest kernel is fitted to fresh sequences
and judged on others, and no neuron is counted.

Source: ours, docs/theory.md; the measures of Zucchet et al. 2023, arXiv:2309.01775, section 4.1, are named where they stand.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.dimension import Dimension, effective_dimension, groups, reading_form
from graven.audit.forms import weights, with_weights
from graven.audit.kernel import Attention, Kernel, best_attention, best_kernel, best_step, kernel_forms, read_kernel
from graven.audit.merge import fast_outputs, merge_hidden, merge_outputs, round_decays, separate_outputs
from graven.audit.polish import EXACT, MOST_PARAMETERS, attention_form, one_output_fewer, parameters, polish
from graven.audit.polynomial import Polynomial, distance, polynomial
from graven.audit.prune import prune_hidden, prune_outputs
from graven.audit.readings import Layer, by_readings
from graven.audit.report import Finding, Kind, Report, Stage
from graven.audit.scores import scores
from graven.audit.world import DISTANCE, SEQUENCES, World, check_widths, fresh_tokens
from graven.errors import SpecError
from graven.layers.gated_rnn import GatedRNN
from graven.tasks.regression import Regression
from graven.tasks.teacher import Teacher

ALIKE = 2.0  # a layer whose relative loss is at most so many times that of another is as good
LOSSLESS = 0.1  # a neuron may go whose contribution is below this share of the relative loss


class Reference(NamedTuple):
    """The attention that a layer is compared with.

    Args:
        name: Whose it is.
        kernel: Equation R42.
        head: As one head; none where it takes several.
        distance: Of the layer's polynomial.
        world: In which it was measured.
    """

    name: str
    kernel: Float[Tensor, "E D D D"]
    head: Attention | None
    distance: float
    world: World


def explain(
    layer: Layer,
    teacher: Attention | Teacher | None = None,
    *,
    length: int = 32,
    tokens: Float[Tensor, "B T D"] | None = None,
    blank: tuple[int, ...] = (),
    seed: int = 0,
) -> Report:
    """What a layer computes.

    Args:
        layer: A `GatedRNN`; or any function of tokens [B, T, D] that gives reads [B, T, E], alone or first, judged by what it reads only.
        teacher: What the layer should be. Where left out: the gradient step or the attention that comes nearest to the layer itself.
        length: Tokens of a sequence, as in training.
        tokens: Fresh sequences for whatever is measured on data; N(0, I) where left out, and prompts of in-context regression for a gradient step.
        blank: Entries that are 0 in the last token, which is then the only one that reads. A layer that reads fewer entries than it takes is
            also tried as a gradient step on tokens [x; y], whose blank entries are y.
        seed: Of fresh tokens and of controls.
    Raises:
        ShapeError: Layer, teacher and tokens do not fit each other.
        SpecError: Something is not finite, or reads nothing but 0, or `length` is below 2.
    Source: ours; tests/test_audit.py.
    """
    if length < 2 or (tokens is not None and tokens.dim() == 3 and tokens.shape[1] < 2):
        raise SpecError("a sequence of fewer than 2 tokens never sees the memory of a layer; give a `length` of at least 2.")
    head = None if teacher is None else Attention.of(teacher)
    if not isinstance(layer, GatedRNN):
        if blank:
            raise SpecError("`blank` is for gated RNNs, whose polynomials tell what one token reads; leave it out.")
        return by_readings(layer, head, length=length, tokens=tokens, seed=seed)
    width, outputs = layer.spec.width, layer.spec.reads
    if head is not None:
        check_widths(head, width=width, outputs=outputs)
    world = World(tokens=fresh_tokens(tokens, width=width, length=length, blank=blank, seed=seed), blank=blank, seed=seed)
    reference = _reference(layer, head, world, given=tokens is not None)
    return _by_weights(layer, reference, own=head is None)


def _by_weights(layer: GatedRNN, reference: Reference, *, own: bool) -> Report:
    """The whole audit of a gated RNN."""
    world, found = reference.world, polynomial(layer, length=reference.world.length, blank=reference.world.blank)
    kernel = best_kernel(found, width=layer.spec.width, blank=world.blank)
    loss = _loss(layer, reference)
    findings = [
        Finding(name="relative loss", value=loss, meaning=f"mean squared difference from {reference.name}, by its power, on fresh sequences"),
        _distance_finding(layer, reference, found, own=own),
        Finding(
            name="kernel energy", value=kernel.energy, threshold=1 - DISTANCE**2, controls={"untrained": _untrained_kernel(layer, world).energy},
            meaning="share of the squared coefficients that one attention kernel explains",
        ),
    ]  # fmt: skip
    report = Report(
        kind="neither", verdict="", findings=tuple(findings), stages=(), dimension=None,
        kernel=kernel.kernel, reference=reference.kernel, before=layer, after=None,
    )  # fmt: skip
    far = f"distance {reference.distance:.2g} from {reference.name} ({DISTANCE} is the most that counts)"
    far += f", and {loss:.1%} of the power of its reads is something else" if loss > DISTANCE**2 else ""
    if reference.distance > DISTANCE:
        return dataclasses.replace(report, verdict=f"neither attention nor a gradient step: {far}")
    report = dataclasses.replace(report, kind=_kind(reference))
    if layer.spec.recurrence == "dense":
        return dataclasses.replace(report, verdict=f"{_name(reference)}, as a function: {far}; neurons of a dense recurrence cannot be told apart")
    dimension = effective_dimension(layer, relative_loss=loss, blank=world.blank)
    if not dimension.accumulators * dimension.queries * dimension.outputs:
        verdict = f"{_name(reference)}, as a function: {far}; what is not attention in it hides how many neurons that takes"
        return dataclasses.replace(report, verdict=verdict, dimension=dimension)
    findings += _neuron_findings(layer, reference, dimension, loss)
    stages, after = _reduce(layer, reference, dimension, loss)
    numbers = f"{dimension.accumulators} + {dimension.queries} neurons"
    came, small = f"{stages[0].hidden} hidden neurons and {stages[0].output_gates} outputs", f"{after.spec.hidden} and {after.spec.output_gates}"
    left = _loss(after, reference)
    alike = left <= max(ALIKE * loss, EXACT)
    losses = "" if alike else f", at a relative loss of {left:.2g} for {loss:.2g}"
    verdict = f"{_name(reference)} with {numbers}: {far}; {came} are {'as good as' if alike else 'reduced to'} {small}{losses}"
    return dataclasses.replace(report, verdict=verdict, findings=tuple(findings), stages=tuple(stages), dimension=dimension, after=after)


def _reference(layer: GatedRNN, head: Attention | None, world: World, *, given: bool) -> Reference:
    """The teacher; or what comes nearest to the layer itself: a gradient step, one head, a kernel of any number of heads."""
    width, outputs = layer.spec.width, layer.spec.reads
    found = polynomial(layer, length=world.length, blank=world.blank)
    if head is not None:
        return _compared("the teacher", found, head.kernel, head, world)
    tried: list[Reference] = []
    if outputs < width:
        prompts = world if world.blank else _prompts(world, width=width, outputs=outputs, given=given)
        seen = polynomial(layer, length=prompts.length, blank=prompts.blank)
        step = best_step(best_kernel(seen, width=width, blank=prompts.blank).kernel)
        if step.rate != 0:
            tried.append(_compared(f"a gradient step of rate {step.rate:.4g}", seen, step.attention.kernel, step.attention, prompts))
    if not tried or tried[0].distance > DISTANCE:
        kernel = best_kernel(found, width=width, blank=world.blank).kernel
        if not bool(kernel.any()):
            return Reference("any attention, for none of its terms is there", kernel, None, math.inf, world)
        one = best_attention(kernel)
        tried += [
            _compared("its own nearest attention", found, one.kernel, one, world),
            _compared("its own nearest attention with several heads", found, kernel, None, world),
        ]
    return next((reference for reference in tried if reference.distance <= DISTANCE), min(tried, key=lambda r: r.distance))


def _compared(name: str, found: Polynomial, kernel: Tensor, head: Attention | None, world: World) -> Reference:
    wanted = polynomial(kernel_forms(kernel), length=world.length, blank=world.blank)
    return Reference(name, kernel, head, distance(found, wanted), world)


def _distance_finding(layer: GatedRNN, reference: Reference, found: Polynomial, *, own: bool) -> Finding:
    """Beside an untrained layer, which may choose its own nearest attention where the layer did, and beside another attention of equal size."""
    world, seen = reference.world, polynomial(_untrained(layer, reference.world.seed), length=reference.world.length, blank=reference.world.blank)
    near = best_attention(best_kernel(seen, width=layer.spec.width, blank=world.blank).kernel).kernel if own else reference.kernel
    other = _another(layer, seed=world.seed).kernel
    controls = {
        "untrained, its own nearest" if own else "untrained": _compared("", seen, near, None, world).distance,
        "another attention": _compared("", found, other * (float(reference.kernel.norm()) or 1.0) / other.norm(), None, world).distance,
    }
    meaning = f"over all coefficients of what token {world.length} reads"
    return Finding(name="polynomial distance", value=reference.distance, threshold=DISTANCE, controls=controls, meaning=meaning)


def _another(layer: GatedRNN, *, seed: int) -> Attention:
    """An attention that has nothing to do with the layer."""
    width, generator = layer.spec.width, torch.Generator().manual_seed(seed + 1_000_003)
    drawn = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in (layer.spec.reads, width, width)]
    return Attention(w_v=drawn[0], w_k=drawn[1], w_q=drawn[2])


def _neuron_findings(layer: GatedRNN, reference: Reference, dimension: Dimension, loss: float) -> list[Finding]:
    """Effective numbers, decays and scores."""
    world = reference.world
    pruned = prune_hidden(layer, world.tokens, threshold=LOSSLESS * loss, last=bool(world.blank)).layer
    kinds = groups(pruned.decay.detach(), length=world.length)
    found = [
        _count("accumulators", dimension.accumulators, dimension.accumulator_values, dimension.threshold, "sums over the past that are used"),
        _count("queries", dimension.queries, dimension.query_values, dimension.threshold, "readings of the token that are used"),
        Finding(name="remember", value=len(kinds.accumulators), meaning="neurons left after lossless pruning that remember a whole sequence"),
        Finding(name="forget", value=len(kinds.queries), meaning="that forget at once"),
        Finding(name="between", value=len(kinds.between), meaning="that do neither"),
    ]
    if reference.head is None:
        return found
    x, head = world.tokens, reference.head
    own, null = scores(pruned, head, x), scores(_untrained(layer, world.seed), head, x)
    other = scores(pruned, _another(layer, seed=world.seed), x)
    for name, index, count in (("score KV", 0, 2), ("score Q", 1, 3)):
        controls = {f"untrained with {null[count]} neurons": null[index], "another attention": other[index]}
        found.append(Finding(name=name, value=own[index], controls=controls, meaning=f"1 - R^2 of a linear reading of {own[count]} neurons"))
    return found


def _count(name: str, count: int, values: tuple[float, ...], threshold: float, meaning: str) -> Finding:
    controls = {"last that counts": values[count - 1], "next": values[count] if count < len(values) else 0.0}
    return Finding(name=name, value=count, threshold=threshold, controls=controls, meaning=meaning)


def _reduce(layer: GatedRNN, reference: Reference, dimension: Dimension, loss: float) -> tuple[list[Stage], GatedRNN]:
    """From the layer as it came to the smallest one that is the same."""
    world = reference.world
    last, threshold = bool(world.blank), LOSSLESS * loss
    numbers = {"accumulators": dimension.accumulators, "queries": min(dimension.queries, layer.spec.width + 1)}
    stages = [_stage("as it came", layer, layer, reference)]

    def noted(name: str, step: GatedRNN) -> GatedRNN:
        stages.append(_stage(name, step, layer, reference))
        return step

    small = noted("contributing hidden neurons", prune_hidden(layer, world.tokens, threshold=threshold, last=last).layer)
    small = noted("decays at 0 and 1", _blanked(round_decays(small), world.blank))
    own = reading_form(small)
    small = noted("hidden neurons merged", merge_hidden(small, **numbers))
    small = noted("contributing outputs, merged", merge_outputs(prune_outputs(small, world.tokens, threshold=threshold, last=last).layer))
    small = noted("a product for each output", _products(small, reference, dimension, numbers))
    if parameters(small) > MOST_PARAMETERS:
        return stages, small
    small = noted("fitted to what it read as it came", polish(small, own, tolerance=1e-4, most=50).layer)
    wanted = attention_form(reference.kernel)
    small = noted(f"moved onto {reference.name}", polish(small, wanted).layer)
    if reference.head is not None and stages[-1].relative_loss < EXACT and small.spec.output_gates > 1:
        noted("and one output less", one_output_fewer(small, wanted).layer)
    return stages, small


def _products(small: GatedRNN, reference: Reference, dimension: Dimension, numbers: dict[str, int]) -> GatedRNN:
    """As few products as accumulators where the numbers are those of one head, outputs times queries where they are not."""
    if reference.head is not None:
        try:
            return fast_outputs(small, reference.head, **numbers, outputs=dimension.outputs)
        except SpecError:  # the numbers are those of no single head, as counted above the noise
            pass
    return separate_outputs(small, outputs=dimension.outputs)


def _stage(name: str, step: GatedRNN, layer: GatedRNN, reference: Reference) -> Stage:
    y, z = _reads(layer, reference.world), _reads(step, reference.world)
    change = float((y - z).square().mean() / y.square().mean())
    return Stage(name=name, hidden=step.spec.hidden, output_gates=step.spec.output_gates, relative_loss=_loss(step, reference), change=change)


def _loss(layer: GatedRNN, reference: Reference) -> float:
    wanted = reference.world.read(read_kernel(reference.kernel, reference.world.tokens))
    return float((_reads(layer, reference.world) - wanted).square().mean() / wanted.square().mean())


def _reads(layer: GatedRNN, world: World) -> Tensor:
    exact = layer if layer.w_in1.dtype == torch.float64 else _double(layer)
    with torch.no_grad():
        return world.read(exact(world.tokens)[0])


def _double(layer: GatedRNN) -> GatedRNN:
    """The same layer in float64; the one that was given stays as it is."""
    exact = GatedRNN(layer.spec, dtype=torch.float64)
    exact.load_state_dict(weights(layer))
    return exact


def _blanked(layer: GatedRNN, blank: tuple[int, ...]) -> GatedRNN:
    """Neurons that forget never see what is 0 in the token that reads; decays are 0 or 1."""
    if not blank:
        return layer
    w = weights(layer)
    for name in ("w_in1", "w_in2"):
        w[name] = w[name].clone()
        w[name][(w["decay"] == 0).nonzero(), list(blank)] = 0.0
    return with_weights(**w)


def _untrained(layer: GatedRNN, seed: int) -> GatedRNN:
    """A layer of the same spec that learned nothing, decays at 0 and 1 as attention has them."""
    control = GatedRNN(layer.spec, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if control.spec.recurrence == "diagonal":
        with torch.no_grad():
            control.decay.copy_((control.decay > 0.5).double())
    return control


def _untrained_kernel(layer: GatedRNN, world: World) -> Kernel:
    return best_kernel(polynomial(_untrained(layer, world.seed), length=world.length, blank=world.blank), width=layer.spec.width, blank=world.blank)


def _prompts(world: World, *, width: int, outputs: int, given: bool) -> World:
    """Prompts of in-context regression, unless tokens were given."""
    blank = tuple(range(width - outputs, width))
    if given:
        tokens = world.tokens.clone()
        tokens[:, -1, list(blank)] = 0.0
        return World(tokens=tokens, blank=blank, seed=world.seed)
    task = Regression(dimension=width - outputs, outputs=outputs, examples=world.length - 1)
    generator = torch.Generator().manual_seed(world.seed)
    return World(tokens=task.sample(4 * SEQUENCES, generator=generator, dtype=torch.float64).tokens, blank=blank, seed=world.seed)


def _kind(reference: Reference) -> Kind:
    return "gradient step" if "gradient step" in reference.name else "attention"


def _name(reference: Reference) -> str:
    if _kind(reference) == "gradient step":
        return f"one gradient step with rate {reference.name.rsplit(' ', 1)[1]}"
    return "attention" if reference.head is not None else "attention with several heads"
