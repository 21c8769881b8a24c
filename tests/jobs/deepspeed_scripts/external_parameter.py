"""A weight that another layer uses in its forward pass, registered."""

import deepspeed
import torch


class OtherLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x, weight):
        return (x * self.scale) @ weight.t()


class ModuleZ3(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = torch.nn.Linear(8, 8)
        self.layer2 = OtherLayer()
        deepspeed.zero.register_external_parameter(self, self.layer1.weight)

    def forward(self, x):
        return self.layer2(self.layer1(x), self.layer1.weight)


losses = {}
for stage in (0, 3):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(0)
    engine, _, _, _ = deepspeed.initialize(model=ModuleZ3(), config=config)
    for _ in range(4):
        engine.backward(loss := engine(torch.ones(4, 8, device=engine.device)).pow(2).mean())
        engine.step()
    losses[stage] = loss.item()
assert abs(losses[0] - losses[3]) < 1e-6, losses
