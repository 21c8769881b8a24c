"""`ckpt diff`: what is said of tensors, state and names that differ."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import diff as comparing
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.memory import watched
from tests.unit.ckpt.sample import STATE, saved, tensors_of


def diff(first, second, **more):
    with open_reader(first) as mine, open_reader(second) as theirs:
        return comparing.diff(mine, theirs, **more)


def pair(folder, mine, theirs, **more):
    """Save one tensor in two versions and compare them."""
    for name, value in (("a", mine), ("b", theirs)):
        saved(folder / name, tensors={("w", "master"): value})
    (row,) = diff(folder / "a", folder / "b", **more).rows
    return row


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, ["diff", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_equal_whatever_the_files(tmp_path):
    saved(tmp_path / "a", size=2, options=SaveOptions(files=3), aliases={"x": "scale"})
    saved(tmp_path / "b", aliases={"x": "scale"})
    found = diff(tmp_path / "a", tmp_path / "b", wants_state=True)
    assert found.is_equal
    assert (found.added, found.removed, found.state) == ([], [], [])
    assert len(found.rows) == 10
    assert call(tmp_path / "a", tmp_path / "b") == "10 of 10 tensors are equal\n"


def test_names_shapes_and_values(tmp_path):
    tensors = tensors_of()
    saved(tmp_path / "a", tensors=tensors, aliases={"x": "scale"})
    del tensors["layers.0.weight", "exp_avg"]
    tensors["new", "buffer"] = torch.ones(2)
    tensors["mask", "buffer"] = torch.ones(7, dtype=torch.bool)
    changed = tensors["embed.weight", "exp_avg"].clone()
    changed[1050, 3] += 0.5
    tensors["embed.weight", "exp_avg"] = changed
    saved(tmp_path / "b", tensors=tensors, aliases={"y": "scale"})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.added == ["new/buffer", "alias y of scale"]
    assert found.removed == ["layers.0.weight/exp_avg", "alias x of scale"]
    rows = {(row.name, row.slot): row for row in found.rows if row.change != "equal"}
    assert rows.keys() == {("mask", "buffer"), ("embed.weight", "exp_avg")}
    assert rows["mask", "buffer"].change == "shape"
    tally = rows["embed.weight", "exp_avg"].tally
    assert (tally.numel, tally.equal) == (1_100_000, 1_099_999)
    assert tally.max_abs == pytest.approx(0.5, rel=1e-6)
    text = call(tmp_path / "a", tmp_path / "b", code=1)
    for part in ("- layers.0.weight/exp_avg", "+ new/buffer", "<100 %", "7x11 -> 7", "7 of 9 tensors are equal"):
        assert part in text
    only = diff(tmp_path / "a", tmp_path / "b", slots=["master", "weight16"])
    assert only.is_equal
    assert {row.slot for row in only.rows} == {"master", "weight16"}
    call(tmp_path / "a", tmp_path / "b", "--slots", "master,weight16")
    assert "they have buffer, exp_avg" in call(tmp_path / "a", tmp_path / "b", "--slots", "exp", code=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_ulp(tmp_path, dtype):
    step = {torch.float32: 2**-23, torch.float64: 2**-52, torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(
        dtype, 2**-3
    )
    mine = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    theirs = mine + torch.tensor([3 * step, -2 * step, 0.0, 0.0], dtype=torch.float64)
    theirs[2] = -0.0
    row = pair(tmp_path, mine.to(dtype), theirs.to(dtype))
    assert (row.tally.max_ulp, row.tally.equal) == (3, 2)
    assert row.tally.max_abs == 3 * step
    assert row.tally.max_rel == pytest.approx(3 * step / (1 + 3 * step))


def test_ulp_across_zero(tmp_path):
    tiny = np.nextafter(np.float32(0), np.float32(1))
    row = pair(tmp_path, torch.tensor([float(tiny)]), torch.tensor([-2 * float(tiny)]))
    assert row.tally.max_ulp == 3


def test_other_dtypes_are_compared_by_value(tmp_path):
    values = torch.randn(3000, 1000)
    row = pair(tmp_path / "exact", values.bfloat16(), values.bfloat16().float())
    assert (row.change, row.dtypes, row.tally.max_ulp) == ("equal", ("bfloat16", "float32"), None)
    row = pair(tmp_path / "rounded", values, values.half(), atol=1e-6, rtol=1e-3)
    assert row.change == "equal"
    assert row.tally.max_abs == float((values - values.half().float()).abs().max())
    (row,) = diff(tmp_path / "rounded" / "a", tmp_path / "rounded" / "b").rows
    assert row.change == "values"
    assert row.tally.equal == int((values == values.half().float()).sum())
    assert pair(tmp_path / "ints", torch.arange(5), torch.arange(5.0)).change == "equal"


def test_numbers_that_are_none(tmp_path):
    nan, inf = float("nan"), float("inf")
    mine = torch.tensor([nan, nan, 1.0, inf, inf, inf, 5.0])
    theirs = torch.tensor([nan, 1.0, nan, inf, -inf, 1.0, 5.0])
    row = pair(tmp_path, mine, theirs, rtol=0.5)
    assert (row.tally.nan, row.tally.equal, row.tally.max_abs, row.tally.max_rel) == (2, 3, inf, inf)
    content = json.loads(call(tmp_path / "a", tmp_path / "b", "--json", "--rtol", "0.5", code=1))
    assert content["tensors"][0] | {"max_ulp": None} == {
        "name": "w", "slot": "master", "change": "values", "shapes": [[7], [7]], "dtypes": ["float32", "float32"],
        "numel": 7, "equal": 3, "max_abs": "inf", "max_rel": "inf", "max_ulp": None, "nan": 2,
    }  # fmt: skip


def test_bits(tmp_path):
    odd = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)  # two NaNs and a zero
    same, other = odd.clone(), odd.view(torch.int32).flip(0).view(torch.float32)
    assert pair(tmp_path / "same", odd, same, by_bits=True).change == "equal"
    call(tmp_path / "same" / "a", tmp_path / "same" / "b", "--bits")
    zeros = torch.tensor([0.0, -0.0, 1.0])
    row = pair(tmp_path / "zeros", zeros, zeros.abs(), by_bits=True)
    assert (row.change, row.tally.equal, row.tally.max_abs) == ("values", 2, 0.0)
    call(tmp_path / "zeros" / "a", tmp_path / "zeros" / "b")
    assert "0 of 1 tensors are equal" in call(tmp_path / "zeros" / "a", tmp_path / "zeros" / "b", "--bits", code=1)
    assert pair(tmp_path / "nan", odd, other, by_bits=True).tally.equal == 1
    assert pair(tmp_path / "dtype", zeros, zeros.double(), by_bits=True).change == "dtype"
    call(tmp_path / "zeros" / "a", tmp_path / "zeros" / "a", "--bits", "--rtol", "0.1", code=2)
    with pytest.raises(ValueError, match="without tolerances"):
        pair(tmp_path / "none", zeros, zeros, by_bits=True, rtol=0.1)


def test_bits_leave_out_what_ranks_have_of_their_own(tmp_path):
    def state_of(**changed):
        return STATE | {"engine": STATE["engine"] | changed}

    saved(tmp_path / "a", state=state_of())
    saved(tmp_path / "ranks", size=3, state=state_of(micro_steps=42), rng={"torch": b"others"})
    saved(tmp_path / "steps", state=state_of(global_steps=8))
    assert call(tmp_path / "a", tmp_path / "ranks", "--bits") == "10 of 10 tensors are equal\n"
    call(tmp_path / "a", tmp_path / "ranks", "--bits", "--state", code=1)
    assert "state.engine.global_steps: 7 -> 8" in call(tmp_path / "a", tmp_path / "steps", "--bits", code=1)


def test_large_integers_and_complex(tmp_path):
    row = pair(tmp_path / "i", torch.tensor([2**60, 7]), torch.tensor([2**60 + 1, 4]))
    assert (row.tally.equal, row.tally.max_abs, row.tally.max_ulp) == (0, 3.0, None)
    row = pair(tmp_path / "c", torch.tensor([3 + 4j, 1j]), torch.tensor([0j, 1j]))
    assert (row.tally.equal, row.tally.max_abs) == (1, 5.0)


def test_tolerances(tmp_path):
    mine, theirs = torch.tensor([1.0, 100.0]), torch.tensor([1.01, 101.0])
    assert pair(tmp_path, mine, theirs, rtol=0.0101).change == "equal"
    for more, equal in (({"atol": 0.02}, 1), ({"rtol": 0.001}, 0), ({"atol": 2}, 2)):
        (row,) = diff(tmp_path / "a", tmp_path / "b", **more).rows
        assert row.tally.equal == equal
    call(tmp_path / "a", tmp_path / "b", code=1)
    call(tmp_path / "a", tmp_path / "b", "--atol", "2")
    call(tmp_path / "a", tmp_path / "b", "--atol", "-1", code=2)
    call(tmp_path / "a", tmp_path / "none", code=2)


def test_state(tmp_path):
    tensors = {("w", "master"): torch.ones(2)}
    first = {
        **STATE, "extra": {"gone": 1, "t": torch.ones(3), "same": [float("nan"), {1, 2}], "long": list(range(40))}
    }  # fmt: skip
    second = {**STATE, "engine": {**STATE["engine"], "micro_steps": 15}}
    second["extra"] = {"t": torch.zeros(3), "same": [float("nan"), {2, 1}], "long": [*range(39), 99], "new": "ü"}
    saved(tmp_path / "a", tensors=tensors, state=first, config_json='{"lr": 1, "x": [1, 2]}', rng={"cpu": b"1"})
    saved(tmp_path / "b", tensors=tensors, state=second, config_json='{"lr": 2, "x": [1, 2]}', rng={"cpu": b"2"})
    assert diff(tmp_path / "a", tmp_path / "b").is_equal
    found = diff(tmp_path / "a", tmp_path / "b", wants_state=True)
    assert not found.is_equal
    assert {path: (mine, theirs) for path, mine, theirs in found.state} == {
        "state.engine.micro_steps": ("14", "15"),
        "state.extra.gone": ("1", "(none)"),
        "state.extra.t.elements": ("array float32 [3]", "array float32 [3]"),
        "state.extra.long[39]": ("39", "99"),
        "state.extra.new": ("(none)", "'ü'"),
        "config.lr": ("1", "2"),
        "rng.cpu[0]": ("1 bytes 31", "1 bytes 32"),
    }
    assert "config.lr: 1 -> 2" in call(tmp_path / "a", tmp_path / "b", "--state", code=1)


def test_memory_is_bounded(tmp_path):
    values = torch.randn(16 << 20)
    saved(tmp_path / "a", tensors={("w", "master"): values})
    saved(tmp_path / "b", tensors={("w", "master"): values.bfloat16()})
    with watched() as grown:
        (row,) = diff(tmp_path / "a", tmp_path / "b").rows
    assert row.change == "values"
    assert grown[0] < 24 << 20
