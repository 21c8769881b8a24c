"""Layers over two stages: training and evaluation from repeating loaders."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader

deepspeed.init_distributed()
layers = [
    LayerSpec(torch.nn.Linear, 8, 16),
    LayerSpec(torch.nn.Tanh),
    LayerSpec(torch.nn.Linear, 16, 16, bias=False),
    LayerSpec(torch.nn.Linear, 16, 1),
]
net = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="parameters")
config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
)
assert isinstance(engine, PipelineEngine)
assert engine.is_first_stage() != engine.is_last_stage()
assert net.topology().get_dim("pipe") == 2
torch.manual_seed(0)
x = torch.randn(16, 8)
samples = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = RepeatingLoader(torch.utils.data.DataLoader(samples, batch_size=2))
batches = iter(loader)
losses = [float(engine.train_batch(data_iter=batches)) for _ in range(12)]
assert losses[-1] < losses[0], losses
assert float(engine.eval_batch(data_iter=iter(loader))) < losses[0]
