"""A layer of experts."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=4, ep_size=2, k=1)

    def forward(self, x):
        out, gate_loss, _ = self.experts(x)
        return out.pow(2).mean() + 0.01 * gate_loss


torch.manual_seed(0)
deepspeed.init_distributed()
net = Net()
groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
x = torch.randn(4, 6, 8, device=engine.device)
losses = []
for _ in range(5):
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
