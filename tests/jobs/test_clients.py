"""Client libraries on ZeRO: the Trainer of transformers, peft, accelerate, trl and Lightning.

One job per number of ranks, in which torch's DDP under the same libraries and a loop of plain torch run too. And
`accelerate launch --use_deepspeed` starts ranks of MPI: on one machine, and by `deepspeed` on several.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.compat.as_deepspeed import FOLDER
from tests.helpers.system import CHECKOUT

WORKER = Path(__file__).with_name("clients_worker.py")
RANKS = (2, 1, 3)  # what two ranks have saved is resumed by one and by three
# float32: ranks add in another order than DDP does, and a step passes it on
BOUND = 1e-5


class Results:
    """What the cases of all jobs found; a case that failed fails the test that asks for it."""

    def __init__(self, folder, jobs):
        self.jobs = jobs
        self.cases = {ranks: {} for ranks in jobs}
        for ranks in jobs:
            for path in sorted((folder / str(ranks)).glob("*.json")):
                case = json.loads(path.read_text())
                self.cases[ranks].setdefault(case["name"], {})[int(path.stem.partition("-")[2])] = case
        self.stacks = [path.read_text() for path in sorted(folder.glob("*/*.stacks"))]

    def __call__(self, ranks, name):
        case = self.cases[ranks].get(name, {})
        failures = [f"rank {rank}: {part['failure']}" for rank, part in case.items() if part["failure"]]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        if len(case) < ranks:
            stacks = "\n".join(self.stacks)
            message = f"{name!r} has not ended on {ranks} ranks\n{stacks}\n{self.jobs[ranks].stderr[-4000:]}"
            pytest.fail(message, pytrace=False)
        return case[0]["found"]


@pytest.fixture(scope="module")
def found(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return Results(folder, {ranks: job(ranks, "--as-deepspeed", WORKER, folder, **quiet) for ranks in RANKS})


def assert_same(one, other, bound=BOUND):
    assert one["losses"] == pytest.approx(other["losses"], rel=bound)
    assert one["norms"] == pytest.approx(other["norms"], rel=10 * bound)
    assert one["evaluated"] == pytest.approx(other["evaluated"], rel=bound)
    assert one["predicted"] == pytest.approx(other["predicted"], rel=10 * bound)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_job_ends_well(found, ranks):
    assert found.jobs[ranks].returncode == 0, found.jobs[ranks].stderr[-4000:]
    for name in found.cases[ranks]:
        found(ranks, name)


# -- Hugging Face ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", range(4))
def test_the_trainer_equals_ddp(found, ranks, stage):
    ours, theirs = found(ranks, f"zero {stage}"), found(ranks, "ddp")
    assert (ours["ranks"], len(ours["losses"])) == (ranks, 4)
    assert_same(ours, theirs)
    assert_same(ours, found(1, "ddp"))


@pytest.mark.parametrize("ranks", RANKS)
def test_lora_at_stage_3_equals_ddp(found, ranks):
    assert_same(found(ranks, "zero lora"), found(ranks, "ddp lora"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_of_two_ranks_goes_on_with_another_number(found, ranks, stage):
    assert_same(found(ranks, f"resumed {stage}"), found(1, "ddp"))


def test_the_model_alone_is_saved(found):
    only = found(2, "only")
    assert "model.safetensors" in only["files"]
    assert not any(name.startswith("global_step") for name in only["files"])
    assert_same(only, found(2, "ddp"))


def test_from_pretrained_reads_on_rank_0_into_sharded_parameters(found):
    loads = found(2, "loads")
    assert loads["wrong"] == []
    assert loads["is_kept"]
    assert loads["shape"][0] == 70
    assert loads["losses"][-1] < loads["losses"][0]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_loop_of_accelerate_has_the_same_losses_on_any_number_of_ranks(found, ranks):
    loop, wide, one = found(ranks, "loop"), found(ranks, "loop bf16"), found(1, "loop")
    assert (loop["ranks"], loop["kind"]) == (ranks, "DistributedType.DEEPSPEED")
    assert loop["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert wide["losses"] == pytest.approx(found(1, "loop bf16")["losses"], rel=2e-2)
    assert wide["losses"] == pytest.approx(one["losses"], rel=2e-2)
    assert wide["losses"] != loop["losses"]


@pytest.mark.parametrize("stage", [2, 3])
def test_fine_tuning_by_trl_equals_ddp(found, stage):
    assert found(2, f"sft {stage}")["losses"] == pytest.approx(found(2, "sft ddp")["losses"], rel=BOUND)


def test_rewards_of_generated_texts_train_alike_at_stages_2_and_3(found):
    # the same texts are drawn at both stages, from the same numbers; the second step follows an update
    two, three = found(2, "grpo 2")["losses"], found(2, "grpo 3")["losses"]
    assert two == pytest.approx(three, rel=1e-4, abs=1e-6)
    assert two[1] != 0


# -- Lightning ---------------------------------------------------------------------------------------------------


def assert_fits(ours, plain, bound=BOUND, first=0):
    assert ours["losses"] == pytest.approx(plain["losses"][first:], rel=bound)
    for name in ("val", "validated", "tested"):
        assert ours[name] == pytest.approx(plain["val"], rel=bound)


@pytest.mark.parametrize("what", [*range(4), "name", "sequence"])
def test_lightning_has_the_losses_of_plain_torch(found, what):
    ours = found(2, f"lightning {what}")
    assert (ours["ranks"], ours["step"], ours["rate"]) == (2, 8, 5e-3)
    assert_fits(ours, found(2, "lightning plain"))


def test_lightning_in_bf16_is_near(found):
    ours, plain = found(2, "lightning bf16"), found(2, "lightning plain")
    assert ours["losses"] != plain["losses"]
    assert_fits(ours, plain, 3e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_lightning_on_two_ranks_goes_on_with_three(found, stage):
    ours = found(3, f"lightning resumed {stage}")
    assert (ours["ranks"], ours["step"], ours["rate"]) == (3, 8, 5e-3)
    assert_fits(ours, found(2, "lightning plain"), first=4)


# -- accelerate launch -------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("clients") / "launched_loop.py"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), CHECKOUT])}


def launch(command, *words, limit_seconds=400, **env):
    """Run `accelerate launch` as it is."""
    words = [*command, "--dynamo_backend", "no", *words]
    return subprocess.run(
        list(map(str, words)), env={**ENVIRON, **env}, capture_output=True, text=True, check=False,
        timeout=limit_seconds,
    )  # fmt: skip


def assert_launched(done, out, expected):
    """`expected` is what the same loop gives under `mpispeed run`."""
    assert done.returncode == 0, done.stdout + done.stderr
    ours = json.loads(out.read_text())
    assert (ours["ranks"], ours["kind"]) == (2, "DEEPSPEED")
    assert ours["losses"] == expected["losses"]
    assert (ours["precision"], ours["dtype"]) == (expected["precision"], expected["dtype"])
    return ours


def test_one_machine_in_place_of_torchs_launcher(found, tmp_path):
    out, config = tmp_path / "one.json", tmp_path / "ds.json"
    zero = {"stage": 2}
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": zero})
    )
    words = ["--use_deepspeed", "--deepspeed_config_file", config, "--num_processes", 2]
    done = launch([Path(sys.executable).with_name("accelerate"), "launch"], *words, "--num_machines", 1, SCRIPT, out)
    assert_launched(done, out, found(2, "launched no"))


def test_several_machines_by_the_command_deepspeed_in_bf16(found, tmp_path, monkeypatch):
    """Without a config file: stage and precision are options of accelerate."""
    monkeypatch.chdir(tmp_path)  # accelerate writes its variables to .deepspeed_env there
    hosts, out = tmp_path / "hosts", tmp_path / "several.json"
    hosts.write_text(f"localhost slots=1\n{socket.gethostname()} slots=1\n")
    words = [
        "--use_deepspeed", "--zero_stage", 2, "--mixed_precision", "bf16", "--gradient_clipping", 1e6,
        "--num_processes", 2, "--num_machines", 2, "--machine_rank", 0, "--main_process_ip", "127.0.0.1",
        "--deepspeed_hostfile", hosts, "--deepspeed_multinode_launcher", "openmpi",
    ]  # fmt: skip
    done = launch([sys.executable, "-m", "accelerate.commands.launch"], *words, SCRIPT, out, PATH="/usr/bin:/bin")
    ours = assert_launched(done, out, found(2, "launched bf16"))
    assert ours["clipping"] == "1000000.0"
