"""The log of communication, and its summary."""

import logging

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "prof_ops": ["all_reduce"]},
}
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(3):
    loss = engine(torch.ones(4, 8, device=engine.device)).pow(2).mean()
    engine.backward(loss)
    engine.step()
ranks = deepspeed.comm.get_world_size()
total = torch.full((3,), float(deepspeed.comm.get_rank() + 1), device=engine.device)
deepspeed.comm.all_reduce(total)
assert total.tolist() == [ranks * (ranks + 1) / 2] * 3


class Said(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


lines: list[str] = []
logging.getLogger("mpispeed").addHandler(Said(logging.INFO))
logging.getLogger("mpispeed").setLevel(logging.INFO)
deepspeed.comm.log_summary()
assert "all_reduce" in "\n".join(lines)
