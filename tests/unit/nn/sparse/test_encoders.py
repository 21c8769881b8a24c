"""Sparse attention in BERT and RoBERTa of transformers, and what scripts do around it."""

import types

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2Model, RobertaConfig, RobertaModel

from mpispeed.nn.sparse import (
    DenseSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
)

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(max_position_embeddings=32, **SIZES)),
    "bare bert": lambda: BertModel(BertConfig(max_position_embeddings=32, **SIZES)),
    "roberta": lambda: RobertaModel(RobertaConfig(max_position_embeddings=34, **SIZES)),
}


def replaced(model, config=None, length=32):
    return SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, length, config)


@pytest.mark.parametrize("kind", MODELS)
def test_a_dense_pattern_changes_no_numbers(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    ids, mask = torch.randint(2, 60, (3, 27)), torch.ones(3, 27, dtype=torch.long)
    mask[1, 20:] = 0
    names = list(model.state_dict())
    before = model(ids, attention_mask=mask)[0], model(ids)[0]
    after_of = replaced(model, DenseSparsityConfig(4, 8))
    after = after_of(ids, attention_mask=mask)[0], after_of(ids)[0]
    assert list(model.state_dict()) == names
    assert torch.allclose(before[0][mask == 1], after[0][mask == 1], atol=1e-5)  # fp32, two layers
    assert torch.allclose(before[1], after[1], atol=1e-5)
    full = (mask == 1)[:, None, None].expand(-1, -1, 27, -1)
    assert torch.allclose(after_of(ids, attention_mask=full)[0][mask == 1], after[0][mask == 1], atol=1e-5)


def test_a_window_lets_tokens_see_their_neighbours_only():
    torch.manual_seed(0)
    config = LocalSlidingWindowSparsityConfig(4, 8, 1, "bidirectional")
    model = replaced(MODELS["bare bert"](), config)
    assert sum(isinstance(module, SparseSelfAttention) for module in model.modules()) == 2
    ids = torch.randint(2, 60, (1, 32))
    changed = ids.clone()
    changed[0, 20] = 1
    differs = (model(ids)[0] != model(changed)[0]).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(16, 24))


@pytest.mark.parametrize(("kind", "reserved"), [("bert", 0), ("roberta", 2)])
def test_positions_are_repeated(kind, reserved):
    model = MODELS[kind]()
    inner = getattr(model, "bert", model)
    table = inner.embeddings.position_embeddings.weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 80)
    longer = inner.embeddings.position_embeddings.weight
    body = table[reserved:]
    assert torch.equal(longer, torch.cat([table[:reserved], body, body, body[:16]]))
    assert model.config.max_position_embeddings == 80 + reserved
    assert replaced(model, length=80)(torch.randint(2, 60, (1, 80)))[0].shape[1] == 80
    with pytest.raises(ValueError, match="has 80 positions already"):
        SparseAttentionUtils.extend_position_embedding(model, 80)
    with pytest.raises(ValueError, match="extend_position_embedding"):
        replaced(model, length=96)


def test_a_tokenizer_learns_of_longer_sequences():
    tokenizer = types.SimpleNamespace(model_max_length=32, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 80) is tokenizer
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 80


def test_inputs_are_padded_to_blocks_and_outputs_cut():
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)
    embeds, table = torch.randn(2, 5, 3), torch.nn.Embedding(9, 3)
    found = SparseAttentionUtils.pad_to_block_size(4, ids, mask, ids, ids, embeds, 7, table)
    count, *tensors, longer = found
    assert count == 3
    assert [x[0, 5:].tolist() for x in tensors] == [[7] * 3, [False] * 3, [0] * 3, [7] * 3]
    assert torch.equal(longer[:, 5:], table(torch.full((2, 3), 7)))
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(3, longer), embeds)
    assert SparseAttentionUtils.pad_to_block_size(5, ids, None, None, None, None, 7, table)[:3] == (0, ids, None)
    assert SparseAttentionUtils.unpad_sequence_output(0, embeds) is embeds
    with pytest.raises(ValueError, match="both None"):
        SparseAttentionUtils.pad_to_block_size(4, None, mask, None, None, None, 7, table)
    with pytest.raises(ValueError, match="block_size is 0"):
        SparseAttentionUtils.pad_to_block_size(0, ids, mask, None, None, None, 7, table)


def test_a_model_of_the_same_config_stays_as_it_is():
    config = BertConfig(max_position_embeddings=32, **SIZES)
    teacher, student = BertForMaskedLM(config), BertForMaskedLM(config)
    ids = torch.randint(2, 60, (2, 27))
    before = teacher(ids)[0]
    assert replaced(student)(ids)[0].shape == before.shape
    assert torch.equal(teacher(ids)[0], before)


def test_other_models_are_refused():
    other = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    with pytest.raises(ValueError, match="GPT2Model; this is for BERT and RoBERTa"):
        replaced(other)
    with pytest.raises(ValueError, match="no dropout"):
        replaced(BertModel(BertConfig(**{**SIZES, "attention_probs_dropout_prob": 0.1})))
    with pytest.raises(ValueError, match="decoder"):
        replaced(BertModel(BertConfig(is_decoder=True, **SIZES)))
