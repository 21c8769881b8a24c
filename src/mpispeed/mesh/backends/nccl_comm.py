"""One communicator of NCCL: made and used without blocking, looked at for errors that come later, aborted in time.

A kernel that waits for a dead peer never ends, and neither does a host that waits for it. So every wait here is a poll
with a limit, a thread asks all communicators how they are, and a job that ends with an error aborts them first.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.nccl_library import IN_PROGRESS, SUCCESS, Config, Library, UniqueId
from mpispeed.mesh.collectives.work import nap_until
from mpispeed.mesh.ending import before_abort

LOOK_SECONDS = 1.0
"""How often communicators are asked for errors."""

LAST_SECONDS = 20.0
"""How long an orderly end waits for a communicator; then it is aborted."""

ABORT_SECONDS = 5.0
"""How long the end of a job with an error waits for communicators to be aborted."""

_OPEN: weakref.WeakSet[Communicator] = weakref.WeakSet()
_OPEN_LOCK = threading.Lock()
_STARTED: dict[str, threading.Thread] = {}


class Communicator:
    """Some ranks of the library, of which this one is `rank`; made by the time `settle` has returned.

    Calls return when the library has queued them; results are those of the stream that is given to them.

    Attributes:
        beat: called while the host waits for peers to come to a call; what it raises ends the wait.
    """

    def __init__(self, library: Library, name: bytes, size: int, rank: int, where: str, limit_seconds: float) -> None:
        """Begin to join.

        Args:
            library: NCCL or RCCL.
            name: the unique id that one rank has made.
            size: number of ranks.
            rank: own number among them.
            where: the group, for messages.
            limit_seconds: how long the host waits until all ranks have come to a call.

        Collective over: the ranks.

        Raises:
            CommError: the library refuses at once.
        """
        self.library, self.size, self.rank, self.where = library, size, rank, where
        self._limit_seconds, self._failure = limit_seconds, ""
        self.beat: Callable[[], object] = lambda: None
        self._lock = threading.RLock()
        self._handle = ctypes.c_void_p()
        config, unique = Config.not_blocking(), UniqueId.from_buffer_copy(name)
        address = ctypes.byref(self._handle)
        result = library.call("ncclCommInitRankConfig", address, size, unique, rank, ctypes.byref(config))
        library.check("ncclCommInitRankConfig", result, where)
        with _OPEN_LOCK:
            _OPEN.add(self)
        _watch()

    @property
    def is_open(self) -> bool:
        """True until it is closed or aborted."""
        return bool(self._handle.value)

    def run(self, function: str, *args: object) -> None:
        """Call a function whose last arguments, communicator and stream, are added here: that of the current stream.

        Collective over: the ranks that the function joins.

        Raises:
            CommError: the library refuses, has failed before, or peers do not come to a call that needs them.
        """
        with self._lock:
            result = self._call(function, *args)
        if result == IN_PROGRESS:
            self.settle(function)

    @contextmanager
    def grouped(self, function: str) -> Iterator[None]:
        """Context of calls of `add` that are carried out together at its end, in any order.

        Raises:
            CommError: as of `run`; from the end of the context.
        """
        with self._lock:
            self._require()
            self.library.check("ncclGroupStart", self.library.call("ncclGroupStart"), self.where)
            try:
                yield
            finally:  # else the library would put later calls of this thread into the group
                result = self.library.call("ncclGroupEnd")
            self.library.check(function, result, self.where)
        if result == IN_PROGRESS:
            self.settle(function)

    def add(self, function: str, *args: object) -> None:
        """As `run`, inside of `grouped`: nothing is waited for."""
        self._call(function, *args)

    def settle(self, function: str = "ncclCommInitRankConfig") -> None:
        """Wait until a call that peers have to join is queued.

        Raises:
            CommError: it failed, or a peer has not come within the limit.
        """
        found = [IN_PROGRESS]

        def is_over() -> bool:
            self.beat()
            with self._lock:
                self._require()
                found[0] = self._state()
            return found[0] != IN_PROGRESS

        if not nap_until(is_over, self._limit_seconds):
            msg = (
                f"{function} over {self.where} waited {self._limit_seconds:g} s in vain: a rank of the group has not "
                "come to the same call; look at the ranks' logs for an error"
            )
            raise CommError(msg)
        self.library.check(function, found[0], self.where)

    def look(self) -> None:
        """Ask for an error that came after a call; if there is one, the communicator is aborted.

        Raises:
            CommError: there is one, for the first time.
        """
        with self._lock:
            result = self._state() if self.is_open else SUCCESS
            if result in (SUCCESS, IN_PROGRESS):
                return
            words = self.library.words("an operation that was queued before", result, self.where)
        self.abort(words)
        raise CommError(words)

    def close(self) -> None:
        """Wait for what is queued and release the communicator. Collective over: the ranks."""
        with self._lock:
            if not self.is_open:
                return
            result = self.library.call("ncclCommFinalize", self._handle)
        is_over = result == SUCCESS or (
            result == IN_PROGRESS and nap_until(lambda: self._state() != IN_PROGRESS, LAST_SECONDS)
        )
        if not is_over:
            self.abort("was closed while peers were missing")
            return
        with self._lock:
            self.library.call("ncclCommDestroy", self._handle)
            self._handle.value = None

    def abort(self, reason: str) -> None:
        """End what is queued, whether or not peers come; later calls raise `reason`. Not collective."""
        with self._lock:
            self._failure = self._failure or reason
            if self.is_open:
                self.library.call("ncclCommAbort", self._handle)
                self._handle.value = None

    def _call(self, function: str, *args: object) -> int:
        self._require()
        result = self.library.call(function, *args)
        self.library.check(function, result, self.where)
        return result

    def _state(self) -> int:
        state = ctypes.c_int(IN_PROGRESS)
        result = self.library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        return state.value if result == SUCCESS else result

    def _require(self) -> None:
        if not self.is_open:
            msg = f"{self.library} over {self.where} cannot be used any more: {self._failure or 'it is closed'}"
            raise CommError(msg)

    @property
    def address(self) -> int:
        """The library's handle, for arguments."""
        return self._handle.value or 0


def raw_stream(device: torch.device) -> int:
    """The handle of this thread's current stream, as the library takes it."""
    if device.type == "cuda":
        return int(torch._C._cuda_getCurrentRawStream(device.index))
    return int(devices.current_stream(device).stream_id)


# -- all of a process ----------------------------------------------------------------------------------------------


def _everyone() -> list[Communicator]:
    with _OPEN_LOCK:
        return [made for made in _OPEN if made.is_open]


def _watch() -> None:
    """Have a thread ask all communicators, and an end with an error abort them."""
    with _OPEN_LOCK:
        thread = _STARTED.get("watch")
        if thread is not None and thread.is_alive():
            return
        before_abort(abort_all)
        thread = _STARTED["watch"] = threading.Thread(target=_look_after, name="mpispeed-nccl", daemon=True)
        thread.start()


def _look_after() -> None:
    """Look at all communicators until none is open; an error ends the thread, and with it the job."""
    waiting = threading.Event()
    while True:
        waiting.wait(LOOK_SECONDS)
        for made in _everyone():
            made.look()
        with _OPEN_LOCK:
            if not any(made.is_open for made in _OPEN):
                _STARTED.pop("watch", None)
                return


def abort_all() -> None:
    """Abort all communicators of this process; a library that does not come back is left behind."""
    found = _everyone()

    def abort() -> None:
        for made in found:
            made.abort("the job has ended")

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
