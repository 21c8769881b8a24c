"""Models sharded at stage 3 for inference: generated tokens are those of the whole model, whatever ranks are given."""

import pytest
import torch
import transformers

from mpispeed.base.errors import AgreementError, UsageError
from mpispeed.inference.streaming import stream_model
from mpispeed.mesh.world import start

pytestmark = pytest.mark.ranks(1, 2, 3)

SIZES = {"vocab_size": 64, "eos_token_id": 7, "pad_token_id": 0, "bos_token_id": 1}
TIERS = ("none", "cpu", "nvme")


def llama(dtype=torch.float32):
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**SIZES, **sizes, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def gpt2():
    torch.manual_seed(4)
    config = transformers.GPT2Config(**SIZES, n_embd=24, n_layer=2, n_head=3, n_positions=18)
    return transformers.GPT2LMHeadModel(config).eval()


def t5():
    torch.manual_seed(5)
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **sizes)).eval()


def prompts(rank, length=5):
    return torch.randint(8, 64, (2, length), generator=torch.Generator().manual_seed(rank))


def tokens(model, rank, count=8):
    return model.generate(prompts(rank, 4 + rank), max_new_tokens=count, do_sample=False)


def section(tier, folder):
    # max_in_cpu: by default so small a model stays in memory, and files are not used.
    tiers = {} if tier == "none" else {"offload_param": {"device": tier, "nvme_path": str(folder), "max_in_cpu": 0}}
    return {"stage": 3, "stage3_param_persistence_threshold": 0, **tiers}


@pytest.fixture
def folder(tmp_path):
    return start().comm.share(str(tmp_path))


def modules_filled(model, source):
    """A `load`: values of another model, module by module."""

    def load(finish):
        for path, module in source.named_modules():
            target = model.get_submodule(path)
            for name, param in module._parameters.items():
                if param is not None and target._parameters[name].is_meta:
                    target._parameters[name] = torch.nn.Parameter(param.detach().clone())
            for name, buffer in module._buffers.items():
                target._buffers[name] = None if buffer is None else buffer.clone()
            finish(path)
        model.tie_weights()

    return load


@pytest.mark.parametrize(("make", "tier"), [*((llama, tier) for tier in TIERS), (gpt2, "none"), (t5, "cpu")])
def test_ranks_generate_different_numbers_of_tokens(make, tier, folder):
    rank = start().rank
    expected = tokens(make(), rank, 3 + 4 * rank)
    streamed = stream_model(make(), section(tier, folder))
    with streamed.in_step.entered():
        found = tokens(streamed.model, rank, 3 + 4 * rank)
    streamed.close()
    assert torch.equal(found, expected)


def test_a_rank_without_prompts_takes_part():
    rank = start().rank
    expected = tokens(llama(), rank)
    streamed = stream_model(llama(), section("none", ""))
    for busy in range(start().size):
        with streamed.in_step.entered():
            if rank == busy:
                assert torch.equal(tokens(streamed.model, rank), expected)
    streamed.close()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_models_on_meta_are_loaded_module_by_module(tier, folder):
    source = llama(torch.bfloat16)
    rank, expected = start().rank, tokens(source, start().rank)
    with torch.device("meta"):
        model = llama(torch.bfloat16)
    streamed = stream_model(model, section(tier, folder), load=modules_filled(model, source))
    with streamed.in_step.entered():
        found = tokens(streamed.model, rank)
    assert torch.equal(found, expected)
    share = sum(param.ds_tensor.numel() for param in model.parameters())
    assert sum(start().comm.gather_objects(share)) == sum(param.numel() for param in source.parameters())
    streamed.close()
    if start().size > 1 or tier == "nvme":  # one rank holds what is in its memory whole
        with pytest.raises(UsageError, match="cut over"):
            model.lm_head.weight.sum()


@pytest.mark.ranks(2)
def test_layers_are_sliced_too():
    expected = tokens(llama(), 0)
    streamed = stream_model(llama(), section("none", ""), tensor=2)
    with streamed.in_step.entered():
        assert torch.equal(tokens(streamed.model, 0), expected)
    streamed.close()


@pytest.mark.ranks(2, 3)
def test_a_failure_of_one_rank_reaches_the_others():
    rank = start().rank
    streamed = stream_model(llama(), section("none", ""))
    kind = ZeroDivisionError if rank == 1 else AgreementError
    with pytest.raises(kind) as caught, streamed.in_step.entered():
        if rank == 1:
            raise ZeroDivisionError
        tokens(streamed.model, rank, 20)
    if rank != 1:
        assert "ranks [1]" in str(caught.value)
    streamed.close()
