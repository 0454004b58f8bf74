"""Mamba and Mamba-2 of Hugging Face transformers as recurrences that can be cut anywhere.

The model is theirs: embedding, start of the weights, norms, residuals, head, and what `save_pretrained` writes. Their mixers have a cache only for
generation: it is changed in place, so nothing can be trained through it; more than one token behind a cache of Mamba reads as if the cache were
empty, without a word; and padding lets the state decay (transformers 5.24). So each mixer's weights are run by the layer of ours that equals it.

Source: ours; tests/test_state_space.py compares with their models, whole and token by token from their cache.
"""

from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from graven.errors import ModelError
from graven.layers.decoder import DecoderSpec
from graven.layers.mamba import Mamba, MambaSpec
from graven.layers.mamba2 import Mamba2, Mamba2Spec

Form = MambaSpec | Mamba2Spec


class StateSpace(nn.Module):
    """One language model.

    Args:
        model: A `MambaForCausalLM` or a `Mamba2ForCausalLM`; it is a part of this module and may be trained, saved and used on its own.
    Raises:
        ModelError: It is another model, or has a setting that the layers do not know.
    """

    def __init__(self, model: Any):
        super().__init__()
        config, blocks = model.config, model.backbone.layers
        self.model = model
        spec = _spec(config)
        if config.hidden_act != "silu" or tuple(getattr(config, "time_step_limit", (0.0, float("inf")))) != (0.0, float("inf")):
            raise ModelError("the model's `hidden_act` or `time_step_limit` is not that of the papers; use one with silu and without limits.")
        # in a list, so that they are no part of this module; each has the very parameters of its block, and threads share nothing that changes
        self._forms = [_with_weights_of(block.mixer, spec) for block in blocks]

    def start(self, batch: int) -> tuple[Any, ...]:
        """Nothing read yet."""
        return tuple(tuple(form.start(batch)) for form in self._forms)

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embeddings of tokens."""
        return self.model.get_input_embeddings()(ids)

    def run(
        self, x: Float[Tensor, "B T D"], state: tuple[Any, ...], mask: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Any, ...]]:
        """Hidden states before the last norm, and the state after the last real token."""
        ends = []
        for block, form, old in zip(self.model.backbone.layers, self._forms, state, strict=True):
            y, end = form(block.norm(x.to(block.norm.weight.dtype)), old, mask)
            x = (x.float() if block.residual_in_fp32 else x) + y
            ends.append(tuple(end))
        return x, tuple(ends)

    def flush(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state as it is: whatever was read is in effect."""
        return state

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B A"]:
        """The last norm, and the head."""
        return self.model.lm_head(self.model.backbone.norm_f(hidden).to(self.model.lm_head.weight.dtype))


def new_state_space(sizes: DecoderSpec, spec: Form, *, generator: torch.Generator) -> StateSpace:
    """An untrained model, started as transformers starts it.

    Args:
        sizes: Its `vocabulary`, `layers` and `tied`; what else it says must agree with `spec` (see `memory.recurrent`).
        spec: Of every block; `inner` is a multiple of `width`.
        generator: Of the weights.
    Raises:
        ModelError: transformers does not take these numbers.
    """
    if spec.inner % spec.width:
        raise ModelError(f"`inner` is {spec.inner} and `width` is {spec.width}; transformers wants the first to be a multiple of the second.")
    common = {
        "vocab_size": sizes.vocabulary, "hidden_size": spec.width, "state_size": spec.memory, "num_hidden_layers": sizes.layers,
        "expand": spec.inner // spec.width, "conv_kernel": spec.convolution, "use_bias": spec.bias, "use_conv_bias": spec.convolution_bias,
        "tie_word_embeddings": sizes.tied, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "use_cache": False,
    }  # fmt: skip
    library = import_module("transformers")  # where it is first needed, because that takes seconds
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 40, (1,), generator=generator)))
        if isinstance(spec, MambaSpec):
            return StateSpace(library.MambaForCausalLM(library.MambaConfig(**common, time_step_rank=spec.step_rank)))
        heads = {"num_heads": spec.heads, "head_dim": spec.inner // spec.heads, "n_groups": spec.groups, "layer_norm_epsilon": spec.epsilon}
        return StateSpace(library.Mamba2ForCausalLM(library.Mamba2Config(**common, **heads)))


def _with_weights_of(mixer: nn.Module, spec: Form) -> Mamba | Mamba2:
    """The layer of ours that computes what a mixer of theirs does, with its very parameters."""
    with torch.device("meta"):  # theirs take the place of these
        form = Mamba(spec) if isinstance(spec, MambaSpec) else Mamba2(spec)
    for name, parameter in list(form.named_parameters()):
        own = mixer.get_parameter(name)
        assert own.shape == parameter.shape, name
        owner, _, leaf = name.rpartition(".")
        setattr(form.get_submodule(owner), leaf, own)
    return form


def _spec(config: Any) -> Form:
    """The shape of every mixer of a model."""
    if config.model_type not in ("mamba", "mamba2"):
        raise ModelError(f"the model is a {config.model_type!r}; give a MambaForCausalLM or a Mamba2ForCausalLM of transformers.")
    width = config.hidden_size
    inner = config.intermediate_size if config.model_type == "mamba" else int(config.expand * width)  # Mamba-2 has no field for it
    common = {"width": width, "inner": inner, "memory": config.state_size, "convolution": config.conv_kernel, "bias": config.use_bias,
              "convolution_bias": config.use_conv_bias}  # fmt: skip
    if config.model_type == "mamba":
        return MambaSpec(**common, step_rank=int(config.time_step_rank))
    return Mamba2Spec(**common, heads=config.num_heads, groups=config.n_groups, epsilon=config.layer_norm_epsilon)
