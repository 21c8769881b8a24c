"""Handles of operations: callbacks that fail, and those that come while the operation ends."""

import threading
import time

import pytest

from mpispeed.mesh.collectives.work import Work


def test_a_failing_callback_leaves_nobody_waiting():
    work, called = Work("all_reduce"), []

    def fail():
        raise RuntimeError("callback")

    work.after(lambda: called.append(1))
    work.after(fail)
    with pytest.raises(RuntimeError, match="callback"):
        work.finish()
    assert work.settle(0)
    assert called == [1]
    work.wait(0)


def test_a_callback_that_comes_while_the_operation_ends(monkeypatch):
    """Who gives it and then waits finds it called."""
    work, copied, seen = Work("recv"), [], []

    def give_and_wait():
        work.after(lambda: copied.append(1))
        work.wait()
        seen.extend(copied)

    giver, mark_done = threading.Thread(target=give_and_wait), work._done.set

    def slowly():
        giver.start()
        time.sleep(0.05)
        mark_done()
        time.sleep(0.05)

    monkeypatch.setattr(work._done, "set", slowly)
    work.finish()
    giver.join()
    assert seen == [1]
