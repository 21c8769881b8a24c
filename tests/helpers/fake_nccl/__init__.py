"""A library with NCCL's functions for the tests' device: `lend()` makes the package find it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from mpispeed.mesh.backends import nccl_library
from tests.helpers.device import NAME

SOURCE = Path(__file__).parent / "fake_libnccl.c"
_TYPE_NUMBER = 20  # of PrivateUse1 among torch's device types

_FINISH = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
_BREAK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


@cache
def built_library() -> Path:
    """Path of the library, compiled once for each state of its source."""
    folder = Path(tempfile.gettempdir()) / f"mpispeed-nccl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.lstat().st_uid == os.getuid()
    library = folder / f"libnccl-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.replace(library)
    return library


class Fake:
    """The loaded library: what was called, and which function is to fail next."""

    def __init__(self) -> None:
        self._handle = ctypes.CDLL(str(built_library()))
        self._handle.fake_nccl_journal.restype = ctypes.c_char_p
        self._finish = _FINISH(_finish_stream)
        self._handle.fake_nccl_use(self._finish)
        self._break: object = None

    def calls(self) -> list[list[str]]:
        """Words of each call since the last `forget`: name, bytes, peer."""
        return [line.split() for line in self._handle.fake_nccl_journal().decode().splitlines()]

    def forget(self) -> None:
        """Begin the list of calls anew."""
        self._handle.fake_nccl_forget()

    def fail_at(self, asked: Callable[[str], bool] | None) -> None:
        """Let functions fail for whose name `asked` is true; None: none."""
        self._break = _BREAK((lambda name: int(asked(name.decode()))) if asked else (lambda name: 0))
        self._handle.fake_nccl_break(self._break)


def _finish_stream(number: int) -> None:
    """Do what is kept on a stream of the tests' device: later work there comes after it."""
    device = torch.get_device_module(NAME).current_device()
    torch.Stream(stream_id=number, device_index=device, device_type=_TYPE_NUMBER).synchronize()


@cache
def _fake() -> Fake:
    return Fake()


@contextmanager
def lend() -> Iterator[Fake]:
    """Let the package find the library for the tests' device inside of the block."""
    nccl_library.FINDERS[NAME] = lambda: (str(built_library()), "nccl")
    made = _fake()
    made.fail_at(None)
    made.forget()
    try:
        yield made
    finally:
        made.fail_at(None)
        del nccl_library.FINDERS[NAME]
        nccl_library._LOADED.pop(NAME, None)
