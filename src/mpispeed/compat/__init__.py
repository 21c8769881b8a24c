"""Floor 9: classes and functions with DeepSpeed's names and signatures, over the rooms below.

Knows every floor below. Nothing below knows of it, and nothing here is needed for training with `initialize`.
"""
