"""`OnDevice`, and the command line of `zero_to_fp32.py`."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import UsageError
from mpispeed.compat import fp32_script


def test_models_without_data():
    with mpispeed.OnDevice(dtype=torch.half, device="meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        assert torch.zeros(2, dtype=torch.float64).dtype == torch.half
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.half, torch.int64}
    assert torch.zeros(2).dtype == torch.float32


def test_models_with_data():
    with mpispeed.OnDevice(torch.bfloat16, "cpu"):
        assert nn.Linear(3, 2).weight.dtype == torch.bfloat16
    with mpispeed.OnDevice(None, device="meta"):
        assert nn.Linear(3, 2).weight.dtype == torch.float32
    with mpispeed.OnDevice(torch.half, enabled=False):
        weight = nn.Linear(3, 2).weight
    assert (weight.dtype, weight.device.type) == (torch.float32, "cpu")


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="no floating-point dtype"):
        mpispeed.OnDevice(torch.int64)
    with pytest.raises(UsageError, match="'paper' is none of torch"):
        mpispeed.OnDevice(torch.half, device="paper")


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    assert fp32_script.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    assert "none does not exist" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="does not exist"):
        fp32_script.main([str(tmp_path / "none"), str(tmp_path / "out"), "-d"])
