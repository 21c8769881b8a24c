"""1-bit Adam as an object, past its warm-up."""

import deepspeed
import torch
from deepspeed.runtime.fp16.onebit.adam import OnebitAdam

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
adam = OnebitAdam(net.parameters(), lr=0.01, freeze_step=4, cuda_aware=False, comm_backend_name="mpi")
config = {"train_micro_batch_size_per_gpu": 4}
engine, _, _, _ = deepspeed.initialize(model=net, optimizer=adam, config=config)
x = torch.randn(4, 8, device=engine.device)
losses = []
for _ in range(10):
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[4] < losses[0], losses
