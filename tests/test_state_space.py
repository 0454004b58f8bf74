"""Mamba and Mamba-2 of transformers as recurrences, against transformers' own models: whole, and token by token from their cache."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
import zoo
from asserts import assert_near, assert_refused

from graven.errors import ModelError
from graven.layers.decoder import DecoderSpec
from graven.layers.mamba import MambaSpec
from graven.layers.mamba2 import Mamba2Spec
from graven.lm.state_space import StateSpace, new_state_space
from graven.memory.base import leaves, map_state
from graven.ops.diagonal import diagonal
from graven.ops.gated_linear import gated_linear

FLOAT32 = 1e-5  # two layers of a few tokens, in units of the largest logit
SIZES = DecoderSpec(vocabulary=zoo.VOCABULARY, width=32, layers=2, heads=4, key_value_heads=2, hidden=64)
SPECS = {
    "mamba": MambaSpec(width=32, inner=64, memory=5, step_rank=2),
    "mamba2": Mamba2Spec(width=32, inner=64, heads=4, groups=2, memory=5),
}


@pytest.fixture(params=SPECS)
def model(request):
    made = new_state_space(SIZES, SPECS[request.param], generator=torch.Generator().manual_seed(0))
    zoo.redraw(made, seed=1)
    return made.eval()


def ids(generator, *shape):
    return torch.randint(zoo.VOCABULARY, shape, generator=generator)


def logits(model, tokens, state=None, mask=None):
    hidden, end = model.run(model.embed(tokens), model.start(len(tokens)) if state is None else state, mask)
    return model.logits(hidden), end


def theirs(model, tokens):
    """Logits and last state of transformers, one token after the other from the cache, which is exact there."""
    reads, cache = [], None
    with torch.no_grad():
        for token in tokens.split(1, 1):
            out = model.model(input_ids=token, cache=cache, use_cache=True)
            cache = out.cache
            reads.append(out.logits)
    return torch.cat(reads, 1), [(layer.conv_states[0], layer.recurrent_states[0]) for layer in cache.layers]


def test_a_whole_text_reads_as_in_transformers(model, generator):
    tokens = ids(generator, 3, 11)
    assert_near([logits(model, tokens)[0]], [model.model(input_ids=tokens, use_cache=False).logits], tolerance=FLOAT32)


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_a_text_in_two_parts_reads_and_ends_as_token_by_token_in_transformers(model, generator, cut):
    """Several tokens behind a cache of Mamba read as if the cache were empty there; here they are exact."""
    tokens = ids(generator, 2, 9)
    first, state = logits(model, tokens[:, :cut])
    second, end = logits(model, tokens[:, cut:], state)
    expected, states = theirs(model, tokens)
    assert_near([torch.cat([first, second], 1)], [expected], tolerance=FLOAT32)
    for (recent, memory), (window, recurrent) in zip(end, states, strict=True):
        turned = recurrent if isinstance(model._forms[0].spec, MambaSpec) else recurrent.mT
        assert_near([recent.mT, memory], [window[..., 1:], turned], tolerance=FLOAT32)


def test_gradients_are_those_of_transformers(model, generator):
    tokens, weights = ids(generator, 2, 7), list(model.parameters())
    losses = [part.log_softmax(-1)[..., 0].sum() for part in (logits(model, tokens)[0], model.model(input_ids=tokens, use_cache=False).logits)]
    found, wanted = (torch.autograd.grad(loss, weights) for loss in losses)
    assert_near(found, wanted, tolerance=10 * FLOAT32)


def test_padding_decays_no_state_and_rows_of_other_lengths_do_not_matter(model, generator):
    tokens, mask = ids(generator, 2, 8), torch.tensor([[True] * 8, [False, True, True, False, True, True, False, False]])
    read, end = logits(model, tokens, mask=mask)
    alone, own = logits(model, tokens[1:, mask[1]])
    assert_near([read[1:, mask[1]], *(leaf[1:] for leaf in leaves(end))], [alone, *leaves(own)], tolerance=FLOAT32)
    _, still = logits(model, tokens, state=end, mask=torch.zeros(2, 8, dtype=torch.bool))
    assert all(torch.equal(new, old) for new, old in zip(leaves(still), leaves(end), strict=True))


def test_a_batch_of_another_size_follows_on_a_state_that_was_selected_from(model, generator):
    tokens, more = ids(generator, 3, 5), ids(generator, 1, 4)
    _, state = logits(model, tokens)
    picked = map_state(lambda x: x[2:], state)
    assert_near([logits(model, more, picked)[0]], [logits(model, torch.cat([tokens[2:], more], 1))[0][:, 5:]], tolerance=FLOAT32)


def test_steps_of_a_scalar_mamba_are_those_worked_out_by_hand():
    """A = -1, a step of ln 2, B = C = x = 1: Euler in B, zero-order hold in A."""
    step = torch.full((1, 2, 1), 2.0, dtype=torch.float64).log()
    wanted = torch.tensor([0.69314718056, 1.03972077084], dtype=torch.float64)
    h, _ = diagonal(step, decay=(-step).exp())
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    o, _ = gated_linear(one, one, step[..., None], log_gate_k=-step[..., None])
    assert_near([h.flatten(), o.flatten()], [wanted, wanted], tolerance=1e-10)


def test_an_untrained_model_starts_as_transformers_starts_it():
    with torch.random.fork_rng():
        made = new_state_space(SIZES, SPECS["mamba"], generator=torch.Generator().manual_seed(3))
        torch.manual_seed(0)
        fresh = transformers.MambaForCausalLM(made.model.config)
    for name, parameter in fresh.named_parameters():
        own = made.model.get_parameter(name)
        assert own.shape == parameter.shape
        assert abs(float(own.detach().std()) - float(parameter.detach().std())) <= 0.35 * float(parameter.detach().std()), name


def test_a_trained_model_is_one_that_transformers_saves_and_loads(model, generator, tmp_path):
    model.model.save_pretrained(tmp_path)
    again = StateSpace(type(model.model).from_pretrained(tmp_path))
    tokens = ids(generator, 1, 5)
    assert torch.equal(logits(again, tokens)[0], logits(model, tokens)[0])


def test_models_that_the_layers_do_not_know_are_refused():
    llama = zoo.build("LlamaConfig", zoo.LLAMA, seed=1)
    llama.backbone = llama.model
    assert_refused(ModelError, "the model is a 'llama'", lambda: StateSpace(llama))
    config = transformers.MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1, hidden_act="relu", use_cache=False)
    assert_refused(ModelError, "`hidden_act`", lambda: StateSpace(transformers.MambaForCausalLM(config)))
    odd = MambaSpec(width=32, inner=40, memory=5, step_rank=2)
    assert_refused(ModelError, "`inner` is 40 and `width` is 32", lambda: new_state_space(SIZES, odd, generator=torch.Generator()))


def test_copies_and_other_dtypes_run_on_weights_of_their_own(model, generator):
    tokens = ids(generator, 2, 9)
    before = logits(model, tokens)[0]
    twin = copy.deepcopy(model).double()
    zoo.redraw(twin, seed=2)
    assert torch.equal(logits(model, tokens)[0], before)
    whole, end = logits(twin, tokens)
    first, state = logits(twin, tokens[:, :4])
    second, last = logits(twin, tokens[:, 4:], state)
    assert whole.dtype == end[0][0].dtype == torch.float64
    assert_near([torch.cat([first, second], 1), *leaves(last)], [whole, *leaves(end)], tolerance=1e-12)


@pytest.mark.plain
def test_threads_that_read_at_once_read_what_one_reads(model, generator):
    texts = [ids(generator, 1, 12) for _ in range(40)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        alone = [logits(model, text)[0] for text in texts]
        together = list(pool.map(lambda text: logits(model, text)[0].detach(), texts))
    assert [torch.equal(a, b) for a, b in zip(alone, together, strict=True)] == [True] * len(texts)


def test_a_mamba_that_is_not_a_multiple_as_wide_reads_as_in_transformers(generator):
    config = transformers.MambaConfig(vocab_size=zoo.VOCABULARY, hidden_size=8, intermediate_size=20, state_size=3, num_hidden_layers=2)
    model = StateSpace(transformers.MambaForCausalLM(config)).eval()
    tokens = ids(generator, 2, 6)
    assert_near([logits(model, tokens)[0]], [model.model(input_ids=tokens, use_cache=False).logits], tolerance=FLOAT32)
