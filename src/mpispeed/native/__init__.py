"""Compiled passes over flat tensors, on the host and on devices: optimizer updates, sums, norms, quantizers, block I/O.

Functions of the host have a reference in torch or numpy that gives the same bits and takes over, with one log line,
where the compiled module is missing; `native.status` lists usable ones, with reasons for others. This floor knows
tensors and bytes; it must not know ranks, settings, or the meaning of a buffer.
"""
