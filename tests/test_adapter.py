"""Adapters: they change nothing at first, are gone inside `without_adapter`, and learn through a write that is read without them."""

import pytest
import torch
import zoo
from torch.nn import functional as F

from graven.errors import ModelError, SpecError
from graven.lm import Pretrained
from graven.lm.adapter import Adapter, add_adapter, without_adapter
from graven.memory.adapted import WriteAdapted
from graven.memory.gradient import SGD, GradMem, GradMemSpec
from graven.tasks.base import Tokens

IDS = torch.tensor([[5, 17, 40, 3], [9, 60, 61, 8]])
RATE = 0.5


def adapted(*, rank=3, drawn=True, name="llama"):
    """A tiny model with an adapter, both halves of which say something where `drawn`."""
    model = Pretrained(zoo.architecture(name, attention="eager"), zoo.tokenizer(), name=name)
    add_adapter(model.model, Adapter(rank=rank), seed=1)
    if drawn:
        generator = torch.Generator().manual_seed(2)
        for weight in wanted(model):
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def wanted(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def logits(model):
    return model.model(input_ids=IDS, use_cache=False).logits.detach()


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "qwen3"])
def test_a_new_adapter_changes_nothing_and_alone_wants_gradients(name):
    plain = Pretrained(zoo.architecture(name, attention="eager"), zoo.tokenizer(), name=name)
    model = adapted(drawn=False, name=name)
    assert torch.equal(logits(model), logits(plain))
    assert model.fingerprint == plain.fingerprint
    assert {weight for key, weight in model.named_parameters() if "lora_" in key} == set(wanted(model))


def test_the_same_seed_draws_the_same_adapter_and_leaves_the_global_randomness_alone():
    one, other = zoo.architecture("llama"), zoo.architecture("llama")
    before = torch.random.get_rng_state()
    for model in (one, other):
        add_adapter(model, Adapter(rank=3), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_without_its_adapter_a_model_is_what_it_was_and_afterwards_what_it_had_become():
    plain = logits(Pretrained(zoo.architecture("llama", attention="eager"), zoo.tokenizer(), name="llama"))
    model = adapted()
    there = logits(model)
    assert not torch.allclose(there, plain, atol=0.01)
    with without_adapter(model):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), there)


def test_an_error_inside_the_block_brings_the_adapter_back():
    def fail(model):
        with without_adapter(model):
            raise KeyError

    model = adapted()
    there = logits(model)
    with pytest.raises(KeyError):
        fail(model)
    assert torch.equal(logits(model), there)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_wants_gradients_is_what_did_before(frozen):
    model = adapted().requires_grad_(not frozen)
    before = [weight.requires_grad for weight in model.parameters()]
    with without_adapter(model):
        pass
    assert [weight.requires_grad for weight in model.parameters()] == before


def test_an_adapter_that_only_writes_learns_through_the_write_as_the_unrolled_steps_say():
    """Two steps written out on the transformers model itself, adapter on, and read with the adapter taken away."""
    model = adapted()
    memory = WriteAdapted(model, GradMemSpec(slots=2, steps=2, rule=SGD(rate=RATE)), seed=0)
    query, answer = torch.tensor([[7], [11]]), torch.tensor([30, 31])
    read = memory.read(memory.write(memory.start(2), Tokens.full(IDS)), Tokens.full(query))[:, -1]
    places = [*wanted(model), memory.initial]
    got = torch.autograd.grad(F.cross_entropy(read, answer), places)

    def run(state, ids):
        embedded = torch.cat([state, model.model.get_input_embeddings()(ids)], 1)
        return model.model(inputs_embeds=embedded, use_cache=False).logits

    state = memory.initial.expand(2, -1, -1)
    for _ in range(2):
        loss = F.cross_entropy(run(state, IDS)[:, 1:-1].flatten(0, 1), IDS.flatten(), reduction="none").view(2, -1).mean(-1).sum()
        state = state - RATE * torch.autograd.grad(loss, state, create_graph=True)[0]
    with without_adapter(model):
        expected_read = run(state, query)[:, -1]
    expected = torch.autograd.grad(F.cross_entropy(expected_read, answer), places)
    torch.testing.assert_close(read, expected_read, rtol=1e-4, atol=1e-5)  # float32 through two layers, three times
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 2e-4 * b.abs().max()
        assert b.abs().max() > 0


def test_a_memory_that_is_read_with_its_adapter_reads_otherwise():
    spec, query = GradMemSpec(slots=2, steps=1, rule=SGD(rate=RATE)), Tokens.full(torch.tensor([[7]]))
    model, plain = adapted(), zoo.pretrained("llama", attention="eager")
    always, writing, base = GradMem(model, spec, seed=0), WriteAdapted(model, spec, seed=0), GradMem(plain, spec, seed=0)
    with torch.no_grad():
        state = always.write(always.start(1), Tokens.full(IDS[:1]))
        assert torch.equal(state, writing.write(writing.start(1), Tokens.full(IDS[:1])))
        assert not torch.allclose(state, base.write(base.start(1), Tokens.full(IDS[:1])))
        assert torch.equal(writing.read(state, query), base.read(state, query))
        assert not torch.allclose(always.read(state, query), base.read(state, query))
        said = [memory.answer(state, query, most=4, stop=())[0] for memory in (writing, base, always)]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(("changes", "part"), [({"rank": -1}, "`rank` is -1"), ({"rank": 1, "scale": 0.0}, "`scale` is 0.0")])
def test_an_adapter_that_cannot_be_is_refused(changes, part):
    with pytest.raises(SpecError, match=part):
        Adapter(**changes)


def test_layers_that_are_not_there_are_named():
    model = zoo.architecture("llama")
    with pytest.raises(ModelError, match="no adapter fits into LlamaForCausalLM"):
        add_adapter(model, Adapter(rank=2, targets=("nothing",)), seed=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("graven.lm.adapter.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"takes the package peft; run `pip install 'graven\[adapters\]'`"):
        add_adapter(zoo.architecture("llama"), Adapter(rank=2), seed=0)
