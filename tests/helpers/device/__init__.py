"""A device of torch for tests on machines without an accelerator: `stand_in()`.

Tensors on it have memory of their own that the host cannot read or write (a fault, as with memory of a GPU), they do
not mix with tensors of the host, and their storages, streams, random numbers and peak of memory are those of a
device. Their results are those of the CPU to the bit, because torch's CPU kernels compute them. Memory is full of
bytes 0xFF until it is written: NaN in every float dtype.

The device cannot be taken back from a process. Tests that must not see it do not: it is found as an accelerator
only inside of `visible()`, and elsewhere where it is named.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from mpispeed.native import mappers
from tests.helpers.device.build import built_library
from tests.helpers.device.mapping import SharedMapper
from tests.helpers.device.module import NAME, module_over, visible

__all__ = ["NAME", "stand_in", "visible"]


@cache
def stand_in() -> torch.device:
    """The device `standin:0`; the first call compiles it, if nobody has yet, and registers it in this process."""
    library = ctypes.CDLL(str(built_library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module_over(library))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=False, for_storage=True
    )
    mappers.KINDS[NAME] = SharedMapper
    return torch.device(NAME, 0)
