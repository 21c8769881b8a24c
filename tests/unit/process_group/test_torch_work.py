"""Handles of torch and what is done when their operations end."""

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.work import Work
from mpispeed.process_group import torch_work
from mpispeed.process_group.messages import _then
from mpispeed.process_group.torch_work import TorchWork


def test_only_a_message_that_has_arrived_is_copied():
    copied = []
    for error in (None, CommError("lost")):
        work = Work("recv")
        _then(work, lambda error=error: copied.append(error))
        work.finish(error)
    assert copied == [None]


def test_few_handles_are_kept_that_nobody_waits_for(monkeypatch):
    monkeypatch.setattr(torch_work, "_IS_KEPT_BY_TORCH", False)
    monkeypatch.setattr(torch_work, "_KEPT", kept := {})
    monkeypatch.setattr(torch_work, "MOST_KEPT", 10)
    under_way = Work("all_reduce")
    first = TorchWork([], under_way)
    for _ in range(100):
        TorchWork([])
        assert len(kept) <= 10
    assert first in kept
    under_way.finish()
    first.wait()
    assert first not in kept
