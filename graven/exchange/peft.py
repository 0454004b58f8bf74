"""PEFT: a memory as a prompt-tuning adapter, or, run once through the model, as a cartridge of keys and values.

Both are folders of `adapter_config.json` and `adapter_model.safetensors`. Prompt tuning holds [S, D], the vectors themselves; a cartridge
[S, layers * 2 * heads * head width], for each vector the key and the value of each layer, rotated already. peft itself is not needed.

Source: peft 0.21.2, `PromptTuningConfig`, `CartridgeConfig` and `tuners/cartridge/utils.py`; tests/test_exchange.py opens both with it. Its own
`generate` puts the prompt in front of every step under transformers 5.24, and padding on the left between prompt and query: generate from the base
model.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from graven.errors import MemoryFileError, ModelError
from graven.exchange.base import Prefix, container, exported_by_graven, json_object, read_container, write_folder
from graven.lm.cached import EXACT
from graven.lm.probes import RUN, Wrapped, probe_ids, reason

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS = "prompt_embeddings"


def write_prompt(prefix: Prefix, folder: Path) -> None:
    """A prompt-tuning adapter of one page.

    Raises:
        OutputError: Something stands there that graven did not write, or the place cannot be written to.
    """
    (vectors,) = prefix.vectors
    model = prefix.reader.model.model.config.get_text_config()
    config = {
        # layers and heads mean nothing here, but peft looks for them, and MPT and Mamba do not have them where it looks
        "peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM", "token_dim": vectors.shape[1],
        "num_layers": model.num_hidden_layers, "num_attention_heads": getattr(model, "num_attention_heads", 1),
    }  # fmt: skip
    _write(prefix, vectors, config, folder, exported=EMBEDDINGS)


def write_cartridge(prefix: Prefix, folder: Path) -> None:
    """A cartridge of one page; what it was made from cannot be found in it again.

    Raises:
        ModelError: The model keeps no keys and values of each column that stand for the vectors.
        OutputError: As of `write_prompt`.
    """
    (vectors,) = prefix.vectors
    rows, heads, head_width, layers = keys_and_values(prefix.reader.model, vectors)
    config = {
        "peft_type": "CARTRIDGE", "num_frozen_tokens": 1, "token_dim": heads * head_width, "num_attention_heads": heads, "num_layers": layers,
        "num_transformer_submodules": 1,
    }  # fmt: skip
    _write(prefix, rows, config, folder, exported=None)


@torch.no_grad()
def keys_and_values(model: Wrapped, vectors: Float[Tensor, "S D"]) -> tuple[Float[Tensor, "S K"], int, int, int]:
    """Keys and values of every layer as PEFT lays them out, heads, width of a head, layers.

    Raises:
        ModelError: The model keeps others, or none, or does not go on from them as from the vectors.
    """
    advice = "export it to peft, which holds the vectors themselves."
    first = vectors.to(model.model.device, model.model.dtype)[None]
    cache = getattr(model.model.base_model(inputs_embeds=first, use_cache=True), "cache", None)
    pairs: list[tuple[Any, Any]] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in getattr(cache, "layers", [])]
    shapes = {None if part is None else tuple(part.shape) for pair in pairs for part in pair}
    if len(shapes) != 1 or (shape := shapes.pop()) is None or len(shape) != 4 or shape[2] != len(vectors):
        raise ModelError(f"{model} keeps no keys and values of one shape for each of {len(vectors)} columns and each layer; {advice}")
    off = _off(model, first, pairs)
    if not off <= EXACT:
        raise ModelError(f"{model} goes on from keys and values otherwise than from the vectors (off by {off:.2g} of the largest number); {advice}")
    packed = torch.stack([part[0].transpose(0, 1) for pair in pairs for part in pair], dim=1)  # [S, 2 L, H, K]
    return packed.flatten(1).float().cpu(), shape[1], shape[3], len(pairs)


def read_prompt(folder: Path) -> tuple[Float[Tensor, "1 S D"], dict[str, str]]:
    """Vectors and metadata of a prompt-tuning adapter.

    Raises:
        MemoryFileError: It is no such adapter, or not whole.
    """
    kind = json_object(folder / CONFIG).get("peft_type")
    if kind in ("CARTRIDGE", "PREFIX_TUNING"):
        raise MemoryFileError(f"{folder} holds keys and values ({kind}), and the vectors that they came from cannot be found in them again.")
    if kind != "PROMPT_TUNING":
        raise MemoryFileError(f"{folder} is no prompt-tuning adapter (`peft_type` of its {CONFIG} is {kind!r}), and nothing else can be a memory.")
    tensors, metadata = read_container(folder / WEIGHTS)
    if list(tensors) != [EMBEDDINGS] or tensors[EMBEDDINGS].dim() != 2:
        raise MemoryFileError(f"{folder / WEIGHTS} does not hold the one matrix {EMBEDDINGS}, but {', '.join(tensors) or 'nothing'}.")
    return tensors[EMBEDDINGS][None], metadata


def _off(model: Wrapped, first: Float[Tensor, "1 S D"], pairs: list[tuple[Any, Any]]) -> float:
    """How far a few tokens behind keys and values end from where they end behind the vectors, as a share of the largest number."""
    behind = model.model.get_input_embeddings()(probe_ids(model)[:, :6])
    start, columns = first.shape[1], first.shape[1] + behind.shape[1]
    wanted = model.hidden(torch.cat([first, behind], dim=1))[:, start:]
    at = torch.arange(start, columns, device=first.device)[None]
    try:
        # a copy: the model goes on filling it
        cache = import_module("transformers").DynamicCache([(key.clone(), value.clone()) for key, value in pairs])
        given = {"position_ids": at, "attention_mask": torch.ones(1, columns, dtype=torch.long, device=first.device), "cache": cache}
        found = model.model.base_model(inputs_embeds=behind, use_cache=True, **given).last_hidden_state
    except RUN as error:
        raise ModelError(f"{model} does not go on from keys and values ({reason(error)}); export it to peft, which holds the vectors.") from error
    return float((found - wanted).abs().max() / wanted.abs().max())


def _write(prefix: Prefix, rows: Float[Tensor, "S K"], config: dict[str, Any], folder: Path, *, exported: str | None) -> None:
    about = prefix.memory.about
    common = {
        "task_type": "CAUSAL_LM", "num_virtual_tokens": len(rows), "base_model_name_or_path": about.base.name, "revision": about.base.revision,
        "inference_mode": True,
    }  # fmt: skip
    files = {
        CONFIG: json.dumps(config | common, indent=2, sort_keys=True).encode(),
        WEIGHTS: container({EMBEDDINGS: rows}, prefix, exported=exported),
    }
    write_folder(folder, files, replaces=_ours)


def _ours(folder: Path) -> bool:
    """Whether a folder is an adapter that graven wrote, and nothing more."""
    return {place.name for place in folder.iterdir()} == {CONFIG, WEIGHTS} and exported_by_graven(folder / WEIGHTS)
