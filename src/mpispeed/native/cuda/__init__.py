"""Kernels on the device: sources of cuda/, compiled once per node by nvcc, launched through pycuda on torch's stream.

`catalog` is pure data; `toolchain` finds and runs nvcc; `store` keeps its output; `launcher` runs kernels. The wrappers
beside this package (`device_optim`, `norm`, ...) choose between a kernel and its torch reference. Nothing here imports
pycuda or asks for a device before the first tensor on one.
"""
