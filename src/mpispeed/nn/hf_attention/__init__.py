"""The attention of this library as an attention implementation of Hugging Face's transformers, by the name "mpispeed".

Source: transformers, "Attention backends" (`AttentionInterface`, `AttentionMaskInterface`).
"""

from mpispeed.nn.hf_attention.register import NAME, adopt, padding_of, register_with_transformers

__all__ = ["NAME", "adopt", "padding_of", "register_with_transformers"]
