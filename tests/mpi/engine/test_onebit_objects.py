"""1-bit optimizers as objects: the same bits as by JSON, and the refusals."""

import logging

import pytest
import torch

from mpispeed.base.errors import ConfigError, UnsupportedOption, UsageError
from mpispeed.optim import OnebitAdam, OnebitLamb, ZeroOneAdam
from tests.helpers.covering import on_ranks
from tests.helpers.onebit_training import NAMES, PARAMS, engine_of, run_step, samples, settings
from tests.zoo import same_bits
from tests.zoo.models import Mlp
from tests.zoo.training import start, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2)]
CLASSES = {"OneBitAdam": OnebitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OnebitLamb}


def by_object(name, stage, **more):
    model, given = Mlp(), settings(name, stage, reduction="ordered", **more)
    given.pop("optimizer")
    optimizer = CLASSES[name](model.parameters(), deepspeed=None, **PARAMS[name])
    return start(given, model, optimizer=optimizer), optimizer


@pytest.mark.parametrize(("name", "stage"), on_ranks(NAMES, [0, 1], ranks=(1, 2)))
def test_the_same_bits_as_by_json(name, stage, mpi_tmp_path):
    engine, optimizer = by_object(name, stage)
    other, data = engine_of(name, stage, reduction="ordered"), samples(14)
    assert engine.optimizer is optimizer
    assert engine.plan.placing == other.plan.placing
    losses = [[run_step(one, batch) for batch in data] for one in (engine, other)]
    assert losses[0] == losses[1]
    same_bits(weights(engine), weights(other))
    engine.save_checkpoint(str(mpi_tmp_path))
    other.load_checkpoint(str(mpi_tmp_path))  # the state is that of the JSON's
    assert other.optimizer.param_groups[0]["lr"] == PARAMS[name]["lr"]
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OneBitLamb"])
def test_a_callable_is_told_to_pass_the_object(name):
    given = settings(name, 1)
    given.pop("optimizer")
    with pytest.raises(ConfigError, match=r"whole|pass the optimizer itself"):
        start(given, Mlp(), optimizer=lambda params: CLASSES[name](params, **PARAMS[name]))


def test_refusals(caplog):
    params = list(Mlp().parameters())
    with pytest.raises(UsageError, match="needs the other ranks"):
        OnebitAdam(params).step()
    with pytest.raises(ConfigError, match="gradient_clipping"):
        OnebitLamb(params, max_grad_norm=1.0)
    with pytest.raises(UnsupportedOption, match="amsgrad"):
        ZeroOneAdam(params, amsgrad=True)
    with pytest.raises(ConfigError, match="freeze_step"):
        OnebitAdam(params, freeze_step=0)

    class Mine(OnebitAdam):
        pass

    with pytest.raises(ConfigError, match="derived from OnebitAdam"):
        start({"train_micro_batch_size_per_gpu": 1}, model := Mlp(), optimizer=Mine(model.parameters()))
    logger = logging.getLogger("mpispeed")
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.WARNING):
            OnebitAdam(params)
            assert not caplog.messages
            OnebitAdam(params, cuda_aware=True, comm_backend_name="compressed")
    finally:
        logger.propagate = before
    # the handler may stand at two loggers
    assert {text.partition(" ")[0] for text in caplog.messages} == {"cuda_aware", "comm_backend_name"}


def test_groups_and_schedules_of_torch():
    model = Mlp()
    first, *rest = model.parameters()
    optimizer = OnebitAdam([{"params": [first], "non_freeze": True}, {"params": rest, "lr": 1e-2}], freeze_step=2)
    given = settings("OneBitAdam", 0)
    given.pop("optimizer")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = start(given, model, optimizer=optimizer, lr_scheduler=schedule)
    for batch in samples(3):
        run_step(engine, batch)
    assert engine.get_lr() == pytest.approx([1e-3 / 8, 1e-2 / 8])
    engine.destroy()
