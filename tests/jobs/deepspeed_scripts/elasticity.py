"""Batch sizes chosen for the number of ranks."""

import deepspeed
import torch

config = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 48,
        "micro_batch_sizes": [2, 4, 6],
        "min_gpus": 1,
        "max_gpus": 8,
        "min_time": 0,
        "version": 0.1,
        "prefer_large_batch": True,
        "ignore_non_elastic_batch_info": False,
    },
}
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
micro = engine.train_micro_batch_size_per_gpu()
assert micro in (2, 4, 6)
ranks, passes = deepspeed.comm.get_world_size(), engine.gradient_accumulation_steps()
assert engine.train_batch_size() == micro * passes * ranks <= 48
x = torch.ones(micro, 8, device=engine.device)
before = float(engine(x).pow(2).mean())
for _ in range(2 * passes):
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
assert engine.global_steps == 2
assert float(engine(x).pow(2).mean()) < before
