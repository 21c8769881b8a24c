"""The disk is tried before training: every refusal reaches all ranks at once, and nothing stays behind."""

import errno
import logging
import os
import re
import stat
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.native import block_io
from mpispeed.native.block_io import BlockIO, Options
from mpispeed.store import mounts, owner
from mpispeed.store import preflight as module
from mpispeed.store.mounts import Mount, free_bytes, mount_of
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SwapFolder, clean_stale
from tests.helpers.swap import leftover, python_on_tmpfs, without_rights


def check(roots, wanted=1 << 20, options=None, *, ranks_per_node=None):
    """What every rank gets: a report, or its ConfigError. `wanted` is for each rank, or one number."""
    options = options or Options()

    def work(world):
        bytes_here = wanted[world.rank] if isinstance(wanted, list) else wanted
        try:
            return preflight(world.comm, world.node, Path(roots[world.rank]), bytes_here, options)
        except ConfigError as refusal:
            return refusal

    return sim.run(len(roots), work, ranks_per_node=ranks_per_node)


def refusal(outcomes):
    """The text that all ranks raise."""
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes), outcomes
    assert all(outcome.is_collective for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.fixture(autouse=True)
def nothing_injected():
    yield
    for op in ("read", "write"):
        block_io.inject(op, nth=0)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "options",
    [Options(), Options(block_size=4096, queue_depth=3, threads=2), Options(backend="threads", queue_depth=1)],
    ids=["default", "small blocks", "threads"],
)
def test_a_good_folder(tmp_path, ranks, options, caplog):
    caplog.set_level(logging.INFO)
    reports = check([tmp_path] * ranks, options=options)
    report = reports[0]
    assert all(other == report for other in reports)
    assert report.backend in ("threads", "queue")
    assert report.is_direct == block_io.probe(tmp_path).is_direct
    assert all(trial.write_rate > 0 < trial.read_rate for trial in report.trials)
    assert list(tmp_path.iterdir()) == []
    slow = report.trials[report.slowest_write].write_rate
    assert slow == min(trial.write_rate for trial in report.trials)
    rows = dict(report.describe())
    assert f"rank {report.slowest_write} on {os.uname().nodename}" in rows["write"]
    assert rows["file system"] == mount_of(tmp_path).type
    assert caplog.text.count("swap files: backend") == 1


def test_a_missing_folder_is_made_for_this_user_alone(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there", target_is_directory=True)
    (tmp_path / "there").mkdir()
    root = tmp_path / "link" / "a" / "b"
    reports = check([root] * 3)
    assert not isinstance(reports[0], ConfigError)
    assert [path.name for path in sorted((tmp_path / "there").rglob("*"))] == ["a", "b"]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent)}
    assert modes == {0o700}


def test_a_folder_that_cannot_be_made_on_one_rank(tmp_path):
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    text = refusal(check([tmp_path, tmp_path / "nowhere" / "missing", tmp_path], wanted=5000))
    assert text.startswith("swap files cannot be used on 1 of 3 ranks:")
    assert f"rank 1 on {os.uname().nodename}, folder '{tmp_path / 'nowhere' / 'missing'}'" in text
    assert "(wanted 4.88 KiB (5000 bytes), free unknown): it does not exist and cannot be made (nowhere is a " in text
    assert "link that leads nowhere" in text
    assert [path.name for path in tmp_path.iterdir()] == ["nowhere"]


def test_no_folder_is_made_where_there_is_no_right_to():
    with without_rights() as root:
        text = refusal(check([root / "missing"]))
    assert "cannot be made (Permission denied)" in text


def test_what_others_make_meanwhile_is_not_used(tmp_path, monkeypatch):
    """Between the look and the making somebody else puts a link, or a folder of his own, in the place."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    original = os.mkdir

    def planted(name, *args, **options):
        if name == "link":
            (tmp_path / name).symlink_to(elsewhere)
        original(name, *args, **options)

    monkeypatch.setattr(os, "mkdir", planted)
    text = refusal(check([tmp_path / "link" / "below"]))
    assert "link is a link that leads nowhere, or no folder" in text
    assert list(elsewhere.iterdir()) == []
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="made by another user"):
        owner.make_folder(tmp_path / "theirs")


def test_all_problems_of_all_ranks_come_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    gone = tmp_path / "file" / "a"
    roots = [gone, gone, tmp_path, tmp_path / "file", gone, tmp_path / "nul\0"]
    lines = refusal(check(roots)).splitlines()
    assert lines[0] == "swap files cannot be used on 5 of 6 ranks:"
    assert len(lines) == 4
    assert lines[1].startswith("  ranks 0-1, 4 on ")
    assert "wanted 3 MiB" in lines[1]
    assert "it is no folder" in lines[2]
    assert "null byte" in lines[3]


def test_a_folder_without_the_right_to_write():
    with without_rights() as root:
        text = refusal(check([root, root]))
    assert "ranks 0-1" in text
    assert f"folder '{root}'" in text
    assert "may not write to it" in text


def test_space_is_counted_over_the_ranks_that_share_it(tmp_path):
    each = int(free_bytes(tmp_path) * 0.6)
    assert not isinstance(check([tmp_path], each)[0], ConfigError)
    text = refusal(check([tmp_path, tmp_path], each))
    assert "ranks 0-1 want " in text
    both = 2 * each
    assert f"({both + -(-both // 100)} bytes) together, 1 % to spare included" in text
    assert re.search(r"\(wanted .* \(\d+ bytes\), free .* \(\d+ bytes\)\)", text)


@pytest.mark.parametrize(("kind", "fits"), [("ext4", True), ("nfs4", False)])
def test_nodes_share_only_network_file_systems(tmp_path, monkeypatch, kind, fits):
    monkeypatch.setattr(module, "mount_of", lambda _: Mount("/", kind, "server:/export"))
    each = int(free_bytes(tmp_path) * 0.6)
    outcomes = check([tmp_path, tmp_path], each, ranks_per_node=1)
    if fits:
        assert not isinstance(outcomes[0], ConfigError)
    else:
        assert "want " in refusal(outcomes)


def test_the_margin_of_space(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _: 101 * 100)
    assert not isinstance(check([tmp_path, tmp_path], 5000)[0], ConfigError)
    # 1 % of 10001 is rounded up.
    assert "free 2 B (2 bytes) more" in refusal(check([tmp_path, tmp_path], [5000, 5001]))


def test_space_that_killed_runs_hold_is_given_back_first(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    dead, live = leftover(tmp_path, swap_bytes=1 << 20), SwapFolder(tmp_path, run_name(), 0)
    assert not isinstance(check([tmp_path] * 3)[0], ConfigError)
    assert not dead.exists()
    assert live.path.exists()
    assert caplog.text.count(str(dead)) == 1


class Flipping(BlockIO):
    """Gives back one wrong bit."""

    def read(self, file, buffer, offset=0):
        transfer = super().read(file, buffer, offset)
        if offset:
            transfer.wait()
            buffer[7] ^= 1
        return transfer


class Idle(BlockIO):
    """Says that it has read, and has not."""

    def read(self, file, buffer, offset=0):
        return super().read(file, torch.empty_like(buffer), offset)


@pytest.mark.parametrize(("kind", "place"), [(Flipping, (8 << 20) + 7), (Idle, 0)])
def test_other_bytes_than_were_written(tmp_path, monkeypatch, kind, place):
    monkeypatch.setattr(module, "BlockIO", kind)
    text = refusal(check([tmp_path, tmp_path]))
    assert "rank 0 on" in text
    assert "rank 1 on" in text
    assert text.count(f"gave back other bytes than were written, first at byte {place} of ") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_transfer_that_fails_on_one_rank(tmp_path, op, code):
    block_io.inject(op, nth=3, errno=code)
    text = refusal(check([tmp_path, tmp_path]))
    assert "on 1 of 2 ranks" in text
    assert os.strerror(code) in text
    assert "trial.swap" in text
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_that_comes_short_is_continued(tmp_path):
    block_io.inject("read", nth=2, after_bytes=4096)
    assert not isinstance(check([tmp_path])[0], ConfigError)


def test_a_backend_that_is_not_possible(tmp_path, monkeypatch):
    monkeypatch.setattr(block_io, "kernel_refusal", lambda _: "the kernel is older")
    text = refusal(check([tmp_path, tmp_path], options=Options(backend="uring")))
    assert "ranks 0-1" in text
    assert "the kernel is older" in text
    report = check([tmp_path])[0]
    assert report.backend == "threads"


def test_an_error_of_ours_does_not_hang_the_others(tmp_path, monkeypatch, caplog):
    def broken(*_):
        msg = "planted"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(module, "_measure", broken)
    assert "ZeroDivisionError: planted" in refusal(check([tmp_path, tmp_path]))
    assert "Traceback" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_memory_is_warned_of_once(caplog, tmp_path):
    shared = Path("/dev/shm")
    assert mount_of(shared).type == "tmpfs"
    for _ in range(2):
        report = check([shared, tmp_path, shared])[0]
    assert caplog.text.count("ranks 0, 2 (tmpfs at /dev/shm on") == 1
    assert "are host memory" in caplog.text
    assert dict(report.describe())["file system"] == "/".join(sorted({"tmpfs", mount_of(tmp_path).type}))
    assert clean_stale(shared) == []


def test_buffered_transfers_and_networks_are_warned_of(tmp_path, monkeypatch, caplog):
    class Buffered(block_io.BlockFile):
        def __init__(self, path, *, create=False):
            super().__init__(path, create=create, direct=False)

    monkeypatch.setattr("mpispeed.store.swap.BlockFile", Buffered)
    monkeypatch.setattr(module, "mount_of", lambda _: Mount("/x", "lustre", "server:/export"))
    report = check([tmp_path])[0]
    assert (report.is_direct, report.backend) == (False, "threads")
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["WARNING", "WARNING"]
    assert "page cache" in caplog.text
    assert "network file system" in caplog.text
    assert "buffered on rank 0" in dict(report.describe())["direct"]


SMALL = """
import sys
from pathlib import Path
from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.native.block_io import Options
from mpispeed.store.preflight import preflight
root = Path(sys.argv[1])
for wanted in (4 << 20, 0):
    try:
        sim.run(2, lambda world: preflight(world.comm, world.node, root, wanted, Options()))
    except ConfigError as error:
        print(error)
print(list(root.iterdir()))
"""


def test_a_disk_too_small_for_the_states_or_even_for_the_trial(tmp_path):
    done = python_on_tmpfs(SMALL, "6m", tmp_path)
    assert done.returncode == 0, done.stderr
    full, trial = done.stdout.split("swap files cannot be used on 2 of 2 ranks:")[1:]
    assert "the file system is too full: ranks 0-1 want 8.08 MiB (8472495 bytes) together" in full
    assert "6 MiB (6291456 bytes) are free" in full
    assert trial.count("No space left on device") == 2
    assert done.stdout.endswith("[]\n")


TABLE = r"""
22 27 0:21 / / rw,relatime - ext4 /dev/root rw
23 22 0:22 / /data rw,relatime shared:7 master:2 - ext4 /dev/a rw
24 22 0:23 / /data rw - nfs4 server:/with\040blank rw
25 24 0:24 / /data/a\040\134b rw - tmpfs none rw
broken line
26 22 0:25 / /data2
"""


@pytest.mark.parametrize(
    ("path", "kind", "source"),
    [
        ("/x", "ext4", "/dev/root"),
        ("/data", "nfs4", "server:/with blank"),
        ("/data/y/z", "nfs4", "server:/with blank"),
        ("/data/a \\b/c", "tmpfs", "none"),
        ("/data2", "ext4", "/dev/root"),
    ],
)
def test_a_mount_is_found_by_the_longest_and_last_row(tmp_path, monkeypatch, path, kind, source):
    (tmp_path / "table").write_text(TABLE)
    monkeypatch.setattr(mounts, "_TABLE", tmp_path / "table")
    found = mount_of(Path(path))
    assert (found.type, found.source) == (kind, source)
    assert (found.is_memory, found.is_network) == (kind == "tmpfs", kind == "nfs4")


def test_without_a_mount_table(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_TABLE", tmp_path / "missing")
    assert mount_of(tmp_path) is mounts.UNKNOWN


def test_the_mount_table(tmp_path):
    assert mount_of(Path("/proc")).type == "proc"
    assert mount_of(tmp_path / "missing") == mount_of(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert mount_of(tmp_path / "loop").type
