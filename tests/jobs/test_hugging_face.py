"""Hugging Face's Trainer, accelerate and peft over `import deepspeed`: losses as with torch's DDP on the same ranks."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "hugging_face_worker.py"
# The checkpoints of two ranks are resumed by one and by three; one start for each number of ranks.
JOBS = {2: "trainers,saves,loads,loops", 1: "trainers,resumes,loops", 3: "trainers,resumes,loops"}
# float32: ranks add in another order than DDP does, and a step passes it on
BOUND = 1e-5


@pytest.fixture(scope="module")
def found(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugging_face")
    for ranks, what in JOBS.items():
        done = job(ranks, "--as-deepspeed", WORKER, what, folder, PYTHONWARNINGS="ignore", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr[-4000:]
    return {ranks: json.loads((folder / f"found{ranks}.json").read_text()) for ranks in JOBS}


def assert_same(one, other, bound=BOUND):
    assert one["losses"] == pytest.approx(other["losses"], rel=bound)
    assert one["norms"] == pytest.approx(other["norms"], rel=10 * bound)
    assert one["evaluated"] == pytest.approx(other["evaluated"], rel=bound)
    assert one["predicted"] == pytest.approx(other["predicted"], rel=10 * bound)


@pytest.mark.parametrize("ranks", JOBS)
@pytest.mark.parametrize("stage", range(4))
def test_trainer_equals_ddp(found, ranks, stage):
    assert found[ranks]["ranks"] == ranks
    ours, theirs = found[ranks][f"zero {stage}"], found[ranks]["ddp"]
    assert len(ours["losses"]) == 4
    assert_same(ours, theirs)
    assert_same(ours, found[1]["ddp"])


@pytest.mark.parametrize("ranks", JOBS)
def test_lora_at_stage_3_equals_ddp(found, ranks):
    assert_same(found[ranks]["zero lora"], found[ranks]["ddp lora"])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_of_two_ranks_goes_on_with_another_number(found, ranks, stage):
    assert_same(found[ranks][f"resumed {stage}"], found[1]["ddp"])


def test_the_model_alone_is_saved(found):
    assert "model.safetensors" in found[2]["files"]
    assert not any(name.startswith("global_step") for name in found[2]["files"])
    assert_same(found[2]["only"], found[2]["ddp"])


def test_from_pretrained_reads_on_rank_0_into_sharded_parameters(found):
    loads = found[2]["loads"]
    assert loads["wrong"] == []
    assert loads["is_kept"]
    assert loads["shape"][0] == 70
    assert loads["losses"][-1] < loads["losses"][0]


@pytest.mark.parametrize("ranks", JOBS)
def test_a_loop_of_accelerate(found, ranks):
    loop, wide, one = found[ranks]["loop"], found[ranks]["loop bf16"], found[1]["loop"]
    assert (loop["ranks"], loop["kind"]) == (ranks, "DistributedType.DEEPSPEED")
    assert loop["losses"] == pytest.approx(one["losses"], rel=BOUND)
    assert wide["losses"] == pytest.approx(found[1]["loop bf16"]["losses"], rel=2e-2)
    assert wide["losses"] == pytest.approx(one["losses"], rel=2e-2)
