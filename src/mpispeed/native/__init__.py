"""Compiled passes over flat tensors on the host: fused Adam, tree sums, exact norms, checksums.

Each function has a twin in torch or numpy that gives the same bits and takes over, with one log
line, where the compiled module is missing; `native.status` says what is usable and why not. This
floor knows tensors and bytes; it must not know ranks, settings, or what a buffer means.
"""
