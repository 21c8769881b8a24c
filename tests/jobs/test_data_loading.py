"""Jobs whose ranks, or their worker processes, are killed while data are read ahead: they end, nothing is left."""

import time
from pathlib import Path

from mpispeed.data.node_copies import COPIED

WORKER = Path(__file__).with_name("data_worker.py")
END_SECONDS = 60


def left_alive(folder: Path, ranks: int) -> list[int]:
    """Processes of the last job that are still there, after some time at most."""
    pids = [int(pid) for rank in range(ranks) for pid in (folder / f"pids-{rank}").read_text().split()]
    assert len(pids) == 5 * ranks
    deadline = time.monotonic() + END_SECONDS
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "disk").rglob("*") if path.is_file())


def test_a_killed_rank_leaves_no_workers_and_its_copy_goes_with_the_next_run(job, tmp_path):
    ended = job(2, WORKER, tmp_path, "rank")
    assert ended.returncode != 0
    assert left_alive(tmp_path, 2) == []
    assert copies(tmp_path) == ["0.bin", "owner.json"]
    (stale,) = (tmp_path / "disk" / COPIED.parent_name).iterdir()
    done = job(2, WORKER, tmp_path, "whole")
    assert done.returncode == 0, done.stderr
    assert f"removed 1 copied data folders of runs that were killed: {stale}" in done.stderr
    assert "data: 1 files (" in done.stderr
    assert copies(tmp_path) == []
    assert left_alive(tmp_path, 2) == []


def test_a_killed_worker_ends_the_job_with_a_sentence(job, tmp_path):
    ended = job(2, WORKER, tmp_path, "worker")
    assert ended.returncode != 0
    assert ended.stderr.count("of the data loader was killed by SIGKILL (often for want of memory) while it read") >= 1
    assert left_alive(tmp_path, 2) == []
