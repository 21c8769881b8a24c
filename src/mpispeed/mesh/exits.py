"""Exit hooks of a rank: an uncaught error ends the whole job within seconds and is shown once.

Three ways out are covered: an uncaught exception, an error that all ranks raise alike, and an
exit with a non-zero code while other ranks wait. Left to itself each of them would hang,
because MPI_Finalize and every collective wait for all ranks.

The code of `raise SystemExit(3)` is known under `mpispeed run` and `python -m mpi4py`, that of `sys.exit(3)` always.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import io
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mpispeed.base.errors import MpispeedError
from mpispeed.base.recorder_words import State
from mpispeed.base.traces import own_trace
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.collectives.transport import arrival
from mpispeed.mesh.collectives.work import nap_until
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.ending import Ending, prepare_abort

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long ranks that leave early wait for the others to leave as well."""

PATIENT_SECONDS = 60.0
"""After how long a rank that left in good order says that it waits for the others."""

HANDED_SECONDS = 0.3
"""How long a rank waits between its last words and the abort."""

SHOWN_SECONDS = 3.0
"""How long a rank whose error is not shown waits to be ended by the one that shows its own."""

WATCHER_SECONDS = 5.0
"""How long a rank that leaves waits for the watcher to look at its last operations; it takes a quarter of a second."""

SAID = "MPISPEED_SAID"
"""Where it is in the environment, `mpispeed run` says what the exit code of the job means."""

_CODE: Any = vars(SystemExit)["code"]

_INSTALLED: dict[str, Exits] = {}
_KEEPERS: list[Callable[[str], object]] = []
_TOLD: list[weakref.WeakMethod[Callable[[BaseException], object]]] = []

ErrorType = type[BaseException]


class Leaving(SystemExit):
    """The SystemExit of sys.exit. A script may catch it, so its code counts only once the interpreter reads it."""

    @property
    def code(self) -> Any:
        """The status; read from outside of all frames, it is the one that the process ends with."""
        status = _CODE.__get__(self)
        try:
            sys._getframe(1)
        except ValueError:
            leaves_with(status)
        return status

    @code.setter
    def code(self, status: Any) -> None:
        _CODE.__set__(self, status)


def _nothing() -> None:
    """Do nothing."""


class Exits:
    """The hooks of one process. `comm` is a group of all ranks that nothing else uses; `node` those of this node."""

    def __init__(
        self,
        comm: Comm,
        node: Comm,
        ending: Ending,
        finish: Callable[[], None] = _nothing,
        *,
        is_silent: bool = False,
    ) -> None:
        """Agree on a lock for each node. Collective over: all ranks."""
        self._comm, self._ending, self._finish = comm, ending, finish
        self._is_with_first = 0 in node.ranks
        self._lock = open_lock(node)
        self._pid = os.getpid()  # children of a fork inherit the hooks, and are no ranks
        self._exit_code: int | None = None
        self._has_left = False
        self._is_silent = self.has_shown = is_silent
        self.has_no_watcher = False
        self._previous = sys.excepthook

    def install(self) -> None:
        """Take over the interpreter's hooks."""
        sys.excepthook = self.on_error
        if self._comm.size > 1:
            threading.excepthook = self.on_thread_error
            self._note_exit_codes()
        atexit.register(self.on_exit)

    def on_error(self, kind: ErrorType, error: BaseException, trace: TracebackType | None) -> None:
        """Show the error once for the job and end the job."""
        if os.getpid() != self._pid:
            self._previous(kind, error, trace)
            return
        if isinstance(sys.stderr, io.StringIO) and sys.excepthook != self.on_error and sys.__stderr__ is not None:
            sys.stderr = sys.__stderr__  # a hook of torch collects what this one writes, and would lose it
        if getattr(error, "is_echo", False):
            time.sleep(SHOWN_SECONDS + WATCHER_SECONDS)  # the rank with the failure itself shows that and ends the job
        code = 2 if isinstance(error, MpispeedError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        is_collective = getattr(error, "is_collective", False)
        _tell_error(error)
        trace = own_trace(trace)
        is_first = self._is_first()
        # Each node has a rank that is first; of what all ranks raise that of rank 0 is enough, once all are known to.
        is_shown = is_first and (self._is_with_first or not is_collective)
        note_failure(kind, error, trace, code, is_shown=is_shown)
        self._tell(kind, error.with_traceback(trace), is_shown=is_shown)
        if self._comm.size == 1:
            if self._is_silent:
                time.sleep(SHOWN_SECONDS)  # a launcher that sees this one end takes the one that speaks along
            self._exit_code = code
            self._ending.forgive()  # nobody waits, and an abort would have another code
            raise SystemExit(code)
        if is_collective and self._meet(GRACE_SECONDS):
            self._has_left = True
            note_state(State.LEFT, code)
            self._ending.forgive()
            raise SystemExit(code)
        if is_first and not is_shown:
            self._tell(kind, error, is_shown=True)
        if not is_first:
            time.sleep(SHOWN_SECONDS)
        self._abort(code)

    def on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Treat an error in a thread as one of the rank: threads waiting for that one would wait for ever."""
        if os.getpid() != self._pid:
            threading.__excepthook__(args)
        elif not issubclass(args.exc_type, SystemExit) and args.exc_value is not None:
            self.on_error(args.exc_type, args.exc_value, args.exc_traceback)

    def on_exit(self) -> None:
        """Leave together; a rank that leaves with an error code does not wait for ever."""
        if self._comm.size > 1 and not self._has_left and os.getpid() == self._pid:
            has_failed = self._exit_code not in (None, 0)
            note_state(State.LEAVING, self._exit_code or 0)
            if not has_failed:
                self._finish()
            if has_failed and not self._meet(GRACE_SECONDS):
                if self._is_first():
                    note_failure(None, None, None, self._exit_code or 1, is_shown=True)
                    sys.stderr.write(
                        f"mpispeed: rank {self._comm.rank} left with exit code {self._exit_code} while other ranks "
                        "went on; ending the job\n"
                    )
                self._abort(self._exit_code or 1)
            elif not has_failed and not self._meet(PATIENT_SECONDS):
                if self._is_first():
                    log.warning("rank %d has left the program and waits for the others", self._comm.rank)
                self._meet(None)
            show_recorder()
            note_state(State.LEFT, self._exit_code or 0)
            # All ranks have left their programs, so no abort is needed to free them.
            self._ending.forgive()

    def close(self) -> None:
        """Close the lock; a process keeps it to its end."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- parts ---------------------------------------------------------------------------------------------------

    def _is_first(self) -> bool:
        """True for the one rank of the node that may show its error, and once for it."""
        if self.has_shown:
            return False
        try:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.has_shown = True
        return True

    def _tell(self, kind: ErrorType, error: BaseException, *, is_shown: bool) -> None:
        """Write the error to stderr, or to the log of this rank where another one shows its own."""
        if is_shown:
            self._show(kind, error)
        if not is_shown or isinstance(error, KeyboardInterrupt):
            for keep in _KEEPERS:
                keep("".join(traceback.format_exception(kind, error, error.__traceback__)))
        self._flush()

    def _show(self, kind: ErrorType, error: BaseException) -> None:
        where = f" (rank {self._comm.rank})" if self._comm.size > 1 else ""
        is_debugged = bool(os.environ.get("MPISPEED_DEBUG")) or "--debug" in sys.argv
        is_expected = isinstance(error, (MpispeedError, KeyboardInterrupt))
        if not is_expected and self._comm.size == 1:
            self._previous(kind, error, error.__traceback__)
            return
        if not is_expected:
            sys.stderr.write(f"mpispeed: uncaught error on rank {self._comm.rank}; ending the job\n")
        if is_debugged or not is_expected:
            sys.stderr.write("".join(traceback.format_exception(kind, error, error.__traceback__)))
        if isinstance(error, MpispeedError):
            sys.stderr.write(f"mpispeed: error: {error}{'' if getattr(error, 'is_collective', False) else where}\n")
        elif isinstance(error, KeyboardInterrupt) and SAID not in os.environ:
            sys.stderr.write("mpispeed: interrupted (Ctrl-C)\n")

    def _meet(self, limit_seconds: float | None) -> bool:
        """Wait for all ranks to come here; False if they do not within the limit."""
        if not hasattr(self, "_everyone"):
            self._everyone = arrival(self._comm.transport)
        return nap_until(self._everyone, float("inf") if limit_seconds is None else limit_seconds)

    def leaves_with(self, status: object) -> None:
        """Remember the status of an exit under way: the interpreter does not tell it to exit handlers."""
        self._exit_code = 0 if status is None else status if isinstance(status, int) else 1

    def _note_exit_codes(self) -> None:
        leave = sys.exit

        def noting(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is not threading.main_thread() or isinstance(status, SystemExit):
                leave(status)
            raise Leaving(*(() if status is None else (status,)))

        sys.exit = noting
        for name in ("exit", "quit"):
            setattr(builtins, name, noting)
        # What `python -m mpi4py` calls with the code of a SystemExit that nobody caught, however it was raised.
        mpi = sys.modules.get("mpi4py.MPI")
        plan_abort = getattr(mpi, "_set_abort_status", None)
        if plan_abort is not None:

            def noting_plan(status: int) -> None:
                self.leaves_with(status)
                plan_abort(status)

            mpi._set_abort_status = noting_plan  # type: ignore[union-attr]

    def _abort(self, code: int) -> None:
        """End the job after a pause for the launcher, which drops output that is still in the pipe."""
        self._flush()
        show_recorder()
        time.sleep(HANDED_SECONDS)
        prepare_abort()
        self._ending.abort(code)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue


def note_state(state: State, code: int) -> None:
    """Write to the recorder how this rank leaves."""
    recorder = recorders.current()
    if recorder is not None:
        recorder.enter(state, code)


def show_recorder() -> None:
    """Let the watchdog read the last operations before the job is gone: they may say more than the error."""
    recorder = recorders.current()
    if recorder is not None and not _INSTALLED["exits"].has_no_watcher:
        _INSTALLED["exits"].has_no_watcher = not recorder.show(WATCHER_SECONDS)
        if recorder.has_order:
            time.sleep(WATCHER_SECONDS)  # the thread that follows the order ends this process


def note_failure(
    kind: ErrorType | None, error: BaseException | None, trace: TracebackType | None, code: int, *, is_shown: bool
) -> None:
    """Leave the error in the recorder; `is_shown` if this rank writes it to stderr."""
    recorder = recorders.current()
    if recorder is None:
        return
    text = f"exit code {code}" if kind is None else "".join(traceback.format_exception(kind, error, trace))
    recorder.last_words(text, is_shown=is_shown)
    recorder.enter(State.FAILED, code)


def open_lock(node: Comm) -> int | None:
    """A file that all ranks of the node have open and nobody can see; None where there can be none."""
    path = ""
    if node.rank == 0:
        try:
            number, path = tempfile.mkstemp(prefix="mpispeed-", suffix=".lock")
            os.close(number)
        except OSError:
            path = ""
    path = node.transport.library_share(path, 0)
    lock: int | None = None
    if path:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    node.transport.library_barrier()
    if path and node.rank == 0:
        Path(path).unlink(missing_ok=True)
    return lock


def install(
    comm: Comm,
    node: Comm,
    ending: Ending,
    finish: Callable[[], None] = _nothing,
    *,
    is_silent: bool = False,
) -> None:
    """Watch how this process leaves, from now on.

    `finish` is called before an orderly exit, to end started operations. `is_silent` is for a process that could not
    join its peers while another one shows the error.

    Collective over: all ranks, at the first call.
    """
    if "exits" in _INSTALLED:
        return
    exits = Exits(comm.duplicate(), node, ending, finish, is_silent=is_silent)
    _INSTALLED["exits"] = exits
    exits.install()


def leaves_with(status: object) -> None:
    """Tell the hooks, if they are in place, that this process is ending with the status of a SystemExit."""
    if "exits" in _INSTALLED:
        _INSTALLED["exits"].leaves_with(status)


def keep_silent_errors(keep: Callable[[str], object]) -> None:
    """Hand each traceback that this rank does not show, because another one shows its own, to `keep`."""
    if keep not in _KEEPERS:
        _KEEPERS.append(keep)


def tell_errors(listener: Callable[[BaseException], object]) -> None:
    """Call a method with the error that ends this process's program, before the job ends, unless its object is gone."""
    _TOLD[:] = [told for told in _TOLD if told() is not None]
    _TOLD.append(weakref.WeakMethod(listener))


def _tell_error(error: BaseException) -> None:
    for told in _TOLD:
        listener = told()
        if listener is not None:
            try:
                listener(error)
            except Exception:
                log.exception("what was to be told of the error has failed itself")
