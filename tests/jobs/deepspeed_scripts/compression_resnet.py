"""A residual network loses channels, together with their normalisations."""

import argparse

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
torch.manual_seed(0)
layers = {"layer1": nn.Sequential(Block(), Block()), "layer2": nn.Sequential(Block()), "flat": nn.Flatten()}
model = nn.Sequential()
for name, layer in {"conv1": nn.Conv2d(3, 8, 3, padding=1), **layers, "fc": nn.Linear(8 * 36, 10)}.items():
    model.add_module(name, layer)
model = init_compression(model, args.deepspeed_config)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data, target = torch.randn(4, 3, 6, 6).half(), torch.tensor([1, 2, 3, 4])
for _ in range(4):
    engine.backward(nn.functional.cross_entropy(model(data), target))
    engine.step()
model.eval()
before = model(data)
model = redundancy_clean(model, args.deepspeed_config)
sizes = {(each.conv1.out_channels, each.bn1.num_features, each.conv2.in_channels) for each in model.layer1}
assert sizes == {(4, 4, 4)}
assert torch.allclose(model(data), before, atol=2e-3)
