"""MuAdam, MuAdamW and MuSGD: as those of the package mup on one process, with schedules that keep ratios."""

import mup
import pytest
import torch
from torch import nn

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import ConfigError
from mpispeed.pipe.module import PipelineModule
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.mup_models import WIDE, MuNet, net, shaped
from tests.zoo import same_bits
from tests.zoo.models import WIDTH, Net, built, samples
from tests.zoo.training import check_equal, config, start, train, train_plain, weights

pytestmark = [pytest.mark.mpi(min_size=1)]

CASES = {
    "MuAdam": (mup.MuAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "MuAdam-amsgrad": (mup.MuAdam, {"lr": 1e-2, "amsgrad": True, "betas": [0.8, 0.95]}),
    "MuAdamW": (mup.MuAdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
    "MuSGD": (mup.MuSGD, {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}),
}


def optimizer(case, **more):
    return {"optimizer": {"type": case.split("-", maxsplit=1)[0], "params": {**CASES[case][1], **more}}}


def settings_of(groups):
    return [(group["lr"], group["weight_decay"], [p.numel() for p in group["params"]]) for group in groups]


@pytest.mark.parametrize(("case", "stage"), on_ranks(sorted(CASES), [0, 1, 2, 3]))
def test_trains_as_the_package_on_one_process(case, stage):
    plain, data = net(), samples(4)
    theirs = CASES[case][0](plain.parameters(), **CASES[case][1])
    engine = start(config(stage, **optimizer(case)), net())
    assert settings_of(engine.optimizer.param_groups) == settings_of(g for g in theirs.param_groups if g["params"])
    train(engine, data)
    train_plain(plain, data, theirs)
    check_equal(engine.module, plain)  # gradients are summed in another order
    engine.destroy()


SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_min_ratio": 0.5},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
    "StepLR": {"step_size": 1, "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 5e-3},
    "OneCycleLR": {"max_lr": 2e-2, "total_steps": 8},
}


@pytest.mark.parametrize("name", in_turn(sorted(SCHEDULES), ranks=(1, 3)))
def test_schedules_keep_the_ratios(name, mpi_tmp_path):
    """With any widths the rates are those of a model of the base's widths, times the factors, also after a restart."""
    said = {"scheduler": {"type": name, "params": SCHEDULES[name]}}
    alike = start(config(1, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, **said), Net())
    engine = start(config(1, **optimizer("MuAdamW"), **said), net())
    factors = [group["lr_factor"] for group in engine.optimizer.param_groups]
    assert sorted(factors) == pytest.approx([1 / 5, 1 / 3, 1])

    def check(batch):
        wanted = [alike.get_lr()[0] * factor for factor in factors]
        assert engine.get_lr() == pytest.approx(wanted, rel=1e-12)
        train(engine, [batch])
        train(alike, [batch])
        assert engine.lr_scheduler.get_last_lr() == engine.get_lr()

    data = samples(5)
    for batch in data[:2]:
        check(batch)
    engine.save_checkpoint(str(mpi_tmp_path / "saved"))
    engine.destroy()
    engine = start(config(2, **optimizer("MuAdamW"), **said), net())
    engine.load_checkpoint(str(mpi_tmp_path / "saved"))
    for batch in data[2:]:
        check(batch)
    engine.destroy()
    alike.destroy()


@pytest.mark.ranks(1, 3)
def test_one_rate_for_all_keeps_the_ratios():
    engine = start(config(1, **optimizer("MuSGD")), net())
    factors = [group["lr_factor"] for group in engine.optimizer.param_groups]
    engine.optimizer.set_lr(0.5)
    assert engine.get_lr() == [0.5 * factor for factor in factors]
    assert sorted(set(factors)) == pytest.approx([3 / 5, 1, 5 / 3, 3, 5])
    engine.destroy()


@pytest.mark.parametrize(
    ("dtype", "where"), in_turn([("bf16", "cpu"), ("fp32", "nvme"), ("fp16", "cpu")], ranks=(1, 2, 3))
)
def test_offloaded_states_change_no_bit(dtype, where, mpi_tmp_path):
    place = {"device": where} | ({"nvme_path": str(mpi_tmp_path)} if where == "nvme" else {})
    found = []
    for zero_more in ({}, {"offload_optimizer": place}):
        settings = config(2, dtype=dtype, reduction="ordered", zero=zero_more, **optimizer("MuAdamW"))
        engine = start(settings, net())
        train(engine, samples(3))
        found.append(weights(engine))
        engine.destroy()
    same_bits(found[1], found[0])


@pytest.mark.ranks(1, 2, 3)
def test_base_shapes_of_a_model_that_was_sharded_when_it_was_made():
    settings = config(3, **optimizer("MuAdamW"))
    with zero.Init(config_dict_or_path=settings):
        model = built(lambda: MuNet(WIDE, 40))
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        shaped(model)
    engine = start(settings, model)
    data, plain = samples(3), net()
    train(engine, data)
    train_plain(plain, data, mup.MuAdamW(plain.parameters(), **CASES["MuAdamW"][1]))
    check_equal(engine.module, plain)
    engine.destroy()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 3])
def test_slices_have_the_rates_of_the_layers(stage):
    policy = {"up": "column", "down": "row"}
    slices = {"tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": policy}}
    data = samples(3)
    model = net()
    engine = start(config(stage, **optimizer("MuSGD"), **slices), model)
    assert engine.module.up.weight.infshape.width_mult() == 3
    train(engine, data)
    plain = net()
    train_plain(plain, data, mup.MuSGD(plain.parameters(), **CASES["MuSGD"][1]))
    rank, own = engine.mpispeed.parts.mesh.index("model"), weights(engine)
    for name, dim in {"up.weight": 0, "up.bias": 0, "down.weight": 1}.items():
        part = plain.get_parameter(name).detach().chunk(2, dim)[rank]
        torch.testing.assert_close(own[name], part, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(own["last.weight"], plain.last.weight.detach(), rtol=2e-5, atol=2e-6)
    engine.destroy()


def layers(width):
    """Layers with two widths; a stage of the last has fewer groups than the others."""
    return [
        nn.Linear(WIDTH, width),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        mup.MuReadout(width, 2),
    ]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["MuAdam", "MuSGD"])
def test_stages_of_a_pipeline_have_the_groups_of_the_model(name):
    bases = [nn.Sequential(*layers(width)) for width in (4, 6)]
    shapes = mup.make_base_shapes(*bases)
    plain = mup.set_base_shapes(built(lambda: nn.Sequential(*layers(WIDE))), shapes)
    model = PipelineModule(built(lambda: layers(WIDE)), num_stages=2, loss_fn=nn.functional.mse_loss)
    own = {key: infshape for key, infshape in shapes.items() if key in dict(model.named_parameters())}
    mup.set_base_shapes(model, own)
    settings = config(1, 12, 3 if mpispeed.comm.get_world_size() == 2 else 1, **optimizer(name))
    engine = start(settings, model)
    lrs = [group["lr"] for group in engine.optimizer.param_groups]
    theirs = CASES[name][0](plain.parameters(), **CASES[name][1])
    assert lrs == [group["lr"] for group in theirs.param_groups if group["params"]]
    mesh, data = engine.mpispeed.parts.mesh, samples(3)
    count = 12 // mesh["data"].size // engine.gradient_accumulation_steps()
    for x, y in data:
        size = mesh["data"].size
        parts = zip(x.split(count), y.split(count), strict=True)
        engine.train_batch(iter([part for at, part in enumerate(parts) if at % size == mesh.index("data")]))
        theirs.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        theirs.step()
    found = weights(engine)
    assert found
    for key, values in found.items():
        torch.testing.assert_close(values, plain.get_parameter(key).detach(), rtol=2e-5, atol=2e-6)
    engine.destroy()


@pytest.mark.ranks(1, 3)
def test_without_widths_it_is_said_what_to_do():
    with pytest.raises(ConfigError, match=r"6 parameters have no infshape \(first.weight, .*set_base_shapes"):
        mpispeed.initialize(model=Net(), config=config(1, **optimizer("MuAdam")))
    model = net()
    model.up.weight.infshape = mup.InfShape([mup.InfDim(2, 4)] * 3)
    with pytest.raises(ConfigError, match=r"up.weight has 3 dims that grow"):
        mpispeed.initialize(model=model, config=config(1, **optimizer("MuSGD")))
