"""Parameters that stay whole after training, given back."""

import deepspeed
import torch
from deepspeed import zero

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 1e9},
}
torch.manual_seed(0)
with zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
ds_engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for _ in range(2):
    for _ in range(2):
        loss = ds_engine(torch.ones(4, 8, device=ds_engine.device)).pow(2).mean()
        ds_engine.backward(loss)
        ds_engine.step()
        losses.append(loss.item())
    # Free memory consumed by model parameters
    ds_engine.empty_partition_cache()

assert losses[-1] < losses[0], losses
with zero.GatheredParameters(list(model.parameters())):
    assert model[0].weight.shape == (16, 8)
