"""Adam and SGD over windows against torch.optim, and the choice of a rule by its JSON type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UnknownOption, UnsupportedOption
from mpispeed.optim import CPULion
from mpispeed.optim.adagrad import Adagrad
from mpispeed.optim.adam import Adam
from mpispeed.optim.choice import build
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.rule import RULES, KeepsState, Rule, Window
from mpispeed.optim.sgd import SGD
from mpispeed.optim.torch_rule import TorchRule

STEPS = 20
LENGTH = 173
CUTS = [[0, LENGTH], [0, 1, 40, 41, LENGTH], [0, 8, 16, 24, 100, 172, LENGTH]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def start(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(LENGTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def run_rule(
    rule: Rule,
    group: dict[str, Any],
    cuts: list[int],
    grads: list[Tensor],
    master: Tensor,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Masters and state after one update per gradient, cut at `cuts`."""
    state = {name: torch.zeros_like(master) for name in rule.state_names}
    for step, grad in enumerate(grads, start=1):
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        windows = [
            Window(
                master=master[part],
                grad=grad[part],
                state={name: values[part] for name, values in state.items()},
                group=group,
                step=step,
                out=None if out is None else out[part],
                key=(0, 0, part.start),
            )
            for part in parts
        ]
        rule.update(windows, **options)
    return master, state


def run_torch(optimizer: type[torch.optim.Optimizer], grads: list[Tensor], value: Tensor, **hyper: Any) -> Any:
    parameter = nn.Parameter(value)
    torch_optimizer = optimizer([parameter], **hyper)
    for grad in grads:
        parameter.grad = grad.clone()
        torch_optimizer.step()
    return parameter.detach(), torch_optimizer.state[parameter]


SGD_CASES: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.03},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03, "dampening": 0.2},
    {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.8, "maximize": True},
]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("hyper", SGD_CASES)
def test_sgd_is_bitwise_that_of_torch(hyper: dict[str, Any], cuts: list[int]) -> None:
    rule, group = build("SGD", hyper)
    grads = gradients()
    before = [grad.clone() for grad in grads]
    master, state = run_rule(rule, group, cuts, grads, start())
    expected, expected_state = run_torch(torch.optim.SGD, grads, start(), **hyper)
    assert torch.equal(master, expected)
    assert all(map(torch.equal, grads, before))
    if "momentum" in hyper:
        assert torch.equal(state["momentum_buffer"], expected_state["momentum_buffer"])
    else:
        assert state == {}


def test_sgd_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, group = build("SGD", SGD_CASES[3])
    whole, _ = run_rule(rule, group, CUTS[0], gradients(), start())
    monkeypatch.setattr("mpispeed.optim.sgd._BLOCK_ELEMENTS", 19)
    in_blocks, _ = run_rule(rule, group, CUTS[1], gradients(), start())
    assert torch.equal(whole, in_blocks)


def test_sgd_scales_and_widens_low_precision_gradients() -> None:
    rule, group = build("SGD", {"lr": 0.5, "momentum": 0.5})
    grads = gradients(torch.float16)
    out = torch.empty(LENGTH, dtype=torch.bfloat16)
    master, _ = run_rule(rule, group, CUTS[1], grads, start(), out, grad_scale=0.25)
    widened = [grad.float() * 0.25 for grad in grads]
    expected, _ = run_torch(torch.optim.SGD, widened, start(), lr=0.5, momentum=0.5)
    assert torch.equal(master, expected)
    assert torch.equal(out, expected.to(torch.bfloat16))


def test_sgd_needs_its_buffer_for_a_group_with_momentum() -> None:
    rule, group = build("SGD", {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"optimizer\.params"):
        run_rule(rule, {**group, "momentum": 0.9}, CUTS[0], gradients(), start())


ADAM_CASES: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer]]] = [
    ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
    ("Adam", {"adam_w_mode": False, "weight_decay": 0.1, "lr": 0.01}, torch.optim.Adam),
    ("Adam", {"weight_decay": 0.1, "betas": [0.8, 0.95]}, torch.optim.AdamW),
    ("AdamW", {"adam_w_mode": False, "weight_decay": 0.1, "eps": 1e-6}, torch.optim.AdamW),
]


def torch_hyper(params: dict[str, Any]) -> dict[str, Any]:
    return {"weight_decay": 0.0, **{key: value for key, value in params.items() if key != "adam_w_mode"}}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("name", "params", "reference"), ADAM_CASES)
def test_adam_is_that_of_torch(
    name: str, params: dict[str, Any], reference: type[torch.optim.Optimizer], cuts: list[int]
) -> None:
    rule, group = build(name, params)
    master, state = run_rule(rule, group, cuts, gradients(), start())
    expected, expected_state = run_torch(reference, gradients(), start(), **torch_hyper(params))
    # fp32 carries 6e-8; masters near 0 after steps of size lr are compared to that size.
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6 * group["lr"] * STEPS)
    for slot in rule.state_names:
        torch.testing.assert_close(state[slot], expected_state[slot], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "params", "reference"), ADAM_CASES)
def test_adam_in_double_precision(name: str, params: dict[str, Any], reference: type[torch.optim.Optimizer]) -> None:
    rule, group = build(name, params)
    grads = gradients(torch.float64)
    master, _ = run_rule(rule, group, CUTS[1], grads, start(torch.float64))
    expected, _ = run_torch(reference, grads, start(torch.float64), **torch_hyper(params))
    torch.testing.assert_close(master, expected, rtol=1e-12, atol=1e-13)


def test_adam_bits_do_not_depend_on_cuts_and_threads() -> None:
    rule, group = build("AdamW", {"weight_decay": 0.1})
    whole, _ = run_rule(rule, group, CUTS[0], gradients(), start())
    for cuts in CUTS[1:]:
        assert torch.equal(whole, run_rule(rule, group, cuts, gradients(), start(), threads=2)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adam_with_low_precision_gradients_and_copy(dtype: torch.dtype) -> None:
    rule, group = build("AdamW", {"lr": 0.01})
    grads = gradients(dtype)
    before = [grad.clone() for grad in grads]
    out = torch.empty(LENGTH, dtype=dtype)
    master, _ = run_rule(rule, group, CUTS[1], grads, start(), out, grad_scale=0.125)
    widened = [grad.float() * 0.125 for grad in grads]
    expected, _ = run_torch(torch.optim.AdamW, widened, start(), lr=0.01, weight_decay=0.0)
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=2e-7)
    assert torch.equal(out, master.to(dtype))
    assert all(map(torch.equal, grads, before))


def test_adam_without_bias_correction_takes_the_plain_step() -> None:
    rule, group = build("Adam", {"lr": 0.1, "bias_correction": False, "eps": 0.0})
    master, _ = run_rule(rule, group, CUTS[0], [torch.full((LENGTH,), 2.0)], torch.zeros(LENGTH))
    # m = 0.1 g, v = 0.001 g^2, so the step is 0.1 * 0.1 / sqrt(0.001)
    torch.testing.assert_close(master, torch.full((LENGTH,), -0.01 / 0.001**0.5))


ADAGRAD_CASES: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.1, "lr_decay": 0.05},
    {"initial_accumulator_value": 0.3, "eps": 1e-6, "maximize": True},
]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("params", ADAGRAD_CASES)
def test_adagrad_is_that_of_torch(params: dict[str, Any], cuts: list[int]) -> None:
    rule, group = build("Adagrad", {**params, "foreach": None})
    master, state = run_rule(rule, group, cuts, gradients(), start())
    expected, expected_state = run_torch(torch.optim.Adagrad, gradients(), start(), **params)
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6 * group["lr"] * STEPS)
    torch.testing.assert_close(state["sum"], expected_state["sum"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cuts", CUTS)
def test_lion_is_the_optimizer_for_host_memory(cuts: list[int]) -> None:
    rule, group = build("lion", {"lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95]})
    out = torch.empty(LENGTH, dtype=torch.bfloat16)
    master, _ = run_rule(rule, group, cuts, gradients(), start(), out, grad_scale=0.5, threads=2)
    parameter = nn.Parameter(start())
    optimizer = CPULion([parameter], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    for grad in gradients():
        parameter.grad = grad
        optimizer.step(grad_scale=0.5)
    assert torch.equal(master, parameter)
    assert torch.equal(out, master.bfloat16())


def test_lamb_steps_in_proportion_to_the_norm() -> None:
    rule, group = build("LAMB", {"lr": 0.01, "eps": 0.0, "bias_correction": False, "betas": [0.0, 0.0]})
    assert isinstance(rule, Lamb)
    assert (rule.wants_whole, rule.is_elementwise) == (True, False)
    before = start()
    master, _ = run_rule(rule, group, CUTS[0], gradients()[:1], before.clone())
    ratio = float(before.double().norm()) / LENGTH**0.5  # the direction is a sign
    torch.testing.assert_close(master, before - 0.01 * ratio * gradients()[0].sign())
    assert rule.get_lamb_coeffs() == [pytest.approx(ratio)]


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion", "Lamb"])
def test_windows_are_taken_one_at_a_time(name: str) -> None:
    rule, group = build(name, {"lr": 0.1})
    masters = [torch.ones(4) for _ in range(3)]

    def windows() -> Iterator[Window]:
        for index, master in enumerate(masters):
            assert all(not torch.equal(done, torch.ones(4)) for done in masters[:index])
            state = {slot: torch.zeros(4) for slot in rule.state_names}
            yield Window(master, torch.ones(4), state, group, 1)

    rule.update(windows())
    assert not torch.equal(masters[-1], torch.ones(4))


@pytest.mark.parametrize("name", ["Adagrad", "Lion", "Lamb"])
def test_fp64_masters_are_updated_in_fp64(name: str) -> None:
    rule, group = build(name, {"lr": 0.1, "weight_decay": 0.1})
    wide, _ = run_rule(rule, group, CUTS[0], gradients(torch.float64), start(torch.float64))
    narrow, _ = run_rule(rule, group, CUTS[0], gradients(), start())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), narrow, rtol=1e-4, atol=1e-4)
    assert not torch.equal(wide, narrow.double())


def test_groups_differ_and_missing_hyper_parameters_come_from_the_rule() -> None:
    rule, group = build("Adam", {"lr": 0.25, "eps": 0.0})
    masters = [torch.zeros(4) for _ in range(3)]
    windows = [
        Window(
            master=master,
            grad=torch.ones(4),
            state={name: torch.zeros(4) for name in rule.state_names},
            group=hyper,
            step=1,
        )
        for master, hyper in zip(masters, [group, {"lr": 0.5}, {}], strict=True)
    ]
    rule.update(windows, grad_scale=1.0, threads=1)
    assert [round(master[0].item(), 5) for master in masters] == [-0.25, -0.5, -0.25]


def test_empty_windows_are_fine() -> None:
    for name in ("Adam", "Adagrad", "Lion", "Lamb", "SGD", "RMSprop"):
        rule, group = build(name, {"lr": 0.1})
        state = {slot: torch.zeros(0) for slot in rule.state_names}
        rule.update([Window(torch.zeros(0), torch.zeros(0), state, group, 1, key=(0, 0, 0))], grad_scale=0.5, threads=1)


ROWS = [
    ("Adam", False, None, True),
    ("adam", False, True, True),
    ("ADAM", False, False, False),
    ("AdamW", False, None, True),
    ("adamw", False, False, True),
    ("Adam", True, None, True),
    ("Adam", True, False, False),
    ("AdamW", True, False, True),
]


@pytest.mark.parametrize(("name", "torch_adam", "mode", "is_decoupled"), ROWS)
def test_table_of_adam_choices(name: str, torch_adam: bool, mode: bool | None, is_decoupled: bool) -> None:
    params: dict[str, Any] = {"lr": 0.002, "torch_adam": torch_adam}
    if mode is not None:
        params["adam_w_mode"] = mode
    before = dict(params)
    rule, group = build(name, params)
    assert params == before
    assert group["lr"] == 0.002
    if torch_adam:
        assert isinstance(rule, TorchRule)
        assert not isinstance(rule, KeepsState)  # states come with the windows, so files can hold them
        assert type(rule.optimizer) is (torch.optim.AdamW if is_decoupled else torch.optim.Adam)
        assert group["weight_decay"] == (0.01 if is_decoupled else 0)
    else:
        assert isinstance(rule, Adam)
        assert rule.adam_w_mode is is_decoupled
        assert group == {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("params", [{}, {"amsgrad": True}, {"foreach": True, "maximize": True}], ids=str)
@pytest.mark.parametrize("cut", [100, 37, 5])
def test_torch_adam_on_any_cut_has_the_bits_of_torch(name: str, params: dict[str, Any], cut: int) -> None:
    hyper = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6, **params}
    rule, group = build(name, {**hyper, "torch_adam": True, "adam_w_mode": name == "AdamW"})
    torch.manual_seed(5)
    master = torch.randn(100)
    plain = nn.Parameter(master.clone())
    theirs = getattr(torch.optim, name)([plain], **hyper)
    states = {slot: torch.zeros(100) for slot in rule.state_names}
    assert ("max_exp_avg_sq" in states) == ("amsgrad" in params)
    out = torch.zeros(100, dtype=torch.bfloat16)
    for step in range(1, 5):
        group["lr"] = theirs.param_groups[0]["lr"] = 0.1 / step
        grad = torch.randn(100, dtype=torch.bfloat16)
        plain.grad = grad.float() * 0.5
        theirs.step()
        spans = [slice(start, start + cut) for start in range(0, 100, cut)]
        kept = grad.clone()
        rule.update(
            (Window(master[s], grad[s], {k: v[s] for k, v in states.items()}, group, step, out=out[s]) for s in spans),
            grad_scale=0.5,
        )
        assert torch.equal(grad, kept)
        assert torch.equal(master, plain)
        assert torch.equal(out, plain.bfloat16())
    for slot, values in states.items():
        assert torch.equal(values, theirs.state[plain][slot])


def test_amsgrad_of_a_group_needs_maxima() -> None:
    rule, group = build("Adam", {"torch_adam": True})
    states = {slot: torch.zeros(2) for slot in rule.state_names}
    with pytest.raises(ConfigError, match=r"needs the state max_exp_avg_sq .* set it in optimizer\.params"):
        rule.update([Window(torch.zeros(2), torch.ones(2), states, {**group, "amsgrad": True}, 1)])


def test_own_rules_keep_state_in_windows() -> None:
    adam, _ = build("Adam", None)
    sgd, _ = build("sgd", {"momentum": 0.5})
    assert (adam.state_names, sgd.state_names) == (("exp_avg", "exp_avg_sq"), ("momentum_buffer",))
    assert SGD().state_names == ()
    for rule in (adam, sgd):
        assert not isinstance(rule, KeepsState)
        assert rule.scalars() == {}
        assert (rule.wants_whole, rule.is_elementwise) == (False, True)


def test_auto_and_hints_are_left_out() -> None:
    rule, group = build("Adam", {"lr": "auto", "betas": "auto", "fused": True, "set_grad_none": True, "amsgrad": False})
    assert group == rule.defaults
    assert group["lr"] == 1e-3
    _, group = build("RMSprop", {"lr": "auto", "alpha": 0.5})
    assert (group["lr"], group["alpha"]) == (0.01, 0.5)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion", "Lamb", "SGD", "RMSprop"])
def test_max_grad_norm_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="gradient_clipping"):
        build(name, {"max_grad_norm": 1.0})


@pytest.mark.parametrize(
    ("name", "cure"), [("Adam", "torch_adam"), ("Adagrad", "Remove"), ("Lion", "Remove"), ("Lamb", "Remove")]
)
def test_amsgrad_is_refused(name: str, cure: str) -> None:
    with pytest.raises(RuntimeError, match=cure) as caught:
        build(name, {"amsgrad": True})
    assert isinstance(caught.value, UnsupportedOption)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("Adam", "beta", "betas"),
        ("SGD", "momentun", "momentum"),
        ("Adagrad", "lr_dekay", "lr_decay"),
        ("Lamb", "max_coef", "max_coeff"),
    ],
)
def test_unknown_parameters_get_a_suggestion(name: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f'Did you mean "{right}"') as caught:
        build(name, {wrong: 1})
    assert isinstance(caught.value, UnknownOption)
    assert caught.value.is_collective


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Adam", {"lr": -1}),
        ("Adam", {"lr": "fast"}),
        ("Adam", {"betas": [0.9]}),
        ("Adam", {"betas": [0.9, 1.0]}),
        ("Adam", {"eps": True}),
        ("Adam", {"weight_decay": float("nan")}),
        ("Adagrad", {"initial_accumulator_value": -1}),
        ("Adagrad", {"maximize": "yes"}),
        ("Lion", {"betas": [0.9, 2]}),
        ("Lamb", {"bias_correction": 1}),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}),
        ("SGD", {"momentum": -0.1}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("RMSprop", {"lr": -1.0}),
        ("RMSprop", {"lr": "fast"}),
    ],
)
def test_impossible_values_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=name):
        build(name, params)


@pytest.mark.parametrize("name", ["Adamm", "rmsprop", "Optimizer", "lr_scheduler"])
def test_unknown_types_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=r"optimizer\.type"):
        build(name, {})


def test_unknown_type_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match='Did you mean "RMSprop"'):
        build("rmsprop", {})


def test_own_names_win_in_any_case() -> None:
    assert {"adam", "adamw", "sgd", "adagrad", "lion", "lamb"} <= set(RULES)
    rule, group = build("aDaGrAd", {"lr": 0.5})
    assert isinstance(rule, Adagrad)
    assert group["lr"] == 0.5
