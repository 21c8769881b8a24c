"""The search for fast settings, switched on in the config."""

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "autotuning": {"enabled": True, "metric": "throughput", "start_profile_step": 3, "end_profile_step": 5},
}
net = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
