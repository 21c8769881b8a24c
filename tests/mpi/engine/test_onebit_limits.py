"""1-bit optimizers: what is refused so that ranks stay alike, and states that do not fit."""

import copy

import h5py
import pytest
import torch

import mpispeed
from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.zero import GatheredParameters, safe_set_full_grad
from tests.helpers.onebit_training import (
    FREEZE,
    NAMES,
    ZERO_ONE,
    engine_of,
    is_same_on_ranks,
    run_step,
    samples,
    settings,
    states_of,
)
from tests.zoo.models import Mlp
from tests.zoo.training import own_part

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_codes_nothing(name):
    engine = engine_of(name)
    for batch in samples(FREEZE + 8):
        run_step(engine, batch)
    assert not any(values.any() for key, values in states_of(engine).items() if "worker" in key or "server" in key)


def test_parameters_are_edited_only_where_ranks_have_the_same(comm):
    engine = engine_of("ZeroOneAdam")
    for batch in samples(ZERO_ONE["var_freeze_step"] + 3):
        run_step(engine, batch)
    weight = engine.module.last.weight
    with (
        pytest.raises(UsageError, match=r"engine\.eval\(\)"),
        GatheredParameters(weight, modifier_rank=0),
        torch.no_grad(),
    ):
        weight.mul_(2.0)
    engine.eval()
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.5)
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    assert is_same_on_ranks(engine)
    engine.train()
    run_step(engine, samples(1)[0])


@pytest.mark.ranks(2)
def test_coded_gradients_are_not_set(comm):
    engine = engine_of("OneBitAdam", zero_optimization={"stage": 0, "overlap_comm": True})
    for batch in samples(FREEZE + 3):
        run_step(engine, batch)
    engine.backward(engine(*own_part(engine, samples(1)[0])))
    weight = engine.module.last.weight
    with pytest.raises(UsageError, match="overlap_comm to false"):
        safe_set_full_grad(weight, torch.zeros_like(weight))
    engine.zero_grad()  # what was coded is thrown away, and errors of it
    assert not any(values.any() for key, values in states_of(engine).items() if "worker" in key)


def damage(path, change):
    """Rewrite every dataset of errors of workers as `change` says."""
    for file in path.glob("*.h5"):
        with h5py.File(file, "r+") as found:
            names: list[str] = []
            found.visit(lambda name, names=names: names.append(name) if name.endswith("worker_error") else None)
            for name in names:
                values, attributes = found[name][()], dict(found[name].attrs)
                del found[name]
                found[name] = change(values)
                found[name].attrs.update(attributes)


@pytest.mark.parametrize("change", [
    lambda x: x[:0], lambda x: x[..., :0], lambda x: x.reshape(-1), lambda x: x.repeat(40, 0),
], ids=["no rows", "no elements", "flat", "many rows"])  # fmt: skip
def test_errors_of_other_shapes_are_refused(change, mpi_tmp_path, comm):
    engine = engine_of("OneBitAdam", checkpoint={"load_verify": "off"})
    for batch in samples(FREEZE + 3):
        run_step(engine, batch)
    engine.save_checkpoint(str(mpi_tmp_path), tag="a")
    if comm.rank == 0:
        damage(mpi_tmp_path / "a", change)
    comm.barrier()
    with pytest.raises(CheckpointError):
        engine_of("OneBitAdam", checkpoint={"load_verify": "off"}).load_checkpoint(str(mpi_tmp_path), "a")


def test_a_new_parameter_after_the_warm_up_is_refused(mpi_tmp_path, comm):
    engine = engine_of("OneBitAdam")
    for batch in samples(FREEZE + 3):
        run_step(engine, batch)
    engine.save_checkpoint(str(mpi_tmp_path), tag="a")
    larger = Mlp()
    larger.head = torch.nn.Parameter(torch.ones(3))
    other, *_ = mpispeed.initialize(model=larger, config=copy.deepcopy(settings("OneBitAdam")))
    with pytest.raises(CheckpointError, match=r"head .*warm-up of OneBitAdam"):
        other.load_checkpoint(str(mpi_tmp_path), "a", load_module_strict=False)
