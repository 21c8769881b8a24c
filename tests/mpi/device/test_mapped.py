"""Verbs through memory that ranks have mapped: past the host, in boxes used again, with failures told alike."""

from collections import Counter

import pytest
import torch

from mpispeed.base.errors import CommError, NativeMissing
from mpispeed.mesh import device_paths
from mpispeed.mesh.backends import mapped, mapped_messages
from mpispeed.mesh.collectives import device_collectives
from mpispeed.native import mappers
from tests.helpers import verbs
from tests.helpers.mapped_paths import mapped_paths
from tests.helpers.pipes import Case, Layout
from tests.mpi.device.test_pipeline import run as run_pipeline
from tests.mpi.device.test_training import run as run_stage
from tests.zoo import same_bits

pytestmark = pytest.mark.ranks(2, 3, 4)

ROOTED = (torch.float32, torch.bfloat16, torch.int64)


def noise(rank, count, dtype=torch.float32):
    found = torch.randn(count, generator=torch.Generator().manual_seed(31 + rank), dtype=torch.float64)
    return (found * 100).to(dtype)


@pytest.fixture
def path(comm, device, monkeypatch):
    """Slots of one piece of the larger tensors here, and of some pieces more."""
    monkeypatch.setattr(mapped, "SLOT_BYTES", 1 << 20)
    monkeypatch.setattr(comm.group, "reduction", "ordered")
    with mapped_paths(comm, device):
        yield comm.group.device_path


@pytest.fixture
def without_host(monkeypatch):
    """A verb that stages fails."""

    def refuse(*args):
        pytest.fail("staged in host memory")

    monkeypatch.setattr(device_collectives.devices, "pinned", refuse)


@pytest.mark.parametrize("count", [7, 400_001], ids=["one meeting", "pieces"])
def test_nothing_passes_the_host(comm, device, path, without_host, count):
    size, rank = comm.size, comm.rank
    for dtype in (torch.bfloat16, torch.int64):
        own, whole = noise(rank, count, dtype), noise(rank, count * size, dtype)
        found, expected = [], []
        for out, near in ((found, device), (expected, torch.device("cpu"))):
            x, full, row = own.to(near), whole.to(near), torch.zeros(count, dtype=dtype, device=near)
            gathered, swapped = torch.zeros(2, count * size, dtype=dtype, device=near)
            comm.all_reduce(x)
            comm.reduce_scatter(row, full, "max")
            comm.start_all_gather(gathered, x).wait()
            comm.all_to_all(swapped, full)
            comm.broadcast(full, size - 1)
            out += [x, row, gathered, swapped, full]
        for one, other in zip(found, expected, strict=True):
            assert verbs.same(one.cpu(), other)


@pytest.mark.parametrize("dtype", ROOTED, ids=str)
def test_rooted_verbs(comm, device, path, without_host, dtype):
    root = comm.size - 1
    for count in (0, 1003):
        own, whole = noise(comm.rank, count, dtype), noise(comm.rank, count * comm.size, dtype)
        for verb in ("reduce", "gather", "scatter"):
            found = []
            for near in (device, torch.device("cpu")):
                x, full = own.to(near), whole.to(near)
                if verb == "reduce":
                    comm.reduce(x, root)
                elif verb == "gather":
                    comm.gather(full, x, root)
                else:
                    comm.scatter(x, full, root)
                found.append([x.cpu(), full.cpu()])
            assert all(verbs.same(one, other) for one, other in zip(*found, strict=True)), verb


def test_boxes_are_used_again_when_they_were_taken(comm, device, monkeypatch, without_host):
    """More messages than boxes, of sizes that grow, with tags that are not received in the order of sending."""
    monkeypatch.setattr(mapped_messages, "BOXES", 2)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with mapped_paths(comm, device):
        for count in (5, 1000, 100_000, 3):
            sent = [noise(comm.rank + 9 * tag, count).to(device) for tag in range(2)]
            works = [comm.start_send(x, after, 1 + tag) for tag, x in enumerate(sent)]
            got = [torch.zeros(count, device=device) for _ in sent]
            arriving = [comm.start_recv(got[tag], before, 1 + tag) for tag in (1, 0)]
            for work in [*works, *arriving]:
                work.wait()
            sent[0].zero_()
            for tag, x in enumerate(got):
                assert torch.equal(x.cpu(), noise(before + 9 * tag, count))
        messages = comm.started.group.device_path._messages
        assert {dst: len(boxes) for dst, boxes in messages._boxes.items()} == {after: 2}


@pytest.fixture
def unrecorded(comm, monkeypatch):
    """Else the recorder ends the job, whose ranks have diverged."""
    for group in (comm.group, comm.started.group):
        monkeypatch.setattr(group, "sequence", None)


def test_a_message_of_another_length(comm, device, path, unrecorded):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.start_send(torch.zeros(8, device=device), after, 3).wait()
    with pytest.raises(CommError, match="32 bytes has come from rank"):
        comm.start_recv(torch.zeros(9, device=device), before, 3).wait()


def test_different_verbs_fail_on_all_ranks(comm, device, path, unrecorded):
    x, out = torch.zeros(6, device=device), torch.zeros(6 * comm.size, device=device)
    with pytest.raises(CommError, match=r"different verbs.*all_gather of 24 bytes.*broadcast of 24 bytes"):
        comm.broadcast(x) if comm.rank else comm.all_gather(out, x)


def test_where_one_rank_cannot_map_none_does(comm, device, monkeypatch):
    def refuse(device):
        msg = "no memory of this kind"
        raise NativeMissing(msg)

    if comm.rank == 1:
        monkeypatch.setitem(mappers.KINDS, device.type, refuse)
    with pytest.raises(CommError, match=f"rank 1 of {comm.size}: NativeMissing: no memory of this kind"):
        mapped.open_mapped(comm.group, device)


@pytest.fixture
def counted(monkeypatch):
    """How often each verb of a mapped path was called, while it is the way of engines."""
    found = Counter()

    def counting(name, verb):
        def call(self, *args):
            found[name] += 1
            return verb(self, *args)

        return call

    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "post_send", "post_recv"):
        monkeypatch.setattr(mapped.MappedPath, name, counting(name, getattr(mapped.MappedPath, name)))
    monkeypatch.setattr(mapped, "SLOT_BYTES", 1 << 14)
    monkeypatch.setenv(device_paths.VARIABLE, "mapped")
    return found


STAGES = [
    pytest.param({"stage": 0}, "bf16", marks=pytest.mark.ranks(2)),
    pytest.param({"stage": 1}, "fp16", marks=pytest.mark.ranks(4)),
    pytest.param({"stage": 2, "overlap_comm": True}, "fp32", marks=pytest.mark.ranks(3)),
    pytest.param({"stage": 3, "overlap_comm": True}, "bf16", marks=pytest.mark.ranks(2)),
    pytest.param({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16", marks=pytest.mark.ranks(3)),
]


@pytest.mark.parametrize(("section", "dtype"), STAGES, ids=str)
def test_stages_train_as_on_the_host(device, on_host, counted, section, dtype):
    section = {"stage3_param_persistence_threshold": 0, **section}
    found = run_stage(section, 1, device, dtype)
    assert counted["all_reduce"] + counted["reduce_scatter"] > 0
    assert counted["all_gather"] > 0 or section["stage"] == 0
    on_host()
    same_bits(found, run_stage(section, 1, None, dtype))


PIPES = [
    pytest.param(Case(Layout(2, 1, 1), "interleaved", 0, "bf16"), marks=pytest.mark.ranks(2)),
    pytest.param(Case(Layout(1, 2, 1), "gpipe", 1, "bf16"), marks=pytest.mark.ranks(2)),
    pytest.param(Case(Layout(2, 1, 2), "1f1b", 3, "bf16"), marks=pytest.mark.ranks(4)),
]


@pytest.mark.parametrize("case", PIPES, ids=str)
def test_pipelines_and_slices_train_as_on_the_host(device, on_host, counted, case):
    found = run_pipeline(case, device)
    sums = counted["all_reduce"] + counted["reduce_scatter"]
    assert sums > 0 or case.layout == Layout(2, 1, 1)
    assert (counted["post_send"] + counted["post_recv"] > 0) == (case.layout != Layout(1, 2, 1))
    on_host()
    same_bits(found, run_pipeline(case, None))
