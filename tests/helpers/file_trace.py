"""Files that processes open, by strace: those of a command, or of all that a running daemon starts from now on."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.helpers.system import cannot

WORDS = ["strace", "-f", "-qq", "-s", "400", "-e", "trace=%file,clone,clone3,fork,vfork", "-e", "signal=none"]
_LINE = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(.*)$")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_READY_SECONDS = 30


@dataclass
class Traced:
    """One thread or process: what it ran, and the files it opened since, in order; `refused` were not there."""

    parent: int | None = None
    command: str = ""
    opened: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class FileTrace:
    """Traces processes by their numbers, and all that they start, while this is open."""

    def __init__(self, pids: Iterable[int], file: Path) -> None:
        """Write what is seen to `file`."""
        if shutil.which("strace") is None:
            cannot("opens of files are counted by strace: apt-get install strace")
        self._file = file
        self._pids = [str(pid) for pid in pids]

    def __enter__(self) -> FileTrace:
        chosen = [word for pid in self._pids for word in ("-p", pid)]
        self._process = subprocess.Popen([*WORDS, "-o", self._file, *chosen], stderr=subprocess.PIPE, text=True)
        ends = time.monotonic() + _READY_SECONDS
        while any(_tracer_of(pid) != self._process.pid for pid in self._pids):
            if self._process.poll() is not None or time.monotonic() > ends:
                self._process.kill()
                cannot(f"strace may not attach to processes here: {self._process.communicate()[1].strip()}")
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)  # it detaches
        self._process.communicate()

    def processes(self) -> dict[int, Traced]:
        """What was seen so far, by the number of the process or thread."""
        return parse(self._file.read_text(errors="replace"))


def _tracer_of(pid: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^TracerPid:\s+(\d+)", status, re.MULTILINE)[1])


def parse(text: str) -> dict[int, Traced]:
    """A trace of strace -f, taken apart by process."""
    found: dict[int, Traced] = defaultdict(Traced)
    begun: dict[int, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        pid, call, rest = int(match[1]), match[2], match[3]
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>")
            continue
        if rest.startswith(" resumed>"):
            rest = begun.pop(pid, "") + rest.removeprefix(" resumed>")
        result = rest.rpartition(" = ")[2]
        process = found[pid]
        if call in ("clone", "clone3", "fork", "vfork"):
            child = result.split()[0]
            if child.isdigit():
                found[int(child)].parent = pid
        elif call == "execve" and result.strip() == "0":
            process.command, process.opened, process.refused = rest, [], []
        elif call in ("open", "openat", "openat2"):
            path = _PATH.search(rest)
            if path is not None:
                (process.refused if result.startswith("-1") else process.opened).append(path[1])
    return found


def running(processes: dict[int, Traced], program: object, word: str) -> list[Traced]:
    """Processes of a program, by its path or a folder above it, with a word among its arguments; and their threads."""
    chosen = {pid for pid, one in processes.items() if one.command.startswith(f'("{program}') and word in one.command}
    grown = True
    while grown:
        more = {pid for pid, process in processes.items() if process.parent in chosen and pid not in chosen}
        grown = bool(more)
        chosen |= more
    return [processes[pid] for pid in sorted(chosen)]
