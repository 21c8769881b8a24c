"""Small files of torch that ask for much time or memory, and odd content that is harmless."""

import struct
import time
import zipfile

import numpy as np
import pytest
import torch

from mpispeed.ckpt.foreign import pickles, torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMismatch, RefusedPickle
from tests.unit.ckpt.memory import resident
from tests.unit.ckpt.test_import_hostile import pairs, pickled, towers, zipped


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def read(tmp_path, body):
    return torch_files.read(zipped(tmp_path / "x.pt", **pickled(body)))


def rows_of_one_hash(count):
    """Different keys of a dict: rows of -1 and -2, which Python gives one hash."""
    low, high = b"J\xff\xff\xff\xffq\x00", b"J\xfe\xff\xff\xffq\x01"
    rows = (b"(" + b"".join(b"h" + bytes([number >> bit & 1]) for bit in range(16)) + b"tN" for number in range(count))
    return low + high + b"\x86}(" + b"".join(rows) + b"u\x86"


def test_keys_of_one_hash_are_few(tmp_path):
    found = read(tmp_path, rows_of_one_hash(400))
    assert len(found[1]) == 400
    start = time.process_time()
    with pytest.raises(ForeignCorrupt, match="parts of keys"):
        read(tmp_path, rows_of_one_hash(16_000))
    assert time.process_time() - start < 2


def test_many_plain_keys_are_read(tmp_path):
    content = {"text": {f"layer.{n}": n for n in range(30_000)}, "numbers": {n: n for n in range(30_000)}}
    torch.save(content, tmp_path / "x.pt")
    assert torch_files.read(tmp_path / "x.pt") == content


MANY = 400
LETTERS = text("a" * 300_000)
ENTRIES = b"(" + b"".join(b"J" + struct.pack("<i", n + 5) for n in range(3000))


def memory_of(tmp_path, body):
    before = resident()
    with pytest.raises(ForeignCorrupt, match="repeats"):
        read(tmp_path, body)
    return resident() - before


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (b"c_codecs\nencode\n", LETTERS + text("latin1") + b"\x86"),
        (b"c__builtin__\nbytearray\n", LETTERS + text("latin1") + b"\x86"),
        (b"c__builtin__\nset\n", b"]" + ENTRIES + b"e\x85"),
        (b"ccollections\nOrderedDict\n",
         b"](" + b"K\1K\2\x86" * 3000 + b"e\x85"),
        (b"ctorch\nSize\n", b"(" + b"K\1" * 3000 + b"t\x85"),
        (b"cargparse\nNamespace\n", b"(" + b"N" * 30_000 + b"t"),
        (b"cnumpy.core.multiarray\nscalar\n",
         b"cnumpy\ndtype\n" + text("f4") + b"\x89\x88\x87R" + LETTERS + b"\x86"),
    ],
    ids=["encode", "bytearray", "set", "OrderedDict", "Size", "record", "scalar"],
)  # fmt: skip
def test_what_is_called_again_and_again_is_counted_before_it_is_made(tmp_path, monkeypatch, function, argument):
    monkeypatch.setattr(pickles, "_FREE_BYTES", 10 << 20)
    many = b"](" + (b"h\0h\1R" * MANY) + b"e\x87"
    assert memory_of(tmp_path, function + b"q\0" + argument + b"q\1" + many) < 100 << 20


def test_attributes_and_arrays_are_counted_too(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "_FREE_BYTES", 10 << 20)
    fields = b"}(" + b"".join(text(f"name{n}") + b"N" for n in range(3000)) + b"uq\0"
    records = b"](" + b"cargparse\nNamespace\n)Rh\0b" * MANY + b"e\x86"
    assert memory_of(tmp_path, fields + records) < 100 << 20
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"\x89\x88\x87R"
    state = b"(K\1\x8a\x04" + struct.pack("<i", 300_000) + b"\x85" + dtype + b"\x89" + LETTERS + b"tq\0"
    arrays = b"](" + b"cnumpy.core.multiarray\n_reconstruct\n)Rh\0b" * MANY + b"e\x86"
    assert memory_of(tmp_path, state + arrays) < 100 << 20


def of_complex(path, body, offset=0):
    """A file with one storage of complex numbers; in `body`, h 0 and h 1 make a conjugated tensor of it."""
    claim = b"((" + text("storage") + b"ctorch\nComplexFloatStorage\n" + text("0") + text("cpu")
    count = b"J" + struct.pack("<i", 1 << 18)
    notes = b"}" + text("conj") + b"\x88s"
    call = claim + count + b"tQK\0" + count + b"\x85K\1\x85\x89N" + notes + b"tq\1R"
    torch.save({"w": torch.ones(1 << 18, dtype=torch.complex64)}, path)
    with zipfile.ZipFile(path) as source:
        entries = {info.filename: source.read(info) for info in source.infolist()}
    with zipfile.ZipFile(path, "w") as target:
        for name, content in entries.items():
            made = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\0" + call + body + b"."
            target.writestr(name, made if name.endswith("data.pkl") else content)
    return path


def test_conjugated_tensors_are_made_once(tmp_path):
    first, found = torch_files.read(of_complex(tmp_path / "x.pt", b"](" + b"h\0h\1R" * MANY + b"e\x86"))
    assert len(found) == MANY
    assert {tensor.data_ptr() for tensor in found} == {first.data_ptr()}


def test_copies_of_tensors_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "_TIMES", 0)
    monkeypatch.setattr(pickles, "_FREE_BYTES", 1 << 20)
    with pytest.raises(ForeignCorrupt, match="repeats"):
        torch_files.read(of_complex(tmp_path / "x.pt", b"\x85"))


@pytest.mark.parametrize(
    "body",
    [
        b"ctorch.serialization\n_get_layout\n" + towers(pairs) + b"\x85R",
        b"ctorch\nTensor\nccollections\nOrderedDict\n)R" + text("a") + towers(pairs) + b"s\x85R",
        b"c__builtin__\ncomplex\n" + text("1" * 3000) + b"\x85R",
        b"ctorch\nSize\n(" + b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f" * 100_000 + b"t\x85R",
    ],
    ids=["text of", "shown", "complex", "product"],
)
def test_values_are_not_spelled_out(tmp_path, body):
    start = time.process_time()
    with pytest.raises(ForeignCorrupt):
        read(tmp_path, body)
    assert time.process_time() - start < 2


def test_storages_of_a_file_of_old_are_texts_and_its_numbers_whole(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    keys = raw.rindex(b"\x80\x02]")
    path.write_bytes(raw[:keys] + b"\x80\x02](" + towers(pairs) + b"e.")
    with pytest.raises(ForeignCorrupt, match="storages"):
        torch_files.read(path)
    path.write_bytes(b"\x80\x02cnumpy\ndtype\n" + text("f4") + b"\x85R.")
    with pytest.raises(ForeignCorrupt, match="begin"):
        torch_files.read(path)


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<i8", ">c16", "u1", "?"])
def test_numbers_of_the_other_byte_order_keep_their_values(tmp_path, dtype):
    rows = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    torch.save({"rows": rows, "columns": np.asfortranarray(rows), "one": rows.max()}, tmp_path / "x.pt")
    found = torch_files.read(tmp_path / "x.pt")
    for name in ("rows", "columns"):
        assert np.array_equal(found[name], rows), name
        assert found[name].dtype == rows.dtype.newbyteorder("=")
    assert found["one"] == rows.max()
    assert found["rows"].dtype.isnative


def test_an_unknown_byte_order_is_refused(tmp_path):
    dtype = b"cnumpy\ndtype\n" + text("f4") + b"\x85R(K\3" + text("x") + b"tb"
    with pytest.raises(RefusedPickle, match="byte order"):
        read(tmp_path, dtype + b"q\0cnumpy.core.multiarray\nscalar\nh\0" + text("abcd") + b"\x86R\x86")


def test_empty_bytes_arrays_and_frozen_sets_are_harmless(tmp_path):
    content = {"bytes": b"", "frozen": frozenset([1, "a"]), "none": frozenset()}
    torch.save({**content, "rows": np.zeros((0, 3), np.float32)}, tmp_path / "x.pt")
    found = torch_files.read(tmp_path / "x.pt")
    assert found.pop("rows").shape == (0, 3)
    assert found == content
    assert type(found["frozen"]) is frozenset


def test_bytes_are_not_made_of_a_number(tmp_path):
    with pytest.raises(ForeignCorrupt):
        read(tmp_path, b"c__builtin__\nbytes\n\x8a\x05\0\0\0\0\x05\x85R")


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_files_of_another_pickle_protocol_say_so(tmp_path, protocol, is_zip):
    path = tmp_path / "x.pt"
    content = {"a": torch.ones(2), "raw": b"12"}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        RefusedPickle, match=f"protocol {protocol}.* save it again .* without pickle_protocol"
    ) as caught:
        torch_files.read(path)
    assert "damaged" not in str(caught.value)
    torch.save({"a": torch.ones(2)}, path, pickle_protocol=3)
    assert torch.equal(torch_files.read(path)["a"], torch.ones(2))


def test_a_large_description_is_over_a_limit_and_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "_PICKLE_BYTES", 1000)
    torch.save({f"layer.{n}": n for n in range(200)}, tmp_path / "x.pt")
    with pytest.raises(ForeignMismatch, match=r"data\.pkl.* at most 1000 .*; save") as caught:
        torch_files.read(tmp_path / "x.pt")
    assert "damaged" not in str(caught.value)
