"""Pairs of `.bin` and `.idx`: bytes, reads of rows, refusal of damaged files."""

import json
import pickle
import struct

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.cli.main import cli
from mpispeed.curriculum.index_file import MMapIndexedDataset, MMapIndexedDatasetBuilder, summary
from mpispeed.curriculum.index_layout import (
    CODES,
    MEGATRON_CODES,
    IndexFileError,
    fit_dtype,
    is_index_file,
    plain_dtype,
)

ROWS = [[1, 2, 3], [], [200], [4, 5]]


def build(path, rows=ROWS, dtype=np.uint8):
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int64))
    builder.end_document()
    builder.finalize(f"{path}.idx")
    return path


def test_bytes_are_as_documented(tmp_path):
    build(tmp_path / "a", dtype=np.uint16)
    assert (tmp_path / "a.bin").read_bytes() == np.array([1, 2, 3, 200, 4, 5], "<u2").tobytes()
    wanted = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 6, 4, 2) + struct.pack("<4i", 3, 0, 1, 2)
    wanted += struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<2q", 0, 4)
    assert (tmp_path / "a.idx").read_bytes() == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=12),
    code=st.sampled_from(sorted(CODES)),
    more=st.lists(st.lists(st.integers(0, 127), max_size=3), max_size=4),
)
def test_rows_come_back(tmp_path_factory, rows, code, more):
    folder = tmp_path_factory.mktemp("rows")
    build(folder / "more", more, CODES[code])
    builder = MMapIndexedDatasetBuilder(folder / "all.bin", CODES[code])
    builder.add_rows(np.array([x for row in rows for x in row], np.int64), [len(row) for row in rows])
    builder.merge_file_(folder / "more")
    builder.finalize(folder / "all.idx")
    data, wanted = MMapIndexedDataset(folder / "all"), rows + more
    data.check()
    assert [list(row) for row in data] == wanted
    assert [list(row) for row in data[1:-1]] == wanted[1:-1]
    assert list(data.sizes) == [len(row) for row in wanted]
    assert list(data.doc_idx) == [0, len(wanted)]
    assert data.dtype == CODES[code]
    for i, row in enumerate(wanted):
        assert list(data.get(i, len(row) // 2)) == row[len(row) // 2 :]
        assert list(pickle.loads(pickle.dumps(data))[i - len(wanted)]) == row


def test_what_is_not_there(tmp_path):
    data = MMapIndexedDataset(build(tmp_path / "a"))
    for row in (4, -5):
        with pytest.raises(IndexError, match="has 4 rows"):
            data[row]
    with pytest.raises(IndexError, match=r"row 3 .* has 2 values; 2 from 1 on"):
        data.get(3, 1, 2)
    with pytest.raises(ValueError, match="step 2"):
        data[::2]
    with pytest.raises(IndexFileError, match=r"b\.idx cannot be read: No such file"):
        MMapIndexedDataset(tmp_path / "b")
    assert MMapIndexedDataset.exists(tmp_path / "a")
    assert not MMapIndexedDataset.exists(tmp_path / "b")


def test_values_do_not_wrap_around(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "a.bin", torch.uint8)
    for value in (256, -1, 1e9, float("nan")):
        with pytest.raises(IndexFileError, match=r"do not fit|not a number"):
            builder.add_item(torch.tensor([value]))
    builder.add_item(torch.tensor([3.9]))
    builder.finalize(tmp_path / "a.idx")
    assert list(MMapIndexedDataset(tmp_path / "a")[0]) == [3]
    with pytest.raises(IndexFileError, match="float32 cannot be stored"):
        plain_dtype(torch.float32)


@pytest.mark.parametrize(
    ("low", "high", "name"),
    [
        (0, 255, "uint8"), (0, 256, "uint16"), (0, 65536, "uint32"), (0, 2**32, "uint64"), (0, 2**64 - 1, "uint64"),
        (-128, 127, "int8"), (-129, 0, "int16"), (-1, 32768, "int32"), (-1, 2**31, "int64"),
    ],
)  # fmt: skip
def test_smallest_type(low, high, name):
    assert fit_dtype(low, high).name == name


def test_no_type_fits():
    with pytest.raises(IndexFileError, match="-1 to 18446744073709551615"):
        fit_dtype(-1, 2**64 - 1)


@pytest.mark.parametrize(
    ("place", "form", "value", "text"),
    [
        (0, "B", 0, "does not begin with MMIDIDX"),
        (9, "Q", 2, "version 2"),
        (17, "B", 9, "9 is no code"),
        (17, "B", 5, "ends at byte 20 of 6"),
        (18, "Q", 2**61, "it should have"),  # 12 * 2^61 overflows 64 bits
        (26, "Q", 2**61 + 2, "it should have"),
        (34, "i", -3, "length -3"),
        (34, "i", 2**31 - 1, "begins at byte 3"),
        (50, "q", -1, "begins at byte -1"),
        (58, "q", 2**62, "begins at byte 4611686018427387904"),
        (82, "q", 5, "document marks"),
    ],
)
def test_wrong_numbers(tmp_path, place, form, value, text):
    path = build(tmp_path / "a")
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into(f"<{form}", raw, place, value)
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(IndexFileError, match=text):
        MMapIndexedDataset(path).check()


def test_flipped_bits_end_in_a_sentence_or_change_document_marks_only(tmp_path):
    path = build(tmp_path / "a")
    whole = (tmp_path / "a.idx").read_bytes()
    for bit in range(8 * len(whole)):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a.idx").write_bytes(raw)
        try:
            data = MMapIndexedDataset(path)
            data.check()
        except IndexFileError as error:
            assert str(tmp_path) in str(error)
            assert "\n" not in str(error)
        else:  # a mark that is a number of a row too, or the signed type of the same width
            assert bit // 8 == 17 or bit // 8 >= 34 + 12 * 4
            assert [len(row) for row in data] == [3, 0, 1, 2]


def test_cut_files(tmp_path):
    path = build(tmp_path / "a")
    for name in ("a.idx", "a.bin"):
        whole = (tmp_path / name).read_bytes()
        for size in range(len(whole)):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(IndexFileError):
                MMapIndexedDataset(path)
        (tmp_path / name).write_bytes(whole)


def test_megatron_says_other_types(tmp_path):
    build(tmp_path / "a", dtype=np.int32)
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 3, 200, 4, 65535], "<u2").tobytes())
    raw[17] = 8
    raw[50:82] = struct.pack("<4q", 0, 6, 6, 8)
    (tmp_path / "a.idx").write_bytes(raw + bytes(4))  # with the modes of its rows
    data = MMapIndexedDataset(tmp_path / "a", codes=MEGATRON_CODES)
    data.check()
    assert data.dtype == np.uint16
    assert list(data[3]) == [4, 65535]
    with pytest.raises(IndexFileError, match="it should have"):
        MMapIndexedDataset(tmp_path / "a")


def test_summary(tmp_path):
    build(tmp_path / "a")
    wanted = summary(tmp_path / "a.idx")
    assert wanted == summary(tmp_path / "a.bin") == summary(tmp_path / "a")
    assert [wanted[name] for name in ("dtype", "rows", "values", "longest row")] == ["uint8", 4, 6, 3]
    assert is_index_file(tmp_path / "a.idx")
    assert not is_index_file(tmp_path / "a.bin")
    assert not is_index_file(tmp_path)


def test_data_show_says_what_it_is(tmp_path):
    build(tmp_path / "a")
    show = ["data", "show", str(tmp_path / "a.idx")]
    told = CliRunner().invoke(cli, show).output.splitlines()
    assert [line.split(maxsplit=1)[1] for line in told if line.startswith(("rows", "values", "dtype"))] == [
        "uint8", "4", "6"
    ]  # fmt: skip
    assert json.loads(CliRunner().invoke(cli, [*show, "--json"]).output)["longest row"] == 3
    assert CliRunner().invoke(cli, [*show, "--document", "3"]).output == "4 5\n"
    failed = CliRunner().invoke(cli, [*show, "--document", "4"])
    assert "has no row 4; it has 4" in str(failed.exception)
