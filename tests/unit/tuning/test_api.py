"""Files and words around a search, and DeepSpeed's class."""

import argparse
import json
from collections import OrderedDict
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compat.names import SERVED
from mpispeed.launch.hosts import Host
from mpispeed.launch.options import Wishes
from mpispeed.tuning.api import Autotuner, Request, count, optimal_of, read
from mpispeed.tuning.results import Folders
from mpispeed.tuning.words import config_of, with_config

SETTINGS = {"train_micro_batch_size_per_gpu": [1, 2], "autotuning": {"enabled": True, "metric": "FLOPS"}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SETTINGS))
    return path


def test_a_file_with_lists_is_checked_as_one_without(file):
    raw, tuning = read(file)
    assert raw["train_micro_batch_size_per_gpu"] == [1, 2]
    assert tuning.metric == "flops"
    file.write_text(json.dumps({**SETTINGS, "zero_optimization": {"stage": "all", "overlap_comm": [True, False]}}))
    assert read(file)[1].enabled
    file.write_text(json.dumps({**SETTINGS, "zero_optimization": {"overlap": 1}}))
    with pytest.raises(ConfigError, match=r"zero_optimization.overlap"):
        read(file)
    file.write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="a"):
        read(file)


def test_words_of_settings_are_found_and_replaced():
    assert config_of(["x", "--deepspeed_config", "a.json"]) == Path("a.json")
    assert config_of(["--deepspeed=b.json", "--config", "c.json"]) == Path("b.json")
    assert config_of(["--deepspeed", "--config", "c.yaml"]) is None
    assert with_config(["--deepspeed_config", "a.json", "--config=b.json", "a.json"], Path("best.json")) == [
        "--deepspeed_config", "best.json", "--config=best.json", "a.json",
    ]  # fmt: skip


def test_the_best_settings_have_no_lists_and_no_search():
    raw = {**SETTINGS, "train_batch_size": 8, "zero_optimization": {"stage": "all", "overlap_comm": [True, False]}}
    point = {
        "zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "zero_optimization.overlap_comm": False,
    }  # fmt: skip
    assert optimal_of(raw, point) == {
        "zero_optimization": {"stage": 2, "overlap_comm": False}, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }  # fmt: skip


def test_ranks_are_counted_as_a_start_counts_them(file, tmp_path):
    assert count(Request(file, ("x.py",), ranks=3), {}) == 3
    assert count(Request(file, ("x.py",)), {}) == 1
    hosts = Wishes(hosts=(Host("a", (0, 1)), Host("b", (0,))))
    assert count(Request(file, ("x.py",), wishes=hosts), {}) == 3
    srun = tmp_path / "srun"
    srun.touch(mode=0o755)
    script = {"PATH": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}
    step = {**script, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    for environ in (script, step):
        assert count(Request(file, ("x.py",)), environ) == 3
    with pytest.raises(UsageError, match="started 2 times"):
        count(Request(file, ("x.py",)), {**step, "SLURM_STEP_NUM_TASKS": "2"})


def test_the_folder_of_jobs_loses_those_of_earlier_searches_and_nothing_else(tmp_path):
    folders = Folders(tmp_path, tmp_path)
    assert folders.of_jobs() == tmp_path / "jobs"
    for name in ("job-1/tasks.jsonl", "job-12/tasks.jsonl", "job-2/mine", "results/tasks.jsonl"):
        path = tmp_path / "jobs" / name
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "jobs" / "job-3").symlink_to(tmp_path / "jobs" / "job-1")
    folders.of_jobs()
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["job-2", "job-3", "results"]


# -- DeepSpeed's tests -------------------------------------------------------------------------------------------------

RESOURCES = [
    OrderedDict([("worker-0", [0, 1, 2, 3])]),
    OrderedDict([("worker-0", [0, 1, 2, 3]), ("worker-1", [0, 1, 2, 3])]),
    OrderedDict([("worker-0", [0]), ("worker-1", [0, 1, 2]), ("worker-2", [0, 1, 2])]),
    OrderedDict([("worker-0", [0, 1]), ("worker-2", [4, 5])]),
]


def arguments(file, **more):
    return argparse.Namespace(user_script="train.py", user_args=["--deepspeed_config", str(file)], **more)


@pytest.mark.parametrize("active_resources", RESOURCES)
def test_nodes_and_slots_of_experiments(file, active_resources):
    tuner = Autotuner(args=arguments(file), active_resources=active_resources)
    assert tuner.exp_num_nodes == len(active_resources)
    assert tuner.exp_num_gpus == min(len(slots) for slots in active_resources.values())
    few = Autotuner(arguments(file, num_nodes=1, num_gpus=1), active_resources)
    assert (few.exp_num_nodes, few.exp_num_gpus) == (1, 1)
    with pytest.raises(ConfigError, match="ask for fewer"):
        Autotuner(arguments(file, num_nodes=9, num_gpus=1), active_resources)
    with pytest.raises(UsageError, match="tune"):
        tuner.print_tuning_results()


def test_a_script_needs_its_file_of_settings(file):
    with pytest.raises(ConfigError, match=r"FILE\.json"):
        Autotuner(argparse.Namespace(user_script="train.py", user_args=["--lr", "1"]), RESOURCES[0])


def test_both_modules_of_deepspeed_have_it():
    assert SERVED["autotuning"] == SERVED["autotuning.autotuner"] == {"mpispeed.tuning.api": "Autotuner"}
