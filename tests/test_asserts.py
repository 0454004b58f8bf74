import pytest
import torch
from asserts import assert_near, assert_refused


def test_assert_refused_fails_where_nothing_is_raised():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_refused(ValueError, "a", lambda: None)


def test_assert_refused_fails_on_other_words():
    with pytest.raises(AssertionError, match="is not in"):
        assert_refused(ValueError, "other", lambda: int("x"))


@pytest.mark.parametrize(("x", "y"), [([1.0], [1.1]), ([float("nan")], [1.0]), ([float("nan")], [float("nan")]), ([1.0, 2.0], [1.0])])
def test_assert_near_fails_on_other_numbers_shapes_and_nan(x, y):
    with pytest.raises(AssertionError):
        assert_near([torch.tensor(x)], [torch.tensor(y)], tolerance=1e-3)
