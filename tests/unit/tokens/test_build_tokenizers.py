"""Tokenizers of Hugging Face in builds: the tokens of documents, and the one that ends them."""

import json

import pytest

from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.job import Request
from tests.helpers.token_builds import alone, corpus, digest, opened


def small_tokenizer(folder):
    """A tokenizer.json of byte pairs, trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["the cat sat on the mat, the dog on the log"] * 3, trainer)
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    return made


def test_a_tokenizer_of_hugging_face(tmp_path):
    made = small_tokenizer(tmp_path)
    made.no_truncation()
    made.no_padding()
    path, expected = corpus(tmp_path)
    texts = [bytes(each[:-1]).decode() for each in expected]
    end = made.token_to_id("<|end|>")
    file = tmp_path / "tokenizer.json"
    with pytest.raises(BuildError, match="do not say which token ends a document; give it with --eos"):
        alone(Request(tmp_path / "s.h5", [path], str(file)))
    with pytest.raises(BuildError, match="has no token <eos>"):
        alone(Request(tmp_path / "s.h5", [path], str(file), end="<eos>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    for name, wish in (("a", str(file)), ("b", str(tmp_path))):
        report = alone(Request(tmp_path / f"{name}.h5", [path], wish, part_bytes=2000))
        assert opened(tmp_path / f"{name}.h5")[0] == [[*made.encode(text).ids, end] for text in texts]
        assert report.documents == len(texts)
    assert digest(tmp_path / "a.h5") == digest(tmp_path / "b.h5")
    told = opened(tmp_path / "a.h5")[3]["facts"]
    assert (told["vocabulary_size"], told["eos"]) == (made.get_vocab_size(), end)


@pytest.mark.parametrize(("special", "count"), [(False, 0), (True, 2)])
def test_texts_of_special_tokens_are_text_unless_they_are_asked_for(tmp_path, special, count):
    end = small_tokenizer(tmp_path).token_to_id("<|end|>")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the cat<|end|>the mat<|end|>"}) + "\n")
    request = Request(tmp_path / "s.h5", [tmp_path / "a.jsonl"], str(tmp_path), end="<|end|>", parses_special=special)
    alone(request)
    (document,) = opened(tmp_path / "s.h5")[0]
    assert document[-1] == end
    assert document.count(end) == 1 + count


def test_the_end_given_as_a_number_is_no_text(tmp_path):
    made = small_tokenizer(tmp_path)
    assert made.token_to_id("7") not in (None, 7)
    path, _ = corpus(tmp_path, count=3)
    alone(Request(tmp_path / "s.h5", [path], str(tmp_path), end="7"))
    assert {document[-1] for document in opened(tmp_path / "s.h5")[0]} == {7}
    assert opened(tmp_path / "s.h5")[3]["facts"]["eos"] == 7
    with pytest.raises(BuildError, match="has no token 300000"):
        alone(Request(tmp_path / "t.h5", [path], str(tmp_path), end="300000"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [("{}", "is no tokenizer that the package tokenizers can read"), (None, "there is no tokenizer")],
)
def test_files_that_are_no_tokenizer(tmp_path, raw, message):
    file = tmp_path / "tokenizer.json"
    if raw is not None:
        file.write_text(raw)
    with pytest.raises(BuildError, match=message):
        alone(Request(tmp_path / "s.h5", [corpus(tmp_path)[0]], str(file)))


def test_a_tokenizer_that_fails_at_a_text_is_named(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "gone"}
    (tmp_path / "odd.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(BuildError, match=r"the tokenizer odd cannot take a text of these inputs: .*Missing"):
        alone(Request(tmp_path / "s.h5", [corpus(tmp_path)[0]], str(tmp_path / "odd.json"), end="none"))


def test_a_tokenizer_that_draws_lots_is_refused(tmp_path):
    made = small_tokenizer(tmp_path)
    made.model.dropout = 0.1
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BuildError, match="drops merges by chance"):
        alone(Request(tmp_path / "s.h5", [corpus(tmp_path)[0]], str(tmp_path / "tokenizer.json"), end="0"))
