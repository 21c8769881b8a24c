"""Shows a folder at another place through FUSE, where requests of metadata are slow and counted (`slow_folder.c`)."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("slow_folder.c")
KINDS = ("lookup", "getattr", "open", "readlink", "opendir", "readdir", "read", "read_bytes", "other")
METADATA = KINDS[:6]
READY_SECONDS = 20


def missing() -> str:
    """What keeps this machine from showing such folders; "" if nothing does."""
    for program, package in {"cc": "gcc", "pkg-config": "pkg-config", "fusermount3": "fuse3"}.items():
        if shutil.which(program) is None:
            return f"{program} is missing (Debian package {package})"
    if not Path("/dev/fuse").exists():
        return "the kernel has no /dev/fuse"
    if subprocess.run(["pkg-config", "--exists", "fuse3"], check=False).returncode:
        return "the headers of FUSE are missing (Debian package libfuse3-dev)"
    return ""


class SlowFolder:
    """`source` seen at `at`, read-only, while this is open.

    Args:
        source: the folder to show.
        at: an empty folder.
        wait_seconds: how long each request of metadata takes: lookup of a name, getattr, open, readlink, opendir and
            readdir. Reads of data take what they take.
        cache_seconds: how long the kernel may keep names and attributes; 0: it asks each time.
    """

    def __init__(self, source: Path, at: Path, wait_seconds: float, cache_seconds: float = 0.0) -> None:
        self.source, self.at = source, at
        self._words = [str(round(wait_seconds * 1e6)), str(cache_seconds)]

    def __enter__(self) -> SlowFolder:
        self._own = tempfile.TemporaryDirectory(prefix="mpispeed-slow-")
        own = Path(self._own.name)
        program, self._counts = own / "slow_folder", own / "counts"
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
        ).stdout.split()
        subprocess.run(["cc", "-std=gnu11", "-O2", "-o", program, SOURCE, *flags], check=True)
        self.at.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen([program, self.source, self.at, *self._words, self._counts])
        ends = time.monotonic() + READY_SECONDS
        while not self.at.is_mount():
            if self._process.poll() is not None or time.monotonic() > ends:
                self._process.kill()
                msg = f"FUSE did not show {self.source} at {self.at}; exit code {self._process.poll()}"
                raise OSError(msg)
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()  # it unmounts
        try:
            self._process.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self.at.is_mount():
            subprocess.run(["fusermount3", "-u", "-z", self.at], check=False)
        self._own.cleanup()

    def counts(self) -> dict[str, int]:
        """Requests so far, by kind, and the bytes that were read."""
        data = self._counts.read_bytes()
        return dict(zip(KINDS, struct.unpack(f"={len(KINDS)}Q", data), strict=True))


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What came between two counts."""
    return {kind: after[kind] - before[kind] for kind in KINDS}
