"""Collectives that send fewer bits: block-quantized gathers and reductions, the 1-bit all-reduce."""
