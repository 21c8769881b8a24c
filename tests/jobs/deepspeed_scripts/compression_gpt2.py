"""A GPT-2 whose Conv1D layers become linear, with few bits in weights and inputs, by an optimizer of the script."""

import argparse

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import convert_conv1d_to_linear, recursive_getattr
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
torch.manual_seed(0)
tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **tokens)).eval()
ids = torch.randint(0, 64, (4, 16))
first = model(ids).logits
model = convert_conv1d_to_linear(model, Conv1D)
assert isinstance(recursive_getattr(model, "transformer.h.0.mlp.c_fc"), torch.nn.Linear)
assert torch.allclose(model(ids).logits, first, atol=1e-5)
model = init_compression(model, args.deepspeed_config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, args=args, dist_init_required=True)
engine.train()
losses = []
for _ in range(8):
    loss = engine(input_ids=ids, labels=ids, output_hidden_states=True).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
model.eval()
before = model(ids).logits
model = redundancy_clean(model, args.deepspeed_config)
assert torch.equal(model(ids).logits, before)
torch.save(model.state_dict(), "quantized.bin")
