"""What each rank of `mpispeed run` executes: the user's script, watched until it has joined MPI.

    python -P -m mpi4py -m mpispeed.launch.rank SCRIPT [ARGUMENTS]
    python -P -m mpi4py -m mpispeed.launch.rank -m MODULE [ARGUMENTS]

A rank that fails before it joins MPI, by a broken import on one node say, is unknown to MPI: some launchers
leave the other ranks waiting for it. So it joins first and fails then, and the job ends as it does for later errors.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from mpispeed.guard import logs
from mpispeed.launch.bind import bind_rank


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
    """What Python does at its start, unless the user asked it not to; the runner was started without."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(folder))


def _add_import_folder() -> None:
    """Put the folder of the start in front of PYTHONPATH, for the script and what it starts.

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


def main() -> None:
    """Run what the command line names."""
    logs.begin()
    try:
        bind_rank()
        run_script(sys.argv[1:])
    except SystemExit as leaving:
        if "mpispeed.mesh.exits" in sys.modules:
            sys.modules["mpispeed.mesh.exits"].leaves_with(leaving.code)
        raise
    except Exception:
        join_before_failing()
        raise


if __name__ == "__main__":
    main()
