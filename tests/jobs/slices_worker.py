"""Trains layers cut over two ranks; a forward pass fails on rank 1 alone, which catches it and takes the next batch."""

import sys

import torch

import mpispeed
from mpispeed.mesh import Mesh, Topology, start
from tests.helpers.pipe_faults import FAULT, WIDTH, Layer, Planted
from tests.zoo.training import ADAM, config


def step(engine, number):
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = engine(x).square().mean()  # at forward
    engine.backward(loss)  # at backward
    engine.step()  # at update


def main():
    world = start()
    slices = Mesh(Topology({"data": 1, "model": 2}), world)["model"]
    model = torch.nn.Sequential(*(Layer(slices, can_fail=index == 1) for index in range(2)))
    settings = config(0, 2, 1, **ADAM, tensor_parallel={"autotp_size": 2})
    engine = mpispeed.initialize(model=model, config=settings)[0]
    for number in range(3):
        FAULT.arm("forward" if (world.rank, number) == (1, 1) else "")
        try:
            step(engine, number)
        except Planted:
            sys.stdout.write("caught\n")
        else:
            sys.stdout.write(f"updates {engine.global_steps}\n")


if __name__ == "__main__":
    main()
