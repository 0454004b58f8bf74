"""Memories in 8 and 4 bits: what the numbers become, what the file holds, and what it costs.

Marked `plain` is what has its shapes checked elsewhere: trying all keys, and a write of hundreds of steps, take seconds where each call is checked.
"""

import dataclasses
import json

import cases
import pytest
import torch
from asserts import assert_refused
from safetensors import safe_open
from test_file import ABOUT, bits, changed, forge

import graven
from graven.errors import MemoryFileError, SpecError, TextError
from graven.memory.file import Agreement, Memory, Quantization
from graven.memory.quantize import dequantize, largest_code, quantize, stored_bytes
from graven.model import RecordsModel, TextModel
from graven.quantize import agreement_of, compared, held_keys, quantized

RECORDS = "aB:7x\nc3:Qm\nZz:00\nhi:yo\nk9:Lp\nMe:mo\nry:42\nGr:aV\n"
WORDS = "w5 w17 w3 w40 w41 w9"
WIDTHS = [2, 16, 32, 40, 66, 128]
SCALES = [1e-45, 1e-39, 0.02, 1.0, 1e30]
KEPT = Agreement(queries=2, kl=0.0, top_token=1.0, exact=0.5)


@pytest.fixture(scope="module")
def records():
    model = graven.load("records")
    assert isinstance(model, RecordsModel)
    return model, model.write(RECORDS)


@pytest.fixture(scope="module")
def words():
    model = TextModel(cases.sharp(cases.llama()), slots=8)
    return model, model.write(WORDS)


def there_and_back(x, number, group=32):
    return dequantize(*quantize(x, bits=number, group=group), bits=number, group=group)


# The numbers


@pytest.mark.parametrize("number", [8, 4])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_number_moves_by_half_a_step_at_most(number, width, randn):
    x = randn(2, 3, width).float()
    steps = torch.stack([part.abs().amax(-1) for part in x.split(32, dim=-1)], dim=-1) / largest_code(number)
    most = steps.repeat_interleave(32, dim=-1)[..., :width]
    # a scale is off by 2^-9 of itself at most, and so the largest number by 2^-9 of itself
    assert bool(((there_and_back(x, number) - x).abs() <= most / 2 + most * largest_code(number) * 2**-8).all())


@pytest.mark.parametrize("number", [8, 4])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
def test_what_was_quantized_gives_the_same_bits_again(number, width, scale, randn):
    once = there_and_back(randn(2, 3, width).float() * scale, number)
    assert bits(there_and_back(once, number)) == bits(once)


def test_codes_of_four_bits_are_those_of_plain_rounding(randn):
    x = randn(1, 1, 32).float()
    codes, scales = quantize(x, bits=4)
    wanted = [round(value / float(scales)) for value in x.flatten().tolist()]
    assert [(int(byte) & 15) - 8 for byte in codes.flatten()] == wanted[::2]
    assert [(int(byte) >> 4) - 8 for byte in codes.flatten()] == wanted[1::2]


def test_zeros_stay_zeros():
    assert not there_and_back(torch.zeros(1, 2, 8), 4).any()


@pytest.mark.parametrize(("number", "width"), [(8, 32), (8, 33), (4, 32), (4, 66)])
def test_the_bytes_are_those_of_the_tensors(number, width, randn):
    tensors = quantize(randn(2, 3, width).float(), bits=number)
    assert stored_bytes(6 * width, 6, bits=number, group=32) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"bits": 3}, "`bits` is 3; it must be 8 or 4."),
        ({"bits": 8, "group": 0}, "`group` is 0; it must be at least 1."),
        ({"bits": 4}, "the vectors have the odd width 3 and two numbers of 4 bits share a byte; use 8 bits."),
    ],
)
def test_what_cannot_be_quantized_is_refused(settings, sentence):
    with pytest.raises(SpecError, match=f"^{sentence}$"):
        quantize(torch.ones(1, 3), **settings)


@pytest.mark.parametrize("number", [8, 4])
def test_the_largest_number_of_float32_stays_finite(number):
    x = torch.tensor([[3.4028234e38, -3.39e38]])
    assert bool(there_and_back(x, number).isfinite().all())


def test_scales_that_do_not_fit_the_codes_are_refused():
    codes, scales = quantize(torch.ones(1, 64), bits=8)
    with pytest.raises(SpecError, match=r"scales of shape \[1, 1\] for codes of shape \[1, 64\] in groups of 32"):
        dequantize(codes, scales[:, :1], bits=8, group=32)


# The file


@pytest.mark.parametrize(("number", "share"), [(8, 0.28), (4, 0.15)])
def test_a_quantized_file_is_smaller_and_comes_back_bit_for_bit(number, share, randn, tmp_path):
    state = randn(2, 3, 2048).float()
    about = dataclasses.replace(ABOUT, quantization=Quantization(bits=number, group=32, change=0.1, kept=KEPT))
    small = Memory(there_and_back(state, number), about)
    place = small.save(tmp_path / "small")
    loaded = Memory.load(place)
    assert bits(loaded.state) == bits(small.state)
    assert (loaded.about, loaded.content_hash, loaded.bytes) == (about, small.content_hash, small.bytes)
    assert place.stat().st_size < share * 4 * state.numel() + 2000
    assert loaded.bytes < share * 4 * state.numel()


def test_a_state_that_was_changed_since_is_not_saved_as_if_it_were_quantized(randn, tmp_path):
    about = dataclasses.replace(ABOUT, quantization=Quantization(bits=8, group=32, change=0.1, kept=KEPT))
    with pytest.raises(SpecError, match="speaks of 8 bits and the state has more"):
        Memory(randn(2, 3, 64).float(), about).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


FIELDS = {"bits": 8, "group": 32, "change": 0.1, "kept": dataclasses.asdict(KEPT)}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bits": 5}, "`bits` is 5"),
        ({"bits": 4}, "has codes of type I8"),
        ({"group": 7}, "scales of shape"),
        ({"change": -1.0}, "`change` -1.0"),
        (None, "has state of type none"),
    ],
)
def test_a_quantized_file_that_contradicts_itself_is_refused(fields, sentence, randn, tmp_path):
    codes, scales = quantize(randn(2, 3, 32).float(), bits=8)
    about = changed(quantization=None if fields is None else FIELDS | fields)
    place = forge(tmp_path / "odd", codes, about, name="codes", more=[("scales", scales)])
    checksum = graven.memory.file.digest(about.encode(), *[part.view(torch.uint8).numpy().tobytes() for part in (codes, scales)])
    forge(place, codes, about, name="codes", more=[("scales", scales)], checksum=checksum)
    with pytest.raises(MemoryFileError, match=sentence):
        Memory.load(place)


@pytest.mark.plain
def test_a_quantized_file_whose_codes_were_changed_is_refused(records, tmp_path):
    place = quantized(records[1], records[0], bits=8).save(tmp_path / "m")
    data = bytearray(place.read_bytes())
    data[-20] ^= 1
    place.write_bytes(data)
    with pytest.raises(MemoryFileError, match="does not match its checksum"):
        Memory.load(place)


@pytest.mark.plain
def test_the_file_holds_codes_and_scales_and_says_what_it_cost(records, tmp_path):
    place = quantized(records[1], records[0], bits=4).save(tmp_path / "m")
    with safe_open(place, "pt") as file:
        assert {name: file.get_tensor(name).dtype for name in file.keys()} == {"codes": torch.uint8, "scales": torch.bfloat16}  # noqa: SIM118
        about = json.loads(file.metadata()["graven"])
    assert about["quantization"]["bits"] == 4
    assert about["quantization"]["kept"]["queries"] == 8


# What it costs


@pytest.mark.plain
def test_every_key_is_found_and_asked(records):
    model, memory = records
    assert sorted(held_keys(model, memory)[0]) == sorted(line.split(":")[0] for line in RECORDS.split())


def test_eight_bits_cost_the_records_nothing(records):
    model, memory = records
    small = quantized(memory, model, bits=8)
    assert small.about.answered == 8
    assert small.about.quantization.kept.exact == 1.0
    assert [a.text for a in model.ask_many(small, ["aB", "Gr"])] == ["7x", "aV"]


@pytest.mark.plain
def test_eight_bits_leave_a_short_text_exact(words):
    model, memory = words
    small = quantized(memory, model, bits=8)
    assert (small.about.recited, small.about.quantization.kept.exact) == (6, 1.0)
    assert model.recite(small).exact
    assert 0 < small.about.quantization.change < 0.01


@pytest.mark.plain
@pytest.mark.parametrize("kind", ["records", "words"])
def test_damage_is_seen(kind, request):
    model, memory = request.getfixturevalue(kind)
    found = compared(model, memory, Memory(torch.zeros_like(memory.state), memory.about))
    kept = agreement_of(model.memory.model if kind == "records" else model.model, found)
    assert kept.exact < 1
    assert kept.kl > 0.1


@pytest.mark.plain
def test_a_coarse_memory_says_what_it_still_recites(words, monkeypatch):
    model, memory = words
    monkeypatch.setattr("graven.memory.quantize.largest_code", lambda _: 3)
    small = quantized(memory, model, bits=8)
    rows = [model.model.encode(model.recite(m).text) for m in (memory, small)]
    common = next((i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b), len(rows[0]))
    assert small.about.recited == common < memory.about.tokens


@pytest.mark.plain
def test_a_memory_is_quantized_once(records):
    model, memory = records
    with pytest.raises(SpecError, match="this memory has 8 bits already"):
        quantized(quantized(memory, model, bits=8), model, bits=4)


@pytest.mark.plain
def test_with_the_text_what_is_recited_is_held_against_it(words):
    model, memory = words
    wrong = dataclasses.replace(memory.about.pages[0], recited=2)  # as if the write had ended early
    unsure = Memory(memory.state, dataclasses.replace(memory.about, pages=(wrong,)))
    assert quantized(unsure, model, bits=8).about.recited == 2
    assert quantized(unsure, model, bits=8, against=WORDS).about.recited == 6
    assert_refused(TextError, "page 1 of 1 of the text is another", lambda: quantized(memory, model, bits=8, against="w1 w2 w3 w4 w5 w6"))


@pytest.mark.plain
def test_too_many_possible_keys_need_the_text(records, monkeypatch):
    monkeypatch.setattr("graven.quantize.MOST_KEYS", 100)
    model, memory = records
    assert_refused(
        SpecError, "too many possible keys to try them all; give the text that was written with --against", lambda: held_keys(model, memory)
    )
    assert quantized(memory, model, bits=8, against=RECORDS).about.quantization.kept.queries == 8
    assert_refused(TextError, "the text lacks 7 of the keys that were written", lambda: held_keys(model, memory, against="aB:7x"))


@pytest.mark.plain
def test_a_few_steps_make_a_coarse_memory_recite_again(words, monkeypatch):
    monkeypatch.setattr("graven.memory.quantize.largest_code", lambda _: 2)  # five values a number
    model, memory = words
    plain, taken = (quantized(memory, model, bits=8, steps=steps) for steps in (0, 200))
    assert plain.about.quantization.kept.exact == 0.0  # else nothing is shown
    assert taken.about.quantization.kept.exact == 1.0
    assert taken.about.recited == 6
    assert model.recite(taken).exact


@pytest.mark.plain
def test_steps_are_not_taken_where_none_are_needed(words):
    model, memory = words
    plain, taken = (quantized(memory, model, bits=8, steps=steps) for steps in (0, 50))
    assert bits(plain.state) == bits(taken.state)


@pytest.mark.plain
@pytest.mark.parametrize("steps", [-1, 5])
@pytest.mark.parametrize("kind", ["records", "words"])
def test_steps_need_a_text_that_is_recited_exactly(kind, steps, request):
    model, memory = request.getfixturevalue(kind)
    page = dataclasses.replace(memory.about.pages[0], recited=0)
    unsure = Memory(memory.state, dataclasses.replace(memory.about, pages=(page,)))
    assert_refused(SpecError, "steps need a text that is recited exactly", lambda: quantized(unsure, model, bits=8, steps=steps))
