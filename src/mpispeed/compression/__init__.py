"""Models that become smaller in training: quantization, pruning, fewer layers; and what makes it permanent.

Knows the config, engines, and the compressible layers of `nn.compression`. Only `api` sees settings.
"""

from mpispeed.compression.api import CompressionScheduler, compression_scheduler, init_compression
from mpispeed.compression.clean import redundancy_clean
from mpispeed.compression.distillation import DistillationLoss, Teacher, attention_loss, hidden_loss, logits_loss
from mpispeed.compression.quantizer import Quantizer
from mpispeed.compression.student import convert_conv1d_to_linear, student_initialization

__all__ = [
    "CompressionScheduler",
    "DistillationLoss",
    "Quantizer",
    "Teacher",
    "attention_loss",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "hidden_loss",
    "init_compression",
    "logits_loss",
    "redundancy_clean",
    "student_initialization",
]
