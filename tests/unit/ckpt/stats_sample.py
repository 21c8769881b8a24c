"""Checkpoints with numbers of every sort, and what numpy says of them."""

import numpy as np
import pytest
import torch

from tests.unit.ckpt.sample import saved

EVIL = '<script>alert(1)</script>&"'
LR = 2e-3
STATE = {"engine": {"global_steps": 1}, "optimizer": {"param_groups": [{"lr": LR, "eps": 1e-6}]}}


def known(seed=0):
    """(name, slot) -> tensor: of every sort; one is of several blocks and pieces, its optimizer state of bf16."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=make)

    return {
        ("blocks.0.w", "master"): normal(1300, 1000) * 0.02 + 0.5,
        ("blocks.0.w", "exp_avg"): (normal(1300, 1000) * 1e-3).bfloat16(),
        ("blocks.0.w", "exp_avg_sq"): normal(1300, 1000).square() * 1e-6 + 1e-8,
        ("blocks.0.b", "master"): torch.zeros(17),
        ("blocks.10.w", "weight16"): normal(99).bfloat16(),
        ("blocks.2.w", "master"): torch.full((5, 7), 0.1),
        ("blocks.2.odd", "master"): torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -3.0, 5.0]),
        ("blocks.2.lost", "master"): torch.full((3,), float("nan")),
        ("empty", "master"): torch.zeros(0, 3),
        ("scalar", "master"): torch.tensor(-2.5),
        (EVIL, "master"): normal(50),
        ("$\\frac", "master"): normal(60),
        ("blocks.0.w", "fp8"): normal(64).to(torch.float8_e4m3fn),
        ("counter", "buffer"): torch.tensor([-3, 0, 2**62 + 1], dtype=torch.int64),
        ("mask", "buffer"): torch.arange(10) % 3 == 0,
        ("waves", "buffer"): torch.tensor([3 + 4j, 0j]),
    }


def saved_run(where):
    """Save three tags, in which parameters move, appear, go and change shape; returns name -> array of each."""
    make = torch.Generator().manual_seed(3)
    tensors = {("blocks.0.w", "master"): torch.randn(1200, 1000, generator=make)}
    tensors |= {("blocks.0.b", "master"): torch.zeros(5), ("gone.w", "master"): torch.ones(3)}
    tensors |= {("head.w", "master"): torch.ones(4, 2), (EVIL, "master"): torch.tensor([1.0, float("nan"), 2.0])}
    kept = []
    for step, tag in ((10, "a"), (9, "b,c"), (30, "d")):
        saved(where, tag, tensors=tensors, state={"engine": {"global_steps": step}})
        kept.append({name: value.double().numpy() for (name, _), value in tensors.items()})
        tensors = {key: value * 1.5 + 0.25 * torch.randn(value.shape, generator=make) for key, value in tensors.items()}
        tensors.pop(("gone.w", "master"), None)
        tensors["blocks.0.b", "master"] = torch.zeros(5)
        tensors["head.w", "master"] = torch.ones(4, 2 + step % 2)
        tensors["new.w", "weight16"] = torch.ones(2).bfloat16()
    return kept


def change(new, old):
    is_used = np.isfinite(new) & np.isfinite(old)
    new, old = new[is_used], old[is_used]
    cosine = new @ old / np.sqrt((new @ new) * (old @ old))
    return np.sqrt(np.sum((new - old) ** 2) / np.sum(old**2)), cosine


def check_moments(row, values):
    """A row says what numpy says of the finite ones of `values`."""
    kept = values[np.isfinite(values)].astype(np.float64)
    assert row["count"] == values.size
    assert row["nan"] == np.isnan(values).sum()
    assert row["inf"] == np.isinf(values).sum()
    assert row["zeros"] == (values == 0).sum()
    assert (row["min"], row["max"]) == (kept.min(), kept.max())
    assert row["mean"] == pytest.approx(kept.mean(), rel=1e-12, abs=1e-18)
    assert row["std"] == pytest.approx(kept.std(), rel=1e-12, abs=1e-18)
    assert row["rms"] == pytest.approx(np.sqrt(np.mean(kept**2)), rel=1e-12)
    if kept.min() < kept.max():
        histogram = row["histogram"]
        assert histogram["counts"] == np.histogram(kept, len(histogram["counts"]))[0].tolist()
        assert (histogram["low"], histogram["high"]) == (kept.min(), kept.max())


def row_of(found, name, slot="master"):
    (row,) = (row for row in found["params"] if (row["name"], row["slot"]) == (name, slot))
    return row
