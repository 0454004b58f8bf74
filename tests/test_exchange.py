"""Exports and imports: the library that an export is for opens it and computes what graven computes; what comes back is what went out."""

import base64
import dataclasses
import io
import json
import re
import shutil
from functools import cache
from pathlib import Path

import asserts
import pytest
import torch
import zoo
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_chat import TEMPLATE

import graven
from graven.answer import Reader
from graven.errors import MemoryFileError, MismatchError, ModelError, OutputError, SpecError
from graven.exchange.base import MADE_FROM, write_folder
from graven.exchange.exporting import FORMATS, exported
from graven.exchange.importing import imported, named_base
from graven.exchange.peft import CONFIG, EMBEDDINGS, WEIGHTS
from graven.exchange.vllm import encoded
from graven.lm.pretrained import Pretrained
from graven.memory.file import Memory
from graven.model import TextModel
from graven.quantize import quantized

# peft 0.21.2 asks for names that transformers 5.24 has replaced
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{name}.*:FutureWarning") for name in ("is_gradient_checkpointing", "past_key_values")]
GOLDEN = Path(__file__).parent / "golden"
EXACT = 1e-5  # of logits of order 1, in float32 through two layers; keys and values that were read back instead of computed anew
# shapes are checked on one architecture: the others differ inside transformers
OTHERS = ["mistral", "gpt2", "qwen3", "gemma2", "opt, projected", "granite", "bloom", "mpt"]
NAMES = ["llama", *(pytest.param(name, marks=pytest.mark.plain) for name in OTHERS)]
RECURRENT = [pytest.param(name, marks=pytest.mark.plain) for name in ("mamba", "jamba")]


def assert_refused(error, sentence, call):
    asserts.assert_refused(error, re.escape(sentence), call)


@cache
def reader_of(name, *, pages=1, slots=5, chat=False):
    """A model of the zoo and a memory that it wrote, of one page or of several."""
    tokenizer = zoo.tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = TextModel(Pretrained(zoo.architecture(name), tokenizer, name=name), slots=slots)
    memory = model.write(" ".join(f"w{3 + i}" for i in range(10)), steps=1, probes=0, chat=chat)
    if pages == 1:
        return model, memory
    state = torch.cat([memory.state * (page + 1) for page in range(pages)])
    return model, Memory(state, dataclasses.replace(memory.about, pages=memory.about.pages * pages))


@cache
def records():
    model = graven.load("records")
    return model, model.write("aB:7x")


@pytest.fixture(scope="module")
def llama():
    return reader_of("llama")


@pytest.fixture(scope="module")
def chatty():
    return reader_of("llama", chat=True)


def queries():
    return torch.tensor([[5, 6, 7, 8], [9, 3, 11, 40]])


def behind(model, vectors, ids):
    """Logits of tokens behind vectors, by graven's own door."""
    rows = torch.cat([vectors.expand(len(ids), -1, -1), model.model.embed(graven.tasks.base.Tokens.full(ids))], dim=1)
    return model.model.logits(model.model.hidden(rows)).detach()


def decoded(text):
    """What a server makes of `prompt_embeds`."""
    tensor = torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True, map_location="cpu")
    assert isinstance(tensor, torch.Tensor)
    assert type(tensor) is torch.Tensor
    assert tensor.dim() == 2
    assert tensor.layout == torch.strided
    return tensor


# PEFT


@pytest.mark.parametrize("name", NAMES + RECURRENT)
def test_peft_computes_from_a_prompt_what_graven_computes_from_the_memory(name, tmp_path):
    model, memory = reader_of(name)
    exported(memory, model, "peft", tmp_path / "adapter")
    opened = PeftModel.from_pretrained(zoo.architecture(name), tmp_path / "adapter")
    ids = queries()
    with torch.no_grad():
        logits = opened(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.equal(logits, behind(model, memory.state, ids))


@pytest.mark.parametrize("name", NAMES)
def test_peft_computes_from_a_cartridge_what_graven_computes_from_the_memory(name, tmp_path):
    model, memory = reader_of(name)
    found = exported(memory, model, "cartridge", tmp_path / "adapter")
    opened = PeftModel.from_pretrained(zoo.architecture(name), tmp_path / "adapter")
    ids = queries()
    with torch.no_grad():
        logits = opened(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    wanted = behind(model, memory.state, ids)[:, found.vectors :]
    assert (logits - wanted).abs().max() <= EXACT * wanted.std()
    assert logits.shape == wanted.shape


def test_the_base_model_goes_on_from_what_peft_has_loaded(llama, tmp_path):
    model, memory = llama
    exported(memory, model, "peft", tmp_path / "adapter")
    opened = PeftModel.from_pretrained(zoo.architecture("llama"), tmp_path / "adapter")
    base, ids = opened.get_base_model(), torch.tensor([[5, 6]])
    rows = torch.cat([opened.get_prompt(1), base.get_input_embeddings()(ids)], dim=1)
    mask = torch.ones(rows.shape[:2], dtype=torch.long)
    said = base.generate(inputs_embeds=rows, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert model.model.decode(said[0].tolist()).startswith(model.ask(memory, "w5 w6", max_tokens=8).text)


@pytest.mark.parametrize("to", ["peft", "cartridge"])
def test_in_a_chat_the_tokens_before_the_memory_are_in_the_adapter(to, chatty, tmp_path):
    model, memory = chatty
    reader = Reader(model.model, memory)
    found = exported(memory, model, to, tmp_path / "adapter")
    assert found.vectors == len(memory.about.before) + 5 > 5
    opened = PeftModel.from_pretrained(zoo.architecture("llama"), tmp_path / "adapter")
    ids = torch.tensor(reader.rows(["w5 w6"]))
    with torch.no_grad():
        logits = opened(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -ids.shape[1] :]
    wanted = behind(model, reader.prefixes, ids)[:, -ids.shape[1] :]
    assert (logits - wanted).abs().max() <= EXACT * wanted.std()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_cartridge_of_a_model_without_keys_and_values_is_refused(name, tmp_path):
    model, memory = reader_of(name)
    assert_refused(ModelError, "export it to peft, which holds the vectors", lambda: exported(memory, model, "cartridge", tmp_path / "a"))
    assert not list(tmp_path.iterdir())


def test_a_cartridge_longer_than_a_window_is_refused(tmp_path):
    model, memory = reader_of("mistral", slots=12)
    assert_refused(ModelError, "for each of 12 columns and each layer", lambda: exported(memory, model, "cartridge", tmp_path / "a"))


def test_a_cartridge_that_the_model_would_not_go_on_from_is_refused(llama, tmp_path, monkeypatch):
    model, memory = llama
    monkeypatch.setattr("graven.exchange.peft.EXACT", 0.0)
    assert_refused(ModelError, "goes on from keys and values otherwise", lambda: exported(memory, model, "cartridge", tmp_path / "a"))


# The way back


@pytest.mark.parametrize("to", ["peft", "tensor"])
@pytest.mark.parametrize("which", ["llama", "chatty"])
def test_an_export_comes_back_as_the_very_memory(to, which, request, tmp_path):
    model, memory = request.getfixturevalue(which)
    exported(memory, model, to, tmp_path / "out")
    back = imported(tmp_path / "out", model.model)
    assert back.content_hash == memory.content_hash
    assert named_base(tmp_path / "out") == "llama"


def test_all_pages_come_back_from_a_tensor_and_one_from_an_adapter(tmp_path):
    model, memory = reader_of("llama", pages=3)
    exported(memory, model, "tensor", tmp_path / "all")
    exported(memory, model, "peft", tmp_path / "one", page=1)
    assert imported(tmp_path / "all", model.model).content_hash == memory.content_hash
    one = imported(tmp_path / "one", model.model)
    assert torch.equal(one.state[0], memory.state[1])
    assert one.about.pages == memory.about.pages[1:2]


def test_a_quantized_memory_travels_as_what_it_stands_for(llama, tmp_path):
    model, memory = llama
    small = quantized(memory, model, bits=4)
    exported(small, model, "peft", tmp_path / "out")
    assert imported(tmp_path / "out", model.model).content_hash == small.content_hash


def test_a_prompt_that_peft_saved_is_read_and_its_text_is_not_known(llama, tmp_path):
    model, memory = llama
    exported(memory, model, "peft", tmp_path / "ours")
    opened = PeftModel.from_pretrained(zoo.architecture("llama"), tmp_path / "ours")
    opened.prompt_encoder["default"].embedding.weight.data.mul_(2)
    opened.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    back = imported(tmp_path / "theirs", model.model)
    assert torch.equal(back.state, 2 * memory.state)
    assert (back.about.tokens, back.about.rule, back.about.outcome) == (0, "imported from a PEFT prompt", "IMPORTED")
    place = back.save(tmp_path / "m.graven")
    assert model.ask(Memory.load(place), "w5", max_tokens=3).text
    assert not model.recite(back).exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 32), (2, 4, 32)])
def test_plain_vectors_of_any_float_type_are_read(dtype, shape, llama, randn, tmp_path):
    vectors = randn(*shape).to(dtype)
    save_file({"inputs_embeds": vectors}, tmp_path / "v.safetensors")
    back = imported(tmp_path / "v.safetensors", llama[0].model)
    assert torch.equal(back.state, vectors.float().reshape(-1, 4, 32))
    assert len(back.about.pages) == len(back.state)
    assert named_base(tmp_path / "v.safetensors") is None


def damaged(change):
    """A folder that was exported and then changed."""

    def make(place, model, memory):
        exported(memory, model, "peft", place)
        change(place)

    return make


def rewritten(**tensors):
    return damaged(lambda place: save_file(tensors, place / WEIGHTS))


def reconfigured(**fields):
    return damaged(lambda place: (place / CONFIG).write_text(json.dumps(fields)))


def flipped(place):
    data = bytearray((place / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (place / WEIGHTS).write_bytes(data)


def halved(place):
    (place / WEIGHTS).write_bytes((place / WEIGHTS).read_bytes()[:-100])


def plain(**tensors):
    return lambda place, *_: save_file(tensors, place)


REFUSED = {
    "nothing": (lambda *_: None, "there is no file"),
    "an empty folder": (lambda place, *_: place.mkdir(), "holds no adapter: it has no adapter_config.json"),
    "a cartridge": (lambda place, model, memory: exported(memory, model, "cartridge", place), "the vectors that they came from cannot be found"),
    "LoRA": (reconfigured(peft_type="LORA"), "is no prompt-tuning adapter (`peft_type` of its adapter_config.json is 'LORA')"),
    "no JSON": (damaged(lambda place: (place / CONFIG).write_text("{")), "`peft_type` of its adapter_config.json is None"),
    "no weights": (damaged(lambda place: (place / WEIGHTS).unlink()), "there is no file"),
    "half of the weights": (damaged(halved), "is no whole safetensors file"),
    "a changed number": (damaged(flipped), "does not match its checksum"),
    "another tensor": (rewritten(x=torch.ones(2, 32)), "does not hold the one matrix prompt_embeddings, but x"),
    "another width": (rewritten(prompt_embeddings=torch.ones(2, 31)), "has vectors of width 31 and llama (LlamaForCausalLM) takes 32"),
    "not finite": (rewritten(prompt_embeddings=torch.full((2, 32), torch.nan)), "numbers that are not finite"),
    "whole numbers": (rewritten(prompt_embeddings=torch.ones(2, 32, dtype=torch.int64)), "vectors of type torch.int64"),
    "a file of something else": (plain(x=torch.ones(2)), "has no `inputs_embeds` [M, D] or [P, M, D], but x [2]"),
    "no vectors": (plain(inputs_embeds=torch.ones(0, 32)), "has no `inputs_embeds`"),
    "padding": (
        plain(inputs_embeds=torch.ones(2, 3, 32), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])),
        "has padding, so its rows are of several lengths",
    ),
    "no safetensors file": (lambda place, *_: place.write_text("hello"), "is no whole safetensors file"),
}


@pytest.mark.plain
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_memory_is_refused_in_one_line(case, llama, tmp_path):
    make, sentence = REFUSED[case]
    make(tmp_path / "in", *llama)
    assert_refused((MemoryFileError, MismatchError), sentence, lambda: imported(tmp_path / "in", llama[0].model))


def test_a_body_of_a_request_is_never_read_because_it_holds_a_pickle(llama, tmp_path):
    exported(llama[1], llama[0], "vllm", tmp_path / "body.json")
    assert_refused(MemoryFileError, "may hold a pickle, which graven never reads", lambda: imported(tmp_path / "body.json", llama[0].model))


def test_a_memory_of_another_model_is_refused(llama, tmp_path):
    exported(llama[1], llama[0], "peft", tmp_path / "out")
    assert_refused(MismatchError, "was written with llama", lambda: imported(tmp_path / "out", zoo.pretrained("llama, tied")))


# vLLM


def test_the_body_of_a_completion_is_the_golden_one():
    model, memory = reader_of("llama")
    golden = json.loads((GOLDEN / "vllm_completions.json").read_text())
    vectors = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4
    prefix = graven.exchange.base.prefix_of(memory, Reader(model.model, memory), page=None)
    body = graven.exchange.vllm.completions_body(prefix, ["w5 w6"], max_tokens=16)
    assert set(body) == set(golden)
    assert golden | {name: body[name] for name in ("prompt_embeds", "cache_salt")} == body
    assert torch.equal(decoded(golden["prompt_embeds"]), vectors)
    assert torch.equal(decoded(encoded(vectors)), vectors)


def test_the_body_of_a_chat_is_the_golden_one(chatty):
    model, memory = chatty
    golden = json.loads((GOLDEN / "vllm_chat.json").read_text())
    prefix = graven.exchange.base.prefix_of(memory, Reader(model.model, memory), page=None)
    body = graven.exchange.vllm.chat_body(prefix, ["w5 w6"], max_tokens=16)
    embeds, text = body["messages"][0]["content"]
    assert torch.equal(decoded(embeds.pop("data")), memory.state[0])
    assert torch.equal(decoded(golden["messages"][0]["content"][0].pop("data")), torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4)
    assert text == {"type": "text", "text": "w5 w6"}
    assert golden | {"cache_salt": body["cache_salt"]} == body


@pytest.mark.parametrize("which", ["llama", "chatty"])
def test_a_body_holds_the_whole_prompt_of_each_question(which, request, tmp_path):
    model, memory = request.getfixturevalue(which)
    reader = Reader(model.model, memory)
    exported(memory, model, "vllm", tmp_path / "b.json", questions=["w5 w6", "w7"])
    body = json.loads((tmp_path / "b.json").read_text())
    for text, row in zip(body["prompt_embeds"], reader.rows(["w5 w6", "w7"]), strict=True):
        tokens = graven.tasks.base.Tokens.of([row])
        assert torch.equal(decoded(text), torch.cat([reader.prefixes[0], model.model.embed(tokens)[0]]))


def test_a_body_without_a_question_holds_the_memory_and_its_salt_is_its_hash(llama, tmp_path):
    model, memory = llama
    exported(memory, model, "vllm", tmp_path / "b.json", max_tokens=7)
    body = json.loads((tmp_path / "b.json").read_text())
    assert torch.equal(decoded(body["prompt_embeds"]), memory.state[0])
    assert (body["max_tokens"], body["cache_salt"]) == (7, memory.content_hash)


def test_other_memories_have_other_salts(llama, tmp_path):
    model, memory = llama
    salts = set()
    for state in (memory.state, -memory.state):
        exported(Memory(state, memory.about), model, "vllm", tmp_path / "b.json")
        salts.add(json.loads((tmp_path / "b.json").read_text())["cache_salt"])
    assert len(salts) == 2


def test_encoded_vectors_are_the_same_bytes_each_time_and_bring_nothing_along(randn):
    state = randn(1000, 32).float()
    few = encoded(state[:4])
    assert few == encoded(state[:4].clone())
    assert len(few) < 5000
    assert decoded(encoded(torch.nn.Parameter(state[:4]))).requires_grad is False


@pytest.mark.parametrize("to", ["vllm", "vllm-chat"])
def test_a_model_that_scales_inside_its_embedding_module_is_refused_because_servers_differ(to, tmp_path):
    model, memory = reader_of("gemma2", chat=True)
    assert_refused(ModelError, "scales its embeddings by 5.65685", lambda: exported(memory, model, to, tmp_path / "b"))


# Plain tensors


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_answers_from_the_tensors_what_graven_answers(name, tmp_path):
    model, memory = reader_of(name)
    asked = ["w5 w6", "w7", "w8 w9 w10"]
    exported(memory, model, "tensor", tmp_path / "t.safetensors", questions=asked)
    given = load_file(tmp_path / "t.safetensors")
    said = model.model.model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)
    wanted = model.ask_many(memory, asked, max_tokens=6)
    assert all(model.model.decode(row).startswith(answer.text) for row, answer in zip(said.tolist(), wanted, strict=True))
    with torch.no_grad():
        last = model.model.model(**given, use_cache=False).logits[:, -1]
    for row, text in zip(last, asked, strict=True):
        alone = behind(model, memory.state, torch.tensor([model.model.encode(text)]))[0, -1]
        assert (row - alone).abs().max() <= EXACT * alone.std()


# What cannot be exported


@pytest.mark.parametrize("to", FORMATS)
def test_records_stay_with_the_model_that_reads_them(to, tmp_path):
    model, memory = records()
    assert_refused(SpecError, "this memory holds records", lambda: exported(memory, model, to, tmp_path / "a"))


@pytest.mark.parametrize(
    ("to", "settings", "sentence"),
    [
        ("gguf", {}, "`to` is 'gguf'; it must be one of peft, cartridge, vllm, vllm-chat, tensor."),
        ("peft", {"questions": ["w5"]}, "questions are given and peft holds none"),
        ("tensor", {"max_tokens": 3}, "`max_tokens` is given and tensor asks for no answer"),
        ("vllm", {"max_tokens": 0}, "`max_tokens` is 0; it must be at least 1."),
        ("peft", {"page": 1}, "`page` is 1 and this memory has 1; give a number from 0 to 0."),
        ("vllm-chat", {}, "this memory was written outside a chat"),
    ],
)
def test_an_export_that_cannot_be_is_refused(to, settings, sentence, llama, tmp_path):
    assert_refused(SpecError, sentence, lambda: exported(llama[1], llama[0], to, tmp_path / "a", **settings))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", [*FORMATS, "tensor with a question"])
def test_several_pages_are_refused_with_their_numbers_where_one_has_room(to, tmp_path):
    model, memory = reader_of("llama", pages=3, chat=True)
    settings = {"questions": ["w5"]} if to.endswith("question") else {}
    if to == "tensor":
        assert exported(memory, model, to, tmp_path / "a").pages == 3
        return
    sentence = "this memory has 3 pages, of 10, 10, 10 tokens"
    assert_refused(SpecError, sentence, lambda: exported(memory, model, to.split()[0], tmp_path / "a", **settings))
    assert exported(memory, model, to.split()[0], tmp_path / "a", page=2, **settings).pages == 1


def test_the_body_of_a_chat_holds_one_question(chatty, tmp_path):
    sentence = "there are 2 questions and the body of a chat holds one"
    assert_refused(SpecError, sentence, lambda: exported(chatty[1], chatty[0], "vllm-chat", tmp_path / "a", questions=["w5", "w6"]))


# Whole or not at all


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_replaces_an_older_one_and_nothing_else(to, chatty, tmp_path):
    model, memory = chatty
    place = tmp_path / "out"
    exported(memory, model, to, place)
    exported(Memory(-memory.state, memory.about), model, to, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    place.write_text("mine")
    assert_refused(OutputError, "exists and graven did not write it", lambda: exported(memory, model, to, place))
    assert place.read_text() == "mine"


def test_a_folder_with_something_of_ones_own_is_left_alone(llama, tmp_path):
    exported(llama[1], llama[0], "peft", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert_refused(OutputError, "exists and graven did not write it", lambda: exported(llama[1], llama[0], "peft", tmp_path / "out"))


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    write_folder(tmp_path / "out", {"a": b"old"}, replaces=lambda _: True)
    rename = Path.rename

    def broken(self, target):
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    assert_refused(OutputError, "No space left on device", lambda: write_folder(tmp_path / "out", {"a": b"new"}, replaces=lambda _: True))
    assert (tmp_path / "out" / "a").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_every_safetensors_export_says_what_it_was_made_from(llama, tmp_path):
    model, memory = llama
    for to in ("peft", "cartridge"):
        exported(memory, model, to, tmp_path / to)
        metadata = graven.exchange.base.read_container(tmp_path / to / WEIGHTS)[1]
        assert metadata[MADE_FROM] == memory.content_hash
    assert load_file(tmp_path / "peft" / WEIGHTS)[EMBEDDINGS].shape == (5, 32)
