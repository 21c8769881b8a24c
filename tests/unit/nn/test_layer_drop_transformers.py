"""Blocks of transformers' models are left out as any other, inside of their own gradient checkpointing too."""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from mpispeed.base.passes import Pass, Passes
from mpispeed.nn.layer_drop import ProgressiveLayerDrop, convert_to_layer_drop
from mpispeed.nn.layer_drop.decisions import LayerDrop, number_layers
from mpispeed.nn.layer_drop.layers import find_droppable, take_part
from tests.zoo import same_bits

LAYERS = 3
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
WIDE = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2}
MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, intermediate_size=32)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=LAYERS, n_head=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**WIDE, num_local_experts=2)),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def blocks_of(model):
    stack = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == LAYERS)
    return list(stack)


def taking(model):
    convert_to_layer_drop(model, type(blocks_of(model)[0]))
    drop = LayerDrop(ProgressiveLayerDrop(0.5), Passes(), 1)
    drop.passes.is_watched, drop.schedule.current_theta = True, 0.5
    found = find_droppable(model)
    depths = number_layers(found)
    take_part({layer: depths[name] for name, layer in found.items()}, drop)
    return drop, sorted(depths.values(), key=lambda depth: depth.number)


def outcome(model, drop, chosen, **more):
    torch.manual_seed(3)
    model.zero_grad()
    drop.passes.begin(chosen)
    ids = torch.arange(12).view(2, 6)
    out = model(input_ids=ids, labels=ids, use_cache=False, **more)
    drop.passes.end(out)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_left_out_with_and_without_checkpointing(name):
    model = made(name)
    names = list(model.state_dict())
    drop, depths = taking(model)
    assert list(model.state_dict()) == names and len(depths) == LAYERS
    every = (Pass(1, micro) for micro in range(1000))
    chosen = next(one for one in every if [drop.is_kept(depth, one) for depth in depths] == [False, True, False])
    logits, grads = outcome(model, drop, chosen)
    # Only the second block, whose output is stretched away from its input.
    shorter = made(name)
    blocks = blocks_of(shorter)
    blocks[1].register_forward_hook(stretch(drop.probability(depths[1])))
    for each in blocks[::2]:
        each.forward = lambda hidden_states, *args, **kwargs: hidden_states
    torch.testing.assert_close(outcome(shorter, drop, chosen)[0], logits)
    assert any("1." in key for key in grads) and not any(".0.mlp" in key or ".2.mlp" in key for key in grads)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same_bits(outcome(model, drop, chosen), (logits, grads))


def stretch(probability):
    def hook(block, args, out):
        hidden = out[0] if isinstance(out, tuple) else out
        stretched = args[0] + (hidden - args[0]) / probability
        return (stretched, *out[1:]) if isinstance(out, tuple) else stretched

    return hook


def test_a_copy_of_a_converted_model_runs_all_blocks():
    model = made("llama")
    drop, _ = taking(model)
    drop.schedule.current_theta = 0.0
    other = copy.deepcopy(model)
    drop.passes.begin(Pass(1, 0))
    runs = []
    for each in (model, other):
        for block in blocks_of(each):
            block.mlp.register_forward_hook(lambda *_, of=each: runs.append(of))
        each(input_ids=torch.arange(6)[None])
    assert runs.count(other) == LAYERS > runs.count(model)
