"""Layers of known models replaced by fused ones that share their parameters."""
