"""Tracebacks for users: without the frames of the script's runner."""

from __future__ import annotations

from types import TracebackType

_STARTERS = ("<frozen runpy>", "/runpy.py", "/mpi4py/__main__.py", "/mpi4py/run.py", "/mpispeed/launch/rank.py")


def own_trace(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's script on; None where no frame is the script's."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_STARTERS):
        trace = trace.tb_next
    return trace
