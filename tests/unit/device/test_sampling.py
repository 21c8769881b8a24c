"""Tokens that are drawn on a device are those that the host draws."""

import pytest
import torch

from mpispeed.generation.sampling import Row, Sampler, noise, stream_key
from mpispeed.generation.texts import RowLimits
from tests.helpers.device import stand_in


def test_noise_is_the_same_on_a_device():
    keys = torch.tensor([stream_key(3, str(number), 0) for number in range(5)])
    assert torch.equal(noise(keys.to(stand_in()), 4, 1001).cpu(), noise(keys, 4, 1001))


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.4}])
def test_scores_are_the_same_on_a_device(options):
    generator = torch.Generator().manual_seed(2)
    rows = [Row(stream_key(1, "a", 0), 1.2, **options), Row(stream_key(1, "b", 0)), Row(stream_key(1, "c", 0), 0.8)]
    here, there = (Sampler(rows, [3, 2, 1]) for _ in range(2))
    ids = torch.randint(0, 40, (3, 3), generator=generator)
    for _ in range(3):
        scores = torch.randn(3, 40, generator=generator)
        expected = here(ids, scores)
        found = there(ids.to(stand_in()), scores.to(stand_in()))
        assert torch.equal(found.cpu(), expected)
        ids = torch.cat([ids, expected.argmax(1, keepdim=True)], 1)
    assert there.first_nan == [-1, -1, -1]


def test_limits_of_rows_are_told_on_the_device():
    limits = RowLimits([1, 2], 3, [["a"], []], lambda ids: "b" * len(ids))
    found = limits(torch.zeros(2, 4, dtype=torch.int64, device=stand_in()))
    assert found.device.type == stand_in().type
    assert found.cpu().tolist() == [True, False]
