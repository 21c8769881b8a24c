"""Layouts of block-sparse attention: golden vectors, refusals, and what holds for all patterns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.nn.sparse import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)


def rows(config, blocks, head=0):
    return ["".join(map(str, row)) for row in config.make_layout(blocks * config.block)[head].tolist()]


UNI = "unidirectional"
GOLDEN = {
    "fixed": (FixedSparsityConfig(2), 4 * ["11110001"] + 4 * ["00011111"]),
    "fixed, uni": (
        FixedSparsityConfig(2, attention=UNI),
        ["10000000", "11000000", "11100000", "11110000", "00011000", "00011100", "00011110", "00011111"],
    ),
    "fixed, short last window": (FixedSparsityConfig(2), 4 * ["111101"] + 2 * ["000111"]),
    "fixed, horizontal": (
        FixedSparsityConfig(2, horizontal_global_attention=True),
        3 * ["11110001"] + ["11111111"] + 3 * ["00011111"] + ["11111111"],
    ),
    "dense": (DenseSparsityConfig(2), 3 * ["111"]),
    "variable": (
        VariableSparsityConfig(2, local_window_blocks=[1, 2], global_block_indices=[4, 9]),
        ["100010", "011010", "011010", "000110", "000110", "000011"],
    ),
    "variable, uni, ranges": (
        VariableSparsityConfig(
            2, local_window_blocks=[2], global_block_indices=[1], global_block_end_indices=[3], attention=UNI
        ),
        ["1000", "1100", "0110", "0111"],
    ),
    "bigbird": (BigBirdSparsityConfig(2, num_random_blocks=0), ["1111", "1110", "1111", "1011"]),
    "bigbird, uni": (BigBirdSparsityConfig(2, num_random_blocks=0, attention=UNI), ["1000", "1100", "1110", "1011"]),
    "longformer": (BSLongformerSparsityConfig(2, global_block_indices=[1]), ["1100", "1111", "0111", "0111"]),
    "window": (LocalSlidingWindowSparsityConfig(2), ["1000", "1100", "0110", "0011"]),
    "window, bi": (LocalSlidingWindowSparsityConfig(2, attention="bidirectional"), ["1100", "1110", "0111", "0011"]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_pattern_has_these_blocks(name):
    config, expected = GOLDEN[name]
    layout = config.make_layout(len(expected) * config.block)
    assert layout.dtype == torch.int64
    assert rows(config, len(expected)) == expected == rows(config, len(expected), head=1)


def test_heads_have_their_own_global_blocks():
    config = FixedSparsityConfig(4, 16, True, num_different_global_patterns=3)
    globals_ = [[column for column in range(4) if rows(config, 8, head)[7][column] == "1"] for head in range(4)]
    assert globals_ == [[3], [2], [1], [3]]


def test_random_blocks_are_those_of_the_seed():
    made = [BigBirdSparsityConfig(3, 16, True, num_random_blocks=2, seed=seed).make_layout(512) for seed in (5, 5, 6)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[0][0], made[0][1])  # heads differ
    only = VariableSparsityConfig(1, num_random_blocks=3, local_window_blocks=[1], global_block_indices=[])
    counts = only.make_layout(512)[0].sum(1)
    assert set(counts.tolist()) <= {3, 4}


REFUSED = {
    "no multiple of num_global": lambda: FixedSparsityConfig(2, num_local_blocks=4, num_global_blocks=3),
    "horizontal_global_attention": lambda: FixedSparsityConfig(2, attention=UNI, horizontal_global_attention=True),
    "needs different_layout": lambda: FixedSparsityConfig(2, num_different_global_patterns=2),
    "1 to 4": lambda: FixedSparsityConfig(2, different_layout_per_head=True, num_different_global_patterns=5),
    "2 numbers and": lambda: VariableSparsityConfig(2, global_block_indices=[0, 1], global_block_end_indices=[1]),
    "are none": lambda: BSLongformerSparsityConfig(2, global_block_indices=[2], global_block_end_indices=[2]),
    "local_window_blocks": lambda: VariableSparsityConfig(2, local_window_blocks=[]),
    "pad it to 32": lambda: FixedSparsityConfig(2).make_layout(17),
    "num_random_blocks is 5": lambda: VariableSparsityConfig(2, num_random_blocks=5).make_layout(64),
    "num_sliding_window_blocks is 7": lambda: BSLongformerSparsityConfig(2, 16, False, 7).make_layout(64),
    "num_global_blocks is 9": lambda: BigBirdSparsityConfig(2, num_global_blocks=9).make_layout(64),
    "num_heads is 0": lambda: DenseSparsityConfig(0),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_a_value_error(sentence):
    with pytest.raises(ValueError, match=sentence):
        REFUSED[sentence]()


def test_unknown_kinds_are_not_implemented():
    for make in (FixedSparsityConfig, VariableSparsityConfig, BigBirdSparsityConfig, BSLongformerSparsityConfig):
        with pytest.raises(NotImplementedError, match="'both'"):
            make(2, attention="both")
    with pytest.raises(NotImplementedError, match="no pattern of its own"):
        SparsityConfig(2).make_layout(64)


@given(
    st.sampled_from([FixedSparsityConfig, VariableSparsityConfig, BigBirdSparsityConfig, BSLongformerSparsityConfig]),
    st.integers(3, 13),
    st.integers(0, 99),
)
def test_unidirectional_layouts_have_nothing_above_the_diagonal_and_all_of_it(make, blocks, seed):
    config = make(3, 4, True, attention=UNI, seed=seed)
    if hasattr(config, "num_random_blocks"):
        config.num_random_blocks = 2
    layout = config.make_layout(4 * blocks)
    assert torch.equal(layout, layout.tril())
    assert bool((layout.diagonal(dim1=1, dim2=2) == 1).all())
