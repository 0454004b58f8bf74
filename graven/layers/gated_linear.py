"""Layers around gated linear attention: the bare one of the theory, and the one of flash-linear-attention with all its surroundings.

Source: Li et al. 2025, arXiv:2504.04308, equations (GLA) and 11; Yang et al. 2023, arXiv:2312.06635, section 4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from graven.errors import ShapeError, SpecError
from graven.layers.base import Convolution, entered, in_heads, in_order, start_
from graven.ops.gated_linear import Form, gated_linear, matrix_gated_linear

Gate = Literal["none", "scalar", "key", "value", "matrix"]


@dataclass(frozen=True, kw_only=True)
class GatedLinearSpec:
    """The shape of a `GatedLinear`.

    Args:
        width: Of a token, D.
        key_width: Of a head, K.
        value_width: Of a head, V.
        heads: H. The output has H * V entries a token.
        gate: What a gate decays alike: "scalar" the whole state, "key" and "value" a slice of that axis of the state, "matrix" one entry.
            The vector gate of the paper is "value", that of most libraries "key".
        gate_bias: A learned offset of every gate's logit. The paper has none.
        form: Of the operation; "matrix" gates have one form only, the recurrence, and leave this at its default.
    Raises:
        SpecError: A number is below 1, or a form is asked of a matrix gate.
    """

    width: int
    key_width: int
    value_width: int
    heads: int = 1
    gate: Gate = "scalar"
    gate_bias: bool = False
    form: Form = "chunk"

    def __post_init__(self) -> None:
        for name in ("width", "key_width", "value_width", "heads"):
            if getattr(self, name) < 1:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.gate not in ("none", "scalar", "key", "value", "matrix"):
            raise SpecError(f'`gate` is {self.gate!r}; it must be "none", "scalar", "key", "value" or "matrix".')
        if self.gate == "matrix" and self.form != "chunk":
            raise SpecError(f'`form` is {self.form!r} and `gate` is "matrix", which has the recurrence only; leave `form` out.')

    @property
    def gates(self) -> int:
        """Gates of a head at one step."""
        return {"none": 0, "scalar": 1, "key": self.key_width, "value": self.value_width, "matrix": self.key_width * self.value_width}[self.gate]


class GatedLinear(nn.Module):
    """Linear queries, keys and values; gates that are sigmoids of a linear map of the token; reads as they are, heads side by side.

    `q`, `k` and `v` hold the transposes of the paper's W_q, W_k and W_v; `gate` its W_g.
    """

    def __init__(self, spec: GatedLinearSpec):
        super().__init__()
        self.spec = spec
        self.q, self.k = (nn.Linear(spec.width, spec.heads * spec.key_width, bias=False) for _ in range(2))
        self.v = nn.Linear(spec.width, spec.heads * spec.value_width, bias=False)
        self.gate = nn.Linear(spec.width, spec.heads * spec.gates, bias=spec.gate_bias) if spec.gates else None

    def forward(self, x: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B T E"]:
        """What every token reads, E = H * V."""
        return self.run(x, mask=mask)[0]

    def run(
        self, x: Float[Tensor, "B T D"], *, state: Float[Tensor, "B H K V"] | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B H K V"]]:
        """The same, from a state and with the state that it leaves.

        Args:
            x: Tokens.
            state: Zeros where left out.
            mask: True where a token is real; the others write nothing and decay nothing.
        Raises:
            ShapeError: The parts do not fit each other.
        Source: Li et al. 2025, arXiv:2504.04308, equation (GLA).
        """
        x = entered(x, width=self.spec.width, mask=mask)
        q, k, v = (in_heads(project(x), self.spec.heads) for project in (self.q, self.k, self.v))
        log_gate = self.log_gate(x)
        k, log_gate = _passing_over(mask, k, log_gate)
        match self.spec.gate:
            case "matrix":
                assert log_gate is not None
                per_entry = log_gate.reshape(*k.shape, self.spec.value_width)
                o, state = matrix_gated_linear(q, k, v, log_gate=per_entry, state=state)
            case "value":
                o, state = gated_linear(q, k, v, log_gate_v=log_gate, state=state, form=self.spec.form)
            case _:
                o, state = gated_linear(q, k, v, log_gate_k=log_gate, state=state, form=self.spec.form)
        return o.flatten(2), state

    def log_gate(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H G"] | None:
        """Logarithms of the gates of every step; those of a matrix gate by rows of the key axis."""
        return None if self.gate is None else F.logsigmoid(in_heads(self.gate(x), self.spec.heads))


class Stack(nn.Module):
    """Layers one upon the other, each added to what it reads: Z <- Z + layer(Z).

    Raises:
        SpecError: A layer gives tokens of another width than it takes.
    Source: Li et al. 2025, arXiv:2504.04308, equation 11.
    """

    def __init__(self, layers: Iterable[GatedLinear]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for number, layer in enumerate(self.layers):
            spec = layer.spec
            assert isinstance(spec, GatedLinearSpec)
            if spec.heads * spec.value_width != spec.width:
                raise SpecError(
                    f"layer {number} reads {spec.heads} * {spec.value_width} numbers a token and takes {spec.width}; "
                    "a residual needs the two equal: set `value_width` to `width` / `heads`."
                )

    def forward(self, x: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B T D"]:
        """Tokens after the last layer."""
        for layer in self.layers:
            x = x + layer(x, mask=mask)
        return x


@dataclass(frozen=True, kw_only=True)
class GatedLinearAttentionSpec:
    """The shape of a `GatedLinearAttention`.

    Args:
        width: Of a token, D.
        heads: H.
        key_value_heads: Heads of keys and values, which neighbouring heads share; divides `heads`.
        key_width: Of a head, K.
        value_width: Of a head, V.
        gate: "key" (GLA) or "scalar" (simple GLA).
        gate_rank: Width in the middle of the map to the gates; 0 for one full map.
        gate_divisor: Of the logarithm of every gate: large is close to 1.
        gate_floor: Least logarithm of a gate, none where left out.
        convolution: Tokens that the causal depthwise convolutions on queries, keys and values span, 0 for none.
        convolution_bias: They have one.
        output_gate: Reads are multiplied by silu of another map of the token.
        norm_weight: The norm of the reads has a learned scale.
        epsilon: Of that norm.
    Raises:
        SpecError: A number is out of range, or heads do not divide.
    """

    width: int
    heads: int
    key_value_heads: int
    key_width: int
    value_width: int
    gate: Literal["key", "scalar"] = "key"
    gate_rank: int = 16
    gate_divisor: float = 16.0
    gate_floor: float | None = None
    convolution: int = 0
    convolution_bias: bool = False
    output_gate: bool = True
    norm_weight: bool = True
    epsilon: float = 1e-5
    kind: Literal["gla"] = "gla"

    def __post_init__(self) -> None:
        for name in ("width", "heads", "key_value_heads", "key_width", "value_width"):
            if getattr(self, name) < 1:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.heads % self.key_value_heads:
            raise SpecError(f"`heads` is {self.heads} and `key_value_heads` is {self.key_value_heads}; the second must divide the first.")
        if self.gate not in ("key", "scalar"):
            raise SpecError(f'`gate` is {self.gate!r}; it must be "key" or "scalar".')
        for name in ("gate_rank", "convolution"):
            if getattr(self, name) < 0:
                raise SpecError(f"`{name}` is {getattr(self, name)}; it must be at least 0, which is none.")
        if not self.gate_divisor > 0:
            raise SpecError(f"`gate_divisor` is {self.gate_divisor}; it must be above 0.")


GatedLinearAttentionState = tuple[Float[Tensor, "..."], ...]
"""The matrices [B, H, K, V]; behind them, where there are convolutions, what those on queries, keys and values still see. Float32 or wider."""


class GatedLinearAttention(nn.Module):
    """out(norm(o) * silu(output_gate(x))), o the reads of gated linear attention at scale K ** -0.5.

    Source: Yang et al. 2023, arXiv:2312.06635, section 4.4, as flash-linear-attention builds it. Without its feature maps and its caches. With a
    generator, weights start from N(0, 1 / fan-in), theirs from N(0, 0.02^2); without one, as torch starts each part.
    """

    def __init__(self, spec: GatedLinearAttentionSpec, generator: torch.Generator | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        widths = {"q": spec.heads * spec.key_width, "k": spec.key_value_heads * spec.key_width, "v": spec.key_value_heads * spec.value_width}
        self.q, self.k, self.v = (nn.Linear(spec.width, width, bias=False, dtype=dtype) for width in widths.values())
        gates = widths["k"] if spec.gate == "key" else spec.heads
        if spec.gate_rank:
            narrow = nn.Linear(spec.width, spec.gate_rank, bias=False, dtype=dtype)
            self.gate: nn.Module = nn.Sequential(narrow, nn.Linear(spec.gate_rank, gates, dtype=dtype))
        else:
            self.gate = nn.Linear(spec.width, gates, dtype=dtype)
        self.convolutions = nn.ModuleDict()
        if spec.convolution:
            for name, width in widths.items():
                self.convolutions[name] = Convolution(width, spec.convolution, bias=spec.convolution_bias, dtype=dtype)
        read = spec.heads * spec.value_width
        self.output_gate = nn.Linear(spec.width, read, bias=False, dtype=dtype) if spec.output_gate else None
        self.out = nn.Linear(read, spec.width, bias=False, dtype=dtype)
        if generator is not None:
            start_(self, generator)
        self.norm = nn.RMSNorm(spec.value_width, eps=spec.epsilon, elementwise_affine=spec.norm_weight, dtype=dtype)

    def start(self, batch: int) -> GatedLinearAttentionState:
        """Nothing read yet."""
        spec, wide = self.spec, torch.promote_types(self.q.weight.dtype, torch.float32)
        matrix = self.q.weight.new_zeros(batch, spec.heads, spec.key_width, spec.value_width, dtype=wide)
        return matrix, *(part.start(batch) for part in self.convolutions.values() if isinstance(part, Convolution))

    def forward(
        self, x: Float[Tensor, "B T D"], state: GatedLinearAttentionState | None = None, mask: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], GatedLinearAttentionState]:
        """What every token reads, without a residual, and the state after the last one.

        Args:
            x: Tokens.
            state: `start` where left out.
            mask: True where a token is real; the others write nothing, decay nothing, and no convolution sees them.
        Raises:
            ShapeError: The parts do not fit each other.
        """
        x = entered(x, width=self.spec.width, mask=mask)
        state = self.start(len(x)) if state is None else state
        if len(state) != 1 + len(self.convolutions):
            raise ShapeError(f"`state` has {len(state)} parts and {1 + len(self.convolutions)} were expected: the matrix and a window a convolution.")
        return in_order(self._run, x, state, mask)

    def _run(self, x: Tensor, state: GatedLinearAttentionState, mask: Tensor | None) -> tuple[Tensor, GatedLinearAttentionState]:
        """With padding at the end only."""
        spec = self.spec
        matrix, *before = state
        mixed, windows = [self.q(x), self.k(x), self.v(x)], []
        for index, (convolution, recent) in enumerate(zip(self.convolutions.values(), before, strict=True)):
            y, window = convolution(mixed[index], recent, mask)
            mixed[index] = F.silu(y)
            windows.append(window)
        log_gate = F.logsigmoid(self.gate(x)) / spec.gate_divisor
        if spec.gate_floor is not None:
            log_gate = log_gate.clamp(min=spec.gate_floor)
        q, k, v = (in_heads(y, heads) for y, heads in zip(mixed, (spec.heads, spec.key_value_heads, spec.key_value_heads), strict=True))
        log_gate = in_heads(log_gate, spec.key_value_heads if spec.gate == "key" else spec.heads)
        k, v, log_gate = (y.repeat_interleave(spec.heads // y.shape[2], dim=2) for y in (k, v, log_gate))
        k, log_gate_k = _passing_over(mask, k, log_gate)
        o, matrix = gated_linear(q, k, v, log_gate_k=log_gate_k, scale=spec.key_width**-0.5, state=matrix)
        o = self.norm(o.to(self.out.weight.dtype)).flatten(2)  # of the weights' width, also where a caller computes in less
        return self.out(o if self.output_gate is None else o * F.silu(self.output_gate(x))), (matrix, *windows)


# What flash-linear-attention calls the parts of `GatedLinearAttention`.
FLA_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "output_gate", "gk_proj": "gate", "o_proj": "out",
    "g_norm_swish_gate": "norm", "g_norm": "norm",
    "q_conv1d": "convolutions.q", "k_conv1d": "convolutions.k", "v_conv1d": "convolutions.v",
}  # fmt: skip


def read_fla(
    weights: Mapping[str, Tensor],
    *,
    heads: int | None = None,
    gate_divisor: float = 16.0,
    gate_floor: float | None = None,
    epsilon: float = 1e-5,
) -> GatedLinearAttention:
    """A layer of flash-linear-attention from its state dict: `GatedLinearAttention` or `SimpleGatedLinearAttention`, without a feature map.

    Sizes are read off the weights. What leaves no trace in them are options here, with that library's defaults.

    Args:
        weights: The state dict of the layer alone.
        heads: Needed only where neither the norm nor the gate tells: no learned scale of the norm, and one gate a key channel.
        gate_divisor: Its `gate_logit_normalizer`.
        gate_floor: Its `clamp_min`.
        epsilon: Its `norm_eps`.
    Raises:
        SpecError: A weight is missing or unknown, `heads` cannot be told, or sizes do not fit.
    Source: fla/layers/gla.py and simple_gla.py of github.com/fla-org/flash-linear-attention; tests/test_gated_linear_layer.py.
    """
    named = {_fla_name(name): tensor for name, tensor in weights.items()}
    if missing := [name for name in ("q.weight", "k.weight", "v.weight", "out.weight") if name not in named]:
        raise SpecError(f"`weights` lacks `{_theirs(missing[0])}`; give the state dict of one GLA or simple GLA layer, without a prefix.")
    spec = _fla_spec(named, heads=heads, gate_divisor=gate_divisor, gate_floor=gate_floor, epsilon=epsilon)
    layer = GatedLinearAttention(spec).to(named["q.weight"].dtype)
    expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    for name in sorted(expected.keys() | named.keys()):
        came = tuple(named[name].shape) if name in named else "missing"
        if came != expected.get(name):
            raise SpecError(f"`{_theirs(name)}` is {came} and {expected.get(name, 'nothing')} was expected; the weights are of no one GLA layer.")
    layer.load_state_dict(named)
    return layer


def _fla_spec(
    named: Mapping[str, Tensor], *, heads: int | None, gate_divisor: float, gate_floor: float | None, epsilon: float
) -> GatedLinearAttentionSpec:
    scalar = "gate.weight" in named
    key, width = named["q.weight"].shape
    value = named["out.weight"].shape[1]
    if scalar:
        told: int | None = named["gate.weight"].shape[0]
    else:
        told = value // named["norm.weight"].shape[0] if "norm.weight" in named else heads
    if told is None:
        raise SpecError("`heads` was left out and the weights do not tell, for the norm has no learned scale; give `heads`.")
    if heads not in (None, told) or key % told or value % told:
        raise SpecError(f"`heads` is {heads}; the weights have {told} heads over {key} key and {value} value channels: leave `heads` out.")
    convolution = named["convolutions.q.weight"].shape[2] if "convolutions.q.weight" in named else 0
    return GatedLinearAttentionSpec(
        width=width,
        heads=told,
        key_value_heads=max(1, named["k.weight"].shape[0] * told // key),
        key_width=key // told,
        value_width=value // told,
        gate="scalar" if scalar else "key",
        gate_rank=0 if scalar else named["gate.0.weight"].shape[0] if "gate.0.weight" in named else 1,
        gate_divisor=gate_divisor,
        gate_floor=gate_floor,
        convolution=convolution,
        convolution_bias="convolutions.q.bias" in named,
        output_gate="output_gate.weight" in named,
        norm_weight="norm.weight" in named,
        epsilon=epsilon,
    )


def _fla_name(name: str) -> str:
    part, _, rest = name.partition(".")
    if part not in FLA_NAMES:
        raise SpecError(f"`weights` has the unknown name `{name}`; the parts of a GLA layer are {', '.join(FLA_NAMES)}.")
    return f"{FLA_NAMES[part]}.{rest}"


def _theirs(name: str) -> str:
    ours = max((ours for ours in FLA_NAMES.values() if name.startswith(f"{ours}.")), key=len)
    return next(theirs for theirs, known in FLA_NAMES.items() if known == ours) + name.removeprefix(ours)


def _passing_over(mask: Tensor | None, k: Tensor, log_gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Keys 0 and gates 1 where a token is padding."""
    if mask is None:
        return k, log_gate
    padding = ~mask[:, :, None, None]
    return k.masked_fill(padding, 0.0), None if log_gate is None else log_gate.masked_fill(padding, 0.0)
