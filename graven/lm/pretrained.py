"""Any causal language model of Hugging Face transformers: from a directory, a hub id or a GGUF file.

A probe at load time compares the logits that the model gives for token ids with those that graven gets for their embeddings. Models that
scale or augment their embeddings inside fail it and are refused: free vectors would not mean to them what graven thinks.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn

from graven.errors import ModelError
from graven.lm.base import Continuation, canonical, digest, in_front, sampled_rows, without_state
from graven.shapes import check
from graven.tasks.base import Tokens, rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Pretrained(nn.Module):
    """A Hugging Face causal language model and its tokenizer.

    Args:
        model: In eval mode; its weights stay as they are unless a training says otherwise.
        tokenizer: Text to tokens and back, without special tokens of its own making.
        name: What a user calls it.
        revision: Snapshot of a hub id, or None.
    Raises:
        ModelError: The probe found that embeddings do not stand for tokens in this model.
    Source: ours; tests/test_lm.py runs it over a dozen architectures.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, name: str, revision: str | None = None):
        super().__init__()
        self.model, self.tokenizer, self.name, self.revision = model, tokenizer, name, revision
        weight = model.get_input_embeddings().weight
        self.width, self.vocabulary = weight.shape[1], self.head_weight.shape[0]
        self.hidden_width = self.head_weight.shape[1]
        self.positions: int | None = getattr(model.config, "max_position_embeddings", None)
        from transformers import GenerationConfig

        ends = model.generation_config.eos_token_id
        self.stop: frozenset[int] = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        # The model's own settings (sampling, penalties) would fill whatever a call leaves open; graven reads the most probable text.
        model.generation_config = GenerationConfig()
        self._probe()

    @property
    def embedding_scale(self) -> float:
        return float(self.model.get_input_embeddings().weight.detach().float().std())

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def fingerprint(self) -> str:
        tokenizer = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else repr(sorted(self.tokenizer.get_vocab().items()))
        return digest(
            canonical(self.model.config.to_diff_dict()), sampled_rows(self.model.get_input_embeddings().weight), without_state(tokenizer)
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text and nothing else: no token is added before or after."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones spelled out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def embed(self, tokens: Tokens) -> Float[Tensor, "B T D"]:
        # the module, never its weight: some models scale inside the module
        return self.model.get_input_embeddings()(tokens.ids)

    def hidden(
        self, embeddings: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T E"]:
        check(embeddings=(embeddings, f"B T {self.width}"))
        return in_front(self._run, embeddings, mask=mask, positions=positions)

    def logits(self, hidden: Float[Tensor, "*B E"]) -> Float[Tensor, "*B A"]:
        config = self.model.config
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits / getattr(config, "logits_scaling", 1.0)  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def generate(self, prefix: Float[Tensor, "B M D"], query: Tokens, *, most: int, stop: Collection[int]) -> list[Continuation]:
        from transformers import GenerationConfig

        if most == 0:
            return [Continuation([], []) for _ in prefix]
        tokens = query.aligned()
        rows = torch.cat([prefix.to(self.model.dtype), self.embed(tokens)], dim=1)
        mask = torch.cat([torch.ones(prefix.shape[:2], dtype=torch.bool), tokens.mask], dim=1)
        # transformers continues from the last column, so here padding goes before the memory
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True, descending=True)
        settings = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(stop) or [self.vocabulary],  # a token that does not exist: without it, the model's own end would stop a row
            output_logits=True,
            return_dict_in_generate=True,
        )
        out: Any = self.model.generate(inputs_embeds=rows_at(rows, order), attention_mask=mask.gather(1, order).long(), generation_config=settings)
        chosen = torch.stack(out.logits, dim=1).float().log_softmax(-1).gather(-1, out.sequences[..., None])[..., 0]
        done = []
        for ids, values in zip(out.sequences.tolist(), chosen.tolist(), strict=True):
            length = next((at for at, token in enumerate(ids) if token in stop), len(ids))
            done.append(Continuation(ids[:length], values[: length + 1]))
        return done

    def _run(self, embeddings: Tensor, positions: Tensor | None) -> Tensor:
        given = {} if positions is None else {"position_ids": positions}
        return self.model.base_model(inputs_embeds=embeddings.to(self.model.dtype), use_cache=False, **given).last_hidden_state

    @torch.no_grad()
    def _probe(self) -> None:
        ids = torch.randint(self.vocabulary, (1, 12), generator=torch.Generator().manual_seed(0))
        kind = type(self.model).__name__
        advice = "its embeddings are scaled or augmented inside, so memory vectors would not mean to it what tokens do. Use another model."
        expected = self.model(input_ids=ids, use_cache=False).logits
        try:
            got = self.logits(self.hidden(self.embed(Tokens.full(ids))))
        except (RuntimeError, ValueError, TypeError) as error:
            first = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ModelError(f"{self.name} ({kind}) does not run from embeddings ({first}); {advice}") from error
        off = float((got.float() - expected.float()).abs().max() / expected.float().std().clamp(min=1e-6))
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        if not off <= tolerance:
            raise ModelError(f"{self.name} ({kind}) gives other logits for embeddings than for their tokens (off by {off:.2g} of their spread); {advice}")


def load_pretrained(
    path: str, *, dtype: Literal["float32", "bfloat16", "float16"] = "float32", attention: Literal["sdpa", "eager"] | None = None
) -> Pretrained:
    """A model and its tokenizer from a directory, a GGUF file or a hub id; nothing of a model's own code is ever run.

    Args:
        path: Directory in the format of `save_pretrained`, a `.gguf` file (needs the package gguf), or a hub id.
        dtype: Of the weights.
        attention: "eager" can be differentiated twice, which training through a write needs; the library's choice where left out.
    Raises:
        ModelError: There is no such model, it is not whole, or the probe refused it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = Path(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path, "trust_remote_code": False}
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ModelError(f"there is no file {path}; give the path of a GGUF file, a model directory or a hub id.")
        where |= {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    elif place.is_dir():
        if not (place / "config.json").is_file():
            raise ModelError(f"the directory {path} holds no model: it has no config.json. Give a directory written by `save_pretrained`.")
    elif place.exists():
        raise ModelError(f"{path} is a file and no GGUF file; give a model directory, a `.gguf` file or a hub id.")
    elif path.count("/") > 1 or path.startswith((".", "/", "~")) or not path.strip():
        raise ModelError(f"there is no directory {path!r}; give a model directory, a `.gguf` file or a hub id.")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, dtype), attn_implementation=attention, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"cannot load {path}: {reason(error)}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{path} lacks {len(missing)} of its weights ({missing[0]}, ...); the download or the save was not complete. Fetch it again.")
    return Pretrained(model.eval(), tokenizer, name=path, revision=revision_of(path))


def reason(error: BaseException) -> str:
    """First line of the deepest cause that says something, and what to do where the network is the cause."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if any(type(link).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError") for link in chain):
        return "it is not on this machine and the hub cannot be reached. Give the path of a model directory, or connect once to fetch it."
    if any(type(link).__name__ in ("RepositoryNotFoundError", "HFValidationError") for link in chain):
        return "there is no such directory, and no such model on the hub. Check the spelling."
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def revision_of(path: str) -> str | None:
    """Commit of a hub model's snapshot in the cache; None for anything local."""
    if Path(path).exists():
        return None
    from transformers.utils.hub import cached_file, extract_commit_hash

    found: str | None = extract_commit_hash(cached_file(path, "config.json"), None)
    return found
