"""Layers of transformers that drop tokens: kept tokens have their own positions, masks and gradients."""

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mpispeed.nn.block import TransformerConfig, TransformerLayer
from tests.helpers.token_dropping import drop_tokens, kept_of, section

WIDTH, TOKENS, BATCH, KEPT = 16, 10, 3, 6
SIZES = {"num_hidden_layers": 3, "hidden_size": WIDTH, "num_attention_heads": 2, "vocab_size": 40}
LONG = {"intermediate_size": 24, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(attention):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **LONG, attn_implementation=attention))


def gpt2(attention):
    sizes = {"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, attn_implementation=attention))


def bert(attention):
    return BertModel(BertConfig(**SIZES, **LONG, **NO_DROPOUT, attn_implementation=attention))


FAMILIES = {
    "llama": (llama, LlamaDecoderLayer, "decoder"),
    "gpt2": (gpt2, GPT2Block, "decoder"),
    "bert": (bert, BertLayer, "encoder"),
}


def padded():
    """Which tokens of samples of different lengths are whole."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, 6:] = 0
    return mask


def split(model, family, ids):
    """What a model does before its layers and after them, and its layers as functions of one sample's kept tokens.

    A layer gets hidden states [1, K, H], the places of the tokens and which of the sample's tokens are whole.
    """
    if family == "llama":
        base, positions = model.model, torch.arange(TOKENS)[None]
        before, after = base.embed_tokens(ids), lambda h: model.lm_head(base.norm(h))
        cos, sin = base.rotary_emb(before, position_ids=positions)
        return (
            before,
            after,
            [
                lambda h, at, own, layer=layer: layer(
                    h, attention_mask=causal(at, own, h), position_embeddings=(cos[:, at], sin[:, at])
                )
                for layer in base.layers
            ],
        )
    if family == "gpt2":
        base = model.transformer
        before, after = base.wte(ids) + base.wpe(torch.arange(TOKENS)), lambda h: model.lm_head(base.ln_f(h))
        return before, after, [lambda h, at, own, layer=layer: layer(h, None, causal(at, own, h)) for layer in base.h]

    def sees(at, own, h):
        return float_mask(own[at][None, None, None].bool().expand(1, 1, len(at), len(at)), h)

    return (
        model.embeddings(ids),
        lambda h: h,
        [lambda h, at, own, layer=layer: layer(h, sees(at, own, h)) for layer in model.encoder.layer],
    )


def causal(at, own, h):
    sees = (at[:, None] >= at) & own[at].bool()
    return float_mask(sees[None, None], h)


def float_mask(sees, h):
    return torch.zeros(sees.shape, dtype=h.dtype).masked_fill(~sees, torch.finfo(h.dtype).min)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_see_kept_tokens_at_their_places(family, attention, is_padded):
    make, kind, model_type = FAMILIES[family]
    torch.manual_seed(0)
    model = make(attention).train()
    config = section(3, [0, 2], KEPT, TOKENS, model_type=model_type, model_mask_name="attention_mask")
    ids = torch.randint(0, 40, (BATCH, TOKENS))
    mask = padded() if is_padded else torch.ones(BATCH, TOKENS, dtype=torch.long)
    before, after, layers = split(model, family, ids)
    drop_tokens(model, kind, config)
    hidden = before
    for number, layer in enumerate(layers):
        rows, dropped = [], number in config["random_ltd_layer_id"]
        places = kept_of(config, number, BATCH, TOKENS) if dropped else torch.arange(TOKENS).repeat(BATCH, 1)
        for sample in range(BATCH):
            at, row = places[sample], hidden[sample].clone()
            model.eval()  # a layer alone drops nothing
            row[at] = layer(hidden[sample : sample + 1, at], at, mask[sample])[0]
            model.train()
            rows.append(row)
        hidden = torch.stack(rows)
    wanted = after(hidden)
    found = model(ids, attention_mask=mask)
    ours = found.logits if hasattr(found, "logits") else found.last_hidden_state
    is_seen = mask.bool()
    torch.testing.assert_close(ours[is_seen], wanted[is_seen], rtol=1e-4, atol=1e-5)
    params = [param for name, param in model.named_parameters() if "pooler" not in name]
    pairs = zip(*(torch.autograd.grad(out[is_seen].square().sum(), params) for out in (ours, wanted)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_gradient_checkpointing_of_transformers_keeps_the_tokens():
    torch.manual_seed(0)
    model = llama("sdpa").train()
    drop_tokens(model, LlamaDecoderLayer, section(3, [1, 2], KEPT, TOKENS, model_mask_name="attention_mask"))
    ids, found = torch.randint(0, 40, (BATCH, TOKENS)), []
    for recomputes in (False, True):
        if recomputes:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = model(ids, labels=ids, use_cache=False).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hidden_states_that_a_model_returns_are_whole():
    model = llama("sdpa").train()
    drop_tokens(model, LlamaDecoderLayer, section(3, [1], KEPT, TOKENS, model_mask_name="attention_mask"))
    ids = torch.randint(0, 40, (BATCH, TOKENS))
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert {tuple(state.shape) for state in states} == {(BATCH, TOKENS, WIDTH)}


def test_the_fused_layer_drops_tokens():
    torch.manual_seed(0)
    settings = TransformerConfig(
        batch_size=BATCH, hidden_size=WIDTH, intermediate_size=24, heads=2, attn_dropout_ratio=0.0,
        hidden_dropout_ratio=0.0, num_hidden_layers=1, initializer_range=0.02, pre_layer_norm=True,
    )  # fmt: skip
    layer = TransformerLayer(settings)
    model = torch.nn.Sequential(layer)
    config = section(1, [0], KEPT, TOKENS, model_type="encoder", model_mask_name="attention_mask")
    drop_tokens(model, TransformerLayer, config)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    mask = float_mask(padded().bool()[:, None, None], x)
    ours, places = layer(x, mask), kept_of(config, 0, BATCH, TOKENS)
    ours = ours[0] if isinstance(ours, tuple) else ours
    layer.eval()
    for sample in range(BATCH):
        at = places[sample]
        alone = layer(x[sample : sample + 1, at], mask[sample : sample + 1, ..., at])
        alone = alone[0] if isinstance(alone, tuple) else alone
        torch.testing.assert_close(ours[sample, at], alone.view(KEPT, WIDTH), rtol=1e-4, atol=1e-5)
