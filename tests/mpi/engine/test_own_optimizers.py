"""Our own optimizers, passed in as objects: as alone, at every stage, in host memory and in files."""

import logging

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.optim import CPUAdagrad, CPUAdam, CPULamb, CPULion, FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.foreign import Foreign
from mpispeed.optim.torch_rule import TorchRule
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import check_equal, config, start, train, train_plain, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]

CASES = {
    "CPUAdam": (CPUAdam, {"betas": (0.8, 0.95)}),
    "CPUAdam-L2": (CPUAdam, {"adamw_mode": False, "bias_correction": False}),
    "FusedAdam": (FusedAdam, {"eps": 1e-6}),
    "CPUAdagrad": (CPUAdagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "FusedAdagrad": (FusedAdagrad, {}),
    "CPULion": (CPULion, {"betas": (0.9, 0.95)}),
    "FusedLion": (FusedLion, {}),
    "CPULamb": (CPULamb, {"betas": (0.8, 0.95), "max_coeff": 2.0}),
    "FusedLamb": (FusedLamb, {"bias_correction": False}),
}


def groups_of(model):
    """Matrices with decay, vectors without and with another lr."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "lr": 3e-3},
    ]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.deepspeed_row("a2")
@pytest.mark.parametrize(("name", "stage"), on_ranks(sorted(CASES), [0, 1, 2, 3], ranks=(2, 3)))
def test_trains_as_the_optimizer_alone(name, stage):
    cls, params = CASES[name]
    model, plain = Net(), Net()
    client = cls(groups_of(model), lr=1e-2, **params)
    engine = start(config(stage), model, optimizer=client, lr_scheduler=halving(client))
    assert engine.optimizer is engine.basic_optimizer is client
    assert engine.optimizer_name() == cls.__name__
    data = samples(3)
    train(engine, data)
    assert engine.get_lr() == [group["lr"] for group in client.param_groups] == pytest.approx([1e-2 / 8, 3e-3 / 8])
    alone = cls(groups_of(plain), lr=1e-2, **params)
    train_plain(plain, data, alone, after=halving(alone).step)
    check_equal(engine.module, plain)  # gradients are summed in another order
    assert client.state_dict()["state"] == {}
    engine.destroy()


OFFLOAD = {
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme", "buffer_count": 4}, "sub_group_size": 600},
    "ratio": {"offload_optimizer": {"device": "nvme", "ratio": 0.5}},
}


@pytest.mark.deepspeed_row("a2", "a8")
@pytest.mark.parametrize(
    ("dtype", "stage", "where"),
    in_turn(
        [
            ("fp32", 1, "cpu"),
            ("bf16", 1, "nvme"),
            ("fp32", 2, "nvme"),
            ("bf16", 3, "cpu"),
            ("fp16", 3, "nvme"),
            ("fp32", 3, "ratio"),
        ],
        ranks=(1, 4, 2, 2),
    ),
)
def test_offloaded_and_resumed_with_the_bits_of_the_json(dtype, stage, where, mpi_tmp_path):
    """The ZeRO-Offload tutorial; the same rule by its name in the config comes to the same bits."""
    settings = config(stage, dtype=dtype, gradient_clipping=0.3, reduction="ordered", zero=OFFLOAD[where])
    if where != "cpu":  # a folder that is not there yet
        settings["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(mpi_tmp_path / "disk")

    def make(by, seed=11):
        model, more = Net(seed), {}
        if by == "client":
            more["optimizer"] = CPUAdam(groups_of(model), lr=1e-2)
            return start(settings, model, **more)
        own = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        return start(settings | own, model, model_parameters=groups_of(model))

    data = samples(4)
    results = []
    for by in ("client", "json"):
        engine = make(by)
        train(engine, data[:2])
        if by == "client":
            engine.save_checkpoint(str(mpi_tmp_path / "saved"))
        train(engine, data[2:])
        results.append(weights(engine))
        engine.destroy()
    for by in ("client", "json"):
        engine = make(by, seed=99)
        engine.load_checkpoint(str(mpi_tmp_path / "saved"))
        train(engine, data[2:])
        results.append(weights(engine))
        engine.destroy()
    for result in results[1:]:
        same_bits(result, results[0])


TORCH_ADAM = [
    ("Adam", {}, "fp32", 1, "nvme"),
    ("AdamW", {"amsgrad": True}, "bf16", 2, "nvme"),
    ("Adam", {"adam_w_mode": False, "foreach": True}, "fp16", 3, "nvme"),
    ("AdamW", {"maximize": True}, "fp32", 3, "ratio"),
    ("Adam", {"amsgrad": True, "adam_w_mode": False}, "fp32", 2, "cpu"),
    ("AdamW", {}, "bf16", 3, "nvme"),
]


@pytest.mark.deepspeed_row("a12")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("name", "params", "dtype", "stage", "where"), in_turn(TORCH_ADAM, ranks=(1, 2, 3)))
def test_torch_adam_has_the_bits_of_torch_in_memory_and_in_files(name, params, dtype, stage, where, mpi_tmp_path):
    """Also where one goes on with what the other saved; an object of the script is torch itself."""
    memory = config(stage, dtype=dtype, gradient_clipping=0.3, reduction="ordered")
    files = config(stage, dtype=dtype, gradient_clipping=0.3, reduction="ordered", zero=OFFLOAD[where])
    if where != "cpu":
        files["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(mpi_tmp_path / "disk")
    section = {"optimizer": {"type": name, "params": {"lr": 1e-2, "torch_adam": True, **params}}}

    def make(settings, seed=11):
        model = Net(seed)
        return start(settings | section, model, model_parameters=groups_of(model))

    def client():
        model, cls = Net(11), torch.optim.AdamW if params.get("adam_w_mode", True) else torch.optim.Adam
        theirs = {key: value for key, value in params.items() if key != "adam_w_mode"}
        return start(memory, model, optimizer=cls(groups_of(model), lr=1e-2, **theirs))

    def finish(engine):
        train(engine, data[2:])
        found = weights(engine)
        engine.destroy()
        return found

    data, results = samples(4), []
    for tag, engine in (("files", make(files)), ("memory", make(memory)), ("", client())):
        assert engine.parts.params.tiers.is_swapping == (tag == "files" and where != "cpu")
        train(engine, data[:2])
        if tag:
            engine.save_checkpoint(str(mpi_tmp_path / tag))
        results.append(finish(engine))
    for tag, settings in (("files", memory), ("memory", files), ("files", files)):
        engine = make(settings, seed=99)
        engine.load_checkpoint(str(mpi_tmp_path / tag))
        results.append(finish(engine))
    for result in results[1:]:
        same_bits(result, results[0])


# In `groups_of`, settings of "second" are those of the second group only.
TORCH = [
    ("Adam", {"amsgrad": True}, "fp32", 1, "nvme"),
    ("NAdam", {"momentum_decay": 0.1}, "fp32", 3, "nvme"),
    ("SGD", {"second": {"momentum": 0.9, "dampening": 0.5}}, "bf16", 2, "nvme"),
    ("Rprop", {}, "fp32", 2, "nvme"),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, "bf16", 3, "nvme"),
    ("RMSprop", {"momentum": 0.5, "second": {"centered": True}}, "fp16", 1, "nvme"),
    ("ASGD", {"t0": 1.0, "lambd": 0.1}, "fp32", 3, "ratio"),
    ("AdamW", {"maximize": True, "foreach": True}, "bf16", 3, "nvme"),
    ("Adadelta", {}, "fp32", 2, "nvme"),
    ("RAdam", {}, "fp32", 1, "nvme"),
    ("SGD", {}, "fp32", 3, "nvme"),
    ("Adamax", {}, "bf16", 2, "nvme"),
]


@pytest.mark.deepspeed_row("a2")
@pytest.mark.parametrize(("name", "params", "dtype", "stage", "where"), in_turn(TORCH, ranks=(2, 3, 1)))
def test_objects_of_torch_have_the_same_bits_in_memory_and_in_files(name, params, dtype, stage, where, mpi_tmp_path):
    """Also where one goes on with what the other saved, with a schedule on the object's groups."""
    shared = {"gradient_clipping": 0.3, "reduction": "ordered", "zero_allow_untested_optimizer": True}
    memory, files = config(stage, dtype=dtype, **shared), config(stage, dtype=dtype, zero=OFFLOAD[where], **shared)
    files["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(mpi_tmp_path / "disk")
    theirs = {key: value for key, value in params.items() if key != "second"}

    def make(settings, seed=11):
        model = Net(seed)
        groups = groups_of(model)
        if name == "Rprop":
            groups[0].pop("weight_decay")
        client = getattr(torch.optim, name)([groups[0], groups[1] | params.get("second", {})], lr=1e-2, **theirs)
        engine = start(settings, model, optimizer=client, lr_scheduler=halving(client))
        assert engine.parts.params.tiers.is_swapping == isinstance(engine.parts.optimization.rule, TorchRule)
        assert engine.basic_optimizer is client
        return engine

    def finish(engine):
        train(engine, data[2:])
        found = weights(engine)
        engine.destroy()
        return found

    data, results = samples(4), []
    for tag, settings in (("memory", memory), ("files", files)):
        engine = make(settings)
        train(engine, data[:2])
        engine.save_checkpoint(str(mpi_tmp_path / tag))
        if tag == "files":
            shown = engine.basic_optimizer.state
            assert {row["step"] for row in shown.values()} == {2 - engine.skipped_steps}
            assert set().union(*shown.values()) - {"step"} == set(engine.parts.optimization.rule.state_names)
            engine.destroy()
            assert engine.basic_optimizer.state == {}
        else:
            results.append(finish(engine))
    for tag, settings in (("files", memory), ("memory", files)):
        engine = make(settings, seed=99)
        engine.load_checkpoint(str(mpi_tmp_path / tag))
        results.append(finish(engine))
    for result in results[1:]:
        same_bits(result, results[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_that_clip_by_themselves_need_whole_tensors(stage):
    model = Net()
    for more in ({}, {"zero_allow_untested_optimizer": True}):
        with pytest.raises(ConfigError, match=r"looks at whole .* use stage 0, or max_grad_norm 0 and the key"):
            start(config(stage, **more), model, optimizer=FusedLamb(model.parameters(), max_grad_norm=1.0))


def test_groups_that_clip_by_themselves():
    model, plain = Net(), Net()
    engine = start(config(0), model, optimizer=FusedLamb(groups_of(model), lr=1e-2, max_grad_norm=0.1))
    data = samples(3)
    train(engine, data)
    train_plain(plain, data, FusedLamb(groups_of(plain), lr=1e-2, max_grad_norm=0.1))
    check_equal(engine.module, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_ratios_of_lamb(stage):
    """A client's object shows the ratios of the engine's steps: at stage 0 of all parameters."""
    model, plain = Net(), Net()
    client, alone = CPULamb(model.parameters(), lr=1e-2), CPULamb(plain.parameters(), lr=1e-2)
    engine = start(config(stage), model, optimizer=client)
    data = samples(1)
    train(engine, data)
    train_plain(plain, data, alone)
    wanted, found = sorted(alone.get_lamb_coeffs()), sorted(client.get_lamb_coeffs())
    assert len(found) == len(wanted) or stage
    for ratio in found:
        assert any(ratio == pytest.approx(other, rel=1e-4) for other in wanted)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "where"), in_turn([(1, "nvme"), (3, "nvme"), (2, "cpu"), (3, "ratio")], ranks=(4, 2, 1, 2))
)
def test_lamb_offloaded_and_resumed(stage, where, mpi_tmp_path):
    """Where states rest, and chunks of swap files that cut parameters, change no bit but by the order of sums."""
    settings = config(stage, gradient_clipping=0.3, reduction="ordered")
    settings |= {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
    data, results = samples(4), []
    for kind in ({}, OFFLOAD[where]):
        own = settings | {"zero_optimization": settings["zero_optimization"] | kind}
        if where != "cpu" and kind:
            own["zero_optimization"]["offload_optimizer"] |= {"nvme_path": str(mpi_tmp_path / "disk")}
        engine = start(own, Net(11))
        train(engine, data[:2])
        engine.save_checkpoint(str(mpi_tmp_path / "saved"), overwrite=True)
        train(engine, data[2:])
        results.append(weights(engine))
        engine.destroy()
        engine = start(own, Net(99))
        engine.load_checkpoint(str(mpi_tmp_path / "saved"))
        train(engine, data[2:])
        same_bits(weights(engine), results[-1])
        engine.destroy()
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-7)


def test_the_object_is_the_handle_while_the_engine_lives(caplog):
    model, plain = Net(), Net()
    client = FusedAdam(model.parameters(), lr=1e-2)
    model(*samples(1)[0]).backward()
    client.step()
    plain.load_state_dict(model.state_dict())
    client.zero_grad()
    engine = start(config(2, fp16={"enabled": True, "initial_scale_power": 4}), model, optimizer=client)
    assert "comes with state of earlier steps, which is dropped" in caplog.text
    assert engine.optimizer.optimizer is client
    with pytest.raises(UsageError, match=r"engine\.step\(\)"):
        client.step()
    saved = client.state_dict()
    group = client.param_groups[0]
    group["lr"] = 0.0
    before = weights(engine)
    train(engine, samples(1))
    same_bits(weights(engine), before)
    client.load_state_dict(saved)
    assert client.param_groups[0] is group
    assert engine.get_lr() == [1e-2]
    train(engine, samples(1))
    assert any(not torch.equal(before[name], now) for name, now in weights(engine).items())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        client.load_state_dict(saved | {"state": {0: {"step": 1}}})
    assert "hyper-parameters only" in caplog.text
    engine.destroy()
    model.float()
    model(*samples(1)[0]).backward()
    client.step()  # is the client's own again


@pytest.mark.filterwarnings("error")
def test_schedules_of_the_object_see_its_updates():
    model = Net()
    client = CPUAdam(model.parameters(), lr=1e-2)
    engine = start(config(1, fp16={"enabled": True, "initial_scale_power": 4}), model, optimizer=client)
    schedule = halving(client)
    train(engine, samples(1))
    schedule.step()
    assert engine.get_lr() == [5e-3]
    engine.destroy()


def test_the_object_over_a_model_that_was_born_cut():
    settings = config(3)
    with mpispeed.zero.Init(config_dict_or_path=settings):
        model = Net()
    engine = start(settings, model, optimizer=CPUAdam(model.parameters(), lr=1e-2))
    assert not isinstance(engine.parts.optimization.rule, Foreign)
    plain, data = Net(), samples(2)
    train(engine, data)
    train_plain(plain, data, CPUAdam(plain.parameters(), lr=1e-2))
    check_equal(engine.module, plain)
    engine.destroy()


def test_a_subclass_may_do_anything():
    class Mine(CPUAdam):
        pass

    model = Net()
    with pytest.raises(AssertionError, match=r"optimizer Mine is not among those tested.*zero_allow_untested"):
        start(config(1), model, optimizer=Mine(model.parameters()))
    engine = start(config(0), model, optimizer=Mine(model.parameters()))
    assert isinstance(engine.parts.optimization.rule, Foreign)
    engine.destroy()
