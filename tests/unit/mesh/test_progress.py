"""Queues whose thread does not start, whose caller is interrupted, and whose gates stay open."""

import threading
from types import SimpleNamespace

import pytest

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.solo import SoloTransport, solo_comm
from mpispeed.mesh.collectives import progress as module
from mpispeed.mesh.collectives.group import CommTrace, Group, Limits
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
            raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(module, "threading", SimpleNamespace(Thread=NoThread, current_thread=threading.current_thread))
        for attempt in (
            lambda: channel.submit(solo_comm().group, lambda: None, "first"),
            lambda: channel.carry(solo_comm().group, lambda: None, "first"),
            lambda: channel.watch(lambda: False, "recv"),
        ):
            with pytest.raises(RuntimeError):
                attempt()
    assert not channel._tasks
    assert not channel._watched
    done = []
    channel.submit(solo_comm().group, lambda: done.append(1), "second").wait(60)
    assert done == [1]


def test_the_thread_ends_what_an_interrupted_caller_left(channel, monkeypatch):
    done = []

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(channel, "_carry_here", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.carry(solo_comm().group, lambda: done.append("first"), "first")
    channel.submit(solo_comm().group, lambda: done.append("second"), "second").wait(60)
    assert done == ["first", "second"]
    assert not channel.is_own_thread()


class Deserted(SoloTransport):
    """A group whose other ranks never come."""

    def __init__(self):
        super().__init__()
        self.gates = []

    def compare(self, code):
        self.gates.append(lambda: None)
        return self.gates[-1]


def deserted(timeout_seconds=None):
    limits = Limits(timeout_seconds=timeout_seconds)
    return Group(Deserted(), (0,), (), "ordered", CommTrace(), limits=limits)


@pytest.mark.parametrize("way", ("submit", "carry", "at once"))
def test_a_gate_that_stays_open_keeps_its_buffer(way):
    channel, group = Progress("deserted", is_threaded=way != "at once"), deserted(0.0)
    start = channel.carry if way == "carry" else channel.submit
    with pytest.raises(CommError, match="not all ranks came"):
        start(group, lambda: None, "barrier").wait(60)
    assert group.transport.gates[0] in module._ABANDONED
    channel.close(0.0)


def test_gates_of_a_channel_that_is_broken_off_keep_their_buffers(channel, monkeypatch):
    monkeypatch.setattr(module, "LAST_GATES_SECONDS", 0.0)
    group = deserted()
    work = channel.submit(group, lambda: None, "barrier")
    while not group.transport.gates:
        pass
    channel.break_off(CommError("broken off"), {channel._groups.add(group): 2})
    with pytest.raises(CommError, match="broken off"):
        work.wait(60)
    assert len(group.transport.gates) == 2
    assert all(gate in module._ABANDONED for gate in group.transport.gates)


def test_a_channel_that_is_given_up_lets_its_callers_go():
    channel, group = Progress("given up"), deserted()
    started, failures = channel.submit(deserted(), lambda: None, "barrier"), []
    lone = Progress("given up too")

    def carry():
        try:
            lone.carry(group, lambda: None, "barrier").wait()
        except CommError as error:
            failures.append(str(error))

    caller = threading.Thread(target=carry)
    caller.start()
    while not group.transport.gates:
        pass
    for each in (channel, lone):
        each.abandon()
    caller.join(60)
    with pytest.raises(CommError, match="'given up' was given up"):
        started.wait(60)
    assert failures == ["channel 'given up too' was given up"]
    for each in (channel, lone):
        each._thread.join(60)
        assert not each._thread.is_alive()
    with pytest.raises(CommError, match="was given up"):
        channel.submit(group, lambda: None, "barrier").wait(60)


def test_messages_that_nobody_answers_are_given_up():
    channel = Progress("asked")
    work = channel.watch(lambda: False, "recv")
    assert channel.forget_messages(0.0) == 1
    assert channel.forget_messages(0.0) == 0
    with pytest.raises(CommError, match="nobody has answered"):
        work.wait(60)
    channel.close()
