"""Tiny models of `transformers` with random weights, from configurations made here: nothing is downloaded."""

import functools

import torch

VOCAB, LENGTH, BATCH = 67, 12, 2


@functools.cache
def builders():
    """Name -> function that makes the model; dropout is off."""
    import transformers as hub

    small = {"vocab_size": VOCAB, "max_position_embeddings": 32}
    rotary = {**small, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    grouped = {**rotary, "num_key_value_heads": 2}
    gpt2 = {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    opt = {**small, "hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 42, "num_hidden_layers": 2}
    opt |= {"num_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def make(model, config, **options):
        return lambda **change: getattr(hub, model)(getattr(hub, config)(**{**options, **ends, **change}))

    return {
        "gpt2": make("GPT2LMHeadModel", "GPT2Config", **gpt2),
        "llama": make("LlamaForCausalLM", "LlamaConfig", **grouped),
        "mistral": make("MistralForCausalLM", "MistralConfig", sliding_window=8, **grouped),
        "qwen2": make("Qwen2ForCausalLM", "Qwen2Config", **grouped),
        "bert": make("BertForMaskedLM", "BertConfig", **rotary, **still),
        "opt": make("OPTForCausalLM", "OPTConfig", **opt),
        "gemma": make("GemmaForCausalLM", "GemmaConfig", head_dim=6, **grouped),
        "qwen3": make("Qwen3ForCausalLM", "Qwen3Config", head_dim=6, **grouped),
        "roberta": make("RobertaForMaskedLM", "RobertaConfig", **rotary, **still),
        "bloom": make(
            "BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=4,
            hidden_dropout=0.0, attention_dropout=0.0,
        ),
        "mixtral": make(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **grouped
        ),
        "gpt_neo": make(
            "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=24, num_layers=2, num_heads=4, window_size=4, **small,
            attention_types=[[["global", "local"], 1]], resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
        ),
        "gptj": make("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **gpt2),
        "phi3": make("Phi3ForCausalLM", "Phi3Config", **grouped),
        "gpt_neox": make("GPTNeoXForCausalLM", "GPTNeoXConfig", **rotary),
        "t5": make(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=44, num_layers=2,
            num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        ),
    }  # fmt: skip


def build(name, seed=5, **change):
    """The model, with biases and norms away from their special starting values."""
    torch.manual_seed(seed)
    model = builders()[name](**change)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape))
    return model


def batch(seed=1, length=LENGTH):
    """Tokens without the special ones, labels and a mask with some padding."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (BATCH, length), generator=draw)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
