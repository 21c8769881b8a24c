"""The batch triangle: the table of the specification, and its refusals."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config.batch import resolve_batch


@pytest.mark.parametrize("full", [(32, 16, 1), (32, 8, 2)])
@pytest.mark.parametrize("mask", [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_partial_forms_complete_to_the_whole(full, mask):
    given = [value if keep else None for value, keep in zip(full, mask, strict=True)]
    assert resolve_batch(*given, 2) == full


def test_single_values():
    assert resolve_batch(64, None, None, 1) == (64, 64, 1)
    assert resolve_batch(64, None, None, 4) == (64, 16, 1)
    assert resolve_batch(None, 3, None, 5) == (15, 3, 1)


@pytest.mark.parametrize(
    ("given", "world"),
    [
        ((33, 17, 2), 2),
        ((32, 18, 1), 2),
        ((33, None, None), 2),
        ((1, None, None), 2),
        ((8, 3, None), 1),
        ((8, 8, None), 4),
        ((8, None, 3), 2),
    ],
)
def test_numbers_that_do_not_multiply_are_refused(given, world):
    with pytest.raises(ConfigError, match="train_batch_size must equal") as caught:
        resolve_batch(*given, world)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key, value in zip(keys, given, strict=True):
        if value is not None:
            assert f"{key} {value}" in str(caught.value)
    assert f"{world} data-parallel rank" in str(caught.value)
    assert "; set train_batch_size to " in str(caught.value)


def test_the_cure_works():
    with pytest.raises(ConfigError, match=r"set train_batch_size to 32, or leave"):
        resolve_batch(33, 8, 2, 2)
    assert resolve_batch(32, 8, 2, 2) == (32, 8, 2)


@pytest.mark.parametrize("gas", [None, 3])
def test_nothing_to_start_from(gas):
    with pytest.raises(ConfigError, match="train_batch_size or train_micro_batch_size_per_gpu is required") as caught:
        resolve_batch(None, None, gas, 2)
    assert gas is None or "gradient_accumulation_steps 3" in str(caught.value)


@pytest.mark.parametrize("given", [(0, 1, 1), (4, -1, 1), (None, 4, 0)])
def test_values_below_one(given):
    with pytest.raises(ConfigError, match="must be at least 1, found"):
        resolve_batch(*given, 2)


def test_no_ranks():
    with pytest.raises(ConfigError, match="ranks must be at least 1, found 0"):
        resolve_batch(8, None, None, 0)


def test_the_error_is_what_deepspeed_scripts_catch():
    with pytest.raises(AssertionError):
        resolve_batch(33, 17, 2, 2)
