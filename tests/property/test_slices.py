"""Slices of any shape, kind and size cover their tensor, and come back when they were saved."""

import itertools
import math
import tempfile

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.even_split import share
from mpispeed.ckpt.format import logical
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.slices import WHOLE_KINDS, TensorSlice, gather_pieces, read_slice
from mpispeed.ckpt.write.save import SaveOptions, save
from mpispeed.mesh import sim


@st.composite
def infos(draw, name="w"):
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    kind = draw(st.sampled_from([*WHOLE_KINDS, "column", "row", "sub", "vocab"]))
    if kind in WHOLE_KINDS:
        return ParamInfo(name, tuple(shape), tp_kind=kind)
    shape = shape or [draw(st.integers(0, 6))]
    dim = 0 if kind == "vocab" else draw(st.integers(0, len(shape) - 1))
    parts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)) if kind == "sub" else ()
    shape[dim] = sum(parts) if kind == "sub" else draw(st.integers(0, 11))
    vocab = shape[0] if kind == "vocab" else -1
    grains = () if kind == "vocab" or draw(st.booleans()) else [draw(st.integers(1, 4)) for _ in parts or (0,)]
    cut = {"tp_kind": kind, "tp_dim": dim, "tp_sub_sizes": tuple(parts), "tp_grains": tuple(grains)}
    return ParamInfo(name, tuple(shape), vocab_size=vocab, **cut)


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 9))
def test_shares_are_whole_grains_in_order(length, size, grain):
    shares = [share(length, rank, size, grain) for rank in range(size)]
    assert [start for start, _ in shares] + [length] == [0, *(stop for _, stop in shares)]
    counts = [stop - start for start, stop in shares]
    assert all(stop % grain == 0 for _, stop in shares if stop < length)
    grains = [-(-count // grain) for count in counts]
    assert grains == [len(part) for part in np.array_split(np.empty(-(-length // grain)), size)]


@given(infos(), st.integers(1, 5), st.data())
def test_slices_cover_the_tensor_once_and_cuts_of_them_concatenate(info, size, data):
    seen = np.zeros(info.numel, np.int64)
    for rank in range(size):
        cut = TensorSlice(info, rank, size)
        whole = np.full(cut.numel, -1)
        for local, first, count in cut.runs(0, cut.numel):
            whole[local : local + count] = np.arange(first, first + count)
        assert (whole[: cut.stored] >= 0).all()
        assert (whole[cut.stored :] == -1).all()
        assert (np.diff(whole[: cut.stored]) > 0).all()
        seen[whole[: cut.stored]] += 1
        ends = sorted({0, cut.numel, *data.draw(st.lists(st.integers(0, cut.numel), max_size=4))})
        parts = np.full(cut.numel, -1)
        for start, stop in itertools.pairwise(ends):
            for local, first, count in cut.runs(start, stop):
                assert start <= local < local + count <= stop
                parts[local : local + count] = np.arange(first, first + count)
        assert (parts == whole).all()
    assert (seen == (size if info.tp_kind in WHOLE_KINDS else 1)).all()


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_what_slices_save_slices_of_another_size_load(size, other, is_direct, data):
    count = data.draw(st.integers(1, 3))
    params = [data.draw(infos(f"w{i}")) for i in range(count)]
    wholes = [torch.randn(info.shape) for info in params]

    def work(world):
        tensors = []
        for info, whole in zip(params, wholes, strict=True):
            cut = TensorSlice(info, world.rank, size)
            flat, local = whole.reshape(-1), torch.zeros(cut.numel)
            for at, first, length in cut.runs(0, cut.numel):
                local[at : at + length] = flat[first : first + length]
            half = cut.numel // 2
            pieces = gather_pieces(cut, 0, local[:half]) + gather_pieces(cut, half, local[half:])
            tensors.append(LogicalTensor(info.name, "master", info.shape, torch.float32, pieces))
        options = SaveOptions(writing="direct" if is_direct else "aggregated", verify="none")
        save(world.comm, folder, "t", params=params, tensors=tensors, options=options)

    with tempfile.TemporaryDirectory() as folder:
        sim.run(size, work)
        with open_checkpoint(folder) as checkpoint:
            for info, whole in zip(params, wholes, strict=True):
                assert torch.equal(checkpoint.read_whole(info.name, "master"), whole)
                for rank in range(other):
                    cut = TensorSlice(info, rank, other)
                    start = data.draw(st.integers(0, cut.numel))
                    out, expected = torch.full((cut.numel - start,), 3.0), torch.zeros(cut.numel)
                    for at, first, length in cut.runs(0, cut.numel):
                        expected[at : at + length] = whole.reshape(-1)[first : first + length]
                    read_slice(checkpoint, info.name, "master", cut, start, out)
                    assert torch.equal(out, expected[start:])


@given(infos(), st.integers(1, 4), st.integers(0, 80), st.integers(0, 80))
def test_rows_of_pieces_are_the_elements_of_their_runs(info, size, one, two):
    """The compact table, whole and cut to a range, against the single elements."""
    low, high = sorted((one, two))
    for rank in range(size):
        cut = TensorSlice(info, rank, size)
        pieces: list[Piece] = gather_pieces(cut, 0, torch.zeros(math.prod(cut.shape)))
        table = logical.range_table(row for piece in pieces for row in piece.rows(0))
        elements = [e for piece in pieces for first, count in piece.runs() for e in range(first, first + count)]
        _, starts, stops = logical.expanded_runs(table)
        assert [e for a, b in zip(starts, stops, strict=True) for e in range(a, b)] == sorted(elements)
        _, starts, stops = logical.expanded_runs(logical.ranges_meeting(table, low, high))
        assert all(a < high and b > low for a, b in zip(starts, stops, strict=True))
        met = [e for a, b in zip(starts, stops, strict=True) for e in range(max(a, low), min(b, high))]
        assert met == [e for e in sorted(elements) if low <= e < high]
        for piece in pieces:
            assert piece.before(low) == sum(e < low for e in elements if piece.start <= e < piece.stop)
