"""Attention over blocks equals dense attention with -inf outside, forward and backward."""

import pytest
import torch

from mpispeed.nn.sparse import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    sparsity_of,
)

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of numbers around 1: some units in the last place of each dtype."""


def reference(q, k, v, layout, block, added=None):
    """Dense attention in fp64; rows without a key are zeros."""
    mask = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if added is None else scores + added
    scores = scores.masked_fill(~mask, -torch.inf)
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0) @ v


def compared(attend, expected_of, shape, dtype=torch.float32):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    twins = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = attend(*inputs), expected_of(*twins)
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype
    for found, wanted in zip([out, *(x.grad for x in inputs)], [expected, *(x.grad for x in twins)], strict=True):
        assert torch.allclose(found.double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


PATTERNS = {
    "fixed": FixedSparsityConfig(4, 8, True, num_different_global_patterns=2),
    "uni": FixedSparsityConfig(4, 8, attention="unidirectional"),
    "bigbird": BigBirdSparsityConfig(4, 8, True),
    "variable": VariableSparsityConfig(4, 8, num_random_blocks=2, local_window_blocks=[1, 2]),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fixed", torch.float32), ("uni", torch.bfloat16), ("bigbird", torch.float32), ("variable", torch.float16)],
)
def test_it_is_dense_attention_without_the_other_blocks(name, dtype):
    config = PATTERNS[name]
    module = SparseSelfAttention(config, max_seq_length=96)
    layout = config.make_layout(96)[:, :7, :7]
    compared(module, lambda q, k, v: reference(q, k, v, layout, 8), (2, 4, 56, 16), dtype)


def test_masks_are_added_or_hide():
    config = PATTERNS["bigbird"]
    padding = torch.zeros(2, 48)
    padding[0, 29:] = -torch.inf
    seen = torch.ones(48, 48).tril()
    seen[5] = 0  # a row without any key
    rpe = torch.randn(1, 4, 48, 48)
    causal = torch.zeros(48, 48).masked_fill(seen == 0, -torch.inf)
    added = padding[:, None, None] + causal + rpe
    module = SparseSelfAttention(config, max_seq_length=96)
    compared(
        lambda q, k, v: module(q, k, v, rpe=rpe, key_padding_mask=padding[:, None, None], attn_mask=seen),
        lambda q, k, v: reference(q, k, v, config.make_layout(96)[:, :6, :6], 8, added.double()),
        (2, 4, 48, 16),
    )
    module = SparseSelfAttention(config, "mul", "add", 96)
    compared(
        lambda q, k, v: module(q, k.transpose(2, 3), v, rpe, (padding == 0).float(), causal),
        lambda q, k, v: reference(q, k, v, config.make_layout(96)[:, :6, :6], 8, added.double()),
        (2, 4, 48, 16),
    )


def test_causal_means_tokens():
    config = PATTERNS["uni"]
    module = SparseSelfAttention(config, max_seq_length=64)
    causal = torch.zeros(64, 64, dtype=torch.double).masked_fill(torch.ones(64, 64).triu(1) == 1, -torch.inf)
    compared(
        lambda q, k, v: module(q, k, v, is_causal=True),
        lambda q, k, v: reference(q, k, v, config.make_layout(64), 8, causal),
        (1, 4, 64, 8),
    )


def test_two_modules_of_a_length_have_their_own_layouts():
    x = torch.randn(1, 4, 64, 8)
    first, second = (SparseSelfAttention(c, max_seq_length=64) for c in (DenseSparsityConfig(4, 8), PATTERNS["uni"]))
    assert not torch.allclose(first(x, x, x), second(x, x, x))
    assert torch.equal(first(x, x, x), SparseSelfAttention(DenseSparsityConfig(4, 16), max_seq_length=64)(x, x, x))
    twin = SparseSelfAttention(FixedSparsityConfig(4, 8, attention="unidirectional"), max_seq_length=64)
    assert twin.blocks_of(64, 4) is second.blocks_of(64, 4)  # equal ones are one


def test_a_default_module_takes_the_pattern_of_a_config_and_a_layout_of_a_file():
    x = torch.randn(1, 2, 64, 8)
    module = SparseSelfAttention(max_seq_length=64)
    assert module(x, x, x).shape == x.shape
    module.adopt(lambda heads: sparsity_of({"mode": "dense", "block": 32}, heads))
    assert torch.allclose(module(x, x, x), torch.nn.functional.scaled_dot_product_attention(x, x, x), atol=1e-6)
    assert module.sparsity_config.num_heads == 2
    assert not module.state_dict()
    module.load_state_dict({"master_layout": torch.eye(2, dtype=torch.int64).expand(2, -1, -1)})
    parts = [torch.nn.functional.scaled_dot_product_attention(*[part] * 3) for part in x.split(32, 2)]
    assert torch.allclose(module(x, x, x), torch.cat(parts, 2), atol=1e-6)


def test_sections_mean_patterns():
    section = {"mode": "bigbird", "block": 8, "num_local_blocks": 3}
    assert sparsity_of(section, 4).num_random_blocks == 0
    assert sparsity_of({**section, "num_random_blocks": 2}, 4).num_random_blocks == 2
    made = sparsity_of({"mode": "variable", "local_window_blocks": [2, 4], "attention": "unidirectional"}, 4)
    assert (made.local_window_blocks, made.block) == ((2, 4), 16)
    assert sparsity_of({}, 4).num_local_blocks == 4
    with pytest.raises(NotImplementedError, match="'sliding'"):
        sparsity_of({"mode": "sliding"}, 4)


def test_what_does_not_fit_is_said():
    module = SparseSelfAttention(FixedSparsityConfig(4), max_seq_length=64)
    x = torch.randn(1, 4, 72, 8)
    with pytest.raises(ValueError, match="pad it to 80"):
        module(x, x, x)
    x = torch.randn(1, 4, 128, 8)
    with pytest.raises(ValueError, match="max_seq_length=64"):
        module(x, x, x)
    with pytest.raises(NotImplementedError, match="self-attention only"):
        module(x, x[:, :, :64], x)
    with pytest.raises(ValueError, match="'times'"):
        SparseSelfAttention(attn_mask_mode="times")
    with pytest.raises(NotImplementedError, match="no pattern of its own"):
        SparseSelfAttention(SparsityConfig(4))


class Sizes:
    hidden_size, num_attention_heads, attention_probs_dropout_prob = 32, 4, 0.0


def test_berts_attention_projects_and_attends():
    torch.manual_seed(0)
    module = BertSparseSelfAttention(Sizes, DenseSparsityConfig(4, 8))
    x, mask = torch.randn(2, 24, 32), torch.zeros(2, 1, 1, 24)
    mask[1, ..., 20:] = -10000.0
    q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (module.query, module.key, module.value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    assert torch.allclose(module(x, mask), expected, atol=1e-6)


def test_berts_attention_refuses_heads_and_dropout():
    with pytest.raises(ValueError, match="multiple of num_attention_heads"):
        BertSparseSelfAttention(type("", (Sizes,), {"num_attention_heads": 5}))
    with pytest.raises(ValueError, match="no dropout; set it to 0"):
        BertSparseSelfAttention(type("", (Sizes,), {"attention_probs_dropout_prob": 0.1}))
