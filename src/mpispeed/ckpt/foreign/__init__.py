"""Readers of other programs' checkpoints: safetensors, torch and DeepSpeed files as named, whole tensors.

Nothing in them is executed: pickles may only name known classes, which become inert records.
"""
