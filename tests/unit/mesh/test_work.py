"""Handles of operations whose callbacks fail."""

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
