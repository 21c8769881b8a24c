"""Tiny models of transformers with seeded random weights, for inference."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128}
VOCAB = 97


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model for text, in evaluation mode."""
    import transformers

    gated = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 3}
    old = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}
    table = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**old, "scale_attn_by_inverse_layer_idx": True}),
        "opt": ("OPTConfig", "OPTForCausalLM", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 48}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", gated),
        "mistral": ("MistralConfig", "MistralForCausalLM", {**gated, "sliding_window": 7}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", gated),
        "gpt_neo": (
            "GPTNeoConfig",
            "GPTNeoForCausalLM",
            {
                "hidden_size": 48, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 128, "window_size": 5,
                "attention_types": [[["global", "local"], 1], [["local"], 1]],
            },
        ),
        "gptj": ("GPTJConfig", "GPTJForCausalLM", {**old, "rotary_dim": 4}),
        "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 48, "n_layer": 3, "n_head": 6}),
        "bert": ("BertConfig", "BertForMaskedLM", {**SIZES, "intermediate_size": 96}),
        "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**SIZES, "intermediate_size": 96, "pad_token_id": 1}),
    }  # fmt: skip
    config_name, model_name, options = table[family]
    tokens = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    config = getattr(transformers, config_name)(**{"vocab_size": VOCAB, **tokens, **options, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # wide enough for answers that differ
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def prompts(batch: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Prompts of unequal length, padded on the left."""
    torch.manual_seed(2)
    ids = torch.randint(3, VOCAB, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
