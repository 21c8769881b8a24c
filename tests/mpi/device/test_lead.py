"""Steps that do not wait for the device: none of its numbers is read in them, and all is as if they did."""

import math
from contextlib import contextmanager

import h5py
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpispeed
from mpispeed.base.events import Event
from mpispeed.engine.step import MeasureNorm
from mpispeed.mesh import exits
from mpispeed.mesh.comm import Comm
from mpispeed.record import layout
from tests.helpers.on_device import moved
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, weights, zero_section

pytestmark = pytest.mark.mpi(min_size=1)
ALONE = pytest.mark.ranks(1)

BATCH = 12
BF16 = {"bf16": {"enabled": True}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}}


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: blocking copies and numbers that are read."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.name()
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
            if args[0].device.type not in ("cpu", "meta"):
                self.found.append(name)
        elif name in ("aten::copy_", "aten::_to_copy", "aten::_copy_from_and_resize"):
            source = args[1] if name == "aten::copy_" else args[0]
            blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            if source.device.type not in ("cpu", "meta") and out.device.type == "cpu" and blocks:
                self.found.append(name)
        return out


@contextmanager
def waits(monkeypatch):
    """Also those for events and streams."""
    mode = Waits()

    def counted(name, function):
        def call(*args, **kwargs):
            mode.found.append(name)
            return function(*args, **kwargs)

        return call

    class Event(torch.Event):
        synchronize = counted("Event.synchronize", torch.Event.synchronize)

    with monkeypatch.context() as patch, mode:
        module = torch.get_device_module("standin")
        patch.setattr(module, "Event", Event)
        patch.setattr(module, "synchronize", counted("synchronize", module.synchronize))
        yield mode.found


def start(device, stage, dtype, leads=True, is_able=True, **more):
    settings = config(0, BATCH, 1, reduction="ordered", **(WARM | dtype | more))
    model = moved(TinyLM(), device)
    engine = mpispeed.initialize(model=model, config=settings | {"zero_optimization": zero_section(stage)})[0]
    assert engine.mpispeed.updates.leads is is_able
    engine.mpispeed.updates.leads = leads
    return engine


def step(engine, batch, *, poison=False):
    """Scripts that read the loss later do not wait for it."""
    loss = engine(batch)
    engine.backward(loss * math.inf if poison else loss)
    engine.step()
    return loss.detach().clone()


@ALONE
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_does_not_wait(device, stage, monkeypatch):
    data = [batch.to(device) for batch in batches(4, BATCH)]
    engine = start(device, stage, BF16, gradient_clipping=0.5)
    losses = [step(engine, data[0])]
    for batch in data[1:]:
        engine.mpispeed.updates.settle()  # what is read a step later was there long ago on a device
        with waits(monkeypatch) as found:
            losses.append(step(engine, batch))
        assert found == []
    found = [loss.cpu() for loss in losses], engine.get_global_grad_norm(), weights(engine)
    engine.destroy()
    expected = start(device, stage, BF16, leads=False, gradient_clipping=0.5)
    losses = [step(expected, batch).cpu() for batch in data]
    same_bits((losses, expected.get_global_grad_norm(), weights(expected)), found)
    expected.destroy()


@ALONE
@pytest.mark.parametrize(("stage", "name"), [(0, "AdamW"), (1, "Lion"), (2, "Adagrad"), (3, "AdamW")])
@pytest.mark.parametrize("dtype", [BF16, {}], ids=["bf16", "fp32"])
def test_a_step_that_overflows_is_skipped_a_step_later(device, stage, name, dtype):
    """Counters, schedule, events and weights are those of steps that wait."""
    optimizer = {"optimizer": {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.1}}}

    def run(leads):
        engine, known, ended = start(device, stage, dtype, leads, **optimizer, **SCHEDULE), [], []
        keys = ("global_step", "samples", "loss", "lr", "norm", "skipped", "loss_scale")
        engine.bus.subscribe(Event.STEP_KNOWN, lambda event: known.append([event[key] for key in keys]))
        engine.bus.subscribe(Event.STEP_END, lambda event: ended.append(event))
        losses = []
        for number, batch in enumerate(batches(6, BATCH)):
            losses.append(step(engine, batch.to(device), poison=number in (1, 4)).cpu())
            if leads:
                assert len(known) == number  # the outcome of the last step is not known yet
                assert engine.mpispeed.parts.counters.known_skips == (number > 1) + (number > 4)
        was_applied = engine.was_step_applied()
        numbers = (engine.global_steps, engine.skipped_steps, engine.get_lr(), engine.get_global_grad_norm())
        schedule = engine.lr_scheduler.state_dict()
        engine.destroy()
        assert [event["skipped"] for event in ended] == [number in (1, 4) for number in range(6)]
        assert [event["norm"] for event in ended if not event["skipped"]] == [row[4] for row in known if not row[5]]
        return losses, str(known), was_applied, numbers, schedule, weights(engine)

    found, expected = run(True), run(False)
    same_bits(found[-1], expected[-1])
    same_bits(found[0], expected[0])
    assert found[1:-1] == expected[1:-1]
    assert found[3][:2] == (6, 2)


READERS = {
    "skipped_steps": lambda engine: engine.skipped_steps == 1,
    "was_step_applied": lambda engine: engine.was_step_applied() is False,
    "norm": lambda engine: engine.get_global_grad_norm() is None,
    "lr": lambda engine: engine.get_lr() == [0.0],
    "scheduler": lambda engine: engine.lr_scheduler.last_batch_iteration == -1,
    "state": lambda engine: not engine.optimizer.optimizer.state,
    "overflow": lambda engine: engine.optimizer.overflow is True,
}


@ALONE
@pytest.mark.parametrize("reader", READERS)
def test_whoever_asks_is_told(device, reader):
    engine = start(device, 1, BF16, **SCHEDULE)
    step(engine, batches(1, BATCH)[0].to(device), poison=True)
    assert engine.mpispeed.parts.counters.known_skips == 0
    assert READERS[reader](engine)
    engine.destroy()


HELD = {
    "group": lambda optimizer, inner, schedule: optimizer.param_groups[0]["lr"],
    "inner group": lambda optimizer, inner, schedule: inner.param_groups[0]["lr"],
    "last lr": lambda optimizer, inner, schedule: schedule.get_last_lr(),
    "lr": lambda optimizer, inner, schedule: schedule.get_lr(),
    "index": lambda optimizer, inner, schedule: schedule.last_batch_iteration,
    "state": lambda optimizer, inner, schedule: schedule.state_dict(),
}


@ALONE
@pytest.mark.parametrize("reader", HELD)
def test_whoever_holds_what_initialize_gave_is_told(device, reader):
    settings = config(0, BATCH, 1, **(WARM | BF16 | SCHEDULE))
    engine, optimizer, _, schedule = mpispeed.initialize(model=moved(TinyLM(), device), config=settings)
    objects = optimizer, optimizer.optimizer, schedule
    assert engine.mpispeed.updates.leads
    data = batches(2, BATCH)
    step(engine, data[0].to(device))
    before = HELD[reader](*objects)
    step(engine, data[1].to(device), poison=True)
    assert HELD[reader](*objects) == before
    engine.destroy()


class Noting(torch.optim.lr_scheduler.LambdaLR):
    """Does something that no state tells of."""

    def __init__(self, optimizer):
        self.steps = []
        super().__init__(optimizer, lambda epoch: 1.0 / (1 + epoch))

    def step(self, epoch=None):
        self.steps.append(epoch)
        super().step()


@ALONE
@pytest.mark.parametrize("kind", [lambda own: torch.optim.lr_scheduler.ExponentialLR(own, 0.5), Noting])
def test_a_schedule_of_the_script_is_right_after_each_step(device, kind):
    """A script reads its own objects, of which the engine learns nothing."""
    settings = config(0, BATCH, 1, **(WARM | BF16))
    settings.pop("scheduler", None)
    model = moved(TinyLM(), device)
    engine, optimizer, _, scheduler = mpispeed.initialize(model=model, lr_scheduler=kind, config=settings)
    assert engine.mpispeed.updates.leads
    found = []
    for number, batch in enumerate(batches(4, BATCH)):
        step(engine, batch.to(device), poison=number in (1, 3))
        found.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0], scheduler.last_epoch))
    assert found[1] == found[0] != found[2] == found[3]
    assert len(getattr(scheduler, "steps", [0] * 3)) == 3  # the first is the constructor's
    engine.destroy()


@ALONE
def test_a_record_has_the_last_step_before_an_error(device, mpi_tmp_path, monkeypatch):
    """The losses before a failure are those that people look for."""
    monkeypatch.setattr(exits, "_TOLD", [])
    engine = start(device, 0, BF16, run_record={"enabled": True, "path": str(mpi_tmp_path)})
    for batch in batches(3, BATCH):
        step(engine, batch.to(device))
    exits._tell_error(RuntimeError("of the script"))
    with h5py.File(mpi_tmp_path / "run.h5", locking=False) as file:
        state = layout.latest_state(file["state"][...].tobytes())
        names = file["names"][: state.counts["names"]].tobytes().decode().splitlines()
        rows = file["rows"][: state.counts["rows"]]
    series = names.index("Step/gradient_norm")
    assert [int(row["step"]) for row in rows if row["series"] == series] == [1, 2, 3]
    engine.destroy()


@ALONE
def test_a_micro_batch_after_a_step_applies_nothing(device):
    settings = config(0, BATCH, 2, **(WARM | BF16))
    engine = mpispeed.initialize(model=moved(TinyLM(), device), config=settings)[0]
    assert engine.mpispeed.updates.leads
    found = []
    for number, batch in enumerate(batches(5, BATCH // 2)):
        step(engine, batch.to(device))
        if number in (2, 3):
            found.append(engine.was_step_applied())
    assert found == [False, True]
    engine.destroy()


@ALONE
def test_a_checkpoint_has_what_was_not_known(device, mpi_tmp_path):
    engine = start(device, 2, BF16, **SCHEDULE)
    data = [batch.to(device) for batch in batches(4, BATCH)]
    for number, batch in enumerate(data[:3]):
        step(engine, batch, poison=number == 2)
    engine.save_checkpoint(str(mpi_tmp_path))
    step(engine, data[3])
    other = start(device, 2, BF16, **SCHEDULE)
    other.load_checkpoint(str(mpi_tmp_path))
    assert (other.global_steps, other.skipped_steps) == (3, 1)
    step(other, data[3])
    same_bits((weights(engine), engine.get_lr()), (weights(other), other.get_lr()))
    engine.destroy()
    other.destroy()


KEPT = {
    "offload": ({"zero_optimization": zero_section(2, offload_optimizer={"device": "cpu"})}, False),
    "LAMB": ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, False),
    "fp16": ({"fp16": {"enabled": True}}, False),
    "static": ({"fp16": {"enabled": True, "loss_scale": 128.0}}, True),
}


@ALONE
@pytest.mark.parametrize("case", KEPT)
def test_who_keeps_the_lead(device, case):
    more, leads = KEPT[case]
    settings = config(0, BATCH, 1, **(WARM | more))
    engine = mpispeed.initialize(model=moved(TinyLM(), device), config=settings)[0]
    assert engine.mpispeed.updates.leads is leads
    engine.destroy()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_come_to_the_same_outcome(device, stage):
    """The verbs of the tests' device wait for it, so its ranks have no lead; here they go as those that have."""

    def run(leads):
        engine = start(device, stage, BF16, leads, is_able=False, gradient_clipping=0.5, **SCHEDULE)
        mine = slice(engine.mesh.rank * BATCH // engine.mesh.size, (engine.mesh.rank + 1) * BATCH // engine.mesh.size)
        losses = []
        for number, batch in enumerate(batches(4, BATCH)):
            poison = number == 1 and engine.mesh.rank == 1
            losses.append(step(engine, batch[mine].to(device), poison=poison).cpu())
        found = engine.skipped_steps, engine.get_global_grad_norm(), engine.get_lr(), losses, weights(engine)
        engine.destroy()
        return found

    found = run(True)
    assert found[0] == 1
    same_bits(found, run(False))


@pytest.mark.ranks(2)
def test_a_rank_that_counts_no_unit_takes_part_in_the_norm(device, monkeypatch):
    """As a slice whose trained weights are all copies, which another slice counts."""

    def run(leads):
        engine = start(device, 0, BF16, leads, is_able=False, gradient_clipping=0.5)
        part = next(part for part in engine.mpispeed.updates._parts if isinstance(part, MeasureNorm))
        monkeypatch.setattr(part, "_counts", lambda _: engine.mesh.rank == 0)
        mine = slice(engine.mesh.rank * BATCH // 2, (engine.mesh.rank + 1) * BATCH // 2)
        for batch in batches(2, BATCH):
            step(engine, batch[mine].to(device))
        found = engine.get_global_grad_norm(), weights(engine)
        engine.destroy()
        return found

    same_bits(run(True), run(False))


@pytest.mark.mpi(min_size=2)
def test_ranks_lead_together_or_not_at_all(device, monkeypatch):
    """A way may be open for the groups of one node only; ranks without it would send other messages."""
    monkeypatch.setattr(Comm, "keeps_lead", lambda comm, _: comm.ranks[comm.rank] > 0)
    engine = start(device, 1, BF16, is_able=False)
    mine = slice(engine.mesh.rank * BATCH // engine.mesh.size, (engine.mesh.rank + 1) * BATCH // engine.mesh.size)
    step(engine, batches(1, BATCH)[0][mine].to(device))
    assert engine.get_global_grad_norm() > 0.0
    engine.destroy()
