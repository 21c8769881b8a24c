"""Loops of accelerate without a Trainer."""

from functools import partial

import torch
from accelerate import Accelerator, DeepSpeedPlugin

from tests.jobs.clients.trainers import BATCH, MICRO, model, samples, zero


def cases(place):
    """Name -> case."""
    return {"loop": partial(loop, place, "no", 2), "loop bf16": partial(loop, place, "bf16", 3)}


def loop(place, precision, stage):
    micro = MICRO[place.ranks]
    ds = {**zero(stage), "train_micro_batch_size_per_gpu": micro, "gradient_clipping": 0.5}
    ds.update(gradient_accumulation_steps=BATCH // (micro * place.ranks), bf16={"enabled": precision == "bf16"})
    del ds["train_batch_size"]
    one = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds))
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=0.0)
    rows = torch.stack([sample["input_ids"] for sample in samples()])
    made, optimizer, rows = one.prepare(made, optimizer, torch.utils.data.DataLoader(rows, batch_size=micro))
    losses, parts = [], []
    for row in rows:
        with one.accumulate(made):
            loss = made(input_ids=row, labels=row).loss
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        parts.append(one.gather(loss.detach().float()).mean().item())
        if one.sync_gradients:
            losses.append(sum(parts) / len(parts))
            parts.clear()
    return {"losses": losses, "ranks": one.num_processes, "kind": str(one.distributed_type)}
