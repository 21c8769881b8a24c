"""`accelerate launch --use_deepspeed` starts ranks of MPI: on one machine, and by `deepspeed` on several."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.compat.as_deepspeed import FOLDER
from tests.helpers.system import CHECKOUT

SCRIPT = Path(__file__).with_name("clients") / "launched_loop.py"
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), CHECKOUT])}


def launch(command, *words, limit_seconds=400, **env):
    """Run `accelerate launch` as it is."""
    words = [*command, "--dynamo_backend", "no", *words]
    return subprocess.run(
        list(map(str, words)), env={**ENVIRON, **env}, capture_output=True, text=True, check=False,
        timeout=limit_seconds,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "bf16.json").write_text(json.dumps({**CONFIG, "bf16": {"enabled": True}}))
    return folder


@pytest.fixture(scope="module")
def expected(job, folder):
    """What the same loops give under `mpispeed run`: by precision."""
    words = [f"no={folder / 'ds.json'}", f"bf16={folder / 'bf16.json'}"]
    done = job(2, "--as-deepspeed", SCRIPT, folder / "run.json", *words)
    assert done.returncode == 0, done.stderr
    return dict(zip(("no", "bf16"), json.loads((folder / "run.json").read_text()), strict=True))


def assert_same(done, out, expected):
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads(out.read_text())
    assert (found["ranks"], found["kind"]) == (2, "DEEPSPEED")
    assert found["losses"] == expected["losses"]
    assert (found["precision"], found["dtype"]) == (expected["precision"], expected["dtype"])


def test_one_machine_in_place_of_torchs_launcher(folder, expected):
    out = folder / "one.json"
    words = ["--use_deepspeed", "--deepspeed_config_file", folder / "ds.json", "--num_processes", 2]
    done = launch([Path(sys.executable).with_name("accelerate"), "launch"], *words, "--num_machines", 1, SCRIPT, out)
    assert_same(done, out, expected["no"])


def test_several_machines_by_the_command_deepspeed_in_bf16(folder, expected, tmp_path, monkeypatch):
    """Without a config file: stage and precision are options of accelerate."""
    monkeypatch.chdir(tmp_path)  # accelerate writes its variables to .deepspeed_env there
    hosts, out = tmp_path / "hosts", folder / "several.json"
    hosts.write_text(f"localhost slots=1\n{socket.gethostname()} slots=1\n")
    words = [
        "--use_deepspeed", "--zero_stage", 2, "--mixed_precision", "bf16", "--gradient_clipping", 1e6,
        "--num_processes", 2, "--num_machines", 2, "--machine_rank", 0, "--main_process_ip", "127.0.0.1",
        "--deepspeed_hostfile", hosts, "--deepspeed_multinode_launcher", "openmpi",
    ]  # fmt: skip
    done = launch([sys.executable, "-m", "accelerate.commands.launch"], *words, SCRIPT, out, PATH="/usr/bin:/bin")
    assert_same(done, out, expected["bf16"])
    assert json.loads(out.read_text())[0]["clipping"] == "1000000.0"
