"""Counted operations against sums by hand, against torch's own counter, and against the formulas of every part of a decoder."""

import pytest
import torch
from asserts import assert_refused
from cases import MEMORIES
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from graven.cost import PRODUCTS, Operations, cost_of, counted
from graven.errors import SpecError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.base import size_of
from graven.memory.cache import KVCache
from graven.memory.forward import RMT, RMTSpec
from graven.memory.gradient import GradMem, GradMemSpec
from graven.tasks.retrieval import Retrieval

TASK = Retrieval(key_length=2, value_length=2, symbols=28)
D, L, HIDDEN, SLOTS, SPAN, V = 64, 2, 96, 4, 3, TASK.vocabulary
DECODER = DecoderSpec(vocabulary=V, width=D, layers=L, heads=2, key_value_heads=2, hidden=HIDDEN, convolution=SPAN)
ASKED = 5 + 3  # tokens of a query, and of its answer but the last
PARTS = 0.02  # attention gets a column more in both of its products: 1 / 32 of them, and they are a part of all
LAWS = [name for name in MEMORIES if "bfloat16" not in name]


@pytest.fixture
def episode(generator):
    return TASK.sample(2, pairs=6, generator=generator)


def block(columns, *, visible=None):
    """Products of the layers for so many columns, each of which computes with `visible` keys: 8 d^2 + 6 d h and 4 d n a column."""
    return L * columns * (8 * D**2 + 6 * D * HIDDEN + 4 * D * (columns if visible is None else visible))


def convolved(columns):
    return 2 * D * SPAN * columns


def head(columns):
    return 2 * D * V * columns


def test_products_count_two_a_multiply_add_and_the_rest_one_a_number():
    x, y = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    assert counted(lambda: x @ y)[1] == Operations(2 * 3 * 4 * 5 * 6, 0)
    assert counted(lambda: torch.baddbmm(torch.ones(3, 4, 6), x, y))[1] == Operations(2 * 3 * 4 * 5 * 6, 0)
    assert counted(lambda: (x + 1).exp().sum())[1] == Operations(0, 3 * 60)
    assert counted(lambda: x.mT.reshape(-1)[3:].clone())[1] == Operations(0, 0)
    assert counted(lambda: F.conv1d(torch.ones(2, 6, 9), torch.ones(6, 1, 3), groups=6))[1].products == 2 * 2 * 6 * 7 * 3
    assert counted(lambda: torch.linalg.solve_triangular(torch.eye(5), torch.ones(5, 2), upper=False))[1].products == 5 * 5 * 2


def test_what_a_call_returns_comes_back_and_nothing_counts_afterwards():
    result, operations = counted(lambda: torch.ones(2) + 1)
    torch.ones(2) + 1
    assert torch.equal(result, torch.full((2,), 2.0))
    assert operations == Operations(0, 2)


def test_products_equal_those_of_torchs_counter_forward_and_backward():
    layer, x = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.Linear(7, 3, bias=False)), torch.randn(4, 5)

    def step():
        layer(x).square().sum().backward()

    with FlopCounterMode(display=False) as theirs:
        step()
    assert counted(step)[1].products == theirs.get_total_flops() > 0


def test_the_fused_attention_of_torch_counts_backward_too_and_no_other_kernel_passes_as_nothing(monkeypatch):
    q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for length in (6, 6, 6))
    product = 2 * 2 * 6 * 6 * 4
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert counted(attend)[1].products == 2 * product
    assert counted(lambda: attend().sum().backward())[1].products == 7 * product
    monkeypatch.delitem(PRODUCTS, "_scaled_dot_product_flash_attention_for_cpu")
    assert_refused(SpecError, "operations are not known", lambda: counted(attend))


def test_rmt_costs_its_formula(episode):
    """K L [24 d^2 (T + 2 m) + 4 d (T + 2 m)^2] with h = 8 d / 3; half of the last term is hidden by causality and computed all the same."""
    memory, tokens = RMT(Small(DECODER), RMTSpec(slots=SLOTS)), episode.context.ids.shape[1]
    for steps in (1, 3):
        cost = cost_of(memory, episode, steps=steps)
        assert cost.bytes == 4 * SLOTS * D
        assert cost.write.products == pytest.approx(steps * block(tokens + 2 * SLOTS) + convolved(tokens), rel=PARTS)
    expected = block(SLOTS + ASKED) + head(ASKED + 1) + convolved(ASKED) + 2 * SLOTS * D**2
    assert cost.read.products == pytest.approx(expected, rel=PARTS)


def test_the_cache_costs_one_pass_and_its_reads_see_the_whole_context(episode):
    memory, tokens = KVCache(Small(DECODER)), episode.context.ids.shape[1]
    cost = cost_of(memory, episode)
    start, counters = size_of(memory.start(1)), 2 * L * D * 4
    assert cost.bytes == start + counters * tokens
    assert cost.write.products == pytest.approx(block(tokens, visible=tokens + 1) + convolved(tokens) + block(1), rel=PARTS)
    assert cost.read.products == pytest.approx(block(ASKED, visible=tokens + 1 + ASKED) + head(ASKED + 1) + convolved(ASKED), rel=PARTS)


def test_a_gradient_step_costs_a_forward_pass_and_a_little_more_than_one_backward(episode):
    """A block's gradient in its input alone is one more forward pass, and attention computes its weights anew: 2 to 2.3 passes a step."""
    memory, tokens = GradMem(Small(DECODER), GradMemSpec(slots=SLOTS, steps=2)), episode.context.ids.shape[1]
    one, two, three = (cost_of(memory, episode, steps=k).write.products for k in (1, 2, 3))
    assert two - one == three - two
    forward = block(tokens + SLOTS - 1) + head(tokens)
    assert 2 * forward < two - one < 2.3 * forward
    assert cost_of(memory, episode, steps=0).write.products == convolved(tokens)


@pytest.mark.parametrize("name", LAWS)
def test_every_memory_says_what_it_costs(name, generator):
    case = MEMORIES[name]
    episode = Retrieval(key_length=1, value_length=1, symbols=64).sample(1, pairs=4, generator=generator)
    small = cost_of(case.make(), episode, steps=1 if case.steps else None)
    assert small.bytes > 0
    assert small.write.products > 0
    assert small.read.products > 0
    assert small.write.total > small.write.products
