"""Series in CSV files and TensorBoard, and the breakdown of times."""

from pathlib import Path

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "tensorboard": {"enabled": True, "output_path": "logs/tensorboard/", "job_name": "trial"},
    "csv_monitor": {"enabled": True, "output_path": "logs/csv/", "job_name": "trial"},
}
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(4):
    loss = engine(torch.ones(4, 8, device=engine.device)).pow(2).mean()
    engine.backward(loss)
    engine.step()
deepspeed.comm.barrier()
if deepspeed.comm.get_rank() == 0:
    rows = Path("logs/csv/trial/Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    found = [float(row.split(",")[1]) for row in rows]
    assert len(found) == 4
    assert found == sorted(found, reverse=True)
    assert list(Path("logs/tensorboard/trial").glob("events*"))
