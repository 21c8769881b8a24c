"""Packed codes in exported HDF5 files: the bytes by formula, values that come back, and files that are not believed."""

import json
import math

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import exporting, packed_weights
from mpispeed.cli.ckpt import ckpt
from mpispeed.native.packed_codes import pack
from tests.unit.ckpt.sample import saved, tensors_of
from tests.zoo import has_same_bits

GROUPS = {"embed.weight": (5, 1100, True), "layers.0.weight": (3, 1, False)}


class Rounds:
    """A packer of two weights, which leaves out a buffer."""

    def __init__(self, reader):
        self.reader = reader

    def leaves_out(self, name):
        return name == "mask"

    def pack(self, name):
        if name not in GROUPS:
            return None
        bits, groups, is_signed = GROUPS[name]
        values = torch.from_numpy(self.reader.read_array(name, "master"))
        rows = values.reshape(groups, -1)
        scales, offsets = rows.abs().amax(1) / 2 ** (bits - 1), None
        low = -(1 << (bits - 1))
        if not is_signed:
            scales, offsets, low = scales * 2, -rows.abs().amax(1), 0
        codes = ((rows - (0 if is_signed else offsets[:, None])) / scales[:, None]).round()
        codes = codes.clamp(low, low + (1 << bits) - 1).int().view(values.shape)
        return pack(codes, bits, scales, offsets, is_signed=is_signed)


@pytest.fixture
def exported(tmp_path):
    saved(tmp_path / "runs", aliases={"head.weight": "embed.weight"})
    with open_reader(tmp_path / "runs") as reader:
        packer = Rounds(reader)
        exporting.export(reader, tmp_path / "w.h5", to="hdf5", dtype="bf16", packer=packer)
        packed = {name: packer.pack(name) for name in GROUPS}
    return tmp_path / "w.h5", packed


def test_codes_take_the_bytes_of_the_formula(exported):
    path, packed = exported
    with h5py.File(path) as file:
        for name, (bits, groups, is_signed) in GROUPS.items():
            numel = math.prod(packed[name].shape)
            sizes = [file[name + end].nbytes for end in ("_codes", "_scales")] + [4 * groups] * (not is_signed)
            assert sizes == [-(-numel * bits // 8), 4 * groups] + [4 * groups] * (not is_signed)
            assert sum(sizes) == packed[name].nbytes
            assert file[name + "_codes"].id.get_storage_size() == sizes[0]
            assert name not in file
        assert file["head.weight_codes"] == file["embed.weight_codes"]
    rows = {row.name: row for row in packed_weights.rows(path)}
    assert rows["embed.weight"].size_bytes == packed["embed.weight"].nbytes
    assert (rows["layers.0.weight"].bits, rows["layers.0.weight"].has_offsets) == (3, True)


def test_values_come_back(exported):
    path, packed = exported
    found = packed_weights.load(path)
    stored = tensors_of()
    assert set(found) == {
        "embed.weight",
        "head.weight",
        "layers.0.weight",
        "frozen/odd%name",
        "scale",
        "empty",
        "counter",
    }
    for name, codes in packed.items():
        assert has_same_bits(found[name], codes.values(torch.bfloat16)), name
    assert has_same_bits(found["head.weight"], found["embed.weight"])
    assert has_same_bits(found["frozen/odd%name"], stored["frozen/odd%name", "weight16"].bfloat16())
    assert has_same_bits(found["counter"], stored["counter", "buffer"])


def test_show_lists_codes(exported):
    path, packed = exported
    result = CliRunner().invoke(ckpt, ["show", str(path), "embed", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.output)
    assert (row["name"], row["bits"], row["groups"], row["dtype"]) == ("embed.weight", 5, 1100, "bfloat16")
    assert row["size_bytes"] == packed["embed.weight"].nbytes
    lines = CliRunner().invoke(ckpt, ["show", str(path)]).output
    assert "3 bits" in lines
    assert "1, with offsets" in lines


def damage(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


DAMAGES = {
    "bits": (lambda file: file["embed.weight_codes"].attrs.modify("bits", 9), "9 bits"),
    "shape": (lambda file: file["embed.weight_codes"].attrs.modify("shape", [1100, 999]), "no 5 bits for each"),
    "dtype": (lambda file: file["embed.weight_codes"].attrs.__delitem__("weight_dtype"), "weight_dtype"),
    "scales": (lambda file: file.__delitem__("embed.weight_scales"), "embed.weight_scales"),
}


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_damaged_file_is_refused(exported, damaged):
    path, _ = exported
    change, said = DAMAGES[damaged]
    damage(path, change)
    for read in (packed_weights.rows, packed_weights.load):
        with pytest.raises(CorruptCheckpoint, match=said) as failure:
            read(path)
        assert str(path) in str(failure.value)


HOSTILE = {
    "a weight of integers": (lambda f: f["embed.weight_codes"].attrs.modify("weight_dtype", b"int64"), "int64"),
    "a dtype of no kind": (lambda f: f["embed.weight_codes"].attrs.modify("weight_dtype", b"float99"), "float99"),
    "a tensor of text": (lambda f: f.create_dataset("note", data=np.array([b"1"])), r"w\.h5 .* type .S1"),
    "sizes whose product overflows": (
        lambda f: f["embed.weight_codes"].attrs.create("shape", [2**33, 2**33, 2**33]),
        "no shape",
    ),
    "a negative size": (lambda f: f["embed.weight_codes"].attrs.modify("shape", [-1100, -1000]), "no shape"),
    "bits that are no number": (lambda f: f["embed.weight_codes"].attrs.create("bits", 5.0), "no whole number"),
    "a sign of 2": (lambda f: f["embed.weight_codes"].attrs.modify("is_signed", 2), "codes of 5 bits"),
    "scales in another file": (lambda f: replaced(f, h5py.ExternalLink("other.h5", "scales")), "not followed"),
    "scales at another place": (lambda f: replaced(f, h5py.SoftLink("/embed.weight_codes")), "not followed"),
    "scales of text": (lambda f: replaced(f, np.array([b"1"] * 1100)), "S1"),
    "scales in fp64": (lambda f: replaced(f, np.ones(1100)), "float64"),
    "scales in two dims": (lambda f: replaced(f, np.ones((1100, 1), "f4")), "1100, 1"),
    "no elements at all": (lambda f: replaced(f, h5py.Empty("f4")), "holds nothing"),
    "scales that are a group": (lambda f: replaced(f, None), "no dataset"),
    "virtual scales": (lambda f: replaced(f, virtual()), "virtual"),
    "offsets of another size": (lambda f: f.create_dataset("embed.weight_offsets", data=np.ones(1, "f4")), "_offsets"),
}


def replaced(file, value):
    """Other scales under the same name."""
    del file["embed.weight_scales"]
    if isinstance(value, h5py.VirtualLayout):
        file.create_virtual_dataset("embed.weight_scales", value)
    elif value is None:
        file.create_group("embed.weight_scales")
    else:
        file["embed.weight_scales"] = value


def virtual():
    layout = h5py.VirtualLayout((1100,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "scales", (1100,))
    return layout


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_parts_are_refused(exported, hostile):
    path, _ = exported
    change, said = HOSTILE[hostile]
    damage(path, change)
    with pytest.raises(CorruptCheckpoint, match=said):
        packed_weights.load(path)


def test_names_of_one_tensor_take_its_memory_once(exported):
    """Else a small file with very many links to its largest dataset would fill any memory."""
    found = packed_weights.load(exported[0])
    assert found["head.weight"] is found["embed.weight"]


def test_groups_have_to_divide(exported):
    path, _ = exported

    def change(file):
        del file["embed.weight_scales"]
        file["embed.weight_scales"] = torch.ones(7).numpy()

    damage(path, change)
    with pytest.raises(CorruptCheckpoint, match="no groups"):
        packed_weights.load(path)


def test_other_formats_have_no_place(tmp_path):
    saved(tmp_path / "runs")
    with open_reader(tmp_path / "runs") as reader, pytest.raises(CheckpointError, match="as hdf5"):
        exporting.export(reader, tmp_path / "w.npz", to="npz", packer=Rounds(reader))
    with pytest.raises(CheckpointError, match="no file"):
        packed_weights.rows(tmp_path / "none.h5")


def test_names_are_escaped(exported):
    with h5py.File(exported[0]) as file:
        assert schema.escape("frozen/odd%name") in file
