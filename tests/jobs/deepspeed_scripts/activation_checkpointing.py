"""Recomputed activations: configured, profiled, with tracked random numbers, and the same gradients."""

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "profile": True},
}


class Net(torch.nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))

    def forward(self, x):
        return deepspeed.checkpointing.checkpoint(self.block, x) if self.recomputes else self.block(x)


deepspeed.init_distributed()
deepspeed.checkpointing.configure(None, deepspeed_config=config)
assert deepspeed.checkpointing.is_configured()
deepspeed.checkpointing.model_parallel_cuda_manual_seed(17)
with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
    x = torch.randn(4, 8)
results = []
for recomputes in (False, True):
    torch.manual_seed(0)
    engine, _, _, _ = deepspeed.initialize(model=Net(recomputes), config=config)
    for _ in range(3):
        loss = engine(x.to(engine.device).requires_grad_()).pow(2).mean()
        engine.backward(loss)
        engine.step()
    results.append(loss.item())
deepspeed.checkpointing.reset()
assert results[0] == results[1] > 0
