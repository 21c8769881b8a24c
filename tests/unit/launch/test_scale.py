"""Scaling studies: the batch of each size, what counts as a result, and the arithmetic of efficiency."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.config.batch import resolve_batch
from mpispeed.launch import submit
from mpispeed.launch.efficiency import Run, draw, read_run, rows_of, table, write_csv
from mpispeed.launch.scale import Study, batch_keys, collect, find_config, parse_ranks, prepare, wait_for

TB, MB, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@given(
    micro=st.integers(1, 12), steps=st.integers(1, 6), first=st.integers(1, 4), factor=st.integers(1, 8),
    given_keys=st.sampled_from([(TB,), (MB,), (TB, MB), (TB, GAS), (MB, GAS), (TB, MB, GAS)]),
    mode=st.sampled_from(["strong", "weak"]),
)  # fmt: skip
def test_batches_of_all_sizes_are_those_of_the_mode(micro, steps, first, factor, given_keys, mode):
    """And the config itself agrees with what is written."""
    if MB in given_keys and GAS not in given_keys and TB not in given_keys:
        steps = 1
    config = {TB: micro * steps * first, MB: micro, GAS: steps}
    config = {key: config[key] for key in given_keys}
    ranks = first * factor
    total = resolve_batch(*(config.get(key) for key in (TB, MB, GAS)), first)[0]
    if mode == "strong" and total % ranks:
        with pytest.raises(ConfigError, match="cannot be cut"):
            batch_keys(config, mode, ranks, first)
        return
    keys = batch_keys(config, mode, ranks, first)
    found = resolve_batch(*(keys.get(key) for key in (TB, MB, GAS)), ranks)
    assert found[0] == (total if mode == "strong" else total * factor)
    if MB in config:
        assert found[1] <= micro


@pytest.mark.parametrize(
    ("config", "mode", "message"),
    [
        ({}, "strong", "neither train_batch_size nor"),
        ({GAS: 2}, "weak", "neither train_batch_size nor"),
        ({TB: 6}, "strong", "train_batch_size 6 cannot be cut for 4 ranks"),
        ({TB: "6"}, "strong", "train_batch_size is '6'"),
        ({MB: 2, "elasticity": {"enabled": True}}, "weak", "disable it"),
        ({MB: 2, "pipeline": {"stages": 4}}, "weak", "4 ranks for each sample"),
        ({MB: 2, "sequence_parallel_size": 3}, "weak", "3 ranks for each sample"),
    ],
)
def test_config_without_a_usable_batch_is_refused(config, mode, message):
    with pytest.raises(ConfigError) as caught:
        batch_keys(config, mode, 4, 2)
    assert message in str(caught.value)


def test_stages_of_a_pipeline_share_a_batch():
    config = {TB: 8, MB: 2, "pipeline": {"stages": 2}}
    assert batch_keys(config, "strong", 4, 2) == {TB: 8, MB: 2}
    assert batch_keys(config, "weak", 4, 2) == {MB: 2, GAS: 4}


def test_ranks_are_numbers():
    assert parse_ranks("4, 1,2,2") == (1, 2, 4)
    for text in ("", "2", "1,x", "0,2", "-1,2", "1,,2"):
        with pytest.raises(ConfigError, match="expected at least two numbers"):
            parse_ranks(text)


def test_config_is_found_however_it_is_written():
    assert find_config(["t.py", "--deepspeed_config", "a.json"])[0:2] == (2, "")
    assert find_config(["t.py", "--deepspeed_config=a.json"])[0:2] == (1, "--deepspeed_config=")
    assert find_config(["t.py", "--config", "model.yaml"]) is None


def run_of(ranks, batch, *seconds):
    return Run(ranks, batch, (9.0, *seconds), 1)


def test_efficiency_of_strong_scaling():
    runs = [run_of(4, 8, 0.5, 0.5), run_of(1, 8, 1.0, 1.0), run_of(1, 8, 1.2, 1.2), run_of(4, 8, 0.4, 0.4)]
    first, second = rows_of(runs, "strong", skip=1)
    assert (first.ranks, first.runs, first.steps, first.step_seconds) == (1, 2, 4, pytest.approx(1.1))
    assert (first.low_seconds, first.high_seconds, first.serial_part) == (1.0, 1.2, None)
    assert second.samples_per_second == pytest.approx(8 / 0.45)
    assert second.speedup == pytest.approx(1.1 / 0.45)
    assert second.efficiency == pytest.approx(1.1 / 0.45 / 4)
    assert second.efficiency_low == pytest.approx(1.0 / 0.5 / 4)
    assert second.efficiency_high == pytest.approx(1.2 / 0.4 / 4)
    # By Amdahl a serial part s gives 1 / (s + (1 - s) / p).
    serial = second.serial_part
    assert 1 / (serial + (1 - serial) / 4) == pytest.approx(second.speedup)
    assert "serial part" in table([first, second], "strong")


def test_efficiency_of_weak_scaling_and_quartiles_of_one_run():
    rows = rows_of([run_of(2, 4, 1.0, 2.0, 3.0), run_of(4, 8, 2.5, 2.5, 2.5)], "weak", skip=1)
    assert (rows[0].low_seconds, rows[0].step_seconds, rows[0].high_seconds) == (1.5, 2.0, 2.5)
    assert rows[1].efficiency == pytest.approx(2.0 / 2.5)
    assert rows[1].speedup == pytest.approx(2 * 2.0 / 2.5)
    assert rows[1].serial_part is None
    assert "serial part" not in table(rows, "weak")


def test_batches_of_the_other_mode_and_short_runs_are_refused():
    weak = [run_of(1, 2, 1, 1), run_of(2, 4, 1, 1)]
    with pytest.raises(UsageError, match=r"strong scaling keeps the batch of all ranks, .* 2 on 1, 4 on 2 ranks"):
        rows_of(weak, "strong", 1)
    with pytest.raises(UsageError, match="weak scaling keeps the batch of each rank"):
        rows_of([run_of(1, 2, 1, 1), run_of(2, 2, 1, 1)], "weak", 1)
    with pytest.raises(UsageError, match="had 3 steps, of which the first 2 do not count"):
        rows_of(weak, "weak", 2)
    with pytest.raises(UsageError, match="had 3 steps, of which the first 5 do not count"):
        rows_of(weak, "weak", 5)
    with pytest.raises(UsageError, match="no run has written a result"):
        rows_of([], "weak", 1)


def test_table_csv_and_picture_are_written(tmp_path):
    rows = rows_of([run_of(1, 8, 1.0, 1.1), run_of(2, 8, 0.6, 0.7)], "strong", 1)
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [float(row["efficiency"]) for row in found] == [row.efficiency for row in rows]
    draw(tmp_path / "rows.png", rows, "strong", "$a script$")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_folder_of_a_study_holds_a_config_for_each_run(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({TB: 8, "optimizer": {"type": "Adam"}}))
    study = Study(("train.py", f"--deepspeed_config={tmp_path}/ds.json"), (1, 2), "strong", repeat=2)
    cases = prepare(study, tmp_path / "study")
    assert [case.ranks for case in cases] == [1, 2, 1, 2]
    assert len({case.folder for case in cases}) == 4
    for case in cases:
        path = case.words[1].removeprefix("--deepspeed_config=")
        assert json.loads((case.folder / "config.json").read_text())["optimizer"] == {"type": "Adam"}
        assert path == str(case.folder / "config.json")
    with pytest.raises(UsageError, match="has a study already"):
        prepare(study, tmp_path / "study")
    cases[1].result.write_text(json.dumps({"ranks": 2, "samples_per_step": 8, "step_seconds": [1, 1]}))
    found, runs, missing = collect(tmp_path / "study")
    assert found == study
    assert runs == [Run(2, 8, (1.0, 1.0))]
    assert missing == [case.result for case in (cases[0], *cases[2:])]


@pytest.mark.parametrize("text", ["", "{}", '{"ranks": 1, "samples_per_step": 2, "step_seconds": ["x"]}', "[]"])
def test_result_that_is_none_is_named(text, tmp_path):
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(UsageError, match=r"steps\.json is no result"):
        read_run(tmp_path / "steps.json")


SQUEUE = """#!/bin/sh
echo "$*" >> {0}/asked
set -- $(wc -l < {0}/asked)
. {0}/answer-$1
"""


def test_jobs_are_waited_for_by_one_question_a_round(tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text(SQUEUE.format(tmp_path))
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answers = (
        "echo 7 RUNNING; echo 8 PENDING; echo 9 FAILED",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "echo 8 COMPLETING",  # 7 is not known any more
        "echo 8 SIGNALING",
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    )
    for number, text in enumerate(answers, 1):
        (tmp_path / f"answer-{number}").write_text(text + "\n")
    slept = []
    wait_for(["7", "8", "9"], submit.ended_of, slept.append)
    asked = [line.split("--jobs=")[1].split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == ["7,8,9", "7,8", "7,8", "8", "8"]
    assert slept == [10.0, 15.0, 22.5, 33.75]


def test_waiting_without_squeue_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no squeue here"):
        submit.ended_of(["7"])
