"""The way to this node: what is left where a signal comes, and commands that do not end or are not there."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mpispeed.base.errors import StagingError
from mpispeed.launch.staged import ended_by_exit
from mpispeed.staging import folders, spread, unpack
from mpispeed.staging.pack import Archive

ARCHIVE = Archive(Path("none.tar"), f"0.9.{'0' * 64}", "", "", "", 9, 9, 9, 1, "")


def test_a_signal_while_a_folder_is_made_leaves_nothing(place, tmp_path, monkeypatch):
    """It comes when the folder is there, and before its name is told."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(Path(unpack.__file__).parents[2])!r})\n"
        "from mpispeed.staging import unpack\n"
        "unpack.begin(sys.argv[3], 9, 9)\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(spread, "_UNPACK", (sys.executable, "-S", str(slow)))
    with pytest.raises(SystemExit), ended_by_exit():
        spread.Here().stage(ARCHIVE, folders.name_for("7"), "")
    assert list(place.iterdir()) == []


def test_a_failure_to_unpack_leaves_nothing(place):
    with pytest.raises(StagingError, match=r"cannot be unpacked: .*none\.tar"):
        spread.Here().stage(ARCHIVE, folders.name_for("7"), "")
    assert list(place.iterdir()) == []


def test_a_command_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(spread, "END_SECONDS", 0.1)
    deaf = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); os.kill({os.getpid()}, 15); time.sleep(600)"
    with pytest.raises(SystemExit) as caught, ended_by_exit():
        spread.run_words([sys.executable, "-S", "-c", deaf])
    assert caught.value.code == 128 + signal.SIGTERM


def test_a_command_that_takes_too_long_is_ended_with_a_sentence(monkeypatch):
    monkeypatch.setattr(spread, "LIMIT_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(StagingError, match=r"has not ended within .* a node or its file system may hang"):
        spread.run_words([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    assert time.monotonic() - began < 60


def test_a_command_that_is_not_there_is_a_sentence():
    with pytest.raises(StagingError, match="/none/srun cannot be started: No such file"):
        spread.run_words(["/none/srun"])
