"""Configurations in HJSON, which an extra package reads."""

from __future__ import annotations

import sys

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load, parse

HJSON = """
{
  // as in DeepSpeed's files
  train_micro_batch_size_per_gpu: 2
  optimizer: {
    type: AdamW
    params: {lr: 1e-3, betas: [0.9, 0.95]}
  }
  zero_optimization: {
    stage: 2 # a word of comment
  }
}
"""


@pytest.mark.deepspeed_row("a16")
@pytest.mark.parametrize("text", [HJSON, HJSON.strip()[1:-1]], ids=["braces", "no braces"])
def test_hjson(text, tmp_path):
    pytest.importorskip("hjson")
    (tmp_path / "ds.json").write_text(text)
    config = load(tmp_path / "ds.json").config
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.95]}
    assert config.zero_optimization.stage == 2


def test_hjson_has_no_key_twice_and_no_depth_without_end():
    pytest.importorskip("hjson")
    with pytest.raises(ConfigError, match="the key is there twice"):
        parse("{seed: 1\n seed: 2}", "f")
    with pytest.raises(ConfigError, match="nested"):
        parse("{a: " * 3000 + "}" * 3000, "f")
    with pytest.raises(ConfigError, match="nested"):
        parse("{a: " * 100 + "1\n" + "}" * 100, "f")


@pytest.mark.deepspeed_row("a16")
def test_without_hjson_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r'if this is HJSON: pip install "mpispeed\[hjson\]"'):
        parse(HJSON, "f")


@pytest.mark.parametrize("text", ["/*", "{seed: 1 /*", "{a", "word", "{seed: [1"])
def test_what_is_neither_is_refused_as_json(text):
    pytest.importorskip("hjson")
    with pytest.raises(ConfigError, match="this is no JSON"):
        parse(text, "f")
