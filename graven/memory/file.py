"""The memory file: one safetensors container, and nothing else is ever read.

The tensor `state` holds the slots of each page, [P, M, D] float32; where they were quantized, `codes` and `scales` do (graven/memory/quantize.py).
The metadata entry `graven` is the JSON of an `About`, and `checksum` the SHA-256 of that JSON and of the tensors' bytes. A file is written to a
temporary name and renamed.

Source: ours; the container is documented at https://huggingface.co/docs/safetensors. Tests: tests/test_file.py.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file
from torch import Tensor

from graven.errors import MemoryFileError, MismatchError, Outcome, OutputError, SpecError
from graven.lm.base import LanguageModel, digest
from graven.memory.quantize import DTYPES, dequantize, quantize, stored_bytes
from graven.report import ensure_writable, write_atomically
from graven.settings import build

VERSION = 3
# the version that brought a field; older files have none of it
SINCE = {"objective": 2, "chat": 2, "before": 2, "agreement": 2, "fidelity": 2, "quantization": 3}
SAFE = {torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8", torch.bfloat16: "BF16"}  # as safetensors calls them
MOST_SAID = 200  # characters of what a damaged file holds, in a message
MOST_BYTES = 1 << 32  # no memory is this large; a file that is was not written by graven


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that a memory belongs to.

    Args:
        name: What it was loaded by.
        revision: Commit of a hub model; none where it came from this machine.
        fingerprint: Hash of its configuration, embeddings and tokens.
    """

    name: str
    fingerprint: str
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one page of the memory was written with, and how well it holds.

    Args:
        tokens: Tokens of its text.
        recited: Length of the prefix that the model reproduces exactly when it runs freely from the memory.
        text_hash: SHA-256 of its token ids: tells whether a recited text is the right one, without keeping the text.
        keys: 32-bit hashes of the keys of its records: they tell which page holds a key, and that a key is in none. What a key's value is, only
            the state knows.
    """

    tokens: int
    recited: int
    text_hash: str
    keys: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How close answers come to those that the model gives with the whole text before it.

    Args:
        queries: Queries asked.
        kl: Mean divergence of the next-token distribution from that with the text, in nats a token.
        top_token: Share of the tokens of the answers with the text that are the most probable ones.
        accuracy: Share of queries answered right; none where no right answers were given.
        exact: Share of whole answers that are the same as with the text; none where only one token was compared.
        log_probability: Mean of the answers with the text, nats a token; none where it was not measured.
    Raises:
        SpecError: A number is out of range.
    """

    queries: int
    kl: float
    top_token: float
    accuracy: float | None = None
    exact: float | None = None
    log_probability: float | None = None

    def __post_init__(self) -> None:
        shares = (self.top_token, self.accuracy, self.exact)
        if self.queries < 1 or not all(0 <= share <= 1 for share in shares if share is not None):
            raise SpecError("`queries` is below 1, or a share of them is not between 0 and 1.")
        if not all(math.isfinite(x) for x in (self.kl, self.log_probability or 0.0)):
            raise SpecError("`kl` or `log_probability` is not finite.")


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """What a memory is worth beside its text and beside nothing, on the same probe questions.

    Args:
        memory: From the memory alone.
        closed_book: From the model alone.
        full_context: From the text; it agrees with itself, so only its accuracy and its confidence say something.
        found: Share of the probes whose answers are said to be in memory.
        false_found: The same share of questions that were asked without the text: the memory cannot know these.
    """

    memory: Agreement
    closed_book: Agreement
    full_context: Agreement
    found: float
    false_found: float | None = None


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a state was made smaller, and what that did to it. All else that the file says of the text is from the write, but `recited` and `answered`.

    Args:
        bits: Of each number, 8 or 4.
        group: Numbers that share a scale.
        change: Root mean square of what was done to the numbers, as a share of their own.
        kept: What the model says from the smaller memory beside what it says from the larger one: of texts the recital of each page, of records
            the answer to each key. `exact` is the share of them that stayed the same.
    Raises:
        SpecError: `bits`, `group` or `change` is out of range.
    """

    bits: int
    group: int
    change: float
    kept: Agreement

    def __post_init__(self) -> None:
        if self.bits not in DTYPES or self.group < 1 or not 0 <= self.change < math.inf:
            raise SpecError(f"`bits` is {self.bits}, `group` {self.group}, `change` {self.change}; 8 or 4, at least 1, and finite were expected.")


@dataclass(frozen=True, kw_only=True)
class About:
    """Everything that a memory file says of itself.

    Args:
        kind: "records" or "text".
        base: The model that wrote it.
        slots: Vectors of each page, M.
        pages: One for each row of the state.
        rule: How it was written, in words and numbers.
        steps: Gradient steps taken.
        losses: Mean loss before each step, in nats a token.
        token_accuracy: Share of tokens right when the model is given the true ones before.
        outcome: How the write ended.
        lossless: The tokens decode to the very text that was written; False where the tokenizer cannot spell it.
        records: Records written; none for a text.
        answered: How many of them gave their value back right after the write.
        seed: Of the start.
        seconds: Wall clock of the write.
        versions: Of what wrote it.
        objective: What the write descended.
        chat: A query stands inside the user turn of the model's chat template, behind the memory.
        before: Token ids that stand before the memory. There is one policy for a beginning-of-text token: none is added, the memory stands where
            it would; a chat template brings its own.
        agreement: Of a distilled memory with its prompt, on queries that were held out.
        fidelity: On probe questions; none where none were asked.
        quantization: None where the state is as it was written.
    Raises:
        SpecError: A number is out of range, `outcome` is unknown, or a field is newer than `version`.
    """

    kind: Literal["records", "text"]
    base: Base
    slots: int
    pages: tuple[Page, ...]
    rule: str
    steps: int
    losses: tuple[float, ...]
    token_accuracy: float
    outcome: str
    lossless: bool
    seed: int
    seconds: float
    versions: tuple[str, ...]
    records: int | None = None
    answered: int | None = None
    objective: str = "reconstruct"
    chat: bool = False
    before: tuple[int, ...] = ()
    agreement: Agreement | None = None
    fidelity: Fidelity | None = None
    quantization: Quantization | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) for x in (self.token_accuracy, self.seconds, *self.losses)):
            raise SpecError("`token_accuracy`, `seconds` or `losses` is not finite.")
        if not self.pages or not all(0 <= page.recited <= page.tokens for page in self.pages):
            raise SpecError("`pages` must name at least one page, and no page recites more tokens than it has.")
        if self.outcome not in Outcome.__members__:
            raise SpecError(f"`outcome` is {self.outcome!r}; it must be one of {', '.join(Outcome.__members__)}.")
        if self.kind == "records" and (self.records is None or self.answered is None):
            raise SpecError("`records` and `answered` are missing; a memory of records has both.")
        newer = [name for name, since in SINCE.items() if since > self.version]
        if any(getattr(self, field.name) != field.default for field in dataclasses.fields(self) if field.name in newer):
            raise SpecError(f"`version` is {self.version}, which has none of {', '.join(newer)}; leave it out.")

    @property
    def tokens(self) -> int:
        """Tokens written, all pages together."""
        return sum(page.tokens for page in self.pages)

    @property
    def recited(self) -> int:
        """Length of the prefix of the whole text that is reproduced exactly when the model runs freely."""
        total = 0
        for page in self.pages:
            total += page.recited
            if page.recited < page.tokens:
                break
        return total


@dataclass(frozen=True)
class Memory:
    """Slots and what is known of them. It can reproduce its text by design: treat the file as you would treat the text.

    Args:
        state: One set of slots a page.
        about: Everything else.
    """

    state: Float[Tensor, "P M D"]
    about: About

    @property
    def bytes(self) -> int:
        """Bytes of the state, as the file holds it."""
        how, numbers = self.about.quantization, self.state.numel()
        return 4 * numbers if how is None else stored_bytes(numbers, numbers // self.state.shape[-1], bits=how.bits, group=how.group)

    @property
    def content_hash(self) -> str:
        """SHA-256 of metadata and state."""
        return digest(json_of(self.about).encode(), *[tensor.view(torch.uint8).numpy().tobytes() for tensor in self._stored().values()])

    def belongs_to(self, model: LanguageModel) -> None:
        """Pass where the model is the one that wrote the memory.

        Raises:
            MismatchError: It is another one; the sentence names both.
        """
        base, fingerprint, width = self.about.base, model.fingerprint, self.state.shape[-1]
        if base.fingerprint != fingerprint:
            raise MismatchError(
                f"this memory was written with {base.name} (fingerprint {base.fingerprint[:12]}) and {model.name} has fingerprint "
                f"{fingerprint[:12]}; vectors of one model mean nothing to another. Name the right model with --model, or write the memory anew."
            )
        if width != model.width:
            raise MismatchError(f"this memory has vectors of width {width} and {model.name} takes {model.width}; write the memory anew.")

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            OutputError: The folder is missing or cannot be written to.
            SpecError: The state is said to be quantized, and is not.
        """
        target = Path(path)
        metadata = {"graven": json_of(self.about), "checksum": self.content_hash}
        write_atomically(target, lambda temporary: save_file(self._stored(), temporary, metadata=metadata))
        return target

    def _stored(self) -> dict[str, Tensor]:
        """The tensors of the file; what was quantized gives its own codes again, whatever was not is refused."""
        how = self.about.quantization
        if how is None:
            return {"state": self.state.contiguous()}
        codes, scales = quantize(self.state, bits=how.bits, group=how.group)
        if not torch.equal(dequantize(codes, scales, bits=how.bits, group=how.group), self.state):
            raise SpecError(f"`quantization` speaks of {how.bits} bits and the state has more; leave `quantization` out where the state is changed.")
        return {"codes": codes, "scales": scales}

    @classmethod
    def load(cls, path: str | Path) -> "Memory":
        """Read a file; a state that comes back is bit for bit the one that was saved.

        Raises:
            MemoryFileError: The file is missing, truncated, changed, not finite, of an unknown version, or no memory at all.
        """
        place = Path(path)
        try:
            about, state = _parts(_bytes(place), place)
        except OSError as error:
            raise MemoryFileError(f"cannot read {place}: {error.strerror}. Give a memory file that you may read.") from error
        # OverflowError: an integer that no float holds; RecursionError: JSON of a thousand brackets
        except (SafetensorError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, MemoryFileError):
                raise
            reason = " ".join(str(error)[: 4 * MOST_SAID].split())[:MOST_SAID]  # the library repeats what it was given, whatever its length
            raise MemoryFileError(f"{place} is no whole memory file ({reason}); it was cut short or changed, or is none. Write it anew.") from error
        wanted = [len(about.pages), about.slots]
        if list(state.shape[:2]) != wanted:
            raise MemoryFileError(
                f"{place} has a state of shape {list(state.shape)}, and its metadata speak of {wanted[0]} pages of {wanted[1]} slots; "
                "the file was changed. Write it anew."
            )
        if not bool(torch.isfinite(state).all()):
            raise MemoryFileError(f"{place} holds numbers that are not finite; the write that made it failed. Write it anew with a lower --rate.")
        return cls(state, about)


def text_hash(ids: Sequence[int]) -> str:
    """Hash of token ids."""
    return digest(",".join(map(str, ids)).encode())


def ensure_replaceable(path: Path) -> None:
    """Pass where a memory may be written to `path`: nothing stands there, or an older memory does. Asked before long work, not after it.

    Raises:
        OutputError: Something else stands there, or the folder cannot be written to.
    """
    if os.path.isdir(path):  # of `os.path`, which takes a name that is too long for one that is not there
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    if os.path.exists(path):
        try:
            Memory.load(path)
        except MemoryFileError as error:
            raise OutputError(f"{path} exists and is no memory that can be read, so it is left alone; choose another name.") from error
    ensure_writable(path)


def _bytes(place: Path) -> bytes:
    """The whole file, read once: what happens to it later, in place or not, cannot reach a memory that was read."""
    if not os.path.isfile(place):  # opening a pipe or a device may never return
        raise MemoryFileError(f"there is no file {place}; give the path of a memory that `graven write` made.")
    if (size := os.stat(place).st_size) > MOST_BYTES:
        raise MemoryFileError(f"{place} has {size} bytes, and no memory is larger than {MOST_BYTES}; this is another kind of file.")
    return place.read_bytes()


def _parts(data: bytes, place: Path) -> tuple[About, Float[Tensor, "P M D"]]:
    """Metadata and state of a container. The shapes that it declares are checked against its length before anything is allocated."""
    tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]  # safetensors leaves it untyped
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}  # null is none
    if "graven" not in metadata or sorted(tensors) not in (["state"], ["codes", "scales"]):
        raise MemoryFileError(f"{place} is a safetensors file and no memory; give a file that `graven write` made.")
    about = about_of(metadata["graven"], place)
    how = about.quantization
    wanted = {"state": torch.float32} if how is None else {"codes": DTYPES[how.bits], "scales": torch.bfloat16}
    read = [_tensor(tensors.get(name), name, dtype, place) for name, dtype in wanted.items()]
    if metadata.get("checksum") != digest(metadata["graven"].encode(), *[tensors[name]["data"] for name in wanted]):
        raise MemoryFileError(f"{place} does not match its checksum; it was damaged or changed after it was written. Write it anew.")
    if how is None:
        return about, read[0]
    state = dequantize(*read, bits=how.bits, group=how.group)
    if not all(map(torch.equal, quantize(state, bits=how.bits, group=how.group), read)):
        raise MemoryFileError(f"{place} has codes or scales that no quantization gives; the file was changed. Write it anew.")
    return about, state


def _tensor(stored: dict[str, Any] | None, name: str, dtype: torch.dtype, place: Path) -> Shaped[Tensor, "P M D"]:
    """One tensor of a container, of this type and three axes."""
    kind, shape = (stored["dtype"], stored["shape"]) if stored else ("none", [])
    if stored is None or kind != SAFE[dtype] or len(shape) != 3 or not stored["data"]:
        raise MemoryFileError(
            f"{place} has {name} of type {kind} and shape {str(shape)[:MOST_SAID]}; {SAFE[dtype]} and three axes were expected. Write it anew."
        )
    return torch.frombuffer(stored["data"], dtype=dtype).reshape(shape)


def json_of(about: About) -> str:
    """The metadata; those of an older file as they stood in it, so that its hash stays what it was."""
    fields = dataclasses.asdict(about)
    return json.dumps({name: value for name, value in fields.items() if SINCE.get(name, 1) <= about.version}, sort_keys=True)


def about_of(text: str, place: Path) -> About:
    """The metadata that a file holds.

    Raises:
        MemoryFileError: They are of a version that is not known, or damaged.
    """
    fields = json.loads(text)
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is not int or not 1 <= version <= VERSION:
        found = repr(version)[:MOST_SAID]
        raise MemoryFileError(f"{place} has format version {found} and this graven reads up to {VERSION}; install the graven that wrote it.")
    try:
        return build(About, fields, where="metadata")
    except SpecError as error:
        raise MemoryFileError(f"{place} has damaged metadata, so write it anew: {str(error)[:MOST_SAID]}") from error
