"""The words of `mpispeed data build`, `import` and `merge` reach what they mean, and mistakes are one sentence."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.base.errors import MpispeedError
from mpispeed.cli.main import cli
from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder
from mpispeed.mesh.sim import run
from mpispeed.mesh.world import standing_in
from mpispeed.tokens.store import open_store
from mpispeed.tokens_build.errors import BuildError


def call(*words, code=0):
    """The output of a command on one rank."""

    def invoke(world):
        with standing_in(world):
            return CliRunner().invoke(cli, ["data", *map(str, words)])

    done = run(1, invoke)[0]
    if isinstance(done.exception, MpispeedError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": "x" * n}) + "\n" for n in range(50)) + "3\n")
    (tmp_path / "0.jsonl").write_text(json.dumps({"body": "good" * 20_000}) + "\n")
    return tmp_path


def test_build_verify_show_and_merge(place):
    words = ("-t", "byte", "--field", "body", "--eos", "10", "--pack", 32, "--columns", "length, rarity")
    words += ("--part-size", "64KiB")
    with pytest.raises(BuildError, match=r"a\.jsonl, line 51: it is no object"):
        call("build", "-o", "a.h5", *words, "0.jsonl", "a.jsonl")
    with pytest.raises(MpispeedError, match=r"a\.h5 is not finished: .*the same mpispeed data build goes on"):
        call("verify", "a.h5")
    said = call("build", "-o", "a.h5", *words, "--skip-bad", "0.jsonl", "a.jsonl")
    assert "1 records were left out; the first: " in said
    store = open_store("a.h5")
    assert f"a.h5: {store.token_count} tokens of {store.document_count} documents in {store.row_count} rows, " in said
    assert (store.facts["eos"], store.facts["row_length"], set(store.columns)) == (10, 32, {"length", "rarity"})
    assert "are as they were written" in call("verify", "a.h5")
    with pytest.raises(BuildError, match=r"a\.h5 exists; remove it, or give another name"):
        call("build", "-o", "a.h5", *words, "0.jsonl", "a.jsonl")
    assert f"{2 * store.token_count} tokens of" in call("merge", "-o", "b.h5", "a.h5", "a.h5")
    assert "are as they were written" in call("verify", "b.h5")


def test_import_of_a_pair(place):
    builder = MMapIndexedDatasetBuilder(place / "p.bin", np.int32)
    for row in range(20):
        builder.add_item_numpy(np.arange(row + 1))
        builder.end_document()
    builder.finalize(place / "p.idx")
    call("import", "-o", "p.h5", "--vocab-size", 257, "--eos", 256, "--append-eos", "p.bin")
    store = open_store("p.h5")
    assert store.read(0, 5).tolist() == [0, 256, 0, 1, 256]
    assert (store.dtype, store.facts["vocabulary_size"], store.facts["eos"]) == ("u2", 257, 256)
    call("import", "-o", "q.h5", "-t", "byte", "--eos", "none", "p")
    store = open_store("q.h5")
    assert store.read(0, 5).tolist() == [0, 0, 1, 0, 1]
    assert (store.facts["tokenizer"], store.facts["eos"]) == ("byte", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "-o", "a.h5", "a.jsonl"], "--tokenizer"), (["build", "-t", "byte", "a.jsonl"], "--out"),
        (["build", "-o", "a.h5", "-t", "byte"], "INPUTS"), (["merge", "-o", "a.h5"], "STORES"),
        (["build", "-o", "a.h5", "-t", "byte", "--pack", "0", "a.jsonl"], "--pack"),
        (["build", "-o", "a.h5", "-t", "byte", "--documents", "word", "a.jsonl"], "--documents"),
    ],
)  # fmt: skip
def test_words_that_are_missing_or_wrong(place, words, said):
    assert said in call(*words, code=2)
