"""Sequences that grow during training."""

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    },
}


class Net(torch.nn.Linear):
    def forward(self, x, curriculum_seqlen=None):
        lengths.append(curriculum_seqlen)
        return super().forward(x[:, :curriculum_seqlen])


lengths: list[int] = []
net = Net(4, 1)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(6):
    loss = engine(torch.ones(2, 32, 4, device=engine.device)).pow(2).mean()
    engine.backward(loss)
    engine.step()
assert lengths[0] == 8
assert lengths[-1] == 32
