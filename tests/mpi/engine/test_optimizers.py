"""Every optimizer trains as in plain torch, at every stage, with groups, frozen, unused and tiny parameters."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.optim import CPULamb, CPULion
from tests.helpers.counting import Counting, found_states
from tests.helpers.counting import groups_of as counting_groups
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, check_equal, config, own_part, start, train, train_plain, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])

CLASSES = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "adagrad": (torch.optim.Adagrad, {}),
}
UNTESTED = {"zero_allow_untested_optimizer": True}


def groups_of(model):
    """Matrices with decay, vectors without and with another lr, and an empty group."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [], "lr": 7.0},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


@pytest.mark.parametrize(("name", "stage"), on_ranks(sorted(CLASSES), [0, 1, 2]))
def test_client_optimizers_with_groups(name, stage):
    cls, params = CLASSES[name]
    model, plain = Net(), Net()
    client = cls(groups_of(model), lr=1e-2, **params)
    engine = start(config(stage, gradient_clipping=0.3, **UNTESTED), model, optimizer=client)
    assert engine.optimizer is client
    assert engine.basic_optimizer is client
    assert len(client.param_groups) == 3  # the empty group stays: schedulers count groups
    assert engine.get_lr() == [1e-2, 7.0, 3e-3]
    assert engine.optimizer_name() == cls.__name__
    data = samples(5)
    train(engine, data)
    norms = train_plain(plain, data, cls(groups_of(plain), lr=1e-2, **params), clip=0.3).norms
    check_equal(engine.module, plain)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-4)
    engine.destroy()


@STAGES
@pytest.mark.parametrize(
    ("json", "cls", "params"),
    [
        ({"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9}),
        ({"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-6}}, torch.optim.AdamW, {"eps": 1e-6}),
        ({"type": "RMSprop", "params": {"lr": 1e-2, "alpha": 0.9}}, torch.optim.RMSprop, {"alpha": 0.9}),
        (
            {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "betas": [0.8, 0.9]}},
            torch.optim.Adam,
            {"betas": (0.8, 0.9)},
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) and "type" in value else "",
)
def test_optimizers_of_the_json_with_groups(json, cls, params, stage):
    model, plain = Net(), Net()
    engine = start(config(stage, optimizer=json, **UNTESTED), model, model_parameters=groups_of(model))
    assert engine.get_lr() == [1e-2, 3e-3]
    data = samples(5)
    train(engine, data)
    train_plain(plain, data, cls(groups_of(plain), lr=1e-2, **params))
    check_equal(engine.module, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("json", "cls", "params"),
    [
        ({"type": "Adagrad", "params": {"lr": 1e-2, "lr_decay": 0.1}}, torch.optim.Adagrad, {"lr_decay": 0.1}),
        ({"type": "Lion", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}}, CPULion, {"betas": (0.9, 0.95)}),
    ],
    ids=["Adagrad", "Lion"],
)
def test_adagrad_and_lion_need_no_key_with_cut_states(json, cls, params, stage):
    model, plain = Net(), Net()
    engine = start(config(stage, optimizer=json), model, model_parameters=groups_of(model))
    data = samples(5)
    train(engine, data)
    train_plain(plain, data, cls(groups_of(plain), lr=1e-2, **params))
    check_equal(engine.module, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lamb_takes_norms_over_all_parts(stage):
    section = {"type": "Lamb", "params": {"lr": 1e-2, "max_coeff": 5.0}}
    model, plain = Net(), Net()
    engine = start(config(stage, optimizer=section), model, model_parameters=groups_of(model))
    data = samples(5)
    train(engine, data)
    train_plain(plain, data, CPULamb(groups_of(plain), lr=1e-2, max_coeff=5.0))
    check_equal(engine.module, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("way", ["client", "json"])
def test_untested_optimizers_need_the_key(way, stage):
    model = Net()
    more = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if way == "client" else {}
    section = {} if way == "client" else {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        start(config(stage, **section), model, **more)
    start(config(stage, **section, **UNTESTED), model, **more).destroy()  # the refusal left nothing behind


def test_subclasses_of_tested_optimizers_are_untested():
    adam = type("Adam", (torch.optim.Adam,), {})
    model = Net()
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        start(config(1), model, optimizer=adam(model.parameters()))


@STAGES
def test_frozen_parameters_stay(stage):
    model, plain = Net(), Net()
    for net in (model, plain):
        net.first.weight.requires_grad_(False)
        net.norm.bias.requires_grad_(False)
    before = weights(model)
    engine = start(config(stage, **ADAM), model)
    data = samples(4)
    train(engine, data)
    trained = [p for p in plain.parameters() if p.requires_grad]
    train_plain(plain, data, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0))
    check_equal(engine.module, plain)
    after = weights(engine)
    for name in ("first.weight", "norm.bias"):
        assert torch.equal(after[name], before[name])
    engine.destroy()


class Branches(nn.Module):
    """`never` is not used, `often` in every second call, `scale` is a 0-dim parameter, `none` has no elements."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.often = nn.Parameter(torch.tensor([0.25]))
        self.none = nn.Parameter(torch.empty(0))
        self.calls = 0

    def forward(self, x, y):
        self.calls += 1
        loss = self.net(x, y) * self.scale + self.none.sum()
        return loss + self.often.square().sum() if self.calls % 2 else loss


@STAGES
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_unused_conditional_tiny_and_empty_parameters(stage, is_overlapped):
    model, plain = Branches(), Branches()
    for net in (model, plain):
        nn.init.constant_(net.never.weight, 0.5)
        nn.init.constant_(net.never.bias, -0.5)
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}
    settings = config(stage, **section)
    settings["zero_optimization"]["overlap_comm"] = is_overlapped
    engine = start(settings, model)
    data = samples(6)
    train(engine, data)
    train_plain(plain, data, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01))
    check_equal(engine.module, plain)
    engine.destroy()


@STAGES
def test_one_tiny_parameter_on_many_ranks(stage):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    client = torch.optim.RMSprop(model.parameters(), lr=0.1)
    engine = start(config(stage, **UNTESTED), model, optimizer=client)
    plain = nn.Linear(1, 1, bias=False)
    nn.init.constant_(plain.weight, 2.0)
    reference = torch.optim.RMSprop(plain.parameters(), lr=0.1)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 1)).square().mean())
        engine.step()
        reference.zero_grad()
        plain(torch.ones(2, 1)).square().mean().backward()
        reference.step()
    torch.testing.assert_close(model.weight, plain.weight)
    engine.destroy()


def test_a_parameter_listed_twice_is_named():
    model = Net()
    twice = [{"params": list(model.parameters())}, {"params": [model.norm.weight]}]
    with pytest.raises(AssertionError, match=r"norm\.weight is listed twice"):
        start(config(**ADAM), model, model_parameters=twice)


def test_foreign_parameters_and_nothing_to_train_are_refused():
    model = Net()
    with pytest.raises(AssertionError, match="do not belong to the model"):
        start(config(**ADAM), model, model_parameters=[*model.parameters(), nn.Parameter(torch.ones(2))])
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(AssertionError, match="no trainable parameter"):
        start(config(**ADAM), model)


@pytest.mark.parametrize(
    ("name", "dtype", "stage"), on_ranks(["sgd", "rmsprop"], ["fp32", "bf16"], [0, 1, 2], ranks=(1, 3))
)
def test_foreign_state_returns_from_a_checkpoint_at_every_stage(name, dtype, stage, mpi_tmp_path):
    cls, params = CLASSES[name]

    def make(at, seed=11):
        model = Net(seed)
        groups = groups_of(model)
        groups[2]["momentum"] = 0.0  # this group has other slots than the first
        groups[2]["nesterov"] = False
        client = cls(groups, lr=1e-2, **({**params, "nesterov": True} if name == "sgd" else params))
        return start(config(at, dtype=dtype, reduction="ordered", **UNTESTED), model, optimizer=client)

    data = samples(6)
    straight = make(1)
    train(straight, data)
    first = make(1)
    train(first, data[:3])
    first.save_checkpoint(str(mpi_tmp_path))
    second = make(stage, seed=99)
    second.load_checkpoint(str(mpi_tmp_path))
    train(second, data[3:])
    if dtype == "fp32" or stage:
        same_bits(weights(second), weights(straight.module))
    else:  # sums over ranks are rounded to 16 bits once more
        check_equal(second.module, straight.module, rtol=2**-6, atol=1e-3)
    for engine in (straight, first, second):
        engine.destroy()


@pytest.mark.deepspeed_row("a4")
@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3], ranks=(1, 3, 4, 2)))
def test_counts_and_flags_of_a_client_return_from_a_checkpoint(stage, comm, mpi_tmp_path):
    data, engines = samples(4), []
    for seed in (11, 99):
        model = Net(seed)
        settings = config(stage, reduction="ordered", **UNTESTED)
        engines.append(start(settings, model, optimizer=Counting(counting_groups(model))))
    first, second = engines
    train(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    second.load_checkpoint(str(mpi_tmp_path))
    assert found_states(second.basic_optimizer) == found_states(first.basic_optimizer)
    assert any(map(any, comm.gather_objects(found_states(first.basic_optimizer))))
    for engine in engines:
        train(engine, data[2:])
    same_bits(weights(second), weights(first))
    for engine in engines:
        engine.destroy()


@STAGES
def test_fresh_optimizer_state_counts_its_own_updates(stage, mpi_tmp_path):
    data = samples(5)
    first = start(config(stage, **ADAM))
    train(first, data[:3])
    first.save_checkpoint(str(mpi_tmp_path))

    second = start(config(stage, **ADAM), Net(seed=99))
    second.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    assert second.global_steps == 3
    state = second.parts.optimization.states
    assert not any(tensor.any() for unit in second.parts.table.units for tensor in state.of(unit).values())
    plain = Net()
    plain.load_state_dict(first.module.state_dict())
    train(second, data[3:])
    train_plain(plain, data[3:], torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0))
    check_equal(second.module, plain)

    # and the count survives the next checkpoint
    second.save_checkpoint(str(mpi_tmp_path))
    third = start(config(stage, **ADAM), Net(seed=98))
    third.load_checkpoint(str(mpi_tmp_path))
    train(third, data[:1])
    train(second, data[:1])
    same_bits(weights(third.module), weights(second))
    for engine in (first, second, third):
        engine.destroy()


def test_another_optimizer_starts_afresh(mpi_tmp_path):
    data = samples(4)
    first = start(config(1, **ADAM))
    train(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    section = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}}, **UNTESTED}
    second = start(config(1, **section), Net(seed=99))
    second.load_checkpoint(str(mpi_tmp_path))
    plain = Net()
    plain.load_state_dict(first.module.state_dict())
    train(second, data[2:])
    train_plain(plain, data[2:], torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9, dampening=0.5))
    check_equal(second.module, plain)
    for engine in (first, second):
        engine.destroy()


WIRES = [(None, None), ("fp32", "same"), ("bf16", None), ("fp16", None)]


@pytest.mark.parametrize(
    ("stage", "dtype", "sums"), on_ranks([0, 1, 2], ["fp16", "bf16"], WIRES, ranks=(1, 3)), ids=str
)
def test_dtype_cocktail(stage, dtype, sums):
    wire, accumulate = sums
    if accumulate and dtype == "bf16" and stage == 0:
        with pytest.raises(AssertionError, match="grad_accum_dtype"):
            start(config(0, **ADAM, bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}))
        return
    section = {dtype: {"enabled": True}, "gradient_accumulation_steps": 1}
    if dtype == "fp16":
        section[dtype]["initial_scale_power"] = 4
    if wire is not None:
        section["communication_data_type"] = wire
    if accumulate is not None:
        section["data_types"] = {"grad_accum_dtype": dtype}
    engine = start(config(stage, **ADAM, **section))
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert engine.communication_data_type == names[wire or dtype]
    assert {unit.states.wire for unit in engine.parts.table.units} == {names[wire or dtype]}
    assert engine.get_data_types() == (names[dtype], torch.float32 if accumulate is None else names[dtype])
    data = samples(3)
    losses = train(engine, data)
    plain = Net()
    train_plain(plain, data, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0))
    assert engine.skipped_steps == 0
    # Adam moves every weight by about lr per step, whatever the size of its gradient
    for name, ours in weights(engine).items():
        reference = dict(plain.named_parameters())[name]
        assert (ours.float() - reference).abs().mean() < 5e-3, name
    assert all(loss == loss for loss in losses)
    engine.destroy()


@STAGES
@pytest.mark.parametrize("averaging", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}, {}])
def test_averaging_keys_do_not_change_the_mean(stage, averaging):
    model, plain = Net(), Net()
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(stage, **UNTESTED, **averaging)
    settings["zero_optimization"]["reduce_scatter"] = False  # the keys are refused with it
    engine = start(settings, model, optimizer=client)
    assert engine.postscale_gradients() is ("prescale_gradients" not in averaging)
    data = samples(3)
    train(engine, data)
    train_plain(plain, data, torch.optim.SGD(plain.parameters(), lr=0.1))
    check_equal(engine.module, plain)
    engine.destroy()


@STAGES
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_norm_is_that_of_torch(stage, clip):
    model, plain = Net(), Net()
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = start(config(stage, gradient_clipping=clip, **UNTESTED), model, optimizer=client)
    assert engine.get_global_grad_norm() is None
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in samples(3):
        train(engine, [batch])
        (norm,) = train_plain(plain, [batch], reference, clip=clip).norms
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
        plain.load_state_dict(engine.module.state_dict())  # so that differences do not add up
    engine.destroy()


@STAGES
def test_two_backward_passes_of_one_step_add_up(stage):
    model, plain = Net(), Net()
    engine = start(config(stage, **UNTESTED), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = samples(1)[0]
    x, y = own_part(engine, batch)
    engine.backward(engine(x, y))
    engine.backward(engine(x, 2 * y))
    engine.backward(3 * engine.module.first.bias.square().sum())  # most units get no gradient from this one
    engine.step()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    total = plain(*batch) + plain(batch[0], 2 * batch[1]) + 3 * plain.first.bias.square().sum()
    total.backward()
    reference.step()
    check_equal(engine.module, plain)
    engine.destroy()


def test_mpispeed_leaves_the_config_of_the_caller_alone():
    settings = config(optimizer={"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "torch_adam": False}})
    engine, *_ = mpispeed.initialize(model=Net(), config=settings)
    assert settings["optimizer"]["params"] == {"lr": 1e-2, "adam_w_mode": False, "torch_adam": False}
    engine.destroy()
