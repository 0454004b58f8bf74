"""Audits of recurrent layers: forms and polynomials against the layer itself, planted attention, planted other things, and a trained layer."""

import json
from itertools import combinations_with_replacement

import pytest
import torch
from asserts import assert_near, assert_refused

from graven import cli
from graven.audit.checkpoint import load_layer, load_teacher, save_layer, save_teacher
from graven.audit.dimension import effective_dimension, groups
from graven.audit.explain import explain
from graven.audit.forms import flat, input_output, symmetric, unflat, weights, with_weights
from graven.audit.kernel import Attention, best_attention, best_kernel, best_step, fitted_kernel, gradient_step, kernel_forms, read_kernel
from graven.audit.merge import merge_hidden, merge_outputs, products
from graven.audit.polynomial import distance, monomials, polynomial
from graven.audit.prune import hidden_contributions, output_contributions, prune_hidden
from graven.audit.scores import scores
from graven.construct.attention import attention_to_lstm, attention_to_rnn
from graven.errors import LayerFileError, ShapeError, SpecError
from graven.fit import FitSpec, fit
from graven.layers.gated_rnn import GatedRNN, GatedRNNSpec
from graven.tasks.teacher import Teacher

ROUNDING = 1e-10  # of sums of a few thousand products in float64
KINDS = [(gating, recurrence) for gating in ("input_output", "side") for recurrence in ("diagonal", "dense")]


def drawn_layer(generator, *, width=3, hidden=6, outputs=5, reads=2, gating="input_output", recurrence="diagonal"):
    spec = GatedRNNSpec(
        width=width, hidden=hidden, output_gates=0 if gating == "side" else outputs, out_width=reads, gating=gating, recurrence=recurrence
    )
    return GatedRNN(spec, generator=generator, dtype=torch.float64)


def head(randn, *, width=3, reads=3, keys=3):
    return Attention(w_v=randn(reads, width), w_k=randn(keys, width), w_q=randn(keys, width))


def value(found, x):
    """A polynomial at one sequence [T, D], by loops."""
    length, width = x.shape
    one = [m for degree in (1, 2, 3, 4) for m in combinations_with_replacement(range(width), degree)]
    y = found.constant.clone()
    for t in range(length):
        y += found.one[:, t] @ torch.stack([x[t, list(m)].prod() for m in one])
    q = [torch.stack([x[t, list(m)].prod() for m in monomials(width) if m]) for t in range(length)]
    for pair, (s, t) in enumerate((a, b) for a in range(length) for b in range(a + 1, length)):
        y += torch.einsum("eij,i,j->e", found.two[:, pair], q[s], q[t])
    return y


@pytest.mark.parametrize(("gating", "recurrence"), KINDS)
@pytest.mark.parametrize("blank", [(), (1,)])
def test_the_polynomial_is_what_the_layer_reads(gating, recurrence, blank, generator, randn):
    layer, x = drawn_layer(generator, gating=gating, recurrence=recurrence), randn(1, 4, 3)
    x[0, -1, list(blank)] = 0.0
    assert_near([value(polynomial(layer, length=4, blank=blank), x[0])], [layer(x)[0][0, -1].detach()], tolerance=ROUNDING)


def test_a_side_gated_layer_has_an_equal_of_input_and_output_gating(generator, randn):
    layer, x = drawn_layer(generator, gating="side"), randn(2, 5, 3)
    assert_near([input_output(layer)(x)[0].detach()], [layer(x)[0].detach()], tolerance=ROUNDING)


def test_flat_keeps_inner_products(randn):
    a, b = symmetric(randn(4, 4)), symmetric(randn(4, 4))
    assert_near([flat(a) @ flat(b), unflat(flat(a))], [(a * b).sum(), a], tolerance=ROUNDING)


@pytest.mark.parametrize("form", ["naive", "symmetric_fast", "minimal", "side", "side_symmetric"])
def test_a_construction_is_at_distance_0(form, randn):
    attention = head(randn)
    layer = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q, form=form)
    assert distance(polynomial(layer, length=4), polynomial(kernel_forms(attention.kernel), length=4)) < ROUNDING


@pytest.mark.parametrize(("reads", "width", "keys"), [(3, 3, 3), (2, 3, 2), (1, 2, 2), (3, 4, 2), (3, 1, 1)])
def test_a_head_is_found_in_its_polynomial_and_in_what_it_reads(reads, width, keys, randn):
    attention = head(randn, width=width, reads=reads, keys=keys)
    found = best_kernel(polynomial(kernel_forms(attention.kernel), length=5), width=width)
    x = randn(200, 5, width)
    fitted = fitted_kernel(x, attention.read(x))
    assert_near([found.kernel, best_attention(found.kernel).kernel, fitted.kernel], [attention.kernel] * 3, tolerance=1e-7)
    assert_near([read_kernel(attention.kernel, x)], [attention.read(x)], tolerance=ROUNDING)
    assert min(found.energy, fitted.energy) > 1 - ROUNDING


def test_a_contribution_is_what_is_lost_with_a_neuron(generator, randn):
    layer, x = drawn_layer(generator), randn(20, 5, 3)
    w, y = weights(layer), layer(x)[0].detach()
    lost = []
    for i in range(layer.spec.hidden):
        cut = {name: w[name].clone() for name in ("w_out1", "w_out2")}
        for matrix in cut.values():
            matrix[:, i] = 0.0
        lost.append((y - with_weights(**{**w, **cut})(x)[0].detach()).square().sum(-1).mean() / y.square().sum(-1).mean())
    assert_near([hidden_contributions(layer, x)], [torch.stack(lost)], tolerance=ROUNDING)
    z = (layer.hidden(x) @ w["w_out1"].T) * (layer.hidden(x) @ w["w_out2"].T)
    wanted = z.square().mean((0, 1)) * w["readout"].square().sum(0) / (2 * y.square().mean())
    assert_near([output_contributions(layer, x)], [wanted.detach()], tolerance=ROUNDING)


def test_pruning_drops_what_contributes_nothing_and_nothing_else(generator, randn):
    layer, x = drawn_layer(generator), randn(20, 5, 3)
    with torch.no_grad():
        layer.w_out1[:, 2] = layer.w_out2[:, 2] = 0.0
    pruned = prune_hidden(layer, x, threshold=1e-20)
    assert pruned.kept == (0, 1, 3, 4, 5)
    assert_near([pruned.layer(x)[0].detach()], [layer(x)[0].detach()], tolerance=ROUNDING)


def test_scales_of_neurons_change_neither_contributions_nor_dimensions(randn):
    attention = head(randn)
    layer, x = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q), randn(20, 5, 3)
    scales = randn(layer.spec.hidden).exp()
    w = weights(layer)
    other = with_weights(**{**w, "w_in1": w["w_in1"] * scales[:, None], "w_out1": w["w_out1"] / scales, "w_out2": w["w_out2"] / scales})
    assert_near([hidden_contributions(other, x)], [hidden_contributions(layer, x)], tolerance=ROUNDING)
    assert effective_dimension(other, relative_loss=0.0)[:3] == effective_dimension(layer, relative_loss=0.0)[:3] == (6, 3, 3)


@pytest.mark.parametrize(("ranks", "wanted"), [((4, 4), (10, 4)), ((4, 3), (9, 3)), ((2, 2), (4, 2))])
def test_the_effective_dimension_is_the_least_number_of_neurons(ranks, wanted, randn):
    left, right = (randn(4, rank) @ randn(rank, 4) for rank in ranks)
    found = effective_dimension(attention_to_rnn(left, torch.eye(4, dtype=torch.float64), right, form="naive"), relative_loss=0.0)
    assert found[:2] == wanted


def test_decays_are_grouped_by_what_is_left_after_a_whole_sequence():
    found = groups(torch.tensor([1.0, 0.9999, 0.99, 0.5, 0.05, 0.0]), length=32)
    assert found == ((0, 1), (4, 5), (2, 3))


def test_merging_takes_out_what_depends_on_others(randn):
    attention = head(randn)
    layer, x = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q, form="naive"), randn(20, 5, 3)
    assert layer.spec.hidden == 12
    merged = merge_hidden(layer, accumulators=6, queries=3)
    assert merged.spec.hidden == 9
    assert_near([merged(x)[0].detach()], [layer(x)[0].detach()], tolerance=ROUNDING)


@pytest.mark.parametrize(("signs", "count"), [((1, -1), 1), ((1, 1), 2), ((1,), 1), ((1, 1, -1), 2), ((-1, -1, -1, 1, 1), 3)])
def test_a_quadratic_form_takes_as_many_products_as_its_larger_signature(signs, count, randn):
    basis = torch.linalg.qr(randn(5, 5))[0][:, : len(signs)]
    form = basis * torch.tensor(signs, dtype=torch.float64) @ basis.T
    a, b = products(form)
    assert len(a) == count
    assert_near([symmetric(a.T @ b)], [form], tolerance=ROUNDING)


def test_outputs_with_collinear_columns_become_one(generator, randn):
    layer, x = drawn_layer(generator, outputs=3), randn(4, 5, 3)
    with torch.no_grad():
        a, b = randn(6), randn(6)
        layer.w_out1.copy_(torch.stack([a + b, a, a]))  # (a + b) b - a b + a b: together (a + b) b
        layer.w_out2.copy_(torch.stack([b, b, b]))
        layer.readout.copy_(torch.tensor([[1.0, -2.0, 2.0], [0.5, -1.0, 1.0]]))
    merged = merge_outputs(layer)
    assert merged.spec.output_gates == 1
    assert_near([merged(x)[0].detach()], [layer(x)[0].detach()], tolerance=1e-6)


def test_scores_are_0_for_a_construction_and_not_for_another_attention(randn):
    attention, x = head(randn), randn(60, 8, 3)
    left, right = randn(3, 2) @ randn(2, 3), randn(3, 1) @ randn(1, 3)  # so low in rank that its neurons span no other attention
    small = Attention(w_v=left, w_k=torch.eye(3, dtype=torch.float64), w_q=right)
    layer = attention_to_rnn(small.w_v, small.w_k, small.w_q)
    assert max(scores(layer, small, x)[:2]) < ROUNDING
    assert min(scores(layer, attention, x)[:2]) > 0.1


@pytest.fixture(scope="module")
def trained():
    """Two layers of 16 hidden neurons and 16 outputs, with teachers whose forms are well conditioned, after 1500 steps each."""
    pairs = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        teacher = next(t for t in iter(lambda: Teacher.random(dimension=2, generator=generator, length=16), None) if t.ranks.smallest > 0.15)  # noqa: B023
        layer = GatedRNN(GatedRNNSpec(width=2, hidden=16, output_gates=16), generator=generator)
        fit(layer, lambda: teacher.sample(16, generator=generator), FitSpec(steps=1500))  # noqa: B023
        pairs.append((layer, teacher))
    return pairs


@pytest.mark.plain
@pytest.mark.parametrize("seed", range(2))
def test_a_trained_layer_is_identified(seed, trained):
    layer, teacher = trained[seed]
    report = explain(layer, teacher, length=16)
    assert report.kind == "attention"
    assert report.verdict.startswith("attention with 3 + 2 neurons")
    assert (report.after.spec.hidden, report.after.spec.output_gates) == (5, 3)
    stages = {stage.name: stage for stage in report.stages}
    assert stages["moved onto the teacher"].relative_loss < 1e-15
    assert stages["and one output less"].relative_loss > 1e-4
    assert stages["fitted to what it read as it came"].relative_loss < 0.02


@pytest.mark.plain
def test_a_trained_layer_is_attention_by_itself_and_no_other_attention(trained, tmp_path):
    layer, _ = trained[0]
    own = explain(layer, length=16)
    assert own.verdict.startswith("attention with 3 + 2 neurons")
    assert explain(layer, trained[1][1], length=16).kind == "neither"
    own.draw(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert json.loads(json.dumps(own.facts(), allow_nan=False))["kind"] == "attention"


@pytest.mark.parametrize("gating", ["input_output", "side"])
def test_an_untrained_layer_is_neither(gating, generator):
    layer = drawn_layer(generator, hidden=20, outputs=20, reads=3, gating=gating)
    report = explain(layer, length=8)
    assert (report.kind, report.stages) == ("neither", ())


def test_a_planted_layer_that_is_no_attention_is_neither(randn):
    attention = head(randn)
    layer = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q)
    with torch.no_grad():
        layer.w_out2.copy_(layer.w_out1)  # the sums are squared: nothing asks a query any more
    assert explain(layer, length=8).kind == "neither"
    forgetful = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q)
    with torch.no_grad():
        forgetful.decay.mul_(0.8)
    assert explain(forgetful, length=16).kind == "neither"


def planted_power(layer, factor):
    """With an output more: x_0^4, which is no part of any attention."""
    w = weights(layer)
    (hidden, width), outputs = w["w_in1"].shape, len(w["w_out1"])
    first = torch.eye(width, dtype=torch.float64)[:1]
    for name in ("w_in1", "w_in2"):
        w[name] = torch.cat([w[name], first])
    for name in ("w_out1", "w_out2"):
        wider = torch.zeros(outputs + 1, hidden + 1, dtype=torch.float64)
        wider[:outputs, :hidden], wider[outputs, hidden] = w[name], 1.0
        w[name] = wider
    w["decay"] = torch.cat([w["decay"], torch.zeros(1, dtype=torch.float64)])
    w["readout"] = torch.cat([w["readout"], factor * torch.eye(len(w["readout"]), dtype=torch.float64)[:, :1]], 1)
    return with_weights(**w)


def test_what_is_beside_attention_is_said_and_nothing_is_as_good_that_is_not(randn):
    attention = head(randn, width=2, reads=2, keys=2)
    layer = attention_to_rnn(attention.w_v, attention.w_k, attention.w_q)
    size = float((polynomial(layer, length=8).two ** 2).sum()) ** 0.5
    exact, small, large = (explain(planted_power(layer, factor * size), attention, length=8).verdict for factor in (0.0, 0.02, 0.08))
    assert exact.endswith("6 hidden neurons and 4 outputs are as good as 5 and 3")
    assert "of the power of its reads is something else" in small
    assert "are reduced to" in small
    assert "at a relative loss of" in small
    assert large.endswith("what is not attention in it hides how many neurons that takes")


def test_a_count_of_tokens_is_no_attention(randn):
    """A sum of |x|^2 over many tokens hardly differs from their number, and a kernel can have it."""
    x, place = randn(64, 256, 4), torch.arange(1, 257, dtype=torch.float64)[:, None]
    report = explain(lambda x: x * place, tokens=x)
    assert report.kind == "neither"
    assert report.findings[1].value > 0.99
    assert explain(head(randn, width=4, reads=4, keys=4).read, tokens=x).kind == "attention"


def test_a_planted_gradient_step_is_one_with_its_rate():
    step = gradient_step(width=6, outputs=3, rate=0.0676)
    report = explain(attention_to_rnn(step.w_v, step.w_k, step.w_q), length=8)
    assert report.verdict.startswith("one gradient step with rate 0.0676 with 9 + 3 neurons")
    assert best_step(step.kernel).rate == pytest.approx(0.0676)


def test_several_heads_are_attention_with_several_heads(randn):
    layer = attention_to_rnn(randn(2, 2, 2), randn(2, 2, 2), randn(2, 2, 2))
    assert explain(layer, length=6).verdict.startswith("attention with several heads with 3 + 2 neurons")


def test_a_layer_of_another_kind_is_judged_by_what_it_reads(randn):
    attention = head(randn, width=2, reads=2, keys=2)
    lstm = attention_to_lstm(attention.w_v, attention.w_k, attention.w_q)
    assert explain(lstm, attention, length=8).kind == "attention"
    assert explain(lstm, length=8).kind == "attention"
    assert explain(torch.nn.GRU(2, 3, batch_first=True), length=8).kind == "neither"
    assert_refused(SpecError, "batch_first", lambda: explain(torch.nn.GRU(2, 3)))


def test_what_cannot_be_audited_is_refused(randn, generator):
    layer = drawn_layer(generator)
    assert_refused(
        ShapeError, "width 2 and reads 2, and the layer takes 3 and reads 2", lambda: explain(layer, head(randn, width=2, reads=2, keys=2))
    )
    assert_refused(SpecError, "at least 2", lambda: explain(layer, length=1))
    assert_refused(SpecError, "`blank` names entry 3", lambda: explain(layer, blank=(3,)))
    assert_refused(SpecError, "dense", lambda: hidden_contributions(drawn_layer(generator, recurrence="dense"), randn(2, 3, 3)))
    with torch.no_grad():
        layer.readout[0, 0] = float("nan")
    assert_refused(SpecError, "`readout` has an entry that is not finite", lambda: explain(layer))


@pytest.mark.parametrize("gating", ["input_output", "side"])
def test_a_layer_and_a_teacher_come_back_bit_for_bit(gating, generator, randn, tmp_path):
    layer, attention = drawn_layer(generator, gating=gating).float(), head(randn)
    read = load_layer(save_layer(layer, tmp_path / "layer"))
    teacher = load_teacher(save_teacher(attention, tmp_path / "teacher"))
    assert read.spec == layer.spec
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), layer.parameters(), strict=True))
    assert torch.equal(teacher.kernel, attention.kernel)


def test_a_file_that_is_no_layer_is_refused(generator, randn, tmp_path):
    whole = save_layer(drawn_layer(generator), tmp_path / "layer").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-8])
    (tmp_path / "junk").write_bytes(b"no layer")
    save_teacher(head(randn), tmp_path / "teacher")
    broken = drawn_layer(generator)
    with torch.no_grad():
        broken.decay[0] = float("inf")
    save_layer(broken, tmp_path / "broken")
    (tmp_path / "changed").write_bytes(whole.replace(b'"hidden\\": 6'.replace(b'"', b'\\"', 1), b'\\"hidden\\": 7'))
    for name, words in (
        ("none", "there is no file"), ("cut", "no whole layer file"), ("junk", "no whole layer file"), ("teacher", "and no layer"),
        ("broken", "not finite"), ("changed", "was changed"),
    ):  # fmt: skip
        assert_refused(LayerFileError, words, lambda name=name: load_layer(tmp_path / name))
    assert_refused(LayerFileError, "and no teacher", lambda: load_teacher(tmp_path / "layer"))


@pytest.mark.plain  # an unknown form is refused by the shape checks first
def test_the_command_line_audits_and_sizes(generator, randn, tmp_path, capsys):
    attention = head(randn, width=2, reads=2, keys=2)
    layer = str(save_layer(attention_to_rnn(attention.w_v, attention.w_k, attention.w_q), tmp_path / "layer"))
    teacher = str(save_teacher(attention, tmp_path / "teacher"))
    assert cli.main(["audit", layer, "--teacher", teacher, "--json", "--out", str(tmp_path / "out"), "--length", "8"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out" / "audit.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.json", "audit.png", "audit.txt"]
    other = str(save_layer(drawn_layer(generator, hidden=12, outputs=12), tmp_path / "other"))
    assert cli.main(["audit", other, "--length", "8"]) == 1
    assert capsys.readouterr().out.startswith("neither attention nor a gradient step")
    assert cli.main(["audit", other, "--teacher", teacher]) == 2
    assert cli.main(["size", "--rank", "4", "--width", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("needed       14 hidden neurons, 10 outputs")
    assert cli.main(["size", "--rank", "4", "--form", "none"]) == 2
