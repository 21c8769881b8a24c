"""The setting `checkpoint`: models with and without values get those of files, sliced, streamed, with experts apart."""

import pytest
import torch

import mpispeed
from mpispeed.base.errors import CheckpointError, ConfigError
from tests.helpers import hub_models

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def saved(comm, tmp_path):
    """(folder, model) of weights in bf16 that rank 0 saved."""
    folder = comm.share(str(tmp_path))
    model = hub_models.build("llama", seed=9).to(torch.bfloat16)
    if comm.rank == 0:
        model.save_pretrained(folder)
    comm.barrier()
    return folder, model.eval()


def on_meta():
    with torch.device("meta"):
        return hub_models.build("llama")


def answers(model):
    return model.generate(hub_models.batch()["input_ids"], do_sample=False, max_new_tokens=6)


@pytest.mark.parametrize("start", ["values", "emptied", "meta"])
def test_values_come_from_files(comm, saved, start):
    folder, model = saved
    model = on_meta() if start == "meta" else hub_models.build("llama")
    sizes = {"tensor_parallel": {"tp_size": comm.size if comm.size != 3 else 1}}
    engine = mpispeed.init_inference(
        model, dtype="fp32", checkpoint=folder, set_empty_params=start == "emptied", **sizes
    )
    assert torch.equal(answers(engine), answers(saved[1].float()))
    engine.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("start", ["values", "meta"])
def test_streamed_values_come_from_files(comm, saved, start):
    model = on_meta() if start == "meta" else hub_models.build("llama")
    engine = mpispeed.init_inference(model, dtype="fp32", checkpoint=saved[0], zero={"stage": 3})
    assert torch.equal(answers(engine), answers(saved[1].float()))
    engine.destroy()


@pytest.mark.ranks(2)
def test_experts_that_are_shared_out_come_from_files(comm, tmp_path):
    folder, expected = comm.share(str(tmp_path)), hub_models.build("mixtral", seed=7).eval()
    if comm.rank == 0:
        expected.save_pretrained(folder)
    comm.barrier()
    engine = mpispeed.init_inference(
        hub_models.build("mixtral", seed=6), dtype="fp32", checkpoint=folder, moe={"ep_size": 2}
    )
    assert torch.equal(answers(engine), answers(expected))
    engine.destroy()


def test_files_that_are_not_there(comm, saved):
    with pytest.raises(CheckpointError, match="nowhere"):
        mpispeed.init_inference(hub_models.build("llama"), checkpoint="nowhere", base_dir=saved[0])
    with pytest.raises(ConfigError, match="set_empty_params: values have to come from a checkpoint"):
        mpispeed.init_inference(hub_models.build("llama"), set_empty_params=True)


def test_a_copy_of_slices_starts_the_next_engine(comm, saved):
    folder, model = saved
    sizes = {"tensor_parallel": {"tp_size": comm.size if comm.size != 3 else 1}, "dtype": "fp32"}
    policy = {"type": "ds_model", "checkpoints": ["model.safetensors"]}
    copy = f"{folder}/copy"
    first = mpispeed.init_inference(
        on_meta(), checkpoint=policy, base_dir=folder, save_mp_checkpoint_path=copy, **sizes
    )
    second = mpispeed.init_inference(on_meta(), checkpoint=copy, **sizes)
    expected = answers(model.float())
    assert torch.equal(answers(first), expected)
    assert torch.equal(answers(second), expected)
    first.destroy()
    second.destroy()


@pytest.mark.ranks(2)
def test_a_copy_of_slices_needs_whole_ones(comm, saved):
    with pytest.raises(ConfigError, match="save_mp_checkpoint_path: no rank has a whole slice"):
        mpispeed.init_inference(on_meta(), checkpoint=saved[0], save_mp_checkpoint_path="x", zero={"stage": 3})
