"""The memory file, changed at random thousands of times: one sentence or a whole memory, at once, and no allocation larger than the file.

Five kinds of change, drawn from a seed: bits, lengths, the length field, the container's header, and the metadata with the checksum made right again,
so that what lies behind the checksum is reached too. GRAVEN_FUZZ=200000 makes so many changes; the suite makes 2000.
"""

import dataclasses
import json
import math
import os
import random
import time
import tracemalloc

import pytest
import torch
from test_file import ABOUT, NEW_FIELDS, PAGE, container

from graven.errors import MemoryFileError
from graven.lm.base import digest
from graven.memory.file import Agreement, Memory, Quantization
from graven.memory.quantize import dequantize, quantize

pytestmark = pytest.mark.plain  # long; the shapes of what runs here are checked by the tests of its parts

CHANGES = int(os.environ.get("GRAVEN_FUZZ", "2000"))
MOST_MESSAGE = 700  # characters
MOST_SECONDS = 1.0  # CPU; a load takes a thousandth of it
SLACK = 300_000  # bytes; Python's own objects for a header and a sentence
TIMES = 9  # bytes in memory for each byte of the file: a state of 4 bits in float32, and the file itself

NUMBERS = [0, 1, -1, 2, 3, 255, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 62, 1 << 63, 1 << 64, 10**30, -(1 << 63), 0.5, 1e308, 1e-320, -0.0]
ODD = [*NUMBERS, None, True, False, "", "x", "F32", "0" * 64, "\u0000", "שלום", "long " * 40_000, [], {}, [[]], [None], {"": 1}, math.inf, math.nan]


def text():
    return Memory(numbers(2, 3, 4), dataclasses.replace(ABOUT, **NEW_FIELDS))


def records():
    pages = (dataclasses.replace(PAGE, keys=(1, 2, 1 << 31)),)
    return Memory(numbers(1, 2, 3), dataclasses.replace(ABOUT, kind="records", records=3, answered=2, pages=pages, slots=2))


def first_version():
    return Memory(numbers(2, 3, 4), dataclasses.replace(ABOUT, version=1))


def small(bits):
    def make():
        how = Quantization(bits=bits, group=32, change=0.01, kept=Agreement(queries=2, kl=0.1, top_token=0.5))
        state = dequantize(*quantize(numbers(2, 3, 40), bits=bits, group=32), bits=bits, group=32)
        return Memory(state, dataclasses.replace(ABOUT, quantization=how))

    return make


VALID = {"text": text, "records": records, "version 1": first_version, "8 bits": small(8), "4 bits": small(4)}


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Changes


def bits_flipped(data, draw):
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def length_changed(data, draw):
    at = draw.randrange(len(data))
    piece = draw.randbytes(draw.choice([0, 1, 3, 8, 4096]))
    return draw.choice(
        [data[:at], data[at:], data[:at] + piece + data[at:], data + piece, data[:at] + piece, data + data, data[:at] + data[at + 8 :]]
    )


def field_changed(data, draw):
    length = int.from_bytes(data[:8], "little") + draw.choice([0, 1, -1, 8, -8])
    return draw.choice([length, draw.randrange(len(data)), draw.getrandbits(64), 1 << draw.randrange(64)]).to_bytes(8, "little") + data[8:]


def header_changed(data, draw):
    header, body = opened(data)
    return container(mutated(header, draw), body)


def metadata_changed(data, draw):
    header, body = opened(data)
    about = json.loads(header["__metadata__"]["graven"])
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        about = mutated(about, draw)
    if draw.random() < 0.2:  # numbers that are not finite, and other numbers
        at = draw.randrange(0, len(body), 4)
        body = body[:at] + draw.choice([b"\0\0\x80\x7f", b"\0\0\xc0\x7f", draw.randbytes(4)]) + body[at + 4 :]
    said = json.dumps(about)
    pieces = [body[slice(*entry["data_offsets"])] for name, entry in sorted(header.items()) if name != "__metadata__"]
    header["__metadata__"] = {"graven": said, "checksum": digest(said.encode(), *pieces)}
    return container(header, body)


CHANGED = [bits_flipped, length_changed, field_changed, header_changed, metadata_changed, metadata_changed]


def opened(data):
    """Header and body of a container."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def mutated(value, draw):
    """JSON with one part of it replaced, taken out, doubled or renamed, wherever it stands."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        rest = {key: part for key, part in value.items() if key != name}
        kind = draw.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return {**rest, name + "x": value[name]}
        return {**rest, name: mutated(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return draw.choice([value[:at] + value[at + 1 :], value * 2, [*value[:at], mutated(value[at], draw), *value[at + 1 :]]])
    return draw.choice(ODD)


# What must hold


def assert_told_or_whole(place, data, *, measured):
    """One sentence, or a memory that a file holds and gives back; within the time and, where it is measured, the room."""
    place.write_bytes(data)
    if measured:
        tracemalloc.start()
    began = time.process_time()
    try:
        loaded = Memory.load(place)
    except MemoryFileError as error:
        loaded, message = None, str(error)
        assert "\n" not in message
        assert len(message) < MOST_MESSAGE
    finally:
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        tracemalloc.stop()
    assert time.process_time() - began < MOST_SECONDS
    assert peak <= TIMES * len(data) + SLACK
    if loaded is None:
        return 0
    assert torch.isfinite(loaded.state).all()
    assert loaded.state.shape[:2] == (len(loaded.about.pages), loaded.about.slots)
    again = Memory.load(loaded.save(place))
    assert (again.about, again.content_hash) == (loaded.about, loaded.content_hash)
    assert torch.equal(again.state, loaded.state)
    return 1


@pytest.mark.parametrize("name", VALID)
def test_a_file_that_was_changed_is_told_or_whole(name, tmp_path):
    data = VALID[name]().save(tmp_path / "whole").read_bytes()
    assert assert_told_or_whole(tmp_path / "file", data, measured=True) == 1
    draw = random.Random(name)
    whole = 0
    for number in range(CHANGES // len(VALID)):
        change = draw.choice(CHANGED)
        before = draw.getstate()
        try:
            whole += assert_told_or_whole(tmp_path / "file", change(data, draw), measured=number % 5 == 0)
        except BaseException as error:
            draw.setstate(before)
            (tmp_path / "found").write_bytes(change(data, draw))
            raise AssertionError(f"{tmp_path}: change {number}, {change.__name__}, of {name}: {type(error).__name__}: {str(error)[:500]}") from error
    assert whole > 0  # some changes are of numbers that may be others
    assert_told_or_whole(tmp_path / "file", data, measured=False)
