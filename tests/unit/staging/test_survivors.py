"""The way to hosts of which some are lost before the end."""

from pathlib import Path

import pytest

from mpispeed.base.errors import StagingError
from mpispeed.staging.spread import Survivors

HOSTS = ["a", "b", "c"]
FOLDER = Path("/tmp/mpispeed-env-0-7-0123abcd")


class Recorder:
    """A way that does nothing, and keeps what it was asked for."""

    def __init__(self):
        self.staged, self.ended = [], []

    def to(self, hosts):
        self.hosts = hosts
        return self

    def stage(self, archive, name, place, lease=""):
        self.staged.append((self.hosts, name, place, lease))
        return FOLDER

    def end(self, folder):
        self.ended.append((self.hosts, folder))


@pytest.mark.parametrize("lost", ["", "b", "abc"])
def test_only_hosts_that_answer_are_told_to_remove_it(lost):
    recorder = Recorder()
    way = Survivors(HOSTS, recorder.to, lambda: dict.fromkeys(lost, "silent"))
    assert way.stage(None, "name", "place", "0 here") == FOLDER
    assert recorder.staged == [(HOSTS, "name", "place", "0 here")]
    if lost:
        with pytest.raises(StagingError, match=f"{FOLDER} may be left on {', '.join(lost)}, which cannot be asked"):
            way.end(FOLDER)
    else:
        way.end(FOLDER)
    alive = [name for name in HOSTS if name not in lost]
    assert recorder.ended == ([(alive, FOLDER)] if alive else [])
