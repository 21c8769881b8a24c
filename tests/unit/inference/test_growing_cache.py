"""A cache that grows by doubling, against transformers' caches that concatenate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.inference.fused.cache import GrowingLayer, check_room, growing_cache

SHAPE = (2, 3, 4)  # batch, heads, size


def states(count, seed, batch=2):
    torch.manual_seed(seed)
    return torch.randn(batch, SHAPE[1], count, SHAPE[2]), torch.randn(batch, SHAPE[1], count, SHAPE[2])


def layers(window, most=0):
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    theirs = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    return theirs, GrowingLayer(most, window)


steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(0, 5)),
    st.tuples(st.just("select"), st.permutations([0, 1])),
    st.tuples(st.just("reset"), st.just(0)),
)


@given(st.sampled_from([0, 2, 5, 33]), st.lists(steps, max_size=12), st.sampled_from([0, 7, 70]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_states_are_those_of_transformers_after_any_steps(window, todo, most, records):
    theirs, ours = layers(window, most)
    if window and records:
        theirs.activate_past_recording()
        ours.activate_past_recording()
    for seed, (what, how) in enumerate(todo):
        if what == "append":
            new = states(how, seed)
            assert theirs.get_mask_sizes(how) == ours.get_mask_sizes(how)
            assert all(map(torch.equal, theirs.update(*new), ours.update(*new)))
        elif what == "select" and theirs.get_seq_length():
            theirs.reorder_cache(torch.tensor(how))
            ours.reorder_cache(torch.tensor(how))
        elif what == "reset":
            theirs.reset()
            ours.reset()
        elif (
            what == "crop"
            and how < theirs.get_seq_length()
            and not (window and theirs.get_seq_length() >= window and not records)
        ):
            theirs.crop(-how)
            ours.crop(-how)
        assert theirs.get_seq_length() == ours.get_seq_length()
    if theirs.get_seq_length():
        kept = min(theirs.keys.shape[2], ours.keys.shape[2])
        assert torch.equal(theirs.keys[:, :, -kept:], ours.keys[:, :, -kept:]) or not kept


def test_a_token_is_written_in_place_until_memory_doubles():
    ours = GrowingLayer()
    moves, place = 0, 0
    for seed in range(1000):
        keys, _ = ours.update(*states(1, seed))
        moves += keys.data_ptr() != place
        place = keys.data_ptr()
    assert moves == 5  # 64, 128, 256, 512, 1024


def test_memory_of_a_window_is_bounded():
    ours = GrowingLayer(window=100)
    for seed in range(700):
        keys, _ = ours.update(*states(1, seed))
    assert keys.shape[2] == 100
    assert ours._memory[0].shape[2] <= 256


def test_batch_repeats_and_limits():
    ours = GrowingLayer(most=80)
    ours.update(*states(70, 0))
    assert ours._memory[0].shape[2] == 80
    ours.batch_repeat_interleave(3)
    assert ours.keys.shape[0] == 6
    assert torch.equal(ours.keys[1], ours.keys[0])
    with pytest.raises(UsageError, match="as a negative one"):
        ours.crop(3)


def test_a_window_that_has_dropped_states_cannot_go_back():
    ours = GrowingLayer(window=4)
    ours.update(*states(9, 0))
    with pytest.raises(UsageError, match="activate_past_recording"):
        ours.crop(-2)


def test_the_cache_of_a_model_has_its_windows():
    from transformers import MistralConfig

    cache = growing_cache(MistralConfig(num_hidden_layers=2, sliding_window=9), most=50)
    assert [layer.window for layer in cache.layers] == [9, 9]
    assert cache.is_sliding == [True, True]
    assert cache.get_seq_length() == 0


def test_memory_that_is_not_there_is_told_with_figures():
    with pytest.raises(UsageError, match=r"2 x 1024 tokens need 2048 TiB, 1 TiB a token"):
        check_room(1 << 40, 1024, 2, torch.device("cpu"))
    check_room(16, 4, 2, torch.device("cpu"))
