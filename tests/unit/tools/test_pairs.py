"""The tool of pairs: starts that hang or end badly, what an ended call leaves to the next, the rules of rows."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import pairs_page
from tests.helpers.features import BY_NAME, FEATURES, all_pairs, meaningless, stage_of

SPEC = importlib.util.spec_from_file_location("pairs_tool", Path(__file__).parents[3] / "tools" / "pairs.py")
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


def begun(program):
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


def test_a_start_that_hangs_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(tool, "START_SECONDS", 1.0)
    process = begun("import time; time.sleep(600)")
    assert tool.attend(process, tmp_path / "done.jsonl") == "no end after 0 s"
    assert process.returncode is not None


@pytest.mark.parametrize(("code", "told"), [(0, ""), (3, "ranks ended with code 3")])
def test_the_end_of_a_start_is_told_with_its_code(code, told, tmp_path):
    assert tool.attend(begun(f"raise SystemExit({code})"), tmp_path / "done.jsonl") == told


def test_the_next_call_takes_what_ranks_of_an_ended_one_had_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "WORK", tmp_path)
    kept = tmp_path / "outcomes.jsonl"
    tool.keep(kept, ["fp16", "bf16"], {"result": "refused"})
    rows = [
        {"pair": ["fp16", "MiCS"]},
        {"pair": ["fp16", "MiCS"], "outcome": {"result": "works"}},
        {"pair": ["a", "b"]},
    ]
    text = "\n".join(map(json.dumps, rows)) + '\n{"pair": ["c", "d"], "outc'
    (tmp_path / "done.jsonl").write_text(text)
    expected = {("fp16", "bf16"): {"result": "refused"}, ("fp16", "MiCS"): {"result": "works"}}
    assert tool.taken_over(kept) == expected
    assert tool.taken_over(kept) == expected  # it was kept, once
    assert len(tool.read(kept)) == 2


def test_a_stage_is_one_at_which_both_can_be():
    assert stage_of(BY_NAME["fp16"], BY_NAME["accumulation"]) == 0
    assert stage_of(BY_NAME["offload_optimizer, cpu"], BY_NAME["fp16"]) == 1
    assert stage_of(BY_NAME["MiCS"], BY_NAME["offload_optimizer, cpu"]) == 3
    assert stage_of(BY_NAME["MiCS"], BY_NAME["OneBitAdam"]) == 3
    assert stage_of(BY_NAME["MiCS"], BY_NAME["ZeRO stage 1"]) == 1
    assert stage_of(BY_NAME["zero.Init"], BY_NAME["fp16"]) == 3
    assert stage_of(BY_NAME["zero.Init"], BY_NAME["OneBitAdam"]) == 1


def test_features_have_names_of_their_own():
    assert len({feature.key for feature in FEATURES}) == len(FEATURES) == len(BY_NAME)


def test_the_page_has_what_the_data_say():
    table = {(first.name, second.name): {"result": "works", "kept": "bits"} for first, second in all_pairs()}
    table["fp16", "bf16"] = {"result": "refused", "text": "choose one"}
    table |= {
        (first.name, second.name): {"result": "meaningless", "text": meaningless(first, second)}
        for first, second in all_pairs()
        if meaningless(first, second)
    }
    text = pairs_page.written(table)
    cells = {(first, second): sign for first, second, sign in pairs_page.pairs_of_page(text)}
    assert cells == {pair: pairs_page.sign(fields) for pair, fields in table.items()}
    assert "choose one: **fp16** with bf16" in text


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        ({"result": "works", "kept": "near"}, True),
        ({"result": "works", "kept": "bits"}, True),
        ({"result": "works", "kept": "runs"}, False),
        ({"result": "refused", "text": "no"}, False),
    ],
)
def test_losses_may_be_nearer_than_the_table_says(now, is_same):
    assert (pairs_page.differs({"result": "works", "kept": "near"}, now) is None) == is_same
