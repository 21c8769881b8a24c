"""Passes over flat tensors: numbers of dtypes, factors of updates, and what references need."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# numbers of dtypes in the compiled loops
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}

# elements a reference works on at a time, so that its temporaries stay small
REFERENCE_SPAN = 1 << 18

DECAY_NONE, DECAY_DECOUPLED, DECAY_L2 = 0, 1, 2


class Terms(NamedTuple):
    """The factors of one update, in the order of the compiled table. Factors that a rule does not use keep defaults.

    They are doubles; the compiled loops and the torch references round them to the working dtype.

    `decay` is lr * weight_decay where the decay is decoupled (LAMB: weight_decay), and weight_decay for L2.
    """

    beta1: float = 0.0
    beta2: float = 0.0
    step_size: float = 0.0
    root_scale: float = 1.0
    eps: float = 0.0
    decay: float = 0.0
    decay_mode: int = DECAY_NONE
    grad_scale: float = 1.0
    is_eps_inside: bool = False
    least: float = 0.0
    most: float = math.inf


def divisor(value: float, of: Tensor) -> Tensor:
    """`value` to divide the tensor `of` by, as a tensor of its dtype and device.

    CUDA multiplies by the rounded reciprocal of a number, and of a tensor of one element on the host: the quotient is
    not that of the host.
    """
    return torch.full((), value, dtype=of.dtype, device=of.device)
