"""The memories that must obey the laws of `test_memory_laws.py`. A new memory is one more row."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from torch import nn

from graven.layers.decoder import DecoderSpec
from graven.layers.delta_net import DeltaNetSpec
from graven.layers.gated_linear import GatedLinearAttentionSpec
from graven.layers.lact import LaCTSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.layers.ttt import TTTSpec
from graven.lm import Pretrained, Small
from graven.memory.associative import ARMT, ARMTSpec
from graven.memory.base import Memory
from graven.memory.cache import KVCache
from graven.memory.forward import RMT, RMTSpec
from graven.memory.gradient import SGD, Adam, GradMem, GradMemSpec
from graven.memory.prefix import Prefix, PrefixSpec
from graven.memory.recurrent import Mixer, Recurrent, RecurrentSpec

VOCABULARY = zoo.VOCABULARY
LONGEST = 64  # tokens of the longest context


@dataclass(frozen=True, kw_only=True)
class Case:
    """One memory, and which laws it claims beyond those that bind all.

    Args:
        make: Makes it anew, the same one each time; with weights that are not those of a start, where a start writes nothing.
        tolerance: What rounding may do to a state, in root mean squares of what a write changes. Rounding differs between batches of
            other sizes.
        steps: A write takes `steps`.
        parts: Writing in two parts is writing once.
        trains: The loss of what is read reaches every weight through the write.
        grows: The state holds a column a token: exempt from the law of one size, and compared without the columns of longer rows.
    """

    make: Callable[[], Memory[Any]]
    tolerance: float = 1e-4  # float32, through two layers and back, twice
    steps: bool = False
    parts: bool = False
    trains: bool = True
    grows: bool = False


def small() -> Small:
    model = Small(DecoderSpec(vocabulary=VOCABULARY, width=32, layers=2, heads=4, key_value_heads=2, hidden=48, convolution=3))
    zoo.redraw(model, seed=1)
    return model


def llama(dtype: torch.dtype = torch.float32) -> Pretrained:
    settings = zoo.LLAMA | {"max_position_embeddings": 2 * LONGEST}
    return Pretrained(zoo.build("LlamaConfig", settings, seed=2, attention="eager").to(dtype), zoo.tokenizer(), name="llama")


def sharp(model: Small | Pretrained) -> Small | Pretrained:
    """The same model with norms of 1 and weights from N(0, 0.3): attention looks somewhere, so eight vectors hold a few tokens exactly."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones(parameter.shape) if parameter.dim() == 1 else torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.requires_grad_(False)


def drawn(memory: nn.Module) -> Any:
    """The same memory with every weight drawn anew: some starts write nothing."""
    zoo.redraw(memory, seed=5)
    return memory


def gradmem(model: Callable[[], Small | Pretrained], **settings: object) -> Callable[[], GradMem]:
    return lambda: GradMem(model(), GradMemSpec(**{"slots": 4, "steps": 2, **settings}), seed=3)


def recurrent(mixer: Mixer, **sizes: int) -> Callable[[], Recurrent]:
    shape = {"vocabulary": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "key_value_heads": 4, "hidden": 64} | sizes
    return lambda: drawn(Recurrent(DecoderSpec(**shape), RecurrentSpec(mixer=mixer), seed=3))


DELTA = DeltaNetSpec(width=32, heads=4, key_width=4, value_width=8)
GATED_DELTA = DeltaNetSpec(width=32, heads=4, key_width=4, value_width=8, convolution=2, gate=True, output_gate=True)
GLA = GatedLinearAttentionSpec(width=32, heads=4, key_value_heads=2, key_width=4, value_width=8)
TTT = TTTSpec(width=32, heads=4, batch=4)
LACT = LaCTSpec(width=32, heads=4, hidden=8, chunk=4, window=5, rate=0.1)
MAMBA = MambaSpec(width=32, inner=64, memory=4, step_rank=2)
MAMBA2 = Mamba2Spec(width=32, inner=64, heads=4, groups=2, memory=4)

PARTS = {"projection": True, "control": 2, "write_head": True}

MEMORIES = {
    "small": Case(steps=True, make=gradmem(small)),
    "small, first order": Case(steps=True, make=gradmem(small, order="first")),
    "small, learned coordinate rate": Case(steps=True, make=gradmem(small, rule=SGD(learn="coordinate"))),
    "small, projection, control, write head": Case(steps=True, make=gradmem(small, **PARTS)),
    "small, clip": Case(steps=True, make=gradmem(small, rule=SGD(clip=0.01))),
    # the first step of Adam is the sign of the gradient, and rounding decides the sign where the gradient is almost 0
    "small, Adam": Case(steps=True, make=gradmem(small, rule=Adam(), order="none"), tolerance=1e-2, trains=False),
    "RMT": Case(steps=True, make=lambda: RMT(small(), RMTSpec(slots=4), seed=3)),
    "RMT, all parts": Case(steps=True, make=lambda: RMT(small(), RMTSpec(slots=4, steps=3, write_map=True, residual=True, control=2), seed=3)),
    "RMT in llama": Case(steps=True, make=lambda: RMT(llama(), RMTSpec(slots=4), seed=3)),
    "cache": Case(parts=True, grows=True, make=lambda: KVCache(small(), seed=3)),
    "ARMT": Case(make=lambda: drawn(ARMT(small(), ARMTSpec(slots=2, features=6, segment=4), seed=3))),
    "prefix": Case(steps=True, make=lambda: Prefix(small(), PrefixSpec(slots=4, steps=2, frozen=1, write_head=True), seed=3)),
    "DeltaNet": Case(parts=True, make=recurrent(DELTA)),
    "Gated DeltaNet, convolution": Case(parts=True, make=recurrent(GATED_DELTA, convolution=3)),
    "gated linear attention": Case(parts=True, make=recurrent(GLA, convolution=3, key_value_heads=2)),
    "TTT-Linear": Case(parts=True, make=recurrent(TTT)),
    "LaCT, convolutions": Case(parts=True, tolerance=3e-4, make=recurrent(dataclasses.replace(LACT, convolution=3))),
    "LaCT": Case(parts=True, tolerance=3e-4, make=recurrent(LACT, convolution=3)),
    "Mamba": Case(parts=True, make=recurrent(MAMBA, heads=1, key_value_heads=1)),
    "Mamba-2, convolution": Case(parts=True, make=recurrent(MAMBA2, convolution=3, key_value_heads=2)),
    "llama": Case(steps=True, make=gradmem(llama)),
    "llama, Adam": Case(steps=True, make=gradmem(llama, rule=Adam(), order="none"), tolerance=1e-2, trains=False),
    "llama in bfloat16": Case(steps=True, make=gradmem(lambda: llama(torch.bfloat16), **PARTS), tolerance=0.2),
}
