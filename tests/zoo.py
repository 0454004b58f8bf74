"""One tiny random model of each Hugging Face architecture that the laws of `test_lm.py` run over: two layers, width 32, 96 tokens.

Weights are drawn again at a scale at which every part of a model matters: a fresh initialisation is so small that wrong positions and wrong
masks would pass unseen.
"""

import zlib
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from graven.lm import Pretrained

VOCABULARY = 96
COLUMNS = 64

Settings = dict[str, Any]

ENDS: Settings = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DEEP: Settings = ENDS | {"hidden_size": 32, "num_hidden_layers": 2}
HEADS: Settings = DEEP | {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": COLUMNS}
LLAMA: Settings = HEADS | {"num_key_value_heads": 2}
WIDE: Settings = LLAMA | {"head_dim": 8}
WINDOW: Settings = WIDE | {"sliding_window": 8}
GPT2: Settings = ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": COLUMNS}
OPT: Settings = DEEP | {"num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": COLUMNS}
GRANITE: Settings = LLAMA | {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
JAMBA: Settings = LLAMA | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}

ZOO: dict[str, tuple[str, Settings]] = {
    "llama": ("LlamaConfig", LLAMA),
    "llama, tied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", WINDOW),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXConfig", HEADS),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", WIDE),
    "gemma": ("GemmaConfig", WIDE),
    "gemma2": ("Gemma2Config", WINDOW | {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", WINDOW | {"final_logit_softcapping": 3.0}),
    "phi3": ("Phi3Config", LLAMA),
    "opt": ("OPTConfig", OPT),
    "opt, projected": ("OPTConfig", OPT | {"word_embed_proj_dim": 16}),
    "granite": ("GraniteConfig", GRANITE),
    "cohere": ("CohereConfig", LLAMA | {"logit_scale": 0.25}),
    "olmo2": ("Olmo2Config", LLAMA),
    "gpt-oss": ("GptOssConfig", WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "bloom": ("BloomConfig", ENDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", HEADS | {"alibi": True, "new_decoder_architecture": False}),
    "mpt": ("MptConfig", ENDS | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": COLUMNS}),
    "mamba": ("MambaConfig", DEEP | {"state_size": 8}),
    "mamba2": ("Mamba2Config", DEEP | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "jamba": ("JambaConfig", JAMBA),
    "lfm2": ("Lfm2Config", LLAMA | {"layer_types": ["conv", "full_attention"]}),
}


def redraw(model: torch.nn.Module, *, seed: int) -> None:
    """Weights from N(0, 0.15)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


def build(kind: str, settings: Settings, *, seed: int, attention: str | None = None) -> Any:
    """A transformers model with drawn weights, in eval mode."""
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    redraw(model, seed=seed)
    return model


def architecture(name: str, *, attention: str | None = None) -> Any:
    """The transformers model of that name; the same weights each time."""
    kind, settings = ZOO[name]
    return build(kind, settings, seed=zlib.crc32(name.encode()), attention=attention)


def tokenizer(*, words: int = VOCABULARY) -> Any:
    """One word a token: w0, w1, ..., and the last of them for any other word."""
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token=f"w{words - 1}"))
    backend.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=f"w{words - 1}", pad_token="w0", eos_token="w2")


def pretrained(name: str, *, attention: str | None = None) -> Pretrained:
    """A model of the zoo behind graven's door."""
    return Pretrained(architecture(name, attention=attention), tokenizer(), name=name)
