"""DeepSpeedCPUAdam and a schedule given as objects, with states in host memory."""

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.lr_schedules import WarmupLR

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
adam = DeepSpeedCPUAdam(net.parameters(), lr=0.01, betas=(0.9, 0.99), adamw_mode=True)
schedule = WarmupLR(adam, warmup_min_lr=0.0, warmup_max_lr=0.01, warmup_num_steps=4, warmup_type="linear")
engine, optimizer, _, scheduler = deepspeed.initialize(model=net, optimizer=adam, lr_scheduler=schedule, config=config)
x = torch.randn(4, 8, device=engine.device)
losses, rates = [], []
for _ in range(8):
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    rates.append(engine.get_lr()[0])
assert losses[-1] < losses[0], losses
assert rates == sorted(rates)
assert rates[-1] == 0.01
assert optimizer is not None
assert scheduler is schedule
