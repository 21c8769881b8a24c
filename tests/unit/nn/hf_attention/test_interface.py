"""transformers' models with the attention "mpispeed" compute what they compute with "eager"."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.hf_attention import NAME, adopt, register_with_transformers
from mpispeed.nn.hf_attention.documents import of_lengths, of_mask, of_positions, spans_of

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
ROWS, LENGTH = 3, 13


@pytest.fixture(autouse=True, scope="module")
def _known():
    register_with_transformers()


def pair(kind, config):
    """The same model with "eager" and with ours."""
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    theirs = kind(config)
    ours = kind(type(config)(**{**config.to_dict(), "attn_implementation": "eager"}))
    ours.load_state_dict(theirs.state_dict())
    ours.set_attn_implementation(NAME)
    return theirs, ours


def llama(**changes):
    return pair(LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}))


def words():
    return torch.randint(3, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))


def padded(left):
    """1 for words; the rows have 13, 9 and 4 of them."""
    places = torch.arange(LENGTH)
    counts = torch.tensor([[13], [9], [4]])
    return (places >= LENGTH - counts if left else places < counts).long()


def gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [param.grad for param in model.parameters() if param.grad is not None]


def assert_equal(models, **batch):
    (loss, grads), (other, others) = (gradients(model, **batch) for model in models)
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6)  # another order of the sums of float32
    for grad, its in zip(others, grads, strict=True):
        torch.testing.assert_close(grad, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_a_causal_model_with_padding(padding):
    mask = None if padding is None else padded(padding == "left")
    labels = words()
    if mask is not None:  # the first word of a row is foretold by padding, whose output is nobody's
        labels = labels.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    assert_equal(llama(), input_ids=words(), attention_mask=mask, labels=labels, use_cache=False)


def test_documents_of_one_row_by_positions_see_themselves_only():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]])
    batch = {"input_ids": words()[:1], "position_ids": positions, "labels": words()[:1]}
    assert_equal(llama(), **batch, use_cache=False)
    _, ours = llama()
    ours.eval()
    alone = ours(input_ids=words()[:1, 5:8], use_cache=False).logits
    together = ours(input_ids=words()[:1], position_ids=positions, use_cache=False).logits[:, 5:8]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    ends = {"cu_seq_lens_q": torch.tensor([0, 5, 8, 13]), "cu_seq_lens_k": torch.tensor([0, 5, 8, 13])}
    told = ours(input_ids=words()[:1], position_ids=positions, use_cache=True, **ends).logits[:, 5:8]
    torch.testing.assert_close(told, alone, rtol=1e-5, atol=1e-6)


def test_no_mask_of_length_times_length_is_made(monkeypatch):
    made = []
    _, ours = llama()
    import mpispeed.nn.hf_attention.masks as masks

    monkeypatch.setattr(masks, "_dense", lambda *args: made.append(args))
    ours(input_ids=words(), attention_mask=padded(left=False), use_cache=False)
    positions = torch.arange(LENGTH).repeat(ROWS, 1) % 5
    ours(input_ids=words(), position_ids=positions, use_cache=False)
    assert not made


def test_a_model_that_sees_everything_with_padding():
    models = pair(BertForMaskedLM, BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    mask = padded(left=False)
    assert_equal(models, input_ids=words(), attention_mask=mask, labels=words().masked_fill(mask == 0, -100))
    assert_equal(models, input_ids=words(), labels=words())


def test_padding_inside_of_a_row_is_a_mask_of_pairs():
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, 4:6] = 0
    labels = words().masked_fill(mask == 0, -100)
    assert_equal(llama(), input_ids=words(), attention_mask=mask, labels=labels, use_cache=False)


@pytest.mark.parametrize("window", [4, 40])
def test_windows(window):
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window)
    models = pair(MistralForCausalLM, config)
    assert_equal(models, input_ids=words(), labels=words(), use_cache=False)


def test_generation():
    theirs, ours = llama()
    batch = {"input_ids": words(), "attention_mask": padded(left=True), "max_new_tokens": 6, "do_sample": False}
    batch["pad_token_id"] = 0
    assert torch.equal(ours.generate(**batch), theirs.generate(**batch))


def test_dropout_of_padded_rows():
    _, ours = llama(attention_dropout=0.5)
    batch = {"input_ids": words(), "attention_mask": padded(left=False), "use_cache": False}
    ours.train()
    torch.manual_seed(3)
    one = ours(**batch).logits
    other = ours(**batch).logits
    torch.manual_seed(3)
    assert torch.equal(one, ours(**batch).logits)
    assert not torch.equal(one, other)
    ours.eval()
    many = torch.stack([ours(**batch).logits for _ in range(2)])
    assert torch.equal(many[0], many[1])


def test_soft_caps_are_refused():
    _, ours = pair(Gemma2ForCausalLM, Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8))
    with pytest.raises(UsageError, match=r'has no softcap.*attn_implementation="eager"'):
        ours(input_ids=words())


def test_documents_by_numbers():
    assert spans_of(torch.tensor([[1, 1, 2, 0], [0, 1, 1, 1]])) == [[(0, 2), (2, 3)], [(1, 4)]]
    assert spans_of(torch.tensor([[1, 0, 1, 1]])) is None
    assert of_mask(torch.tensor([[0, 1, 1]])).longest == 2


def test_adopting_a_model():
    model, _ = llama()
    assert adopt(torch.nn.Sequential(torch.nn.Linear(2, 2))) == 0
    assert adopt(torch.nn.ModuleDict({"inner": model})) == 1
    assert model.config._attn_implementation == NAME
    assert adopt(model) == 1
    model.config.layer_types = ["linear_attention"]
    with pytest.raises(ConfigError, match=r"linear_attention.*state along the sequence"):
        adopt(model)


def test_inference_mode_and_tables_that_are_filled_anew():
    _, ours = llama()
    ours.eval()
    with torch.no_grad():
        expected = ours(input_ids=words()).logits
    with torch.inference_mode():  # its tensors do not count their changes
        assert torch.equal(ours(input_ids=words()).logits, expected)
        packed = torch.arange(LENGTH) % 5
        first = of_positions(packed[None], 1)
        packed += packed.ne(0) * 2
        assert len(first.spans[0]) == 3
        assert of_positions(packed[None], 1).spans != first.spans
    ends = torch.tensor([0, 5, 13])
    assert of_lengths(ends, 13).spans == [[(0, 5), (5, 13)]]
    ends[1] = 7
    assert of_lengths(ends, 13).spans == [[(0, 7), (7, 13)]]
