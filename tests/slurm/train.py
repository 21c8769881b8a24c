"""A small training whose times are of no interest: its batch is what the config says."""

import argparse

import torch

import mpispeed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
args = mpispeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, *_ = mpispeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(args.steps * engine.gradient_accumulation_steps()):
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 32)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
