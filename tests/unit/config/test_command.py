"""`mpispeed config check|explain|schema`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mpispeed.cli.config import config


@pytest.fixture
def run(tmp_path):
    def run(*arguments, settings=None):
        path = tmp_path / "ds.json"
        if settings is not None:
            path.write_text(settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8")
        return CliRunner().invoke(config, [str(path) if a == "FILE" else a for a in arguments])

    return run


def test_check_says_ok(run):
    result = run("check", "FILE", settings={"train_batch_size": 8})
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ok\n", "")


def test_check_lists_all_mistakes_on_stderr(run):
    result = run("check", "FILE", settings={"train_batch_sise": 8, "fp16": {"enabled": "maybe"}})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ds.json: 2 problems\n" in result.stderr
    assert 'did you mean "train_batch_size"?' in result.stderr


def test_check_refuses_missing_parts_and_impossible_batches(run):
    result = run("check", "FILE", settings={"hybrid_engine": {"enabled": True}})
    assert result.exit_code == 2 and "hybrid_engine: " in result.stderr
    result = run("check", "FILE", "-n", "3", settings={"train_batch_size": 8})
    assert result.exit_code == 2 and "ds.json: train_batch_size 8: " in result.stderr


@pytest.mark.parametrize("command", [("check",), ("explain", "-n", "2")])
def test_a_missing_file_is_one_line(run, command):
    result = run(*command, "FILE")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "there is no such configuration file" in result.stderr


def test_check_as_json_carries_warnings(run):
    result = run("check", "FILE", "--json", settings={"vocabulary_size": 9})
    verdict = json.loads(result.stdout)
    assert verdict["ok"] is True and "vocabulary_size 9" in verdict["warnings"][0]
    assert "warning: vocabulary_size 9" in result.stderr


@pytest.mark.parametrize(
    ("settings", "more", "expected"),
    [
        ({"train_batch_sise": 8, "fp16": {"enabled": "maybe"}}, (), ["train_batch_sise: ", "fp16.enabled: "]),
        ({"seed": -1}, (), ["seed: must be at least 0, found -1"]),
        ({"zero_optimization": {"stage": 1, "legacy_stage1": True}}, (), ["zero_optimization.legacy_stage1: "]),
        ({"hybrid_engine": True}, (), ["hybrid_engine: "]),
        ({"train_batch_size": 8}, ("-n", "3"), ["train_batch_size 8: "]),
        (
            {"train_batch_size": 6, "expert_parallel": {"enabled": True, "autoep_size": 4}},
            ("-n", "6"),
            ["expert_parallel.autoep_size: 4 ranks cannot share experts out, as this does not divide the 6 data ranks"],
        ),
        (
            {"expert_parallel": {"top_k": "x", "routed_scaling_factor": [1]}},
            (),
            ['top_k: expected "auto" or a whole number from 1 on, found "x"', 'factor: expected "auto" or a number'],
        ),
        (None, (), ["there is no such configuration file"]),
        ("{", (), ["line 1, column 2: this is no JSON"]),
    ],
)
def test_check_as_json_tells_all_problems(run, settings, more, expected):
    result = run("check", "FILE", "--json", *more, settings=settings)
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["ok"], len(verdict["problems"])) == (2, False, len(expected))
    assert all(any(text in problem for problem in verdict["problems"]) for text in expected), verdict
    assert all(problem in result.stderr for problem in verdict["problems"])
    assert not any("ds.json" in problem for problem in verdict["problems"])


def test_explain_prints_values_and_origins(run):
    text = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage3_max_live_parameters": "1e9"},} // x'
    result = run("explain", "FILE", "-n", "4", settings=text)
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert len(lines) > 300
    assert lines["train_batch_size"].split()[1:3] == ["8", "derived:"]
    assert lines["zero_optimization.max_live_parameters"].split(maxsplit=2)[1:] == [
        "1000000000", "alias of zero_optimization.stage3_max_live_parameters",
    ]  # fmt: skip
    assert len(run("explain", "FILE", "-n", "4", "--set-only", settings=text).stdout.splitlines()) < 10


def test_explain_as_json(run):
    rows = json.loads(run("explain", "FILE", "-n", "4", "--json", settings={"train_batch_size": 8}).stdout)
    assert {k: rows[1][k] for k in ("path", "value")} == {"path": "train_micro_batch_size_per_gpu", "value": 2}


def test_explain_needs_ranks_and_a_fitting_batch(run):
    assert run("explain", "FILE", settings={}).exit_code == 2
    assert run("explain", "FILE", "-n", "0", settings={}).exit_code == 2
    result = run("explain", "FILE", "-n", "3", settings={"train_batch_size": 8})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ds.json: train_batch_size 8: " in result.stderr


def test_schema(run):
    assert json.loads(run("schema").stdout)["title"] == "Config"
    assert run("schema", "--markdown").stdout.startswith("# Configuration keys")


def test_the_command_imports_neither_torch_nor_mpi(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}', encoding="utf-8")
    code = (
        "import sys\n"
        "from mpispeed.cli.config import config\n"
        "assert 'pydantic' not in sys.modules\n"
        f"config(['explain', {str(path)!r}, '-n', '2'], standalone_mode=False)\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
