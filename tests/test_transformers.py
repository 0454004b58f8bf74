"""Our attention inside models of transformers, against their own "eager"."""

import copy

import pytest
import torch
import transformers
import zoo
from asserts import assert_near, assert_refused
from torch.nn import functional as F

from graven.errors import ModelError, OrderError
from graven.layers.transformers import attend, register_attention
from graven.lm import load_pretrained
from graven.lm.pretrained import Pretrained
from graven.memory.gradient import SGD, GradMem, GradMemSpec
from graven.tasks.base import Tokens

ROUNDING = 1e-5  # float32 through two layers
TWICE = 2e-4  # and through the derivatives of two steps
NAMES = ["llama", "gpt2", "gpt-neox", "mistral", "gemma2", "qwen2", "opt", "jamba"]


@pytest.fixture(autouse=True)
def registered():
    register_attention()


def pair(name):
    """The same weights with their own attention and with ours."""
    own = zoo.architecture(name, attention="eager")
    ours = copy.deepcopy(own)
    ours.set_attn_implementation("graven")
    return own, ours


def embedded(model, *, rows, columns):
    ids = (torch.arange(rows * columns) % (zoo.VOCABULARY - 3) + 3).view(rows, columns)
    return model.get_input_embeddings()(ids).detach(), ids


def assert_gradients_near(found, wanted):
    """Every one to within TWICE of its own largest entry; nothing that takes part has no gradient."""
    largest = [max(x.abs().max().item(), 1e-6) for x in wanted]
    assert sum(x > 1e-4 for x in largest) > len(largest) / 2
    assert_near([x / one for x, one in zip(found, largest, strict=True)], [x / one for x, one in zip(wanted, largest, strict=True)], tolerance=TWICE)


def test_assert_gradients_near_fails_on_a_small_difference():
    x = torch.full((2,), 1e-3)
    with pytest.raises(AssertionError, match="off by"):
        assert_gradients_near([1.001 * x], [x])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_a_meta_gradient_behind_left_padding_are_those_of_eager(name):
    found = []
    for model in pair(name):
        x, ids = embedded(model, rows=2, columns=12)  # longer than the window of mistral and gemma2
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        slots = x.clone().requires_grad_()

        def loss(rows, model=model, mask=mask, ids=ids):
            logits = model(inputs_embeds=rows, attention_mask=mask, use_cache=False).logits
            kept = mask[:, :-1].bool()
            return logits[mask.bool()], F.cross_entropy(logits[:, :-1][kept], ids[:, 1:][kept])

        logits, before = loss(slots)
        (gradient,) = torch.autograd.grad(before, slots, create_graph=True)
        _, after = loss(slots - 0.5 * gradient)
        learned = [slots, *(p for p in model.parameters() if p.dim() > 1)]
        found.append((logits, torch.autograd.grad(after, learned, materialize_grads=True)))
    assert_near([found[1][0]], [found[0][0]], tolerance=ROUNDING)
    assert_gradients_near(found[1][1], found[0][1])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_text_generated_from_a_cache_is_that_of_eager(name):
    own, ours = pair(name)
    _, ids = embedded(own, rows=2, columns=6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **settings), own.generate(ids, **settings))


def test_a_pretrained_model_is_meta_trained_with_no_other_change(tmp_path):
    zoo.architecture("llama").save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    gradients = []
    for attention in ("eager", "graven"):
        model = load_pretrained(str(tmp_path), attention=attention)
        assert model.twice_differentiable
        memory = GradMem(model, GradMemSpec(slots=3, steps=2, rule=SGD(rate=0.5)))
        state = memory.write(memory.start(2), Tokens.of([[5, 6, 7, 8], [9, 10]]))
        loss = memory.read(state, Tokens.of([[5], [9]])).square().mean()
        learned = [memory.initial, *model.model.parameters()]
        gradients.append(torch.autograd.grad(loss, learned, materialize_grads=True))
    assert_gradients_near(gradients[1], gradients[0])


@pytest.mark.parametrize("name", ["bloom", "mpt", "mamba"])
def test_a_model_that_goes_round_the_interface_is_refused(name):
    assert_refused(ModelError, f'{name}.* never calls .*attention="eager"', lambda: zoo.pretrained(name, attention="graven"))


def test_a_model_with_a_table_of_attentions_of_its_own_is_refused(tmp_path):
    zoo.architecture("falcon").save_pretrained(tmp_path)
    assert_refused(
        ModelError, 'takes no attention from outside; load it with attention="eager"', lambda: load_pretrained(str(tmp_path), attention="graven")
    )


def test_a_model_whose_attention_has_sinks_is_refused():
    assert_refused(ModelError, "gpt-oss.*`s_aux` came with an attention that does not know it", lambda: zoo.pretrained("gpt-oss", attention="graven"))


def test_a_model_that_computes_something_else_with_it_is_refused(monkeypatch):
    raw = zoo.architecture("llama", attention="graven")
    monkeypatch.setattr("graven.layers.transformers.boolean_mask", lambda **_: None)  # as if the mask had not been registered
    assert_refused(ModelError, "computes something else", lambda: Pretrained(raw, zoo.tokenizer(), name="llama"))


def test_dropout_is_refused(randn):
    q = randn(1, 2, 3, 4)
    assert_refused(OrderError, "dropout 0.1", lambda: attend(torch.nn.Module(), q, q, q, None, dropout=0.1))


def test_a_model_that_is_not_causal_sees_both_ways():
    register_attention()
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50)
    own = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    zoo.redraw(own, seed=1)
    ours = copy.deepcopy(own)
    ours.set_attn_implementation("graven")
    ids = torch.arange(18).view(2, 9)
    assert_near([ours(input_ids=ids).last_hidden_state], [own(input_ids=ids).last_hidden_state], tolerance=1e-5)
