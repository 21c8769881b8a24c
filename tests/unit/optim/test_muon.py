"""Muon's rule on whole matrices: as torch's, as written down anew, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UnsupportedOption, UsageError
from mpispeed.engine.matrix_groups import split_groups
from mpispeed.optim.choice import build
from mpispeed.optim.muon import MATRIX_DEFAULTS, Muon, matrices_of
from mpispeed.optim.newton_schulz import orthogonalise, products_of
from mpispeed.optim.rule import Matrixwise, Window
from tests.helpers.muon import factor, needs_muon_of_torch

SHAPES = [(12, 7), (7, 12), (9, 9), (1, 5), (30, 4)]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows(masters: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> Any:
    for number, (master, grad, state) in enumerate(zip(masters, grads, states, strict=True)):
        yield Window(master.view(-1), grad.view(-1), state, group, 1, key=(number, 0, 0), shape=tuple(master.shape))


@pytest.mark.parametrize("more", [{}, {"nesterov": False, "momentum": 0.8}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_equals_torch_to_the_bit(more: dict[str, Any]) -> None:
    needs_muon_of_torch()
    hyper = {"lr": 0.02, "weight_decay": 0.1, **more}
    rule, _ = build("Muon", {**hyper, "ns_dtype": "bf16"})
    assert isinstance(rule, Matrixwise)
    group = rule.group_of({}, is_matrix=True)
    masters = [values(*shape, seed=at) for at, shape in enumerate(SHAPES)]
    theirs = [nn.Parameter(master.clone()) for master in masters]
    optimizer = torch.optim.Muon(theirs, **hyper)
    states = [{"momentum_buffer": torch.zeros(master.numel())} for master in masters]
    for step in range(3):
        grads = [values(*shape, seed=100 + 10 * step + at) for at, shape in enumerate(SHAPES)]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        rule.update(windows(masters, grads, states, group))
        for master, param in zip(masters, theirs, strict=True):
            # torch divides a copy in place, and rounds as here
            torch.testing.assert_close(master, param.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_those_of_the_polynomial(shape: tuple[int, int], method: str) -> None:
    x = values(*shape)
    found = orthogonalise(x, method=method)
    torch.testing.assert_close(found, factor(x), rtol=0, atol=2e-5)  # fp32, amplified by up to 3.4^5 = 485
    assert float(torch.linalg.svdvals(found).max()) < 1.3
    stacked = orthogonalise(torch.stack([x, 2 * x, values(*shape, seed=5)]), method=method)
    torch.testing.assert_close(stacked[1], found, rtol=0, atol=2e-5)  # the norm of a matrix does not matter
    assert torch.equal(orthogonalise(torch.zeros(shape), method=method), torch.zeros(shape))


def test_gram_is_less_work_for_long_matrices() -> None:
    assert products_of(64, 4096, method="gram") < 0.35 * products_of(64, 4096)
    assert products_of(8, 8) == 5 * 3 * 8**3


def test_the_iteration_follows_the_masters_unless_it_is_told() -> None:
    rule, cpu = Muon(), torch.device("cpu")
    assert rule.dtype_of({}, torch.float32, cpu) == torch.float32
    assert rule.dtype_of({}, torch.float32, torch.device("meta")) == torch.bfloat16
    assert rule.dtype_of({"ns_dtype": "bf16"}, torch.float32, cpu) == torch.bfloat16
    assert rule.dtype_of({"ns_dtype": "bf16"}, torch.float64, cpu) == torch.float64


def test_shapes_of_matrices() -> None:
    assert matrices_of((4, 6)) == (1, 4, 6)
    assert matrices_of((3, 4, 6)) == (3, 4, 6)
    assert matrices_of((3, 4, 6), is_convolution=True) == (1, 3, 24)
    assert matrices_of((8, 3, 5, 5)) == (1, 8, 75)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.pos_embed = nn.Parameter(torch.zeros(5, 4))
        self.conv = nn.Conv1d(4, 4, 3)
        self.inner = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[set[str]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [{names[id(param)] for param in group["params"]} for group in groups]


def test_matrices_are_chosen_by_dims_names_and_marks() -> None:
    model, rule = Model(), Muon(muon_lr=0.02, adam_lr=3e-4, betas=(0.8, 0.9))
    groups = split_groups(model, [{"params": [*model.parameters()]}], rule)
    assert names_of(model, groups)[0] == {"conv.weight", "inner.weight"}
    assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.02), (False, 3e-4)]
    assert groups[1]["betas"] == (0.8, 0.9)
    assert "betas" not in groups[0]
    model.lm_head.weight.use_muon = True
    model.inner.weight.use_muon = False
    assert names_of(model, split_groups(model, [{"params": [*model.parameters()]}], rule))[0] == {
        "conv.weight", "lm_head.weight",
    }  # fmt: skip


def test_groups_of_the_caller_are_divided_and_keep_their_settings() -> None:
    model, rule = Model(), Muon(muon_lr=0.02)
    given = [
        {"params": [*model.inner.parameters()], "lr": 0.5, "note": "inner"},
        {"params": [model.wte.weight], "use_muon": True},
    ]
    groups = split_groups(model, given, rule)
    assert [(group["use_muon"], group["lr"], len(group["params"])) for group in groups] == [
        (True, 0.5, 1), (False, 0.5, 1), (True, 0.02, 1),
    ]  # fmt: skip
    assert groups[0]["note"] == "inner"
    with pytest.raises(ConfigError, match=r"inner\.bias.*use_muon true.*two dims"):
        split_groups(model, [{"params": [model.inner.bias], "use_muon": True}], rule)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"ns_method": "newton"}, "one of standard, gram"),
        ({"ns_steps": 0}, "whole number from 1 to 99"),
        ({"ns_coefficients": [1, 2]}, "three numbers"),
        ({"momentum": 1.0}, "below 1"),
        ({"nesterov": 1}, "true or false"),
        ({"beta": 1}, "does not take the parameter"),
    ],
)
def test_what_is_wrong_is_said(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build("muon", params)


def test_heads_and_parts_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="per_head_muon"):
        build("Muon", {"per_head_muon": True})
    window = Window(torch.ones(4), torch.ones(4), {}, {"use_muon": True}, 1, key=(0, 0, 0))
    with pytest.raises(UsageError, match="whole parameters"):
        Muon().update([window])


def test_defaults_are_those_of_deepspeed() -> None:
    _, defaults = build("Muon", {"lr": "auto", "adjust_lr_fn": None})
    assert {name: defaults[name] for name in ("lr", "momentum", "weight_decay")} == {
        "lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0,
    }  # fmt: skip
    assert set(MATRIX_DEFAULTS) <= set(defaults)
