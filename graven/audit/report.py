"""What an audit found: in words, as JSON, and as one page of pictures."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from graven.audit.dimension import REMEMBERS, Dimension
from graven.audit.forms import input_output, weights
from graven.errors import OutputError
from graven.layers.gated_rnn import GatedRNN
from graven.report import figure, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["attention", "gradient step", "neither"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number, with what it must be and what it is where there is nothing to find.

    Args:
        name: Of the measure.
        value: Its value for the layer.
        threshold: What decides; none where the number decides nothing.
        controls: The same measure of layers or teachers that should not pass.
        meaning: A sentence.
    """

    name: str
    value: int | float
    meaning: str
    threshold: float | None = None
    controls: dict[str, int | float] = dataclasses.field(default_factory=dict)

    @property
    def line(self) -> str:
        """For a person."""
        beside = [f"{name} {value:.3g}" for name, value in self.controls.items()]
        limit = [] if self.threshold is None else [f"threshold {self.threshold:.3g}"]
        return f"{self.name:<20} {self.value:<10.4g} {self.meaning}" + (f" ({'; '.join([*limit, *beside])})" if limit or beside else "")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A layer on the way to a small one.

    Args:
        name: What was done last.
        hidden, output_gates: Its size.
        relative_loss: Against what it is compared with.
        change: Mean |y - y'|^2 / mean |y|^2 against the layer as it came.
    """

    name: str
    hidden: int
    output_gates: int
    relative_loss: float
    change: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What a layer computes, and why one may say so.

    Args:
        kind: In a word.
        verdict: In a sentence.
        findings: Every number, in the order in which it was measured.
        stages: From the layer as it came to the smallest; none where the verdict is "neither" or neurons cannot be told apart.
        dimension: Effective numbers and singular values, where they were measured.
        kernel, reference: Coefficients of the layer's kernel, and of the attention that it was compared with.
        before, after: The layer as it came, and the smallest; none for a layer that is known by its readings only.
    """

    kind: Kind
    verdict: str
    findings: tuple[Finding, ...]
    stages: tuple[Stage, ...]
    dimension: Dimension | None
    kernel: Float[Tensor, "E D D D"]
    reference: Float[Tensor, "E D D D"]
    before: GatedRNN | None
    after: GatedRNN | None

    def text(self) -> str:
        """For a person."""
        lines = [self.verdict, "", *(finding.line for finding in self.findings)]
        if self.stages:
            lines += ["", f"{'':<42}{'hidden':>7}{'outputs':>9}{'relative loss':>15}{'change':>11}"]
            lines += [f"{s.name:<42}{s.hidden:>7}{s.output_gates:>9}{s.relative_loss:>15.2e}{s.change:>11.2e}" for s in self.stages]
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """What JSON can hold of it; a number that is not finite becomes none."""
        return {
            "kind": self.kind,
            "verdict": self.verdict,
            "findings": [_finite(dataclasses.asdict(finding)) for finding in self.findings],
            "stages": [_finite(dataclasses.asdict(stage)) for stage in self.stages],
            "dimension": None if self.dimension is None else self.dimension._asdict(),
            "kernel": self.kernel.tolist(),
            "reference": self.reference.tolist(),
        }

    def save(self, folder: Path) -> None:
        """`audit.txt`, `audit.json` and `audit.png` in a folder, which is made where its parent is there.

        Raises:
            OutputError: The folder cannot be made or written to.
        """
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the folder {folder}: {error.strerror}. Choose a place that exists and that you may write to.") from error
        _write(folder / "audit.txt", self.text())
        _write(folder / "audit.json", json.dumps(self.facts(), allow_nan=False))
        self.draw(folder / "audit.png")

    def draw(self, path: Path) -> None:
        """One page: weights by block before and after, decays, singular values, coefficients, losses on the way.

        Raises:
            OutputError: The file cannot be written.
        """
        with figure(path, width=13, height=7, columns=4, rows=2) as axes:
            for (inputs, outputs), layer, when in zip((axes[:2], axes[2:4]), (self.before, self.after), ("as it came", "smallest"), strict=True):
                _draw_weights(inputs, outputs, layer, when)
            _draw_decays(axes[4], self.before)
            _draw_values(axes[5], self.dimension)
            _draw_kernel(axes[6], self.kernel, self.reference)
            _draw_stages(axes[7], self.stages)
            axes[0].figure.suptitle(self.verdict, fontsize=9, wrap=True)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n"))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}


def _draw_weights(inputs: "Axes", outputs: "Axes", layer: GatedRNN | None, when: str) -> None:
    """Rows of the input maps, and readings beside D, hidden neurons by falling decay."""
    if layer is None or layer.spec.recurrence == "dense":
        for axes in (inputs, outputs):
            axes.set_axis_off()
            axes.text(0.5, 0.5, f"{when}: not drawn", ha="center", va="center", transform=axes.transAxes)
        return
    w = weights(input_output(layer))
    order = w["decay"].argsort(descending=True)
    remembers = int((w["decay"] > REMEMBERS).sum())
    _image(
        inputs, torch.cat([w["w_in1"], w["w_in2"]], 1)[order], f"{when}: $W^1_{{in}}$ | $W^2_{{in}}$, decays falling", len(w["w_in1"][0]), remembers
    )
    readings = torch.cat([w["w_out1"][:, order], w["w_out2"][:, order], w["readout"].T], 1)
    _image(outputs, readings, f"{when}: $W^1_{{out}}$ | $W^2_{{out}}$ | $D^T$", len(order), None)
    outputs.axvline(2 * len(order) - 0.5, color="black", lw=0.8)


def _image(axes: "Axes", matrix: Tensor, title: str, column: int, row: int | None) -> None:
    """Rows at equal largest entry: their scales are free."""
    shown = matrix / matrix.abs().amax(1, keepdim=True).clamp(min=1e-300)
    axes.imshow(shown.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.axvline(column - 0.5, color="black", lw=0.8)
    if row is not None:
        axes.axhline(row - 0.5, color="black", lw=0.8)
    axes.grid(visible=False)
    axes.set_title(title, fontsize=8)


def _draw_decays(axes: "Axes", layer: GatedRNN | None) -> None:
    if layer is not None and layer.spec.recurrence == "diagonal":
        decays = layer.decay.detach().sort(descending=True).values.tolist()
        axes.plot(range(1, len(decays) + 1), decays, ".", color="C0")
        axes.axhline(REMEMBERS, color="black", lw=0.8, ls=":")
    axes.set(title="decays", xlabel="hidden neuron", ylim=(-0.05, 1.05))


def _draw_values(axes: "Axes", dimension: Dimension | None) -> None:
    axes.set(title="singular values of the form", xlabel="number", yscale="log")
    if dimension is None:
        return
    for name, values, count in (
        ("accumulators", dimension.accumulator_values, dimension.accumulators), ("queries", dimension.query_values, dimension.queries),
    ):  # fmt: skip
        axes.plot(range(1, len(values) + 1), [max(value, 1e-12) for value in values], "o-", ms=3, lw=0.8, label=f"{name}: {count}")
    axes.axhline(dimension.threshold, color="black", lw=0.8, ls=":", label="threshold")
    axes.set_ylim(bottom=max(min(dimension.threshold, 1.0) * 1e-3, 1e-12))
    axes.legend(frameon=False, fontsize=7)


def _draw_kernel(axes: "Axes", kernel: Tensor, reference: Tensor) -> None:
    wanted, found = reference.flatten().tolist(), kernel.flatten().tolist()
    axes.plot(wanted, wanted, "-", color="black", lw=0.6)
    axes.plot(wanted, found, ".", ms=4, color="C3")
    axes.set(title="coefficients of the kernel", xlabel="of the attention", ylabel="of the layer")


def _draw_stages(axes: "Axes", stages: tuple[Stage, ...]) -> None:
    axes.set(title="relative loss on the way", xscale="log")
    names = [f"{s.name} ({s.hidden}, {s.output_gates})" for s in stages]
    axes.barh(range(len(stages)), [max(s.relative_loss, 1e-33) for s in stages], left=1e-34, color="C0", alpha=0.4)
    axes.set_yticks([])
    for place, name in enumerate(names):
        axes.text(1e-33, place, name, va="center", fontsize=7)
    axes.invert_yaxis()
