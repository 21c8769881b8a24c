"""DeepSpeed's logger: ours, under its names."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpispeed.base.launched import launched_rank

logger = logging.getLogger("mpispeed")


class LoggerFactory:
    """Makes loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        """The logger of that name below ours, so that it has our handler and the rank in its lines.

        Raises:
            ValueError: there is no name.
        """
        if name is None:
            msg = "name for logger cannot be None"
            raise ValueError(msg)
        made = logger.getChild(name)
        made.setLevel(level)
        return made


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks.

    Args:
        message: what to say.
        ranks: who says it; None or a list with -1: all.
        level: level of the record; below WARNING only rank 0 is shown, unless the logger is set up otherwise.
    """
    rank = launched_rank()
    if ranks is None or -1 in ranks or (rank or 0) in ranks:
        logger.log(level, "[Rank %d] %s", rank or 0, message)
