"""Configs and models that differ between ranks: the message names the key or the parameter, and both values."""

import re
from functools import partial

import pytest
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.moe import MoE
from mpispeed.plan.own_slices import find_own_cuts

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]
LAST = "ranks [{last}] have another plan than rank 0: "


def refused(world, config=None, model=None):
    """What all ranks are told where the last one has another config or model."""
    is_last = world.rank == world.size - 1
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    settings |= (config or {}) if is_last else {}
    with pytest.raises(ConfigError) as caught:
        mpispeed.initialize(model=model if is_last and model is not None else nn.Linear(4, 4), config=settings)
    assert len(set(world.comm.gather_objects(str(caught.value)))) == 1
    text = str(caught.value)
    head = LAST.format(last=world.size - 1)
    assert text.startswith(head)
    return text.removeprefix(head).replace(f"rank {world.size - 1}", "rank N")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"optimizer": {"type": "Adam", "params": {"lr": 2e-3}}}, "optimizer.params.lr is 0.002 on rank N and 0.001 on "
                                                                  "rank 0; build"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage is 1 on rank N and 0 on rank 0"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1}}}, "optimizer.params.eps is 1 on rank N and "
                                                                            "not there on rank 0"),
        ({"gradient_clipping": 1.0, "steps_per_print": 3}, " (1 more differ); build"),
    ],
)  # fmt: skip
def test_a_key_that_differs_is_named(world, config, said):
    assert said in refused(world, config)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            nn.Linear(4, 5),
            r"the parameter weight is \(5, 4\) float32 on rank N and \(4, 4\) float32 on rank 0 \(1 more",
        ),
        (nn.Linear(4, 4, bias=False), "the parameter bias is not there on rank N and .* on rank 0; build"),
        (nn.Linear(4, 4).half(), "the parameter weight is .* float16 on rank N"),
    ],
)
def test_a_parameter_that_differs_is_named(world, model, said):
    assert re.search(said, refused(world, model=model))


def test_options_of_routers_that_differ_are_named(world):
    def made(k):
        return nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, k=k))

    is_last = world.rank == world.size - 1
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    with pytest.raises(ConfigError, match=f"k of the router 0.deepspeed_moe.gate is 2 on rank {world.size - 1} and 1 "):
        mpispeed.initialize(model=made(2 if is_last else 1), config=settings)


def test_a_key_of_a_service_is_not_shown(world):
    said = refused(world, {"comet": {"enabled": False, "api_key": "hidden"}})
    assert "comet.api_key is " in said
    assert "hidden" not in said


@pytest.mark.parametrize(
    "step",
    [
        "engine.distributed.is_started",  # as at the first call of a job
        "plan.device._own_device",
        "engine.api._config_source",
        "engine.api.accept",
        "engine.api.make_plan",
        "engine.build.slicing.synchronise_norms",
        "engine.build.slicing._find_other_group",
        "plan.own_slices._refuse_sharded_elsewhere",
        "exchange.onebit.attach.OneBitExchange",
    ],
)
def test_an_error_that_nobody_foresaw_on_one_rank_is_raised_on_all(world, step, monkeypatch):
    def fail(*args, **kwargs):
        raise LookupError("planted")

    if step.endswith("is_started"):
        monkeypatch.setattr(f"mpispeed.{step}", lambda: False)
        step = "engine.distributed._check_arguments"
    if world.rank == world.size - 1:
        monkeypatch.setattr(f"mpispeed.{step}", fail)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    if "OneBit" in step:
        settings["optimizer"]["type"] = "OneBitAdam"
    call = partial(mpispeed.initialize, model=nn.Linear(4, 4), config=settings)
    if "own_slices" in step:
        mesh = Mesh(Topology({"pipe": 1, "data": 1, "model": world.size}), world)
        call = partial(find_own_cuts, mesh, nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="planted") as caught:
        call()
    assert len(set(world.comm.gather_objects(str(caught.value)))) == 1
    assert re.search(rf"rank {world.size - 1}\b", str(caught.value))
