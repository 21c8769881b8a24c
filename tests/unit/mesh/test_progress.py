"""Queues whose thread does not start, whose caller is interrupted, and whose gates stay open."""

import threading
from types import SimpleNamespace

import pytest

from mpispeed.base.errors import CommError
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


class Deserted(SoloComm):
    """A group whose other ranks never come."""

    def __init__(self):
        super().__init__()
        self.gates = []

    def compare(self, code):
        self.gates.append(lambda: None)
        return self.gates[-1]


@pytest.mark.parametrize("way", ("submit", "carry", "at once"))
def test_a_gate_that_stays_open_keeps_its_buffer(way):
    channel, group = Progress("deserted", is_threaded=way != "at once"), Deserted()
    group.timeout_seconds = 0.0
    start = channel.carry if way == "carry" else channel.submit
    with pytest.raises(CommError, match="not all ranks came"):
        start(group, lambda: None, "barrier").wait(60)
    assert group.gates[0] in module._ABANDONED
    channel.close(0.0)


def test_gates_of_a_channel_that_is_broken_off_keep_their_buffers(channel, monkeypatch):
    monkeypatch.setattr(module, "LAST_GATES_SECONDS", 0.0)
    group = Deserted()
    group.timeout_seconds = None
    work = channel.submit(group, lambda: None, "barrier")
    while not group.gates:
        pass
    channel.break_off(CommError("broken off"), {channel._groups.add(group): 2})
    with pytest.raises(CommError, match="broken off"):
        work.wait(60)
    assert len(group.gates) == 2
    assert all(gate in module._ABANDONED for gate in group.gates)
