"""A saved model of transformers: loaded, trained, and saved without the bloat of flat storages."""

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

shape = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
deepspeed.init_distributed()
torch.manual_seed(0)
if deepspeed.comm.get_rank() == 0:
    LlamaForCausalLM(shape).save_pretrained("whole")
deepspeed.comm.barrier()

ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
model = AutoModelForCausalLM.from_pretrained("whole", torch_dtype=torch.bfloat16)
ds_engine, _, _, _ = deepspeed.initialize(model=model, config_params=ds_config)
tokens = torch.arange(24, device=ds_engine.device).view(2, 12)
losses = []
for _ in range(6):
    loss = ds_engine(input_ids=tokens, labels=tokens).loss
    ds_engine.backward(loss)
    ds_engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
lean_state_dict = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(ds_engine.module.state_dict())
assert all(value.untyped_storage().nbytes() == value.nbytes for value in lean_state_dict.values())
if deepspeed.comm.get_rank() == 0:
    ds_engine.module.save_pretrained("lean_after", state_dict=lean_state_dict)
    again = AutoModelForCausalLM.from_pretrained("lean_after", torch_dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], value) for name, value in lean_state_dict.items())
