"""Any causal language model of Hugging Face transformers: from a directory, a hub id or a GGUF file.

A probe at load time compares the logits that the model gives for token ids with those that graven gets for their embeddings. Models that
scale or augment their embeddings inside fail it and are refused: free vectors would not mean to them what graven thinks. So are models whose
columns see later ones, and heads that are more than a matrix, a factor and a cap.
"""

import io
import os
import struct
import sys
from collections.abc import Collection
from contextlib import nullcontext, redirect_stderr
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn

from graven.decoding import GREEDY, Decoding, Stream, decode
from graven.errors import ModelError, TextError
from graven.layers.transformers import OURS, register_attention
from graven.lm.base import Continuation, canonical, digest, evenly, in_front, sampled_rows, score, without_state
from graven.lm.probes import probe_attention, probe_embeddings, probe_positions, probe_twice, reason
from graven.shapes import check
from graven.tasks.base import Tokens, rows_at


class Pretrained(nn.Module):
    """A Hugging Face causal language model and its tokenizer.

    Args:
        model: Put into eval mode, its settings for generation cleared; its weights stay as they are unless a training says otherwise.
        tokenizer: Text to tokens and back, without special tokens of its own making.
        name: What a user calls it.
        revision: Snapshot of a hub id, or None.
        checked: Whether a model that a probe finds unfit is refused; `graven doctor` alone goes on and looks for more.
    Raises:
        ModelError: The probe found that embeddings do not stand for tokens in this model, that its head is unknown or that it is not causal.
    Source: ours; tests/test_lm.py runs it over two dozen architectures.
    """

    # `model` and `tokenizer` are Any for the reason that `library` gives
    def __init__(self, model: Any, tokenizer: Any, *, name: str, revision: str | None = None, checked: bool = True):
        super().__init__()
        self.model, self.tokenizer, self.name, self.revision = model, tokenizer, name, revision
        self.mark = ""  # of a training that changed how a memory is read: a part of the fingerprint
        self._found_twice: dict[tuple[str | None, torch.device, bool], bool] = {}  # what was found by trying, for each way of running it
        if model.get_output_embeddings() is None:
            raise ModelError(f"{self} has no head that is one matrix, so no logits can be read from a memory. Use another model.")
        self.width: int = model.get_input_embeddings().weight.shape[1]
        self.vocabulary: int
        self.hidden_width: int
        self.vocabulary, self.hidden_width = self.head_weight.shape
        sizes = model.config.get_text_config()
        self.positions: int | None = getattr(sizes, "max_position_embeddings", None) or getattr(sizes, "max_seq_len", None)  # as MPT calls it
        ends = model.generation_config.eos_token_id
        self.stop: frozenset[int] = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        # The model's own settings (sampling, penalties) would fill whatever a call leaves open; graven reads the most probable text.
        model.generation_config = library().GenerationConfig()
        self.eval()  # the wrapper and all inside; dropout would make every probe fail
        if checked:
            self._check()

    def __str__(self) -> str:
        return f"{self.name} ({type(self.model).__name__})"

    @property
    def embedding_scale(self) -> float:
        embeddings = self.model.get_input_embeddings()
        sample = evenly(len(embeddings.weight), 1024, device=embeddings.weight.device)
        return float(embeddings(sample).detach().float().std())

    @property
    def head_weight(self) -> Float[Tensor, "A E"]:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def twice_differentiable(self) -> bool:
        """Found by trying, because it depends on the machine as well: the fused attention kernels have no second derivative.

        False, too, where an operation of the model could drop a part of it without a word, as Bloom's GELU does.
        """
        way = getattr(self.model.config, "_attn_implementation", None), self.model.device, self.model.training
        if way not in self._found_twice:
            self._found_twice[way] = probe_twice(self)
        return self._found_twice[way]

    @property
    def fingerprint(self) -> str:
        tokenizer = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else repr(sorted(self.tokenizer.get_vocab().items()))
        own = digest(canonical(self.model.config.to_diff_dict()), sampled_rows(self.model.get_input_embeddings().weight), without_state(tokenizer))
        return digest(own.encode(), self.mark.encode()) if self.mark else own

    @cached_property
    def opening(self) -> list[int]:
        """The beginning-of-text token that the tokenizer puts before a text of its own accord, if any; behind a memory there is none."""
        bos, whole = self.tokenizer.bos_token_id, self.tokenizer("a")["input_ids"]
        return [bos] if bos is not None and whole[:1] == [bos] and self.encode("a")[:1] != [bos] else []

    def encode(self, text: str) -> list[int]:
        """Tokens of a text and nothing else: no token is added before or after.

        Raises:
            ModelError: The tokenizer gives a token that the model has no embedding of.
        """
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        known = len(self.model.get_input_embeddings().weight)
        if ids and max(ids) >= known:
            raise ModelError(f"the tokenizer of {self} gives token {max(ids)} and the model knows {known}; use the tokenizer that belongs to it.")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones spelled out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def embed(self, tokens: Tokens) -> Float[Tensor, "B T D"]:
        # the module, never its weight: some models scale inside the module
        embedded: Tensor = self.model.get_input_embeddings()(tokens.ids.to(self.model.device))
        return embedded

    def hidden(
        self, embeddings: Float[Tensor, "B T D"], *, mask: Bool[Tensor, "B T"] | None = None, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T E"]:
        check(embeddings=(embeddings, f"B T {self.width}"))
        if positions is not None and not self._minds_positions:
            raise ModelError(f"{self} derives positions from the order of columns and ignores any that are given; leave `positions` out.")
        return in_front(self._run, embeddings, mask=mask, positions=positions)

    def logits(self, hidden: Float[Tensor, "*B E"]) -> Float[Tensor, "*B A"]:
        config = self.model.config.get_text_config()
        logits: Tensor = self.model.get_output_embeddings()(hidden.to(self.head_weight.dtype))  # Mamba's are float32 at any precision
        logits = logits / getattr(config, "logits_scaling", 1.0)  # Granite
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def generate(
        self,
        prefix: Float[Tensor, "B M D"],
        query: Tokens,
        *,
        most: int,
        stop: Collection[int],
        decoding: Decoding = GREEDY,
        streamer: Stream | None = None,
    ) -> list[Continuation]:
        """What follows each prefix and query, `decoding.count` continuations for each, side by side.

        Args:
            most: Most tokens.
            stop: A row ends before the first of these tokens.
            decoding: How to choose.
            streamer: Is told each token as it comes; for one row and no beams.
        Raises:
            TextError: Prefix, query and `most` tokens are more columns than the model takes.
        """
        tokens = query.aligned()
        self._make_room(prefix.shape[1] + tokens.ids.shape[1] + max(most - 1, 0))  # the last token is not read again
        if most == 0:
            return [Continuation([], []) for _ in prefix]
        rows = torch.cat([prefix.to(self.model.dtype), self.embed(tokens)], dim=1)
        mask = torch.cat([torch.ones(prefix.shape[:2], dtype=torch.bool, device=rows.device), tokens.mask.to(rows.device)], dim=1)
        # transformers continues from the last column, so here padding goes before the memory
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True, descending=True)
        found = decode(
            self.model, rows_at(rows, order), mask.gather(1, order), most=most, ends=stop, decoding=decoding, spell=self.decode, streamer=streamer
        )
        each = torch.arange(len(rows)).repeat_interleave(decoding.count)
        values = score(self, prefix[each], Tokens(tokens.ids[each], tokens.mask[each]), found)
        return [Continuation.of(*row, stop=stop) for row in zip(found, values, strict=True)]

    def _run(self, embeddings: Tensor, positions: Tensor | None) -> Tensor:
        self._make_room(embeddings.shape[1])
        given: dict[str, Tensor] = {}
        if positions is not None:
            # without a mask, transformers takes a jump in positions for the start of another text and hides what stands before it
            given = {"position_ids": positions, "attention_mask": torch.ones_like(positions)}
        hidden: Tensor = self.model.base_model(inputs_embeds=embeddings.to(self.model.dtype), use_cache=False, **given).last_hidden_state
        return hidden

    def _make_room(self, columns: int) -> None:
        if self.positions is not None and columns > self.positions:
            raise TextError(
                f"memory, text and what is to be written take {columns} columns, and {self} has positions for {self.positions}; "
                "shorten the text, or use fewer slots."
            )

    @cached_property
    def _minds_positions(self) -> bool:
        return probe_positions(self)

    def _check(self) -> None:
        if self.model.config._attn_implementation == OURS and (fault := probe_attention(self).fault):
            raise ModelError(f'{self} {fault}; load it with attention="eager".')
        if fault := next((probe.fault for probe in probe_embeddings(self) if probe.fault), None):
            raise ModelError(f"{self} {fault}. Use another model.")
        if "inputs_embeds" not in signature(self.model.prepare_inputs_for_generation).parameters:  # as `generate` itself decides it
            raise ModelError(f"{self} generates from tokens and not from vectors in this version of transformers. Use another model.")


def load_pretrained(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["sdpa", "eager", "graven"] | None = None,
    checked: bool = True,
) -> Pretrained:
    """A model and its tokenizer from a directory, a GGUF file or a hub id; nothing of a model's own code is ever run.

    Args:
        path: Directory in the format of `save_pretrained`, a `.gguf` file (needs the packages gguf and accelerate), or a hub id.
        dtype: Of the weights.
        attention: "graven" and "eager" can be differentiated twice, which training through a write needs. "graven" takes memory and time like a
            fused kernel; "eager" is there for architectures that take no attention from outside. The library's choice where left out.
        checked: As of `Pretrained`.
    Raises:
        ModelError: There is no such model, it is not whole, or the probe refused it.
    """
    where = place(path)
    if attention == OURS:
        register_attention()
    library().utils.logging.set_verbosity_error()
    library().utils.logging.disable_progress_bar()
    import_module("huggingface_hub.utils.logging").set_verbosity_error()  # five retries are told without it
    model = load_whole(path, **where, dtype=getattr(torch, dtype), attn_implementation=attention)
    try:
        tokenizer = library().AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        if not isinstance(error, broken()) and type(error) is not Exception:  # the package tokenizers raises the bare class
            raise
        raise ModelError(f"{path} has no tokenizer that can be read ({reason(error)}); save one beside the model, or fetch both again.") from error
    return Pretrained(model, tokenizer, name=path, revision=revision_of(path), checked=checked)


def load_whole(path: str, **options: Any) -> Any:
    """A transformers model, every weight of which was found.

    Raises:
        ModelError: It cannot be read, or it is not whole: transformers itself fills gaps with random numbers.
    """
    # the reader of GGUF files draws a bar on standard error whether anybody looks or not
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with quiet:
            model, report = library().AutoModelForCausalLM.from_pretrained(**options, output_loading_info=True, ignore_mismatched_sizes=True)
    except broken() as error:
        if isinstance(error, KeyError) and error.args == (OURS,):  # an architecture with a table of attentions of its own
            raise ModelError(f'{path} takes no attention from outside; load it with attention="eager".') from error
        raise ModelError(f"cannot load {path}: {reason(error)}.") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} of its weights, {missing[0]} among them; the download or the save is not whole. Fetch it again."
        )
    if odd := sorted(report["mismatched_keys"]):
        name, found, wanted = odd[0]
        raise ModelError(f"in {path} the weight {name} has shape {tuple(found)} and its config.json asks for {tuple(wanted)}; fetch both again.")
    return model


def library() -> Any:
    """transformers, imported where it is first needed because that takes seconds; Any, because its annotations do not hold up under mypy."""
    return import_module("transformers")


def broken() -> tuple[type[Exception], ...]:
    """What transformers raises over files that are missing, cut off or filled with something else."""
    from huggingface_hub.errors import StrictDataclassError

    plain = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)
    return (*plain, struct.error, SafetensorError, StrictDataclassError)


def place(path: str) -> dict[str, Any]:
    """What transformers needs to find a model.

    Raises:
        ModelError: The path cannot be a model, as far as one can tell without opening one.
    """
    advice = "give a model directory, a `.gguf` file or a hub id."
    there, where = Path(path), {"pretrained_model_name_or_path": path, "trust_remote_code": False}
    if there.suffix == ".gguf":
        if not os.path.isfile(there):
            raise ModelError(f"there is no file {path}; {advice}")
        with there.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is no GGUF file, whatever its name says; {advice}")
        if lacking := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
            raise ModelError(f"reading the GGUF file {path} takes the package {' and '.join(lacking)}; run `pip install 'graven[gguf]'`.")
        return where | {"pretrained_model_name_or_path": str(there.parent), "gguf_file": there.name}
    if path.strip() and os.path.isdir(there):  # of `os.path`, which takes a name that is too long for one that is not there
        if not (there / "config.json").is_file():
            raise ModelError(f"the directory {path} holds no model: it has no config.json. Give a directory written by `save_pretrained`.")
    elif path.strip() and os.path.exists(there):
        raise ModelError(f"{path} is a file and no GGUF file; {advice}")
    elif path.count("/") > 1 or path.startswith((".", "/", "~")) or not path.strip():
        raise ModelError(f"there is no directory {path!r}; {advice}")
    return where


def revision_of(path: str) -> str | None:
    """Commit of a hub model's snapshot in the cache; None for anything local."""
    if os.path.exists(path):
        return None
    from transformers.utils.hub import cached_file, extract_commit_hash

    found: str | None = extract_commit_hash(cached_file(path, "config.json"), None)
    return found
