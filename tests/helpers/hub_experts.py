"""Small models of transformers with blocks of experts, made from configs, and what they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY, EXPERTS, LENGTH = 40, 8, 7
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
_INNER = {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
_LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 2,
    "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 12, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_INNER, "num_experts": EXPERTS, "shared_expert_intermediate_size": 10}),
    "qwen3_moe": ("Qwen3Moe", {**_INNER, "num_experts": EXPERTS, "norm_topk_prob": True, "head_dim": 4}),
    "olmoe": ("Olmoe", {"intermediate_size": 12, "num_experts": EXPERTS, "num_experts_per_tok": 3}),
    "deepseek_v2": ("DeepseekV2", {**_INNER, **_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_INNER, **_LATENT, "norm_topk_prob": True}),
}
"""By `model_type`: the name of the classes, and what their config has beside `_SIZES`."""


def model_of(kind: str, **more: Any) -> Any:
    """A model whose weights depend on its kind alone; biases of routers are not 0."""
    name, own = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **own, **more})
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    return model.train()


def tokens_of(batch: int, seed: int = 0) -> torch.Tensor:
    """Tokens of so many sequences."""
    return torch.randint(1, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
