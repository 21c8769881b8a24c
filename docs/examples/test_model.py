"""A test of a model on two ranks: `mpirun -n 2 python -m pytest --with-mpi test_model.py`."""

import pytest
import torch

import mpispeed

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.mpi(min_size=2)
def test_two_ranks_learn_what_one_does():
    """Each rank trains on its part of a batch; the weights are those of plain torch on the whole."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 1), torch.randn(3, 8, 4)
    alone = torch.nn.Linear(4, 1)
    alone.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    engine, *_ = mpispeed.initialize(model=model, config=CONFIG)
    for batch in data:
        plain.zero_grad()
        alone(batch).square().mean().backward()
        plain.step()
        own = batch.chunk(engine.world_size)[engine.global_rank]
        engine.backward(engine(own).square().mean())
        engine.step()
    torch.testing.assert_close(engine.module.weight, alone.weight, rtol=1e-5, atol=1e-6)
    engine.destroy()
