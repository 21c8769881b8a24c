"""A loop of accelerate that leaves ranks, ZeRO and precision to what started it: launched_loop.py OUT.

The worker of all clients runs it too, with plugins made in code.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState

ROWS, MICRO = 48, 4
CONFIG = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}


def cases(place):
    """Name -> case, on the ranks of the launched ones."""
    return {f"launched {kind}": partial(planned, kind) for kind in ("no", "bf16")} if place.ranks == 2 else {}


def planned(precision):
    ds = {**CONFIG, "bf16": {"enabled": precision == "bf16"}}
    return loop(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds), mixed_precision=precision)


def loop(**settings):
    AcceleratorState._reset_state(reset_partial_state=True)
    one = Accelerator(**settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model, optimizer, rows = one.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=MICRO))
    losses = []
    for inputs, targets in rows:
        with one.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs.to(next(model.parameters()).dtype)).float(), targets)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(one.gather(loss.detach()).mean().item())
    facts = {"ranks": one.num_processes, "kind": one.distributed_type.value, "precision": one.mixed_precision}
    dtype = str(next(model.parameters()).dtype)
    return {**facts, "dtype": dtype, "losses": losses, "clipping": os.environ.get("ACCELERATE_GRADIENT_CLIPPING")}


def main(out):
    found = loop()
    if int(os.environ["RANK"]) == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
