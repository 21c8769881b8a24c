"""Parameters and optimizer states set to zero: the whole ones at stage 2, each rank's own at stage 3."""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.tensor_fragment import safe_get_full_optimizer_state, safe_set_full_optimizer_state


def trained(stage):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    net = torch.nn.Linear(8, 4)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    loss = engine(torch.ones(4, 8, device=engine.device)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return engine.module


for stage in (2, 3):
    model = trained(stage)
    for _name, lp in model.named_parameters():
        assert float(safe_get_full_optimizer_state(lp, "exp_avg").abs().sum()) > 0
        if stage < 3:
            zero = torch.zeros_like(lp)
            safe_set_full_fp32_param(lp, zero)
            safe_set_full_optimizer_state(lp, zero, "exp_avg")
        else:
            zero = torch.zeros(lp.ds_tensor.shape)
            safe_set_local_fp32_param(lp, zero)
            deepspeed.utils.safe_set_local_optimizer_state(lp, zero, "exp_avg")
        assert not safe_get_full_fp32_param(lp).any()
        assert not safe_get_full_optimizer_state(lp, "exp_avg").any()
