"""The way that tensors of a device take: tried, measured, named by the variable; training on it is that on the host."""

import logging

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.launch.findings import Verdict
from mpispeed.launch.probes_ranks import judge_ways
from mpispeed.mesh import device_paths, probe
from mpispeed.mesh.backends import nccl
from mpispeed.mesh.device_paths import Choice, Trial
from tests.helpers import fake_nccl
from tests.helpers.pipes import Case, Layout
from tests.mpi.device.test_pipeline import run as run_pipeline
from tests.mpi.device.test_training import run as run_stage
from tests.zoo import same_bits

pytestmark = pytest.mark.mpi(min_size=1)

STAGED_SECONDS, OTHER_SECONDS = (2e-3, 2e-3), (1e-3, 1e-3)


@pytest.fixture
def library(world, device, monkeypatch):
    """The library of the tests; every rank says that it is on a device of its own."""
    monkeypatch.delenv(device_paths.VARIABLE)
    monkeypatch.setattr(nccl, "identity_of", lambda device: f"device of rank {world.rank}")
    monkeypatch.setattr(device_paths, "_MEASURED", {})
    monkeypatch.setattr(
        device_paths, "OPENERS", {name: how for name, how in device_paths.OPENERS.items() if name != "mapped"}
    )
    with fake_nccl.lend() as lent:
        yield lent


def test_the_least_sum_of_relative_times_wins():
    """Not the least sum of times, in which the large gather would stand alone."""
    trials = [
        Trial("a", "in node", (1e-5, 2e-3)), Trial("b", "in node", (4e-5, 1.9e-3)), Trial("c", "in node", problem="no"),
    ]  # fmt: skip
    assert device_paths._fastest(trials) == "a"
    assert device_paths._fastest(trials[2:]) == "staged"
    shown = Choice("a", "staged", tuple(trials)).describe()
    assert shown.startswith("a, staged over nodes (measured); a in node: gathers of 256 KiB 0.01 ms, 32 MiB 2 ms; b")
    assert shown.endswith("c in node: no")


def test_rank_0_measures_once_for_all(world, device, library, monkeypatch):
    """What other ranks measure does not count."""
    told = []

    def seconds(comm, device):
        told.append(comm.group.device_path is not None)
        is_slow = (comm.group.device_path is None) == (world.rank == 0)
        return STAGED_SECONDS if is_slow else OTHER_SECONDS

    monkeypatch.setattr(device_paths, "_times", seconds)
    found = [device_paths.choose(world, device) for _ in range(2)]
    assert found[0] == found[1]
    if world.size == 1:
        assert found[0] == Choice()
        assert told == []
    else:
        assert found[0].in_node == "nccl"
        assert [trial.seconds for trial in found[0].figures if trial.name == "staged"] == [STAGED_SECONDS]
        assert told == [True, False]


@pytest.mark.ranks(2, 3)
def test_times_are_taken_of_gathers(world, device, library, monkeypatch):
    monkeypatch.setattr(device_paths, "SIZES", (96, 960))
    library.forget()
    before = world.comm_trace.total_bytes("all_gather")
    found = device_paths.choose(world, device)
    assert {trial.name for trial in found.figures if trial.seconds} >= {"nccl", "staged"}
    assert all(0 < s < 60 for trial in found.figures for s in trial.seconds)
    gathers = [words[1] for words in library.calls() if words[0] == "all_gather"]
    assert gathers == [str(n // world.size) for n in (96, 960) for _ in range(1 + device_paths.TRIALS)]
    assert world.comm_trace.total_bytes("all_gather") == before  # the job's own count has none of it


@pytest.mark.ranks(2, 3)
def test_doctor_says_what_a_run_would_choose(world, device, library, monkeypatch):
    monkeypatch.setattr(device_paths, "_times", lambda comm, device: OTHER_SECONDS)
    monkeypatch.setattr(nccl, "OPEN_SECONDS", nccl.OPEN_SECONDS)
    found = judge_ways(probe.measure_ways(device.type))
    assert found.verdict is Verdict.OK
    assert found.detail.startswith("nccl (measured); nccl in node: gathers of 256 KiB 1 ms, 32 MiB")
    monkeypatch.setenv(device_paths.VARIABLE, "mpi")
    found = judge_ways(probe.measure_ways(device.type))
    assert found.verdict is Verdict.WARN
    assert "MPISPEED_DEVICE_PATH is 'mpi'" in found.detail


@pytest.mark.ranks(2, 3)
def test_the_variable_decides(world, device, library, monkeypatch):
    for name, over_nodes in (("staged", "staged"), ("nccl", "nccl"), ("pointers", "pointers")):
        monkeypatch.setenv(device_paths.VARIABLE, name)
        found = device_paths.choose(world, device)
        assert (found.in_node, found.between_nodes, found.is_given) == (name, over_nodes, True)
        assert found.describe() == f"{name} (by MPISPEED_DEVICE_PATH)"
    monkeypatch.setenv(device_paths.VARIABLE, "nccl" if world.rank == 1 else "staged")
    with pytest.raises(ConfigError, match=r"PATH is 'staged' on rank 0 and 'nccl' on rank 1; set it on all ranks"):
        device_paths.choose(world, device)
    monkeypatch.setenv(device_paths.VARIABLE, "mpi")
    with pytest.raises(ConfigError, match=r"MPISPEED_DEVICE_PATH is 'mpi'; it can be staged, .*nccl"):
        device_paths.choose(world, device)


def mesh_of(world, **axes):
    return mpispeed.mesh.Mesh(mpispeed.mesh.Topology(axes), world, reduction="ordered")


@pytest.mark.ranks(4)
def test_all_groups_and_later_channels_have_the_way(world, device, library):
    mesh = mesh_of(world, pipe=2, data=2)
    device_paths.connect(mesh, device, Choice("nccl", "nccl"), messages=("pipe", "unknown"))
    for made in (mesh, mesh.channel("more")):
        for axes, comm in made.groups():
            paths = [comm.group.device_path, comm.started.group.device_path]
            assert [path.name for path in paths] == ["nccl", "nccl"]
            assert paths[0].reaches(1 - comm.rank) == (axes == ("pipe",))
            assert comm.keeps_lead(device)
    assert mesh[()].keeps_lead(device)
    assert not world.comm.keeps_lead(device)
    library.forget()
    mesh.close()
    opened = [words[0] for words in library.calls()]
    assert opened.count("destroy") == opened.count("finalize") > 0


@pytest.mark.ranks(2, 3)
def test_groups_that_are_made_of_others_have_the_way(world, device, library):
    """Such as those of sliced layers, which outlive the engine, of experts, and of levels inside of nodes."""
    mesh = mesh_of(world, data=world.size)
    comm = mesh["data"]
    device_paths.connect(mesh, device, Choice("nccl", "nccl"))
    made = [comm.duplicate(), comm.split(0, comm.ranks, ("part",)), comm.of_members(range(comm.size), "m", ("part",))]
    made.append(made[0].duplicate())
    for part in made:
        assert part.group.device_path.name == "nccl"
        x = torch.ones(5, device=device)
        part.all_reduce(x)
        assert x.cpu().tolist() == [float(world.size)] * 5
    alone = comm.split(comm.rank, (world.rank,), ("alone",))
    assert alone.group.device_path is None
    for part in (*made, alone):
        part.close()
    mesh.close()


@pytest.mark.ranks(2, 3)
def test_where_it_cannot_be_opened_all_stage_and_one_line_says_why(world, device, library, caplog):
    library.fail_at(lambda name: name == "ncclGetUniqueId" and world.rank == 0)
    mesh = mesh_of(world, data=world.size)
    with caplog.at_level(logging.WARNING):
        device_paths.connect(mesh, device, Choice("nccl", "nccl"))
    assert [comm.group.device_path for _, comm in mesh.groups()] == [None]
    lines = [line.getMessage() for line in caplog.records if line.name == device_paths.__name__]
    assert len(lines) == int(world.rank == 0)
    assert all("staged in host memory over data" in line and "asked to fail" in line for line in lines)
    x = torch.ones(5, device=device)
    mesh["data"].all_reduce(x)
    assert x.cpu().tolist() == [float(world.size)] * 5
    mesh.close()


@pytest.mark.ranks(2, 3)
def test_what_cannot_be_opened_is_not_chosen(world, device, library, monkeypatch):
    library.fail_at(lambda name: name == "ncclCommInitRankConfig" and world.rank == 1)
    monkeypatch.setattr(nccl, "OPEN_SECONDS", 1.0)
    found = device_paths.choose(world, device)
    assert (found.in_node, found.between_nodes) == ("staged", "staged")
    assert [(trial.name, trial.seconds) for trial in found.figures] == [("nccl", ())]
    assert "ncclCommInitRankConfig" in found.figures[0].problem or "in vain" in found.figures[0].problem


CASES = [
    pytest.param(0, "bf16", marks=pytest.mark.ranks(2)),
    pytest.param(1, "fp32", marks=pytest.mark.ranks(3)),
    pytest.param(2, "bf16", marks=pytest.mark.ranks(4)),
    pytest.param(3, "bf16", marks=pytest.mark.ranks(2)),
    pytest.param(3, "fp32", marks=pytest.mark.ranks(3)),
]


@pytest.mark.parametrize(("stage", "how"), CASES)
def test_stages_train_alike(world, device, on_host, library, monkeypatch, stage, how):
    monkeypatch.setenv(device_paths.VARIABLE, "nccl")
    found = run_stage({"stage": stage}, 1, device, how)
    assert {"all_gather", "send"} & {words[0] for words in library.calls()}
    on_host()
    same_bits(found, run_stage({"stage": stage}, 1, None, how))


PIPES = [
    pytest.param(Case(Layout(2, 1, 1), "1f1b", 0, "bf16"), marks=pytest.mark.ranks(2)),
    pytest.param(Case(Layout(2, 1, 1), "interleaved", 0, "bf16"), marks=pytest.mark.ranks(2)),
    pytest.param(Case(Layout(2, 1, 2), "1f1b", 3, "bf16"), marks=pytest.mark.ranks(4)),
]


@pytest.mark.parametrize("case", PIPES, ids=str)
def test_pipelines_train_alike(device, on_host, library, monkeypatch, case):
    monkeypatch.setenv(device_paths.VARIABLE, "nccl")
    found = run_pipeline(case, device)
    on_host()
    same_bits(found, run_pipeline(case, None))
