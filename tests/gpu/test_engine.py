"""Engines on a GPU: stages, tiers and checkpoints on one rank, stage 3 on two ranks that share it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpispeed
from mpispeed.launch import plan_launch
from mpispeed.native import exact_squares
from mpispeed.native.reduce import square_partials
from mpispeed.sharding.arrivals import Arrivals
from tests.helpers.system import CHECKOUT
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights, zero_section

ROOT = Path(__file__).resolve().parents[2]
BATCH = 24
CPU = {"device": "cpu"}
SECTIONS = [
    zero_section(0), zero_section(1), zero_section(2), zero_section(3),
    zero_section(2, offload_optimizer=CPU),
    zero_section(3, offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param=CPU),
]  # fmt: skip


def start(section, monkeypatch, where="cuda", **more):
    monkeypatch.setenv("MPISPEED_DEVICE", where)
    settings = config(0, BATCH, 1, reduction="ordered", **(WARM | more)) | {"zero_optimization": section}
    return mpispeed.initialize(model=TinyLM(), config=settings)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_losses_follow_those_of_the_host(device, monkeypatch, section, dtype):
    """The order of sums inside of a kernel differs, nothing else: a few units of the last place of the dtype."""
    more = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        more = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    engine = start(section, monkeypatch, **more)
    assert engine.device.type == "cuda"
    losses = train_averaged(engine, batches(10, BATCH))
    assert all(param.device == engine.device for param in engine.module.parameters())
    engine.destroy()
    plain = start(zero_section(0), monkeypatch, "cpu", **more)
    expected = train_averaged(plain, batches(10, BATCH))
    plain.destroy()
    bound = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-9}[dtype]
    assert losses == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_stages_and_tiers_of_one_rank_agree(device, monkeypatch, section):
    """On one device the kernels of the model are the same; masters on the host follow the host's loops."""
    found = []
    for one in (zero_section(0), section):
        engine = start(one, monkeypatch)
        found.append((train_averaged(engine, batches(6, BATCH)), weights(engine)))
        engine.destroy()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)


def test_checkpoint_goes_to_the_host_and_back(device, monkeypatch, tmp_path):
    data = batches(6, BATCH)
    first = start(zero_section(3), monkeypatch)
    train_averaged(first, data[:3])
    first.save_checkpoint(str(tmp_path), tag="a")
    expected = train_averaged(first, data[3:])
    first.destroy()
    for where in ("cuda", "cpu"):
        engine = start(zero_section(1), monkeypatch, where)
        engine.load_checkpoint(str(tmp_path), tag="a")
        assert train_averaged(engine, data[3:]) == pytest.approx(expected, rel=1e-4)
        engine.destroy()


def test_dropout_repeats_after_a_checkpoint(device, monkeypatch, tmp_path):
    engine = start(zero_section(1), monkeypatch)
    engine.save_checkpoint(str(tmp_path), tag="a")
    expected = torch.rand(100, device=device)
    engine.load_checkpoint(str(tmp_path), tag="a")
    assert torch.equal(torch.rand(100, device=device), expected)
    engine.destroy()


def test_two_ranks_share_the_gpu_at_stage_3(device, monkeypatch, tmp_path):
    """Their losses are those of one rank with the whole batch."""
    engine = start(zero_section(0), monkeypatch)
    expected = train_averaged(engine, batches(6, BATCH))
    engine.destroy()
    script = tmp_path / "ranks.py"
    script.write_text(
        "import json, mpispeed\n"
        "from tests.zoo.models import TinyLM, batches\n"
        "from tests.zoo.training import WARM, config, train_averaged\n"
        f"settings = config(3, {BATCH}, 1, **WARM, reduction='ordered')\n"
        "engine = mpispeed.initialize(model=TinyLM(), config=settings)[0]\n"
        "assert engine.device.type == 'cuda', engine.device\n"
        f"losses = train_averaged(engine, batches(6, {BATCH}))\n"
        "if engine.global_rank == 0:\n"
        "    print('losses', json.dumps(losses), flush=True)\n"
        "engine.destroy()\n"
    )
    plan = plan_launch([sys.executable, str(script)], 2)
    environment = {**os.environ, **plan.added, "PYTHONPATH": CHECKOUT, "MPISPEED_DEVICE": "cuda"}
    found = subprocess.run(plan.argv, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    line = next(line for line in found.stdout.splitlines() if "losses" in line)
    losses = [float(word) for word in line.partition("[")[2].rstrip("]").split(",")]
    assert losses == pytest.approx(expected, rel=1e-4)


OFFLOADED = [
    (2, {"device": "cpu", "pin_memory": True}, 1),
    (2, CPU, 3),
    (1, {"device": "cpu", "pin_memory": True}, 1),
    (3, {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True}, 1),
]


@pytest.mark.parametrize(("stage", "where", "accumulation"), OFFLOADED, ids=str)
def test_narrow_gradients_train_as_wide_ones(device, monkeypatch, tmp_path, stage, where, accumulation):
    """They leave on a stream of their own and are waited for by events: one that is read too early trains otherwise."""
    where = where | ({"nvme_path": str(tmp_path)} if where["device"] == "nvme" else {})
    section = zero_section(stage, offload_optimizer=where, reduce_bucket_size=3000)
    found = []
    for is_narrow in (True, False):
        if not is_narrow:
            monkeypatch.setattr(Arrivals, "takes", staticmethod(lambda stored, values: False))
            monkeypatch.setattr(Arrivals, "note_rounded", lambda self, index, dtype: None)
        engine = start(section, monkeypatch, bf16={"enabled": True}, gradient_accumulation_steps=accumulation)
        losses = train_averaged(engine, batches(8, BATCH))
        found.append((losses, engine.get_global_grad_norm()))
        engine.destroy()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_on_the_way_are_those_of_the_host(device, dtype):
    """Started on another stream, and read when they are asked for."""
    x = torch.randn(5 * 256 + 3, generator=torch.Generator().manual_seed(1)).mul_(30).to(dtype)
    on_device, stream = x.to(device), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        started = exact_squares.start_square_partials(on_device.split(512), block=256)
    assert math.fsum(started.partials()) == math.fsum(square_partials(x, block=256))
