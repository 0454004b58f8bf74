"""Sizes of gated RNNs that are attention, against the numbers of the paper and of docs/theory.md."""

import pytest
from asserts import assert_refused

from graven.errors import SpecError
from graven.theory.capacity import neurons, provision


@pytest.mark.parametrize(
    ("hidden", "gates", "parameters", "asked"),
    [  # arXiv:2309.01775, section 3.2, figures 2 and 3; appendices A.1 to A.4
        (20, 16, 924, {"form": "naive", "d": 4}),
        (14, 16, 666, {"form": "symmetric", "d": 4}),
        (14, 10, 474, {"form": "symmetric_fast", "d": 4}),
        (14, 10, 474, {"form": "minimal", "d": 4}),
        (16, 0, 320, {"form": "side", "d": 4}),
        (10, 0, 200, {"form": "side_symmetric", "d": 4}),
        (156, 144, None, {"form": "naive", "d": 12}),
        (90, 144, None, {"form": "symmetric", "d": 12}),
        (90, 78, None, {"form": "minimal", "d": 12}),
        (42, 36, None, {"form": "low_rank", "d": 12, "rank_v": 6, "rank_kq": 6}),
        (42, 36, None, {"form": "minimal", "d": 12, "rank_v": 6, "rank_kq": 6, "overlap": 0}),
        (72, 64, None, {"form": "low_rank", "d": 12, "rank_v": 8, "rank_kq": 8}),
        (66, 58, None, {"form": "minimal", "d": 12, "rank_v": 8, "rank_kq": 8, "overlap": 4}),
        (66, 58, None, {"form": "minimal", "d": 12, "rank_v": 8, "rank_kq": 8}),
        (19, 15, None, {"form": "minimal", "d": 6, "rank_v": 4, "rank_kq": 4, "overlap": 2}),
        (12, 9, None, {"form": "minimal", "d": 4, "rank_v": 4, "rank_kq": 3}),
        (12, 9, None, {"form": "minimal", "d": 6, "rank_v": 3, "rank_kq": 3}),  # the step of gradient descent of section 5, figure 3c
    ],
)
def test_a_count_is_the_known_one(hidden, gates, parameters, asked):
    count = neurons(**asked)
    assert (count.hidden, count.output_gates) == (hidden, gates)
    assert parameters is None or count.parameters == parameters


@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_the_forms_of_side_gating_have_the_parameters_of_their_formulas(d):
    assert neurons(form="side", d=d).parameters == 4 * d**3 + 4 * d**2
    assert neurons(form="side_symmetric", d=d).parameters == 2 * d * (d + 1) ** 2


@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_the_minimum_lies_at_or_below_every_form_with_output_gates_and_grows_as_less_is_shared(d):
    least = neurons(form="minimal", d=d)
    for form in ("naive", "symmetric", "symmetric_fast", "low_rank"):
        assert all(one <= other for one, other in zip(least, neurons(form=form, d=d), strict=True))
    sizes = [neurons(form="minimal", d=2 * d, rank_v=d, rank_kq=d, overlap=c).hidden for c in range(d + 1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == neurons(form="low_rank", d=2 * d, rank_v=d, rank_kq=d).hidden


@pytest.mark.parametrize(
    ("needed", "provided", "asked"),
    [  # figure 3: 28 for d = 4, 84 for d = 12 of rank 6
        (14, 28, {"rank": 4, "width": 4}),
        (42, 84, {"rank": 6, "width": 12}),
        (272, 544, {"rank": 16}),
        (152, 304, {"rank": 16, "width": 16}),
        (272, 544, {"rank": 16, "form": "naive"}),
        (256, 512, {"rank": 16, "form": "side"}),
        (136, 272, {"rank": 16, "form": "side_symmetric"}),
    ],
)
def test_twice_as_many_are_provided_as_are_needed(needed, provided, asked):
    found = provision(**asked)
    assert (found.needed.hidden, found.provided.hidden) == (needed, provided)
    assert found.provided.output_gates == 2 * found.needed.output_gates
    assert found.provided.parameters > found.needed.parameters


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("`form` is 'tiny'; .*\"?minimal", lambda: neurons(form="tiny", d=4)),
        ("`d` is 0; .*at least 1", lambda: neurons(form="naive", d=0)),
        ("`rank_v` is 5; .*from 1 to `d`, which is 4", lambda: neurons(form="minimal", d=4, rank_v=5)),
        ("`rank_kq` is 0; .*from 1 to `d`", lambda: neurons(form="low_rank", d=4, rank_kq=0)),
        ("`rank_v` is 2 and `form` is 'naive'", lambda: neurons(form="naive", d=4, rank_v=2)),
        ('`overlap` is 2 and `form` is "low_rank"', lambda: neurons(form="low_rank", d=4, overlap=2)),
        ("`overlap` is 1; .*from 2 to 3", lambda: neurons(form="minimal", d=4, rank_v=3, rank_kq=3, overlap=1)),
        ("`rank` is 0; .*at least 1", lambda: provision(rank=0)),
        ("`rank` is 5 and `width` 4; .*at most the width", lambda: provision(rank=5, width=4)),
        ('`rank` is 3 and `width` 4; .*equal to the width, .*"minimal"', lambda: provision(rank=3, width=4, form="naive")),
    ],
)
def test_a_size_that_cannot_be_is_one_sentence(words, call):
    assert_refused(SpecError, words, call)


def test_what_is_provided_is_twice_what_is_needed_and_counted_anew():
    found = provision(rank=4, width=4)
    assert found.provided == (28, 20, 2 * 28 * 5 + 28 + 2 * 20 * 28 + 4 * 20)
    assert found.width == 4
