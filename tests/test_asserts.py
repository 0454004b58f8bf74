import pytest
import torch
from asserts import assert_equal_states, assert_near, assert_refused


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


def test_assert_equal_states_fails_on_a_difference_in_any_tensor():
    one = (torch.zeros(2), (torch.zeros(3),))
    assert_equal_states(one, (torch.zeros(2), (torch.zeros(3),)))
    for other in ((torch.zeros(2), (torch.tensor([0.0, 0.0, 1e-9]),)), (torch.zeros(2), (torch.zeros(4),))):
        with pytest.raises(AssertionError, match="tensor 1 differs"):
            assert_equal_states(one, other)
