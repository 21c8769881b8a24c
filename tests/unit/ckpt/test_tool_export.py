"""`ckpt export`: what other libraries read back, in which dtype, in which files, and in how much memory."""

import json

import h5py
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import casting, exporting
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.memory import watched
from tests.unit.ckpt.sample import saved, tensors_of
from tests.zoo import has_same_bits

ALIASES = {"head.weight": "embed.weight"}
WEIGHTS = ("embed.weight", "layers.0.weight", "frozen/odd%name", "scale", "empty")
BUFFERS = ("mask", "counter")


def weights_of():
    tensors = tensors_of()
    found = {name: tensors.get((name, "master"), tensors.get((name, "weight16"))) for name in WEIGHTS}
    return found | {name: tensors[name, "buffer"] for name in BUFFERS}


def expected(dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights_of().items()}


@pytest.fixture(scope="module", params=[1, 3])
def folder(tmp_path_factory, request):
    where = tmp_path_factory.mktemp("runs")
    saved(where, aliases=ALIASES, options=SaveOptions(files=request.param))
    return where


def export(folder, output, **more):
    with open_reader(folder) as reader:
        return exporting.export(reader, output, **more)


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert has_same_bits(found[name], value), name


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16), ("keep", torch.bfloat16)],
)
def test_safetensors(folder, tmp_path, word, dtype):
    report = export(folder, tmp_path / "w.safetensors", to="safetensors", dtype=word)
    check(safetensors.torch.load_file(tmp_path / "w.safetensors"), expected(dtype))
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} | ALIASES
    assert report.files == [tmp_path / "w.safetensors"]
    assert report.size_bytes == report.files[0].stat().st_size
    assert (report.tensors, report.overflows) == (7, {})
    assert list(tmp_path.iterdir()) == report.files


def test_torch(folder, tmp_path):
    export(folder, tmp_path / "w.bin", to="torch", dtype="bf16")
    found = torch.load(tmp_path / "w.bin", weights_only=True)
    check(found, expected(torch.bfloat16) | {"head.weight": expected(torch.bfloat16)["embed.weight"]})
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_npz(folder, tmp_path):
    export(folder, tmp_path / "w.npz", to="npz", dtype="fp16")
    wanted = expected(torch.float16) | {"head.weight": expected(torch.float16)["embed.weight"]}
    with np.load(tmp_path / "w.npz") as found:
        check({name: torch.from_numpy(found[name]) for name in found.files}, wanted)
    with pytest.raises(CheckpointError, match=r"npz has no place for bfloat16.*embed\.weight"):
        export(folder, tmp_path / "v.npz", to="npz", dtype="bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["w.npz"]


def test_hdf5(folder, tmp_path):
    export(folder, tmp_path / "w.h5", to="hdf5", dtype="bf16")
    with h5py.File(tmp_path / "w.h5") as file:
        assert set(file) == {schema.escape(name) for name in (*WEIGHTS, *BUFFERS, "head.weight")}
        assert file["head.weight"] == file["embed.weight"]
        assert file["embed.weight"].attrs["dtype"] == b"bfloat16"
        for name, value in expected(torch.bfloat16).items():
            stored = torch.from_numpy(np.asarray(file[schema.escape(name)][()]))
            assert has_same_bits(stored.view(value.dtype), value), name


@pytest.mark.parametrize(
    ("to", "stem", "suffix"), [("safetensors", "model", ".safetensors"), ("torch", "pytorch_model", ".bin")]
)
def test_shards(folder, tmp_path, to, stem, suffix):
    out = tmp_path / "hf"
    report = export(folder, out, to=to, shard_bytes=5000)
    names = [path.name for path in report.files]
    count = len(names) - 1
    assert count == 4
    assert names == [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)] + [
        f"{stem}{suffix}.index.json"
    ]
    index = json.loads((out / names[-1]).read_text())
    found = {}
    for file in names[:-1]:
        load = safetensors.torch.load_file if to == "safetensors" else torch.load
        part = load(out / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(part)
        found |= part
    wanted = expected(torch.float32)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    if to == "torch":
        wanted["head.weight"] = wanted["embed.weight"]
    check(found, wanted)


def test_fewer_shards_replace_more(folder, tmp_path):
    export(folder, tmp_path, to="safetensors", shard_bytes=5000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"exists.*--force"):
        export(folder, tmp_path, to="safetensors")
    export(folder, tmp_path, to="safetensors", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_frozen_and_names(folder, tmp_path):
    maps = [("^layers", "model.layers"), ("embed", "wte"), (r"^(.*)\.weight$", r"\1.w"), ("/", ".")]
    export(folder, tmp_path / "w.bin", to="torch", prefix_map=maps)
    names = {"wte.w", "head.w", "model.layers.0.w", "frozen.odd%name", "scale", "empty", *BUFFERS}
    assert set(torch.load(tmp_path / "w.bin")) == names
    for bad, message in (
        ([("nowhere", "x")], "no name fits 'nowhere'"),
        ([(".*weight", "same")], "two tensors would have the name 'same'"),
        ([("(", "x")], "no valid replacement"),
        ([("x", r"\1")], "no valid replacement"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export(folder, tmp_path / "v.bin", to="torch", prefix_map=bad)


def test_keep_takes_the_stored_16_bits_and_frozen_go(tmp_path):
    from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
    from mpispeed.ckpt.write.save import save
    from tests.unit.ckpt.sample import outcomes

    master, half = torch.randn(6), torch.randn(6).bfloat16()
    params = [
        ParamInfo("a", (6,), train_dtype="bfloat16"),
        ParamInfo("b", (6,), train_dtype="bfloat16", kind="frozen"),
    ]

    def work(comm):
        values = [("a", "master", master), ("a", "weight16", half), ("b", "weight16", half)]
        tensors = [LogicalTensor(name, slot, (6,), v.dtype, [Piece(0, v)]) for name, slot, v in values]
        return save(comm, tmp_path, "t", params=params, tensors=tensors)

    outcomes(1, work)
    export(tmp_path, tmp_path / "keep.pt", to="torch", dtype="keep")
    check(torch.load(tmp_path / "keep.pt"), {"a": half, "b": half})
    export(tmp_path, tmp_path / "fp32.pt", to="torch", exclude_frozen=True)
    check(torch.load(tmp_path / "fp32.pt"), {"a": master})


def test_too_large_for_half_is_told(tmp_path):
    tensors = {("w", "master"): torch.tensor([1.0, 70000.0, -1e30, float("inf"), float("nan")])}
    saved(tmp_path, tensors=tensors)
    report = export(tmp_path, tmp_path / "w.safetensors", to="safetensors", dtype="fp16")
    assert report.overflows == {"w": 2}


def test_nothing_is_left_of_a_failure(tmp_path):
    path = saved(tmp_path)
    with open_reader(tmp_path) as reader:
        place = reader.stored("layers.0.weight", "master").offset
    model = path / schema.MODEL_FILE
    raw = bytearray(model.read_bytes())
    raw[place + 5] ^= 1
    model.write_bytes(raw)
    for to, suffix in (("safetensors", ".safetensors"), ("torch", ".pt"), ("npz", ".npz"), ("hdf5", ".h5")):
        out = tmp_path / "out"
        with pytest.raises(CorruptCheckpoint, match=r"layers\.0\.weight/master"):
            export(tmp_path, out / f"w{suffix}", to=to)
        assert list(out.iterdir()) == []


def test_an_existing_file_stays_when_a_new_export_fails(tmp_path):
    saved(tmp_path)
    out = tmp_path / "w.npz"
    out.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists"):
        export(tmp_path, out, to="npz")
    with pytest.raises(CheckpointError, match="no place for bfloat16"):
        export(tmp_path, out, to="npz", dtype="bf16", overwrite=True)
    assert out.read_bytes() == b"mine"
    export(tmp_path, out, to="npz", overwrite=True)
    assert len(np.load(out).files) == 7


@pytest.mark.parametrize("to", ["safetensors", "npz", "hdf5"])
def test_memory_is_bounded(tmp_path, to):
    saved(tmp_path, tensors={("w", "master"): torch.randn(16 << 20)})
    with open_reader(tmp_path) as reader, watched() as grown:
        exporting.export(reader, tmp_path / "out", to=to, dtype="fp16")
    assert grown[0] < 24 << 20


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64", "float8_e5m2"])
def test_casts_are_those_of_torch(source, target):
    from mpispeed.ckpt.format import schema

    wide = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    ends = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65520, 1e-8, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8], np.float32
    )
    values = torch.from_numpy(np.concatenate([wide, ends])).to(getattr(torch, source))
    made = schema.from_array(casting.cast(schema.as_array(values), source, target), target).double()
    wanted = values.float().to(getattr(torch, target)).double()
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.nan_to_num(3), wanted.nan_to_num(3))
