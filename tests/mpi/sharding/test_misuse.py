"""Ways to use cut parameters that are wrong or unusual: each ends in right numbers or in a message."""

import time

import pytest
import torch
from torch import nn

from mpispeed.base.errors import AgreementError, UsageError
from mpispeed.zero import GatheredParameters
from tests.zoo.cut import WIDTH, check_all_cut, one_step, own_batches
from tests.zoo.models import built
from tests.zoo.training import ORDERED, config, start

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(3)]


def two_layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Limited(nn.Linear):
    """Keeps its weights small before it uses them."""

    how = "in place"

    def forward(self, x):
        if self.how == "in place":
            with torch.no_grad():
                self.weight.clamp_(-0.0625, 0.0625)
        elif self.how == "data":
            self.weight.data = self.weight.data.clamp(-0.0625, 0.0625)
        elif self.how == "gathered":
            with GatheredParameters(self.weight, modifier_rank=0), torch.no_grad():
                self.weight.clamp_(-0.0625, 0.0625)
        return super().forward(x)


class Table(nn.Module):
    """Looks up rows whose norm torch limits in the weight itself."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(10, WIDTH, max_norm=0.5)

    def forward(self, x):
        return x + self.rows((x.abs() * 4).long().clamp(0, 9)).mean(1)


def limited(how):
    """A model with one such layer between others."""
    layer = Limited(WIDTH, WIDTH)
    layer.how = how
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))


CASES = [(lambda: limited("in place"), "1.weight"), (lambda: limited("data"), "1.weight"), (Table, "rows")]


@pytest.mark.parametrize("reuse", [None, 0])
@pytest.mark.parametrize(("make", "name"), CASES)
def test_weights_changed_in_forward_are_refused(make, name, reuse):
    engine = start(config(3, **ORDERED, reuse=reuse), built(make))
    told = rf"'{name}.*changed inside.*modifier_rank=0"
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(UsageError, match=told):
            engine(own_batches(engine, 1)[0][0])
    engine.empty_partition_cache()
    check_all_cut(engine)
    engine.destroy()


def test_weights_that_are_changed_in_forward_with_modifier_rank_are_kept():
    engine = start(config(3, **ORDERED), built(lambda: limited("gathered")))
    batch = own_batches(engine, 1)[0]
    with torch.no_grad():
        engine(batch[0])
    with GatheredParameters(engine.module[1].weight), torch.no_grad():
        assert float(engine.module[1].weight.abs().max()) <= 0.0625
    engine.module[1].how = "nothing"
    one_step(engine, batch, 0)
    check_all_cut(engine)
    engine.destroy()


def test_a_module_of_another_engine_is_refused_with_advice():
    engine = start(config(3, **ORDERED), built(two_layers))
    shared = engine.module[0]
    with pytest.raises(UsageError, match=r"'0\.weight' belongs to another engine.*destroy\(\) of that engine"):
        start(config(3, **ORDERED), built(lambda: nn.Sequential(shared, nn.Linear(WIDTH, WIDTH))))
    one_step(engine, own_batches(engine, 1)[0], 0)
    check_all_cut(engine)
    engine.destroy()
    other = start(config(3, **ORDERED), built(lambda: nn.Sequential(shared, nn.Linear(WIDTH, WIDTH))))
    one_step(other, own_batches(other, 1)[0], 0)
    other.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_that_training_would_not_change_are_refused(stage):
    engine = start(config(stage, **ORDERED, zero={"stage3_param_persistence_threshold": 10**6}), built(two_layers))
    batch = own_batches(engine, 1)[0]
    one_step(engine, batch, 0)
    param = next(engine.module.parameters())
    param.data = param.data * 0.5
    with pytest.raises(UsageError, match=r"param\.data = .*GatheredParameters"):
        one_step(engine, batch, 1)
    engine.destroy()


@pytest.mark.parametrize("call", ["destroy", "save_checkpoint"])
def test_a_rank_that_leaves_the_loop_early_is_found_out(call, mpi_tmp_path):
    engine = start(config(3, **ORDERED), built(two_layers))
    batch = own_batches(engine, 1)[0]
    one_step(engine, batch, 0)
    begin = time.monotonic()
    with pytest.raises(AgreementError, match=rf"rank 0 waits for all ranks to call engine\.{call}"):
        if engine.global_rank == 0:
            engine.destroy() if call == "destroy" else engine.save_checkpoint(str(mpi_tmp_path))
        else:
            one_step(engine, batch, 1)
    assert time.monotonic() - begin < 30
