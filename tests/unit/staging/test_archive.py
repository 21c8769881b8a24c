"""Archives of environments: what is packed comes out as it was; whatever was changed or does not belong is refused."""

import hashlib
import io
import json
import os
import tarfile

import pytest

from mpispeed.base.errors import StagingError
from mpispeed.staging import archive, folders, unpack
from mpispeed.staging.contents import Contents, File
from mpispeed.staging.pack import write_archive

JOB = "mpispeed-env-{}-7-0123abcd"


@pytest.fixture
def place(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setenv("MPISPEED_STAGE_DIR", str(folder))
    return folder


@pytest.fixture
def packed(tmp_path):
    """An archive of three files, and its seal."""
    module = tmp_path / "module.py"
    module.write_text("x = 1\n")
    os.utime(module, (1_000_000_000, 1_000_000_000.75))
    big = tmp_path / "big.so"
    big.write_bytes(os.urandom(5 << 20))
    big.chmod(0o775)
    contents = Contents("venv/bin/python", "base/lib")
    for file in (
        File("venv/lib/module.py", str(module)),
        File("base/lib/big.so", str(big), is_executable=True),
        File("venv/pyvenv.cfg", text=b"home = " + archive.PLACEHOLDER + b"/base/bin\n"),
    ):
        contents.files[file.path] = file
    path = tmp_path / "archive.tar"
    with path.open("wb") as file:
        seal, facts = write_archive(file, contents)
    return path, seal, facts, big.read_bytes()


def made(place):
    (folder,) = unpack.begin(JOB.format(os.geteuid()), 1 << 20, 10)
    assert folder.parent == place
    assert folder.stat().st_mode & 0o777 == 0o700
    return folder


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_packed_comes_out(place, packed, workers):
    path, seal, facts, big = packed
    folder = made(place)
    unpack.unpack(path, seal, folder, workers=workers)
    assert (folder / "base/lib/big.so").read_bytes() == big
    assert (folder / "venv/pyvenv.cfg").read_text() == f"home = {folder}/base/bin\n"
    module = folder / "venv/lib/module.py"
    assert (module.read_text(), module.stat().st_mtime_ns) == ("x = 1\n", 1_000_000_000 * 10**9)
    modes = [oct(path.stat().st_mode & 0o777) for path in (module, folder / "base/lib/big.so", folder / "venv/lib")]
    assert modes == ["0o600", "0o700", "0o700"]
    found = [path for path in folder.rglob("*") if path.name != "lock"]
    assert len(found) + 2 == facts["inodes"]  # the folder itself, and its lock
    # Bytecode is there, and valid by the date of its module.
    code = (folder / "venv/lib/__pycache__").glob("module.*.pyc")
    assert [int.from_bytes(each.read_bytes()[8:12], "little") for each in code] == [1_000_000_000]
    unpack.end(folder)
    assert not list(place.iterdir())


def test_the_folder_stands_for_its_word_in_texts_of_any_length_and_in_no_bytecode(tmp_path, place):
    text = b"x" * ((4 << 20) - 5) + archive.PLACEHOLDER + b"y"
    code = b"\r\r\n" + archive.PLACEHOLDER
    contents = Contents("bin/python")
    for name, data in (("bin/long", text), ("x/__pycache__/archive.cpython-311.pyc", code)):
        contents.files[name] = File(name, text=data)
    with (tmp_path / "x.tar").open("wb") as file:
        seal, _ = write_archive(file, contents)
    folder = made(place)
    unpack.unpack(tmp_path / "x.tar", seal, folder, workers=1)
    assert (folder / "bin/long").read_bytes() == text.replace(archive.PLACEHOLDER, os.fsencode(folder))
    assert (folder / "x/__pycache__/archive.cpython-311.pyc").read_bytes() == code


def test_a_name_with_a_line_break_is_refused(tmp_path):
    name = "bin/x\nf 755 1 3 0 0 y"
    with io.BytesIO() as file, pytest.raises(StagingError, match="has a line break in its name"):
        write_archive(file, Contents("bin/python", "", {name: File(name, text=b"#!/bin/sh\n")}))


def test_people_can_look_into_it(packed):
    path, seal, _, big = packed
    with tarfile.open(path) as tar:
        assert tar.extractfile("base/lib/big.so").read() == big
        assert hashlib.sha256(tar.extractfile("mpispeed-manifest.txt").read()).hexdigest() == seal.sha256


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_node_that_can_start_no_more_processes_leaves_neither_files_nor_processes(place, packed, monkeypatch):
    fork, begun = os.fork, []

    def last_but_one():
        if begun:
            raise OSError(11, "Resource temporarily unavailable")
        begun.append(fork())
        return begun[0]

    monkeypatch.setattr(unpack.os, "fork", last_but_one)
    path, seal, *_ = packed
    with pytest.raises(StagingError, match="Resource temporarily unavailable"):
        unpack.unpack(path, seal, made(place), workers=3)
    with pytest.raises(ChildProcessError):
        os.waitpid(begun[0], 0)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["data", "manifest", "end", "seal"])
def test_a_changed_archive_is_refused_and_nothing_stays(place, packed, what, workers):
    path, seal, _, _ = packed
    folder = made(place)
    if what == "data":
        flip(path, 3 << 20)
    elif what == "manifest":
        flip(path, seal.offset + seal.size // 2)
    elif what == "end":
        os.truncate(path, 4 << 20)
    else:
        seal = archive.Seal(seal.offset, seal.size, "0" * 64)
    with pytest.raises(StagingError, match=r"changed|should end"):
        unpack.unpack(path, seal, folder, workers=workers)
    assert not list(place.iterdir())


def line(path, kind="f", offset=0, size=3):
    return f"{kind} 644 1 {size} {offset} {hashlib.sha256(b'abc').hexdigest()} {path}"


HOSTILE = {
    "leaves by dots": ["d ..", line("../x")],
    "leaves by dots inside": ["d a", "d a/..", line("a/../x")],
    "absolute": [line("/tmp/x")],
    "an empty word": ["d a", line("a//x")],
    "a point": [line("./x")],
    "a link": [line("x", kind="l")],
    "a device": [line("x", kind="b")],
    "no folder": [line("a/x")],
    "a file as a folder": [line("a"), line("a/x", offset=3)],
    "twice": [line("a"), line("a", offset=3)],
    "a folder and a file": ["d a", line("a")],
    "data beyond the end": [line("a", size=1 << 40)],
    "the same data many times": [line("a"), line("b")],
    "a negative size": [line("a", size=-1)],
    "no number": [line("a", size="x")],
    "a zero byte": [line("a\0b")],
    "an absolute folder": ["d /tmp/evil"],
    "too few words": ["f 644 1"],
    "another format": None,
    "no JSON": [],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_only_plain_files_and_folders_inside_are_taken(tmp_path, place, what):
    first = {"format": 2 if what == "another format" else archive.FORMAT}
    text = "\n".join([json.dumps(first) if what != "no JSON" else "{" * 9, *(HOSTILE[what] or [])]) + "\n"
    raw = text.encode()
    path = tmp_path / "evil.tar"
    path.write_bytes(b"abc".ljust(512, b"\0") + raw)
    seal = archive.Seal(512, len(raw), hashlib.sha256(raw).hexdigest())
    before = sorted(tmp_path.iterdir())
    folder = made(place)
    with pytest.raises(StagingError):
        unpack.unpack(path, seal, folder)
    assert not list(place.iterdir())
    assert sorted(tmp_path.iterdir()) == before


def test_members_of_the_tar_file_that_no_manifest_lists_are_not_made(tmp_path, place, packed):
    """Links, devices and the like, put in front of the data: only the sealed list counts."""
    path, seal, _, _ = packed
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"evil{kind!r}")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    with path.open("ab") as file:
        file.write(buffer.getvalue())
    folder = made(place)
    unpack.unpack(path, seal, folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["base", "lock", "venv"]


@pytest.mark.parametrize("text", ["", "1.2", "1.2.3", f"-1.2.{'0' * 64}", f"1.2.{'0' * 63}g", f"1.2.{'0' * 64} "])
def test_a_text_that_is_no_seal_is_refused(text):
    with pytest.raises(StagingError, match="no seal"):
        archive.Seal.parse(text)
    assert archive.Seal.parse(str(archive.Seal(5, 6, "a" * 64))) == archive.Seal(5, 6, "a" * 64)


def test_names_of_folders_have_user_and_job():
    name = folders.name_for("12/3 4")
    assert folders.job_of(name) == "12_3_4"
    assert name != folders.name_for("12/3 4")
    for wrong in ("mpispeed-env-x-7-0123abcd", JOB.format(os.geteuid() + 1), JOB.format(os.geteuid()) + "/..", "tmp"):
        with pytest.raises(StagingError, match="is no folder"):
            folders.job_of(wrong)
