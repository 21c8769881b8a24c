"""A store built from files: what is in it, the same bytes at any number of ranks and after any interruption."""

import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.cli.data import data
from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder
from mpispeed.mesh.sim import run
from mpispeed.tokens.errors import UnfinishedStore
from mpispeed.tokens_build import job as jobs
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.inputs import Reading
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.part_file import Part
from mpispeed.tokens_build.work_folder import WorkFolder, folder_of, unfinished
from tests.helpers.token_builds import alone, corpus, digest, opened


def test_tokens_documents_lookup_and_columns(tmp_path):
    path, expected = corpus(tmp_path)
    report = alone(Request(tmp_path / "s.h5", [path], "byte", columns=("length", "rarity"), part_bytes=1500))
    documents, columns, rows, facts = opened(tmp_path / "s.h5")
    assert documents == expected
    assert (report.documents, report.tokens) == (len(expected), sum(map(len, expected)))
    assert report.parts > 5
    assert columns["length"].tolist() == [len(each) for each in expected]
    counts = np.bincount(np.concatenate(expected), minlength=257)
    information = -np.log(np.maximum(counts, 1) / counts.sum())
    np.testing.assert_allclose(columns["rarity"], [information[each].sum() for each in expected], rtol=1e-12)
    assert rows is None
    assert facts["complete"]
    told = facts["facts"]
    assert (told["tokenizer"], told["vocabulary_size"], told["eos"], told["source"]["files"]) == ("byte", 257, 256, 1)
    assert not folder_of(tmp_path / "s.h5").exists()


@pytest.mark.parametrize("row", [0, 50])
def test_the_same_bytes_at_any_number_of_ranks_and_size_of_parts(tmp_path, row):
    path, _ = corpus(tmp_path)
    found = {}
    for ranks, part_bytes in ((1, 1500), (2, 1500), (3, 1500), (4, 1500), (1, 1 << 20), (2, 4000)):
        out = tmp_path / f"{ranks}-{part_bytes}.h5"
        request = Request(out, [path], "byte", row=row, columns=("length", "rarity"), part_bytes=part_bytes)
        if ranks == 1:
            alone(request)
        else:
            run(ranks, lambda world, request=request: build(world.comm, request))
        found[ranks, part_bytes] = digest(out)
    assert len({found[ranks, 1500] for ranks in (1, 2, 3, 4)}) == 1
    if not row:  # the sums of rarity are those of a part's pieces, and these are shorter than one
        assert len(set(found.values())) == 1


def test_whole_documents_are_packed_into_rows(tmp_path):
    path, expected = corpus(tmp_path)
    report = alone(Request(tmp_path / "s.h5", [path], "byte", row=70, part_bytes=4000))
    documents, _, rows, facts = opened(tmp_path / "s.h5")
    pieces = [each[at : at + 70] for each in expected for at in range(0, len(each), 70)]
    assert sorted(documents) == sorted(pieces)
    assert [rows[0], rows[-1]] == [0, len(documents)]
    sizes = [sum(map(len, documents[begin:stop])) for begin, stop in pairwise(rows)]
    assert min(sizes) > 0
    assert max(sizes) <= 70
    assert report.rows == len(sizes) < 1.1 * sum(sizes) / 70 + report.parts
    assert facts["facts"]["row_length"] == 70


def test_windows_of_packing_are_bounded(tmp_path, monkeypatch):
    path, expected = corpus(tmp_path)
    monkeypatch.setattr("mpispeed.tokens_build.part_file.WINDOW_TOKENS", 1000)
    monkeypatch.setattr("mpispeed.tokens_build.part_file.READ_BYTES", 64)
    monkeypatch.setattr("mpispeed.tokens_build.texts.BATCH_BYTES", 300)
    alone(Request(tmp_path / "s.h5", [path], "byte", row=150))
    documents, _, rows, _ = opened(tmp_path / "s.h5")
    assert sorted(documents) == sorted(each[at : at + 150] for each in expected for at in range(0, len(each), 150))
    assert max(sum(map(len, documents[a:b])) for a, b in pairwise(rows)) <= 150


def test_a_build_goes_on_where_it_was(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    whole, out = Request(tmp_path / "whole.h5", [path], "byte", part_bytes=1500), tmp_path / "s.h5"
    parts = alone(whole).parts
    request = Request(out, [path], "byte", part_bytes=1500)
    written, write = [], jobs._write_part

    def breaking(place, number, *others):
        if number == 4 and len(written) == 4:
            written.append("failed")
            place.with_name(place.name + ".tmp").write_bytes(b"half of a part")
            raise OSError(28, "No space left on device", str(place))
        written.append(number)
        return write(place, number, *others)

    monkeypatch.setattr(jobs, "_write_part", breaking)
    with pytest.raises(BuildError, match="No space left on device"):
        alone(request)
    assert f"has 4 of {parts} parts" in unfinished(out)
    for path in (out, folder_of(out)):
        with pytest.raises(UnfinishedStore, match="the same mpispeed data build goes on"):
            CliRunner().invoke(data, ["verify", str(path)], catch_exceptions=False)
    folder = folder_of(out)
    (folder / "part-0000002").write_bytes((folder / "part-0000002").read_bytes()[:-1])  # as after a power cut
    (folder / "store.h5").write_bytes(b"half of a store")
    report = alone(request)
    assert (report.kept, report.parts) == (3, parts)
    assert digest(out) == digest(tmp_path / "whole.h5")
    assert not folder.exists()
    assert unfinished(out) is None


def test_other_arguments_changed_inputs_and_names_that_are_taken(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    out = tmp_path / "s.h5"
    write = jobs._write_part
    monkeypatch.setattr(jobs, "_write_part", lambda *_: (_ for _ in ()).throw(BuildError("broken")))
    monkeypatch.setattr(WorkFolder, "discard", lambda _: None)  # as after a kill
    with pytest.raises(BuildError, match="broken"):
        alone(Request(out, [path], "byte"))
    monkeypatch.setattr(jobs, "_write_part", write)
    with pytest.raises(BuildError, match="--pack was 0, and is 9 now; build as before, or remove that folder"):
        alone(Request(out, [path], "byte", row=9))
    with pytest.raises(BuildError, match="there were 1 inputs, and are 2 now"):
        alone(Request(out, [path, corpus(tmp_path, seed=2)[0]], "byte"))
    path.write_text('{"text": "other"}\n')
    with pytest.raises(BuildError, match=r"corpus1\.jsonl has changed since"):
        alone(Request(out, [path], "byte"))
    (folder_of(out) / "job.json").write_text("[]")
    with pytest.raises(BuildError, match="remove the folder, and build again"):
        alone(Request(out, [path], "byte"))
    (folder_of(out) / "job.json").unlink()
    (folder_of(out) / "precious").touch()
    with pytest.raises(BuildError, match="is in the way"):
        alone(Request(out, [path], "byte"))
    (folder_of(out) / "precious").unlink()
    out.touch()
    with pytest.raises(BuildError, match="exists; remove it, or give another name"):
        alone(Request(out, [path], "byte"))


def test_only_parts_that_are_there_are_looked_for(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    request, looked, written = Request(tmp_path / "s.h5", [path], "byte", part_bytes=1500), [], []
    is_whole, write = jobs._is_whole, jobs._write_part

    def breaking(place, number, *others):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(number)
        return write(place, number, *others)

    monkeypatch.setattr(jobs, "_is_whole", lambda *words: looked.append(words[2]) or is_whole(*words))
    monkeypatch.setattr(jobs, "_write_part", breaking)
    with pytest.raises(BuildError, match="No space"):
        alone(request)
    assert looked == []
    monkeypatch.setattr(jobs, "_write_part", write)
    assert run(2, lambda world: build(world.comm, request))[0].kept == 3
    assert sorted(looked) == written


def test_a_link_in_the_folder_of_parts_is_not_written_through(tmp_path):
    path, _ = corpus(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    folder_of(tmp_path / "s.h5").mkdir()
    (folder_of(tmp_path / "s.h5") / "job.json.tmp").symlink_to(precious)
    with pytest.raises(BuildError, match=r"the folder of parts .* cannot be used"):
        alone(Request(tmp_path / "s.h5", [path], "byte"))
    assert precious.read_text() == "as it was"


def test_two_builds_of_one_store_at_once(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    request, seen = Request(tmp_path / "s.h5", [path], "byte"), []
    write = jobs._write_part

    def another(*words):
        with pytest.raises(BuildError, match=r"another build of .* is running"):
            alone(request)
        seen.append(True)
        return write(*words)

    monkeypatch.setattr(jobs, "_write_part", another)
    assert alone(request).is_new
    assert seen == [True]


def test_a_store_that_was_complete_before_its_parts_were_removed(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    request = Request(tmp_path / "s.h5", [path], "byte")
    monkeypatch.setattr("mpispeed.tokens_build.work_folder.WorkFolder.remove", lambda _: None)
    alone(request)
    monkeypatch.undo()
    assert folder_of(request.output).exists()
    before = digest(request.output)
    assert not alone(request).is_new
    assert not folder_of(request.output).exists()
    assert digest(request.output) == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_part_is_found_when_it_is_joined(tmp_path, monkeypatch, ranks):
    path, _ = corpus(tmp_path)
    join = jobs.joining.join

    def damaging(comm, folder, *others):
        if comm.rank == 0:
            raw = bytearray(folder.part(1).read_bytes())
            raw[100] ^= 1
            folder.part(1).write_bytes(raw)
        comm.barrier()
        join(comm, folder, *others)

    monkeypatch.setattr(jobs.joining, "join", damaging)
    request = Request(tmp_path / "s.h5", [path], "byte", part_bytes=4000)
    with pytest.raises(BuildError, match="part-0000001 is damaged: its tokens do not have their checksum"):
        run(ranks, lambda world: build(world.comm, request))
    assert not request.output.exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_bad_line_is_told_once_and_stops_the_others(tmp_path, ranks):
    path, expected = corpus(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:100], b"{\n", *lines[100:], b"[]\n"]))
    request = Request(tmp_path / "s.h5", [path], "byte", part_bytes=1500)
    with pytest.raises(BuildError, match=r"corpus1\.jsonl, line (101|302): .*--skip-bad"):
        run(ranks, lambda world: build(world.comm, request))
    skipping = Request(request.output, [path], "byte", part_bytes=1500, skips_bad=True)
    report = run(ranks, lambda world: build(world.comm, skipping))[0]
    assert report.kept > 0
    assert report.skipped == 2
    assert "line 101: it is no JSON" in report.first
    assert opened(skipping.output)[0] == expected
    assert opened(skipping.output)[3]["facts"]["source"]["left_out"] == 2


def test_documents_without_tokens_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n\n{"text": "c"}\n')
    report = alone(Request(tmp_path / "s.h5", [tmp_path / "a.jsonl"], "byte", end="none"))
    assert report.empty == 1
    assert opened(tmp_path / "s.h5")[0] == [[97, 98], [99]]
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(BuildError, match="the inputs have no document with a token"):
        alone(Request(tmp_path / "t.h5", [tmp_path / "b.jsonl"], "byte", end="none"))


# -- tokens that are there already ---------------------------------------------------------------------------------


def megatron(folder, documents, dtype=np.uint16, rows_each=2):
    """A pair of Megatron, with documents of some rows each."""
    builder = MMapIndexedDatasetBuilder(folder / "m.bin", np.int32 if dtype is np.uint16 else dtype)
    for document in documents:
        for row in np.array_split(np.array(document, np.int32), rows_each):
            builder.add_item_numpy(row)
        builder.end_document()
    builder.finalize(folder / "m.idx")
    if dtype is np.uint16:  # whose code is 8 in Megatron's files
        raw = np.fromfile(folder / "m.bin", "<i4")
        raw.astype("<u2").tofile(folder / "m.bin")
        index = bytearray((folder / "m.idx").read_bytes())
        index[17] = 8
        rows = int.from_bytes(index[18:26], "little")
        offsets = np.frombuffer(index[34 + 4 * rows : 34 + 12 * rows], "<i8") // 2
        index[34 + 4 * rows : 34 + 12 * rows] = offsets.astype("<i8").tobytes()
        (folder / "m.idx").write_bytes(index)
    return folder / "m.bin"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_pairs_of_megatron(tmp_path, dtype):
    draw = np.random.default_rng(1)
    expected = [draw.integers(0, 60000, draw.integers(1, 50)).tolist() for _ in range(200)]
    path = megatron(tmp_path, [*expected[:50], [], *expected[50:]], dtype)
    for given in (path, path.with_suffix(".idx"), path.with_suffix("")):
        out = tmp_path / f"{given.name}.h5"
        report = alone(Request(out, [given], None, end="none", part_bytes=1100))
        assert report.empty == 1
        documents, _, _, facts = opened(out)
        assert documents == expected
        assert facts["dtype"] == ("u2" if dtype is np.uint16 else "u4")
    assert report.parts > 3
    alone(Request(tmp_path / "u2.h5", [tmp_path], None, end="7", vocabulary=60000))
    assert opened(tmp_path / "u2.h5")[0] == [[*each, 7] for each in (*expected[:50], [], *expected[50:])]
    assert opened(tmp_path / "u2.h5")[3]["dtype"] == "u2"
    with pytest.raises(BuildError, match=r"m\.idx: there is the token 5\d+; the vocabulary has 0 to 49999"):
        alone(Request(tmp_path / "x.h5", [path], None, vocabulary=50000))


def overwritten(path, place, raw):
    data = bytearray(path.read_bytes())
    data[place : place + len(raw)] = raw
    path.write_bytes(data)


HUGE = (2**63 - 8).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("place", "raw"),
    [
        (0, b"XX"), (9, b"\x02"), (17, b"\x06"), (17, b"\xff"), (18, HUGE), (18, (2**61).to_bytes(8, "little")),
        (26, HUGE), (26, b"\x00" * 8), (34, b"\xff\xff\xff\xff"), (34, b"\xff\xff\xff\x7f"), (34 + 4 * 20, HUGE),
        (34 + 4 * 20 + 8, HUGE), (34 + 12 * 20, b"\x05"), (34 + 12 * 20 + 8, HUGE), (34 + 12 * 20 + 8, b"\xff" * 8),
        (34 + 12 * 20 + 80, b"\x13"),
    ],
)  # fmt: skip
def test_damaged_indices_end_in_a_sentence(tmp_path, place, raw):
    path = megatron(tmp_path, [[1, 2, 3]] * 10, np.int32)
    overwritten(path.with_suffix(".idx"), place, raw)
    with pytest.raises(BuildError, match=r"m\.(idx|bin)"):
        alone(Request(tmp_path / "s.h5", [path], None))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_tables_of_texts_and_of_tokens(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    _, expected = corpus(tmp_path)
    texts = [bytes(each[:-1]).decode() for each in expected]
    table = arrow.table({"n": range(len(texts)), "text": texts, "ids": [each[:-1] for each in expected]})
    path = tmp_path / f"t.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=40)
    else:
        make = arrow.ipc.new_file if kind == "arrow" else arrow.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    report = alone(Request(tmp_path / "s.h5", [path], "byte", part_bytes=2000))
    assert opened(tmp_path / "s.h5")[0] == expected
    assert (report.parts > 3) == (kind != "stream")
    alone(Request(tmp_path / "i.h5", [path], None, reading=Reading("ids"), end="256", vocabulary=257))
    assert opened(tmp_path / "i.h5")[0] == expected
    for field, message in (("none", "has no column 'none'"), ("n", "expected texts, or lists of token ids")):
        with pytest.raises(BuildError, match=message):
            alone(Request(tmp_path / "x.h5", [path], "byte", reading=Reading(field)))
    with pytest.raises(BuildError, match="has texts, not tokens; mpispeed data build makes"):
        alone(Request(tmp_path / "y.h5", [path], None))


def test_rows_without_a_value_and_damaged_tables(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"text": ["a", None, "b", None]}), path)
    with pytest.raises(BuildError, match=r"t\.parquet, row 1 of row group 0: it has no value"):
        alone(Request(tmp_path / "s.h5", [path], "byte"))
    report = alone(Request(tmp_path / "t.h5", [path], "byte", skips_bad=True))
    assert report.skipped == 2
    assert opened(tmp_path / "t.h5")[0] == [[97, 256], [98, 256]]
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        path.write_bytes(raw[:at])
        with pytest.raises(BuildError, match=r"t\.parquet"):
            alone(Request(tmp_path / "x.h5", [path], "byte", skips_bad=True))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "idx"])
def test_bits_that_flipped_end_in_a_sentence_or_in_a_store(tmp_path, kind):
    if kind == "idx":
        path = megatron(tmp_path, [[1, 2, 3]] * 30, np.int32).with_suffix(".idx")
    else:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = arrow.table({"input_ids": [list(range(n % 9)) for n in range(200)]})
        path = tmp_path / f"t.{kind}"
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with arrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=50)
    raw, draw, sentences = path.read_bytes(), random.Random(3), 0
    for number in range(30):
        damaged = bytearray(raw)
        damaged[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            alone(Request(tmp_path / f"{number}.h5", [path], None, reading=Reading("input_ids")))
        except BuildError as failure:
            assert re.search(rf"{path.stem}\.\w+|no document", str(failure))
            sentences += 1
    assert sentences > 0


def test_parts_of_another_build_are_not_taken(tmp_path):
    shape = jobs.Shape("u2", 257, 256, 0, False)
    with jobs.new_file(tmp_path / "part-0000000") as file:
        writer = jobs.PartWriter(file, shape)
        writer.add(np.arange(5), np.array([2, 3]))
        writer.finish(0, "this", 0, "")
    with Part(tmp_path / "part-0000000", shape, "this") as part:
        assert part.begins().tolist() == [0, 3, 7]
        assert np.concatenate(list(part.tokens())).tolist() == [0, 1, 256, 2, 3, 4, 256]
    raw = Path(tmp_path / "part-0000000").read_bytes()
    with pytest.raises(BuildError, match="no whole part of this build"):
        Part(tmp_path / "part-0000000", shape, "other")
    for at in range(len(raw)):
        (tmp_path / "part-0000000").write_bytes(raw[:at])
        with pytest.raises(BuildError, match="no whole part of this build"):
            Part(tmp_path / "part-0000000", shape, "this")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part_bytes": 10}, "--part-size is 10 bytes"), ({"row": -1}, "--pack is -1"),
        ({"columns": ("other",)}, "there is no column other"), ({"output": Path("..")}, "is no name of a file"),
        ({"vocabulary": 0}, "--vocab-size is 0"), ({"columns": ("length", "length")}, "named twice"),
        ({"kind": "csv"}, "no format csv; known are jsonl"), ({"reading": Reading(documents="word")}, "cannot be word"),
    ],
)  # fmt: skip
def test_numbers_and_names_that_cannot_be(tmp_path, changes, message):
    settings = {"output": tmp_path / "s.h5", "inputs": [tmp_path], "tokenizer": "byte", **changes}
    with pytest.raises(BuildError, match=message):
        alone(Request(**settings))
