"""Start of the recorders and watchdogs where one rank cannot: all ranks go on alike."""

import logging

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.watchdog import start


@pytest.fixture
def planted(monkeypatch):
    """Replace a function by one that fails on the last of three ranks with an error that nobody foresaw."""

    def plant(owner, name, rank_of):
        def fail(*args, **kwargs):
            if rank_of(*args) == 2:
                raise LookupError("planted")

        monkeypatch.setattr(owner, name, fail)

    return plant


def test_a_limit_that_one_rank_cannot_read_is_refused_on_all(monkeypatch):
    found = iter(["30", "30", LookupError("planted"), "30", "30"])

    def read(name, default):
        given = next(found)
        if isinstance(given, Exception):
            raise given
        return float(given)

    monkeypatch.setattr(start, "_seconds", read)

    def fn(world):
        world.comm.group.sequence = object()
        monkeypatch.setattr(start, "_STARTED", [])
        with pytest.raises(ConfigError, match=r"LookupError: planted \(on rank [012]\)"):
            start.watch_over(world)

    sim.run(3, fn)


def test_without_a_recorder_on_one_rank_none_has_one(planted, caplog, monkeypatch):
    planted(start.recorders, "open_recorder", lambda path, rank, size, local: rank)
    closed = []
    monkeypatch.setattr(start.recorders, "close_recorder", lambda: closed.append(1))
    with caplog.at_level(logging.WARNING, logger="mpispeed"):
        assert sim.run(3, start._open_recorders) == [None] * 3
    assert len(closed) == 3
    assert "1 ranks have no flight recorder (LookupError: planted)" in caplog.text


def test_a_node_without_a_watchdog_is_told(planted, caplog, tmp_path, monkeypatch):
    planted(start, "_spawn", lambda *args: 2)
    (tmp_path / "rank-0").write_text("")
    with caplog.at_level(logging.WARNING, logger="mpispeed"):
        sim.run(3, lambda world: start._start_watchdogs(world, tmp_path, (30.0, 600.0)))
    assert "1 nodes have no watch" in caplog.text
    assert "LookupError: planted" in caplog.text
    assert not tmp_path.exists()
