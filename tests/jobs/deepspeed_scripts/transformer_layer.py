"""Transformer layers of the library's own, trained."""

import deepspeed
import torch
from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

shape = DeepSpeedTransformerConfig(
    batch_size=2, hidden_size=16, intermediate_size=32, heads=2, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0,
    num_hidden_layers=2, initializer_range=0.02, local_rank=-1, seed=1234, fp16=False, pre_layer_norm=True,
)  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(DeepSpeedTransformerLayer(shape) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        return x


torch.manual_seed(0)
net = Net()
assert DeepSpeedTransformerLayer.layer_id >= 2
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
x, mask = torch.randn(2, 6, 16, device=engine.device), torch.zeros(2, 1, 1, 6, device=engine.device)
losses = []
for _ in range(6):
    loss = torch.nn.functional.mse_loss(engine(x, mask), torch.zeros_like(x))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
