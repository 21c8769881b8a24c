"""Steps that do not wait for a GPU: torch sees no synchronization in them, and their numbers are those that wait."""

from __future__ import annotations

import math

import pytest
import torch

import mpispeed
from mpispeed.native import exact_sum
from mpispeed.native.device_clip import norm_and_factor, norm_and_factor_reference
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, weights

BATCH = 12
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}}


def run(stage, device, *, leads, poisoned=()):
    settings = config(stage, BATCH, 1, dtype="bf16", gradient_clipping=0.5, **(WARM | SCHEDULE))
    model = TinyLM().to(device)
    engine = mpispeed.initialize(model=model, config=settings)[0]
    assert engine.mpispeed.updates.leads
    engine.mpispeed.updates.leads, losses = leads, []
    data = [batch.to(device) for batch in batches(6, BATCH)]
    for number, batch in enumerate(data):
        engine.mpispeed.updates.settle()
        is_watched = leads and number > 1  # the first steps load kernels
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        loss = engine(batch)
        engine.backward(loss * math.inf if number in poisoned else loss)
        engine.step()
        torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    found = [x.cpu() for x in losses], engine.get_global_grad_norm(), engine.get_lr(), weights(engine)
    counts = engine.global_steps, engine.skipped_steps
    engine.destroy()
    return found, counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_waits_for_nothing_and_has_the_same_bits(stage, device, monkeypatch):
    monkeypatch.setenv("MPISPEED_DEVICE", "cuda")
    found, counts = run(stage, device, leads=True, poisoned=(2, 4))
    expected, expected_counts = run(stage, device, leads=False, poisoned=(2, 4))
    same_bits(found, expected)
    assert counts == expected_counts == (6, 2)


CASES = [[], [5e-324], [1.0, 2.0**-53], [1.0 + 2.0**-52, 2.0**-53], [1.7e308] * 2, [0.1] * 40, [math.inf], [math.nan]]


@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize(("scale", "limit"), [(1.0, 0.0), (3.0, 0.7), (65536.0, 1e30)])
def test_norm_and_factor_have_the_bits_of_the_host(values, scale, limit, device):
    limbs = exact_sum.limbs_of(values)
    total = exact_sum.value_of(limbs)
    norm, factor = total, math.nan
    if math.isfinite(total):
        norm = math.sqrt(total) / scale
        factor = torch.tensor((min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0) / scale).item()
    for compute in (norm_and_factor, norm_and_factor_reference):
        found = compute(limbs.to(device), scale=scale, limit=limit)
        assert str([x.item() for x in found]) == str([norm, factor])
