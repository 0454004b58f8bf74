"""Recurrent layers that were built to be attention, against a loop over the state of attention."""

from itertools import pairwise

import pytest
import torch
from asserts import assert_refused
from torch import Tensor

from graven.construct.attention import attention_to_gru, attention_to_lru, attention_to_lstm, attention_to_mamba, attention_to_rnn
from graven.errors import ShapeError, SpecError
from graven.theory.capacity import neurons

FORMS = ["naive", "symmetric", "symmetric_fast", "low_rank", "minimal", "side", "side_symmetric"]
T = 32
EXACT = 1e-12  # of the norm of what is read


def attention(x, w_v, w_k, w_q):
    """S <- S + (W_V x) (W_K x)^T, y = S W_Q x, one token at a time."""
    state, reads = x.new_zeros(len(x), len(w_v), len(w_k)), []
    for token in x.unbind(1):
        state = state + torch.einsum("bv,bk->bvk", token @ w_v.mT, token @ w_k.mT)
        reads.append(torch.einsum("bvk,bk->bv", state, token @ w_q.mT))
    return torch.stack(reads, 1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def ranked(randn, rows, width, rank):
    """Of entries about 1, whatever the rank."""
    return randn(rows, rank) @ randn(rank, width) / rank**0.5


SHAPES = {  # width, value width, key width, rank of W_V, rank of W_K and so of W_K^T W_Q
    "d = 2": (2, 2, 2, 2, 2),
    "d = 3": (3, 3, 3, 3, 3),
    "d = 4": (4, 4, 4, 4, 4),
    "d = 6": (6, 6, 6, 6, 6),
    "d = 12": (12, 12, 12, 12, 12),
    "one dimension": (1, 1, 1, 1, 1),
    "wide values, one key": (3, 7, 1, 3, 1),
    "few values, wide keys": (5, 2, 7, 2, 3),
    "low rank": (6, 6, 6, 4, 4),
    "low rank, nothing shared": (12, 12, 12, 6, 6),
    "low rank, a third shared": (12, 12, 12, 8, 8),
    "singular keys": (4, 4, 4, 4, 3),
}


def drawn(randn, shape):
    width, values, keys, rank_v, rank_k = SHAPES[shape]
    return ranked(randn, values, width, rank_v), ranked(randn, keys, width, rank_k), randn(keys, width)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gated_rnn_is_the_attention_that_it_was_made_of(randn, form, shape):
    weights = drawn(randn, shape)
    x = randn(2, T, weights[0].shape[1])
    layer = attention_to_rnn(*weights, form=form)
    assert relative(layer(x)[0], attention(x, *weights)) < EXACT
    assert set(layer.decay.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [name for name, (d, v, k, *_) in SHAPES.items() if d == v == k])
def test_a_gated_rnn_has_the_size_that_the_theory_gives(randn, form, shape):
    width, _, _, rank_v, rank_kq = SHAPES[shape]
    spec = attention_to_rnn(*drawn(randn, shape), form=form).spec
    ranks = {"rank_v": rank_v, "rank_kq": rank_kq} if form in ("low_rank", "minimal") else {}
    count = neurons(form=form, d=width, **ranks)
    assert (spec.hidden, spec.output_gates, spec.parameters) == count


def test_what_values_and_keys_share_is_found_where_it_is_planted(randn):
    shared, own, other = randn(2, 8), randn(2, 8), randn(3, 8)
    w_v, w_k, w_q = randn(4, 4) @ torch.cat([shared, own]), randn(5, 5) @ torch.cat([shared, other]), randn(5, 8)
    layer = attention_to_rnn(w_v, w_k, w_q)
    assert layer.spec.hidden == neurons(form="minimal", d=8, rank_v=4, rank_kq=5, overlap=2).hidden
    x = randn(2, T, 8)
    assert relative(layer(x)[0], attention(x, w_v, w_k, w_q)) < EXACT


def test_no_inverse_of_the_values_is_needed_for_a_symmetric_state(randn):
    """Appendix A.3 takes W_V^-1; here W_V has rank 1."""
    weights = randn(4, 1) @ randn(1, 4), randn(4, 4), randn(4, 4)
    x = randn(2, T, 4)
    assert relative(attention_to_rnn(*weights, form="symmetric")(x)[0], attention(x, *weights)) < EXACT


@pytest.mark.parametrize("form", FORMS)
def test_attention_that_is_zero_everywhere_stays_zero(randn, form):
    layer = attention_to_rnn(torch.zeros(3, 3).double(), randn(3, 3), randn(3, 3), form=form)
    assert (layer(randn(1, 5, 3))[0] == 0).all()


def test_a_thousand_tokens_are_remembered_as_one(randn):
    weights, x = drawn(randn, "d = 4"), randn(1, 1000, 4)
    layer = attention_to_rnn(*weights)
    y, state = layer(x[:, :400])
    later, _ = layer(x[:, 400:], state)
    assert relative(torch.cat([y, later], 1), attention(x, *weights)) < EXACT


def attention_of_heads(x, w_v, w_k, w_q):
    return torch.cat([attention(x, *head) for head in zip(w_v, w_k, w_q, strict=True)], -1)


@pytest.mark.parametrize("form", FORMS)
def test_heads_lie_side_by_side(randn, form):
    stacked = randn(2, 3, 4), randn(2, 2, 4), randn(2, 2, 4)
    uneven = [randn(3, 4), randn(1, 4)], [randn(2, 4), randn(5, 4)], [randn(2, 4), randn(5, 4)]
    x = randn(2, T, 4)
    for heads in (stacked, uneven):
        layer = attention_to_rnn(*heads, form=form)
        assert relative(layer(x)[0], attention_of_heads(x, *heads)) < EXACT
        assert layer.spec.hidden == sum(attention_to_rnn(*head, form=form).spec.hidden for head in zip(*heads, strict=True))


def test_an_output_projection_goes_on_top_of_the_readout(randn):
    heads, w_o, x = (randn(2, 3, 4), randn(2, 2, 4), randn(2, 2, 4)), randn(5, 6), randn(2, T, 4)
    layer = attention_to_rnn(*heads)
    layer.readout.data = w_o @ layer.readout
    assert relative(layer(x)[0], attention_of_heads(x, *heads) @ w_o.mT) < EXACT


@pytest.mark.parametrize("form", ["side", "selective"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "d = 12"])
def test_a_mamba_block_is_the_attention_that_it_was_made_of(randn, form, shape):
    weights = drawn(randn, shape)
    x = randn(2, T, weights[0].shape[1])
    layer = attention_to_mamba(*weights, form=form)
    assert relative(layer(x)[0], attention(x, *weights)) < EXACT
    assert layer.spec.bias == (form == "selective")


@pytest.mark.parametrize("make", [attention_to_mamba, attention_to_lru, attention_to_lstm, attention_to_gru])
def test_heads_of_the_other_layers_lie_side_by_side(randn, make):
    heads = [randn(2, 3) / 2, randn(1, 3) / 2], [randn(2, 3) / 2, randn(1, 3) / 2], [randn(2, 3) / 2, randn(1, 3) / 2]
    x = randn(1, 8, 3)
    assert relative(make(*heads)(x)[0], attention_of_heads(x, *heads)) < 1e-5


LAWS = {  # error / scale^2 at least and at most, the scales where it is so, the floor at the default scale; measured, d = 4, T = 32
    "two LRUs": (attention_to_lru, 0.2, 5.0, (1e-2, 1e-3, 1e-4), 3e-9),
    "one LRU In+Out": (lambda *w, **o: attention_to_lru(*w, **o, form="in_out"), 0.2, 5.0, (1e-2, 1e-3, 1e-4), 3e-9),
    "LSTM": (attention_to_lstm, 3.0, 100.0, (1e-2, 1e-3), 1e-6),
    "GRU": (attention_to_gru, 3.0, 100.0, (1e-2, 3e-3, 1e-3), 1e-5),
}


@pytest.mark.parametrize("layer", LAWS)
def test_the_error_falls_with_the_square_of_the_scale_down_to_its_floor(randn, layer):
    make, least, most, scales, floor = LAWS[layer]
    weights, x = [randn(4, 4) / 2 for _ in range(3)], randn(2, T, 4)
    wanted = attention(x, *weights)
    errors = [relative(make(*weights, scale=scale)(x)[0], wanted) for scale in scales]
    for scale, error in zip(scales, errors, strict=True):
        assert least < error / scale**2 < most
    for (scale, error), (next_scale, next_error) in pairwise(zip(scales, errors, strict=True)):
        assert next_error / error == pytest.approx((next_scale / scale) ** 2, rel=0.15)
    assert relative(make(*weights)(x)[0], wanted) < floor


def test_a_gru_forgets_by_what_it_adds(randn):
    """Its error grows with the length; that of an LSTM, whose forget gate stays at 1, does not."""
    weights, x = [randn(3, 3) / 2 for _ in range(3)], randn(2, 512, 3)
    wanted = attention(x, *weights)
    gru, lstm = (
        [relative(make(*weights, scale=1e-3)(x)[0][:, :n], wanted[:, :n]) for n in (64, 512)] for make in (attention_to_gru, attention_to_lstm)
    )
    assert gru[1] > 4 * gru[0]
    assert lstm[1] < 2 * lstm[0] or lstm[1] < 1e-4


@pytest.mark.parametrize(
    ("make", "floor"), [(attention_to_lru, 1e-3), (attention_to_lstm, 5e-2), (attention_to_mamba, 1e-5), (attention_to_rnn, 1e-5)]
)
def test_weights_in_float32_give_a_layer_in_float32_and_its_floor(randn, make, floor):
    weights, x = [(randn(4, 4) / 2).float() for _ in range(3)], randn(2, T, 4).float()
    options = {attention_to_lru: {"scale": 3e-3}, attention_to_lstm: {"scale": 1e-2}}.get(make, {})
    y, _ = make(*weights, **options)(x)
    assert y.dtype == torch.float32
    assert relative(y, attention(x, *weights)) < floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["minimal", "low_rank"])
def test_weights_in_half_precision_keep_their_rank(randn, form, dtype):
    weights, x = [(randn(16, 16) / 4).to(dtype) for _ in range(3)], randn(2, T, 16).to(dtype)
    layer = attention_to_rnn(*weights, form=form)
    wide = attention_to_rnn(*(weight.double() for weight in weights), form=form)
    assert (layer.spec, layer.readout.dtype) == (wide.spec, dtype)
    assert relative(layer(x)[0].double(), attention(x.double(), *(weight.double() for weight in weights))) < 0.05


@pytest.mark.plain
@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ShapeError, "`w_k` has shape .* axis 1 is 3", lambda w: attention_to_rnn(w, torch.zeros(4, 3).double(), w)),
        (ShapeError, "`w_q` has shape .* axis 0 is 2", lambda w: attention_to_lstm(w, w, w[:2])),
        (ShapeError, "`w_v` has shape .* axes", lambda w: attention_to_rnn(w[0], w, w)),
        (ShapeError, "`w_v` has shape .* axis 1 is 3", lambda w: attention_to_rnn([w, w[:, :3]], [w, w], [w, w])),
        (SpecError, "have 2, 1 and 1 heads", lambda w: attention_to_lru([w, w], [w], [w])),
        (SpecError, "have 0, 0 and 0 heads", lambda _: attention_to_rnn([], [], [])),
        (SpecError, "`w_v` has an entry that is not finite", lambda w: attention_to_mamba(w / 0, w, w)),
        (SpecError, "`w_k` is torch.float32 and `w_v` torch.float64", lambda w: attention_to_rnn(w, w.float(), w)),
        (SpecError, "`w_v` is torch.int64", lambda w: attention_to_rnn(w.long(), w, w)),
        (SpecError, "`w_v` has shape .0, 4., which holds nothing", lambda w: attention_to_rnn(w[:0], w, w)),
        (SpecError, "`form` is 'smallest'; .*minimal", lambda w: attention_to_rnn(w, w, w, form="smallest")),
        (SpecError, "`form` is 'three'; .*stacked", lambda w: attention_to_lru(w, w, w, form="three")),
        (SpecError, '"selective", which is for one head, and there are 2', lambda w: attention_to_mamba([w] * 2, [w] * 2, [w] * 2, form="selective")),
        (SpecError, "`scale` is 0.0; .*above 0", lambda w: attention_to_lstm(w, w, w, scale=0.0)),
        (SpecError, "`scale` is nan; .*above 0", lambda w: attention_to_gru(w, w, w, scale=float("nan"))),
        (
            SpecError,
            "`scale` is 1e-06 and the matrices are torch.float32: rounding .* 12 %.*above",
            lambda w: attention_to_lru(*[w.float()] * 3),
        ),
        (SpecError, "`scale` is 0.0001 and the matrices are torch.float32: .*above 0.003", lambda w: attention_to_lstm(*[w.float()] * 3)),
        (SpecError, "or pass matrices in float64", lambda w: attention_to_gru(*[w.float()] * 3)),
    ],
)
def test_matrices_that_are_no_attention_are_refused_in_one_sentence(error, words, call):
    assert_refused(error, words, lambda: call(torch.ones(4, 4).double()))
