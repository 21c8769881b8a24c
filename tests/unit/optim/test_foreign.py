"""Torch's optimizers as rules: equal to torch per parameter, with state that can be cut again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.optim.choice import build
from mpispeed.optim.foreign import Foreign, is_elementwise, split_state
from mpispeed.optim.rule import KeepsState, Rule, Window
from tests.helpers.muon import needs_muon_of_torch

STEPS = 6
SHAPES = [(3, 4), (5,), ()]
ELEMENTWISE = [
    ("ASGD", {"lr": 0.1}),
    ("Adadelta", {"lr": 0.5}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.1, "betas": [0.5, 0.6]}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def torch_rule(name: str, params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    """The rule around torch's class, also where the name alone chooses an own rule."""
    if name not in ("Adagrad", "Adam", "AdamW"):
        return build(name, params)
    rule = Foreign(getattr(torch.optim, name), params)
    return rule, dict(rule.defaults)


class Reference:
    """Plain torch on parameters, one group each, with the gradients of `grads_of`."""

    def __init__(self, cls: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self.parameters = [nn.Parameter(value) for value in values(0)]
        self.optimizer = cls([{"params": [p]} for p in self.parameters], **params)

    def run(self, first: int, last: int) -> list[Tensor]:
        for step in range(first, last):
            for parameter, grad in zip(self.parameters, values(step), strict=True):
                parameter.grad = grad
            self.optimizer.step()
        return [p.detach().reshape(-1) for p in self.parameters]


class Windows:
    """Masters of `values(0)` as windows, each cut into `parts`, one group per parameter."""

    def __init__(self, groups: list[dict[str, Any]], parts: int = 1, is_whole: bool = False) -> None:
        self.masters = [value.reshape(-1).clone() for value in values(0)]
        self.groups, self.parts, self.is_replicated = groups, parts, is_whole

    def at(self, step: int) -> list[Window]:
        windows = []
        for index, (master, grad) in enumerate(zip(self.masters, values(step), strict=True)):
            size = -(-master.numel() // self.parts)
            for begin in range(0, master.numel(), size):
                part = slice(begin, min(begin + size, master.numel()))
                shape = SHAPES[index] if self.is_replicated else None
                windows.append(
                    Window(
                        master=master[part],
                        grad=grad.reshape(-1)[part].clone(),
                        state={},
                        group=self.groups[index],
                        step=step,
                        key=("unit", index, begin),
                        shape=shape,
                    )
                )
        return windows

    def run(self, rule: Foreign, first: int, last: int, **options: Any) -> list[Tensor]:
        for step in range(first, last):
            rule.update(self.at(step), **options)
        return self.masters


def test_table_of_elementwise_optimizers() -> None:
    yes = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and is_elementwise(cls)}
    assert yes == {name for name, _ in ELEMENTWISE} | {"Adam", "AdamW", "SGD"}
    matrices = {"Muon"} & set(vars(torch.optim))  # since torch 2.9
    for name in ("Adafactor", *matrices, "LBFGS", "SparseAdam"):
        assert is_elementwise(getattr(torch.optim, name)) is False

    class Mine(torch.optim.SGD):
        pass

    assert is_elementwise(Mine) is None


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("is_client", [False, True])
@pytest.mark.parametrize(("name", "params"), ELEMENTWISE)
def test_equals_torch_on_any_cut(name: str, params: dict[str, Any], is_client: bool, parts: int) -> None:
    cls = getattr(torch.optim, name)
    reference = Reference(cls, params)
    if is_client:
        client = Reference(cls, params).optimizer
        rule, groups = Foreign(client), client.param_groups
    else:
        rule, defaults = torch_rule(name, params)
        groups = [dict(defaults) for _ in SHAPES]
    assert isinstance(rule, Foreign)
    assert isinstance(rule, KeepsState)
    assert rule.name == name
    masters = Windows(groups, parts).run(rule, 1, STEPS)
    for master, expected in zip(masters, reference.run(1, STEPS), strict=True):
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "params"), [("Adafactor", {"lr": 0.1}), *ELEMENTWISE])
def test_whole_windows_are_bitwise_torch(name: str, params: dict[str, Any]) -> None:
    rule, defaults = torch_rule(name, params)
    masters = Windows([dict(defaults) for _ in SHAPES], is_whole=True).run(rule, 1, STEPS)
    expected = Reference(getattr(torch.optim, name), params)
    if name == "Adafactor":  # looks at dimensions, which a 0-dim parameter shares with its flat window
        masters = masters[:2]
    for master, values_ in zip(masters, expected.run(1, STEPS), strict=False):
        assert torch.equal(master, values_)


def test_muon_sees_matrices() -> None:
    needs_muon_of_torch()
    rule = Foreign(torch.optim.Muon, {"lr": 0.1})
    defaults = dict(rule.defaults)
    master, grad = values(0)[0], values(1)[0]
    parameter = nn.Parameter(master.clone())
    parameter.grad = grad.clone()
    torch.optim.Muon([parameter], lr=0.1).step()
    rule.update([Window(master.view(-1), grad.view(-1), {}, defaults, 1, key=(0, 0, 0), shape=(3, 4))])
    assert torch.equal(master, parameter.detach())


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_cuts_are_refused_where_shape_matters(name: str) -> None:
    if name == "Muon":
        needs_muon_of_torch()
    rule = Foreign(getattr(torch.optim, name))
    defaults = dict(rule.defaults)
    assert rule.is_elementwise is False
    window = Window(torch.ones(4), torch.ones(4), {}, defaults, 1, key=(0, 0, 0))
    with pytest.raises(ConfigError, match="whole parameters"):
        rule.update([window])


def test_optimizers_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="closure"):
        build("LBFGS", {})
    with pytest.raises(ConfigError, match="closure"):
        Foreign(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))


def test_sparse_adam_gets_the_rows_that_are_not_zero() -> None:
    plain = nn.Parameter(torch.arange(20.0).view(5, 4))
    theirs = torch.optim.SparseAdam([plain], lr=0.1)
    rule, group = build("SparseAdam", {"lr": 0.1})
    master = plain.detach().clone().view(-1)
    for step, rows in enumerate([[0, 3], [3], [], [1, 2]], 1):
        grad = torch.zeros(5, 4)
        for row in rows:
            grad[row, 1:] = row + step
        plain.grad = grad.to_sparse(1) if rows else None
        theirs.step()
        rule.update([Window(master, grad.view(-1), {}, group, step, key=(0, 0, 0), shape=(5, 4))])
        assert torch.equal(master.view(5, 4), plain)
    assert isinstance(rule, Foreign)
    assert rule.window_scalars((0, 0, 0))["step"] == theirs.state[plain]["step"] == 3


def test_client_keeps_identity_and_its_hyper_parameters_decide() -> None:
    model = nn.Linear(2, 2)
    client = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.25)
    group_ids = [id(group) for group in client.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda i: 1.0 if i == 0 else 0.1)
    rule = Foreign(client)
    assert rule.optimizer is client
    masters = [torch.zeros(4), torch.zeros(2)]

    def update() -> None:
        windows = [
            Window(master, torch.ones(master.numel()), {}, client.param_groups[index], 1, key=(0, index, 0))
            for index, master in enumerate(masters)
        ]
        rule.update(windows)

    update()
    assert (masters[0][0].item(), masters[1][0].item()) == (-0.5, -0.25)
    schedule.step()
    update()
    assert masters[0][0].item() == pytest.approx(-0.55)
    assert masters[1][0].item() == pytest.approx(-0.275)
    assert [id(group) for group in client.param_groups] == group_ids
    assert [len(group["params"]) for group in client.param_groups] == [1, 1]
    assert client.param_groups[0]["params"][0].data_ptr() == masters[0].data_ptr()


def test_made_optimizer_follows_the_groups_of_windows() -> None:
    rule, defaults = build("RMSprop", {"lr": 1.0})
    groups = [{**defaults, "params": ["not read"]}, {**defaults, "lr": 0.0}]
    masters = [torch.zeros(2), torch.zeros(2)]

    def update() -> None:
        rule.update([Window(masters[i], torch.ones(2), {}, groups[i], 1, key=(7, i, 0)) for i in range(2)])

    update()
    assert masters[0][0].item() != 0.0
    assert masters[1][0].item() == 0.0
    before = masters[0].clone()
    groups[0]["lr"], groups[1]["lr"] = 0.0, 1.0
    update()
    assert torch.equal(masters[0], before)
    assert masters[1][0].item() != 0.0
    assert groups[0]["params"] == ["not read"]


def test_step_is_called_once_per_update_and_out_is_filled() -> None:
    calls = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    client = Counting([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))], lr=1.0)
    rule = Foreign(client)
    assert rule.is_elementwise is None
    masters = [torch.zeros(3), torch.zeros(2)]
    outs = [torch.zeros(3, dtype=torch.bfloat16), None]
    grads = [torch.full((3,), 4.0), torch.full((2,), 8.0, dtype=torch.float16)]
    windows = (
        Window(masters[i], grads[i], {}, client.param_groups[0], 1, out=outs[i], key=(i, 0, 0)) for i in range(2)
    )
    rule.update(windows, grad_scale=0.25, threads=2)
    assert calls == [2]
    assert masters[0].tolist() == [-1.0] * 3
    assert masters[1].tolist() == [-2.0] * 2
    assert outs[0].tolist() == [-1.0] * 3
    assert grads[0].tolist() == [1.0] * 3  # fp32 gradients are scaled in place
    assert grads[1].tolist() == [8.0] * 2
    assert all(p.grad is None for p in client.param_groups[0]["params"])


def test_masters_may_move_but_not_change_length() -> None:
    rule, defaults = build("RMSprop", {"lr": 0.1})
    first, second = torch.zeros(4), torch.zeros(4)
    rule.update([Window(first, torch.ones(4), {}, defaults, 1, key=(0, 0, 0))])
    second.copy_(first)
    rule.update([Window(second, torch.ones(4), {}, defaults, 2, key=(0, 0, 0))])
    assert second[0].item() < first[0].item()
    assert rule.window_scalars((0, 0, 0))["step"] == 2
    with pytest.raises(UsageError, match="0/0/0"):
        rule.update([Window(torch.zeros(5), torch.ones(5), {}, defaults, 3, key=(0, 0, 0))])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize(("name", "params"), [*ELEMENTWISE, ("Adam", {}), ("AdamW", {"lr": 0.1})])
def test_state_can_be_cut_again(name: str, params: dict[str, Any], before: int, after: int) -> None:
    rule, defaults = torch_rule(name, params)
    groups = [dict(defaults) for _ in SHAPES]
    old = Windows(groups, before)
    old.run(rule, 1, 4)
    names = set(rule.slots(("unit", 0, 0)))
    assert names
    stored: list[dict[str, Tensor]] = []
    numbers: list[dict[str, Any]] = []
    for index in range(len(SHAPES)):
        keys = [window.key for window in old.at(0) if window.key[1] == index]
        stored.append({slot: torch.cat([rule.slots(key)[slot] for key in keys]) for slot in names})
        numbers.append(rule.window_scalars(keys[-1]))

    fresh, _ = torch_rule(name, params)
    new = Windows(groups, after)
    new.masters = [master.clone() for master in old.masters]
    for window in new.at(0):
        assert fresh.slots(window.key) == {}
        begin, end = window.key[2], window.key[2] + window.master.numel()
        slots = {slot: tensor[begin:end] for slot, tensor in stored[window.key[1]].items()}
        fresh.restore(window, slots, numbers[window.key[1]])
        assert {slot: tensor.numel() for slot, tensor in fresh.slots(window.key).items()} == dict.fromkeys(
            names, window.master.numel()
        )
    for master, expected in zip(new.run(fresh, 4, 8), old.run(rule, 4, 8), strict=True):
        assert torch.equal(master, expected)


def test_restored_state_is_a_copy_and_length_is_checked() -> None:
    rule, defaults = build("RMSprop", {})
    window = Window(torch.zeros(3), torch.zeros(3), {}, defaults, 1, key=(0, 0, 0))
    slot = torch.ones(3)
    rule.restore(window, {"square_avg": slot}, {"step": 1.0})
    slot.zero_()
    assert rule.slots((0, 0, 0))["square_avg"].tolist() == [1.0] * 3
    with pytest.raises(UsageError, match="square_avg"):
        rule.restore(window, {"square_avg": torch.ones(2)}, {})


def test_scalars_return_in_odd_shapes() -> None:
    def fresh() -> tuple[Foreign, Windows]:
        rule, defaults = build("Adafactor", {"lr": 0.1})
        assert isinstance(rule, Foreign)
        return rule, Windows([dict(defaults) for _ in SHAPES], is_whole=True)

    rule, windows = fresh()
    windows.run(rule, 1, 4)
    assert rule.window_scalars(("unit", 0, 0))["row_var"].shape == (3, 1)
    other, continued = fresh()
    continued.masters = [master.clone() for master in windows.masters]
    for window in continued.at(0):
        other.restore(window, rule.slots(window.key), rule.window_scalars(window.key))
    assert all(map(torch.equal, continued.run(other, 4, 7), windows.run(rule, 4, 7)))


def test_scalars_keep_type_shape_and_dtype() -> None:
    given = {"step": 3, "one": torch.ones(1, dtype=torch.int64), "bare": torch.tensor(0.5, dtype=torch.float64)}
    given |= {"is_warm": True, "nothing": None}
    for numel in (1, 4):
        client = torch.optim.SGD([nn.Parameter(torch.zeros(numel))])
        rule = Foreign(client)
        window = Window(torch.zeros(numel), torch.zeros(numel), {}, client.param_groups[0], 1, key=(0, 0, 0))
        rule.restore(window, {}, given)
        assert rule.slots((0, 0, 0)) == {}
        found = rule.window_scalars((0, 0, 0))
        assert {name: (type(x), str(x)) for name, x in found.items()} == {
            n: (type(x), str(x)) for n, x in given.items()
        }
        assert [found[name].dtype for name in ("one", "bare")] == [torch.int64, torch.float64]


def test_state_of_earlier_steps_of_a_client_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    client = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    client.step()
    slots, scalars = split_state(client.state[parameter], parameter)
    assert set(slots) == {"exp_avg", "exp_avg_sq"}
    assert scalars["step"] == 1
    rule = Foreign(client)
    window = Window(torch.zeros(2), torch.ones(2), {}, client.param_groups[0], 1, key=(0, 0, 0))
    rule.restore(window, slots, scalars)
    assert "earlier steps" in caplog.text
    assert parameter not in client.state
    rule.update([window])
    assert rule.window_scalars((0, 0, 0))["step"] == 2


def test_fresh_client_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for cls in (torch.optim.Adagrad, torch.optim.Adam):
        client = cls([nn.Parameter(torch.zeros(2))])
        Foreign(client).update([Window(torch.zeros(2), torch.ones(2), {}, {}, 1, key=(0, 0, 0))])
    assert caplog.text == ""


def test_state_that_needs_pickle_is_an_error() -> None:
    with pytest.raises(UsageError, match="'history'"):
        split_state({"history": [1, 2]}, torch.zeros(2))
    assert split_state({"momentum_buffer": None}, torch.zeros(2)) == ({}, {"momentum_buffer": None})


def test_group_index_beyond_a_clients_groups_is_an_error() -> None:
    rule = Foreign(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(UsageError, match="group 3"):
        rule.update([Window(torch.zeros(2), torch.ones(2), {}, {}, 1, key=(0, 3, 0))])
