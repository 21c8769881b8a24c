"""Cleaned weights as tensors of torchao. Only this test has it: with it programs with transformers start slower."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "0.18.0"
ROOT = Path(__file__).resolve().parents[3]
CLEAN = """
import torch
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from mpispeed.compression import init_compression, redundancy_clean

def technique(params, **shared):
    groups = {"g": {"params": params, "modules": ["0"], **({"related_modules": [["2"]]} if "method" in shared else {})}}
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}

for kind in ("symmetric", "asymmetric"):
    how = {"quantize_weight_in_forward": True, "quantize_groups": 4, "quantization_type": kind}
    weights = technique({"start_bits": 4, "target_bits": 4}, **how)
    sections = {"weight_quantization": weights, "row_pruning": technique({"dense_ratio": 0.4}, method="topk")}
    config = {"train_batch_size": 1, "compression_training": sections}
    torch.manual_seed(0)
    model = init_compression(nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)), config)
    x = torch.randn(5, 64)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, config, form="torchao")
        torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)
    assert isinstance(model[0].weight, IntxUnpackedToInt8Tensor), type(model[0].weight)
    assert model[0].weight.shape == (32, 64) and model[2].weight.shape == (64, 32)
    print(kind, "cleaned")
"""


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "torchao"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), f"torchao=={VERSION}"], check=True)
    return folder


def test_tensors_of_torchao(site):
    """Both kinds in one process, most of whose time is its start."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{site}"}
    done = subprocess.run([sys.executable, "-c", CLEAN], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "symmetric cleaned\nasymmetric cleaned\n", done.stderr
