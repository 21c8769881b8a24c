"""Arguments of the command line, a data set, half precision, ZeRO 3 and clipping."""

import argparse

import deepspeed
import torch


def arguments():
    parser = argparse.ArgumentParser(description="My training script.")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


args = arguments()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x = torch.randn(64, 8)
samples = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=net.parameters(), training_data=samples
)
assert isinstance(engine, deepspeed.DeepSpeedEngine)
assert engine.zero_optimization_stage() == 3

losses = []
for _epoch in range(6):
    for inputs, labels in loader:
        outputs = engine(inputs.to(engine.device).half())
        loss = torch.nn.functional.mse_loss(outputs.float(), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert sum(losses[-4:]) < 0.5 * sum(losses[:4]), losses
assert optimizer.param_groups[0]["lr"] == 0.01
