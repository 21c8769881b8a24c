"""Estimates of memory for a model at hand and for one that is not."""

import contextlib
import io

import torch
from deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold

said = io.StringIO()
with contextlib.redirect_stdout(said):
    estimate_zero2_model_states_mem_needs_all_cold(total_params=2851e6, num_gpus_per_node=8, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8, num_nodes=1
    )
for amount in ("2851M total params", "127.45GB", "5.31GB", "15.93GB", "32M largest layer params", "71.69GB", "6.09GB"):
    assert amount in said.getvalue(), amount

model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 1000))
said = io.StringIO()
with contextlib.redirect_stdout(said):
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=1)
assert "4M total params, 2M largest layer params" in said.getvalue(), said.getvalue()
