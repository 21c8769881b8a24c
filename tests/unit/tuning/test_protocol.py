"""Lines between the tuner and its job."""

import os
import stat

import pytest

from mpispeed.tuning.protocol import Lines, Outcome, Reply, Task, append, reply_of, write_private


def test_lines_are_read_once_and_only_whole(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = Lines(path)
    with pytest.raises(FileNotFoundError):
        list(lines.new())
    with pytest.raises(FileNotFoundError):
        append(path, Task(1, "stop"))
    path.touch()
    first = Task(1, "trial", "t", "/f", {"a": {"b": None}}, ["--x", "1"], 2, 4, "flops", [1.5])
    append(path, first)
    assert [Task(**line) for line in lines.new()] == [first]
    with path.open("a") as file:
        file.write('{"number": 2, "ki')
    assert list(lines.new()) == []
    with path.open("a") as file:
        file.write('nd": "stop"}\n')
    assert [Task(**line) for line in lines.new()] == [Task(2, "stop")]
    assert list(lines.new()) == []


def test_replies_come_back_as_they_were(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.touch()
    told = [
        Reply("ready", step="12.3"),
        Reply("outcome", 1, Outcome("t", "memory", "no\nmore", {"latency": 0.1}, {"forecasts": []}, 2.5)),
    ]
    for reply in told:
        append(path, reply)
    assert [reply_of(line) for line in Lines(path).new()] == told


def test_a_line_is_written_to_its_end(tmp_path, monkeypatch):
    path, write = tmp_path / "tasks.jsonl", os.write
    path.touch()
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))  # as a full file system may
    append(path, Task(1, "trial", "t"))
    assert [Task(**line) for line in Lines(path).new()] == [Task(1, "trial", "t")]


def test_private_files_are_so_whatever_they_were(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text("a longer text")
    path.chmod(0o644)
    write_private(path, "{}")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("{}", 0o600)
