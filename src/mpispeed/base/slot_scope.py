"""Within a slot: a forward pass whose results may not depend on the rank that runs it, which may not ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpispeed.base.errors import UsageError


class _Running:
    """The forward passes of slots that run in this process."""

    depth = 0


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Context of the forward pass of a slot."""
    _Running.depth += 1
    try:
        yield
    finally:
        _Running.depth -= 1


def refuse_rank(question: str) -> None:
    """Refuse a question for the rank, such as "mpispeed.comm.get_rank()", within the forward pass of a slot.

    Raises:
        UsageError: such a pass runs.
    """
    if _Running.depth:
        msg = (
            f'reduction "invariant": the model asks for {question} in its forward pass, and its losses may not depend '
            "on the rank that computes a micro-batch; ask before, outside of the model, or use reduction ordered"
        )
        raise UsageError(msg)
