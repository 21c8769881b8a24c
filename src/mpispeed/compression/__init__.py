"""Models that become smaller in training: quantization, pruning, fewer layers; and what makes it permanent.

Knows the config, engines, and the compressible layers of `nn.compression`. Only `api` sees settings.
"""

from mpispeed.compression.api import CompressionScheduler, compression_scheduler, init_compression
from mpispeed.compression.clean import redundancy_clean

__all__ = ["CompressionScheduler", "compression_scheduler", "init_compression", "redundancy_clean"]
