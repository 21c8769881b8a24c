"""Prompts as datasets of HDF5, also of files that lie."""

import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options, PromptError

TEXTS = ["", "a", "wört", "x" * 3000, "日本", *(f"text {number}" for number in range(300))]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompts.h5"


def put(path, tables, **options):
    """A file with these datasets."""
    with h5py.File(path, "w", **options) as file:
        for name, values in tables.items():
            file[name] = values


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_texts_of_variable_and_of_fixed_length(path, libver):
    put(path, {"prompt": TEXTS, "other": np.array([each.encode() for each in TEXTS])}, libver=libver)
    for field in ("prompt", "/other"):
        prompts = open_prompts(path, field=field)
        assert [each.content for each in prompts] == TEXTS
        assert [each.id for each in prompts] == [str(number) for number in range(len(TEXTS))]
    assert prompts.index.ignored == ("prompt",)


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40), min_size=1))
def test_every_text_comes_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("p") / "p.h5"
    put(path, {"prompt": texts, "id": [f"{number}" for number in range(len(texts))]})
    with open_prompts(path) as prompts:
        assert [each.content for each in prompts] == texts


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<u2", "<i8"])
def test_tokens_with_offsets(path, dtype):
    tables = {"set/prompt/tokens": np.arange(20, dtype=dtype), "set/prompt/offsets": np.array([0, 5, 5, 20], "u4")}
    put(path, {**tables, "set/id": ["x", "y", "z"]})
    prompts = open_prompts(path, field="set/prompt")
    assert [each.content for each in prompts] == [tuple(range(5)), (), tuple(range(5, 20))]
    assert [each.id for each in prompts] == ["x", "y", "z"]


def test_ids_and_options_are_columns(path):
    columns = {"temperature": [0.5, np.nan, 0], "max_new_tokens": [3, 4, -1], "n": [2, -1, 1]}
    put(path, {"prompt": ["a", "b", "c"], "id": np.array([30, -10, 20]), **columns, "label": [1, 2, 3]})
    prompts = open_prompts(path, samples=3)
    other = open_prompts(path, samples=3, index=pickle.loads(pickle.dumps(prompts.index)))
    for found in (prompts, other):
        assert [(each.id, each.sample) for each in found] == [
            ("30", 0), ("30", 1), ("-10", 0), ("-10", 1), ("-10", 2), ("20", 0),
        ]  # fmt: skip
        assert found[0].options == Options(max_new_tokens=3, temperature=0.5, n=2)
        assert found[3].options == Options(max_new_tokens=4)
        assert found[5].options == Options(temperature=0.0, n=1)
    assert prompts.index.ignored == ("label",)


def linked(file, link):
    file["prompt"] = link


def virtual(file):
    layout = h5py.VirtualLayout((3,), "S5")
    layout[:] = h5py.VirtualSource("other.h5", "x", (3,))
    file.create_virtual_dataset("prompt", layout)


def external(file):
    file.create_dataset("prompt", (3,), "S5", external=[("/etc/passwd", 0, 15)])


def lying(file):
    file.create_dataset("prompt", (2**40,), "S5")


HOSTILE = {
    "external link": (lambda f: linked(f, h5py.ExternalLink("other.h5", "/x")), "is a soft or external link"),
    "soft link": (lambda f: linked(f, h5py.SoftLink("/prompt")), "is a soft or external link"),
    "virtual": (virtual, "chunked, filtered, virtual"),
    "external": (external, "chunked, filtered, virtual"),
    "larger than the file": (lying, "chunked, filtered, virtual|more than the file"),
    "filter": (lambda f: f.create_dataset("prompt", data=["a"], compression="gzip"), r"h5repack -l CONTI -f NONE"),
    "chunks": (lambda f: f.create_dataset("prompt", data=["a"], maxshape=(None,)), "chunked"),
    "two dims": (lambda f: linked(f, np.array([[b"a"]])), r"has the shape \(1, 1\)"),
    "numbers": (lambda f: linked(f, np.arange(3)), "expected texts"),
    "references": (
        lambda f: linked(f, np.array([f.ref], h5py.ref_dtype)),
        "is of type object; expected texts",
    ),
    "lists": (lambda f: f.create_dataset("prompt", (2,), h5py.vlen_dtype("i4")), "expected texts or numbers"),
    "type": (lambda f: linked(f, np.dtype("i4")), "neither a group nor a dataset"),
    "empty": (lambda f: f.create_dataset("prompt", (0,), "S5"), "'prompt' is empty"),
    "no prompt": (lambda f: f.create_group("x\n\x1b"), r"there is no 'prompt' \(there is x\\n\\x1b\)"),
    "no tokens": (lambda f: f.create_group("prompt"), "there is no 'tokens'"),
    "not UTF-8": (lambda f: linked(f, np.array([b"a", b"\xff"])), "byte 0 of element 1 of prompt is no UTF-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_dataset_is_refused(path, name):
    make, match = HOSTILE[name]
    with h5py.File(path, "w") as file:
        make(file)
    with pytest.raises(PromptError, match=match):
        open_prompts(path)


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ({"id": ["a"]}, "id has 1 elements for 2 prompts"),
        ({"id": ["a", "a"]}, "prompts 0 and 1 have the same id 'a'"),
        ({"id": [4, 4]}, "prompts 0 and 1 have the same id '4'"),
        ({"id": ["", "a"]}, "the id is empty"),
        ({"top_p": [0.5, 2.0]}, "top_p is 2.0; expected a number above 0 and at most 1"),
        ({"top_k": [0.5, 2.0]}, "top_k is 0.5; expected a whole number"),
        ({"max_new_tokens": [0, 3]}, "max_new_tokens is 0"),
        ({"seed": ["a", "b"]}, "seed is of type"),
    ],
)
def test_columns_that_do_not_fit_are_refused(path, tables, match):
    put(path, {"prompt": ["a", "b"], **tables})
    with pytest.raises(PromptError, match=match):
        open_prompts(path)


@pytest.mark.parametrize(
    ("tokens", "offsets", "match"),
    [
        (np.arange(5), [0, 6], "the offsets have to grow from 0 to the number of tokens, which is 5"),
        (np.arange(5), [0, 4, 3], "the offsets have to grow"),
        (np.arange(5), [-1, 3], "the offsets have to grow"),
        (np.arange(5), np.array([0, 2**64 - 1, 3], "u8"), "the offsets have to grow"),
        (np.arange(5), [0], "one offset more than there are prompts"),
        (np.arange(5.0), [0, 5], "have to be whole numbers"),
        (np.array([1, -1]), [0, 2], "prompt 0 has token ids from -1 to 1"),
        (np.array([1, 2**31]), [0, 2], "prompt 0 has token ids from 1 to 2147483648"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(path, tokens, offsets, match):
    put(path, {"prompt/tokens": tokens, "prompt/offsets": offsets})
    with pytest.raises(PromptError, match=match):
        open_prompts(path)


def test_a_long_text_is_refused_by_its_place(path):
    put(path, {"prompt": ["a", "b" * 300]})
    with pytest.raises(PromptError, match="element 1 of prompt has 300 bytes; expected at most 200"):
        open_prompts(path, most_bytes=200)
    put(path, {"prompt/tokens": np.arange(100), "prompt/offsets": [0, 1, 100]})
    with pytest.raises(PromptError, match="prompt 1 has 792 bytes of tokens; expected at most 200"):
        open_prompts(path, most_bytes=200)


def test_texts_that_share_bytes_are_refused_when_they_need_more_than_the_file(path):
    """One object of the heap that all elements point to: 100 times as large as the file."""
    put(path, {"prompt": ["x" * 5000] + ["y"] * 500})
    raw = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        start = file["prompt"].id.get_offset()
    for place in range(start + 16, start + 16 * 501, 16):
        raw[place : place + 16] = raw[start : start + 16]
    path.write_bytes(raw)
    with pytest.raises(PromptError, match="all together fewer than the file has"):
        open_prompts(path)


def test_flipped_bytes_of_references_and_heaps_are_refused_or_read(path):
    """No hang, no allocation beyond the file, no other error."""
    put(path, {"prompt": [f"text {number}" for number in range(40)]})
    whole = path.read_bytes()
    with h5py.File(path) as file:
        start = file["prompt"].id.get_offset()
    heap = whole.index(b"GCOL")
    random = np.random.default_rng(5)
    places = np.concatenate([random.integers(start, start + 640, 60), random.integers(heap, heap + 400, 60)])
    refused = 0
    for place in places.tolist():
        raw = bytearray(whole)
        raw[place] ^= int(random.integers(1, 256))
        path.write_bytes(raw)
        try:
            with open_prompts(path) as prompts:
                assert len(list(prompts)) == 40
        except PromptError:
            refused += 1
    assert refused > 20
