"""Settings of `init_inference` that spread parameters and experts over ranks, each of which has prompts of its own."""

import pytest
import torch

import mpispeed
from mpispeed.base.errors import AgreementError, ConfigError, UsageError
from tests.helpers import hub_models

pytestmark = pytest.mark.mpi(min_size=1)


def answer(model, number):
    """Tokens after prompt `number`, as many as nobody else has."""
    prompt = torch.randint(3, hub_models.VOCAB, (2, 3 + number), generator=torch.Generator().manual_seed(number))
    return model.generate(prompt, max_new_tokens=2 + 3 * number, do_sample=False)


@pytest.mark.ranks(1, 2, 3)
def test_parameters_are_streamed(comm):
    expected = answer(hub_models.build("llama").eval(), comm.rank)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine = mpispeed.init_inference(hub_models.build("llama"), dtype="fp32", zero=zero, max_out_tokens=32)
    assert torch.equal(answer(engine, comm.rank), expected)
    if comm.size > 1:  # one rank has too long a prompt, and all learn of it
        long = torch.ones(1, 33, dtype=torch.int64)
        with pytest.raises(UsageError if comm.rank == 0 else AgreementError, match="max_out_tokens is 32"):
            engine.generate(long) if comm.rank == 0 else answer(engine, comm.rank)
    engine.destroy()


@pytest.mark.ranks(2)
def test_models_that_were_built_in_shards(comm):
    expected = answer(hub_models.build("gpt2").eval(), comm.rank)

    def sharded():
        plain = hub_models.build("gpt2").state_dict()
        with mpispeed.zero.Init():
            model = hub_models.build("gpt2")
        with mpispeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            model.load_state_dict(plain)
        return model

    engine = mpispeed.init_inference(sharded(), dtype="fp32", zero={"stage": 3})
    assert torch.equal(answer(engine, comm.rank), expected)
    engine.destroy()
    with pytest.raises(ConfigError, match=r"built in zero\.Init and is in shards"):
        mpispeed.init_inference(sharded(), dtype="fp32")
    with pytest.raises(ConfigError, match=r"zero\.Init as torch\.float32, and dtype is torch\.bfloat16"):
        mpispeed.init_inference(sharded(), dtype="bf16", zero={"stage": 3})


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("slices", [1, 2])
def test_experts_are_shared_out(comm, slices):
    if comm.size == 2 * slices or slices == 1:
        number = comm.rank // slices
        expected = answer(hub_models.build("mixtral").eval(), number)
        engine = mpispeed.init_inference(
            hub_models.build("mixtral"),
            dtype="fp32",
            moe={"ep_size": 2, "num_experts": 4},
            tensor_parallel={"tp_size": slices},
        )
        held = {len(layer.mlp.experts.held) for layer in engine.module.model.layers}
        assert held == {2}
        assert torch.equal(answer(engine, number), expected)
        engine.destroy()
    else:
        with pytest.raises(ConfigError, match="ep_size 2 does not divide the 1 data ranks"):
            mpispeed.init_inference(
                hub_models.build("mixtral"), moe={"ep_size": 2}, tensor_parallel={"tp_size": slices}
            )


def test_what_does_not_go_together_is_refused(comm):
    zero = {"stage": 3}
    with pytest.raises(ConfigError, match=r"moe\.ep_size: parameters are streamed"):
        mpispeed.init_inference(hub_models.build("mixtral"), zero=zero, moe={"ep_size": 2})
    with pytest.raises(ConfigError, match="ranks that share layers are neighbours"):
        mpispeed.init_inference(hub_models.build("mixtral"), zero=zero, tensor_parallel={"tp_group": [comm.rank]})
