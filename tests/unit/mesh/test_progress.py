"""Queues whose thread does not start, whose caller is interrupted, and whose gates stay open."""

import threading
from types import SimpleNamespace

import pytest

from mpispeed.mesh.backends.solo import SoloComm
from mpispeed.mesh.collectives import progress as module
from mpispeed.mesh.collectives.progress import Progress


@pytest.fixture
def channel():
    made = Progress("tried")
    yield made
    made.close(0.0)


def test_nothing_is_queued_without_a_thread(channel, monkeypatch):
    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(module, "threading", SimpleNamespace(Thread=NoThread, current_thread=threading.current_thread))
        for attempt in (
            lambda: channel.submit(SoloComm(), lambda: None, "first"),
            lambda: channel.carry(SoloComm(), lambda: None, "first"),
            lambda: channel.watch(lambda: False, "recv"),
        ):
            with pytest.raises(RuntimeError, match="new thread"):
                attempt()
    assert not channel._tasks
    assert not channel._watched
    done = []
    channel.submit(SoloComm(), lambda: done.append(1), "second").wait(60)
    assert done == [1]


def test_the_thread_ends_what_an_interrupted_caller_left(channel, monkeypatch):
    done = []

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(channel, "_carry_here", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.carry(SoloComm(), lambda: done.append("first"), "first")
    channel.submit(SoloComm(), lambda: done.append("second"), "second").wait(60)
    assert done == ["first", "second"]
    assert not channel.is_own_thread()
