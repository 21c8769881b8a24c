"""Worker processes of a loader: forked, so that they have the data set as it is, and never in touch with MPI.

Why fork: a process that is started anew runs the script again up to its guard, if it has one, in the environment of a
rank, where `import mpi4py.MPI` would join the job in the rank's name; and most data sets cannot be pickled. A forked
process must not use what the MPI library has (it does not: readers read files), nor threads of its parent (torch
computes with one thread here).

A worker dies with its rank, however that ends: it waits on a socket of the rank, and asks the kernel to be killed.
Signals to the whole job, such as those of a time limit, are the rank's affair.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from mpispeed.base.errors import DataError
from mpispeed.data.reading import Reader, Samples, is_end, named
from mpispeed.data.shared_batches import Place, Slot, pack, unpack

STOP_SECONDS = 5.0
"""How long a worker that was told to stop may go on with its batch; then it is killed."""
LOOK_SECONDS = 0.1
"""How soon a wait for a worker sees that it is not wanted any more."""
MOST_REQUEST_BYTES = 1 << 15
"""Requests that wait for a worker never fill its socket, so that sending one does not block."""
UNWANTED = object()
"""Instead of a batch that nobody waits for any more."""
_PR_SET_PDEATHSIG = 1
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    # Any forked child would keep the workers of its parent alive by these.
    for end in list(_ends):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Popen(Popen):
    """A child that ignores SIGTERM, by which Python's end would wait for it in vain."""

    def terminate(self) -> None:
        self.kill()


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _Popen(process_obj)


class _Worker:
    """One process, as its rank sees it."""

    def __init__(self, reader: Reader, number: int, count: int, slots: int) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.requests: deque[tuple[int, Any]] = deque()  # sent and not answered, with their serial numbers
        self.sent = 0
        self.end, theirs = multiprocessing.Pipe()
        _ends.add(self.end)
        follows = threading.current_thread() is threading.main_thread()
        arguments = (reader, theirs, self.slots, number, count, os.getpid() if follows else 0)
        self.process = _Process(target=_run, args=arguments, daemon=True, name=f"mpispeed-data-{number}")
        with warnings.catch_warnings():
            # Python warns of threads that a child does not have; see the head of this file.
            warnings.simplefilter("ignore", DeprecationWarning)
            # None of these ends the child before it ignores them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ignored())
            try:
                self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, request: Any) -> None:
        """Ask for a batch; the answers come in the same order."""
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is waited for
            self.end.send((self.sent, request))
        self.requests.append((self.sent, request))
        self.sent += 1

    def receive(self, is_wanted: Callable[[], bool], place: Place) -> Any:
        """The answer to the oldest request, or `UNWANTED`.

        Raises:
            SampleError: the worker could not read it.
            DataError: the worker has died.
        """
        while not (ready := wait([self.end, self.process.sentinel], LOOK_SECONDS)):
            if not is_wanted():
                return UNWANTED
        serial, request = self.requests[0]
        try:
            # The process may have ended with its answer sent.
            answer = self.end.recv_bytes() if self.end in ready or self.end.poll() else b""
        except (EOFError, OSError):
            answer = b""
        if not answer:
            raise DataError(self._death(request))
        is_read, content = pickle.loads(answer)
        self.requests.popleft()
        if is_read:
            return unpack(content, self.slots[serial % len(self.slots)], place)
        text, trace = content
        raise SampleError(text) from WorkerTraceback(trace)

    def _death(self, request: Any) -> str:
        self.process.join(STOP_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
            how = f"was killed by {name}" + (" (often for want of memory)" if name == "SIGKILL" else "")
        else:
            how = f"ended with status {code}"
        return (
            f"worker process {self.process.pid} of the data loader {how} while it read {_shown(request)}; fewer "
            "workers (data_loader.workers) need less memory, and without any the rank reads itself and shows errors"
        )

    def stop(self) -> None:
        """Tell it to end."""
        with contextlib.suppress(OSError, ValueError):
            self.end.send(None)
        self.end.close()

    def finish(self) -> None:
        """Wait until it has ended; kill it if that takes long."""
        self.process.join(STOP_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        for slot in self.slots:
            slot.close()


class SampleError(DataError):
    """A worker process could not read samples."""


class WorkerTraceback(Exception):
    """Cause of an error that a worker told: where it was there."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)

    def __str__(self) -> str:
        return f"in a worker process of the data loader\n{self.args[0]}"


class Workers:
    """Processes that read batches, each every so many in turn."""

    def __init__(self, reader: Reader, count: int, ahead: int) -> None:
        """Fork `count` processes, which read `ahead` batches ahead together, and at least one each."""
        each = -(-max(ahead, count) // count)
        self._each = each
        self._workers = [_Worker(reader, number, count, each) for number in range(count)]
        self._undo = weakref.finalize(self, _end, self._workers, os.getpid())

    def read(self, requests: Iterable[Any], is_wanted: Callable[[], bool], place: Place) -> Iterator[Any]:
        """The batches of `requests`, in their order; of a stream until its end.

        Args:
            requests: in small plain values.
            is_wanted: ends the iteration when it returns False.
            place: copies a tensor out of shared memory.

        Raises:
            DataError: one cannot be read.
        """
        self._forget(is_wanted, place)
        waiting: deque[_Worker] = deque()
        turns = cycle(self._workers)
        for request in requests:
            each = 1 if len(pickle.dumps(request)) * self._each > MOST_REQUEST_BYTES else self._each
            while len(waiting) >= each * len(self._workers):
                batch = waiting.popleft().receive(is_wanted, place)
                if batch is UNWANTED or is_end(batch):
                    return
                yield batch
            worker = next(turns)
            worker.send(request)
            waiting.append(worker)
        while waiting:
            batch = waiting.popleft().receive(is_wanted, place)
            if batch is UNWANTED or is_end(batch):
                return
            yield batch

    def _forget(self, is_wanted: Callable[[], bool], place: Place) -> None:
        """Receive what an iteration before has asked for and not taken."""
        for worker in self._workers:
            while worker.requests and is_wanted():
                with contextlib.suppress(SampleError):
                    worker.receive(is_wanted, place)

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        self._undo()


def _end(workers: list[_Worker], pid: int) -> None:
    if pid != os.getpid():
        return  # in a forked child
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.finish()


def _shown(request: Any) -> str:
    indices = request[1]
    return named(indices) if isinstance(indices, list) else "a data stream"


# -- in the worker --------------------------------------------------------------------------------------------------


def _run(reader: Reader, end: Connection, slots: list[Slot], number: int, count: int, parent: int) -> None:
    """Read what is asked for until the rank closes the socket."""
    _settle(reader, number, count, parent)
    while True:
        try:
            message = end.recv()
        except (EOFError, OSError):
            return
        if message is None:
            return
        serial, request = message
        answer = _answer(reader, request, slots[serial % len(slots)])
        try:
            end.send_bytes(answer)
        except OSError:
            return


def _answer(reader: Reader, request: Any, slot: Slot) -> bytes:
    try:
        return pickle.dumps((True, pack(reader.read(request), slot)))
    except DataError as error:
        return pickle.dumps((False, (str(error), traceback.format_exc())))
    except Exception as error:
        text = (
            f"a batch cannot be sent by a worker process of the data loader: {type(error).__name__}: {error}; with "
            "data_loader.workers 0 the rank reads itself"
        )
        return pickle.dumps((False, (text, traceback.format_exc())))


def _ignored() -> list[int]:
    return [getattr(signal, name) for name in _IGNORED]


def _settle(reader: Reader, number: int, count: int, parent: int) -> None:
    """Become a worker: let go of what belongs to the rank."""
    gc.freeze()  # what the rank has stays as it is: nothing of MPI is freed here, and no page copied for a look at it
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number_of_signal in _ignored():
        signal.signal(number_of_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ignored())
    if parent:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
    torch.set_num_threads(1)
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=0, dataset=reader.dataset)
    if isinstance(reader, Samples):
        reader.seeds = True
