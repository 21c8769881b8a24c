"""Statistics, histograms and drift of checkpoints, against numpy."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import stats, stats_drift
from mpispeed.ckpt.tools.tally import Tally
from tests.unit.ckpt.sample import saved
from tests.unit.ckpt.stats_sample import EVIL, LR, STATE, change, check_moments, known, row_of, saved_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("stats")
    saved(where, "one", tensors=known(), state=STATE)
    return where


@pytest.fixture
def reader(folder):
    with open_reader(folder, "one") as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    where = tmp_path_factory.mktemp("drift")
    return where, saved_run(where)


def test_moments_and_histograms_are_those_of_numpy(reader):
    tensors = known()
    found = stats.statistics(reader, slots=["all"], bins=23)
    assert len(found["params"]) == len(tensors)
    for (name, slot), value in tensors.items():
        row = row_of(found, name, slot)
        assert row["shape"] == list(value.shape)
        if value.numel() and name not in ("blocks.2.lost", "counter", "waves"):
            check_moments(row, value.float().numpy().reshape(-1))


def test_what_has_no_finite_number_has_no_moments(reader):
    found = stats.statistics(reader)
    for name, count, nan in (("empty", 0, 0), ("blocks.2.lost", 3, 3)):
        row = row_of(found, name)
        assert (row["count"], row["nan"], row["inf"], row["zeros"]) == (count, nan, 0, 0)
        assert [row[key] for key in ("min", "max", "mean", "std", "rms", "histogram")] == [None] * 6


def test_constants_are_exact(reader):
    found = stats.statistics(reader, "blocks.2.w")
    (row,) = found["params"]
    tenth = float(np.float32(0.1))
    assert (row["min"], row["max"], row["mean"], row["std"], row["rms"]) == (tenth, tenth, tenth, 0.0, tenth)
    assert row["histogram"] == {"low": tenth, "high": tenth, "counts": [35]}


def test_integers_stay_integers_and_complex_are_magnitudes(reader):
    found = stats.statistics(reader, slots=["buffer"])
    counter, mask, waves = (row_of(found, name, "buffer") for name in ("counter", "mask", "waves"))
    assert (counter["min"], counter["max"], counter["zeros"]) == (-3, 2**62 + 1, 1)
    assert (mask["min"], mask["max"], mask["mean"], mask["zeros"]) == (0, 1, 0.4, 6)
    assert (waves["min"], waves["max"], waves["zeros"]) == (0.0, 5.0, 1)


def test_layers_merge_their_tensors(reader):
    tensors, found = known(), stats.statistics(reader)
    layers = {(row["layer"], row["slot"]): row for row in found["layers"]}
    assert [row["layer"] for row in found["layers"] if row["layer"].startswith("blocks")] == [
        "blocks.0",
        "blocks.2",
        "blocks.10",
    ]
    row = layers["blocks.0", "master"]
    both = torch.cat([tensors["blocks.0.w", "master"].flatten(), tensors["blocks.0.b", "master"]]).numpy()
    assert row["tensors"] == 2
    kept = both.astype(np.float64)
    assert row["std"] == pytest.approx(kept.std(), rel=1e-12)
    assert row["rms"] == pytest.approx(np.sqrt(np.mean(kept**2)), rel=1e-12)
    assert (row["count"], row["zeros"]) == (kept.size, (kept == 0).sum())
    assert layers["blocks.2", "master"]["nan"] == 4


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attn.weight", "blocks.3"),
        ("m.layers.12.experts.5.w", "m.layers.12"),
        ("0.weight", "0"),
        ("embed.weight", "embed"),
        ("scale", "scale"),
        ("conv1.weight", "conv1"),
        ("a." + "9" * 5000, "a"),
    ],
)
def test_layer_of(name, layer):
    assert stats.layer_of(name) == layer


def test_moments_do_not_cancel_or_overflow():
    values = np.random.default_rng(1).standard_normal(300_000)
    far = Tally()
    for piece in np.array_split((values + 1e8), 7):
        far.add(piece)
    assert far.std == pytest.approx((values + 1e8).astype(np.longdouble).std(), rel=1e-9)
    for scale in (1e300, 1e-300):
        scaled = Tally()
        for piece in np.array_split(values * scale, 5):
            scaled.add(piece)
        scaled.add(np.zeros(0))
        assert scaled.std == pytest.approx(values.std() * scale, rel=1e-12)
        assert scaled.rms == pytest.approx(np.sqrt(np.mean(values**2)) * scale, rel=1e-12)
    mixed = Tally()
    for piece in ([0.0, 0.0], [1e-300, 1e-300], [1e300], [0.0]):
        mixed.add(np.array(piece))
    assert mixed.mean == pytest.approx(1e300 / 6)
    assert mixed.rms == pytest.approx(1e300 / math.sqrt(6))


def test_histograms_of_odd_ranges(tmp_path):
    tensors = {
        ("wide", "master"): torch.tensor([-1.7e308, 0.0, 1.7e308], dtype=torch.float64),
        ("narrow", "master"): torch.tensor([1.0, math.nextafter(1.0, 2.0)], dtype=torch.float64),
        ("tiny", "master"): torch.tensor([0.0, 5e-324], dtype=torch.float64),
    }
    saved(tmp_path, "t", tensors=tensors)
    with open_reader(tmp_path, "t") as opened:
        found = stats.statistics(opened, bins=4)
    assert row_of(found, "wide")["histogram"]["counts"] == [1, 0, 1, 1]
    assert row_of(found, "narrow")["histogram"]["counts"] == [1, 0, 0, 1]
    assert row_of(found, "tiny")["histogram"]["counts"] == [1, 0, 0, 1]


def test_update_ratio(reader):
    tensors = known()
    row = row_of(stats.statistics(reader), "blocks.0.w")
    weight, mean, square = (
        tensors["blocks.0.w", slot].double().numpy() for slot in ("master", "exp_avg", "exp_avg_sq")
    )
    step = mean / (np.sqrt(square) + 1e-6)
    expected = LR * np.sqrt(np.mean(step**2)) / np.sqrt(np.mean(weight**2))
    assert row["update_ratio"] == pytest.approx(expected, rel=1e-10)
    assert row_of(stats.statistics(reader), "scalar")["update_ratio"] is None


def test_update_ratio_needs_a_rate(tmp_path):
    tensors = {("w", slot): torch.ones(4) for slot in ("master", "exp_avg", "exp_avg_sq")}
    for tag, groups in (("none", None), ("no_lr", [{"eps": 1.0}]), ("odd", [7]), ("array", [{"lr": np.array([0.5])}])):
        state = {"optimizer": {"param_groups": groups}} if groups else {}
        saved(tmp_path, tag, tensors=tensors, state=state)
        with open_reader(tmp_path, tag) as opened:
            (row,) = stats.statistics(opened)["params"]
        assert row["update_ratio"] == (pytest.approx(0.5) if tag == "array" else None)


def test_memory_is_bounded(tmp_path):
    tensors = {("w", slot): torch.ones(6 << 20) for slot in ("master", "exp_avg", "exp_avg_sq")}
    tensors["w", "master"][0] = 2.0
    saved(tmp_path, "a", tensors=tensors, state=STATE)
    saved(tmp_path, "b", tensors=tensors, state=STATE)
    saved(tmp_path, "c", tensors=tensors, state=STATE)
    with open_reader(tmp_path, "a") as opened:
        tracemalloc.start()
        (row,) = stats.statistics(opened)["params"]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        drifted = stats_drift.drift(tmp_path, ["a", "b", "c"])
        _, drift_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert row["count"] == 6 << 20
    assert drifted["params"][2]["first_change"] == 0
    # three streams of 4 MiB, and some pieces of 2**17 numbers; one tensor has 24 MiB
    assert max(peak, drift_peak) < 22 << 20


def test_drift_formulas(run):
    where, kept = run
    found = stats_drift.drift(where, ["a", "b,c", "d"])
    assert found["tags"] == [{"tag": "a", "step": 10}, {"tag": "b,c", "step": 9}, {"tag": "d", "step": 30}]
    rows = {(row["tag"], row["name"]): row for row in found["params"]}
    layers = {(row["tag"], row["layer"]): row for row in found["layers"]}
    for tag, new, old in (("b,c", 1, 0), ("d", 2, 1)):
        for name in ("blocks.0.w", EVIL):
            for row in (rows[tag, name], layers[tag, "blocks.0" if name == "blocks.0.w" else EVIL]):
                for role, other in (("previous", old), ("first", 0)):
                    moved, cosine = change(kept[new][name].ravel(), kept[other][name].ravel())
                    assert row[f"{role}_change"] == pytest.approx(moved, rel=1e-12)
                    assert row[f"{role}_cosine"] == pytest.approx(cosine, rel=1e-12)
        assert rows[tag, "blocks.0.w"]["rms"] == pytest.approx(np.sqrt(np.mean(kept[new]["blocks.0.w"] ** 2)))
    still = rows["d", "blocks.0.b"]
    assert (still["previous_change"], still["previous_cosine"], still["rms"]) == (0.0, None, 0.0)
    assert rows["a", "blocks.0.w"]["previous_change"] is None
    assert layers["a", "blocks.0"]["parameters"] == 2


def test_drift_reports_what_cannot_be_compared(run):
    found = stats_drift.drift(run[0], ["a", "b,c", "d"])
    notes = {(row["tag"], row["name"]): row["note"] for row in found["params"]}
    assert notes["b,c", "gone.w"] == notes["d", "gone.w"] == "missing"
    assert notes["b,c", "new.w"] == "not in a"
    assert notes["d", "new.w"] == "not in a"
    assert notes["b,c", "head.w"] == ""
    assert notes["d", "head.w"] == "reshaped: [4, 2] in b,c, here [4, 3]; reshaped: [4, 2] in a, here [4, 3]"
    (head,) = (row for row in found["layers"] if (row["tag"], row["layer"]) == ("d", "head"))
    assert (head["parameters"], head["noted"], head["first_change"]) == (1, 1, None)


def test_drift_refuses_nothing_and_doubles(run):
    with pytest.raises(CheckpointError, match="fits 'nobody'"):
        stats_drift.drift(run[0], ["a", "d"], "nobody")
    with pytest.raises(CheckpointError, match="a named twice"):
        stats_drift.drift(run[0], ["a", "d", "a"])
