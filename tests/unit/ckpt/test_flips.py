"""Single bits flipped anywhere in a checkpoint: nothing else is ever read in silence, and `verify` names the place."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.verify import verify
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.attacks import TENSORS, limited, read_all, records
from tests.unit.ckpt.sample import STATE, saved
from tests.zoo import has_same_bits

SEED = 20
FLIPS = 12
"""Of each kind and each checkpoint."""
SECONDS = 20
# of two blocks
LARGE = {("large", "master"): torch.arange(1_060_000.0), ("large", "exp_avg"): torch.arange(11_000.0).bfloat16()}
STATES = {**STATE, "client": {"note": "läuft", "values": list(range(100)), "tensor": torch.arange(50.0)}}


@pytest.fixture(scope="module", params=[1, 3], ids=["one file", "three files"])
def folder(tmp_path_factory, request):
    where = tmp_path_factory.mktemp("flips")
    saved(
        where, tensors={**TENSORS, **LARGE}, state=STATES, rng={"cpu": bytes(range(200))}, layout={"axes": {"data": 1}},
        aliases={"tied": "b.weight", "tied too": "a.weight"}, options=SaveOptions(files=request.param),
    )  # fmt: skip
    return where


def places_of(folder):
    """Kind -> rows (file, first byte, bytes, tensor): every byte of every file is in exactly one."""
    tag = folder / "step7"
    kinds = {"elements": [], "index": []}
    with open_checkpoint(folder) as checkpoint:
        for tensor in checkpoint.tensors():
            if tensor.numel:
                row = (tag / tensor.file, tensor.offset, tensor.size_bytes, f"{tensor.name}/{tensor.slot}")
                kinds["elements"].append(row)
    for name, record in records(tag).items():
        kinds["index"] += [(tag / name, start, length, "") for start, length in record["index_extents"]]
    for path in (tag / schema.STATE_FILE, tag / schema.MANIFEST_FILE, folder / schema.LATEST_FILE):
        kinds[path.name] = [(path, 0, path.stat().st_size, "")]
    return kinds


def flipped(path, place, bit):
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 1 << bit]))


def same(first, second):
    """Equal in type and every bit, however nested."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and has_same_bits(first, second)
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and np.array_equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


def check_flip(folder, good, path, place, label):
    """What reading and verifying say of the altered checkpoint; "" when that is as it has to be."""
    try:
        if not same(read_all(folder), good):
            return "other values were read in silence"
        if path.name != schema.LATEST_FILE:
            return "nothing was noticed"
    except CheckpointError as failure:
        said = str(failure)
        if str(path) not in said and not (path.name == "latest" and "latest" in said):
            return f"another file was named: {said}"
        if label and label not in said:
            return f"not {label} was named: {said}"
    report = verify(folder / "step7", "step7")
    wanted = f"../{path.name}" if path.name == "latest" else path.relative_to(folder / "step7").as_posix()
    if report.status != "corrupt" or wanted not in {problem.file for problem in report.problems}:
        return f"verify says {report.status}: {[problem.text() for problem in report.problems]}"
    named = {f"{problem.name}/{problem.slot}" for problem in report.problems if problem.name}
    if label and named != {label}:
        return f"verify names {named} instead of {label}"
    return ""


def test_two_hundred_flips(folder):
    pick = random.Random(SEED)
    sys.stdout.write(f"seed {SEED}\n")
    good = read_all(folder)
    assert verify(folder / "step7", "step7").status == "ok"
    kinds, wrong, count = places_of(folder), [], 0
    covered = sum(row[2] for rows in kinds.values() for row in rows)
    assert covered == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    for kind, rows in kinds.items():
        flips = FLIPS * (3 if kind in ("elements", "index") else 1)
        for _ in range(flips):
            # by bytes, but for every third, which goes to a small extent as likely as to a large one
            weights = [row[2] for row in rows] if pick.random() < 0.67 else None
            path, start, length, label = pick.choices(rows, weights)[0]
            place, bit = start + pick.randrange(length), pick.randrange(8)
            flipped(path, place, bit)
            with limited(SECONDS):
                problem = check_flip(folder, good, path, place, label)
            flipped(path, place, bit)
            count += 1
            if problem:
                wrong.append(f"{kind}: bit {bit} of byte {place} of {Path(path).name}: {problem}")
    assert wrong == []
    assert count >= 100
    assert same(read_all(folder), good)


def test_the_command_ends_with_3_and_names_the_place(folder):
    for kind, rows in places_of(folder).items():
        path, start, _, label = rows[-1]
        flipped(path, start, 3)
        done = CliRunner().invoke(ckpt, ["verify", f"{folder}:step7"])
        flipped(path, start, 3)
        assert done.exit_code == 3, kind
        assert path.name in done.output
        assert label in done.output
    assert CliRunner().invoke(ckpt, ["verify", f"{folder}:step7"]).exit_code == 0
