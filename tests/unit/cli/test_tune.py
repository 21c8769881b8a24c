"""`mpispeed tune` and `mpispeed run --autotuning` before anything is started: candidates, refusals, words."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpispeed.cli.main import cli, main

SETTINGS = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "train_micro_batch_size_per_gpu": [1, 2],
    "zero_optimization": {"stage": [0, 1]},
    "autotuning": {"enabled": True},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").write_text("import mpispeed\nmpispeed.add_config_arguments\n")
    write(SETTINGS)
    return tmp_path


def write(settings, name="ds.json"):
    Path(name).write_text(json.dumps(settings))


def refused(capsys, *words):
    with pytest.raises(SystemExit) as leaving:
        main(list(words))
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    return error


def test_candidates_are_shown_without_a_start(here):
    done = CliRunner().invoke(cli, ["tune", "-n", "2", "--dry-run", "ds.json", "train.py"])
    assert done.exit_code == 0, done.output
    names = ["z0_gas1_tmbspg1", "z0_gas1_tmbspg2", "z1_gas1_tmbspg1", "z1_gas1_tmbspg2"]
    assert done.stdout.splitlines() == names
    assert "4 candidates" in done.stderr
    assert not (here / "autotuning_results").exists()
    same = CliRunner().invoke(
        cli, ["run", "--autotuning", "tune", "--dry-run", "train.py", "--deepspeed_config", "ds.json"]
    )
    assert same.stdout.splitlines() == names


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["tune", "ds.json", "none.py"], "there is no script none.py"),
        (["tune", "none.json", "train.py"], "none.json"),
        (["tune", "--elastic", "ds.json", "train.py"], "--elastic"),
        (["run", "--autotuning", "tune", "train.py", "--deepspeed", "ds.txt"], "FILE.json"),
        (["run", "--autotuning", "run", "train.py", "--deepspeed_config=off.json"], '"autotuning": {"enabled": true}'),
        (["tune", "wrong.json", "train.py"], "tuner_typo"),
        (["tune", "nowhere.json", "train.py"], "autotuning.metric_path"),
        (["tune", "-n", "2", "odd.json", "train.py"], "no batch is possible"),
    ],
)
def test_what_cannot_be_searched_is_refused(here, capsys, words, why):
    write({**SETTINGS, "autotuning": {}}, "off.json")
    write({**SETTINGS, "autotuning": {"tuner_typo": 1}}, "wrong.json")
    write({**SETTINGS, "autotuning": {"metric_path": "no/such/folder/best.json"}}, "nowhere.json")
    write({**SETTINGS, "train_batch_size": 7}, "odd.json")
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--autotuning", "train.py"], ["--autotuning", "maybe", "train.py"], ["--autotuning"]]
)
def test_autotuning_takes_tune_and_run(here, words):
    with pytest.raises(SystemExit):
        main(["run", *words])


def test_help_names_it(here):
    assert "tune" in CliRunner().invoke(cli, ["--help"]).output
    assert "--autotuning" in CliRunner().invoke(cli, ["run", "--help"]).output
