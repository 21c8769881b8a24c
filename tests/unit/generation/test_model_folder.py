"""Folders of models by others: nothing of them is executed, whatever their configs name."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from mpispeed.base.errors import UsageError
from mpispeed.generation.model import describe_model, open_model

CODE = """
from pathlib import Path

Path({mark!r}).touch()
"""


def _folder(folder: Path, auto_map: dict[str, str], model_type: str) -> Path:
    mark = folder / "mark"
    (folder / "modeling.py").write_text(CODE.format(mark=str(mark)))
    content = {"model_type": model_type, "auto_map": auto_map, "hidden_size": 8, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(content))
    return mark


@pytest.mark.parametrize("model_type", ["vit", "of_its_own"])
@pytest.mark.parametrize("name", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_code_of_a_folder_is_not_run_even_if_somebody_answers_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, name: str
) -> None:
    """transformers asks on stdin where the argument is left out: `yes | mpispeed generate` must not run it."""
    mark = _folder(tmp_path, {name: "modeling.Own"}, model_type)
    answers = io.StringIO("y\n" * 4)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(UsageError):
        open_model(describe_model(tmp_path), dtype=None, tensor=1, settings={})
    assert not mark.exists()
    assert answers.tell() == 0  # nobody was asked


@pytest.mark.parametrize("named", ["kernels-community/flash-attn", "someone/else:layer", "paged|someone/else"])
def test_attention_by_code_of_the_hub_is_refused(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "attn_implementation": named}))
    with pytest.raises(UsageError, match="take the entry attn_implementation out of it"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "attn_implementation": "sdpa"}))
    assert describe_model(tmp_path).tokenizer is None


def test_without_transformers_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install transformers"):
        describe_model(tmp_path)


def test_layers_without_end_are_refused_before_they_are_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1000000000}')
    with pytest.raises(UsageError, match="speaks of 1000000000 layers"):
        describe_model(tmp_path)
