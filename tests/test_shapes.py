import numpy as np
import pytest
import torch

from graven.errors import GravenError, ShapeError
from graven.shapes import check


def test_sizes_are_returned_by_letter():
    assert check(x=(torch.zeros(2, 3), "B T"), y=(torch.zeros(2, 3, 4), "B T D")) == {"B": 2, "T": 3, "D": 4}


def test_a_number_is_an_exact_size_and_no_letter():
    assert check(x=(torch.zeros(2, 64), "B 64")) == {"B": 2}


def test_arrays_are_checked_like_tensors():
    assert check(x=(np.zeros((2, 3)), "B T"), y=(torch.zeros(3), "T")) == {"B": 2, "T": 3}


def test_an_axis_may_be_empty():
    assert check(x=(torch.zeros(2, 0), "B T"), y=(torch.zeros(0, 2), "T B")) == {"B": 2, "T": 0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"x": (torch.zeros(2, 3), "B T D")},
            "`x` has shape (2, 3), which has 2 axes; 3 were expected: [B, T, D]. Add or drop axes.",
        ),
        (
            {"x": (torch.zeros(2, 3), "B T"), "y": (torch.zeros(2, 4), "B T")},
            "`y` has shape (2, 4); axis 1 is 4 and [B=2, T=3] was expected. Make the sizes agree.",
        ),
        (
            {"x": (torch.zeros(2, 3), "B 64")},
            "`x` has shape (2, 3); axis 1 is 3 and [B, 64] was expected. Make the sizes agree.",
        ),
        (
            {"x": (torch.zeros(2, 3), "D D")},
            "`x` has shape (2, 3); axis 1 is 3 and [D, D] was expected. Make the sizes agree.",
        ),
    ],
)
def test_a_shape_that_does_not_fit_is_one_sentence_with_both_numbers(arguments, sentence):
    with pytest.raises(ShapeError) as caught:
        check(**arguments)
    assert str(caught.value) == sentence
    assert isinstance(caught.value, GravenError)
    assert isinstance(caught.value, ValueError)
