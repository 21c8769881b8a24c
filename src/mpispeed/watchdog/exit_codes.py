"""Tables of signals, exit codes and Python errors of a rank: meaning and remedy."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mpispeed.watchdog.process import signal_name


class Strength(IntEnum):
    """Strength of evidence that a death was the first cause; the weaker ones happen to ranks when another has died."""

    UNKNOWN = 0
    ENDED_BY_OTHERS = 1
    LOST_A_PEER = 2
    OWN_CODE = 3
    OWN_FAULT = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason for which one rank ended. `reason` continues the sentence "rank 3 ..."."""

    kind: str
    strength: Strength
    reason: str
    cure: str


MEMORY_CURE = (
    "take less memory (a smaller micro-batch with more accumulation steps, more states cut by ZeRO, activation "
    "checkpointing; `mpispeed plan` predicts the need) or ask for more (sbatch --mem or --mem-per-cpu)"
)

_FAULT_CURE = (
    "set PYTHONFAULTHANDLER=1 to get the Python line, and look at native code first: MPI and torch builds that do not "
    "fit each other, a stack limit (ulimit -s), a compiled extension"
)

SIGNALS = {
    signal.SIGSEGV: ("fault", "touched memory that is not its own (segmentation fault)", _FAULT_CURE),
    signal.SIGBUS: (
        "shared_memory",
        "lost the ground of mapped memory (bus error): mostly /dev/shm or the disk of a mapped file is full",
        "free or enlarge /dev/shm (df -h /dev/shm; in containers --shm-size or a mount of the host's), or use fewer "
        "data-loader workers",
    ),
    signal.SIGILL: (
        "fault",
        "met an instruction that this processor does not have",
        "torch, MPI or an extension was built for another processor: install or build it for this node type",
    ),
    signal.SIGFPE: ("fault", "made an arithmetic error in native code", _FAULT_CURE),
    signal.SIGABRT: (
        "abort",
        "gave up in native code (abort): its last lines on stderr say why",
        "read the rank's log; an MPI or CUDA library writes its reason there",
    ),
    signal.SIGXCPU: (
        "cpu_time",
        "used up its CPU time",
        "raise the limit (ulimit -t, or the queue's limit of CPU time) or save and resume in shorter jobs",
    ),
    signal.SIGXFSZ: (
        "file_size",
        "wrote a file beyond the limit of its size",
        "raise `ulimit -f` in the job script",
    ),
}
"""Signals that a process causes itself."""

ENDERS = {
    signal.SIGKILL: (
        "killed",
        "was killed from outside (SIGKILL)",
        "ask who did it: kill -9, scancel, the batch system at the end of the walltime or of a grace period (sacct -j "
        "JOB -o State,ExitCode,MaxRSS), or another daemon of the site; the kernel's log (dmesg) has its own kills",
    ),
    signal.SIGTERM: (
        "terminated",
        "was asked to end (SIGTERM)",
        "scancel, a preemption, the end of the walltime, or the launcher after another rank's death; a walltime "
        "section in the config saves before such an end",
    ),
    signal.SIGINT: ("interrupted", "was interrupted (Ctrl-C)", "nothing is wrong; start again when you like"),
    signal.SIGHUP: (
        "hangup",
        "lost its terminal (SIGHUP)",
        "start long jobs by sbatch, or under nohup, tmux or screen",
    ),
    signal.SIGPIPE: (
        "pipe",
        "wrote to a program that has gone (SIGPIPE)",
        "the launcher or what its output was piped into has ended; look there first",
    ),
}
"""Signals that come from others."""

CODES = {
    2: (
        "refused",
        "ended with exit code 2: a configuration or the command line was refused",
        "the message above names the setting and what to do",
    ),
    126: ("start", "could not be started (exit code 126): the program may not be executed", "check its mode bits"),
    127: ("start", "could not be started (exit code 127): the program was not found on that node",
          "check PATH and modules of the job, and that the environment is on a file system all nodes share"),
}  # fmt: skip


TELLING = (*map(int, SIGNALS), *map(int, ENDERS))
"""Signals for which an exit code above 128 may stand; other large codes come from MPI libraries."""


def of_signal(number: int) -> Cause:
    """Return the cause for a signal that ended a rank."""
    for table, strength in ((SIGNALS, Strength.OWN_FAULT), (ENDERS, Strength.ENDED_BY_OTHERS)):
        found = next((row for name, row in table.items() if name == number), None)
        if found is not None:
            return Cause(found[0], strength, found[1], found[2])
    name = signal_name(number)
    return Cause("signal", Strength.OWN_CODE, f"was ended by {name}", f"find out who sends {name} to this job")


def of_code(code: int) -> Cause:
    """Return the cause for an exit code; above 128 some launchers and shells pass on a signal that way."""
    if code in CODES:
        kind, reason, cure = CODES[code]
        return Cause(kind, Strength.OWN_CODE, reason, cure)
    if code - 128 in TELLING:
        found = of_signal(code - 128)
        return Cause(found.kind, found.strength, f"{found.reason}, by exit code {code}", found.cure)
    if code > 128:
        cure = "the lines above it say which call failed; MPI errors are mostly collectives that do not fit each other"
        return Cause("mpi", Strength.OWN_CODE, f"left with exit code {code}, as after an error in MPI", cure)
    return Cause(
        "exit", Strength.OWN_CODE, f"left with exit code {code}", "its log has the last lines it wrote; look there"
    )


_HINTS = (
    (r"OutOfMemoryError|(?:CUDA|HIP)(?: error:)? out of memory|BLAS_STATUS_ALLOC_FAILED",
     "device_memory",
     "take a smaller micro-batch with more accumulation steps, more states cut by ZeRO, activation checkpointing or "
     "offload; `mpispeed plan` predicts the need"),
    (r"^MemoryError|can't allocate memory|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc", "memory",
     MEMORY_CURE),
    (r"Too many open files|Errno 24\b", "open_files", "raise `ulimit -n` in the job script"),
    (r"(?<!resource: )shared memory|</torch_", "shared_memory", SIGNALS[signal.SIGBUS][2]),
    (r"No space left on device|Errno 28|Disk quota exceeded|Errno 122", "disk_full",
     "free space or raise the quota (df -h, quota -s), or save to another folder; the last checkpoint before is whole"),
    (r"File too large|Errno 27\b", "file_size", "raise `ulimit -f` in the job script"),
    (r"device-side assert", "device_assert",
     "mostly an index is out of range on the GPU, such as a token or a class beyond the size of its table; run again "
     "with CUDA_LAUNCH_BLOCKING=1 and the traceback names the line"),
    (r"CUDA error|cudaError|cuBLAS|NVML", "device",
     "look at the node's GPU (nvidia-smi -q, dmesg for Xid); exclude the node if it happens there again"),
    (r"^ModuleNotFoundError|^ImportError", "import",
     "check that this node sees the same environment as the others (modules, PATH, a file system all nodes share)"),
)  # fmt: skip

_LOST = re.compile(
    r"PROC_FAILED|PROC_ABORTED|ERR_REVOKED|[Ee]ndpoint timeout|Transport retry|"
    r"[Pp]eer (?:has )?(?:failed|died|gone)|process has failed"
)
_DISCONNECTED = re.compile(
    r"[Cc]onnection (?:reset|refused|closed|timed out|lost)|Connection\w*Error|BrokenPipeError|No route to host|"
    r"Network is unreachable"
)
"""Messages of a rank that lost a peer, but also of any program about its own network."""

_PACKAGE = f"{Path(__file__).parents[1]}/"
_EXIT_CODE = re.compile(r"exit code (\d+)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_ERROR = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit|Failed|Failure))(?:: (?P<text>.*))?$"
)
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class LastWords:
    """A Python error taken from its text."""

    type: str
    message: str
    where: str  # file:line of the innermost frame, or nothing

    @property
    def line(self) -> str:
        """The error in one line."""
        text = f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message
        shown = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        return f"{shown} (at {self.where})" if self.where else shown


def read_words(text: str) -> LastWords:
    """Type, message and place of an error whose traceback, or whose last line, is `text`."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    frames = list(_FRAME.finditer(text))
    where = f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
    for place in range(len(lines) - 1, -1, -1):
        found = _ERROR.match(lines[place])
        if found:
            more = [found["text"] or "", *lines[place + 1 :]]
            return LastWords(found["type"].rpartition(".")[2], " ".join(part for part in more if part), where)
    return LastWords("", lines[-1] if lines else "", where)


def of_words(text: str) -> Cause:
    """Return the cause for a Python error, or for an exit code that the rank chose itself."""
    code = _EXIT_CODE.fullmatch(text.strip())
    if code:
        return of_code(int(code[1]))  # written by a rank that ended by sys.exit
    words = read_words(text)
    if _LOST.search(words.line) or (_DISCONNECTED.search(words.line) and _is_of_mpi(words, text)):
        cure = "another rank or its node went first: look at its log, at the node and at the network between them"
        return Cause("lost_peer", Strength.LOST_A_PEER, f"lost the connection to a peer: {words.line}", cure)
    for pattern, kind, cure in _HINTS:
        if re.search(pattern, words.line, re.MULTILINE):
            return Cause(kind, Strength.OWN_FAULT, f"raised {words.line}", cure)
    if words.type == "KeyboardInterrupt":
        return of_signal(signal.SIGINT)
    cure = "the traceback is in the log of that rank"
    return Cause("error", Strength.OWN_FAULT, f"raised {words.line}", cure)


def _is_of_mpi(words: LastWords, text: str) -> bool:
    """True if an error comes out of MPI or of this package, not out of what a script does in the network."""
    of_mpi = re.search(r"^(?:mpi4py\.)?MPI\.Exception", text, re.MULTILINE)
    return bool(of_mpi) or re.search(r"(?:^|/)mpi4py/", words.where) is not None or words.where.startswith(_PACKAGE)
