"""`rows_of` on files made to mislead: other files are named and never opened, and nothing goes on without end."""

import h5py
import numpy as np
import pytest

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import kinds
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.tools import tree
from tests.unit.ckpt.attacks import limited, opened_in


def listed(path):
    """Rows by path, read while nothing beside the file may be opened."""
    with limited(60), opened_in(path.parent / "outside") as others:
        found = {row["path"]: row for row in tree.rows_of(path)}
    assert others == []
    return found


@pytest.fixture(autouse=True)
def outside(tmp_path):
    """A folder with files that a file of the test leads to."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for number in range(3):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = np.arange(8)
    (folder / "raw").write_bytes(bytes(64))
    return folder


def test_what_leads_to_other_files(tmp_path, outside):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["link"] = h5py.ExternalLink(str(outside / "0.h5"), "/x")
        file.create_dataset("raw", (8,), "<i8", external=[(str(outside / "raw"), 0, 64)])
        plan = h5py.VirtualLayout((2, 8), "<i8")
        for number in range(2):
            plan[number] = h5py.VirtualSource(str(outside / f"{number}.h5"), "x", (8,))
        file.create_virtual_dataset("virtual", plan)
        # to tell the shape of such a one HDF5 looks for its sources
        space = h5py.h5s.create_simple((1, 8), (h5py.h5s.UNLIMITED, 8))
        space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), block=(1, 8))
        source = h5py.h5s.create_simple((8,))
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_virtual(space, str(outside / "%b.h5").encode(), b"x", source)
        h5py.h5d.create(file.id, b"endless", h5py.h5t.STD_I64LE, space, dcpl=dcpl)
    found = listed(path)
    assert (found["/link"]["kind"], found["/link"]["target"]) == ("external link", f"{outside}/0.h5:/x")
    assert (found["/raw"]["layout"], found["/raw"]["sources"]) == ("external", [str(outside / "raw")])
    assert (found["/virtual"]["layout"], found["/virtual"]["sources"]) == (
        "virtual", [str(outside / "0.h5"), str(outside / "1.h5")])  # fmt: skip
    assert found["/endless"]["sources"] == [str(outside / "%b.h5")]
    said = tree.text_of(found["/virtual"])
    assert said == f"dataset 2x8 int64, virtual, elements in {outside}/0.h5, {outside}/1.h5 (not followed)"


def test_filters_chunks_and_texts(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("packed", data=np.zeros((100, 100)), compression="gzip", shuffle=True)
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_chunk((4,))
        dcpl.set_filter(32100, h5py.h5z.FLAG_OPTIONAL, (1, 2))  # of a plugin that is not here
        h5py.h5d.create(file.id, b"plugin", h5py.h5t.STD_I64LE, h5py.h5s.create_simple((8,)), dcpl=dcpl)
        file.create_dataset("texts", data=["a", "b"])
        file.create_dataset("text chunks", data=["a", "b"], chunks=(1,), maxshape=(None,))
        file.create_dataset("nothing", data=h5py.Empty("f4"))
        file["packed"].attrs["dtype"] = [1, 2]
        file["texts"].attrs["long"] = np.bytes_(b"x" * 65_000)
    found = listed(path)
    assert tree.text_of(found["/packed"]).startswith("dataset 100x100 float64, chunked, filtered by shuffle, deflate, ")
    assert "filtered by" in tree.text_of(found["/plugin"])
    assert (found["/texts"]["layout"], found["/texts"]["type"]) == ("contiguous", "text")
    assert (found["/text chunks"]["layout"], found["/text chunks"]["bytes"]) == (None, None)
    assert tree.text_of(found["/nothing"]).startswith("dataset nothing float32")


def test_loops_depth_and_numbers(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        inner = file
        for _ in range(1000):
            inner = inner.create_group("a")
        inner["top"] = file["/"]
        file["loop"] = h5py.SoftLink("/loop")
        file["again"] = file["/a"]
    found = listed(path)
    assert found["/a/a"]["kind"] == "group" and found["/again"]["target"] == "/a"
    deepest = max(found, key=len)
    assert (found[deepest]["kind"], deepest.count("/")) == ("not shown", 101)
    assert tree.text_of(found["/loop"]) == "soft link -> /loop (not followed)"
    monkeypatch.setattr(tree, "_MOST_ROWS", 10)
    rows = list(tree.rows_of(path))
    assert (len(rows), rows[-1]["target"]) == (11, "the file has more than 10 objects")


def test_a_damaged_object_hides_no_other(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for name in "abc":
            file.create_dataset(name, data=np.arange(5))
        place = h5py.h5o.get_info(file["b"].id).addr
    raw = bytearray(path.read_bytes())
    raw[place : place + 4] = b"XXXX"  # where HDF5 expects the beginning of an object
    path.write_bytes(raw)
    found = listed(path)
    assert [found[f"/{name}"]["kind"] for name in "abc"] == ["dataset", "unreadable", "dataset"]
    assert tree.text_of(found["/b"]).startswith("unreadable: ")


@pytest.mark.parametrize("part", ["begin", "middle", "end"])
def test_flipped_bytes_end(tmp_path, part):
    good = tmp_path / "good.h5"
    with h5py.File(good, "w") as file:
        group = file.create_group("g")
        group.attrs["text"] = "of variable length"
        group["texts"] = ["a", "bc"]
        group.create_dataset("c", data=np.arange(100), chunks=(10,), compression="gzip")
    raw = good.read_bytes()
    third = len(raw) // 3
    first = {"begin": 0, "middle": third, "end": 2 * third}[part]
    path, dice = tmp_path / "x.h5", np.random.default_rng(first)
    outcomes = set()
    for _ in range(60):
        other = bytearray(raw)
        other[first + int(dice.integers(0, third))] ^= int(dice.integers(1, 256))
        path.write_bytes(other)
        with limited(20):
            try:
                outcomes.add(len(list(tree.rows_of(path))) > 0)
            except CorruptCheckpoint:
                outcomes.add("refused")
    assert True in outcomes


def test_what_is_no_file(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no HDF5")
    for name, said in (("pipe", "no ordinary file"), ("text", "no HDF5 file"), ("none", "No such file")):
        with limited(20), pytest.raises(CheckpointError, match=said):
            kinds.kind_of(tmp_path / name)


def test_what_a_root_says(tmp_path):
    path = tmp_path / "x.h5"
    cases = [
        ({}, ("", None)),
        ({"format": "of variable length", "version": 1}, ("", (1, 0))),
        ({"format": np.bytes_(b"f" * 2000), "version": [1, 2, 3]}, ("", None)),
        ({"format": np.bytes_(b"f"), "version": np.array([3, 4], "u1")}, ("f", (3, 4))),
        ({"format": 5, "version": -1}, ("", None)),
        ({"format": h5py.Empty("S1"), "version": h5py.Empty("i4")}, ("", None)),
        ({"format": np.bytes_(b"f"), "version": np.zeros(1000, "i8")}, ("f", None)),
        ({"format": np.array([b"a", b"b"]), "version": 1.0}, ("", None)),
    ]
    for attributes, wanted in cases:
        with h5py.File(path, "w") as file:
            file.attrs.update(attributes)
        found = kinds.kind_of(path)
        assert (found.form, found.version) == wanted
    assert kinds.refusal((3, 0), (2, 0)) == "of version 3.0; this mpispeed reads version 2.0; use a newer one for it"
    assert kinds.refusal((1, 9), (2, 0)) == "of version 1.9; this mpispeed reads version 2.0; use an older one for it"
    assert not kinds.refusal((2, 7), (2, 0)) and kinds.warning((2, 7), (2, 0))
