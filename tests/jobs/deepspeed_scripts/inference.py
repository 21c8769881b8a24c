"""A model made ready for inference, divided over two ranks."""

import deepspeed
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
x = torch.ones(2, 8)
with torch.no_grad():
    expected = net(x)
engine = deepspeed.init_inference(model=net, config={"tensor_parallel": {"tp_size": 1}, "dtype": "fp32"})
with torch.no_grad():
    assert torch.allclose(engine(x), expected)
