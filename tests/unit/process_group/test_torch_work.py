"""Handles of torch and what is done when their operations end."""

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.work import Work
from mpispeed.process_group.messages import _then


def test_only_a_message_that_has_arrived_is_copied():
    copied = []
    for error in (None, CommError("lost")):
        work = Work("recv")
        _then(work, lambda error=error: copied.append(error))
        work.finish(error)
    assert copied == [None]
