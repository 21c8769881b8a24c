"""Status of compiled code: usable parts, and reasons for the others."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from mpispeed.base.errors import NativeMissing
from mpispeed.base.log import once

_logger = logging.getLogger(__name__)

# compiled module under mpispeed._native -> its use
MODULES = {
    "cpu_optim": "fused optimizers on host memory",
    "fp_sum": "tree sums and exact norms on host memory",
    "crc32c": "checksums",
    "block_quant": "block quantizers of compressed communication",
    "one_bit": "signs of compressed sums over ranks",
    "block_io": "asynchronous reads and writes of files",
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
