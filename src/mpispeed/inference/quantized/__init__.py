"""Layers whose weights are kept as 8-bit or 4-bit codes."""
