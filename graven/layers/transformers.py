"""Our attention inside the models of Hugging Face transformers, where it is `attn_implementation="graven"`.

Source: ours, on the interfaces of transformers 5.24; tests/test_transformers.py compares it with "eager" over the zoo of architectures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from graven.errors import ModelError, OrderError
from graven.ops.attention import attention, plain_attention

OURS = "graven"  # what transformers knows our attention by


def register_attention() -> None:
    """Make `attn_implementation="graven"` known to transformers: `graven.ops.attention`, and the boolean masks that it takes.

    Also for models that are used without graven: gradient penalties, meta-learning, Hessian-vector products. With the attention alone
    transformers would pass no masks, and padding and windows would be ignored without a word.
    """
    _library().AttentionInterface.register(OURS, attend)
    _library().AttentionMaskInterface.register(OURS, boolean_mask)


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H T K"],
    key: Float[Tensor, "B G S K"],
    value: Float[Tensor, "B G S V"],
    attention_mask: Bool[Tensor, "..."] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,  # transformers passes whatever any attention may want
) -> tuple[Float[Tensor, "B T H V"], None]:
    """Attention as transformers calls it; capped logits, as of Gemma 2, by the plain form, whose memory grows with T S.

    Raises:
        OrderError: There is dropout, whose mask a second derivative would have to repeat.
        ModelError: A tensor came with it whose meaning is not known here, such as sinks or a bias of positions.
    """
    if dropout:
        raise OrderError(
            f"attention with dropout {dropout} was asked for, which graven's does not have; set the model to eval mode or its rate to 0."
        )
    if strange := sorted(name for name, given in rest.items() if isinstance(given, Tensor) and name not in ("position_ids", "cache_position")):
        raise ModelError(f'`{strange[0]}` came with an attention that does not know it; load the model with attention="eager".')
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if softcap is None:
        o = attention(query, key, value, mask=attention_mask, causal=causal, scale=scaling)
    else:
        o = plain_attention(query, key, value, mask=attention_mask, causal=causal, scale=scaling, softcap=softcap)
    return o.transpose(1, 2).contiguous(), None


def boolean_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **rest: Any) -> Tensor | None:
    """transformers' own mask. It is left out only where the last query sees every key, which is what `causal` means to graven."""
    masks = import_module("transformers.masking_utils")
    skip = allow_is_causal_skip and q_length in (1, kv_length)
    mask: Tensor | None = masks.sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **rest)
    return mask


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Have every call of the registered attention leave its mark."""

    def note(module: nn.Module, *arguments: Any, **rest: Any) -> Any:
        calls.append(type(module).__name__)
        return attend(module, *arguments, **rest)

    register_attention()
    _library().AttentionInterface.register(OURS, note)
    try:
        yield
    finally:
        register_attention()


def _library() -> Any:
    return import_module("transformers")  # where it is first needed, because that takes seconds
