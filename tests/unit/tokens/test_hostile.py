"""Stores made with intent: refused in a sentence, nothing outside of them is opened, little memory is taken."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpispeed.native.checksum import crc32c
from mpispeed.tokens import layout
from mpispeed.tokens.documents import TokenDocuments
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.reader import open_file, read_contents
from mpispeed.tokens.store import open_store
from mpispeed.tokens.verify import verify
from mpispeed.tokens.windows import TokenWindows


def replaced(name: str, made: Callable[[h5py.File, h5py.Dataset], Any]) -> Callable[[h5py.File, Path], None]:
    """An attack that puts something else in the place of a dataset."""

    def attack(file: h5py.File, _: Path) -> None:
        old = file[name]
        del file[name]
        made(file, old)

    return attack


def of_another_file(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["tokens"] = np.zeros(file["tokens"].shape, "<u2")
    del file["tokens"]
    file["tokens"] = h5py.ExternalLink(str(folder / "other.h5"), "/tokens")


def in_another_file(file: h5py.File, folder: Path) -> None:
    shape = file["tokens"].shape
    del file["tokens"]
    (folder / "raw").write_bytes(bytes(2 * shape[0]))
    file.create_dataset("tokens", shape, "<u2", external=[(str(folder / "raw"), 0, 2 * shape[0])])


def virtual(file: h5py.File, old: h5py.Dataset) -> None:
    plan = h5py.VirtualLayout(old.shape, "<u2")
    plan[:] = h5py.VirtualSource("/etc/passwd", "x", old.shape)
    file.create_virtual_dataset("tokens", plan)


def soft(file: h5py.File, old: h5py.Dataset) -> None:
    file["other"] = old
    file["tokens"] = h5py.SoftLink("/other")


def filtered(file: h5py.File, old: h5py.Dataset) -> None:
    file.create_dataset("tokens", data=old[()], compression="gzip")


def chunked(file: h5py.File, old: h5py.Dataset) -> None:
    file.create_dataset("tokens", data=old[()], chunks=(16,))


def huge(file: h5py.File, _: h5py.Dataset) -> None:
    file.create_dataset("documents", (1 << 60,), "<u8")  # never written, so without space


ATTACKS: dict[str, Callable[[h5py.File, Path], None]] = {
    "external link": of_another_file,
    "external storage": in_another_file,
    "virtual": replaced("tokens", virtual),
    "soft link": replaced("tokens", soft),
    "gzip": replaced("tokens", filtered),
    "chunks": replaced("tokens", chunked),
    "2**60 documents": replaced("documents", huge),
    "floats": replaced("tokens", lambda file, old: file.create_dataset("tokens", data=old[()].astype("<f4"))),
    "big endian": replaced("tokens", lambda file, old: file.create_dataset("tokens", data=old[()].astype(">u2"))),
    "two dims": replaced("tokens", lambda file, old: file.create_dataset("tokens", data=old[:100].reshape(10, 10))),
    "texts": replaced("tokens", lambda file, _: file.create_dataset("tokens", data=["x" * 100] * 10)),
    "a group": replaced("tokens", lambda file, _: file.create_group("tokens")),
    "a type": replaced("tokens", lambda file, _: file.__setitem__("tokens", np.dtype("u2"))),
    "no lookup": replaced("lookup", lambda *_: None),
    "no manifest": replaced("manifest", lambda *_: None),
    "text of no length": replaced("manifest", lambda file, _: file.create_dataset("manifest", data="{}")),
    "an endless group": replaced("columns", lambda file, _: file.__setitem__("columns", file["/"])),
    "a column that is a number": lambda file, _: file["columns"].create_dataset("x", data=1),
    "a column with a path": lambda file, _: file["columns"].create_group("..").create_group("x"),
    "attributes": lambda file, _: [file.attrs.create(f"a{number}", 0) for number in range(100)] and None,
    "version": lambda file, _: file.attrs.modify("version", 7),
    "format of no length": lambda file, _: file.attrs.create("format", layout.FORMAT),
}


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("name", ATTACKS)
def test_files_that_are_not_what_they_say_are_refused(make: Callable[..., Any], tmp_path: Path, name: str) -> None:
    made = make(documents=300, longest=300)
    with h5py.File(made.path, "r+") as file:
        ATTACKS[name](file, tmp_path)
    before = descriptors()
    tracemalloc.start()
    for read in (open_store, verify):
        with pytest.raises(TokenStoreError) as caught:
            read(made.path)
        assert str(caught.value).startswith(str(made.path))
        assert "\n" not in str(caught.value)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert descriptors() == before  # nothing is left open


def with_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest of a store, with a right checksum."""
    import json

    handle = open_file(path)
    offset, room = read_contents(path, handle).places.manifests[""]
    raw = os.pread(handle, room, offset)
    os.close(handle)
    parts = json.loads(raw.partition(b"\n")[2])
    found = change(parts)
    text = found if isinstance(found, bytes) else json.dumps(parts).encode()
    body = text.ljust(room - 16)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"crc32c %08x\n" % crc32c(body) + body)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update(tokens=1 << 63),
        lambda parts: parts.update(tokens=-5),
        lambda parts: parts.update(tokens="many"),
        lambda parts: parts.update(tokens=True),
        lambda parts: parts.update(documents=10),
        lambda parts: parts.update(documents=1 << 70),
        lambda parts: parts.update(rows=3),
        lambda parts: parts.update(rows=1.5),
        lambda parts: parts.update(dtype="u4"),
        lambda parts: parts.update(dtype=None),
        lambda parts: parts.update(block_bytes=1),
        lambda parts: parts.update(lists={}),
        lambda parts: parts.update(lists={"tokens": "x"}),
        lambda parts: parts.update(facts=[]),
        lambda parts: parts.pop("complete"),
        lambda _: b"[" * 60_000,
        lambda _: b"\xff\xfe",
        lambda _: b"null",
    ],
)
def test_manifests_that_lie_are_refused(make: Callable[..., Any], change: Callable[[dict[str, Any]], object]) -> None:
    made = make()
    with_manifest(made.path, change)
    with pytest.raises(TokenStoreError):
        open_store(made.path)


def test_control_characters_of_a_file_do_not_come_into_messages(make: Callable[..., Any]) -> None:
    made = make()
    with h5py.File(made.path, "r+") as file:
        file.attrs.modify("format", np.bytes_(b"\x1b[31m\nx"))
    with pytest.raises(TokenStoreError) as caught:
        open_store(made.path)
    assert str(caught.value).isprintable()


NUMBERS = [0, 1, 49, 1 << 20, (1 << 62) + 3, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("table", ["documents", "lookup", "rows"])
def test_numbers_that_lead_elsewhere_are_refused_when_they_are_read(
    make: Callable[..., Any], table: str, value: int
) -> None:
    made = make(documents=800, longest=30, row_length=64)
    handle = open_file(made.path)
    places = read_contents(made.path, handle).places
    os.close(handle)
    place = places.tables[table]
    number = min(2, place.count - 1)
    with made.path.open("r+b") as file:
        file.seek(place.offset + number * 8)
        (old,) = struct.unpack("<Q", file.read(8))
        file.seek(place.offset + number * 8)
        file.write(struct.pack("<Q", value))
    tracemalloc.start()
    with open_store(made.path) as store:
        readers = (TokenWindows(store, 16, documents=True), TokenDocuments(store, 16), TokenRows(store))
        refused = 0
        for samples in readers:
            try:
                found = samples.read_batch(range(len(samples)))
            except TokenStoreError:
                refused += 1
            else:
                assert all(torch.is_tensor(part) for part in found.values())
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    if value > made.begins[-1]:
        assert refused
    if value != old:
        assert verify(made.path).problems
