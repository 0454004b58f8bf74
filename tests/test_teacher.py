"""The teacher reads what the definition says, and its power, ranks and smallest singular value are exact."""

import pytest
import torch
from asserts import assert_near, assert_refused

from graven.errors import ShapeError, SpecError
from graven.tasks.teacher import Teacher, attend

EXACT = 1e-12  # float64, sums of some hundred terms


def any_teacher(generator, **settings):
    return Teacher.random(**{"dimension": 3, "generator": generator, "length": 7, **settings})


def test_the_teacher_reads_by_its_definition(generator):
    w_v, w_k, w_q = (torch.randn(rows, 3, generator=generator) for rows in (5, 2, 2))
    teacher = Teacher(w_v=w_v, w_k=w_k, w_q=w_q)
    x, y = teacher.sample(2, generator=generator, dtype=torch.float64)
    wanted = torch.zeros_like(y)
    for row in range(2):
        memory = torch.zeros(5, 2, dtype=torch.float64)
        for t, token in enumerate(x[row]):
            memory += torch.outer(teacher.w_v @ token, teacher.w_k @ token)
            wanted[row, t] = memory @ teacher.w_q @ token / teacher.power**0.5
    assert x.shape == (2, 32, 3)
    assert_near([y], [wanted], tolerance=EXACT)


def test_several_teachers_read_at_once(generator):
    teachers = [any_teacher(generator) for _ in range(2)]
    x = torch.randn(2, 4, 7, 3, generator=generator, dtype=torch.float64)
    w_v = torch.stack([teacher.w_v / teacher.power**0.5 for teacher in teachers])
    reads = attend(x, w_v=w_v, key_query=torch.stack([teacher.key_query for teacher in teachers]))
    assert_near(reads, [teacher.read(own) for teacher, own in zip(teachers, x, strict=True)], tolerance=EXACT)


def test_targets_have_power_1(generator):
    """Within 4 standard errors of 40 000 sequences, for square and other matrices; at length 1 only the token itself is read."""
    for length, rank in ((7, None), (5, 1), (1, None)):
        y = any_teacher(generator, length=length, rank=rank).sample(40_000, generator=generator, dtype=torch.float64)[1]
        means = y.square().mean((1, 2))
        assert abs(means.mean() - 1) < 4 * means.std() / len(means) ** 0.5


@pytest.mark.parametrize(("dimension", "rank", "ranks"), [(2, 2, (3, 2)), (4, 4, (10, 4)), (4, 1, (1, 1)), (6, 3, (9, 3)), (12, 6, (36, 6))])
def test_ranks_are_the_least_numbers_of_neurons(generator, dimension, rank, ranks):
    """d(d + 1)/2 + d at full rank, r_V r_KQ + r_KQ where the spaces of low ranks do not meet."""
    assert any_teacher(generator, dimension=dimension, rank=rank).ranks[:2] == ranks


def test_spaces_that_meet_save_neurons(generator):
    """Row space of W_V = column space of W_K^T W_Q, of dimension 2: 2 * 3 / 2 accumulators for 2 * 2."""
    basis = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    teacher = Teacher(w_v=torch.randn(5, 2, generator=generator, dtype=torch.float64) @ basis, w_k=basis, w_q=torch.randn(2, 5, generator=generator))
    assert teacher.ranks[:2] == (3, 2)


def test_the_smallest_singular_value_is_that_of_the_form():
    """W_V = I and W_K^T W_Q = diag(1, a): past side sqrt(1, (1 + a^2)/2, a^2), token side (1, a) times sqrt(3/2), by hand."""
    a = 0.1
    teacher = Teacher(w_v=torch.eye(2), w_k=torch.eye(2), w_q=torch.diag(torch.tensor([1.0, a], dtype=torch.float64)))
    assert teacher.ranks.smallest == pytest.approx(a, rel=1e-12)


def test_scale_does_not_change_what_is_read(generator):
    teacher = any_teacher(generator)
    louder = Teacher(w_v=7 * teacher.w_v, w_k=teacher.w_k, w_q=2 * teacher.w_q, length=7)
    x = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    assert_near([louder.read(x)], [teacher.read(x)], tolerance=EXACT)
    assert louder.power == pytest.approx(14**2 * teacher.power, rel=1e-12)
    assert louder.ranks[:2] == teacher.ranks[:2]


@pytest.mark.plain
def test_a_teacher_that_cannot_be_is_refused(generator):
    eye = torch.eye(2)
    assert_refused(ShapeError, "`w_k` has shape", lambda: Teacher(w_v=eye, w_k=torch.eye(3), w_q=eye))
    assert_refused(SpecError, "`w_q` has an entry that is not finite", lambda: Teacher(w_v=eye, w_k=eye, w_q=eye / 0))
    assert_refused(SpecError, "reads 0 always", lambda: Teacher(w_v=eye, w_k=eye, w_q=0 * eye))
    assert_refused(SpecError, "`length` is 0", lambda: Teacher(w_v=eye, w_k=eye, w_q=eye, length=0))
    assert_refused(SpecError, "`rank` is 3 and `dimension` is 2", lambda: Teacher.random(dimension=2, rank=3, generator=generator))
    assert_refused(SpecError, "`dimension` is 0", lambda: Teacher.random(dimension=0, generator=generator))
    assert_refused(ShapeError, "axis 2 is 3", lambda: Teacher(w_v=eye, w_k=eye, w_q=eye).read(torch.ones(1, 2, 3)))
