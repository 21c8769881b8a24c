"""`ckpt ls, show, tree, stats, diff, verify` of checkpoints with experts, numbered and fused, and of such that lie."""

import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import experts
from mpispeed.ckpt.format.logical import ALL_EXPERTS, LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.tools import verify as verifying
from mpispeed.ckpt.write.save import save
from mpispeed.cli.ckpt import ckpt
from mpispeed.mesh.backends.solo import solo_comm
from tests.unit.ckpt.attacks import sign_files

LAYERS = {"layers.1.moe.experts": 4, "layers.10.moe.experts": 3}
FUSED = "layers.2.mlp.experts.up"


def known(seed=0):
    """Name -> (expert, tensor): two layers of numbered experts, one fused, and a dense parameter."""
    make = torch.Generator().manual_seed(seed)
    found = {"layers.1.weight": (None, torch.rand(3, 2, generator=make))}
    for layer, total in LAYERS.items():
        for number in range(total):
            for rest, shape in (("up.weight", (2, 5)), ("up.bias", (2,))):
                found[f"{layer}.{number}.{rest}"] = ((number, total), torch.rand(shape, generator=make))
    found[FUSED] = ((ALL_EXPERTS, 4), torch.rand(4, 3, 2, generator=make))
    return found


def write(folder, content, tag="t"):
    params = [ParamInfo(name, tuple(tensor.shape), expert=expert) for name, (expert, tensor) in content.items()]
    tensors = [
        LogicalTensor(name, slot, tuple(tensor.shape), tensor.dtype, [Piece(0, tensor.reshape(-1) * factor)])
        for name, (_, tensor) in content.items()
        for slot, factor in (("master", 1), ("exp_avg", 2))
    ]
    save(solo_comm(), folder, tag, params=params, tensors=tensors, layout={"data": 2})


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("experts")
    write(where, known())
    return where


def test_ls_show_and_tree_have_numbers_of_experts(folder, tmp_path):
    assert "data=2 experts=1x3,2x4" in call("ls", folder)
    text = call("show", folder)
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert lines["layers.1.moe.experts.2.up.bias"][1:4] == ["2", "of", "4"]
    assert lines[FUSED][1:3] == ["all", "4"]
    assert "layers.10.moe.experts: 3 experts, 6 parameters, 288 B" in text
    assert "layers.2.mlp.experts: 4 experts, 1 parameters, 192 B" in text
    rows = json.loads(call("show", folder, "layers.10.*", "--json"))["experts"]
    assert rows == [{"layer": "layers.10.moe.experts", "experts": 3, "params": 6, "bytes": 288}]
    objects = json.loads(call("tree", folder, "--json"))
    found = {row["path"]: row["attributes"].get("expert") for row in objects if row["kind"] == "group"}
    assert found["/params/layers.1.moe.experts.2.up.bias"] == [2, 4]
    assert found[f"/params/{FUSED}"] == [-1, 4]
    write(tmp_path, {"layers.1.weight": known()["layers.1.weight"]})
    assert "experts" not in call("ls", tmp_path) + call("show", tmp_path) + call("stats", tmp_path)


def test_stats_have_a_row_for_each_expert(folder):
    found = json.loads(call("stats", folder, "--slots", "all", "--json"))["experts"]
    assert len(found) == 2 * (4 + 3 + 4)
    rows = {(row["layer"], row["expert"], row["slot"]): row for row in found}
    content = known()
    for (layer, number, slot), row in rows.items():
        own = [
            tensor[number] if expert[0] == ALL_EXPERTS else tensor
            for name, (expert, tensor) in content.items()
            if expert and name.startswith(f"{layer}.") and expert[0] in (number, ALL_EXPERTS)
        ]
        values = torch.cat([part.reshape(-1) for part in own]).double().numpy() * (2 if slot == "exp_avg" else 1)
        assert (row["tensors"], row["count"], row["experts"]) == (len(own), values.size, 4 - (layer[7:9] == "10"))
        assert (row["min"], row["max"]) == (values.min(), values.max())
        assert np.isclose(row["mean"], values.mean(), rtol=1e-12)
        assert np.isclose(row["std"], values.std(), rtol=1e-9)
    order = [(row["layer"], row["slot"], row["expert"]) for row in found]
    assert order[:5] == [("layers.1.moe.experts", "master", number) for number in range(4)] + [
        ("layers.1.moe.experts", "exp_avg", 0)
    ]
    assert "2 of 4" in call("stats", folder)


def test_diff_tells_which_experts_differ(folder, tmp_path):
    other = known()
    other["layers.1.moe.experts.2.up.bias"][1][1] += 1
    other["layers.1.moe.experts.3.up.weight"][1][0] += 1
    other[FUSED][1][1, 2, 0] += 1e-3
    write(tmp_path, other)
    text = call("diff", folder, tmp_path, code=1)
    assert "experts of layers.1.moe.experts that differ: 2, 3 of 4" in text
    assert "experts of layers.2.mlp.experts that differ: 1 of 4" in text
    assert "experts of layers.10" not in text
    found = json.loads(call("diff", folder, tmp_path, "--json", "--slots", "master", "--atol", "0.01", code=1))
    assert found["experts"] == [{"layer": "layers.1.moe.experts", "experts": 4, "differ": [2, 3]}]
    (row,) = [row for row in found["tensors"] if row["name"] == FUSED]
    assert (row["change"], row["numel"], row.get("experts")) == ("equal", 24, None)
    assert "experts of" not in call("diff", folder, folder)


def test_diff_tells_experts_of_one_side(folder, tmp_path):
    content = {name: row for name, row in known().items() if ".experts.1." not in name or "10" in name}
    content[FUSED] = ((ALL_EXPERTS, 3), torch.zeros(3, 3, 2))
    write(tmp_path, content)
    found = json.loads(call("diff", folder, tmp_path, "--json", code=1))["experts"]
    wanted = [("layers.1.moe.experts", [1]), ("layers.2.mlp.experts", [0, 1, 2, 3])]
    assert [(row["layer"], row["differ"]) for row in found] == wanted


def write_fused(folder, tensor, slots):
    """A checkpoint of one tensor of all experts, with other slots beside the weight."""
    info = ParamInfo(FUSED, tuple(tensor.shape), expert=(ALL_EXPERTS, len(tensor)))
    rows = {"master": tensor, **slots}.items()
    tensors = [LogicalTensor(FUSED, slot, tuple(x.shape), x.dtype, [Piece(0, x.reshape(-1))]) for slot, x in rows]
    save(solo_comm(), folder, "t", params=[info], tensors=tensors, layout={})


def test_slots_of_other_shapes_may_be_of_any_expert(tmp_path):
    for number in range(2):
        write_fused(tmp_path / str(number), torch.ones(4, 3), {"row": torch.full((3,), float(number))})
    found = json.loads(call("diff", tmp_path / "0", tmp_path / "1", "--json", code=1))
    assert found["experts"] == [{"layer": "layers.2.mlp.experts", "experts": 4, "differ": [0, 1, 2, 3]}]
    assert {row["slot"]: row.get("experts") for row in found["tensors"]} == {"master": None, "row": [0, 1, 2, 3]}


def test_tensors_of_very_many_experts_have_no_row_for_each(tmp_path):
    for number in range(2):
        write_fused(tmp_path / str(number), torch.full((experts.MOST_SPLIT + 1, 1), float(number)), {})
    assert json.loads(call("stats", tmp_path / "0", "--json"))["experts"] == []
    found = json.loads(call("diff", tmp_path / "0", tmp_path / "1", "--json", code=1))
    (row,) = found["tensors"]
    assert (row["change"], row["numel"], found["experts"]) == ("values", experts.MOST_SPLIT + 1, [])
    write_fused(tmp_path / "none", torch.ones(1, 0), {})
    assert json.loads(call("diff", tmp_path / "none", tmp_path / "none", "--json"))["experts"] == []
    write(tmp_path / "empty", {"layers.1.weight": (None, torch.ones(0, 2))})
    assert json.loads(call("diff", tmp_path / "empty", tmp_path / "empty", "--json"))["equal"]


def replaced(content, name, **parts):
    """The content with another expert, shape or name of a parameter."""
    expert, tensor = content.pop(name)
    shape = parts.get("shape")
    content[parts.get("name", name)] = (parts.get("expert", expert), tensor if shape is None else torch.zeros(shape))


EXPERT = "layers.1.moe.experts.2.up.bias"
#: what is changed, and the sentence
LIES = {
    "a missing one": (
        lambda c: [c.pop(name) for name in list(c) if name.startswith("layers.1.moe.experts.2.")],
        "expert 2 of 4 of layers.1.moe.experts is missing",
    ),
    "a missing last one": (
        lambda c: [c.pop(name) for name in list(c) if name.startswith("layers.10.moe.experts.2.")],
        "expert 2 of 3 of layers.10.moe.experts is missing",
    ),
    "a missing parameter": (lambda c: c.pop(EXPERT), "expert 2 of layers.1.moe.experts lacks 'up.bias'"),
    "a parameter too many": (
        lambda c: c.update({"layers.1.moe.experts.2.more": ((2, 4), torch.ones(1))}),
        "expert 2 of layers.1.moe.experts has 'more'",
    ),
    "a number twice": (lambda c: replaced(c, EXPERT, expert=(1, 4)), "one is there twice"),
    "another shape": (lambda c: replaced(c, EXPERT, shape=(3,)), "of expert 2 is of shape (3,)"),
    "two counts": (lambda c: replaced(c, EXPERT, expert=(2, 8)), "are said to be 4 and 8 in number"),
    "experts without end": (
        lambda c: [
            replaced(c, name, expert=(row[0][0], 10**18))
            for name, row in list(c.items())
            if name.startswith("layers.1.moe.")
        ],
        "expert 4 of 1000000000000000000 of layers.1.moe.experts is missing, and 999999999999999995 others",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_verify_tells_what_is_wrong_with_experts_and_no_tool_trips_over_it(tmp_path, lie):
    change, text = LIES[lie]
    content = known()
    change(content)
    write(tmp_path, content)
    report = verifying.verify_location(str(tmp_path))
    assert text in "\n".join(problem.what for problem in report.problems)
    assert len(report.problems) <= 2
    assert text in call("verify", tmp_path, "--quick", code=3)
    for command in ("ls", "show", "tree"):
        call(command, tmp_path)
    call("stats", tmp_path, "--slots", "all")
    call("diff", tmp_path, tmp_path)


@pytest.mark.parametrize("expert", [(4, 4), (-2, 4), (-1, 0), (2**63 - 1, 2**63 - 1), (-1, 3), (-1, 10**18)])
def test_numbers_that_are_none_are_refused(folder, tmp_path, expert):
    content = known()
    replaced(content, FUSED, expert=expert)
    with pytest.raises(CheckpointError, match=r"number of an expert|its shape is \(4, 3, 2\)"):
        write(tmp_path, content)
    copy = tmp_path / "copy"
    shutil.copytree(folder / "t", copy / "t")
    with h5py.File(copy / "t" / "model.h5", "r+") as file:
        file[f"params/{FUSED}"].attrs["expert"] = np.array(expert)
    sign_files(copy / "t")
    for command in ("show", "stats"):
        lines = call(command, copy / "t", code=3).splitlines()
        assert len(lines) == 1
        assert "number of an expert" in lines[0] or "its shape is (4, 3, 2)" in lines[0]


def test_a_good_checkpoint_and_one_without_numbers_in_names(folder, tmp_path):
    assert verifying.verify_location(str(folder)).status == "ok"
    write(tmp_path, {"bank.up": ((2, 4), torch.ones(3)), "layers.3.bank_2": ((1, 2), torch.ones(2))})
    assert verifying.verify_location(str(tmp_path)).status == "ok"
    assert experts.summary([ParamInfo("bank.up", (3,), expert=(2, 4))]) == ""
