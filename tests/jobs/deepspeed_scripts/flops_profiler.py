"""Floating-point operations of a step, and of a model alone."""

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

net = torch.nn.Linear(8, 4, bias=False)
profiler = FlopsProfiler(net)
profiler.start_profile()
net(torch.ones(2, 8))
assert profiler.get_total_macs() == 2 * 8 * 4
assert profiler.get_total_params() == 32
profiler.end_profile()
flops, macs, parameters = get_model_profile(net, input_shape=(2, 8), print_profile=False, as_string=False)
assert (flops, macs, parameters) == (128, 64, 32)
