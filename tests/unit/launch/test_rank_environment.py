"""What a rank finds in its environment after it has joined."""

import os

from mpispeed.mesh import world
from mpispeed.mesh.backends.solo import solo_comm


def test_numbers_of_another_launcher_do_not_count(monkeypatch, caplog):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "host7"}.items():
        monkeypatch.setenv(name, value)
    alone = world.World(solo_comm(), solo_comm(), node_count=1)
    world._export(alone)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    assert [os.environ[name] for name in names] == ["0", "1", "0", "host7"]
    assert "1 of 1 ranks had other values than MPI (rank 0: RANK='3' WORLD_SIZE='8')" in caplog.text
    caplog.clear()
    world._export(alone)
    assert not caplog.records
    alone.close()
