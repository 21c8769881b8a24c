"""Which device a rank computes on, what is refused there, and scratch that keeps to the order of streams."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from mpispeed.base import device as devices
from mpispeed.base.errors import ConfigError, UnsupportedOption
from mpispeed.base.tensor_tree import move
from mpispeed.config.load import validate
from mpispeed.mesh import sim
from mpispeed.mesh.collectives.work import stream_sync
from mpispeed.native.page_memory import aligned
from mpispeed.plan import device as engine_device
from mpispeed.plan.plan import make_plan
from mpispeed.store.arena import Arena
from mpispeed.store.tiers import GRAD, MASTER, PARAM, Tiers
from tests.helpers.device import stand_in


@pytest.fixture(autouse=True)
def unused():
    yield
    devices.IN_USE.clear()


def chosen(monkeypatch, name, ranks=1, model=None):
    if name is None:
        monkeypatch.delenv(engine_device.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(engine_device.VARIABLE, name)
    model = nn.Linear(2, 2) if model is None else model
    return sim.run(ranks, lambda world: engine_device.choose_device(world, model))


def test_ranks_take_devices_in_turn(monkeypatch):
    kind = stand_in().type
    assert chosen(monkeypatch, kind, 3) == [torch.device(kind, index) for index in (0, 1, 0)]
    assert chosen(monkeypatch, f"{kind}:1", 2) == [torch.device(kind, 1)] * 2
    assert devices.used() == torch.device(kind, 1)


def test_the_host_is_chosen_by_name_and_without_a_gpu(monkeypatch):
    assert chosen(monkeypatch, "cpu") == [torch.device("cpu")]
    assert devices.used() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(monkeypatch, None, 2) == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("name", "text"), [("nonsense", "does not know"), ("standin:7", "2 such devices"), ("meta", "cuda")]
)
def test_what_is_not_there_is_refused(monkeypatch, name, text):
    stand_in()
    with pytest.raises(ConfigError, match=text):
        chosen(monkeypatch, name)


def test_ranks_that_differ_are_told(monkeypatch):
    kind = stand_in().type
    found = iter([torch.device("cpu"), torch.device(kind, 0)])
    monkeypatch.setattr(engine_device, "_own_device", lambda local: next(found))
    with pytest.raises(ConfigError, match="different kinds"):
        chosen(monkeypatch, "cpu", 2)


def plan_of(device, **more):
    source = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **more}
    return make_plan(validate(source).config, 1, torch.float32, device=device)


def test_the_plan_says_it():
    device = torch.device(stand_in().type, 1)
    assert dict(plan_of(device).describe())["device"] == "standin:1"
    assert "device" not in dict(plan_of(torch.device("cpu")).describe())


def test_what_is_made_for_the_host_is_refused():
    with pytest.raises(UnsupportedOption, match="MPISPEED_DEVICE=cpu"):
        plan_of(stand_in(), sparse_gradients=True)
    assert plan_of(torch.device("cpu"), sparse_gradients=True).device.type == "cpu"


def test_kinds_of_states_are_at_home_where_they_were_put():
    device = stand_in()
    tiers, kinds = Tiers(device=device, on_host={(MASTER, 0), (GRAD, 0)}), (PARAM, MASTER, GRAD, "exp_avg")
    assert [tiers.home(kind, 0) for kind in kinds] == [device, *[torch.device("cpu")] * 3]
    assert [tiers.home(kind, 1) for kind in kinds] == [device] * 4
    assert tiers.zeros("exp_avg", 0, 5, torch.float32).get().device.type == "cpu"
    assert tiers.zeros(PARAM, 0, 5, torch.float32).get().device == device
    assert tiers.zeros("exp_avg", 1, 5, torch.float32).get().device == device
    assert Tiers().home(MASTER, 0) == Tiers().device == torch.device("cpu")


def test_only_host_memory_of_the_kinds_that_ask_is_page_locked():
    device = stand_in()
    tiers = Tiers(device=device, on_host={(kind, 0) for kind in (PARAM, MASTER, GRAD)}, pins={MASTER, GRAD})

    def kept(where, kind):
        brought = where.bring(kind, 0, torch.ones(5, device=where.device), torch.float32, copies=False)
        assert torch.equal(brought.cpu(), torch.ones(5))
        return brought.is_pinned()

    kinds = PARAM, MASTER, GRAD, "exp_avg"
    assert [kept(tiers, kind) for kind in kinds] == [False, True, True, True]
    assert [tiers.zeros(kind, 0, 5, torch.float32).get().is_pinned() for kind in kinds] == [False, True, True, True]
    on_device = Tiers(device=device, pins={PARAM, MASTER})
    assert on_device.zeros(MASTER, 0, 5, torch.float32).get().device == device
    on_host = Tiers(pins={PARAM, MASTER})  # the model is on the host: nothing to transfer
    assert not any(kept(on_host, kind) for kind in (PARAM, MASTER))
    assert not on_host.zeros(MASTER, 0, 5, torch.float32).get().is_pinned()


def test_buffers_of_files_are_page_locked_where_the_process_computes_on_a_device(monkeypatch):
    device = stand_in()
    monkeypatch.setattr(devices, "IN_USE", [])
    assert not aligned(5000, pin=True).is_pinned()
    devices.use(device)
    buffer = aligned(5000, pin=True)
    assert buffer.is_pinned()
    assert buffer.data_ptr() % 4096 == 0
    assert not buffer.any()
    assert not aligned(5000).is_pinned()


def test_scratch_is_used_again_in_the_order_of_streams():
    """A buffer that is given back before its last use has ended is not overwritten before that."""
    device = stand_in()
    module, arena = torch.get_device_module(device), Arena(device)
    devices.use(device)
    one, other = module.Stream(device=device), module.Stream(device=device)
    with module.stream(one):
        buffer = arena.take(1000, torch.float32)
        buffer.fill_(1.0)
        target = devices.pinned(1000, torch.float32)
        target.copy_(buffer, non_blocking=True)
        arena.give(buffer)
    with module.stream(other):
        again = arena.take(1000, torch.float32)
        again.fill_(2.0)
    module.synchronize(device)
    assert again is buffer
    assert torch.equal(target, torch.ones(1000))
    assert arena.take(1000, torch.float32, on_host=True).device.type == "cpu"


def test_a_device_that_refuses_is_told_with_its_words(monkeypatch):
    def refuse(model, device):
        msg = "CUDA-capable device(s) is/are busy or unavailable\nmore words"
        raise RuntimeError(msg)

    monkeypatch.setattr(engine_device, "_check_model", refuse)
    with pytest.raises(
        ConfigError, match=r"standin:0 cannot be used: CUDA-capable device\(s\) is/are busy .*exclusive"
    ):
        chosen(monkeypatch, stand_in().type)


def test_what_moves_itself_is_asked_to(monkeypatch):
    """A packed sequence keeps its sizes on the host; a batch of a library has its own way."""
    from collections import UserDict

    class Batch(UserDict):
        def to(self, device):
            return Batch({key: value.to(device) for key, value in self.items()})

    device = stand_in()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    found = move({"a": (packed, [torch.ones(2)]), "b": Batch(x=torch.ones(1)), "c": "word"}, device)
    assert found["a"][0].data.device == device
    assert found["a"][0].batch_sizes.device.type == "cpu"
    assert found["a"][1][0].device == device
    assert found["b"]["x"].device == device
    assert found["c"] == "word"


def test_memory_of_a_started_verb_lives_until_it_is_joined():
    """Its stream may still be at work when the thread that carried it out is done."""
    device = stand_in()
    devices.use(device)
    scratch = torch.ones(8, device=device)
    alive, target = weakref.ref(scratch), torch.zeros(8, device=device)
    handed = stream_sync()
    body = handed.carrying(lambda comm, scratch=scratch: target.add_(scratch))
    del scratch
    thread = threading.Thread(target=body, args=(None,))
    thread.start()
    thread.join()
    del body
    gc.collect()
    assert alive() is not None
    handed.join()
    gc.collect()
    assert alive() is None
    assert target.cpu().tolist() == [1.0] * 8
