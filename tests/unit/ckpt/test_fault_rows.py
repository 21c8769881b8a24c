"""Failures that a checkpoint has to survive or to name, by number; those that need no engine and had no test are here.

| # | fault | tests |
|---|---|---|
| 1 | ranks killed while they save | tests/jobs/test_killed_save; at every file operation: test_failed_save |
| 2 | a rank cannot write | test_failed_save, test_files, tests/mpi/ckpt |
| 3 | a file is deleted | here; test_damage |
| 4 | a file is cut, or is that of another tag | here; test_damage, test_files |
| 5 | one bit is flipped | test_flips; test_damage, test_tags |
| 6 | `latest` names nothing | here; test_tags, test_hostile_files |
| 7 | a wrong tag is asked for | here; test_tags |
| 8 | ranks pass different tags | here; test_tags, tests/mpi/engine/test_checkpoint_settings |
| 9 | another world | tests/mpi/engine/test_resume, test_restore; test_round_trip for any cut |
| 10 | odd sizes of parameters | test_round_trip, test_slices, test_layouts |
| 11 | tied, frozen, buffers | tests/mpi/engine/test_restore, test_weights; aliases: here and test_hostile_content |
| 12 | save right after load, load right after save | here by the functions; tests/mpi/engine/test_resume |
| 13 | copies that should be equal are not | test_replicas |
| 14 | a tag exists already | here; test_failed_save, test_tags, tests/jobs/test_killed_save |
| 15 | what `client_state` may hold | here; test_tree, tests/mpi/engine/test_client_objects for keys that are taken |
| 16 | folders that cannot be written, odd paths | here; test_failed_save, test_tags |
| 17 | two jobs save the same tag | here |
| 18 | another version of the format | here; test_damage, test_hostile_content |
| 19 | states in swap files | test_deferred; tests/mpi/offload |
| 20 | direct or through writers, one file or three | test_files, tests/mpi/ckpt |
| 21 | files that others have locked | here |
"""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import CorruptCheckpoint, NoCheckpoint, TagNotFound, UnsupportedValue
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.verify import verify
from mpispeed.ckpt.write.save import SaveOptions
from tests.helpers.system import CHECKOUT, with_own_mounts
from tests.unit.ckpt.attacks import SECONDS, TENSORS, limited, read_all, records, sign
from tests.unit.ckpt.sample import save_by, saved
from tests.zoo import has_same_bits

ROOT = Path(__file__).resolve().parents[3]
OTHERS = {key: value + 1 for key, value in TENSORS.items()}


def holds(folder, tensors, tag=None):
    values, *_ = read_all(folder, tag)
    return set(values) == set(tensors) and all(has_same_bits(values[key], tensors[key]) for key in tensors)


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path, tensors=TENSORS, options=SaveOptions(files=3))
    return tmp_path


@pytest.mark.parametrize("number", range(3))
def test_3_a_deleted_data_file_is_named_with_what_it_held(folder, number):
    tag = folder / "step7"
    with open_checkpoint(folder) as checkpoint:
        held = {f"{t.name}/{t.slot}" for t in checkpoint.tensors() if t.file == schema.data_file(number)}
    (tag / schema.data_file(number)).unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"d0000{number}\.h5 is missing"):
        open_checkpoint(folder)
    report = verify(tag, "step7")
    assert report.status == "corrupt"
    told = "; ".join(problem.text() for problem in report.problems)
    assert schema.data_file(number) in told
    assert any(name.removesuffix("/buffer") in told for name in held)


@pytest.mark.parametrize("what", ["cut", "emptied", "longer", "swapped", "of another save of the same size"])
@pytest.mark.parametrize("name", [schema.MODEL_FILE, schema.STATE_FILE, "data/d00001.h5"])
def test_4_a_file_that_is_not_the_one_that_was_saved(folder, name, what):
    path = folder / "step7" / name
    raw = path.read_bytes()
    if what in ("swapped", "of another save of the same size"):
        tag = "next" if what == "swapped" else "step8"
        other = saved(folder, tag, tensors=OTHERS, options=SaveOptions(files=3, save_latest=False),
                      state={"engine": {"global_steps": 8, "micro_steps": 1}})  # fmt: skip
        shutil.copy(other / name, path)
    else:
        path.write_bytes({"cut": raw[: len(raw) // 2], "emptied": b"", "longer": raw + b"\0"}[what])
    assert path.read_bytes() != raw
    with pytest.raises(CorruptCheckpoint, match=rf"{path.name} (is|does)"):
        read_all(folder)
    report = verify(folder / "step7", "step7")
    assert report.status == "corrupt"
    assert name in {problem.file for problem in report.problems}


def test_4_all_files_of_another_tag_are_that_tag(folder):
    """Nothing is mixed: the folder was renamed, and holds the whole of the other."""
    saved(folder, "next", tensors=OTHERS)
    shutil.rmtree(folder / "step7")
    shutil.copytree(folder / "next", folder / "step7")
    assert holds(folder, OTHERS, "step7")
    assert any("renamed" in note for note in verify(folder / "step7", "step7").notes)


def test_6_latest(folder):
    (folder / "latest").write_text("gone")
    with pytest.raises(TagNotFound, match=r"'gone', named by \"latest\".*step7"):
        open_checkpoint(folder)
    (folder / "latest").write_text("")
    with pytest.raises(CorruptCheckpoint, match=r"latest is damaged: it is empty.*step7"):
        open_checkpoint(folder)
    (folder / "latest").write_text(" \r\n step7 \t\r\n\n")
    assert holds(folder, TENSORS)
    (folder / "latest").unlink()
    with pytest.raises(NoCheckpoint, match=r"no file \"latest\".*step7"):
        open_checkpoint(folder)
    assert holds(folder, TENSORS, "step7")


def test_7_a_wrong_tag_is_no_file_and_names_the_nearest(folder):
    saved(folder, "another", tensors=TENSORS)
    with pytest.raises(FileNotFoundError, match=r"'step77', asked for.*nearest first: step7, another"):
        open_checkpoint(folder, "step77")
    with pytest.raises(FileNotFoundError, match="7"):
        open_checkpoint(folder, 7)


def test_8_ranks_that_save_under_different_tags_use_that_of_rank_0(tmp_path):
    from mpispeed.ckpt.write.save import save
    from tests.unit.ckpt.sample import cut, outcomes, params_of

    def work(comm):
        pieces = cut(TENSORS, comm.rank, comm.size)
        tag = tags.check_same_tag(comm, f"t{comm.rank}", "warn")
        return save(comm, tmp_path, tag, params=params_of(TENSORS), tensors=pieces)

    reports = outcomes(3, work)
    assert {report.tag for report in reports} == {"t0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t0"]
    assert holds(tmp_path, TENSORS)


def test_12_load_after_save_and_save_after_load(tmp_path):
    values, writing = TENSORS, ("direct", "aggregated")
    for number in range(6):
        options = SaveOptions(files=1 + number % 3, writing=writing[number % 2])
        for report in save_by(1 + number % 4, tmp_path, f"t{number}", tensors=values, options=options):
            assert report.tag == f"t{number}"
        values, *_ = read_all(tmp_path)
    assert all(has_same_bits(values[key], TENSORS[key]) for key in TENSORS)


def test_12_an_open_checkpoint_outlives_its_overwriting_or_says_so(folder):
    for first in (("a.weight", "master"), None):
        saved(folder, tensors=TENSORS, options=SaveOptions(files=3, overwrite=True))
        with open_checkpoint(folder) as checkpoint:
            if first:
                checkpoint.read_whole(*first)
            saved(folder, tensors=OTHERS, options=SaveOptions(files=3, overwrite=True))
            for key, value in TENSORS.items():
                try:
                    assert has_same_bits(checkpoint.read_whole(*key), value)
                except CheckpointError as failure:
                    assert "step7" in str(failure)
    assert holds(folder, OTHERS)


@pytest.mark.parametrize("writing", ["direct", "aggregated"])
def test_14_a_tag_that_exists(folder, writing):
    for failure in save_by(2, folder, tensors=OTHERS, options=SaveOptions(writing=writing)):
        assert isinstance(failure, CheckpointError)
        assert "'step7' exists already" in str(failure)
        assert "overwrite=True" in str(failure)
    assert holds(folder, TENSORS)
    # from three files to one: nothing of the old one is left
    saved(folder, tensors=OTHERS, size=2, options=SaveOptions(writing=writing, overwrite=True))
    assert holds(folder, OTHERS)
    assert not (folder / "step7" / "data").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step7"]
    (folder / "file").write_text("x")
    for options in (SaveOptions(), SaveOptions(overwrite=True)):
        saved(folder, "fine", tensors=TENSORS, options=SaveOptions(overwrite=True))
        (failure,) = save_by(1, folder / "file", tensors=TENSORS, options=options)
        assert isinstance(failure, CheckpointError)


class Mine:
    """Of the caller's own."""


class MyInt(int):
    """Would come back as another type."""


KINDS = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "bfloat16": torch.arange(3).bfloat16(),
    "view": torch.arange(10)[::3],
    "empty tensor": torch.empty(0, 4),
    "nested": {"a": {"b": [1, (2.5, None), {"c": b"x\0y"}]}, 1: "one", None: 0, (1, "t"): {3}},
    "numpy": np.arange(6, dtype=np.int16).reshape(3, 2),
    "numpy scalar": np.float32(0.1),
    "none": None,
    "set": {1, 2, "three"},
    "frozenset": frozenset({1.5}),
    "large": 2**200,
    "not finite": [float("inf"), -float("inf")],
    "text": "ö\0ü/%\n",
    "complex": 1 + 2j,
    "size": torch.Size([1, 2]),
    "long": list(range(5000)),
    "empty": [{}, [], (), set(), "", b""],
}


def test_15_what_client_state_may_hold(tmp_path):
    saved(tmp_path, tensors=TENSORS, size=2, state={"client": KINDS})
    with open_checkpoint(tmp_path) as checkpoint:
        back = checkpoint.state()["client"]
    assert list(back) == list(KINDS)
    for key, value in KINDS.items():
        assert type(back[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert has_same_bits(back[key], value), key
        elif isinstance(value, np.ndarray):
            assert back[key].dtype == value.dtype
            assert np.array_equal(back[key], value), key
        else:
            assert back[key] == value, key


@pytest.mark.parametrize(
    "value",
    [Mine(), Mine, MyInt(3), lambda: 0, object(), np.array([Mine()]), np.array(["a"]), np.datetime64("2020-01-01"),
     torch.device("cpu"), Path("\ud800"), range(3), iter([]), Exception("x"), "\ud800", bytearray(b"x"),
     torch.arange(3).to_sparse(), torch.empty(2, device="meta")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_15_what_it_may_not(tmp_path, value):
    for failure in save_by(2, tmp_path / "new", tensors=TENSORS, state={"client": {"list": [1, {"own": value}]}}):
        assert isinstance(failure, UnsupportedValue)
        assert isinstance(failure, TypeError)
        assert "state['client']['list'][1]['own']" in str(failure)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("size", [1, 2])
def test_16_folders_that_cannot_be(tmp_path, size):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "away")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "file/below", "nowhere/below", "loop", "x" * 300, "nul\0"):
        for failure in save_by(size, tmp_path / name, tensors=TENSORS):
            assert isinstance(failure, CheckpointError), name
            assert "starting the checkpoint" in str(failure)
            if name.startswith(("file", "loop")):
                assert str(tmp_path / name) in str(failure)
    with pytest.raises(NoCheckpoint):
        open_checkpoint(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "nowhere"]


@pytest.mark.parametrize(
    "name", ["with space", " around ", "ünïcödé \N{SNOWMAN}", "a'b\"c$HOME", "-rf", "new\nline", "%20"]
)
def test_16_odd_paths(tmp_path, name):
    folder = tmp_path / name / "deep er"
    saved(folder, "tag mit ö", tensors=TENSORS, size=2, options=SaveOptions(files=2, writing="aggregated"))
    assert holds(folder, TENSORS)
    assert verify(folder / "tag mit ö", "tag mit ö").status == "ok"
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    assert holds(link, TENSORS)
    saved(link, "second", tensors=OTHERS, size=2)
    assert holds(folder, OTHERS)


def test_16_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("here", tensors=TENSORS, size=2)
    assert holds("here", TENSORS)
    assert (tmp_path / "here" / "step7").is_dir()


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77
exec "$PYTHON" -c '
import sys
from pathlib import Path
from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import tags
from tests.unit.ckpt.attacks import TENSORS, read_all
from tests.unit.ckpt.sample import save_by
folder = Path(sys.argv[1])
for place in (folder, folder / "below"):
    texts = set()
    for failure in save_by(2, place, "next", tensors=TENSORS):
        assert isinstance(failure, CheckpointError), failure
        texts.add(str(failure))
    (text,) = texts
    assert "Read-only file system" in text and str(place) in text, text
assert len(read_all(folder)[0]) == len(TENSORS)
(entry,) = tags.list_tags(folder)
assert entry.status == "ok"
print("done")
' "$1"
"""


def test_16_a_read_only_file_system(folder):
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([CHECKOUT, *filter(None, sys.path)])}
    done = subprocess.run(
        [*with_own_mounts(), "sh", "-c", READ_ONLY, "sh", str(folder)],
        capture_output=True, text=True, env=env, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("is_over", [False, True])
def test_17_two_jobs_that_save_the_same_tag(tmp_path, is_over):
    """Both at once, again and again: one wins, or with overwriting one after the other; nothing is mixed."""
    wins = []
    for number in range(6):
        tag, results = ("same" if is_over else f"same{number}"), {}
        start = threading.Barrier(2)

        def job(name, tensors, tag=tag, results=results, start=start):
            start.wait()
            results[name] = save_by(2, tmp_path, tag, tensors=tensors, options=SaveOptions(overwrite=is_over))

        jobs = [threading.Thread(target=job, args=row) for row in (("one", TENSORS), ("two", OTHERS))]
        for thread in jobs:
            thread.start()
        for thread in jobs:
            thread.join()
        saved_by = []
        for name, reports in results.items():
            failures = [report for report in reports if isinstance(report, Exception)]
            assert len(failures) in (0, 2), reports
            assert all(isinstance(failure, CheckpointError) and tag in str(failure) for failure in failures), failures
            saved_by += [name] if not failures else []
        contents = {"one": TENSORS, "two": OTHERS}
        found = [name for name in contents if holds(tmp_path, contents[name], tag)]
        assert len(found) == 1
        assert saved_by, results
        assert found[0] in saved_by
        if not is_over:
            assert len(saved_by) == 1
        wins.append(len(saved_by))
        assert tags.read_latest(tmp_path) == tag
        assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
    assert verify(tmp_path / tag, tag).status == "ok"


@pytest.mark.parametrize("name", ["manifest", "model", "data"])
def test_18_versions(folder, caplog, name):
    from tests.unit.ckpt.attacks import sign_files

    def write(major, minor):
        if name == "manifest":
            sign(folder / "step7", version=[major, minor])
            return
        path = folder / "step7" / (schema.MODEL_FILE if name == "model" else "data/d00001.h5")
        with h5py.File(path, "r+") as file:
            del file.attrs["version"]
            file.attrs["version"] = np.array([major, minor], np.int64)
        sign_files(folder / "step7")

    for major, what in (
        (3, r"3\.0, this library reads up to {}\.{}; install a newer".format(*schema.VERSION)),
        (1, r"1\.0, .* older mpispeed"),
    ):
        write(major, 0)
        with pytest.raises(CheckpointError, match=f"format {what}") as caught:
            open_checkpoint(folder)
        assert not isinstance(caught.value, CorruptCheckpoint)
    with caplog.at_level(logging.WARNING):
        write(2, 7)
        assert holds(folder, TENSORS)
    if name == "manifest":
        assert "format 2.7, newer than {}.{}".format(*schema.VERSION) in caplog.text


LOCKER = """
import fcntl, os, sys
handles = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
for handle in handles:
    fcntl.flock(handle, fcntl.LOCK_EX)
    fcntl.lockf(handle, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_21_files_that_another_process_has_locked(folder):
    """Neither reading nor saving takes a lock or waits for one, so file systems without locks need no setting."""
    tag = folder / "step7"
    paths = [str(tag / name) for name in (*records(tag), schema.MANIFEST_FILE)] + [str(folder / "latest")]
    other = subprocess.Popen(
        [sys.executable, "-c", LOCKER, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "locked\n"
        handle = os.open(paths[0], os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(handle)
        with pytest.raises(OSError, match="lock"):
            h5py.File(tag / schema.MODEL_FILE)
        with limited(SECONDS):
            assert holds(folder, TENSORS)
            assert [entry.status for entry in tags.list_tags(folder)] == ["ok"]
            assert verify(tag, "step7").status == "ok"
            saved(folder, tensors=OTHERS, options=SaveOptions(overwrite=True))
            assert holds(folder, OTHERS)
    finally:
        other.communicate()


def test_dicts_of_other_kinds_are_dicts(tmp_path):
    saved(tmp_path, tensors=TENSORS, state={"client": OrderedDict(b=1, a=2)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.state()["client"].items()) == [("b", 1), ("a", 2)]
