"""Folders of swap files: one per rank and run.

root/mpispeed-swap-USERID/RUN.rankN/owner.json, NAME.swap ...
"""

from __future__ import annotations

import errno
import logging
import re
from contextlib import ExitStack
from pathlib import Path

from mpispeed.base.errors import StoreError
from mpispeed.base.units import format_bytes
from mpispeed.native.block_io import BlockFile
from mpispeed.store import private_folder
from mpispeed.store.mounts import free_bytes
from mpispeed.store.private_folder import Kind, PrivateFolder

log = logging.getLogger(__name__)

_SUFFIX = ".swap"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# Also the files that block I/O makes for a moment to try O_DIRECT.
_SWAP_FILE = re.compile(rf"{_FILE.pattern}{re.escape(_SUFFIX)}|\.mpispeed-probe-[a-z0-9_]+")
SWAP = Kind("swap", "nvme_path", "mpispeed-swap", _SWAP_FILE)


class SwapFolder:
    """A `PrivateFolder` with swap files, which end with it. Arguments and errors are its own."""

    def __init__(self, root: Path, run: str, rank: int) -> None:
        self._folder = PrivateFolder(root, run, rank, SWAP)
        self.root, self.path = root, self._folder.path
        self._files: list[BlockFile] = []

    def file(self, name: str, nbytes: int, *, reserve: bool = True) -> BlockFile:
        """Make the file `name`.swap, which nobody else can read.

        Args:
            name: letters, digits and "._-".
            nbytes: its length.
            reserve: take the space from the disk now, so that a write cannot find it full.

        Raises:
            StoreError: the name is odd or taken, the folder is gone, or the disk refuses; gives path, bytes wanted
                and bytes free.
        """
        if not _FILE.fullmatch(name) or nbytes < 0:
            msg = f"swap file {name!r} of {nbytes} bytes in {self.path}: names have letters, digits and ._- only"
            raise StoreError(msg)
        path = self.path / f"{name}{_SUFFIX}"
        if not self._folder.is_in_place:
            msg = f"{path} cannot be made: its folder was removed or replaced, or this process was forked off its owner"
            raise StoreError(msg)
        made: BlockFile | None = None
        try:
            made = BlockFile(path, create=True)
            is_reserved = not (reserve and nbytes) or made.allocate(nbytes)
        except OSError as failure:
            if made is not None:
                made.close()
                self._folder.discard(path.name)
            raise StoreError(self._refusal(path, nbytes, failure)) from failure
        self._folder.add(path.name)
        self._files.append(made)
        if not is_reserved:
            log.info("%s cannot be reserved on this file system; a full disk shows when it is written", path)
        return made

    def remove(self) -> None:
        """Wait for transfers, delete all files and the folder; a second call, or a forked child, does nothing."""
        files, self._files = self._files, []
        with ExitStack() as stack:
            stack.callback(self._folder.remove)
            if self._folder.is_own:  # a forked child cannot wait for the transfers of its parent
                for file in files:
                    stack.callback(file.close)

    def _refusal(self, path: Path, nbytes: int, failure: OSError) -> str:
        try:
            free = f"{format_bytes(free_bytes(self.path))} ({free_bytes(self.path)} bytes)"
        except OSError:
            free = "unknown"
        advice = {
            errno.EEXIST: "give every swap file its own name",
            errno.EDQUOT: "your quota is used up; free some of it or name another disk (nvme_path)",
            errno.EFBIG: "files may not be so long; see ulimit -f, or use more ranks",
        }.get(failure.errno or 0, "free space, " + SWAP.choose if failure.errno == errno.ENOSPC else SWAP.choose)
        return (
            f"swap file {path} cannot be made: {failure.strerror or failure}; wanted {format_bytes(nbytes)} "
            f"({nbytes} bytes), free {free}; {advice}"
        )


def clean_stale(root: Path) -> list[str]:
    """Remove rank folders of swap files of killed runs, as `private_folder.clean_stale`."""
    return private_folder.clean_stale(root, SWAP)
