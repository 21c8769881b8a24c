"""Faults as they happen, on one rank; those of several are in tests/jobs/test_drills.py."""

import math
import os
import resource
import time

import pytest
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.drill import inject
from mpispeed.drill.faults import parse_faults
from mpispeed.drill.inject import InjectedError, Injector, damage, from_environment
from mpispeed.mesh import sim
from mpispeed.mesh.backends.solo import solo_comm


def injector(text):
    return Injector(parse_faults(text), solo_comm())


def test_a_fault_happens_once_at_its_place_and_step():
    broken = injector("error:place=backward@step=2")
    broken.at("backward", 1)
    broken.at("update", 2)
    with pytest.raises(InjectedError, match="error:place=backward@step=2"):
        broken.at("backward", 2)
    broken.at("backward", 2)


def test_an_exit_has_its_code():
    with pytest.raises(SystemExit) as caught:
        injector("exit:code=7@step=1").at("update", 1)
    assert caught.value.code == 7


class Clock:
    """Stands for `time`: it goes on by sleeping only."""

    def __init__(self):
        self.now, self.slept = 1000.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(inject, "time", found)
    return found


def test_after_seconds_it_happens_at_the_next_step(clock):
    broken = injector("error@seconds=0.05")
    broken.at("update", 1)
    clock.now += 0.06
    with pytest.raises(InjectedError):
        broken.at("update", 2)


def test_slow_steps_are_slow_as_often_as_they_are_asked_to_be(clock):
    broken = injector("slow:seconds=0.05,steps=2@step=2")
    slept = []
    for step in range(1, 5):
        clock.slept.clear()
        broken.at("update", step)
        slept.append(sum(clock.slept))
    assert slept == [0, 0.05, 0.05, 0]


def test_a_stall_ends_when_it_is_told_to():
    begin = time.monotonic()
    injector("stall:seconds=0.05@step=1").at("update", 1)
    assert time.monotonic() - begin >= 0.05


def test_a_gradient_that_is_not_a_number():
    broken = injector("nan@step=1")
    assert broken.gradient(torch.ones(3)) is None
    broken.at("forward", 1)
    grad = torch.ones(2, 2)
    poisoned = broken.gradient(grad)
    assert math.isnan(poisoned[0, 0])
    assert int(poisoned.isnan().sum()) == 1
    assert not grad.isnan().any()
    assert broken.gradient(grad) is None


def test_a_parameter_that_is_not_a_number():
    layer = torch.nn.Linear(2, 2)
    injector("nan:what=parameter@step=1").at("forward", 1, layer)
    assert layer.weight.isnan().sum().item() == 1


def test_tensors_of_any_shape_and_order_in_memory_can_be_poisoned():
    layer = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    injector("nan:what=parameter@step=1").at("forward", 1, layer)
    assert layer.weight[0, 0, 0, 0].isnan()
    for grad in (torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), torch.tensor(1.0)):
        broken = injector("nan@step=1")
        broken.at("forward", 1)
        assert int(broken.gradient(grad).isnan().sum()) == 1


def test_a_disk_that_is_full_until_the_save_is_over(tmp_path):
    broken = injector("full_disk:bytes=1000@save=2")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    broken.before_save()
    (tmp_path / "a").write_bytes(b"x" * 2000)
    broken.before_save()
    try:
        with pytest.raises(OSError, match="too large"):
            (tmp_path / "b").write_bytes(b"x" * 2000)
    finally:
        broken.free_disk()
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    (tmp_path / "b").write_bytes(b"x" * 2000)


def test_memory_has_a_limit_and_it_is_taken_back():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError):
        injector("memory:bytes=64MiB@step=1").at("update", 1)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_memory_without_a_limit_is_not_taken(monkeypatch):
    from mpispeed.watchdog.memory import MemoryFacts

    monkeypatch.setattr(inject, "memory_facts", lambda pid: MemoryFacts(pid))
    with pytest.raises(UsageError, match="memory:bytes=1GiB"):
        injector("memory@step=1").at("update", 1)


@pytest.mark.parametrize(("how", "change"), [
    ("flip", lambda old, new: len(old) == len(new) and sum(a != b for a, b in zip(old, new, strict=True)) == 1),
    ("truncate", lambda old, new: new == old[: len(old) // 2]),
])  # fmt: skip
def test_damage_to_the_largest_file_of_a_kind(tmp_path, how, change):
    for name, size in (("model.h5", 100), ("model_1.h5", 300), ("state.h5", 900)):
        (tmp_path / name).write_bytes(os.urandom(size))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert damage(tmp_path, "model", how).name == "model_1.h5"
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert change(before["model_1.h5"], after["model_1.h5"])
    assert [name for name in before if before[name] != after[name]] == ["model_1.h5"]


def test_damage_that_removes_and_damage_to_nothing(tmp_path):
    (tmp_path / "state.h5").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"no model file in .*; it has state\.h5"):
        damage(tmp_path, "model", "flip")
    damage(tmp_path, "state", "remove")
    assert not list(tmp_path.iterdir())


def test_only_the_asked_save_is_damaged(tmp_path):
    (tmp_path / "model.h5").write_bytes(b"x" * 9)
    broken = injector("corrupt@save=2")
    broken.before_save()
    broken.after_save(str(tmp_path))
    assert (tmp_path / "model.h5").read_bytes() == b"x" * 9
    broken.before_save()
    broken.after_save(str(tmp_path))
    assert (tmp_path / "model.h5").read_bytes() != b"x" * 9


def test_the_environment():
    comm = solo_comm()
    assert from_environment(comm, {}) is None
    assert from_environment(comm, {"MPISPEED_INJECT": "kill@step=9"}) is not None
    for name in ("MPISPEED_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        assert from_environment(comm, {"MPISPEED_INJECT": "kill@step=9", name: "1"}) is None
        assert from_environment(comm, {"MPISPEED_INJECT": "kill@step=9", name: "0"}) is not None
    with pytest.raises(ConfigError, match="MPISPEED_INJECT"):
        from_environment(comm, {"MPISPEED_INJECT": "kill:rank=1@step=9"})


def test_all_ranks_take_what_rank_0_was_given():
    def ask(world):
        own = {"MPISPEED_INJECT": "missing:rank=1@step=2"} if world.rank == 0 else {"MPISPEED_INJECT": "nonsense"}
        return [
            from_environment(world.comm, {**own, **more}) is not None for more in ({}, {"SLURM_RESTART_COUNT": "1"})
        ]

    assert sim.run(2, ask) == [[True, False]] * 2
