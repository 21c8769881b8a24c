"""Schedules of the learning rate on optimizers of torch, and one of them in a config."""

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

model = torch.nn.Linear(8, 1)


def rates(make, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


assert rates(lambda o: LRRangeTest(o, 0.001, lr_range_test_step_size=2))[-1] > 0.001
cycle = rates(lambda o: OneCycle(o, 0.0001, 0.0010, cycle_first_step_size=4))
assert max(cycle) <= 0.0010 + 1e-9
assert cycle.index(max(cycle)) in (3, 4)
assert abs(rates(lambda o: WarmupLR(o, warmup_num_steps=5))[-1] - 0.001) < 1e-9
assert rates(lambda o: WarmupDecayLR(o, 10, warmup_num_steps=2))[-1] < 0.0002
assert rates(lambda o: WarmupCosineLR(o, 10, warmup_num_steps=2))[-1] < 0.01

params = {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 4, "warmup_type": "linear"}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "scheduler": {"type": "WarmupLR", "params": params},
}
engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(6):
    engine.backward(engine(torch.ones(4, 8, device=engine.device)).pow(2).mean())
    engine.step()
assert engine.get_lr() == scheduler.get_last_lr() == [0.001]
