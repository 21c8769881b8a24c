"""Runner of each rank of `mpispeed run`: executes the user's script, and watches it until it has joined MPI.

    python -P -m mpi4py -m mpispeed.launch.rank SCRIPT [ARGUMENTS]
    python -P -m mpi4py -m mpispeed.launch.rank -m MODULE [ARGUMENTS]
    python -P -m mpi4py -m mpispeed.launch.rank --torch-env SCRIPT [ARGUMENTS]

A rank that fails before it joins MPI, by a broken import on one node say, is unknown to MPI: some launchers
leave the other ranks waiting for it. So it joins first and fails then, and the job ends as it does for later errors.
With --torch-env the others may never join: there the launcher is told to end the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mpispeed.base.errors import MpispeedError
from mpispeed.base.launched import launched_rank
from mpispeed.base.traces import own_trace
from mpispeed.launch.bind import bind_rank
from mpispeed.launch.torch_env import TORCH_ENV, set_torch_variables
from mpispeed.logs import rank_logs


def run_script(words: list[str]) -> None:
    """Run a script, or a module after -m, as if Python had been started with it."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        _add_import_folder()
        _put_first(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    _add_import_folder()
    _put_first(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _put_first(folder: Path) -> None:
    """Put the script's folder first on the path, as Python does unless told not to; the runner was started without."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(folder))


def _add_import_folder() -> None:
    """Put the starting folder in front of PYTHONPATH, for the script and its children.

    Only now, so that files there do not take the place of ours and mpi4py's.
    """
    folder = os.environ.get("MPISPEED_IMPORT_FOLDER")
    if not folder:
        return
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([path] if path else [])])
    sys.path.insert(0, folder)


def join_before_failing() -> None:
    """Join MPI if this process has not, and take over its exits.

    Collective over: all ranks; the others are joining, or fail as well.
    """
    if "mpi4py.MPI" in sys.modules:
        return  # mpi4py's runner, or the hooks that are in place, end the job
    from mpispeed.mesh import start  # imports torch: only when it is needed

    start()


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught error like Python, but from the script's frames on; `mpispeed run` reports Ctrl-C."""
    if not isinstance(error, KeyboardInterrupt) or os.environ.get("MPISPEED_DEBUG"):
        sys.__excepthook__(kind, error.with_traceback(own_trace(trace)), error.__traceback__)


def tell_mpi(code: object) -> None:
    """Tell the hooks of a script that has joined MPI by mpispeed with which code it leaves."""
    if "mpispeed.mesh.exits" in sys.modules:
        sys.modules["mpispeed.mesh.exits"].leaves_with(code)


class LauncherEnd:
    """The end of a job by its launcher, for a rank that fails without MPI.

    srun --kill-on-bad-exit and Open MPI's mpirun see to that themselves. hydra, the mpirun of MPICH and Intel MPI, lets
    the others wait for a rank that has not joined MPI, unless it is told by PMI's own word.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Remember the connection to hydra: a script that joins and leaves MPI may have another file there later."""
        number = environ.get("PMI_FD", "")
        self._file = int(number) if number.isdigit() and "MPI_LOCALRANKID" in environ else -1
        self._node = self._look()
        self.code = 0

    def _look(self) -> int:
        """Number of the connection in the system; 0 if there is none."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._file)
            return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
        return 0

    def set_code(self, code: object) -> None:
        """Set the exit code, as Python makes it of the argument of `sys.exit`."""
        self.code = int(code is not None) if not isinstance(code, int) else code & 255

    def end(self) -> None:
        """Tell hydra to end the job if this rank leaves with an exit code other than 0."""
        if not self.code or not self._node or self._look() != self._node or "mpi4py.MPI" in sys.modules:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with contextlib.suppress(OSError):
            os.write(self._file, f"cmd=abort exitcode={self.code}\n".encode())


def run_torch_script(words: list[str]) -> None:
    """Run a script with the variables of torch.distributed, without joining MPI."""
    ending = LauncherEnd()
    atexit.register(ending.end)  # before the logs, which then are complete at its call
    rank_logs.begin()
    try:
        _prepare_torch()
        run_script(words)
    except SystemExit as leaving:
        tell_mpi(leaving.code)
        ending.set_code(leaving.code)
        raise
    except Exception:
        ending.set_code(1)
        raise


def _prepare_torch() -> None:
    try:
        warning = set_torch_variables()
        bind_rank()
    except MpispeedError as error:
        if launched_rank() == 0:  # all ranks find the same
            sys.stderr.write(f"mpispeed: {error}\n")
        sys.exit(2)
    if warning:
        sys.stderr.write(f"mpispeed: warning: {warning}\n")


def main() -> None:
    """Entry point; runs the script or module of the command line."""
    sys.excepthook = show_error
    if sys.argv[1] == TORCH_ENV:
        run_torch_script(sys.argv[2:])
        return
    rank_logs.begin()
    try:
        bind_rank()
        run_script(sys.argv[1:])
    except SystemExit as leaving:
        tell_mpi(leaving.code)
        raise
    except Exception:
        join_before_failing()
        raise


if __name__ == "__main__":
    main()
