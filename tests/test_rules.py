"""The rules of a write against writes that are unrolled by hand, in float64; Gauss-Newton against a matrix that is written out."""

import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import SpecError
from graven.layers.decoder import DecoderSpec
from graven.lm.small import Small
from graven.memory.gradient import GradMem, GradMemSpec
from graven.memory.rules import SGD, Adam, GaussNewton, LowRank, Moments, Momentum, conjugate_gradients
from graven.settings import build, table_of
from graven.tasks.base import Tokens

VOCABULARY, WIDTH, SLOTS, ROWS = 11, 8, 2, 2
DECODER = DecoderSpec(vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, key_value_heads=1, hidden=12, convolution=2)
ROUNDING = 1e-11  # float64, through two layers and their second derivative
SOLVED = 1e-6  # conjugate gradients after as many iterations as there are coordinates

RULES = {
    "momentum": Momentum(rate=0.3, decay=0.6),
    "learned momentum": Momentum(rate=0.3, decay=0.6, learn=True),
    "low rank": LowRank(rate=0.3, rank=2),
    "Gauss-Newton": GaussNewton(rate=0.7, damping=0.5, iterations=SLOTS * WIDTH, learn=True),
}


@pytest.fixture
def ids(generator):
    return torch.randint(VOCABULARY, (ROWS, 4), generator=generator)


@pytest.fixture
def make(generator):
    """Makes a float64 GradMem; all that one test makes have the same random weights."""

    def build_memory(**settings):
        model, weights = Small(DECODER), torch.Generator().manual_seed(generator.initial_seed())
        for parameter in model.parameters():
            parameter.data.copy_(0.35 * torch.randn(parameter.shape, generator=weights) + (parameter.dim() == 1))
        memory = GradMem(model, GradMemSpec(**{"slots": SLOTS, "steps": 2, **settings}), seed=1).double()
        if "right" in dict(memory.named_parameters()):
            memory.right.data.normal_(generator=weights)
        return memory

    return build_memory


def logits_of(memory, state, ids):
    decoder = memory.model.decoder
    return decoder.head(decoder.hidden(torch.cat([state, decoder.embed(ids)[:, :-1]], 1))[:, SLOTS - 1 :])


def loss_of(memory, state, ids):
    return -logits_of(memory, state, ids).log_softmax(-1).gather(-1, ids[..., None])[..., 0].mean(-1)


def gauss_newton(memory, state, ids):
    """The matrix of each row, entry by entry: sum over tokens of J^T (diag p - p p^T) J / T."""
    found = []
    for row, tokens in zip(state.detach(), ids, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x, t=tokens: logits_of(memory, x[None], t[None])[0], row)
        p = logits_of(memory, row[None], tokens[None])[0].softmax(-1).detach()
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        flat = jacobian.flatten(2)
        found.append(torch.einsum("tai,tab,tbj->ij", flat, middle, flat) / len(tokens))
    return torch.stack(found)


def unrolled(memory, ids, *, steps):
    """The equations at the top of rules.py, one step after the other."""
    rule, state = memory.spec.rule, memory.initial.expand(len(ids), -1, -1)
    velocity, named = torch.zeros_like(state), dict(memory.named_parameters())
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss_of(memory, state, ids).sum(), state, create_graph=True)
        if isinstance(rule, Momentum):
            velocity = named.get("decay", rule.decay) * velocity + gradient
            state = state - named.get("rate", rule.rate) * velocity
        elif isinstance(rule, LowRank):
            matrix = torch.eye(SLOTS * WIDTH, dtype=state.dtype) + named["left"] @ named["right"].T
            state = state - rule.rate * (gradient.flatten(1) @ matrix.T).view_as(state)
        else:
            matrix = gauss_newton(memory, state, ids) + rule.damping * torch.eye(SLOTS * WIDTH, dtype=state.dtype)
            state = state - named["rate"] * torch.linalg.solve(matrix, gradient.flatten(1)[..., None]).view_as(state)
    return state


def gradients(memory, state, ids):
    loss = loss_of(memory, state, ids.flip(1)).sum()
    return torch.autograd.grad(loss, list(memory.parameters()), materialize_grads=True)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_write_and_its_meta_gradient_are_those_of_the_equations(name, steps, make, ids):
    memory = make(rule=RULES[name])
    found, wanted = memory.write(memory.start(ROWS), Tokens.full(ids), steps=steps), unrolled(memory, ids, steps=steps)
    tolerance = SOLVED if name == "Gauss-Newton" else ROUNDING
    assert_near([found], [wanted], tolerance=tolerance)
    assert_near(gradients(memory, found, ids), gradients(memory, wanted, ids), tolerance=tolerance)


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_learns_has_a_gradient(name, make, ids):
    memory = make(rule=RULES[name])
    state = memory.write(memory.start(ROWS), Tokens.full(ids), steps=2)
    named = dict(zip([name for name, _ in memory.named_parameters()], gradients(memory, state, ids), strict=True))
    learned = {key for key in named if key in ("rate", "decay", "left", "right")}
    assert learned == {"momentum": set(), "learned momentum": {"rate", "decay"}, "low rank": {"left", "right"}, "Gauss-Newton": {"rate"}}[name]
    assert all(named[key].any() for key in learned)


@pytest.mark.parametrize("name", RULES)
def test_steps_one_by_one_are_the_write(name, make, ids):
    memory = make(rule=RULES[name], order="first")
    state, moments = memory.start(ROWS), None
    prepared = memory.prepare(state, Tokens.full(ids))
    with torch.no_grad():
        for taken in range(2):
            step = memory.step(state, prepared, moments, taken=taken)
            state, moments = step.state, step.moments
        assert_near([state], [memory.write(memory.start(ROWS), Tokens.full(ids), steps=2)], tolerance=ROUNDING)


def test_momentum_without_memory_and_a_preconditioner_at_its_start_are_plain(make, ids):
    plain, heavy, low = (make(rule=rule) for rule in (SGD(rate=0.3), Momentum(rate=0.3, decay=0.0), LowRank(rate=0.3)))
    low.right.data.zero_()
    wanted = plain.write(plain.start(ROWS), Tokens.full(ids), steps=3)
    assert_near([memory.write(memory.start(ROWS), Tokens.full(ids), steps=3) for memory in (heavy, low)], [wanted] * 2, tolerance=ROUNDING)


def test_a_gauss_newton_step_with_much_damping_is_a_plain_step(make, ids):
    damping = 1e8
    newton, plain = make(rule=GaussNewton(rate=damping * 0.3, damping=damping)), make(rule=SGD(rate=0.3))
    found, wanted = (memory.write(memory.start(ROWS), Tokens.full(ids), steps=1) for memory in (newton, plain))
    assert_near([found], [wanted], tolerance=1e-6)  # the matrix, about 1, beside a damping of 1e8


def test_conjugate_gradients_solve_each_row_by_itself(randn):
    root = randn(2, 6, 6)
    matrix, b = root @ root.mT + torch.eye(6), randn(2, 2, 3)
    b[1] = 0
    found = conjugate_gradients(lambda v: (matrix @ v.flatten(1)[..., None]).view_as(v), b, iterations=6)
    assert_near([found], [torch.linalg.solve(matrix, b.flatten(1)[..., None]).view_as(b)], tolerance=1e-8)


def test_weights_of_tokens_start_at_one_and_learn(make, ids):
    plain, weighed = make(), make(weigh=True)
    states = [memory.write(memory.start(ROWS), Tokens.full(ids)) for memory in (plain, weighed)]
    assert_near([states[1]], [states[0]], tolerance=ROUNDING)
    weighed.token_weight.data += 0.5
    state = weighed.write(weighed.start(ROWS), Tokens.full(ids), steps=1)
    each = -logits_of(weighed, weighed.start(ROWS), ids).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    weight = 2 * (weighed.model.decoder.embed(ids) @ weighed.token_weight).sigmoid() / ids.shape[1]
    (gradient,) = torch.autograd.grad((each * weight).sum(), weighed.initial)
    assert_near([(weighed.start(ROWS) - state).sum(0)], [0.2 * gradient], tolerance=1e-7)  # a rate of 0.2 a float32 once
    assert gradients(weighed, state, ids)[[name for name, _ in weighed.named_parameters()].index("token_weight")].any()


@pytest.mark.parametrize("rule", [*RULES.values(), SGD(clip=1.0), Adam()])
def test_a_rule_comes_back_from_its_table(rule):
    order = "none" if isinstance(rule, Adam) else "second"
    spec = GradMemSpec(slots=1, steps=1, rule=rule, order=order)
    assert build(GradMemSpec, table_of(spec), where="memory") == spec


def test_moments_are_kept_for_some_rows(randn):
    moments = Moments((randn(3, 2), randn(3, 4)), 5).kept(torch.tensor([True, False, True]))
    assert [part.shape[0] for part in moments.parts] == [2, 2]
    assert moments.count == 5


@pytest.mark.parametrize(
    ("make_spec", "words"),
    [
        (lambda: SGD(rate=0.0), r"`rate` is 0\.0; it must be above 0"),
        (lambda: SGD(clip=0.0), r"`clip` is 0\.0; it must be above 0"),
        (lambda: Adam(rate=float("nan")), "`rate` is nan; it must be above 0"),
        (lambda: Momentum(decay=1.0), r"`decay` is 1\.0; it must be at least 0 and below 1"),
        (lambda: LowRank(rank=0), "`rank` is 0; it must be at least 1"),
        (lambda: GaussNewton(damping=0.0), r"`damping` is 0\.0; it must be above 0"),
        (lambda: GaussNewton(iterations=0), "`iterations` is 0; it must be at least 1"),
        (lambda: GradMemSpec(slots=1, steps=1, rule=GaussNewton(), rows=2), "the rule is Gauss-Newton, whose matrix is that of all rows"),
        (lambda: GradMemSpec(slots=1, steps=1, rule=LowRank(), order="none"), "its preconditioner cannot learn from steps"),
        (lambda: GradMemSpec(slots=1, steps=1, rule=Momentum(learn=True), order="none"), '`learn` is "True"; a rate cannot learn'),
    ],
)
def test_an_impossible_rule_is_refused(make_spec, words):
    assert_refused(SpecError, words, make_spec)


def test_a_gauss_newton_step_of_another_loss_is_refused(make, randn):
    memory = make(rule=GaussNewton())
    assert_refused(SpecError, "needs the loss of a write", lambda: memory.update(randn(1, SLOTS, WIDTH), randn(1, SLOTS, WIDTH)))
