"""One file or several, direct or through writers: the same tensors, and for one number of files the same bytes."""

import h5py
import numpy as np
import pytest
import torch

from mpispeed.ckpt.format import schema, tag_files
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions, save
from mpispeed.ckpt.write.two_phase import streams_of
from mpispeed.native import block_io
from tests.unit.ckpt.sample import cut, outcomes, params_of, save_by, tensors_of
from tests.unit.ckpt.test_deferred import put_off
from tests.zoo import has_same_bits


def contents(path):
    """Bytes of all files with tensors by name."""
    files = [path / schema.MODEL_FILE, *sorted((path / schema.DATA_FOLDER).glob("*"))]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def check(folder, tensors):
    with open_checkpoint(folder) as checkpoint:
        for key, value in tensors.items():
            assert has_same_bits(checkpoint.read_whole(*key), value), key


@pytest.mark.parametrize("files", [1, 3])
def test_bytes_depend_on_the_number_of_files_only(tmp_path, files):
    tensors, seen = tensors_of(), []
    for size in (1, 2, 5):
        for writing in ("direct", "aggregated"):
            folder = tmp_path / f"{size}-{writing}"
            options = SaveOptions(writing=writing, files=files, window_bytes=schema.BLOCK_BYTES)
            reports = save_by(size, folder, tensors=tensors, options=options, grain=7, turn=size - 1)
            assert not any(isinstance(report, Exception) for report in reports), reports
            assert [(r.files, r.is_direct) for r in reports] == [(files, writing == "direct")] * size
            check(folder, tensors)
            seen.append(contents(reports[0].path))
    assert len(seen[0]) == (1 if files == 1 else 4)
    assert all(one == seen[0] for one in seen)


def test_deferred_pieces_through_small_windows(tmp_path):
    tensors = tensors_of(seed=5)
    expected = save_by(1, tmp_path / "a", tensors=tensors, options=SaveOptions(files=2))[0].path

    def work(comm):
        pieces = put_off(cut(tensors, comm.rank, comm.size, grain=3), 100_000)
        options = SaveOptions(files=2, writing="aggregated", window_bytes=schema.BLOCK_BYTES)
        return save(comm, tmp_path / "b", "step7", params=params_of(tensors), tensors=pieces, options=options,
                    state={"engine": {"global_steps": 7}})  # fmt: skip

    reports = outcomes(4, work)
    assert contents(reports[0].path) == contents(expected)


def test_whole_parameters_are_dealt_and_no_file_is_empty():
    for files in (1, 2, 3, 4, 9):
        tensors = [
            LogicalTensor(name, slot, (size,), torch.float32)
            for name, size in (("a", 10), ("b", 100_000), ("c", 3), ("d", 3), ("e", 0))
            for slot in ("master", "exp_avg")
        ]
        order = tag_files._canonical(tensors)
        which = tag_files._deal(tensors, order, files)
        assert set(which.tolist()) == set(range(min(files, 4)))
        for first, second in zip(which[::2], which[1::2], strict=True):
            assert first == second
        assert sorted(which[:8].tolist()) == which[:8].tolist()


def test_more_files_than_parameters(tmp_path):
    tensors = {("w", "master"): torch.arange(6.0), ("b", "buffer"): torch.ones(3, dtype=torch.bool)}
    reports = save_by(2, tmp_path, tensors=tensors, options=SaveOptions(files=64, writing="aggregated"))
    assert reports[0].files == 2
    check(tmp_path, tensors)


def test_plain_h5py_follows_the_links(tmp_path):
    tensors = tensors_of()
    path = save_by(2, tmp_path, tensors=tensors, options=SaveOptions(files=3))[0].path
    with h5py.File(path / schema.MODEL_FILE) as file:
        got = file["params/layers.0.weight/exp_avg"][()]
        assert np.array_equal(got, tensors["layers.0.weight", "exp_avg"].numpy())
        assert file["buffers/counter"][()] == 12
        assert file["params/layers.0.weight"].attrs["shape"].tolist() == [33, 65]


@pytest.mark.parametrize("where", ["../elsewhere.h5", "/etc/passwd", "data/d00001.h5", "model.h5"])
def test_links_lead_to_their_own_place_only(tmp_path, where):
    path = save_by(1, tmp_path, options=SaveOptions(files=3))[0].path
    with h5py.File(path / schema.MODEL_FILE, "r+") as file:
        target = file["params/scale"].get("master", getlink=True)
        assert target.filename == "data/d00002.h5"
        del file["params/scale/master"]
        file["params/scale/master"] = h5py.ExternalLink(where, "/params/layers.0.weight/master")
    from mpispeed.ckpt.format import index

    with pytest.raises(CorruptCheckpoint, match=r"model\.h5.*params/scale/master is a link to"):
        index.read_index(path, [f"data/d0000{n}.h5" for n in range(3)])


def test_data_files_of_another_tag_are_noticed(tmp_path):
    options = SaveOptions(files=2)
    first = save_by(1, tmp_path, "one", options=options)[0].path
    second = save_by(1, tmp_path, "two", options=options)[0].path
    (first / "data/d00001.h5").write_bytes((second / "data/d00001.h5").read_bytes())
    with pytest.raises(CorruptCheckpoint, match=r"d00001\.h5 is damaged"):
        open_checkpoint(tmp_path, "one")
    (first / "data/d00001.h5").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"d00001\.h5 is missing"):
        open_checkpoint(tmp_path, "one")


@pytest.mark.parametrize("problem", ["reading", "writing"])
def test_a_failing_rank_in_a_window_fails_all(tmp_path, problem, monkeypatch):
    save_by(1, tmp_path, "good")
    before = sorted(tmp_path.rglob("*"))
    values = torch.randn(3 << 20)

    def work(comm):
        def failing(first, last):
            if last > 400_000:
                raise OSError(5, "no such luck")
            yield values[first:last]

        start, stop = comm.rank << 20, (comm.rank + 1) << 20
        from mpispeed.ckpt.format.logical import Deferred

        own = (
            Deferred(1 << 20, torch.float32, failing) if comm.rank == 1 and problem == "reading" else values[start:stop]
        )
        options = SaveOptions(writing="aggregated", files=2, window_bytes=schema.BLOCK_BYTES, check_free_space=False)
        tensors = [
            LogicalTensor("w", "master", (3 << 20,), torch.float32, [Piece(start, own)]),
            LogicalTensor("x", "master", (5,), torch.float32, [Piece(0, values[:5])] if comm.rank == 0 else []),
        ]
        return save(comm, tmp_path, "bad", params=[ParamInfo("w", (3 << 20,)), ParamInfo("x", (5,))], tensors=tensors,
                    options=options)  # fmt: skip

    if problem == "writing":
        block_io.inject("write", nth=5, errno=28)
    results = outcomes(3, work)
    texts = {str(result) for result in results}
    assert len(texts) == 1, texts
    assert ("no such luck" if problem == "reading" else "No space left") in texts.pop()
    assert sorted(tmp_path.rglob("*")) == before


def test_streams_cut_windows_of_every_length():
    sizes = [(5, torch.bool), (7, torch.float32), (3, torch.bfloat16)]
    tensors = [LogicalTensor(f"t{i}", "master", (n,), dtype) for i, (n, dtype) in enumerate(sizes)]
    places = tag_files.Places(("f",), np.zeros(3, np.int64), np.array([100, 0, 500]), np.zeros(3, np.int64))
    ranges = [np.array([[0, 0, 2, 0, 1], [1, 0, 7, 0, 1]]), np.array([[0, 2, 5, 0, 1], [2, 0, 3, 0, 1]])]
    (stream,) = streams_of(tensors, places, ranges)
    assert stream.tensors.tolist() == [1, 0, 2]
    assert stream.begins.tolist() == [0, 28, 33, 39]
    for length in range(1, 41):
        covered = []
        for start in range(0, 39, length):
            rows = stream.window(start, min(start + length, 39))
            covered += [(a, b, rank) for a, b, rank in rows.tolist()]
        assert [b for _, b, _ in covered][:-1] == [a for a, _, _ in covered][1:]
        owners = [rank for a, b, rank in covered for _ in range(a, b)]
        assert owners == [0] * 28 + [0] * 2 + [1] * 3 + [1] * 6
