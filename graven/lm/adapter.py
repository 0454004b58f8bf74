"""Low-rank adapters of a Hugging Face model, by the package peft, that can be switched off for as long as a block lasts.

Source of LoRA: Hu et al. 2021, arXiv:2106.09685; of an adapter for writing alone: the code of Kuratov et al. 2026, arXiv:2603.13875. Tests:
tests/test_adapter.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from graven.errors import ModelError, SpecError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What is trained of a model.

    Args:
        rank: Of the update of each matrix; 0 adds none, and leaves the model as it is.
        when: The adapter is there "always", or only for the "write": then a memory is read by the model as it was published.
        scale: Factor of the update, alpha / rank in the paper.
        targets: Names of the layers that get one, such as q_proj; every linear layer but the head where left out.
    Raises:
        SpecError: A number is out of range.
    """

    rank: int
    when: Literal["always", "write"] = "always"
    scale: float = 2.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise SpecError(f"`rank` is {self.rank}; it must be at least 0, which adds no adapter.")
        if not self.scale > 0:
            raise SpecError(f"`scale` is {self.scale}; it must be above 0.")


def add_adapter(model: nn.Module, spec: Adapter, *, seed: int) -> None:
    """Put an adapter into a model, in place: the one half drawn from the seed, the other 0, so that it changes nothing yet.

    Nothing but the adapter wants gradients then.

    Args:
        model: A transformers model.
        spec: Of a rank of at least 1.
        seed: Of the half that is drawn.
    Raises:
        SpecError: The package peft is not there.
        ModelError: The model has none of the layers that are named, or none that peft knows.
    """
    if find_spec("peft") is None:
        raise SpecError(f"an adapter (`rank` is {spec.rank}) takes the package peft; run `pip install 'graven[adapters]'`, or leave [adapter] out.")
    peft: Any = import_module("peft")
    named: Any = list(spec.targets) or "all-linear"
    settings = peft.LoraConfig(r=spec.rank, lora_alpha=spec.scale * spec.rank, target_modules=named, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ModelError(
                f"no adapter fits into {type(model).__name__} ({str(error).split('. ')[0][:160]}); name its layers in `targets`."
            ) from error


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapter, for as long as the block lasts; not for several threads at once."""
    kind = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    layers: list[Any] = [part for part in model.modules() if isinstance(part, kind)]
    wants = {weight: weight.requires_grad for layer in layers for weight in layer.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for weight, wanted in wants.items():  # peft switches gradients off and on with the adapter
            weight.requires_grad_(wanted)
