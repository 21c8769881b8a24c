"""Prompts as lines of JSON are found, checked once, and read where they are."""

import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options, PromptError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def opened(tmp_path, text, **options):
    """The prompts of a file with this content."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_prompts(path, **options)


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


def test_texts_objects_tokens_and_chats(tmp_path):
    text = lines("bare", {"prompt": "text", "id": 7}, {"prompt": [5, 0, 9]}, {"messages": MESSAGES, "id": "chat"})
    prompts = opened(tmp_path, text)
    assert [each.content for each in prompts] == ["bare", "text", (5, 0, 9), tuple(MESSAGES)]
    assert [each.id for each in prompts] == ["0", "7", "2", "chat"]
    assert [each.number for each in prompts] == [0, 1, 2, 3]
    assert prompts[1].where == f"{prompts.path}, prompt 1 (id 7)"
    with pytest.raises(IndexError, match="has 4 answers to give; there is no number 4"):
        prompts[4]


def test_options_of_a_line(tmp_path):
    said = {"temperature": 0, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5, "seed": 2**64 - 1, "n": 2}
    text = lines(
        {"prompt": "a", "max_new_tokens": 3, "stop": ["x", "y"], **said, "answer": "gold", "top_a": 1},
        {"prompt": "b", "max_tokens": 4, "stop": "x", "temperature": None},
        {
            "custom_id": "r-1",
            "method": "POST",
            "body": {"model": "m", "messages": MESSAGES, "max_completion_tokens": 5},
        },
    )
    prompts = opened(tmp_path, text)
    assert prompts[0].options == Options(3, 0.0, 5, 0.5, 1.5, 2**64 - 1, ("x", "y"), 2)
    assert prompts[2].options == Options(max_new_tokens=4, stop=("x",))
    assert prompts[3].options == Options(max_new_tokens=5)
    assert prompts[3].id == "r-1"
    assert prompts.index.ignored == ("answer", "model", "top_a")
    defaults = Options(max_new_tokens=9, temperature=0.7)
    assert prompts[0].options.over(defaults).temperature == 0
    assert prompts[2].options.over(defaults) == Options(max_new_tokens=4, temperature=0.7, stop=("x",))
    assert Options().over(defaults) is defaults


def test_several_answers_are_requests_of_their_own(tmp_path):
    prompts = opened(tmp_path, lines("a", {"prompt": "b", "n": 1}, {"prompt": "c", "n": 4}), samples=2)
    assert len(prompts) == 7
    assert prompts.sources == 3
    assert [(each.content, each.sample) for each in prompts] == [
        ("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 2), ("c", 3),
    ]  # fmt: skip
    with pytest.raises(PromptError, match="0 answers to each prompt are asked for"):
        opened(tmp_path, lines("a"), samples=0)


def test_blank_lines_carriage_returns_and_byte_order_marks_do_not_count(tmp_path):
    prompts = opened(tmp_path, b'\xef\xbb\xbf"a"\r\n\r\n  \n {"prompt": "b"} \r\n"c"')
    assert [each.content for each in prompts] == ["a", "b", "c"]
    assert [each.id for each in prompts] == ["0", "1", "2"]


def test_names_of_fields(tmp_path):
    text = lines({"question": "a", "key": "x", "id": 3}, {"question": "b", "key": "y", "id": 3})
    assert [each.id for each in opened(tmp_path, text, field="question", id_field="key")] == ["x", "y"]
    assert [each.id for each in opened(tmp_path, text, field="question", id_field=None)] == ["0", "1"]


@settings(deadline=None, max_examples=80)
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=12), is_ascii=st.booleans())
def test_every_text_comes_back(tmp_path_factory, texts, is_ascii):
    text = "".join(json.dumps({"prompt": each}, ensure_ascii=is_ascii) + "\n" for each in texts)
    with opened(tmp_path_factory.mktemp("p"), text) as prompts:
        assert [each.content for each in prompts] == texts


def test_another_rank_needs_the_index_only(tmp_path):
    prompts = opened(tmp_path, lines(*({"prompt": f"text {n}", "id": f"i{n}"} for n in range(50))))
    index = pickle.loads(pickle.dumps(prompts.index))
    other = open_prompts(prompts.path, index=index)
    assert list(other) == list(prompts)
    assert other.digest == prompts.digest
    assert (
        sum(each.nbytes for each in (index.contents.starts, index.contents.sizes, index.contents.checksums)) == 50 * 20
    )


def test_the_digest_is_that_of_the_bytes(tmp_path):
    first = opened(tmp_path, lines("a", "b")).digest
    assert opened(tmp_path, lines("a", "b")).digest == first
    assert opened(tmp_path, lines("b", "a")).digest != first
    assert opened(tmp_path, lines("a", "b") + "\n").digest != first


def test_a_file_that_changes_while_a_job_runs_is_noticed(tmp_path):
    prompts = opened(tmp_path, lines("aaaa", "bbbb"))
    prompts.path.write_text(lines("aaaa", "bbbx"))
    assert prompts[0].content == "aaaa"
    with pytest.raises(PromptError, match=r"prompts\.jsonl is not what it was when the job looked at it"):
        prompts[1]
    prompts.path.write_text(lines("aaaa"))
    with pytest.raises(PromptError, match="is not what it was"):
        prompts[1]
    with pytest.raises(PromptError, match="is not what it was"):
        open_prompts(prompts.path, index=prompts.index)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has no prompt; write one text or one object in each line"),
        ("\n \n", "has no prompt"),
        (b"\x1f\x8b\x08abc", "is compressed by gzip; gunzip it first"),
        ('"a"'.encode("utf-16"), "is UTF-16; write it as UTF-8"),
        (b"PAR1....", "is a Parquet file"),
        ('"a"\n{"prompt": "b"', r"line 2: it is no JSON \(Expecting ',' delimiter at letter 15\)"),
        ('"a"\n"b\x00"\n', "line 2: it has NUL bytes, as files have that were cut off by a full disk"),
        (b'"a"\n\0\0\0\0', "line 2: it has NUL bytes"),
        (b'"a"\n\n"b\xff"\n', "line 3: byte 2 of it is no UTF-8"),
        ('"\\ud800"', "line 1: the text has half of a surrogate pair"),
        ('{"prompt": "\\ud800"}', "prompt has half of a surrogate pair"),
        ("[" * 200_000, "line 1: its JSON is nested too deep"),
        ('[{"prompt": "a"}]', r"line 1: it is a list .* write each of its elements in a line of its own"),
        ("{\n", "line 1: it is no JSON .* write each object in one line"),
        ("17", r"line 1: it is a number \(17\); expected a text or an object with 'prompt'"),
        ("9" * 5000, "line 1: it has a number of too many digits"),
        ('{"text": "a"}', r"line 1: it has no 'prompt' \(it has 'text'\)"),
        ('{"prompt": null}', r"'prompt' is null \(null\); expected a text, a list of token ids, or a list of messages"),
        ('{"prompt": []}', "'prompt' is a list"),
        ('{"prompt": [1, "a"]}', "'prompt' is a list"),
        ('{"prompt": [1, true]}', "'prompt' is a list"),
        ('{"prompt": [1, -1]}', "prompt has the token id -1"),
        ('{"prompt": [1, 2147483648]}', "prompt has the token id 2147483648"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "'messages' is a list"),
        ('{"prompt": "a", "id": ""}', "the id is empty"),
        ('{"prompt": "a", "id": "x\\u0000"}', "the id has NUL"),
        ('{"prompt": "a", "id": 1.5}', "'id' is a number"),
        ('{"prompt": "a", "id": true}', "'id' is a truth value"),
        ('{"prompt": "a", "id": "' + "x" * 1025 + '"}', "the id has 1025 letters"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0; expected a whole number from 1"),
        ('{"prompt": "a", "max_tokens": 1e3}', "max_tokens is 1000.0; expected a whole number"),
        ('{"prompt": "a", "max_tokens": 3, "max_new_tokens": 3}', "max_new_tokens is there twice"),
        ('{"prompt": "a", "temperature": -0.1}', "temperature is -0.1; expected a number at least 0"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        ('{"prompt": "a", "top_p": 0}', "top_p is 0; expected a number above 0 and at most 1"),
        ('{"prompt": "a", "top_k": true}', "top_k is True"),
        ('{"prompt": "a", "stop": [""]}', "stop is "),
        ('{"prompt": "a", "stop": 5}', "stop is 5; expected a text, or a list of texts"),
        ('{"prompt": "a", "n": 10001}', "n is 10001; expected a whole number from 1 to 10000"),
    ],
)
def test_lines_that_are_no_prompts_are_named(tmp_path, text, match):
    with pytest.raises(PromptError, match=match):
        opened(tmp_path, text)


def test_the_first_wrong_lines_are_shown_and_the_scan_ends(tmp_path):
    with pytest.raises(PromptError) as found:
        opened(tmp_path, '"a"\n' + "x\n" * 1000)
    said = str(found.value).splitlines()
    assert [line.split(":")[0] for line in said[1:6]] == [f"  line {number}" for number in range(2, 7)]
    assert len(said) == 7


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path):
    with pytest.raises(PromptError) as found:
        opened(tmp_path, '{"\\u001b[31mred\\n": 1}')
    assert "\x1b" not in str(found.value)
    assert "\n" not in str(found.value)


def test_ids_that_are_there_twice_are_named_by_line(tmp_path):
    text = "\n" + lines({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "x"})
    with pytest.raises(PromptError, match="lines 2 and 4 have the same id 'x'"):
        opened(tmp_path, text)
    with pytest.raises(PromptError, match="lines 1 and 2 have the same id '1'"):
        opened(tmp_path, lines({"prompt": "a", "id": 1}, "b"))


def test_a_huge_line_is_not_read(tmp_path):
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(b'"a"\n')
        file.truncate(1 << 40)
    with pytest.raises(PromptError, match="line 2 has more than 16777216 bytes"):
        open_prompts(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("pipe", "no ordinary file"), ("none", "No such file"), (".", "no ordinary file")):
        with pytest.raises(PromptError, match=f"the prompts .* cannot be read: .*{problem}"):
            open_prompts(tmp_path / name)


def test_a_closed_file_stays_closed(tmp_path):
    with opened(tmp_path, lines("a")) as prompts:
        assert np.array_equal(prompts.index.counts, [0])
    prompts.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        prompts[0]
