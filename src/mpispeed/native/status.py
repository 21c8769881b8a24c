"""Compiled code: usable parts, reasons for others, and checks of tensors whose addresses it is given.

Tools that read files have no torch, so it is not imported here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

from mpispeed.base.errors import NativeMissing
from mpispeed.base.log import once

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_logger = logging.getLogger(__name__)

# compiled module under mpispeed._native -> its use
MODULES = {
    "cpu_optim": "fused optimizers on host memory",
    "fp_sum": "tree sums and exact norms on host memory",
    "crc32c": "checksums",
    "block_quant": "block quantizers of compressed communication",
    "weight_codes": "products with quantized weights",
    "state_codes": "states of optimizers in 8 and 16 bits",
    "one_bit": "signs of compressed sums over ranks",
    "permute": "rows of tokens on their way to experts, or past layers, and back",
    "token_choice": "choice of the tokens that layers see",
    "meeting": "small sums and gathers of ranks on one node",
    "layer_loops": "transformer layers of inference on host memory",
    "block_io": "asynchronous reads and writes of files",
    "token_reads": "batches of token ids from files",
    "launch": "launches of kernels on a GPU",
}


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability that may or may not be usable on this machine.

    `reason` is the reason when `is_usable` is False, and may be a detail when it is True.
    """

    name: str
    purpose: str
    is_usable: bool
    reason: str = ""


@cache
def _load(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(f"mpispeed._native.{name}"), ""
    except ImportError as error:
        return None, _explain(name, error)


def _explain(name: str, error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == f"mpispeed._native.{name}":
        return "it was not built; install the package with a C compiler, or run `python setup.py build_ext -i`"
    if "libgomp" in str(error):
        return f"{error}; install GCC's OpenMP library (libgomp1) or load the compiler's environment module"
    return f"{error}; it may have been built for another Python or C library: build it again"


def compiled(name: str) -> ModuleType | None:
    """The compiled module `name`, or None, which is logged once: the caller then runs its reference."""
    module, reason = _load(name)
    if module is None:
        what = MODULES.get(name, name)
        once(_logger, logging.WARNING, f"no compiled {name} ({what}): {reason}; a slower implementation runs instead")
    return module


def found(name: str) -> ModuleType | None:
    """The compiled module `name`, or None; nothing is logged."""
    return _load(name)[0]


def require(name: str) -> ModuleType:
    """The compiled module `name`.

    Raises:
        NativeMissing: it cannot be imported; the message gives the reason.
    """
    module, reason = _load(name)
    if module is None:
        msg = f"the compiled module {name!r} of mpispeed is not usable: {reason}"
        raise NativeMissing(msg)
    return module


def report() -> list[Capability]:
    """Every compiled module, and the processor features that their speed rests on."""
    found = [
        Capability(name, purpose, module is not None, reason)
        for name, purpose in MODULES.items()
        for module, reason in [_load(name)]
    ]
    return found + _processor_features()


def _processor_features() -> list[Capability]:
    features = []
    optim, reason = _load("cpu_optim")
    level = optim.vector_level() if optim is not None else 0
    said = f"loops for x86-64 level {level}" if level > 1 else reason or "plain loops only: not x86-64 v3 or later"
    features.append(Capability("vector loops", "speed of the passes over host memory", level > 1, said))
    crc, reason = _load("crc32c")
    has_instruction = crc is not None and crc.has_instruction()
    said = "" if has_instruction else reason or "the processor has no SSE4.2: tables are used"
    features.append(Capability("crc32c instruction", "speed of checksums", has_instruction, said))
    return features


def check_tensors(
    where: str, tensors: Mapping[str, Tensor], *, device: torch.device | None = None, takes_meta: bool = False
) -> int:
    """Check that all tensors are contiguous, on the host and of one length; gives the length in elements.

    With `device` they have to be there instead of on the host, and on meta only with `takes_meta`.

    Raises:
        ValueError: one of them is not; `where` and its name are in the message.
    """
    length = -1
    first = ""
    for name, x in tensors.items():
        if device is not None and x.is_meta and not takes_meta:
            msg = f"{where}: {name} is on meta, where nothing is kept; give a tensor with data"
            raise ValueError(msg)
        if device is not None and x.device != device:
            msg = f"{where}: {name} is on {x.device}, but another tensor is on {device}; put all on one device"
            raise ValueError(msg)
        if device is None and x.device.type != "cpu":
            msg = f"{where}: {name} is on {x.device}; this pass works on host memory, copy it to the CPU first"
            raise ValueError(msg)
        if not x.is_contiguous():
            msg = f"{where}: {name} has strides {x.stride()} for shape {tuple(x.shape)}; pass a contiguous tensor"
            raise ValueError(msg)
        if length < 0:
            length, first = x.numel(), name
        elif x.numel() != length:
            msg = f"{where}: {name} has {x.numel()} elements but {first} has {length}; they must be equal"
            raise ValueError(msg)
    return length


def check_threads(where: str, threads: int) -> None:
    """Check a thread count.

    Raises:
        ValueError: it is below 1.
    """
    if threads < 1:
        msg = f"{where}: threads is {threads}; pass 1 or more"
        raise ValueError(msg)


def _byte_range(x: Tensor) -> tuple[int, int]:
    begin = address(x)
    return begin, begin + x.numel() * x.element_size()


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """True if both have the same address, dtype and length."""
    return a.dtype == b.dtype and _byte_range(a) == _byte_range(b)


def overlaps(a: Tensor, b: Tensor) -> bool:
    """True if the two contiguous tensors share at least one byte."""
    a_begin, a_end = _byte_range(a)
    b_begin, b_end = _byte_range(b)
    return max(a_begin, b_begin) < min(a_end, b_end)


def any_overlap(tensors: Iterable[Tensor]) -> bool:
    """True if any two of the contiguous tensors share memory; empty ones share nothing."""
    ranges = sorted(_byte_range(x) for x in tensors if x.numel())
    return any(b_begin < a_end for (_, a_end), (b_begin, _) in pairwise(ranges))


def address(x: Tensor) -> int:
    """The place of its first byte; without data a number that keeps tensors of different storages apart."""
    return x.data_ptr() if not x.is_meta else (x.untyped_storage()._cdata << 64) + x.data_ptr()
