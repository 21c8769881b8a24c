"""Saved and loaded with a client state, saved in 16 bits, and recovered in 32 bits."""

from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def train(engine, steps):
    for _ in range(steps):
        loss = engine(torch.ones(4, 8, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


torch.manual_seed(0)
engine, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(8, 1), config=config)
train(engine, 3)
engine.save_checkpoint("saved", tag="third", client_state={"step": 3, "names": ["a"]})
assert engine.save_16bit_model("half", "model.bin")
loss = train(engine, 2)
again, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(8, 1), config=config)
path, client_state = again.load_checkpoint("saved")
assert "third" in path
assert (client_state["step"], client_state["names"]) == (3, ["a"])
assert train(again, 2) == loss
weights = get_fp32_state_dict_from_zero_checkpoint("saved")
assert {name: value.dtype for name, value in weights.items()} == {"weight": torch.float32, "bias": torch.float32}
plain = load_state_dict_from_zero_checkpoint(torch.nn.Linear(8, 1), "saved")
half = torch.load(Path("half") / "model.bin", weights_only=True)
assert torch.equal(plain.weight.detach().bfloat16(), half["weight"].cpu())
