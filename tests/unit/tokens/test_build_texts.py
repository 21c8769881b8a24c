"""Text files and lines of JSON: any cut into ranges of bytes gives the same documents, and bad lines have a place."""

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.tokens_build import texts
from mpispeed.tokens_build.errors import BuildError, Faults
from mpispeed.tokens_build.inputs import Reading, find_inputs

LINES = Reading()


def documents(one, reading, part_bytes, faults=None):
    found = []
    for piece in texts.cut(0, one, reading, part_bytes):
        for batch in texts.read(one, piece.begin, piece.stop, reading, faults or Faults(are_skipped=False)):
            if isinstance(batch, list):
                found += batch
            else:
                found += [part.tolist() for part in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])]
    return found


def written(folder, name, raw):
    path = folder / name
    path.write_bytes(raw)
    return find_inputs([path])[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


def by_definition(raw, documents):
    """What the documents of a text are."""
    lines = [line.removesuffix("\r") for line in raw.split("\n")]
    if documents == "line":
        return [line for line in lines if line]
    found, held = [], []
    for line in [*raw.split("\n"), ""]:
        if line in ("", "\r"):
            found += ["\n".join(held).rstrip("\r\n")] if held else []
            held = []
        else:
            held.append(line)
    return [text for text in found if text]


@given(
    st.text(st.sampled_from("ab\n\r\u00e9"), max_size=40), st.integers(1, 12), st.sampled_from(["line", "paragraph"])
)
def test_any_cut_gives_the_same_documents(place, raw, part_bytes, kind):
    raw = "\n".join(line.rstrip("\r") + "\r" * line.endswith("\r") for line in raw.split("\n"))
    one = written(place, "any.txt", raw.encode())
    reading = Reading(documents=kind)
    whole = documents(one, reading, 1 << 20)
    assert documents(one, reading, part_bytes) == whole
    assert [text.replace("\r", "") for text in whole] == [
        text.replace("\r", "") for text in by_definition(raw, kind) if text.strip("\r")
    ]


def test_a_file_is_one_document_and_marks_of_byte_order_go(place):
    one = written(place, "one.txt", b"\xef\xbb\xbfone\n\ntwo\n")
    assert documents(one, Reading(documents="file"), 2) == ["one\n\ntwo"]
    assert documents(one, LINES, 2) == ["one", "two"]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_of_json_have_texts_or_token_ids(place, packed):
    draw = random.Random(3)
    values = [draw.choice([f"text {n}\n\u20ac", [n, n + 1], []]) for n in range(60)]
    raw = "\n\n".join(json.dumps({"id": n, "text": value}) for n, value in enumerate(values)).encode()
    one = written(place, f"{packed}.jsonl{'.gz' * packed}", gzip.compress(raw) if packed else raw)
    assert documents(one, LINES, 1 << 20) == values
    assert documents(one, LINES, 37) == values


BAD = {
    b'{"text": "a"': "it is no JSON (Expecting ',' delimiter at letter 13)",
    b'["a"]': "it is no object",
    b'{"other": 1}': "it has no 'text' (it has 'other'); name the entry of documents with --field",
    b'{"text": 3}': "'text' is neither a text nor a list of token ids",
    b'{"text": [1, true]}': "neither",
    b'{"text": [1, -2]}': "token id -2",
    b'{"text": [4294967296]}': "token id 4294967296",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": "\xff"}': "byte 10 of it is no UTF-8",
    b"[" * 100000: "",
    b'{"text": [' + b"1" * 5000 + b"]}": "it has a number of too many digits",
    b'{"text": "a\x00"}': "(Invalid control character at letter 12)",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line[:20]))
def test_a_bad_line_has_its_place_or_is_left_out(place, line):
    one = written(place, "bad.jsonl", b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n' + line)
    with pytest.raises(BuildError, match=r"bad\.jsonl, line 3: .*leave such records out with --skip-bad") as caught:
        documents(one, LINES, 1 << 20)
    assert BAD[line] in str(caught.value)
    faults = Faults(are_skipped=True)
    assert documents(one, LINES, 16, faults) == ["x", "y"]
    assert faults.count == 2
    assert "line 3: " in faults.first


def test_documents_that_are_too_long_are_bad(place, monkeypatch):
    monkeypatch.setattr(texts, "MOST_DOCUMENT_BYTES", 50)
    raw = b"a" * 40 + b"\n" + b"b" * 60 + b"\n" + b"c\n\nd\n" + b"e" * 51
    one = written(place, "long.txt", raw)
    faults = Faults(are_skipped=True)
    assert documents(one, LINES, 1000, faults) == ["a" * 40, "c", "d"]
    assert faults.count == 2
    assert "line 2: " in faults.first
    faults = Faults(are_skipped=True)
    assert documents(one, Reading(documents="paragraph"), 1000, faults) == []
    assert faults.count == 2
    with pytest.raises(BuildError, match="line 1: it has more than"):
        documents(one, Reading(documents="file"), 1000)


def test_inputs_that_changed_or_are_missing(place, tmp_path):
    one = written(tmp_path, "a.txt", b"a\n")
    (tmp_path / "a.txt").write_bytes(b"other\n")
    with pytest.raises(BuildError, match=r"a\.txt has changed since the build began"):
        documents(one, LINES, 10)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(BuildError, match=r"a\.txt cannot be read: No such file"):
        documents(one, LINES, 10)
    with pytest.raises(BuildError, match="cannot be read: No such file"):
        find_inputs([tmp_path / "none.txt"])
    (tmp_path / "b.unknown").touch()
    with pytest.raises(BuildError, match="not known by its name; say it with --format"):
        find_inputs([tmp_path / "b.unknown"])
    with pytest.raises(BuildError, match="there is nothing to read in"):
        find_inputs([tmp_path])
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    with pytest.raises(BuildError, match=r"broken\.jsonl\.gz cannot be read: "):
        documents(find_inputs([tmp_path])[0], LINES, 1000)
