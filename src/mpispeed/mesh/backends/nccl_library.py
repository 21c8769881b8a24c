"""NCCL and RCCL by the addresses of their functions: finding and loading the library, its numbers, its errors in words.

Nothing is linked against it. The library that torch has loaded is taken before any other, so that a process has one.
Names, numbers and arguments are those of nccl.h, which NVIDIA documents under "NCCL API"; RCCL has the same.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mpispeed.base.errors import CommError

SUCCESS, IN_PROGRESS = 0, 7
UNIQUE_ID_BYTES = 128
MAGIC = 0xCAFEBEEF

OLDEST = 21400
"""The first version whose communicators can be made without blocking; its configuration is the one given here."""

UINT8 = 1
"""What moves are counted in."""

TYPES = {
    torch.int8: 0,
    torch.uint8: UINT8,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""ncclDataType_t of what the library may add up."""

OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
"""ncclRedOp_t; an average is a sum and a factor, as elsewhere."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId, by which ranks find each other."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as of version 2.14; a newer library takes its own defaults for what came later."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    @classmethod
    def not_blocking(cls) -> Config:
        """For a communicator whose calls return at once, so that the wait for peers is ours and can end."""
        return cls(ctypes.sizeof(cls), MAGIC, OLDEST, 0)


_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

FUNCTIONS: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (_P,),
    "ncclGetUniqueId": (_P,),
    "ncclCommInitRankConfig": (_P, _I, UniqueId, _I, _P),
    "ncclCommGetAsyncError": (_P, _P),
    "ncclCommFinalize": (_P,),
    "ncclCommDestroy": (_P,),
    "ncclCommAbort": (_P,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (_P, _N, _I, _I, _P, _P),
    "ncclRecv": (_P, _N, _I, _I, _P, _P),
    "ncclAllGather": (_P, _P, _N, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _N, _I, _I, _P, _P),
    "ncclAllReduce": (_P, _P, _N, _I, _I, _P, _P),
    "ncclReduceScatter": (_P, _P, _N, _I, _I, _P, _P),
}
"""The functions that are called, all of which return an ncclResult_t, and the types of their arguments."""

TEXTS: dict[str, tuple[type, ...]] = {"ncclGetErrorString": (_I,), "ncclGetLastError": (_P,)}
"""Those that return a text."""


class Library:
    """A loaded library.

    Attributes:
        name: "nccl" or "rccl".
        path: the file.
        version: as 22703 for 2.27.3.
    """

    def __init__(self, path: str, name: str) -> None:
        """Load it.

        Raises:
            CommError: it cannot be loaded, lacks a function, or is too old.
        """
        self.name, self.path = name, path
        try:
            self._handle = ctypes.CDLL(path)
            for function, types in (*FUNCTIONS.items(), *TEXTS.items()):
                bound = getattr(self._handle, function)
                bound.argtypes, bound.restype = types, ctypes.c_char_p if function in TEXTS else ctypes.c_int
        except (OSError, AttributeError) as error:
            msg = f"{name.upper()} in {path} cannot be used: {error}"
            raise CommError(msg) from error
        found = ctypes.c_int()
        self.check("ncclGetVersion", self.call("ncclGetVersion", ctypes.byref(found)))
        self.version = found.value
        if self.version < OLDEST:
            msg = f"{self} in {path} is too old: 2.14 or later is needed, whose communicators do not block"
            raise CommError(msg)

    def __str__(self) -> str:
        major, rest = divmod(self.version, 10000)
        return f"{self.name.upper()} {major}.{rest // 100}.{rest % 100}"

    def call(self, function: str, *args: object) -> int:
        """The number that a function returns; other threads of Python run meanwhile."""
        found: int = getattr(self._handle, function)(*args)
        return found

    def unique_id(self) -> bytes:
        """A new name for a communicator, made on one rank and given to the others."""
        made = UniqueId()
        self.check("ncclGetUniqueId", self.call("ncclGetUniqueId", ctypes.byref(made)))
        return bytes(made.internal)

    def check(self, function: str, result: int, where: str = "") -> None:
        """Refuse a result that is an error.

        Raises:
            CommError: with the library's own words.
        """
        if result in (SUCCESS, IN_PROGRESS):
            return
        raise CommError(self.words(function, result, where))

    def words(self, function: str, result: int, where: str = "") -> str:
        """What an error means: the function, the group, the library's text for the number, and its last error."""
        said = self._handle.ncclGetErrorString(result)
        last = self._handle.ncclGetLastError(None)
        texts = [text.decode(errors="replace").strip() for text in (said, last) if text]
        more = "; ".join(text for text in texts if text)
        return (
            f"{function}{f' over {where}' if where else ''}: {self.name.upper()} says {more} (error {result}); "
            "NCCL_DEBUG=INFO makes it say more, MPISPEED_DEVICE_PATH=staged does without it"
        )


# -- finding it ----------------------------------------------------------------------------------------------------


def mapped_file(stem: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file of a library that this process has loaded already; None if it has none whose name begins so."""
    try:
        text = maps.read_text()
    except OSError:
        return None
    found = re.search(rf"\s(/\S*/{re.escape(stem)}\.so\S*)", text)
    return None if found is None else found.group(1)


def _candidates(stem: str) -> Iterator[str]:
    loaded = mapped_file(stem)
    if loaded is not None:
        yield loaded
    wheel = importlib.util.find_spec("nvidia")
    for folder in [*(wheel.submodule_search_locations or () if wheel is not None else ()), torch.__path__[0]]:
        for part in ("nccl/lib", "lib"):
            yield from (str(path) for path in sorted(Path(folder, part).glob(f"{stem}.so*")))
    found = ctypes.util.find_library(stem.removeprefix("lib"))
    if found is not None:
        yield found


def find_for_cuda() -> tuple[str, str]:
    """File and name of the library for this torch: loaded by it, of its wheels, or of the system.

    Raises:
        CommError: there is none.
    """
    name = "rccl" if torch.version.hip else "nccl"
    found = next(_candidates(f"lib{name}"), None)
    if found is None:
        msg = f"there is no {name.upper()}: torch has not loaded it, and no wheel or folder of the system has lib{name}"
        raise CommError(msg)
    return found, name


FINDERS: dict[str, Callable[[], tuple[str, str]]] = {"cuda": find_for_cuda}
"""By kind of device: returns file and name of its library."""

_LOADED: dict[str, Library] = {}
_LOCK = threading.Lock()


def library_for(device: torch.device) -> Library:
    """The library for a kind of device, loaded once.

    Raises:
        CommError: there is none, or it cannot be used.
    """
    with _LOCK:
        if device.type not in FINDERS:
            msg = f"no library is known that joins devices of kind {device.type}; NCCL is for cuda"
            raise CommError(msg)
        if device.type not in _LOADED:
            _LOADED[device.type] = Library(*FINDERS[device.type]())
        return _LOADED[device.type]
