"""Stores joined to one: as if it had been built at once, and every block compared with its checksum."""

import numpy as np
import pytest

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.sim import run
from mpispeed.tokens import create, layout
from mpispeed.tokens.store import open_store
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.merging import merge
from mpispeed.tokens_build.work_folder import WorkFolder, folder_of, unfinished

SUMS = {layout.TOKENS, layout.DOCUMENTS, layout.LOOKUP}


def built(folder, name, seed, count, **settings):
    """A store of chance bytes."""
    draw = np.random.default_rng(seed)
    path = folder / f"{name}.txt"
    path.write_text("".join("".join(map(chr, draw.integers(97, 110, n))) + "\n" for n in draw.integers(1, 90, count)))
    output = folder / f"{name}.h5"
    build(solo_comm(), Request(output, [path], "byte", columns=("length",), part_bytes=2000, **settings))
    return path, output


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_merged_store_is_the_one_built_at_once(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4096)  # many blocks
    made = [built(tmp_path, str(seed), seed, count) for seed, count in ((1, 700), (2, 1), (3, 900))]
    whole = tmp_path / "whole.h5"
    paths = [path for path, _ in made]
    build(solo_comm(), Request(whole, paths, "byte", columns=("length",)))
    out = tmp_path / "merged.h5"
    report = run(ranks, lambda world: merge(world.comm, out, [store for _, store in made]))[-1]
    one, other = open_store(out), open_store(whole)
    assert (report.tokens, report.documents) == (other.token_count, other.document_count)
    assert one.places == other.places
    assert one._sums == other._sums  # of all checksums, and so of all elements
    assert one.facts["source"] == {**other.facts["source"], "merged": 3}
    for table in one.places.tables:
        with create.StoreWriter(out, one.places) as writer:
            before = writer.list_checksum(table)
            writer.put_checksums(table, 0, one.places.tables[table].block_count)
            assert writer.list_checksum(table) == before
    assert not folder_of(out).exists()


def test_packed_stores_keep_their_rows(tmp_path):
    stores = [built(tmp_path, str(seed), seed, 200, row=100)[1] for seed in (1, 2)]
    merge(solo_comm(), tmp_path / "m.h5", stores)
    merged, parts = open_store(tmp_path / "m.h5"), [open_store(store) for store in stores]
    assert merged.row_count == sum(part.row_count for part in parts)
    rows = []
    for store in (merged, *parts):
        firsts, stops = store.row_documents(range(store.row_count))
        starts, ends = store.bounds(firsts)[0], store.bounds(stops - 1)[1]
        rows.append([store.read(a, b - a).tolist() for a, b in zip(starts, ends, strict=True)])
    assert rows[0] == rows[1] + rows[2]


def test_stores_of_two_kinds_are_not_joined(tmp_path):
    one = built(tmp_path, "one", 1, 20)[1]
    for name, settings, message in (
        ("none", {"end": "none"}, "eos of .*one.h5 is 256, that of .*none.h5 None"),
        ("row", {"row": 100}, "row_length of .* is None, that of .*row.h5 100"),
    ):
        with pytest.raises(BuildError, match=message):
            merge(solo_comm(), tmp_path / "m.h5", [one, built(tmp_path, name, 2, 20, **settings)[1]])
    with pytest.raises(BuildError, match="no HDF5 file"):
        merge(solo_comm(), tmp_path / "m.h5", [one, tmp_path / "one.txt"])
    assert not folder_of(tmp_path / "m.h5").exists()


def test_columns_that_not_all_have_are_left_out(tmp_path):
    one, two = built(tmp_path, "one", 1, 20)[1], tmp_path / "two.h5"
    build(solo_comm(), Request(two, [tmp_path / "one.txt"], "byte"))
    assert merge(solo_comm(), tmp_path / "m.h5", [one, two]).left_out == ["length"]
    assert open_store(tmp_path / "m.h5").columns == {}


@pytest.mark.parametrize("table", ["tokens", "documents", "columns/length"])
def test_damaged_stores_are_refused(tmp_path, table):
    stores = [built(tmp_path, str(seed), seed, 50)[1] for seed in (1, 2)]
    places = open_store(stores[1]).places
    for offset, message in (
        (places.tables[table].offset + 9, f"2.h5 is damaged: block 0 of /{table} does not have its checksum"),
        (places.lists[table].offset, f"2.h5 is damaged: the checksums of /{table} are not what they were"),
    ):
        raw = stores[1].read_bytes()
        stores[1].write_bytes(raw[:offset] + bytes([raw[offset] ^ 4]) + raw[offset + 1 :])
        with pytest.raises(BuildError, match=message):
            run(2, lambda world: merge(world.comm, tmp_path / "m.h5", stores))
        assert list(tmp_path.glob("m.h5*")) == []
        stores[1].write_bytes(raw)


def lie(store, table, at, number):
    """Write another number into a store, with right checksums."""
    places = open_store(store).places
    with create.StoreWriter(store, places) as writer:
        writer.put(table, at, np.array([number], np.uint64))
        writer.put_checksums(table, 0, places.tables[table].block_count)
        told = writer.manifest("")
        lists = {**told.lists, table: writer.list_checksum(table)}
        writer.put_manifest("", layout.Manifest(True, dict(told.facts), lists, told.sizes))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("table", "at", "number"),
    [("documents", 0, 1), ("documents", 20, 0), ("documents", 511, 1 << 40), ("documents", 512, 9),
     ("documents", 1000, 999999), ("rows", 0, 1), ("rows", 2, 1), ("rows", 9, 2**64 - 1)],
)  # fmt: skip
def test_a_store_that_lies_with_right_checksums_is_refused(tmp_path, monkeypatch, ranks, table, at, number):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4096)  # 512 documents
    stores = [built(tmp_path, str(seed), seed, count, row=400)[1] for seed, count in ((1, 90), (2, 1000))]
    lie(stores[1], table, at, number)
    with pytest.raises(
        BuildError, match=rf"2\.h5 is damaged: /{table} must increase from 0 to \d+, and does not"
    ) as no:
        run(ranks, lambda world: merge(world.comm, tmp_path / "m.h5", stores))
    assert "fault of mpispeed" not in str(no.value)
    assert list(tmp_path.glob("m.h5*")) == []


@pytest.mark.parametrize("table", ["documents", "rows"])
def test_tables_that_end_too_early_are_refused(tmp_path, table):
    stores = [built(tmp_path, str(seed), seed, 300, row=400)[1] for seed in (1, 2)]
    places = open_store(stores[0]).places
    last = places.tables[table].count - 1
    with create.StoreWriter(stores[0], places) as writer:
        before = writer.element(table, last - 1)
    assert before + 1 < (places.token_count if table == "documents" else places.document_count)
    lie(stores[0], table, last, before + 1)
    with pytest.raises(BuildError, match=rf"1\.h5 is damaged: /{table} must increase from 0 to \d+, and does not"):
        merge(solo_comm(), tmp_path / "m.h5", stores)


def test_a_merge_goes_on_after_a_failure(tmp_path, monkeypatch):
    stores = [built(tmp_path, str(seed), seed, 50)[1] for seed in (1, 2)]
    merge(solo_comm(), tmp_path / "whole.h5", stores)
    out = tmp_path / "m.h5"
    monkeypatch.setattr(create, "finish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        BuildError, match=r"m\.h5\.parts/store\.h5 cannot be written: No space left on device; the same"
    ):
        merge(solo_comm(), out, stores)
    assert list(tmp_path.glob("m.h5*")) == []
    monkeypatch.setattr(WorkFolder, "discard", lambda _: None)  # as after a kill
    with pytest.raises(
        BuildError, match=r"m\.h5\.parts/store\.h5 cannot be written: No space left on device; the same"
    ):
        merge(solo_comm(), out, stores)
    assert "the same mpispeed data merge begins again" in unfinished(out)
    monkeypatch.undo()
    monkeypatch.setattr(WorkFolder, "remove", lambda _: None)
    assert merge(solo_comm(), out, stores).is_new
    monkeypatch.undo()
    assert not merge(solo_comm(), out, stores).is_new
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_an_output_that_is_an_input_is_not_to_be_removed(tmp_path):
    one, two = (built(tmp_path, name, seed, 20)[1] for name, seed in (("one", 1), ("two", 2)))
    (tmp_path / "link.h5").symlink_to(one)
    before = one.read_bytes()
    for output, stores in ((one, [one, two]), (one, [two, tmp_path / "link.h5"]), (tmp_path / "link.h5", [two, one])):
        with pytest.raises(BuildError, match=f"the output .*{output.name} is one of the inputs; give another name"):
            merge(solo_comm(), output, stores)
    with pytest.raises(BuildError, match="exists; remove it, or give another name"):
        merge(solo_comm(), one, [two, two])
    assert one.read_bytes() == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_merged_store_that_gets_no_name_stays(tmp_path, monkeypatch, ranks):
    stores = [built(tmp_path, str(seed), seed, 50)[1] for seed in (1, 2)]
    merge(solo_comm(), tmp_path / "whole.h5", stores)
    out = tmp_path / "m.h5"

    def refusing(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.link", refusing)
    with pytest.raises(BuildError, match=r"the name .*m\.h5: Read-only file system; it is complete as .*store\.h5"):
        run(ranks, lambda world: merge(world.comm, out, stores))
    monkeypatch.undo()
    assert WorkFolder(out).store.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert run(ranks, lambda world: merge(world.comm, out, stores))[0].is_new
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()
