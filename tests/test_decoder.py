"""The decoder against Hugging Face's Llama with the same weights, and against what it promises."""

import dataclasses

import pytest
import torch
from asserts import assert_near
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from graven.errors import SpecError
from graven.layers.decoder import Decoder, DecoderSpec, angles
from graven.ops.pointwise import rotate

SPEC = DecoderSpec(vocabulary=19, width=16, layers=2, heads=4, key_value_heads=2, hidden=24)
PEER = 1e-5  # float32: the same sums in another order, two layers deep
ROUNDING = 1e-12  # float64
SHIFT = 1e-9  # float64: cosines of angles of up to 10 000 radians


def decoder(generator, **changes):
    """A float64 decoder whose every weight is random, norms included."""
    made = Decoder(dataclasses.replace(SPEC, **changes)).double()
    for parameter in made.parameters():
        parameter.data.copy_(0.25 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + (parameter.dim() == 1))
    return made


def llama_of(model):
    """Hugging Face's Llama with the weights of a decoder."""
    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocabulary,
        hidden_size=spec.width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.key_value_heads,
        intermediate_size=spec.hidden,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=spec.tied,
        attn_implementation="eager",
    )
    head_width = spec.width // spec.heads
    weights = {"model.embed_tokens.weight": model.tokens.weight, "model.norm.weight": model.norm.weight, "lm_head.weight": model.head.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.qkv.weight.split([head_width * n for n in (spec.heads, spec.key_value_heads, spec.key_value_heads)])
        gate, up = block.feed.gate_up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.attention.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.feed.down.weight,
            "input_layernorm": block.attention_norm.weight,
            "post_attention_layernorm": block.feed_norm.weight,
        }
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict(weights)
    return llama


def tokens(generator, *shape):
    return torch.randint(SPEC.vocabulary, shape, generator=generator)


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_a_llama_with_the_same_weights(key_value_heads, tied, generator):
    model, ids = decoder(generator, key_value_heads=key_value_heads, tied=tied).float(), tokens(generator, 3, 13)
    expected = llama_of(model)(input_ids=ids).logits
    torch.testing.assert_close(model.logits(model.hidden(model.embed(ids))), expected, rtol=PEER, atol=PEER * float(expected.detach().std()))


@pytest.mark.parametrize("length", [0, 1, 7])
def test_logits_have_one_row_for_each_token(length, generator):
    model = decoder(generator, convolution=3)
    assert model.logits(model.hidden(model.embed(tokens(generator, 2, length)))).shape == (2, length, SPEC.vocabulary)


@pytest.mark.parametrize("convolution", [0, 3])
def test_a_token_changes_nothing_before_it_and_something_from_it_on(convolution, generator):
    model, ids = decoder(generator, convolution=convolution), tokens(generator, 1, 9)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % SPEC.vocabulary
    before, after = (model.hidden(model.embed(x))[0] for x in (ids, other))
    same = (before - after).abs().amax(-1) <= ROUNDING
    assert same.tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("convolution", [1, 2, 3])
def test_the_convolution_looks_back_so_many_tokens_and_no_further(convolution, generator):
    model, ids = decoder(generator, convolution=convolution), tokens(generator, 1, 9)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % SPEC.vocabulary
    changed = (model.embed(ids) != model.embed(other)).any(-1)[0]
    assert changed.nonzero()[:, 0].tolist() == list(range(4, 4 + convolution))


def test_the_convolution_is_a_weighted_sum_of_the_last_tokens_on_top_of_the_embedding(generator):
    model, ids = decoder(generator, convolution=3), tokens(generator, 2, 7)
    weight, bias, x = model.convolution.weight[:, 0], model.convolution.bias, model.tokens(ids)
    expected = torch.stack([x[:, t] + bias + sum(weight[:, 2 - back] * x[:, t - back] for back in range(3) if t >= back) for t in range(7)], dim=1)
    torch.testing.assert_close(model.embed(ids), expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_convolution_that_starts_alike_at_every_place_sees_a_token_alike_wherever_it_stands():
    model = Decoder(dataclasses.replace(SPEC, convolution=3, convolution_start=0.5)).double()
    seen = [model.embed(ids) - model.tokens(ids) for ids in (torch.tensor([[7, 1, 2]]), torch.tensor([[1, 7, 2]]))]
    torch.testing.assert_close(seen[0][:, -1], seen[1][:, -1], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(model.convolution.weight, torch.full_like(model.convolution.weight, 0.5), rtol=0, atol=0)


def test_the_convolution_never_crosses_from_one_row_to_the_next(generator):
    model, ids = decoder(generator, convolution=3), tokens(generator, 2, 3, 5)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(model.embed(ids)[i, j], model.embed(ids[i, j]), rtol=ROUNDING, atol=ROUNDING)


def test_only_differences_of_positions_count(generator):
    model, ids = decoder(generator), tokens(generator, 2, 9)
    positions = torch.randint(30, (2, 9), generator=generator)
    near, far = (model.hidden(model.embed(ids), positions=positions + shift) for shift in (0, 10_000))
    torch.testing.assert_close(near, far, rtol=SHIFT, atol=SHIFT)
    assert not torch.allclose(near, model.hidden(model.embed(ids), positions=2 * positions), rtol=SHIFT, atol=SHIFT)


def test_positions_that_are_left_out_are_the_columns(generator):
    model, ids = decoder(generator), tokens(generator, 2, 9)
    assert torch.equal(model.hidden(model.embed(ids)), model.hidden(model.embed(ids), positions=torch.arange(9)[None]))


def test_rotation_turns_each_pair_of_halves_by_position_times_frequency(randn):
    width, positions = 6, torch.tensor([[0, 1, 5, 50_000]])
    x = randn(1, 1, 4, width)
    first, second = x[..., :3], x[..., 3:]
    turn = torch.polar(torch.ones(4, 3, dtype=torch.float64), positions[0, :, None] * 10_000.0 ** (-torch.arange(3, dtype=torch.float64) / 3))
    turned = torch.complex(first, second) * turn
    torch.testing.assert_close(rotate(x, angles(positions, width, torch.float64)), torch.cat([turned.real, turned.imag], -1), rtol=SHIFT, atol=SHIFT)


def test_angles_keep_their_digits_far_out():
    """A product in float32 would be off by 4e-3 of a radian there."""
    positions = torch.tensor([[50_000]])
    near, exact = angles(positions, 8, torch.float32), angles(positions, 8, torch.float64)
    for one, other in zip(near, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(torch.finfo(torch.float32).eps))


def test_a_mask_of_the_past_is_what_stands_when_none_is_given(generator):
    model, ids = decoder(generator), tokens(generator, 2, 6)
    past = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(model.hidden(model.embed(ids), mask=past), model.hidden(model.embed(ids)), rtol=ROUNDING, atol=ROUNDING)


def test_a_block_mask_keeps_two_continuations_of_one_prefix_apart(generator):
    model, ids = decoder(generator), tokens(generator, 1, 7)
    x = model.embed(ids)
    part = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    mask = torch.ones(7, 7, dtype=torch.bool).tril() & ((part == 0) | (part[:, None] == part))
    packed = model.hidden(x, positions=torch.tensor([[0, 1, 2, 3, 4, 3, 4]]), mask=mask[None])
    for columns in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6]):
        torch.testing.assert_close(packed[:, columns], model.hidden(x[:, columns]), rtol=ROUNDING, atol=ROUNDING)


def test_a_tied_head_is_the_embedding(generator):
    model = decoder(generator, tied=True)
    assert model.head.weight is model.tokens.weight
    hidden = model.hidden(model.embed(tokens(generator, 1, 3)))
    assert torch.equal(model.logits(hidden), F.linear(hidden, model.tokens.weight))


@pytest.mark.parametrize("convolution", [0, 2])
def test_it_can_be_differentiated_twice(convolution, generator, randn):
    model = decoder(generator, width=4, heads=2, key_value_heads=1, hidden=3, layers=2, vocabulary=5, convolution=convolution)
    prefix = randn(1, 2, 4).requires_grad_()
    ids = torch.randint(5, (1, 3), generator=generator)

    def loss(prefix, weight):
        model.tokens.weight.data.copy_(weight)
        hidden = model.hidden(torch.cat([prefix, model.embed(ids)], 1))
        return model.logits(hidden).log_softmax(-1)[..., 0].mean()

    assert torch.autograd.gradcheck(lambda x: loss(x, model.tokens.weight.detach()), (prefix,))
    assert torch.autograd.gradgradcheck(lambda x: loss(x, model.tokens.weight.detach()), (prefix,))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 12}, "`width` is 12 and `heads` is 4; `width` must be a multiple of 2 * `heads`."),
        ({"key_value_heads": 3}, "`heads` is 4 and `key_value_heads` is 3; the second must divide the first."),
        ({"heads": 0}, "`heads` is 0; it must be at least 1."),
        ({"key_value_heads": 0}, "`key_value_heads` is 0; it must be at least 1."),
        ({"layers": -1}, "`layers` is -1; it must be at least 1."),
        ({"convolution_start": 0.5}, "`convolution_start` is 0.5 and there is no convolution; give `convolution`, or leave it out."),
        ({"convolution": -1}, "`convolution` is -1; it must be at least 0, which is none."),
    ],
)
def test_an_impossible_decoder_is_refused(changes, sentence):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(SPEC, **changes)
    assert str(caught.value) == sentence


def test_behind_the_keys_and_values_of_what_stood_before_it_is_the_whole(generator):
    model, ids = decoder(generator), torch.randint(19, (2, 9), generator=generator)
    embedded = model.embed(ids)
    whole, caches = model.run(embedded)
    _, before = model.run(embedded[:, :4])
    after, own = model.run(embedded[:, 4:], before=before)
    assert_near([after, *own[1]], [whole[:, 4:], *(x[:, :, 4:] for x in caches[1])], tolerance=ROUNDING)
    moved, _ = model.run(embedded[:, 4:], before=before, positions=torch.arange(5)[None])
    assert (moved - whole[:, 4:]).abs().max() > 1e-3  # positions that begin anew
