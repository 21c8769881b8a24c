"""What ranks of one layout saved, ranks of any other load bit for bit, and the file does not tell who wrote it."""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.slices import TensorSlice, gather_pieces, read_slice
from mpispeed.ckpt.write.save import SaveOptions, save
from tests.unit.ckpt.sample import outcomes
from tests.zoo import has_same_bits

LAYERS, EXPERTS = 2, 4
SLOTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; experts are dealt to the `ep` first coordinates of dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    stage: int = 0

    @property
    def size(self):
        return self.tp * self.pp * self.dp

    def coordinates(self, rank):
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp


def model():
    """The parameters of a small mixture-of-experts transformer with every kind of cut and odd sizes."""
    infos = [ParamInfo("embed", (13, 6), tp_kind="vocab", tp_dim=0, vocab_size=13, pp_layer=0, step=3)]
    for layer in range(LAYERS):
        name, at = f"layers.{layer}", {"pp_layer": layer, "step": 3}
        infos += [
            ParamInfo(f"{name}.norm", (6,), tp_kind="replicated", **at),
            ParamInfo(f"{name}.qkv", (16, 6), tp_kind="sub", tp_dim=0, tp_sub_sizes=(8, 4, 4), **at),
            ParamInfo(f"{name}.out", (6, 8), tp_kind="row", tp_dim=1, **at),
            ParamInfo(f"{name}.up", (10, 6), tp_kind="column", tp_dim=0, **at),
            ParamInfo(f"{name}.up.bias", (10,), tp_kind="column", tp_dim=0, **at),
            ParamInfo(f"{name}.conv", (3, 5, 2, 2), tp_kind="row", tp_dim=1, **at),
            ParamInfo(f"{name}.scale", (), tp_kind="none", **at),
        ]
        infos += [
            ParamInfo(f"{name}.experts.{i}.up", (3, 6), tp_kind="column", expert=(i, EXPERTS), **at)
            for i in range(EXPERTS)
        ]
    infos.append(ParamInfo("final", (5, 3), tp_kind="row", pp_kind="replicated", pp_layer=-1, step=3))
    return infos


@functools.cache
def _values(name, slot, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(f"{name}/{slot}".encode())))


def values_of(info, slot):
    return _values(info.name, slot, info.shape)


def held(layout, rank, info):
    """(slice, start, stop) that a rank has of a parameter, and whether it is the one that writes it; None for nothing.

    With stage 0 every data-parallel rank has all, and the first writes; otherwise each has a part of the flat slice.
    """
    pp, dp, tp = layout.coordinates(rank)
    if info.pp_kind == "owned" and info.pp_layer * layout.pp // LAYERS != pp:
        return None
    parts, part = layout.dp, dp
    if info.expert is not None:
        if info.expert[0] * layout.ep // info.expert[1] != dp % layout.ep:
            return None
        parts, part = layout.dp // layout.ep, dp // layout.ep
    cut = TensorSlice(info, tp, layout.tp)
    is_writer = info.pp_kind == "owned" or pp == 0
    if layout.stage == 0:
        return cut, 0, cut.numel, is_writer and part == 0
    length = -(-cut.numel // parts)
    start = min(part * length, cut.numel)
    return cut, start, min(start + length, cut.numel), is_writer


def local_values(cut, start, stop, whole):
    """The range of a slice, element by element, out of the whole tensor; zeros for padding."""
    flat, out = whole.reshape(-1), torch.zeros(stop - start)
    for local, first, count in cut.runs(start, stop):
        out[local - start :][:count] = flat[first : first + count]
    return out


def save_as(folder, layout, **options):
    infos = model()

    def work(comm):
        tensors = []
        for info, slot in itertools.product(infos, SLOTS):
            mine, pieces = held(layout, comm.rank, info), []
            if mine is not None and mine[3]:
                pieces = gather_pieces(mine[0], mine[1], local_values(*mine[:3], values_of(info, slot)))
            tensors.append(LogicalTensor(info.name, slot, info.shape, torch.float32, pieces))
        more = {"state": {"engine": {"global_steps": 3}}, "layout": {"size": comm.size}}
        return save(comm, folder, "t", params=infos, tensors=tensors, options=SaveOptions(**options), **more)

    for result in outcomes(layout.size, work):
        if isinstance(result, Exception):
            raise result
    return (folder / "t" / "model.h5").read_bytes()


def check_as(folder, layout):
    """Every rank of a layout finds what it should have."""
    with open_checkpoint(folder) as checkpoint:
        for rank, name in itertools.product(range(layout.size), checkpoint.names()):
            info = checkpoint.info(name)
            mine = held(layout, rank, info)
            if mine is None:
                continue
            cut, start, stop, _ = mine
            for slot in SLOTS:
                out = torch.full((stop - start,), 7.0)
                read_slice(checkpoint, name, slot, cut, start, out)
                assert has_same_bits(out, local_values(cut, start, stop, values_of(info, slot))), (name, slot, rank)


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(dp=4, stage=1),
    Layout(dp=3, stage=1),
    Layout(dp=8, stage=1),
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2, stage=1),
    Layout(tp=2, dp=2, ep=2, stage=1),
    Layout(tp=2, pp=2, dp=2, stage=1),
    Layout(tp=2, pp=2, dp=2, ep=2, stage=1),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return save_as(tmp_path_factory.mktemp("reference"), Layout())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_writes_the_same_file(tmp_path, reference, layout):
    assert save_as(tmp_path, layout) == reference


@pytest.mark.parametrize("layout", [LAYOUTS[4], LAYOUTS[10]], ids=str)
def test_written_through_one_rank_too(tmp_path, reference, layout):
    assert save_as(tmp_path, layout, writing="aggregated") == reference


def test_any_layout_loads_it(tmp_path):
    """One source is enough: the files of all are the same."""
    save_as(tmp_path, LAYOUTS[-1])
    for layout in [*LAYOUTS, Layout(dp=2, stage=1), Layout(dp=4, ep=1, stage=1), Layout(tp=3, dp=2, stage=1)]:
        check_as(tmp_path, layout)


def test_slices_hold_what_is_expected():
    """By hand, so that writing and reading cannot agree on a wrong cut."""
    infos = {info.name: info for info in model()}
    rows = torch.arange(96).view(16, 6)
    cut = TensorSlice(infos["layers.0.qkv"], 1, 2)
    mine = local_values(cut, 0, cut.numel, rows.float()).view(cut.shape)
    assert mine[:, 0].div(6).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]
    cut = TensorSlice(infos["embed"], 3, 4)
    mine = local_values(cut, 0, cut.numel, torch.arange(1.0, 79).view(13, 6)).view(cut.shape)
    assert mine[:, 0].tolist() == [73, 0, 0, 0]
    cut = TensorSlice(infos["layers.0.out"], 1, 4)
    assert local_values(cut, 0, 4, torch.arange(48.0).view(6, 8)).tolist() == [2, 3, 10, 11]
