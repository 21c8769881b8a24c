"""The comparison of tests finds what differs and says where."""

import pytest
import torch

from tests.zoo import same_bits


def test_equal_results_are_equal():
    same_bits(torch.ones(2), torch.ones(2))
    same_bits({"a": [torch.ones(2), 0.5], "b": None}, {"b": None, "a": [torch.ones(2), 0.5]})


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]), r"the value: at \[0, 1\] 2.0 is not 3.0; 1 of 2"),
        ({"w": torch.ones(2)}, {"w": torch.zeros(2)}, r"w: at \[0\] 1.0 is not 0.0; 2 of 2 elements differ"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, r"w: torch.float32 of \(2,\) is not torch.float32 of \(3,\)"),
        (torch.ones(2).double(), torch.ones(2), "torch.float64 of .* is not torch.float32"),
        ({"a": 1}, {"b": 1}, r"lacks \['b'\], has besides \['a'\]"),
        ([1.0, [2.0]], [1.0, [2.5]], r"\[1\]\[0\]: 2.0 is not 2.5"),
        ([1], [1, 2], "1 values for 2"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), r"at \[\] nan is not nan"),
        (list(range(5)), [9] * 5, "and 2 more"),
    ],
)
def test_what_differs_is_named(found, expected, words):
    with pytest.raises(AssertionError, match=words):
        same_bits(found, expected)
