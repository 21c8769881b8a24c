"""transformers' own expert parallelism over our backend, and ours in an engine: the same logits and gradients."""

import os
import tempfile

import pytest
import torch

pytest.importorskip("transformers")

from mpispeed.zero import safe_get_full_grad
from tests.helpers.hub_clients import environment
from tests.helpers.hub_experts import model_of, tokens_of
from tests.helpers.tensor import assert_near
from tests.helpers.torch_groups import default_group
from tests.zoo.training import SGD, config, start

RANKS = (2, 4) if os.environ.get("MPISPEED_MATRIX") == "full" else (2,)
pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(*RANKS)]

BOUND = 1e-5  # of the largest element, fp32: other orders of summation
EACH = 2  # sequences of a rank


def of_transformers(world, kind):
    """Logits of this rank, and mean gradients of all: experts by all-to-all, the rest cut by FSDP2."""
    from transformers.distributed import DistributedConfig

    layout = DistributedConfig(fsdp_size=world.size, ep_size=world.size, ep_implementation="all_to_all")
    with environment(), tempfile.TemporaryDirectory() as own:
        folder = world.comm.share(own)
        plain = model_of(kind)
        if world.rank == 0:
            plain.save_pretrained(folder)
        world.comm.barrier()
        model = type(plain).from_pretrained(
            folder, distributed_config=layout, dtype=torch.float32, attn_implementation="eager"
        )
        tokens = tokens_of(EACH * world.size).chunk(world.size)[world.rank]
        output = model.train()(input_ids=tokens, labels=tokens)
        output.loss.backward()
        grads = {name: whole(param.grad).clone() for name, param in model.named_parameters()}
        world.comm.barrier()
        return whole(output.logits.detach()).clone(), grads


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_logits_and_gradients(world, kind):
    with default_group(world, "mpi4py"):
        logits, grads = of_transformers(world, kind)
        section = {"enabled": True, "autoep_size": world.size}
        engine = start(config(2, EACH * world.size, 1, **SGD, expert_parallel=section), model_of(kind))
        tokens = tokens_of(EACH * world.size).chunk(world.size)[world.rank]
        output = engine(input_ids=tokens, labels=tokens)
        assert_near(output.logits.detach(), logits, BOUND, "logits")
        engine.backward(output.loss)
        assert len(grads) == len(list(engine.module.parameters()))
        for name, param in engine.module.named_parameters():
            expected, (path, _, inner) = grads[name], name.partition(".experts.")
            if inner:
                held = engine.module.get_submodule(path).experts.held
                assert len(expected) == 8
                expected = expected[held.start : held.stop]
            assert_near(safe_get_full_grad(param), expected, BOUND, name)
        engine.destroy()
