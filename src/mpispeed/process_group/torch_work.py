"""Handles of started operations as torch.distributed knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.collectives.work import Work

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_IS_KEPT_BY_TORCH = _VERSION >= (2, 9)
"""False where C++ code of torch, such as DistributedDataParallel's, may hold no reference to a handle in Python."""

_KEPT: dict[TorchWork, None] = {}
"""Handles that nobody has waited for yet, where torch does not keep them; the oldest first."""

MOST_KEPT = 1000
"""After so many handles, those of the older half whose operations have ended are dropped: nobody will wait for them."""


class TorchWork(dist.Work):
    """The handle of an operation that a process group has started, or already done where `work` is None.

    `outputs` are the value of its future; `source` tells the sender of a message that came from any rank.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], work: Work | None = None, source: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self._outputs, self._work, self._source = list(outputs), work, source
        self._future: torch.futures.Future[Any] | None = None
        self._is_told = False  # its future is complete, or about to be: callbacks of it may ask this handle
        if not _IS_KEPT_BY_TORCH:
            _keep(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; True, or its error is raised.

        Raises:
            CommError: `timeout` passed first; the zero that torch passes for "none" is none.
        """
        _KEPT.pop(self, None)
        work = self._work
        if work is not None and self._is_told and work.bring is None and work.join is None:
            if work.error is not None:
                raise work.error
        elif work is not None:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            work.wait(seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        """True once the operation has ended, well or badly."""
        return self._work is None or self._is_told or self._work.is_done()

    def is_success(self) -> bool:
        """True if the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an operation that has ended badly."""
        return None if self._work is None else self._work.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation fills; waits for it."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Position in the group of the rank that sent a message received from any rank."""
        if self._source is None:
            msg = "only a message received from any rank has a source rank that its receiver did not name"
            raise RuntimeError(msg)
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the tensors of the operation, completed by the thread that ends it."""
        _KEPT.pop(self, None)
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            if self._work is None:
                future.set_result(self._outputs)
            else:
                self._work.after(lambda: _complete(future, self))
                # Whoever waits for the future does so in torch, where nothing can be noted.
                recorder = recorders.current()
                if recorder is not None and not self._work.is_done():
                    recorder.may_wait_for(self._work.row)
        return self._future


def _keep(work: TorchWork) -> None:
    if len(_KEPT) >= MOST_KEPT:
        for old in list(_KEPT)[: MOST_KEPT // 2]:
            if old.is_completed():
                _KEPT.pop(old, None)
    _KEPT[work] = None


def _complete(future: torch.futures.Future[Any], work: TorchWork) -> None:
    work._is_told = True
    error = work._work.error if work._work is not None else None
    if error is None:
        future.set_result(work._outputs)
    else:
        future.set_exception(error)
