"""Checkpoints that other programs wrote: safetensors, torch and DeepSpeed files as named, whole tensors.

Nothing in them is executed: pickles are read with a list of known classes, which become inert records.
"""
