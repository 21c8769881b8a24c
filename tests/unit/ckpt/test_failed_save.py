"""A save that cannot finish raises on every rank, leaves nothing behind and harms nothing."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format.errors import SaveFailed, UnsupportedValue
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions, save
from tests.helpers.system import CHECKOUT
from tests.unit.ckpt.sample import outcomes, save_by, saved, tensors_of
from tests.zoo import has_same_bits

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def file_size_limit(limit_bytes):
    """The system refuses to write beyond this offset of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_same_failure(results, match, kind=SaveFailed):
    assert all(isinstance(result, kind) for result in results), results
    assert all(isinstance(result, CheckpointError) for result in results)
    assert len({str(result) for result in results}) == 1, results
    assert match in str(results[0])
    assert all(result.is_collective for result in results)


def assert_holds(folder, tensors, tag="step7"):
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tag == tag
        for (name, slot), value in tensors.items():
            assert has_same_bits(checkpoint.read_whole(name, slot), value)


def test_a_limit_on_file_size(tmp_path):
    saved(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for limit in (100, 1 << 20, 6 << 20):
        with file_size_limit(limit):
            results = save_by(3, tmp_path, "next", tensors=tensors_of(seed=1))
        assert_same_failure(results, "")
        assert sorted(tmp_path.rglob("*")) == before
    assert_holds(tmp_path, tensors_of())
    saved(tmp_path, "next", tensors=tensors_of(seed=1))
    assert_holds(tmp_path, tensors_of(seed=1), "next")


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    assert_same_failure(save_by(2, tmp_path / "file"), "File exists")
    assert_same_failure(save_by(2, tmp_path / "file" / "below"), "Not a directory")
    assert_same_failure(save_by(2, "/proc/mpispeed"), "/proc/mpispeed")


def test_too_little_space_is_found_before_anything_is_written(tmp_path):
    numel = shutil.disk_usage(tmp_path).free // 4 + 1
    # a mapped file of holes: that many elements, but neither memory nor disk
    values = torch.from_file(str(tmp_path / "holes"), shared=True, size=numel)

    def work(comm):
        tensors = [LogicalTensor("w", "master", (numel,), torch.float32, [Piece(0, values)])]
        return save(comm, tmp_path / "out", "t", params=[ParamInfo("w", (numel,))], tensors=tensors)

    assert_same_failure(outcomes(1, work), "free, the checkpoint needs about")
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_tags_are_refused_or_replaced(tmp_path):
    saved(tmp_path)
    assert_same_failure(save_by(2, tmp_path, tensors=tensors_of(seed=1)), "overwrite=True")
    assert_holds(tmp_path, tensors_of())
    saved(tmp_path, tensors=tensors_of(seed=1), size=2, options=SaveOptions(overwrite=True))
    assert_holds(tmp_path, tensors_of(seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step7"]


def test_pieces_of_ranks_that_do_not_fit(tmp_path):
    values = torch.randn(20)

    def work(ranges):
        def one(comm):
            start, stop = ranges[comm.rank]
            tensors = [LogicalTensor("w", "master", (4, 5), torch.float32, [Piece(start, values[start:stop])])]
            return save(comm, tmp_path, "t", params=[ParamInfo("w", (4, 5))], tensors=tensors)

        return outcomes(2, one)

    assert_same_failure(work([(0, 12), (10, 20)]), "w/master overlaps: the elements [10, 12)")
    assert_same_failure(work([(0, 9), (10, 20)]), "w/master has a hole: no rank passed the elements [9, 10)")
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_describe_different_checkpoints(tmp_path):
    def work(comm):
        shape = (4, 5) if comm.rank != 1 else (5, 4)
        return save(comm, tmp_path, "t", params=[ParamInfo("w", shape)], tensors=[])

    results = outcomes(3, work)
    assert_same_failure(results, "describe different checkpoints")
    assert "(5, 4)" in str(results[0])
    assert "(4, 5)" in str(results[0])


def test_state_without_a_place_in_the_format_is_refused_before_any_write(tmp_path):
    results = save_by(2, tmp_path, state={"client": {"model": torch.nn.Linear(1, 1)}})
    assert_same_failure(results, "state['client']['model'] is a torch.nn.modules.linear.Linear", UnsupportedValue)
    assert all(isinstance(result, TypeError) for result in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"state": {"rng": 1}}, "belongs to the generators"),
        ({"rng": {"cpu": torch.zeros(3)}}, "uint8"),
        ({"layout": {"x": object()}}, "not JSON serializable"),
        ({"aliases": {"a": "nothing"}}, "'nothing'"),
        ({"aliases": {"scale": "embed.weight"}}, "the alias must not"),
    ],
)
def test_arguments_without_a_place_in_the_format(tmp_path, more, message):
    assert_same_failure(save_by(2, tmp_path, **more), message)
    assert list(tmp_path.iterdir()) == []


def test_a_save_killed_at_any_point_harms_nothing(tmp_path):
    script = Path(__file__).with_name("killed_save.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([CHECKOUT, *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # fewer kills would mean that the script no longer reaches into the save
    assert int(done.stdout.split()[-1]) >= 20
