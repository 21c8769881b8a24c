"""Files of others that lie: each is refused in a sentence, soon and in little memory, or read as it was meant."""

import io
import json
import resource
import time
import zipfile

import click.testing
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.faults import ForeignIncomplete, RefusedPickle
from mpispeed.ckpt.foreign.opening import open_foreign
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.foreign_folders import Known, save, write_grouped
from tests.unit.ckpt.memory import resident

SECONDS = 5
MORE_BYTES = 500 << 20
STATE = {"a": torch.arange(64.0), "b": torch.arange(6.0).reshape(2, 3), "note": "x"}


def refused(path, match=""):
    """Refused by the command: one line on stderr, soon, in little memory, and with nothing left behind."""
    before, memory = time.process_time(), resident()
    done = click.testing.CliRunner().invoke(ckpt, ["import", str(path), str(path.parent / "to")])
    assert time.process_time() - before < SECONDS
    assert resident() - memory < MORE_BYTES
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (2, 3, 4), done.output
    line = done.output.removesuffix("\n")
    assert line.isprintable()
    assert line.startswith("Error: ")
    assert len(line) < 2500
    assert match in line
    assert not (path.parent / "to").exists()


def zipped(path, change=lambda _: None, compression=zipfile.ZIP_STORED, **entries):
    """A file of torch with other entries, or other bytes in them."""
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", compression) as target:
        for info in source.infolist():
            name = info.filename.partition("/")[2]
            content = entries.pop(name, None)
            target.writestr(f"x/{name}", source.read(info) if content is None else content)
        for name, content in entries.items():
            target.writestr(f"x/{name}", content)
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)
    return path


def directory(raw, entry):
    """Where the row of an entry begins in the directory, and its local header."""
    place = raw.rindex(b"PK\x01\x02", 0, raw.rindex(entry))
    return place, int.from_bytes(raw[place + 42 : place + 46], "little")


def same(found):
    return all(torch.equal(found[name], STATE[name]) for name in ("a", "b"))


def test_a_file_zipped_anew_without_compression_is_read(tmp_path):
    assert same(torch_files.read(zipped(tmp_path / "x.pt")))


def test_a_compressed_file_is_no_garbage(tmp_path):
    refused(zipped(tmp_path / "x.pt", compression=zipfile.ZIP_DEFLATED), "compressed")


def test_a_storage_shorter_than_its_tensor_is_not_filled_up(tmp_path):
    refused(zipped(tmp_path / "x.pt", **{"data/0": b"12345678"}), "8 bytes, 256 are needed")
    refused(zipped(tmp_path / "x.pt", **{"data/0": bytes(260)}), "260 bytes, 256 are needed")


@pytest.mark.parametrize(("is_local", "field"), [(1, 8), (1, 14), (1, 18), (1, 22), (1, 26), (0, 10), (0, 16), (0, 20)])
def test_what_stands_twice_in_a_zip_file_has_to_agree(tmp_path, is_local, field):
    """Methods, checksums, sizes and lengths of names of the local header and of the directory."""

    def change(raw):
        raw[directory(raw, b"x/data/0")[is_local] + field] ^= 1

    refused(zipped(tmp_path / "x.pt", change))


def test_an_entry_that_lies_in_another_is_refused(tmp_path):
    def change(raw):
        one, _ = directory(raw, b"x/data/0")
        other, _ = directory(raw, b"x/data/1")
        raw[one + 42 : one + 46] = raw[other + 42 : other + 46]

    refused(zipped(tmp_path / "x.pt", change))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_twice_and_strange_folders_are_refused(tmp_path):
    path = zipped(tmp_path / "x.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(256))
    refused(path, "names")
    path = zipped(tmp_path / "x.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    refused(path, "folders")


def test_bytes_before_or_behind_the_zip_file_are_refused(tmp_path):
    raw = zipped(tmp_path / "x.pt").read_bytes()
    for altered in (raw + b"more", raw[:-1], raw[:-22], raw[:400]):
        (tmp_path / "x.pt").write_bytes(altered)
        refused(tmp_path / "x.pt")


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_flipped_bit_is_found_by_the_checksums_if_the_file_has_some(tmp_path, has_sums):
    torch.serialization.set_crc32_options(has_sums)
    try:
        torch.save(STATE, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(torch_files.read(tmp_path / "x.pt"))
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[raw.index(STATE["a"].numpy().tobytes()) + 9] ^= 4
    (tmp_path / "x.pt").write_bytes(raw)
    if has_sums:
        refused(tmp_path / "x.pt", "checksum")
    else:
        assert not same(torch_files.read(tmp_path / "x.pt"))


def test_a_zip_file_with_numbers_of_64_bits_is_read(tmp_path):
    plain = zipped(tmp_path / "plain.pt")
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tmp_path / "x.pt", "w") as target:
        for info in source.infolist():
            with target.open(info.filename, "w", force_zip64=True) as entry:
                entry.write(source.read(info))
    assert same(torch_files.read(tmp_path / "x.pt"))


def test_other_byte_orders_and_programs_are_refused(tmp_path):
    refused(zipped(tmp_path / "x.pt", byteorder=b"big"), "byte order")
    refused(zipped(tmp_path / "x.pt", byteorder=b"x" * 99), "byteorder")
    refused(zipped(tmp_path / "x.pt", **{"constants.pkl": b""}), "TorchScript")


def test_a_bomb_is_not_unpacked(tmp_path):
    bomb = zipped(tmp_path / "x.pt", compression=zipfile.ZIP_DEFLATED, **{"data.pkl": bytes(200 << 20)})
    refused(bomb, "compressed")
    bomb.unlink()
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive, archive.open("x/data.pkl", "w") as entry:
        for _ in range(65):
            entry.write(bytes(1 << 20))
    refused(tmp_path / "y.pt", "at most 67108864 are read")


def pickled(body):
    """A file of torch whose description is the pickle of these instructions."""
    return {"data.pkl": b"\x80\x02" + body + b"."}


def long(number):
    return b"\x8a\x10" + number.to_bytes(16, "little", signed=True)


def towers(wrap):
    """60 values, each holding the one below twice: 2^60 ways lead to the first."""
    return b")q\0" + b"".join(wrap(b"h" + bytes([i]) + b"h" + bytes([i])) + b"q" + bytes([i + 1]) for i in range(60))


def pairs(twice):
    return twice + b"\x86"


@pytest.mark.parametrize(
    "body",
    [
        # as values, as a key, in a set, and as what a message would show
        b"}X\x01\0\0\0a" + towers(lambda twice: b"](" + twice + b"e") + b"s",
        b"}" + towers(pairs) + b"K\1s",
        b"c__builtin__\nset\n](" + towers(pairs) + b"e\x85R",
        towers(pairs) + b"Q",
        b"}X\x01\0\0\0aX\0\0\x10\0" + b"x" * (1 << 20) + b"q\1](" + b"h\1" * 90_000 + b"es",
        b"]q\0h\0a",
        b"](" * 100_000 + b"e" * 100_000,
        b"c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x05\x85R",
        b"ctorch\nSize\n(" + b"\x8a\x05\0\0\0\0\x05" * 9 + b"t\x85R",
        b"}(" + b"".join(long(n * (2**61 - 1)) + b"N" for n in range(1, 40_000)) + b"u",
        b"r\xff\xff\xff\xff",
        b"cposix\nsystem\nX\x02\0\0\0ls\x85R",
        b"c__builtin__\ngetattr\n",
        b"ctorch\nload\n",
        b"c\x1b[31mx\ny\n",
        b"",
    ],
    ids=[
        "lists", "keys", "sets", "ids", "texts", "itself", "deep", "bytearray", "sizes", "hashes", "memo", "system",
        "getattr", "torch.load", "colours", "empty",
    ],
)  # fmt: skip
def test_pickles_that_take_time_or_memory_or_call_are_refused(tmp_path, body):
    refused(zipped(tmp_path / "x.pt", **pickled(body)))


def rebuilt(storage, size, stride, offset=0):
    """A dict with a tensor in such a pickle."""
    numbers = [b"(" + b"".join(map(long, row)) + b"t" for row in (size, stride)]
    claim = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + storage + b"X\x03\0\0\0cpuK\x40tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return b"}X\x01\0\0\0a" + call + claim + long(offset) + b"".join(numbers) + b"\x89NtRs"


def test_such_a_pickle_is_read_if_it_does_not_lie(tmp_path):
    found = torch_files.read(zipped(tmp_path / "x.pt", **pickled(rebuilt(b"0", [3, 4], [10, 2], 5))))
    assert torch.equal(found["a"], torch.as_strided(STATE["a"], (3, 4), (10, 2), 5))


@pytest.mark.parametrize(
    "places",
    [([65], [1]), ([8, 9], [8, 1]), ([4], [1], 61), ([2], [64]), ([4], [-1], 9), ([4], [1], -1), ([-4], [1]),
     ([4], [1, 1]), ([1 << 40, 1 << 40], [0, 0]), ([1 << 40], [0]), ([0, 1 << 62, 4], [0, 0, 0]), ([1] * 60, [1] * 60)],
)  # fmt: skip
def test_tensors_beyond_their_storage_are_refused(tmp_path, places):
    refused(zipped(tmp_path / "x.pt", **pickled(rebuilt(b"0", *places))))


def test_a_storage_that_is_not_there_is_refused(tmp_path):
    refused(zipped(tmp_path / "x.pt", **pickled(rebuilt(b"7", [4], [1]))), "data/7")


def test_truth_values_are_0_or_1(tmp_path):
    torch.save({"a": torch.full((4,), 7, dtype=torch.uint8).view(torch.bool)}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "truth value")


def test_storages_that_a_file_of_old_does_not_hold_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert same(torch_files.read(path))
    raw = path.read_bytes()
    count = raw.index((64).to_bytes(8, "little") + STATE["a"].numpy().tobytes())
    for altered in (
        raw[:count] + (63).to_bytes(8, "little") + raw[count + 8 :],
        raw[:-4],
        raw + b"more",
        raw[: raw.rindex(b"\x80\x02]")] + b"\x80\x02].",  # no list of storages: torch would leave memory as it was
    ):
        path.write_bytes(altered)
        refused(path)


def test_what_is_not_dense_is_refused_where_it_is_a_weight(tmp_path):
    sparse, other = torch.eye(3).to_sparse(), {"w": torch.ones(2)}
    torch.save({**other, "s": sparse}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "dense")
    torch.save({"model": other, "s": sparse, "steps": torch.optim.lr_scheduler.Counter([1, 1])}, tmp_path / "x.pt")
    assert list(open_foreign(tmp_path / "x.pt").params) == ["w"]


def test_values_beside_tensors_are_read(tmp_path):
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    param = torch.nn.Parameter(torch.ones(2))
    param.tensor_model_parallel = True
    tensors = {
        "conj": conjugated, "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "p": param,
        "u": torch.arange(3).to(torch.uint16), "f": torch.ones(2).to(torch.float8_e4m3fn), "b": torch.tensor([True]),
    }  # fmt: skip
    rows = {
        "set": {1, 2}, "bytes": bytearray(b"12"), "z": 3 + 4j, "np": np.float32(1.5), "big": 2**70, "none": None,
        "dtype": torch.bfloat16, "size": torch.Size((3, 4)), "t": (1, [2]),
    }  # fmt: skip
    torch.save(tensors | rows, tmp_path / "x.pt")
    found = torch_files.read(tmp_path / "x.pt")
    for name, tensor in tensors.items():
        own = found.pop(name)
        assert own.dtype == tensor.dtype
        assert torch.equal(own.to(torch.complex128), tensor.detach().to(torch.complex128)), name
    assert found == rows


def test_patterns_of_a_file_that_take_for_ever_are_refused(tmp_path):
    for patterns in (["(a+)+$"], [".*.*.*.*.*x"]):
        known = Known()
        known.groups = [{"a" * 200 + "!": torch.Size((4, 4))}, {"b": torch.Size((4,))}]
        known.slots = {
            (n, s): torch.ones(shape)
            for g in known.groups
            for n, shape in g.items()
            for s in ("master", "exp_avg", "exp_avg_sq")
        }
        known.frozen, known.shared = {}, {}
        info = {"tp_replicated_parameter_patterns": patterns}
        for rank in range(2):
            write_grouped(tmp_path / "in", known, 1, mp=rank, universal_checkpoint_info=info)
        refused(tmp_path / "in", "pattern")


def test_a_rank_with_a_large_number_takes_no_memory(tmp_path):
    for number in ("99999999", "9" * 20):
        folder = tmp_path / number / "tag"
        save(folder / "mp_rank_00_model_states.pt", {"buffer_names": []})
        (folder / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt").touch()
        refused(tmp_path / number / "tag", "data-parallel rank 0")
        with pytest.raises(ForeignIncomplete):
            open_foreign(folder)


@pytest.mark.parametrize(
    "changes",
    [{"global_steps": float("nan")}, {"global_steps": -1}, {"global_steps": 2**70}, {"ds_config": {"optimizer": 3}},
     {"param_shapes": [{"a": (-1, -3)}]}, {"param_shapes": 7}, {"module": [1]}, {"buffer_names": 5},
     {"shared_params": [1]}, {"frozen_param_shapes": {"a": 3}}, {"dp_world_size": "x" * 10_000}, {"\x1b[31m\n": Known}],
)  # fmt: skip
def test_deepspeed_files_with_other_content_are_refused_in_a_sentence(tmp_path, changes):
    known = Known()
    write_grouped(tmp_path / "in", known, 1)
    path = tmp_path / "in" / "global_step5" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    if "dp_world_size" in changes:
        content["param_shapes"][0] = {changes["dp_world_size"]: (2,)}
    torch.save(content | changes, path)
    refused(tmp_path / "in")


def safetensors(path, header, data=bytes(16)):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def row(first=0, last=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


ONE = json.dumps(row())


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b'{"a":' * 100_000 + b"}" * 100_000, "nested"),
        (b'{"a":' + b"[" * 100_000, "nested"),
        ({"a": row(0, 0, (0, 2**64))}, "natural"),
        ({"a": row(0, 0, (0, *[2**31] * 30))}, "shape"),
        (f'{{"a": {ONE.replace("16", "Infinity")}}}'.encode(), "Infinity"),
        (f'{{"a": {ONE.replace("[4]", "[1e400]")}}}'.encode(), "natural"),
        ({"a": row(), "__metadata__": [1]}, "__metadata__"),
        ({"a": row(), "__metadata__": "text"}, "__metadata__"),
        ({"a": row(), "__metadata__": {"b": {"c": "d"}}}, "__metadata__"),
        (f'{{"a": {ONE}, "a": {ONE}}}'.encode(), "twice"),
        (f'{{"a": {ONE[:-1]}, "dtype": "I32"}}}}'.encode(), "twice"),
        ({"a": row(0, 8, (2,))}, "holds 16"),
        ({"a": row(8, 16, (2,))}, "hole"),
        ({"a": row(0, 4, (1,)), "b": row(8, 16, (2,))}, "hole"),
        ({"a": row(), "b": row(8, 16, (2,))}, "common"),
        ({"a": row(), "b": row()}, "common"),
        ({"a": row(0.9, 16)}, "natural"),
        ({"a": row(0, 16.0)}, "natural"),
        ({"a": row(False, 16)}, "natural"),
        ({"a": row(0, 16, "4")}, "natural"),
        ({"a": {**row(), "shape": "4"}}, "natural"),
        ({"a": row(0, 16, (-2, -2))}, "natural"),
        ({"a": row(0, 16, (16,), "F4")}, "F4"),
        ({"a": row(0, 16, (16,), ["F32"])}, "dtype"),
        ({"a": [1]}, "needs"),
        ({"a": None}, "needs"),
        ({"\x1b[31m\n\u202e": row(), "b": 3}, "needs"),
        ({"\ud800": row()}, "surrogate"),
        ({"a" * 300_000: row(0, 1)}, "bytes"),
        (json.dumps({"a": row()}).encode("utf-16"), "object"),
        (b" " + json.dumps({"a": row()}).encode(), "object"),
        (b"[]", "object"),
        ({"a": row(0, 16, [1] * 33 + [4])}, "dimensions"),
    ],
)
def test_headers_against_the_rules_of_safetensors_are_refused(tmp_path, header, match):
    refused(safetensors(tmp_path / "x.safetensors", header), match)


def test_truth_values_of_safetensors_are_0_or_1(tmp_path):
    refused(safetensors(tmp_path / "x.safetensors", {"a": row(0, 4, (4,), "BOOL")}, bytes([0, 1, 7, 1])), "truth value")


def test_many_names_in_a_header_take_little_time(tmp_path):
    header = "{" + ",".join(f'"{n}": {ONE}' for n in range(60_000)) + f',"5": {ONE}}}'
    refused(safetensors(tmp_path / "x.safetensors", header.encode()), "twice")


@pytest.mark.parametrize(
    "index",
    [b"[" * 100_000, b'{"weight_map":' * 100_000, b'{"weight_map": [1]}', b'{"weight_map": {"a": 3}}', b"{}", b"",
     b'{"weight_map": {"a": "../m.safetensors"}}', b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}',
     b'{"weight_map": {"b": "m.safetensors"}}', b'{"weight_map": {"a": "n.safetensors", "b": "m.safetensors"}}',
     b'{"weight_map": {"a": "none\\u0000"}}', b'{"weight_map": {"a": "\\u001b[31m"}}'],
)  # fmt: skip
def test_an_index_that_lies_is_refused(tmp_path, index):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / "m.safetensors")
    save_file({"b": torch.ones(4)}, folder / "n.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(index)
    refused(folder)


def test_a_refusal_of_the_library_is_a_line_as_well(tmp_path):
    torch.save({"a": resource.getrusage}, tmp_path / "x.pt")
    with pytest.raises(RefusedPickle, match="getrusage") as caught:
        torch_files.read(tmp_path / "x.pt")
    assert isinstance(caught.value, CheckpointError)
    assert str(caught.value).isprintable()
