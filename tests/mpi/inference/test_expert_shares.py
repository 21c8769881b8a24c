"""Experts shared out over ranks: each generates what the whole model does, in its own number of tokens."""

import pytest
import torch
import transformers

from mpispeed.base.errors import ConfigError
from mpispeed.inference.experts import ExpertShares
from mpispeed.inference.in_step import InStep
from mpispeed.mesh.world import start

pytestmark = pytest.mark.ranks(2, 3, 4)


def mixtral():
    torch.manual_seed(6)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 64, "eos_token_id": 7, "pad_token_id": 0}
    config = transformers.MixtralConfig(**sizes, **ids, num_key_value_heads=2, num_local_experts=5)
    return transformers.MixtralForCausalLM(config).eval()


def tokens(model, rank):
    prompt = torch.randint(8, 64, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    return model.generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_ranks_generate_what_the_whole_model_does(is_loaded):
    world = start()
    whole, model = mixtral(), mixtral()
    shares = ExpertShares(model, world.size if world.size < 4 else 2, world.comm)
    if is_loaded:
        for path, module in model.named_modules():
            shares.finish(path, module)
    shares.share_out()
    held = [len(layer.mlp.experts.held) for layer in model.model.layers]
    assert sum(shares.comm.gather_objects(held[0])) == 5
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == held[0] < 5
    with InStep(model, shares.comm, torch.device("cpu")).entered():
        found = tokens(model, world.rank)
    assert torch.equal(found, tokens(whole, world.rank))
    shares.close()


@pytest.mark.ranks(2)
def test_what_cannot_be_shared_out_is_refused():
    comm = start().comm
    with pytest.raises(ConfigError, match="does not divide"):
        ExpertShares(mixtral(), 3, comm)
    with pytest.raises(ConfigError, match="no layer of experts"):
        ExpertShares(torch.nn.Linear(2, 2), 2, comm)
