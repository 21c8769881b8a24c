"""Rank-aware logging: records carry the rank; INFO shows on rank 0 only, WARNING and up on every rank.

Library modules use `logging.getLogger(__name__)` and add no handlers; `setup` is called by
`init_distributed` and the command line, and only when the program has not configured logging itself.
"""

from __future__ import annotations

import io
import logging
import sys

_seen: set[tuple[str, str]] = set()


class RankFilter(logging.Filter):
    """Adds `rank` to records and drops everything below WARNING on ranks other than 0."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a record if it is for this rank; adds its rank and prefix."""
        record.rank = self.rank
        record.where = f"[{self.rank}] " if self.size > 1 else ""
        return self.rank == 0 or record.levelno >= logging.WARNING


def setup(rank: int, size: int, level: int = logging.INFO) -> None:
    """Give the package's logger a handler on stderr, once; later calls only change rank and level."""
    logger = logging.getLogger("mpispeed")
    handlers: list[logging.Handler] = [h for h in logger.handlers if getattr(h, "is_mpispeed", False)]
    if not handlers:
        stream = logging.StreamHandler(sys.stderr)
        stream.is_mpispeed = True  # type: ignore[attr-defined]
        stream.setFormatter(logging.Formatter("%(asctime)s %(where)s%(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(stream)
        logger.propagate = False
        handlers = [stream]
    logger.setLevel(level)
    for handler in handlers:
        handler.filters.clear()
        handler.addFilter(RankFilter(rank, size))


def once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time it is asked for in this process."""
    key = (logger.name, message)
    if key not in _seen:
        _seen.add(key)
        logger.log(level, message)


def keep_lines_whole() -> None:
    """Write each line of stdout and stderr at once.

    Ranks run with PYTHONUNBUFFERED, so that nothing is late; then each argument of `print` is a write of its own, and
    the launcher mixes the lines of ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
