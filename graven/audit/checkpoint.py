"""Files of one layer and of one teacher: safetensors containers, and nothing else is ever read.

A layer's file holds its parameters under their own names and, in the metadata entry `graven.layer`, the JSON of a version and of its
`GatedRNNSpec`. A teacher's holds `w_v`, `w_k`, `w_q` in float64 and has the entry `graven.teacher`. Both are float32 or float64 and are
written to a temporary name and renamed.

Source: ours; tests/test_audit.py.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graven.audit.kernel import Attention
from graven.errors import GravenError, LayerFileError
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.report import write_atomically
from graven.settings import build
from graven.tasks.teacher import Teacher

VERSION = 1
MOST_BYTES = 1 << 30  # a layer of this size has hundreds of millions of numbers; nothing here could read it


def save_layer(layer: GatedRNN, path: str | Path) -> Path:
    """Write a layer, whole or not at all.

    Raises:
        OutputError: The folder is missing or cannot be written to.
    Source: ours; tests/test_audit.py.
    """
    about = {"version": VERSION, "kind": "GatedRNN", "spec": dataclasses.asdict(layer.spec)}
    return _save({name: p.detach().contiguous() for name, p in layer.named_parameters()}, {"graven.layer": json.dumps(about)}, Path(path))


def load_layer(path: str | Path) -> GatedRNN:
    """Read a layer, bit for bit.

    Raises:
        LayerFileError: The file is missing, no whole layer, of another version or kind, or holds numbers that are not finite.
    Source: ours; tests/test_audit.py.
    """
    place = Path(path)
    tensors, about = _read(place, entry="graven.layer", what="layer")
    if about.get("kind") != "GatedRNN":
        raise LayerFileError(f"{place} holds a {about.get('kind')!r} and only a 'GatedRNN' can be read from a file; pass other layers in Python.")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    try:
        spec = build(GatedRNNSpec, about.get("spec"), where="spec")
        with torch.device("meta"):  # a spec of a false size allocates nothing
            wanted = {name: tuple(p.shape) for name, p in GatedRNN(spec).named_parameters()}
    except GravenError as error:
        raise LayerFileError(f"{place} has a damaged spec, so save it anew: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        name = next(n for n in sorted({*wanted, *found}) if wanted.get(n) != found.get(n))
        raise LayerFileError(f"{place} has {found.get(name)} for `{name}` where its spec has {wanted.get(name)}; it was changed. Save it anew.")
    layer = GatedRNN(spec, dtype=dtypes.pop())
    layer.load_state_dict(tensors)
    return layer


def save_teacher(teacher: Attention | Teacher, path: str | Path) -> Path:
    """Write a teacher as its pupils see it: a `Teacher` with its power divided out. Whole or not at all.

    Raises:
        OutputError: The folder is missing or cannot be written to.
    Source: ours; tests/test_audit.py.
    """
    head = Attention.of(teacher)
    tensors = {name: getattr(head, name).contiguous() for name in ("w_v", "w_k", "w_q")}
    return _save(tensors, {"graven.teacher": json.dumps({"version": VERSION})}, Path(path))


def load_teacher(path: str | Path) -> Attention:
    """Read a teacher.

    Raises:
        LayerFileError: The file is missing, no whole teacher, of another version, or holds numbers that are no attention.
    Source: ours; tests/test_audit.py.
    """
    place = Path(path)
    tensors, _ = _read(place, entry="graven.teacher", what="teacher")
    if sorted(tensors) != ["w_k", "w_q", "w_v"]:
        raise LayerFileError(f"{place} holds {', '.join(sorted(tensors))}; a teacher has w_v, w_k and w_q. Save it with `save_teacher`.")
    try:
        return Attention(**tensors)
    except GravenError as error:
        raise LayerFileError(f"{place} holds no attention: {error}") from error


def _save(tensors: dict[str, Tensor], metadata: dict[str, str], place: Path) -> Path:
    unique = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors refuses tensors that share memory
    write_atomically(place, lambda temporary: save_file(unique, temporary, metadata=metadata))
    return place


def _read(place: Path, *, entry: str, what: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and metadata; one sentence for all that can be wrong with a file of either kind."""
    if not place.is_file():  # opening a pipe or a device may never return
        raise LayerFileError(f"there is no file {place}; give the path of a {what} that `graven.audit.checkpoint.save_{what}` wrote.")
    if (size := place.stat().st_size) > MOST_BYTES:
        raise LayerFileError(f"{place} has {size} bytes, and no {what} is larger than {MOST_BYTES}; this is another kind of file.")
    try:
        with safe_open(place, framework="pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  # no dict
        about = json.loads(metadata.get(entry, "null"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise LayerFileError(f"{place} is no whole {what} file ({reason}); it was cut short or is none. Save it anew.") from error
    if not isinstance(about, dict):
        raise LayerFileError(f"{place} is a safetensors file and no {what}; give one that `graven.audit.checkpoint.save_{what}` wrote.")
    if about.get("version") != VERSION:
        raise LayerFileError(f"{place} has format version {about.get('version')!r} and this graven reads {VERSION}; install the one that wrote it.")
    if len(kinds := {tensor.dtype for tensor in tensors.values()}) != 1 or not kinds <= {torch.float32, torch.float64}:
        raise LayerFileError(f"{place} mixes or has types {', '.join(sorted(map(str, kinds)))}; float32 or float64 was expected. Save it anew.")
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise LayerFileError(f"{place} has entries of `{name}` that are not finite; the training that made it failed. Train it again.")
    return tensors, about
