"""The memory file: bit for bit there and back, whole or not at all, and one sentence for whatever else is given."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from graven.errors import MemoryFileError, MismatchError, OutputError, SpecError
from graven.lm.base import digest
from graven.memory.file import MOST_BYTES, SINCE, About, Agreement, Base, Fidelity, Memory, Page, ensure_replaceable

PAGE = Page(tokens=7, recited=7, text_hash="0" * 64)
ABOUT = About(
    kind="text",
    base=Base(name="someone/model", fingerprint="ab" * 32, revision="c0ffee"),
    slots=3,
    pages=(PAGE, dataclasses.replace(PAGE, recited=2)),
    rule="Adam(rate=0.1)",
    steps=2,
    losses=(3.5, 0.1),
    token_accuracy=9 / 14,
    outcome="STEPS",
    lossless=True,
    seed=4,
    seconds=0.25,
    versions=("graven 0",),
)
SLACK = 300_000  # Python's own objects for a header and a sentence


@pytest.fixture
def memory(randn):
    return Memory(randn(2, 3, 4).float(), ABOUT)


@pytest.fixture
def place(memory, tmp_path):
    return memory.save(tmp_path / "whole.graven")


def bits(state):
    return state.view(torch.int32).tolist()


def refusal(place):
    with pytest.raises(MemoryFileError) as caught:
        Memory.load(place)
    message = str(caught.value)
    assert message.startswith(("there is no file ", str(place)))
    assert "\n" not in message
    assert len(message) < 700
    return message


def assert_told_or_the_same(place, data, memory):
    """A file of these bytes gives the memory, or one sentence."""
    place.write_bytes(data)
    try:
        loaded = Memory.load(place)
    except MemoryFileError:
        refusal(place)
        return
    assert loaded.about == memory.about
    assert bits(loaded.state) == bits(memory.state)


def forge(place, state, about=None, *, name="state", more=(), **metadata):
    """A file with the right checksum, whatever it holds."""
    text = json.dumps(dataclasses.asdict(ABOUT)) if about is None else about
    checksum = digest(text.encode(), state.contiguous().view(torch.uint8).numpy().tobytes())
    save_file({name: state, **dict(more)}, place, metadata={"graven": text, "checksum": checksum, **metadata})
    return place


def changed(**fields):
    return json.dumps(dataclasses.asdict(ABOUT) | fields)


# There and back

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_a_state_comes_back_bit_for_bit(tmp_path_factory, data, pages, slots, width):
    numbers = data.draw(st.lists(NUMBERS, min_size=pages * slots * width, max_size=pages * slots * width))
    state = torch.tensor(numbers, dtype=torch.float32).reshape(pages, slots, width)
    saved = Memory(state, dataclasses.replace(ABOUT, slots=slots, pages=(PAGE,) * pages))
    loaded = Memory.load(saved.save(tmp_path_factory.getbasetemp() / "round.graven"))
    assert bits(loaded.state) == bits(state)
    assert loaded.about == saved.about
    assert loaded.content_hash == saved.content_hash


@pytest.mark.parametrize("number", [-0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028234e38, -3.4028234e38])
def test_the_odd_floats_come_back_bit_for_bit(number, tmp_path):
    state = torch.full((2, 3, 1), number)
    assert bits(Memory.load(Memory(state, ABOUT).save(tmp_path / "a")).state) == bits(state)


def test_a_state_that_is_not_contiguous_comes_back(randn, tmp_path):
    state = randn(4, 3, 2).float().transpose(0, 2)
    assert torch.equal(Memory.load(Memory(state, ABOUT).save(tmp_path / "a")).state, state)


def test_every_field_comes_back_with_its_type(tmp_path, randn):
    about = dataclasses.replace(ABOUT, kind="records", records=3, answered=2, losses=(), steps=0, base=Base(name="שלום 😀\n", fingerprint=""))
    loaded = Memory.load(Memory(randn(2, 3, 1).float(), about).save(tmp_path / "a")).about
    assert loaded == about
    assert [type(x) for x in dataclasses.astuple(loaded)] == [type(x) for x in dataclasses.astuple(about)]


AGREEMENT = Agreement(queries=4, kl=0.5, top_token=0.75, accuracy=0.5, exact=0.25, log_probability=-1.5)
NEW_FIELDS = {
    "objective": "distill",
    "chat": True,
    "before": (1, 7),
    "agreement": AGREEMENT,
    "fidelity": Fidelity(memory=AGREEMENT, closed_book=AGREEMENT, full_context=AGREEMENT, found=0.5, false_found=0.25),
}


def test_the_fields_of_version_2_come_back_with_their_types(memory, tmp_path):
    assert set(NEW_FIELDS) == {name for name, since in SINCE.items() if since == 2}
    about = dataclasses.replace(ABOUT, **NEW_FIELDS)
    assert Memory.load(Memory(memory.state, about).save(tmp_path / "a")).about == about


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_is_read_and_saved_as_it_was(version, memory, tmp_path):
    fields = {name: value for name, value in dataclasses.asdict(ABOUT).items() if SINCE.get(name, 1) <= version} | {"version": version}
    text = json.dumps(fields, sort_keys=True)
    loaded = Memory.load(forge(tmp_path / "old", memory.state, text))
    assert loaded.about == dataclasses.replace(ABOUT, version=version)
    assert loaded.content_hash == digest(text.encode(), memory.state.numpy().tobytes())
    assert Memory.load(loaded.save(tmp_path / "again")).content_hash == loaded.content_hash


@pytest.mark.plain
def test_whole_numbers_in_the_place_of_floats_load(tmp_path, randn):
    about = dataclasses.replace(ABOUT, seconds=1, token_accuracy=1, losses=(2,))
    assert Memory.load(Memory(randn(2, 3, 1).float(), about).save(tmp_path / "a")).about == about


def test_the_content_hash_is_of_everything_and_of_nothing_else(memory, place):
    assert Memory.load(place).content_hash == memory.content_hash
    others = [Memory(memory.state, dataclasses.replace(ABOUT, seed=5)), Memory(-memory.state, ABOUT), memory]
    assert len({other.content_hash for other in others}) == 3


def test_what_happens_to_a_file_after_it_was_read_does_not_reach_the_memory(place, memory):
    loaded = Memory.load(place)
    with place.open("r+b") as file:
        file.truncate(0)
    assert bits(loaded.state) == bits(memory.state)


@pytest.mark.parametrize("name", ["a b.graven", "naïve 😀.graven", os.fsdecode(b"\xff.graven"), "-o"])
def test_a_file_may_have_any_name(name, memory, tmp_path):
    assert bits(Memory.load(memory.save(tmp_path / name)).state) == bits(memory.state)


def test_a_symbolic_link_leads_to_the_memory(place, memory, tmp_path):
    (tmp_path / "link").symlink_to(place)
    assert bits(Memory.load(tmp_path / "link").state) == bits(memory.state)


def test_a_file_is_not_much_larger_than_its_state(tmp_path):
    state = torch.ones(2, 3, 10_000)
    assert Memory(state, ABOUT).save(tmp_path / "a").stat().st_size < 4 * state.numel() + 2000


def test_the_tokens_recited_end_at_the_first_page_with_a_miss():
    pages = [dataclasses.replace(PAGE, recited=n) for n in (7, 3, 7)]
    assert dataclasses.replace(ABOUT, pages=tuple(pages)).recited == 10
    assert dataclasses.replace(ABOUT, pages=tuple(pages)).tokens == 21


# Whole or not at all


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(place, memory, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    before = place.read_bytes()
    monkeypatch.setattr("graven.memory.file.save_file", full)
    with pytest.raises(OutputError, match="No space left on device"):
        memory.save(place)
    assert place.read_bytes() == before
    assert list(place.parent.iterdir()) == [place]


def test_a_save_that_is_interrupted_leaves_the_old_file_and_nothing_else(place, memory, monkeypatch):
    def half(_, temporary, **__):
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt

    before = place.read_bytes()
    monkeypatch.setattr("graven.memory.file.save_file", half)
    with pytest.raises(KeyboardInterrupt):
        memory.save(place)
    assert place.read_bytes() == before
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("name", ["missing/a", "file/a", "n" * 300])
def test_a_memory_is_not_saved_where_no_file_can_be(name, memory, tmp_path):
    (tmp_path / "file").write_text("")
    for call in (memory.save, ensure_replaceable):
        with pytest.raises(OutputError, match="cannot write"):
            call(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_a_memory_or_nothing_is_replaced(place, tmp_path):
    ensure_replaceable(place)
    ensure_replaceable(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    for name, sentence in (("notes.txt", "exists and is no memory that can be read, so it is left alone"), (".", "is a folder")):
        with pytest.raises(OutputError, match=sentence):
            ensure_replaceable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "whole.graven"]


# Damage


def test_a_file_cut_at_any_length_is_told(place, memory, tmp_path):
    data = place.read_bytes()
    for length in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        assert "is no whole memory file" in refusal(tmp_path / "cut")
    assert_told_or_the_same(tmp_path / "cut", data, memory)


@pytest.mark.parametrize("change", ["flip", "insert", "delete"])
def test_a_file_with_a_few_wrong_bytes_is_told_or_is_the_same_memory(change, place, memory, tmp_path, generator):
    whole = place.read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        at, value, count = (int(torch.randint(high, (1,), generator=generator)) for high in (len(data), 255, 4))
        match change:
            case "flip":
                data[at] ^= value + 1
            case "insert":
                data[at:at] = bytes([value] * (count + 1))
            case "delete":
                del data[at : at + count + 1]
        assert_told_or_the_same(tmp_path / "damaged", bytes(data), memory)


def test_a_flipped_bit_of_the_state_is_always_told(place, tmp_path):
    data = place.read_bytes()
    for at in range(len(data) - 96, len(data)):
        (tmp_path / "damaged").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert "does not match its checksum" in refusal(tmp_path / "damaged")


def test_another_memory_in_the_place_of_this_one_is_seen(place, memory, tmp_path):
    other = Memory(memory.state + 1, memory.about).save(tmp_path / "other").read_bytes()
    with pytest.raises(AssertionError):
        assert_told_or_the_same(place, other, memory)


def container(header, data=b""):
    """A safetensors file of any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def tensor(shape, end, kind="F32"):
    return {"state": {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}


HOSTILE = {
    "empty": b"",
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a header of 2^40 bytes": (1 << 40).to_bytes(8, "little") + b"{}" + bytes(1000),
    "a header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a shape of 2^60 numbers": container(tensor([1 << 20, 1 << 20, 1 << 20], 4), bytes(4)),
    "a shape beyond 2^64": container(tensor([1 << 62, 1 << 62, 4], 4), bytes(4)),
    "a negative shape": container(tensor([-1, 3, 4], 4), bytes(4)),
    "offsets beyond the file": container(tensor([1, 1 << 30, 1], 1 << 32), bytes(4)),
    "offsets that run backwards": container({"state": {"dtype": "F32", "shape": [1, 1, 1], "data_offsets": [4, 0]}}, bytes(4)),
    "no metadata": container(tensor([1, 1, 1], 4), bytes(4)),
    "no tensor": container({"__metadata__": {"graven": "{}"}}),
    "metadata that is no text": container({"__metadata__": {"graven": 3}} | tensor([1, 1, 1], 4), bytes(4)),
    "metadata that is a list": container({"__metadata__": []} | tensor([1, 1, 1], 4), bytes(4)),
    "a header of brackets": container(b"[" * 100_000),
    "a header that is no UTF-8": container(b'{"\xff":1}'),
    "an unknown type": container(tensor([1, 1, 1], 4, kind="F33"), bytes(4)),
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    "a zip": b"PK\x03\x04" + bytes(60),
    "text": b"aa:11\n" * 40,
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_is_no_memory_is_told_without_an_allocation_larger_than_itself(data, tmp_path):
    (tmp_path / "hostile").write_bytes(data)
    refusal(tmp_path / "hostile")
    tracemalloc.start()
    try:
        refusal(tmp_path / "hostile")
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + SLACK
    finally:
        tracemalloc.stop()


LIMITED = """
import resource, sys
from graven.errors import MemoryFileError
from graven.memory.file import Memory
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
for place in sys.argv[1:]:
    try:
        print(tuple(Memory.load(place).state.shape))
    except MemoryFileError:
        print("told")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of a process from /proc")
def test_a_process_with_little_memory_left_survives_every_hostile_file(place, tmp_path):
    places = [place]
    for number, data in enumerate(HOSTILE.values()):
        places.append(tmp_path / str(number))
        places[-1].write_bytes(data)
    done = subprocess.run([sys.executable, "-c", LIMITED, *places], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["(2, 3, 4)", *["told"] * len(HOSTILE), ""]


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ("", "is no whole memory file (Expecting value"),
        ("{", "is no whole memory file"),
        ("[" * 100_000, "is no whole memory file (maximum recursion depth exceeded"),
        ("[]", "has format version None"),
        ("null", "has format version None"),
        (changed(version=4), "has format version 4 and this graven reads up to 3; install the graven that wrote it."),
        (changed(version="1"), "has format version '1'"),
        (changed(version=True), "has format version True"),
        (changed(version=0), "has format version 0"),
        (changed(version=1, chat=True), "`version` is 1, which has none of objective, chat,"),
        (changed(agreement={"queries": 0, "kl": 0.0, "top_token": 1.0}), "`queries` is below 1"),
        (changed(agreement={"queries": 3, "kl": 0.0, "top_token": 1.5}), "a share of them is not between 0 and 1"),
        (changed(agreement={"queries": 3, "kl": math.nan, "top_token": 1.0}), "`kl` or `log_probability` is not finite"),
        (changed(fidelity={"found": 1.0}), "`metadata.fidelity` lacks the key"),
        (changed(seconds="long"), "`metadata.seconds` is 'long'; a value of type float was expected."),
        (changed(steps=1.5), "`metadata.steps` is 1.5; a value of type int was expected."),
        (changed(seconds=10**400), "has 401 digits, and no float is that large"),
        (changed(seconds=0).replace('"seconds": 0', '"seconds": ' + "1" * 5000), "is no whole memory file (Exceeds the limit"),
        (changed(seconds=math.nan), "is not finite"),
        (changed(losses=[math.inf]), "is not finite"),
        (changed(losses="12"), "`metadata.losses` is '12'; a list was expected."),
        (changed(kind="film"), "`metadata.kind` is 'film'; it must be one of 'records', 'text'."),
        (changed(kind="records"), "a memory of records has both"),
        (changed(outcome="WON"), "`outcome` is 'WON'"),
        (changed(colour="red"), "has the unknown key `colour`"),
        (changed(base=None), "`metadata.base` is None; a table was expected."),
        (changed(base={"name": "x"}), "lacks the key `fingerprint`"),
        (changed(pages=[]), "at least one page"),
        (changed(pages=[dataclasses.asdict(PAGE)]), "speak of 1 pages of 3 slots"),
        (changed(pages=[dataclasses.asdict(PAGE) | {"recited": 8}] * 2), "no page recites more tokens than it has"),
        (changed(pages=[dataclasses.asdict(PAGE) | {"recited": -1}] * 2), "no page recites more tokens than it has"),
        (changed(slots=4), "speak of 2 pages of 4 slots"),
        (changed(slots=10**30), "speak of 2 pages of 1000000000000000000000000000000 slots"),
    ],
)
def test_metadata_that_cannot_be_are_told(about, sentence, memory, tmp_path):
    assert sentence in refusal(forge(tmp_path / "forged", memory.state, about))


@pytest.mark.parametrize("missing", [field.name for field in dataclasses.fields(About) if field.default is dataclasses.MISSING])
def test_metadata_without_one_of_their_fields_are_told(missing, memory, tmp_path):
    about = {name: value for name, value in dataclasses.asdict(ABOUT).items() if name != missing}
    assert f"lacks the key `{missing}`" in refusal(forge(tmp_path / "forged", memory.state, json.dumps(about)))


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (torch.full((2, 3, 4), math.nan), "holds numbers that are not finite"),
        (torch.full((2, 3, 4), math.inf), "holds numbers that are not finite"),
        (torch.ones(2, 3, 4, dtype=torch.float64), "has state of type F64 and shape [2, 3, 4]; F32 and three axes were expected."),
        (torch.ones(2, 3, 4, dtype=torch.bfloat16), "has state of type BF16"),
        (torch.ones(2, 3, 4, dtype=torch.int32), "has state of type I32"),
        (torch.ones(2, 3), "and shape [2, 3]"),
        (torch.ones(2, 3, 4, 1), "and shape [2, 3, 4, 1]"),
        (torch.ones(2, 3, 0), "and shape [2, 3, 0]"),
        (torch.ones(3, 2, 4), "has a state of shape [3, 2, 4], and its metadata speak of 2 pages of 3 slots"),
    ],
    ids=["NaN", "infinity", "float64", "bfloat16", "int32", "two axes", "four axes", "no numbers", "other shape"],
)
def test_a_state_that_cannot_be_is_told_though_its_checksum_is_right(state, sentence, tmp_path):
    assert sentence in refusal(forge(tmp_path / "forged", state))


def test_a_container_of_something_else_is_told(memory, tmp_path):
    for made in (
        forge(tmp_path / "name", memory.state, name="weight"),
        forge(tmp_path / "more", memory.state, more=[("extra", torch.ones(1))]),
    ):
        assert "is a safetensors file and no memory" in refusal(made)
    assert "does not match its checksum" in refusal(forge(tmp_path / "sum", memory.state, checksum=""))
    assert_told_or_the_same(tmp_path / "right", forge(tmp_path / "right", memory.state).read_bytes(), memory)


# What is no file at all


@pytest.mark.parametrize("place", ["missing", ".", "missing/deeper", "/dev/zero", "/dev/null", "n" * 300, "a\0b", "loop", "dangling", "pipe"])
def test_what_is_no_file_is_told_at_once(place, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / place).startswith("there is no file ")


def test_a_file_larger_than_any_memory_is_told_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert "no memory is larger than" in refusal(tmp_path / "sparse")


# Whose it is


def test_a_memory_of_another_model_is_refused_by_name(memory):
    with pytest.raises(MismatchError) as caught:
        memory.belongs_to(cases.small())
    assert "written with someone/model (fingerprint abababababab) and small has fingerprint" in str(caught.value)


def test_a_memory_of_another_width_is_refused(memory):
    model = cases.small()
    base = dataclasses.replace(ABOUT.base, fingerprint=model.fingerprint)
    about = dataclasses.replace(ABOUT, base=base)
    with pytest.raises(MismatchError, match="vectors of width 4 and small takes 32"):
        Memory(memory.state, about).belongs_to(model)
    Memory(torch.ones(2, 3, 32), about).belongs_to(model)


@pytest.mark.parametrize("field", [{"losses": (math.inf,)}, {"outcome": "WON"}, {"pages": ()}, {"kind": "records"}])
def test_what_could_not_be_loaded_is_never_made(field):
    with pytest.raises(SpecError):
        dataclasses.replace(ABOUT, **field)
