"""A step without communication that fails on all ranks if it fails on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpispeed.base.errors import MpispeedError

Kinds = type[Exception] | tuple[type[Exception], ...]
Agree = Callable[[bool, str, type[MpispeedError]], None]


@contextmanager
def together(agree: Agree, error: type[MpispeedError], doing: str = "", plain: Kinds = MpispeedError) -> Iterator[None]:
    """As `Comm.together`, for any object with `agree`. Collective over: the ranks that agree."""
    failure: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is: the other ranks are on their way to the agreement
        failure = caught
    try:
        agree(failure is None, "" if failure is None else text_of(failure, doing, plain), error)
    except error as told:
        raise told from failure
    finally:
        failure = None  # else its traceback holds this frame, and this frame holds it


def agree_by_texts(gather_objects: Callable[[str], list[str]]) -> Agree:
    """An `agree` for `together` of ranks that gather their texts; the first is raised, with its rank unless all failed.

    This suits mistakes that all ranks make alike, such as those of a configuration.
    """

    def agree(ok: bool, message: str, error: type[MpispeedError]) -> None:
        texts = gather_objects("" if ok else message)
        failed = [rank for rank, text in enumerate(texts) if text]
        if failed:
            first = texts[failed[0]]
            raised = error(first if len(failed) == len(texts) else f"{first} (on rank {failed[0]})")
            raised.is_collective = True
            raise raised

    return agree


class Failures:
    """Steps of one rank between which the ranks communicate; the first failure is kept until they can agree."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of one step; a failure ends the step, and nothing is raised."""
        try:
            yield
        except Exception as failure:  # whatever it is: the other ranks go on to the next exchange
            if self.first is None:
                self.first = failure

    def text(self, *, doing: str = "", plain: Kinds = MpispeedError) -> str:
        """The text of the failure, formed as by `together`; "" without one."""
        return "" if self.first is None else text_of(self.first, doing, plain)

    def raise_first(self) -> None:
        """Raise the failure that was kept, if any; it is forgotten. For the inside of `together`."""
        failure, self.first = self.first, None
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # as in `together`


def text_of(failure: Exception, doing: str = "", plain: Kinds = MpispeedError) -> str:
    """The text of a failure that other ranks are told: with its type, unless it is of the kinds in `plain`."""
    name, text = type(failure).__name__, str(failure)
    said = text or name if isinstance(failure, plain) else f"{name}: {text}"
    return f"{doing}: {said}" if doing else said
