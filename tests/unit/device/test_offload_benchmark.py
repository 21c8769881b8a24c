"""benchmarks/gpu/offload.py measures what it says, at a small size on the stand-in device."""

import sys
from pathlib import Path

import pytest

from mpispeed.base import device as devices
from tests.helpers.device import stand_in

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setenv("MPISPEED_DEVICE", stand_in().type)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    monkeypatch.delitem(sys.modules, "offload", raising=False)
    import offload

    yield offload
    devices.IN_USE.clear()
    for name in ("offload", "timing", "gpt"):
        sys.modules.pop(name, None)


def test_all_sides_train_alike(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "STEPS", 2)
    monkeypatch.setattr(benchmark.torch.Tensor, "pin_memory", lambda self: self)  # the stand-in is no accelerator here
    shape = benchmark.gpt.Shape(layers=1, heads=2, width=16, block=8)
    rows = benchmark.measure(stand_in(), 1, tmp_path, shape=shape, words=50, rows=2, window=1 << 12)
    sides = ["plain torch", *benchmark.SIDES, *benchmark.FILES, "disk alone, in turns", "disk alone, both ways"]
    assert [row["side"] for row in rows] == sides
    losses = {row["side"]: row["last_loss"] for row in rows if "last_loss" in row}
    assert len(losses) == len(sides) - 2
    # States on the host are updated with the bits of the host; the plain loop's optimizer rounds in another order.
    assert len({losses[side] for side in losses if "optimizer" in side}) == 1
    assert list(losses.values()) == pytest.approx([losses["stage 2"]] * len(losses), rel=1e-2)
    (in_files,) = (row for row in rows if row["side"] in benchmark.FILES)
    assert in_files["over_disk_in_turns"] > 0
    assert len(capsys.readouterr().out.splitlines()) == len(sides)
    assert list(tmp_path.glob("*.bin")) == []
