"""One zoo for all tests: small models and their data, one builder of configs, training, and the comparison of bits.

Here are the comparisons, which need torch alone. `models`, `training` and `cut` are imported by name.
"""

from tests.zoo.compare import has_same_bits, same_bits

__all__ = ["has_same_bits", "same_bits"]
