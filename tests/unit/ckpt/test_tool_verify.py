"""`ckpt verify`: it finds every flipped bit, says where, and reads in bounded memory."""

import json
import shutil

import h5py
import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import digest
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import verify as verifying
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.cli.ckpt import ckpt
from mpispeed.native.checksum import crc32c
from tests.unit.ckpt.memory import watched
from tests.unit.ckpt.sample import saved

TENSORS = {
    (name, slot): torch.arange(float(numel)).reshape(shape)
    for name, numel, shape in (("a", 6, (2, 3)), ("b.c/d", 30000, (30000,)), ("e", 40, (40,)))
    for slot in ("master", "exp_avg")
} | {("mask", "buffer"): torch.ones(9, dtype=torch.bool)}


def small(folder, files=1, tag="t", **more):
    return saved(folder, tag, tensors=TENSORS, options=SaveOptions(files=files), aliases={"x": "a"}, **more)


def flip(path, place, mask=1):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ mask]))


def verify(location, **more):
    return verifying.verify_location(str(location), **more)


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, ["verify", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("files", [1, 3])
def test_a_good_checkpoint(tmp_path, files):
    saved(tmp_path, size=2, options=SaveOptions(files=files), aliases={"head": "embed.weight"}, rng={"cpu": b"1"})
    for report in (
        verify(tmp_path),
        verify(f"{tmp_path}:step7"),
        verify(tmp_path / "step7"),
        verify(tmp_path, quick=True),
    ):
        assert (report.status, report.problems, report.notes, report.odd) == ("ok", [], [], [])
        assert report.tag == "step7"
        assert report.files == (2 if files == 1 else 5)
        assert report.tensors == 10
    assert verify(tmp_path).size_bytes == manifests.read(tmp_path / "step7").size_bytes
    with open_reader(tmp_path) as reader:
        assert verify(tmp_path, wants_digest=True).digest == digest.logical_digest(reader)


@pytest.mark.parametrize("files", [1, 3])
def test_every_flipped_bit_is_found_and_placed(tmp_path, files):
    path = small(tmp_path, files)
    with open_reader(tmp_path) as reader:
        stored = list(reader.tensors())
        count = len(reader.manifest.files) + 2
    targets = [file for file in sorted(path.rglob("*")) if file.is_file()] + [tmp_path / schema.LATEST_FILE]
    assert len(targets) == count
    for target in targets:
        size = target.stat().st_size
        for number, place in enumerate(range(0, size, max(1, size // 10))):
            flip(target, place, 1 << number % 8)
            report = verify(f"{tmp_path}:t")
            assert report.status == "corrupt", (target, place)
            (problem,) = report.problems
            file = "../latest" if target.parent == tmp_path else str(target.relative_to(path))
            assert problem.file == file, (target, place)
            owner = [
                t for t in stored if t.file == file and t.offset <= place < t.offset + t.size_bytes and t.size_bytes
            ]
            if owner:
                (tensor,) = owner
                assert (problem.name, problem.slot, problem.offset) == (tensor.name, tensor.slot, tensor.offset)
                assert problem.first == 0 <= (place - tensor.offset) // tensor.itemsize < problem.last == tensor.numel
            else:
                assert problem.name == ""
                if file.endswith(".h5") and file != schema.STATE_FILE:
                    assert "its index" in problem.what
            flip(target, place, 1 << number % 8)
    assert verify(tmp_path).status == "ok"


def test_every_bit_of_latest_counts_without_a_tag_too(tmp_path):
    small(tmp_path)
    latest = tmp_path / schema.LATEST_FILE
    for place in range(latest.stat().st_size):
        for bit in range(8):
            flip(latest, place, 1 << bit)
            with pytest.raises(CorruptCheckpoint, match="latest"):
                verify(tmp_path)
            flip(latest, place, 1 << bit)
    latest.write_text("t")  # as DeepSpeed or a person writes it
    assert verify(tmp_path).status == "ok"


def test_all_problems_are_listed_with_their_ranges(tmp_path):
    path = saved(tmp_path, options=SaveOptions(files=3))
    with open_reader(tmp_path) as reader:
        embed, small_one = reader.stored("embed.weight", "exp_avg"), reader.stored("layers.0.weight", "master")
    assert embed.file != small_one.file
    flip(path / embed.file, embed.offset + 5)
    flip(path / embed.file, embed.offset + schema.BLOCK_BYTES + 1)
    flip(path / small_one.file, small_one.offset)
    flip(path / schema.STATE_FILE, 900)
    report = verify(tmp_path)
    rows = [(p.file, p.name, p.slot, p.first, p.last, p.offset) for p in report.problems]
    assert rows == [
        (embed.file, "embed.weight", "exp_avg", 0, 1_100_000, embed.offset),
        (small_one.file, "layers.0.weight", "master", 0, 33 * 65, small_one.offset),
        (schema.STATE_FILE, "", "", -1, -1, -1),
    ]
    flip(path / embed.file, embed.offset + 5)
    found = verify(tmp_path).problems[0]
    assert (found.first, found.last) == (1 << 20, 1_100_000)
    assert found.offset == embed.offset + schema.BLOCK_BYTES
    assert verify(tmp_path, quick=True).status == "ok"
    text = call(tmp_path, code=3)
    assert f"{embed.file}: embed.weight/exp_avg[1048576:1100000] (flat elements, at byte {found.offset}) does" in text


def test_missing_and_cut_files_name_their_tensors(tmp_path):
    path = small(tmp_path, 3)
    with open_reader(tmp_path) as reader:
        file = reader.stored("b.c/d", "master").file
    raw = (path / file).read_bytes()
    for what in ("missing", "truncated"):
        if what == "missing":
            (path / file).unlink()
        else:
            (path / file).write_bytes(raw[:-1])
        report = verify(tmp_path)
        assert [problem.file for problem in report.problems] == [file, file]
        assert what in report.problems[0].what
        assert "b.c/d/master, b.c/d/exp_avg" in report.problems[1].what
    (path / file).write_bytes(raw)
    (path / schema.MODEL_FILE).unlink()
    (path / schema.STATE_FILE).write_bytes(b"")
    report = verify(tmp_path)
    assert {problem.file for problem in report.problems} == {schema.MODEL_FILE, schema.STATE_FILE}


def test_files_of_another_tag(tmp_path):
    first, second = small(tmp_path, 3, "one"), small(tmp_path, 3, "two")
    for name in ("data/d00001.h5", schema.STATE_FILE):
        raw = (first / name).read_bytes()
        shutil.copy(second / name, first / name)
        assert [problem.file for problem in verify(first).problems] == [name]
        (first / name).write_bytes(raw)
    second.rename(tmp_path / "three")
    assert verify(tmp_path / "three").notes == ["it was saved as 'two'; its folder was renamed"]
    (first / "extra").write_text("")
    assert verify(first).notes == ["extra is no part of the checkpoint"]


def test_an_alias_of_nothing(tmp_path):
    path = small(tmp_path)
    model, manifest = path / schema.MODEL_FILE, path / schema.MANIFEST_FILE
    with h5py.File(model, "r+") as file:
        file["aliases"][()] = file["aliases"][()].replace(b'"a"', b'"z"')
    # the manifest describes the file as it is now: a forgery that no checksum shows
    content, raw = json.loads(manifest.read_text()), model.read_bytes()
    record = content["files"][schema.MODEL_FILE]
    parts = b"".join(raw[start : start + length] for start, length in record["index_extents"])
    record.update(bytes=len(raw), crc32c=crc32c(raw), index_crc32c=crc32c(parts))
    manifest.write_text(manifests.signed(content))
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.kind) == (schema.MODEL_FILE, "corrupt")
    assert "'x'" in problem.what
    assert "'z'" in problem.what


def test_holes_and_overlaps(tmp_path):
    from mpispeed.ckpt.tools import scan

    path = small(tmp_path)
    with open_reader(tmp_path) as reader:
        record, tensors = reader.manifest.files[schema.MODEL_FILE], list(reader.tensors())
    good, problems = scan.segments_of(record, tensors)
    assert problems == []
    assert sum(segment.length for segment in good) == record.bytes == (path / schema.MODEL_FILE).stat().st_size
    import dataclasses

    gone = [tensor for tensor in tensors if tensor.name != "b.c/d"]
    segments, problems = scan.segments_of(record, gone)
    assert all("belong to no tensor" in problem for problem in problems) and problems
    assert sum(segment.length for segment in segments) == record.bytes
    moved = [dataclasses.replace(t, offset=t.offset - 8) if t.name == "b.c/d" else t for t in tensors]
    segments, problems = scan.segments_of(record, moved)
    assert any("overlap" in problem for problem in problems)
    assert sum(segment.length for segment in segments) == record.bytes


def test_unfinished(tmp_path):
    path = small(tmp_path)
    (path / schema.MANIFEST_FILE).unlink()
    assert verify(tmp_path).status == "incomplete"
    assert "never finished" in call(tmp_path, code=4)


def test_elements_that_are_no_numbers_are_told(tmp_path):
    odd = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf"), float("nan")])
    tensors = {
        ("a", "master"): odd,
        ("b", "weight16"): odd.bfloat16(),
        ("c", "master"): odd.half(),
        ("d", "buffer"): torch.complex(odd, torch.zeros(5)),
        ("e", "master"): torch.ones(3),
        ("f", "buffer"): torch.arange(3),
    }
    saved(tmp_path, tensors=tensors)
    report = verify(tmp_path)
    assert report.status == "ok"
    assert sorted(report.odd) == [
        (n, s, 2, 2) for n, s in (("a", "master"), ("b", "weight16"), ("c", "master"), ("d", "buffer"))
    ]
    assert "a/master: 2 elements are not a number, 2 are infinite" in call(tmp_path)


def test_all_tags(tmp_path):
    for tag in ("one", "two", "three"):
        small(tmp_path, tag=tag)
    lines = sorted(line.split(",")[0] for line in call("--all", tmp_path).splitlines())
    assert lines == ["one: ok", "three: ok", "two: ok"]
    (tmp_path / "one" / schema.MANIFEST_FILE).unlink()
    call("--all", tmp_path, code=4)
    flip(tmp_path / "two" / schema.MODEL_FILE, 100)
    found = json.loads(call("--all", "--quick", "--json", tmp_path, code=3))
    assert found["ok"] is False
    assert {row["tag"]: row["status"] for row in found["checkpoints"]} == {
        "one": "incomplete", "two": "corrupt", "three": "ok"}  # fmt: skip
    (tmp_path / "none").mkdir()
    call("--all", tmp_path / "none", code=2)
    call("--all", f"{tmp_path}:one", code=2)


def test_json_and_digest(tmp_path):
    path = small(tmp_path)
    found = json.loads(call(tmp_path, "--json", "--digest"))
    assert (found["ok"], found["status"], found["problems"], found["path"]) == (True, "ok", [], str(path))
    assert found["digest"] in call(tmp_path, "--digest")
    flip(path / schema.STATE_FILE, 50)
    found = json.loads(call(tmp_path, "--json", "--digest", code=3))
    assert (found["ok"], found["digest"], found["problem_count"]) == (False, "", 1)
    assert found["problems"][0]["file"] == schema.STATE_FILE


def test_wrong_calls(tmp_path):
    call(tmp_path / "missing", code=2)
    small(tmp_path)
    assert "Complete tags" in call(f"{tmp_path}:u", code=2)
    flip(tmp_path / schema.LATEST_FILE, 0)
    assert "latest" in call(tmp_path, code=3)
    with pytest.raises(CheckpointError):
        verify(tmp_path)


def test_memory_is_bounded(tmp_path):
    saved(
        tmp_path, tensors={("w", "master"): torch.randn(8 << 20), ("v", "weight16"): torch.randn(16 << 20).bfloat16()}
    )
    with watched() as grown:
        assert verify(tmp_path).status == "ok"
    assert grown[0] < 24 << 20
