"""What fp16, bf16, amp and torch_autocast ask for, and the loss scales that follow."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.config.load import load
from mpispeed.plan.mixed import find_lowered, find_norms, make_scaler, mixed_precision


def mixed(**settings):
    return mixed_precision(load(settings).config)


@pytest.mark.parametrize(
    "settings",
    [{"amp": True}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}],
    ids=["amp", "torch_autocast"],
)
def test_the_scale_is_that_of_torch(settings):
    config = load(settings).config
    ours = make_scaler(config, mixed_precision(config), goes_on=False)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for step in range(4010):
        overflows = step in (0, 1, 7) or step == 2500
        param.grad = torch.full((1,), float("inf") if overflows else 1.0)
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflows)
        assert ours.scale == theirs.get_scale(), step


def test_the_scale_of_amp_keeps_to_its_bounds():
    config = load({"amp": {"enabled": True, "min_loss_scale": 4, "max_loss_scale": 8}}).config
    scale = make_scaler(config, mixed_precision(config), goes_on=False)
    assert scale.scale == 8
    for _ in range(3):
        scale.update(overflow=True)
    assert scale.scale == 4
    for _ in range(6001):
        scale.update(overflow=False)
    assert scale.scale == 8


def test_what_replaces_a_level():
    found = mixed(amp={"enabled": True, "opt_level": "O2", "cast_model_type": "bfloat16", "loss_scale": 128})
    assert (found.model, found.keeps_norms, found.outputs) == (torch.bfloat16, True, torch.float32)
    assert found.is_scaled
    found = mixed(amp={"enabled": True, "patch_torch_functions": False, "cast_model_outputs": "fp32"})
    assert (found.autocast, found.outputs, found.section) == (None, torch.float32, "")


def test_parameters_that_are_lowered():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head, self.other = nn.Embedding(3, 4), nn.Linear(4, 3), nn.Linear(4, 4)
            self.head.weight = self.table.weight
            self.other.bias.requires_grad_(False)

    model = Model()
    assert find_lowered(model, mixed(torch_autocast=True)) == {id(model.head.bias), id(model.other.weight)}
    both = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Embedding"]}
    assert id(model.table.weight) in find_lowered(model, mixed(torch_autocast=both))
    assert not find_lowered(model, mixed(torch_autocast={"enabled": True, "lower_precision_safe_modules": []}))


@pytest.mark.parametrize(
    "name", ["..a.B", "", "X", "torch.nn.", "a b.c", "breaks.X", "leaves.X", "torch.nn.functional.relu", "x" * 9000]
)
def test_what_is_no_class_is_one_line(name, tmp_path, monkeypatch):
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"enabled": True, "lower_precision_safe_modules": [name]}
    with pytest.raises(ConfigError, match="lower_precision_safe_modules names") as caught:
        find_lowered(nn.Linear(2, 2), mixed(torch_autocast=given))
    message = str(caught.value)
    assert "name classes as torch.nn.Linear" in message
    assert len(message) < 500


def test_norms_that_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    kept = find_norms(model, mixed(amp={"enabled": True, "opt_level": "O2"}))
    assert kept == {id(tensor) for tensor in (*model[1].parameters(), model[1].running_mean, model[1].running_var)}
    assert not find_norms(model, mixed(amp={"enabled": True, "opt_level": "O3"}))
