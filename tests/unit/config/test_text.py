"""JSON texts: comments, trailing commas, duplicate keys, places of mistakes."""

from __future__ import annotations

import json

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config.text import decode


def values(text):
    result, problems = decode(text, "file.json")
    assert problems == []
    return result


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1} // end',
        '{ // start\n "a": 1}',
        '{"a": /* inside\n of it */ 1}',
        '# first line\n{"a": 1,}',
        '{"a": 1 , /* after the comma */ }',
    ],
)
def test_comments_and_trailing_commas(text):
    assert values(text) == {"a": 1}


def test_trailing_comma_in_a_list():
    assert values('{"a": [1, 2, ], }') == {"a": [1, 2]}


def test_strings_keep_what_looks_like_comments():
    tricky = {"url": "http://x#y", "glob": "/* no */", "quote": 'a"//b', "end": ",}", "back": "\\"}
    text = json.dumps(tricky)
    assert values(text) == tricky
    assert values(f"{text[:-1]},}} // comment") == tricky


def test_all_keys_that_come_twice_are_named_with_their_paths():
    _, problems = decode('{"a": 1, "b": {"c": [{"d": 1, "d": 1}]}, "a": 1, "a": 2}', "f")
    assert [p.path for p in problems] == ["b.c[0].d", "a", "a"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1\n "b": 2}', "line 2, column 2"),
        ("{a: 1}", "line 1, column 2"),
        ('{"a": }', "line 1, column 7"),
        ("", "line 1, column 1"),
        ('{"a": 1}}', "line 1, column 9"),
        ('/* x\n y */ {"a": 1, // z\n "b" 2}', "line 3, column 6"),
    ],
)
def test_a_mistake_is_placed(text, place):
    with pytest.raises(ConfigError, match=rf"^file.json: {place}: this is no JSON"):
        decode(text, "file.json")


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_only_objects(text):
    with pytest.raises(ConfigError, match=r"a configuration is a JSON object"):
        decode(text, "f")


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_absurd_texts_are_refused_not_crashed_on(text):
    with pytest.raises(ConfigError, match="this is no JSON"):
        decode(text, "f")
