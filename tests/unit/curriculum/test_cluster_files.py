"""Files of clusters and indexes: made once, checked before use, read by ranges; and what is said of wrong ones."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import signal
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.curriculum import cluster_files
from mpispeed.curriculum.cluster_files import ClusterFiles
from mpispeed.curriculum.difficulty_index import DifficultyIndex
from mpispeed.curriculum.index_file import IndexFileError, MMapIndexedDataset
from mpispeed.curriculum.index_layout import CODES, HEAD, MAGIC
from mpispeed.curriculum.sampler import make_stream
from mpispeed.curriculum.stream import Place
from tests.helpers.index_files import metric, write_metric, write_rows

MASK = np.arange(1000) % 7 == 0
FACTS = {"samples": 1000, "metrics": [{"name": "m", "before": 0, "after": 143}]}
WANTED = list(range(0, 1000, 7))


class Maker:
    """Makes the cluster of multiples of seven, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self.made += 1
        return MASK


def samples_of(files: ClusterFiles, make: Maker) -> list[int]:
    count = files.count(FACTS, make)
    found: list[int] = files.take(FACTS, make, np.arange(count)).tolist()
    return found


def test_a_cluster_is_made_once_for_all_who_come(tmp_path: Path) -> None:
    make, found = Maker(), []
    threads = [
        threading.Thread(target=lambda: found.append(samples_of(ClusterFiles(tmp_path / "of" / "all"), make)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WANTED] * 4
    assert make.made == 1
    assert samples_of(ClusterFiles(tmp_path / "of" / "all"), make) == WANTED
    assert make.made == 1
    assert ClusterFiles(tmp_path).count(FACTS | {"samples": 999}, lambda: MASK[:999]) == 143


def damage(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("ending", ["bin", "json"])
def test_a_damaged_cluster_is_made_again(tmp_path: Path, ending: str) -> None:
    make = Maker()
    samples_of(ClusterFiles(tmp_path), make)
    (path,) = tmp_path.glob(f"cluster-*.{ending}")
    for spoil in (lambda: damage(path, 12), lambda: path.write_bytes(path.read_bytes()[:-1]), path.unlink):
        made = make.made
        spoil()
        assert samples_of(ClusterFiles(tmp_path), make) == WANTED
        assert make.made == made + 1


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    """But not what another node writes now, where its lock is not seen here."""
    old, new = (tmp_path / f".cluster-part-{name}" for name in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    samples_of(ClusterFiles(tmp_path), Maker())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", "", ".bin", ".json"]
    assert new.exists()


def test_the_lock_ends_though_a_process_was_forked_under_it(tmp_path: Path) -> None:
    """Workers of another loader, for example; they live as long as they like."""
    children = []

    def make() -> np.ndarray[Any, np.dtype[np.bool_]]:
        child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        child.start()
        children.append(child)
        return MASK

    try:
        assert ClusterFiles(tmp_path).count(FACTS, make) == len(WANTED)
        with (tmp_path / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for child in children:
            child.kill()
            child.join()


def test_whole_clusters_are_checked_without_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by those who have waited while it was made."""
    checksum, seen = cluster_files._Cluster.checksum, []

    def checked(cluster: Any) -> int:
        with (tmp_path / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(cluster)
        return checksum(cluster)

    monkeypatch.setattr(cluster_files._Cluster, "checksum", checked)
    make = Maker()
    assert [samples_of(ClusterFiles(tmp_path), make) for _ in range(2)] == [WANTED] * 2
    assert (make.made, len(seen)) == (1, 2)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_files, "_MOST_OPEN", 3)
    files, before = ClusterFiles(tmp_path), open_files()
    for number in [*range(20), *range(20)]:
        assert files.count(FACTS | {"number": number}, lambda: MASK) == 143
    assert open_files() <= before + 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IndexFileError, match=r"cannot write into .*file"):
        ClusterFiles(tmp_path / "file")


def test_files_of_clusters_say_what_they_are_of(tmp_path: Path) -> None:
    samples_of(ClusterFiles(tmp_path), Maker())
    (path,) = tmp_path.glob("*.json")
    told = json.loads(path.read_text())
    assert told["of"] == FACTS
    assert told["count"] == 143


# -- indexes -----------------------------------------------------------------------------------------------------------


def test_an_index_of_a_billion_samples_is_not_held(tmp_path: Path) -> None:
    """A sparse file: all places hold sample 0, which is enough to be read."""
    count = 10**9
    with (tmp_path / "order.bin").open("wb") as file:
        file.truncate(8 * count)
    code = next(code for code, dtype in CODES.items() if dtype == np.dtype("<u8"))
    head = HEAD.pack(MAGIC, 1, code, 1, 1) + np.array(count, "<i4").tobytes() + np.zeros(2, "<i8").tobytes()
    (tmp_path / "order.idx").write_bytes(head)
    paths = {"index_to_sample_path": str(tmp_path / "order")}
    section = {"curriculum_metrics": {"m": metric(paths, [1, 50, 100], [1, 2], "percentile")}}
    tracemalloc.start()
    stream, place = make_stream(section, count, 0, warns=False), Place()
    for _ in range(3):
        batch, place = stream.after(place, 1024)
        assert stream.samples(batch, 0, 1024) == [0] * 1024
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [cluster.size for cluster in place.clusters] == [10**7, 49 * 10**7, 50 * 10**7]
    assert peak < 20 << 20


def test_values_admit_what_is_not_above_them(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", [5, 3, 5, 9, 3, 3])
    files = [MMapIndexedDataset(paths[key]) for key in ("index_to_sample_path", "index_to_metric_path")]
    index = DifficultyIndex(files[0], files[1], 6)
    assert [index.admitted_by_value(value) for value in (0, 2, 3, 4, 5, 8, 9, 100)] == [0, 0, 3, 3, 5, 5, 6, 6]
    assert [index.admitted_by_percentile(part, 4) for part in range(6)] == [0, 1, 2, 3, 6, 6]
    assert np.concatenate(list(index.read(0, 6))).tolist() == [1, 4, 5, 0, 2, 3]
    assert index.take(np.array([5, 0])).tolist() == [3, 1]


def refused(section: dict[str, Any], samples: int = 6) -> str:
    with pytest.raises(ConfigError) as told:
        make_stream(section, samples, 0, warns=False)
    return str(told.value)


def test_messages_name_the_key_and_the_file(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", [5, 3, 5, 9, 3, 3])
    where = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.m"
    for key in paths:
        told = refused({"curriculum_metrics": {"m": metric(paths | {key: str(tmp_path / "none")}, [3, 9], [1])}})
        assert told.startswith(f"{where}.{key}: {tmp_path}/none.idx cannot be read: No such file")
        told = refused({"curriculum_metrics": {"m": metric({**paths, key: None}, [3, 9], [1])}})
        assert told.startswith(f"{where}.{key}: needed")
    told = refused({"curriculum_metrics": {"m": metric(paths, [3, 9], [1])}}, samples=7)
    assert re.search(r"m: .*m_index_to_sample has 6 samples, and the data set 7; analyze", told)
    merged = write_rows(tmp_path / "m_index_to_sample_percentile_merged", [[1, 4, 5], [0, 2, 3]])
    wrong = metric(paths | {"index_to_sample_path": merged}, [3, 9], [1])
    assert "3 values in 3 rows" in refused({"curriculum_metrics": {"m": wrong}})
    assert "2 rows" in refused({"curriculum_metrics": {"m": wrong}})
    right = metric(paths | {"index_to_sample_path": merged}, [3, 9], [1], "percentile")
    make_stream({"curriculum_metrics": {"m": right}}, 6, 0, warns=False)
    both = {name: metric(paths, [3, 9], [1]) for name in "mn"}
    assert "data_cluster_path: needed" in refused({"curriculum_metrics": both})
    (tmp_path / "file").touch()
    told = refused({"curriculum_metrics": both, "data_cluster_path": str(tmp_path / "file")})
    assert re.search(r"data_cluster_path: cannot write into", told)
    assert "difficulty_type is None" in refused({"curriculum_metrics": {"m": metric(paths, [3, 9], [1], None)}})  # type: ignore[arg-type]


def test_numbers_that_are_no_samples_are_found_when_they_are_read(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", [5, 3, 5])
    write_rows(tmp_path / "m_index_to_sample", [[1], [0, 3]])
    stream = make_stream({"curriculum_metrics": {"m": metric(paths, [3, 5], [1])}}, 3, 0, warns=False)
    batch, place = stream.after(Place(), 4)
    assert stream.samples(batch, 0, 4) == [1] * 4
    batch, _ = stream.after(place, 40)
    with pytest.raises(IndexFileError, match=r"m_index_to_sample names sample 3 of a data set of 3"):
        stream.samples(batch, 0, 40)
