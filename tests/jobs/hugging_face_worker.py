"""Runs of the Trainer, accelerate and peft on ZeRO and, to compare, on the DDP of torch; needs `--as-deepspeed`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mpispeed

BATCH, TOKENS, WORDS, STEPS = 6, 12, 64, 4
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def config(words=WORDS):
    return LlamaConfig(
        vocab_size=words, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip


def samples():
    rows = torch.randint(0, WORDS, (4 * BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def zero(stage):
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**ZERO, "zero_optimization": {**section, "stage3_gather_16bit_weights_on_model_save": True}}


def arguments(folder, ranks, ds=None, **changes):
    """Six samples a step on 1, 2 and 3 ranks, in the same order."""
    micro = {1: 3, 2: 3, 3: 2}[ranks]
    kept = {
        "output_dir": str(folder), "per_device_train_batch_size": micro, "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": BATCH // (micro * ranks), "max_steps": STEPS, "logging_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "seed": 5, "lr_scheduler_type": "constant", "dataloader_pin_memory": False,
    }  # fmt: skip
    place = {"use_cpu": True} if ds is None else {"deepspeed": ds}
    return TrainingArguments(**{**kept, **place, **changes})


def model(lora=False):
    torch.manual_seed(0)
    made = LlamaForCausalLM(config())
    return get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if lora else made


def train(args, made=None, resume=None):
    """Losses and norms of the steps, then evaluation and prediction."""
    trainer = Trainer(model=made or model(), args=args, train_dataset=samples(), eval_dataset=samples()[:BATCH])
    trainer.train(resume_from_checkpoint=resume)
    log = [row for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = torch.as_tensor(trainer.predict(samples()[:BATCH]).predictions).double()
    facts = {"losses": [row["loss"] for row in log], "norms": [float(row["grad_norm"]) for row in log]}
    return {**facts, "evaluated": evaluated, "predicted": [float(predicted.sum()), float(predicted.abs().sum())]}


def trainers(folder, ranks, stages):
    found = {"ddp": train(arguments(folder, ranks)), "ddp lora": train(arguments(folder, ranks), model(lora=True))}
    for stage in stages:
        found[f"zero {stage}"] = train(arguments(folder, ranks, zero(stage)))
    found["zero lora"] = train(arguments(folder, ranks, zero(3)), model(lora=True))
    return found


def saves(folder, ranks):
    """Checkpoints of step 2, to be resumed elsewhere, and a save of the model alone."""
    for stage in (1, 3):
        args = arguments(folder / f"stage{stage}", ranks, zero(stage), save_strategy="steps", save_steps=2)
        train(args)
    args = arguments(folder / "only", ranks, zero(3), save_strategy="steps", save_steps=STEPS, save_only_model=True)
    trained = train(args)
    return {"only": trained, "files": sorted(path.name for path in (folder / "only" / f"checkpoint-{STEPS}").iterdir())}


def resumes(folder, ranks):
    found = {}
    for stage in (1, 3):
        start = folder / f"stage{stage}" / "checkpoint-2"
        found[f"resumed {stage}"] = train(arguments(folder / "on", ranks, zero(stage)), resume=str(start))
    return found


def loads(folder, ranks):
    """`from_pretrained` inside of zero.Init, and more words."""
    plain = model()
    if mpispeed.comm.get_rank() == 0:
        plain.save_pretrained(folder / "model")
    mpispeed.comm.barrier()
    args = arguments(folder, ranks, zero(3))  # from here on transformers makes models inside of zero.Init
    made = AutoModelForCausalLM.from_pretrained(folder / "model")
    wrong = []
    for (name, param), expected in zip(made.named_parameters(), plain.parameters(), strict=True):
        is_cut = type(param).__name__ == "ShardedParameter"
        with mpispeed.zero.GatheredParameters(param):
            if not is_cut or not torch.equal(param, expected):
                wrong.append(name)
    made.resize_token_embeddings(WORDS + 6, mean_resizing=False)
    rows = made.get_input_embeddings().weight
    with mpispeed.zero.GatheredParameters(rows):
        is_kept = torch.equal(rows[:WORDS], plain.get_input_embeddings().weight)
    return {"wrong": wrong, "is_kept": is_kept, "shape": list(rows.shape), "losses": train(args, made)["losses"]}


def loop(ranks, precision="no", stage=2):
    """An accelerate loop without a Trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    micro = {1: 3, 2: 3, 3: 2}[ranks]
    ds = {**zero(stage), "train_micro_batch_size_per_gpu": micro, "gradient_clipping": 0.5}
    ds.update(gradient_accumulation_steps=BATCH // (micro * ranks), bf16={"enabled": precision == "bf16"})
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


def main(what, folder):
    mpispeed.init_distributed()
    ranks = mpispeed.comm.get_world_size()
    found = {"ranks": ranks}
    if "trainers" in what:
        found.update(trainers(folder / "trainers", ranks, (0, 1, 2, 3)))
    if "saves" in what:
        found.update(saves(folder / "saves", ranks))
    if "resumes" in what:
        found.update(resumes(folder / "saves", ranks))
    if "loads" in what:
        found["loads"] = loads(folder, ranks)
    if "loops" in what:
        found["loop"] = loop(ranks)
        found["loop bf16"] = loop(ranks, "bf16", 3)
    if mpispeed.comm.get_rank() == 0:
        (folder / f"found{ranks}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
