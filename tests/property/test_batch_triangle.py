"""The batch triangle against an independent search over all small triples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.config import load
from mpispeed.config.batch import resolve_batch

small = st.integers(1, 40)
maybe = st.none() | st.integers(1, 200)


@given(small, small, small)
def test_any_part_of_a_consistent_triple_is_completed_or_defaults_to_one_step(mb, gas, world):
    tb = mb * gas * world
    assert resolve_batch(tb, mb, gas, world) == (tb, mb, gas)
    assert resolve_batch(tb, mb, None, world) == (tb, mb, gas)
    assert resolve_batch(tb, None, gas, world) == (tb, mb, gas)
    assert resolve_batch(None, mb, gas, world) == (tb, mb, gas)
    assert resolve_batch(tb, None, None, world) == (tb, mb * gas, 1)
    assert resolve_batch(None, mb, None, world) == (mb * world, mb, 1)


@settings(max_examples=400)
@given(maybe, maybe, maybe, st.integers(1, 12))
def test_a_result_keeps_what_is_given_and_a_refusal_means_there_is_none(tb, mb, gas, world):
    keeps = [
        (b, m, g)
        for m in ([mb] if mb is not None else range(1, 201))
        for g in ([gas] if gas is not None else [1] if tb is None or mb is None else range(1, 201))
        for b in [m * g * world]
        if tb in (None, b)
    ]
    try:
        full = resolve_batch(tb, mb, gas, world)
    except ConfigError as error:
        assert (tb is None and mb is None) or not keeps
        for key, value in (("train_batch_size", tb), ("train_micro_batch_size_per_gpu", mb)):
            assert value is None or f"{key} {value}" in str(error)
        return
    assert full in keeps
    assert full[0] == full[1] * full[2] * world


@given(maybe, maybe, maybe)
def test_what_is_refused_without_ranks_fits_no_number_of_ranks(tb, mb, gas):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = {key: value for key, value in zip(keys, (tb, mb, gas), strict=True) if value is not None}
    try:
        load(raw)
    except ConfigError:
        for world in range(1, 201):
            with pytest.raises(ConfigError):
                resolve_batch(tb, mb, gas, world)
