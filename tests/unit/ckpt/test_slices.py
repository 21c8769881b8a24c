"""Tensor-parallel slices against slices cut with torch; pieces that are runs; finely cut tensors."""

import itertools
import math

import numpy as np
import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import logical, schema
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, ParamInfo, Pattern, Piece
from mpispeed.ckpt.format.tag_files import Places
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.slices import TensorSlice, gather_pieces, place_slice, read_slice, take_slice
from mpispeed.ckpt.write.save import SaveOptions, save
from mpispeed.ckpt.write.two_phase import deal
from tests.unit.ckpt.sample import outcomes
from tests.zoo import has_same_bits

CASES = [
    ParamInfo("none", (3, 4)),
    ParamInfo("replicated", (7,), tp_kind="replicated"),
    ParamInfo("averaged", (2, 3), tp_kind="averaged"),
    ParamInfo("scalar", ()),
    ParamInfo("empty", (0, 3), tp_kind="column"),
    ParamInfo("empty row", (5, 0), tp_kind="row"),
    ParamInfo("column", (8, 3), tp_kind="column", tp_dim=0),
    ParamInfo("uneven column", (7, 3), tp_kind="column"),
    ParamInfo("fewer rows than ranks", (2, 3), tp_kind="column"),
    ParamInfo("bias", (9,), tp_kind="column"),
    ParamInfo("row", (5, 8), tp_kind="row"),
    ParamInfo("uneven row", (5, 9), tp_kind="row", tp_dim=1),
    ParamInfo("one column", (6, 1), tp_kind="row"),
    ParamInfo("convolution", (4, 6, 3, 2), tp_kind="row"),
    ParamInfo("last of four", (2, 3, 2, 5), tp_kind="column", tp_dim=3),
    ParamInfo("qkv", (24, 5), tp_kind="sub", tp_dim=0, tp_sub_sizes=(16, 4, 4)),
    ParamInfo("qkv as columns", (5, 24), tp_kind="sub", tp_dim=1, tp_sub_sizes=(16, 4, 4)),
    ParamInfo("odd parts as columns", (4, 11), tp_kind="sub", tp_dim=1, tp_sub_sizes=(7, 1, 0, 3)),
    ParamInfo("heads", (12, 5), tp_kind="column", tp_grains=(4,)),
    ParamInfo("heads with a rest", (14, 2), tp_kind="column", tp_grains=(4,)),
    ParamInfo("row of heads", (3, 12), tp_kind="row", tp_grains=(4,)),
    ParamInfo("grouped queries", (24, 3), tp_kind="sub", tp_dim=0, tp_sub_sizes=(16, 4, 4), tp_grains=(8, 2, 2)),
    ParamInfo(
        "grouped queries as columns", (3, 24), tp_kind="sub", tp_dim=1, tp_sub_sizes=(16, 4, 4), tp_grains=(8, 2, 2)
    ),
    ParamInfo("gate and up", (12, 2), tp_kind="sub", tp_sub_sizes=(6, 6)),
    ParamInfo("vocab", (13, 3), tp_kind="vocab", vocab_size=13),
    ParamInfo("tiny vocab", (1, 3), tp_kind="vocab", vocab_size=1),
]
SIZES = (1, 2, 3, 4)


def whole_of(info, dtype=torch.float32):
    return torch.randn(info.shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def cut_by_torch(info, whole, rank, size):
    """What a rank holds, by way of the tensor itself."""
    if info.tp_kind in ("none", "replicated", "averaged"):
        return whole
    dim = info.tp_dim if info.tp_dim >= 0 else {"row": 1}.get(info.tp_kind, 0)
    if info.tp_kind == "vocab":
        rows = -(-whole.shape[0] // size)
        padded = torch.zeros(rows * size, *whole.shape[1:], dtype=whole.dtype)
        padded[: whole.shape[0]] = whole
        return padded[rank * rows : (rank + 1) * rows]
    parts = whole.split(info.tp_sub_sizes, dim) if info.tp_kind == "sub" else [whole]
    grains = info.tp_grains or (1,) * len(parts)
    return torch.cat([of_grains(part, grain, dim, rank, size) for part, grain in zip(parts, grains, strict=True)], dim)


def of_grains(part, grain, dim, rank, size):
    """The grains that `numpy.array_split` gives to a rank."""
    chosen = np.array_split(np.arange(-(-part.shape[dim] // grain)), size)[rank].tolist()
    start, stop = (chosen[0] * grain, (chosen[-1] + 1) * grain) if chosen else (0, 0)
    return part.narrow(dim, start, min(stop, part.shape[dim]) - start).contiguous()


@pytest.mark.parametrize("size", SIZES)
def test_slices_in_their_places_are_the_whole(size):
    for info in CASES:
        whole, found = whole_of(info), torch.full(info.shape, math.nan)
        for rank in range(size):
            cut = TensorSlice(info, rank, size)
            place_slice(cut, cut_by_torch(info, whole, rank, size).reshape(-1), found)
        assert torch.equal(found, whole), info.name


def save_slices(folder, infos, size, dtype=torch.float32, *, cut=lambda local, rank: [(0, local)], **options):
    """Save by `size` tensor-parallel ranks; `cut` gives the (start, values) that a rank passes of its slice."""

    def work(comm):
        tensors = []
        for info in infos:
            tp = TensorSlice(info, comm.rank, size)
            local = cut_by_torch(info, whole_of(info, dtype), comm.rank, size).reshape(-1)
            pieces = [p for start, values in cut(local, comm.rank) for p in gather_pieces(tp, start, values)]
            tensors.append(LogicalTensor(info.name, "master", info.shape, dtype, pieces))
        return save(comm, folder, "t", params=infos, tensors=tensors, options=SaveOptions(**options))

    for result in outcomes(size, work):
        if isinstance(result, Exception):
            raise result
    return folder / "t" / "model.h5"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_slices_of_a_part_of_a_buffer_leave_the_rest_of_it(size):
    """As in a message in which one whole tensor stands behind others."""
    for info in CASES:
        numel, ahead = math.prod(info.shape), 7
        whole = torch.arange(1.0, numel + 1).view(info.shape)
        message, found = torch.zeros(ahead + numel + 3), torch.zeros(ahead + numel + 3)
        message[ahead : ahead + numel] = whole.view(-1)
        for rank in range(size):
            cut = TensorSlice(info, rank, size)
            expected = cut_by_torch(info, whole, rank, size).reshape(-1)
            values = torch.full((cut.numel,), -1.0)
            take_slice(cut, message[ahead : ahead + numel], values)
            assert torch.equal(values[: expected.numel()], expected), info
            place_slice(cut, expected, found[ahead : ahead + numel])
        assert torch.equal(found, message), info


@pytest.mark.parametrize("info", CASES, ids=lambda info: info.name)
def test_runs_lead_to_the_elements_that_torch_cuts(info):
    flat = whole_of(info).reshape(-1)
    for size in SIZES:
        for rank in range(size):
            cut, expected = TensorSlice(info, rank, size), cut_by_torch(info, whole_of(info), rank, size)
            assert cut.shape == tuple(expected.shape)
            for start in range(cut.numel + 1):
                for stop in {start, (start + cut.numel) // 2, cut.numel}:
                    found, end = torch.zeros(stop - start), start
                    ends = set()
                    for local, first, count in cut.runs(start, stop):
                        assert count > 0
                        assert local == end
                        assert first not in ends  # it would have been one run
                        found[local - start :][:count] = flat[first : first + count]
                        end = local + count
                        ends.add(first + count)
                    assert end == max(start, min(stop, cut.stored))
                    assert torch.equal(found, expected.reshape(-1)[start:stop])


def test_a_whole_may_be_a_part_of_a_buffer():
    """Muon's results are one behind the other in a message; slices of columns are read by strides."""
    info = ParamInfo("w", (4, 6), torch.float32, tp_kind="row", tp_dim=1)
    buffer = torch.arange(60.0)
    whole = buffer[30:54]
    for rank in range(2):
        cut = TensorSlice(info, rank, 2)
        part = torch.empty(cut.numel)
        take_slice(cut, whole, part)
        assert torch.equal(part.view(4, 3), whole.view(4, 6)[:, 3 * rank : 3 * rank + 3])
        place_slice(cut, -part, whole)
    assert torch.equal(buffer, torch.cat([torch.arange(30.0), -torch.arange(30.0, 54.0), torch.arange(54.0, 60.0)]))


def test_a_large_slice_is_few_blocks():
    info = ParamInfo("w", (1 << 20, 1 << 20), tp_kind="row")
    cut = TensorSlice(info, 3, 8)
    assert cut.shape == (1 << 20, 1 << 17)
    first, body, last = cut.blocks(5, cut.numel - 5)
    assert first.pattern is None
    assert last.pattern is None
    assert body.pattern == Pattern(1 << 20, ((0, 1 << 17),))
    assert (body.start, body.count) == ((1 << 20) + 3 * (1 << 17), cut.numel - 2 * (1 << 17))
    assert next(cut.runs(1 << 17, cut.numel)) == (1 << 17, body.start, 1 << 17)


def test_padding_of_a_vocabulary():
    info = ParamInfo("embed", (13, 3), tp_kind="vocab", vocab_size=13)
    assert [TensorSlice(info, rank, 4).stored for rank in range(4)] == [12, 12, 12, 3]
    assert [TensorSlice(info, rank, 2, vocab_rows=16).stored for rank in range(2)] == [39, 0]
    assert TensorSlice(info, 1, 2, vocab_rows=16).shape == (16, 3)
    assert list(TensorSlice(info, 1, 2, vocab_rows=16).runs(0, 48)) == []


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (ParamInfo("w", (4, 4), tp_kind="diagonal"), "'diagonal'; known are none"),
        (ParamInfo("w", (4,), tp_kind="row"), r"w of shape \(4,\) has no dim 1"),
        (ParamInfo("w", (), tp_kind="column"), "has no dim 0"),
        (ParamInfo("w", (9,), tp_kind="sub", tp_sub_sizes=(4, 4)), r"\(4, 4\) do not add up to the 9"),
        (ParamInfo("w", (8,), tp_kind="sub", tp_sub_sizes=(9, -1)), "do not add up"),
        (ParamInfo("w", (8,), tp_kind="column", tp_grains=(0,)), r"tp_grains \(0,\) are not one positive"),
        (ParamInfo("w", (8,), tp_kind="sub", tp_sub_sizes=(4, 4), tp_grains=(2,)), r"\(2,\) are not one .* \(4, 4\)"),
        (ParamInfo("w", (8, 2), tp_kind="vocab", vocab_size=7), "the rows without padding"),
        (ParamInfo("w", (8, 2), tp_kind="vocab", tp_dim=1), "along dim 0"),
    ],
)
def test_cuts_that_cannot_be_are_named(info, message):
    with pytest.raises(CheckpointError, match=message):
        TensorSlice(info, 0, 2)


def test_wrong_ranks_rows_and_ranges_are_named():
    info = ParamInfo("w", (8, 2), tp_kind="vocab", vocab_size=8)
    with pytest.raises(CheckpointError, match="no rank 2 in a tensor-parallel group of 2"):
        TensorSlice(info, 2, 2)
    with pytest.raises(CheckpointError, match="w has 8 rows; 2 ranks of 3 rows cannot hold them"):
        TensorSlice(info, 0, 2, vocab_rows=3)
    with pytest.raises(CheckpointError, match=r"\[4:9\] is no range of the 8 elements .* rank 1 of 2"):
        gather_pieces(TensorSlice(info, 1, 2), 4, torch.zeros(5))


@pytest.mark.parametrize("writing", ["direct", "aggregated"])
def test_every_kind_round_trips_and_the_file_is_that_of_one_rank(tmp_path, writing):
    expected = save_slices(tmp_path / "1", CASES, 1).read_bytes()
    for size in SIZES[1:]:
        options = {"writing": writing, "files": 1, "window_bytes": schema.BLOCK_BYTES}
        assert save_slices(tmp_path / str(size), CASES, size, **options).read_bytes() == expected
    check_slices(tmp_path / "3", CASES)


@pytest.mark.parametrize("writing", ["direct", "aggregated"])
def test_several_files(tmp_path, writing):
    expected = save_slices(tmp_path / "1", CASES, 1, files=3).parent
    found = save_slices(tmp_path / "2", CASES, 4, files=3, writing=writing).parent
    names = [path.relative_to(expected) for path in [expected / "model.h5", *sorted(expected.glob("data/*"))]]
    assert len(names) == 4
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_finely_cut_tensors_are_dealt_to_all_ranks():
    tensors = [LogicalTensor(f"w{i}", "master", (100, 10_000), torch.float32) for i in range(6)]
    places = Places(("a", "b"), np.arange(6) % 2, np.arange(6) * 4_000_000, np.zeros(6, np.int64))
    table = logical.range_table((i, 0, 10, 10, 100_000) for i in range(5))
    chosen = logical.finely_cut(tensors, [table, logical.range_table([(5, 0, 1_000_000, 0, 1)])])
    assert chosen.tolist() == [0, 1, 2, 3, 4]
    channels, writers = deal(tensors, places, chosen, 3)
    assert [(file, order.tolist()) for file, order in channels] == [(0, [0, 2]), (0, [4]), (1, [1, 3])]
    assert writers == [0, 1, 2]


def check_slices(folder, infos, dtype=torch.float32, sizes=SIZES):
    """Read slices of these sizes, whole and in cuts, with and without checksums."""
    with open_checkpoint(folder) as checkpoint:
        for info in infos:
            for size in sizes:
                for rank in range(size):
                    cut = TensorSlice(info, rank, size)
                    local = cut_by_torch(info, whole_of(info, dtype), rank, size)
                    for start, stop in {(0, cut.numel), (cut.numel // 3, cut.numel // 2 + 1)}:
                        stop = min(stop, cut.numel)
                        for verify in (True, False):
                            out = torch.full((stop - start,), 9.0, dtype=dtype)
                            read_slice(checkpoint, info.name, "master", cut, start, out, verify=verify)
                            assert has_same_bits(out, local.reshape(-1)[start:stop]), (info.name, rank, size)


WIDE = [
    ParamInfo("wide row", (700, 3000), tp_kind="row"),
    ParamInfo("sub", (300, 3001), tp_kind="sub", tp_dim=1, tp_sub_sizes=(2000, 900, 101)),
    ParamInfo("long", (3, 1_100_000), tp_kind="row"),
    ParamInfo("narrow", (30_000, 4), tp_kind="row"),
    ParamInfo("many columns", (300, 1000), tp_kind="column"),
]


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_tensors_of_several_blocks(tmp_path, dtype, window):
    """Ranges begin and end inside of rows; the long rows are written directly, the others are brought together."""

    def cut(local, rank):
        ends = [0, len(local) // 3 + 1, len(local) - rank, len(local)]
        return [(start, local[start:stop]) for start, stop in itertools.pairwise(ends)]

    expected = save_slices(tmp_path / "a", WIDE, 1, dtype).read_bytes()
    options = {"window_bytes": window * schema.BLOCK_BYTES, "verify": "full"}
    assert save_slices(tmp_path / "b", WIDE, 3, dtype, cut=cut, **options).read_bytes() == expected
    check_slices(tmp_path / "b", WIDE, dtype, sizes=(2,))


def test_deferred_slices(tmp_path):
    def deferred(local, rank):
        def parts(first, last):
            for start in range(first, last, 1000):
                yield local[start : min(start + 1000, last)].clone()

        return [(0, Deferred(len(local), local.dtype, parts))] if rank else [(0, local)]

    infos = WIDE[:3] + CASES
    expected = save_slices(tmp_path / "a", infos, 1).read_bytes()
    assert save_slices(tmp_path / "b", infos, 2, cut=deferred).read_bytes() == expected
    options = {"writing": "aggregated", "window_bytes": schema.BLOCK_BYTES}
    assert save_slices(tmp_path / "c", infos, 2, cut=deferred, **options).read_bytes() == expected


def test_other_dtypes_and_shapes_when_read(tmp_path):
    info = ParamInfo("w", (6, 10), tp_kind="row")
    save_slices(tmp_path, [info], 2)
    cut = TensorSlice(info, 1, 3)
    with open_checkpoint(tmp_path) as checkpoint:
        out = torch.full((cut.numel,), 5.0, dtype=torch.bfloat16)
        read_slice(checkpoint, "w", "master", cut, 0, out)
        assert torch.equal(out.view(cut.shape), cut_by_torch(info, whole_of(info), 1, 3).bfloat16())
        strided = torch.zeros(2 * cut.numel)[::2]
        read_slice(checkpoint, "w", "master", cut, 0, strided)
        assert torch.equal(strided.view(cut.shape), cut_by_torch(info, whole_of(info), 1, 3))
        with pytest.raises(CheckpointError, match=r"w/master is stored in shape \(6, 10\) .* \(6, 9\)"):
            read_slice(checkpoint, "w", "master", TensorSlice(ParamInfo("w", (6, 9)), 0, 1), 0, out)
        with pytest.raises(CheckpointError, match="pass a flat one"):
            read_slice(checkpoint, "w", "master", cut, 0, out.view(cut.shape))
        with pytest.raises(CheckpointError, match="is no range of the 18 elements"):
            read_slice(checkpoint, "w", "master", cut, 1, out)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(0, torch.zeros(5), False, Pattern(5, ((0, 2),)))], "has 5 elements, no multiple of the 2"),
        ([Piece(0, torch.zeros(4), False, Pattern(5, ((1, 2),)))], "must ascend from 0"),
        ([Piece(0, torch.zeros(4), False, Pattern(5, ((0, 2), (1, 2))))], "must ascend"),
        ([Piece(0, torch.zeros(4), False, Pattern(5, ((0, 0), (1, 2))))], "none empty"),
        ([Piece(0, torch.zeros(4), False, Pattern(5, ((0, 2), (4, 2))))], "up to 6 in periods of 5"),
        ([Piece(0, torch.zeros(4), False, Pattern(5, ()))], "has runs up to 0"),
        ([Piece(9, torch.zeros(6), False, Pattern(5, ((0, 2),)))], "ends at 21, outside the 20"),
        (
            [Piece(2, torch.zeros(3)), Piece(0, torch.zeros(4), False, Pattern(5, ((0, 2),)))],
            "the piece at element 2 begins between the first and the last element of that at 0",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_named(tmp_path, pieces, message):
    def work(comm):
        tensors = [LogicalTensor("w", "master", (4, 5), torch.float32, pieces)]
        return save(comm, tmp_path, "t", params=[ParamInfo("w", (4, 5))], tensors=tensors)

    (result,) = outcomes(1, work)
    assert message in str(result)
    assert list(tmp_path.iterdir()) == []


def test_positions_of_a_pattern():
    held = [3, 4, 7, 13, 14, 17]
    piece = Piece(3, torch.zeros(6), False, Pattern(10, ((0, 2), (4, 1))))
    assert [element for first, count in piece.runs() for element in range(first, first + count)] == held
    assert piece.stop == 18
    for position in range(-2, 30):
        assert piece.before(position) == int((np.array(held) < position).sum())


def test_holes_and_overlaps_between_slices_are_found(tmp_path):
    info = ParamInfo("w", (4, 6), tp_kind="row")

    def work(comm, of=(0, 0)):
        cut = TensorSlice(info, of[comm.rank], 2)
        pieces = gather_pieces(cut, 0, torch.zeros(math.prod(cut.shape)))
        return save(
            comm, tmp_path, "t", params=[info], tensors=[LogicalTensor("w", "master", (4, 6), torch.float32, pieces)]
        )

    assert "the elements [0, 3) were passed by ranks 0 and 1" in str(outcomes(2, work)[1])
    assert "has a hole: no rank passed the elements [0, 3)" in str(outcomes(1, lambda comm: work(comm, of=(1,)))[0])
    assert list(tmp_path.iterdir()) == []
