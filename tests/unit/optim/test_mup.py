"""Groups of muP's optimizers beside those of the package mup, and schedules of torch over them."""

import math

import mup
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.base.param_marks import part_of
from mpispeed.optim.choice import build
from mpispeed.optim.mup import Widths
from mpispeed.optim.rule import LR_FACTOR
from mpispeed.optim.schedule import build_schedule

DIM = st.sampled_from([(None, 3), (2, 3), (2, 2), (3, 4), (4, 2)])  # sizes in the base model, and here
FEW = st.lists(DIM, max_size=2) | st.tuples(DIM, DIM, st.just((None, 2)))
SHAPES = st.lists(FEW, min_size=1, max_size=8)
THEIRS = {"MuAdam": mup.MuAdam, "MuAdamW": mup.MuAdamW, "MuSGD": mup.MuSGD}


def model_of(shapes):
    model = nn.Module()
    for index, dims in enumerate(shapes):
        param = nn.Parameter(torch.zeros([size for _, size in dims]))
        param.infshape = mup.InfShape([mup.InfDim(base, size) for base, size in dims])
        model.register_parameter(f"p{index}", param)
    return model


def grouped(name, model, groups, **params):
    _, defaults = build(name, params)
    widths = Widths(name, model, [{**defaults, **group} for group in groups])
    return widths.groups(widths.found)


@given(st.sampled_from(sorted(THEIRS)), SHAPES, st.booleans())
def test_groups_are_those_of_the_package(name, shapes, has_two):
    model = model_of(shapes)
    params = list(model.parameters())
    made = [{"params": params[::2], "weight_decay": 0.3}, {"params": params[1::2], "lr": 0.7}]
    made = [group for group in made if group["params"]] if has_two else [{"params": params}]
    ours = grouped(name, model, made, lr=0.1, weight_decay=0.01)
    theirs = THEIRS[name]([dict(group) for group in made], lr=0.1, weight_decay=0.01).param_groups
    theirs = [group for group in theirs if group["params"]]
    assert [[id(p) for p in group["params"]] for group in ours] == [[id(p) for p in g["params"]] for g in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert own["lr"] == other["lr"]
        assert own["weight_decay"] == other["weight_decay"]


def test_stacked_experts_have_the_ratio_of_their_matrices():
    """The package takes the first two dims, one of which is the number of experts."""
    model = model_of([[(None, 5), (2, 8), (2, 4)]])
    (group,) = grouped("MuSGD", model, [{"params": [*model.parameters()]}], lr=1.0)
    assert group["lr"] == 2.0


def test_weight_decay_may_stay_as_it_is():
    model = model_of([[(2, 4), (2, 4)]])
    (group,) = grouped(
        "MuAdamW", model, [{"params": [*model.parameters()]}], lr=0.1, weight_decay=0.5, decoupled_wd=True
    )
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.5)
    assert "decoupled_wd" not in group
    with pytest.raises(ConfigError, match="decoupled_wd of the optimizer MuSGD is 1"):
        build("MuSGD", {"decoupled_wd": 1})


def test_widths_of_other_stages_are_empty_groups_in_one_order():
    """Two stages of a pipeline with different widths come to the same settings."""
    models = [model_of([[(2, 4), (2, 4)], [(2, 4)]]), model_of([[(2, 6), (2, 6)], [(None, 3)]])]
    both = [Widths("MuAdam", m, [{"params": [*m.parameters()], "lr": 0.1, "weight_decay": 0.0}]) for m in models]
    found = [width for widths in both for width in widths.found]
    first, second = (widths.groups(found) for widths in both)
    assert [group["lr"] for group in first] == [group["lr"] for group in second] == pytest.approx([0.05, 0.1 / 3, 0.1])
    assert [len(group["params"]) for group in first] == [1, 0, 1]
    assert [len(group["params"]) for group in second] == [0, 1, 1]


def test_a_part_of_a_parameter_keeps_its_widths():
    whole = model_of([[(2, 4), (2, 4)]]).p0
    part = part_of(whole.requires_grad_(False), whole.detach()[:2])
    assert part.infshape is whole.infshape
    assert not part.requires_grad


PARAMS = {
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.02},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "eta_min": 0.02},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.4, "total_steps": 9},
    "ReduceLROnPlateau": {"factor": 0.1, "patience": 0, "min_lr": 0.005},
    "MultiStepLR": {"milestones": [2, 4]},
}


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_schedules_of_torch_keep_the_ratios(name):
    def made(factors):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1 * f, LR_FACTOR: f} for f in factors]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    factors = [1 / 3, 1.0, 7.0]
    alone, scaled = made([1.0]), made(factors)
    schedules = [build_schedule(name, PARAMS[name], optimizer) for optimizer in (alone, scaled)]
    assert isinstance(schedules[1], type(schedules[0]))
    assert type(schedules[1]).__name__ == name
    assert set(schedules[1].state_dict()) == set(schedules[0].state_dict())
    for step in range(8):
        if step == 3:  # as after a restart
            state = schedules[1].state_dict()
            left = [group["lr"] for group in scaled.param_groups]
            scaled = made(factors)
            schedules[1] = build_schedule(name, PARAMS[name], scaled)
            schedules[1].load_state_dict(state)
            for group, lr in zip(scaled.param_groups, left, strict=True):
                group["lr"] = lr
        for group, factor in zip(scaled.param_groups, factors, strict=True):
            assert math.isclose(group["lr"], alone.param_groups[0]["lr"] * factor, rel_tol=1e-12)
        for optimizer, schedule in zip((alone, scaled), schedules, strict=True):
            optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert schedules[1].get_last_lr() == [group["lr"] for group in scaled.param_groups]
