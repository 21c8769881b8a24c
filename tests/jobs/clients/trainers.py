"""Hugging Face's Trainer, with and without peft, on ZeRO and, to compare, on the DDP of torch."""

from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mpispeed

BATCH, TOKENS, WORDS, STEPS = 6, 12, 64, 4
MICRO = {1: 3, 2: 3, 3: 2}
"""Number of ranks -> samples of a micro-batch, so that steps have six in the same order everywhere."""

SAVED = (1, 3)
"""Stages whose runs on two ranks are saved at step 2 and resumed on one and on three."""

ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def cases(place):
    """Name -> case, for this number of ranks; runs that are resumed elsewhere are made on two."""
    found = {"ddp": partial(ddp, place), "ddp lora": partial(ddp, place, lora=True)}
    for stage in range(4):
        found[f"zero {stage}"] = partial(sharded, place, stage)
    found["zero lora"] = partial(train, place, zero(3), lora=True)
    if place.ranks == 2:
        return {**found, "only": partial(save_model_only, place), "loads": partial(load, place)}
    return {**found, **{f"resumed {stage}": partial(resume, place, stage) for stage in SAVED}}


def samples():
    rows = torch.randint(0, WORDS, (4 * BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def zero(stage):
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**ZERO, "zero_optimization": {**section, "stage3_gather_16bit_weights_on_model_save": True}}


def arguments(place, ds=None, **changes):
    micro = MICRO[place.ranks]
    kept = {
        "output_dir": str(place.own), "per_device_train_batch_size": micro, "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": BATCH // (micro * place.ranks), "max_steps": STEPS, "logging_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "seed": 5, "lr_scheduler_type": "constant", "dataloader_pin_memory": False,
    }  # fmt: skip
    device = {"use_cpu": True} if ds is None else {"deepspeed": ds}
    return TrainingArguments(**{**kept, **device, **changes})


def model(lora=False):
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip
    return get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if lora else made


def train(place, ds=None, made=None, lora=False, start=None, **changes):
    """Losses and norms of the steps, then evaluation and prediction."""
    args = arguments(place, ds, **changes)
    trainer = Trainer(model=made or model(lora), args=args, train_dataset=samples(), eval_dataset=samples()[:BATCH])
    trainer.train(resume_from_checkpoint=start)
    log = [row for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = torch.as_tensor(trainer.predict(samples()[:BATCH]).predictions).double()
    return {
        "ranks": args.world_size, "losses": [row["loss"] for row in log],
        "norms": [float(row["grad_norm"]) for row in log], "evaluated": evaluated,
        "predicted": [float(predicted.sum()), float(predicted.abs().sum())],
    }  # fmt: skip


def ddp(place, lora=False):
    return train(place, lora=lora)


def sharded(place, stage):
    if place.ranks == 2 and stage in SAVED:
        saves = {"output_dir": str(place.folder / f"stage{stage}"), "save_strategy": "steps", "save_steps": 2}
        return train(place, zero(stage), **saves)
    return train(place, zero(stage))


def resume(place, stage):
    return train(place, zero(stage), start=str(place.folder / f"stage{stage}" / "checkpoint-2"))


def save_model_only(place):
    folder = place.own / "only"
    saves = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": STEPS, "save_only_model": True}
    trained = train(place, zero(3), **saves)
    return {**trained, "files": sorted(path.name for path in (folder / f"checkpoint-{STEPS}").iterdir())}


def load(place):
    """`from_pretrained` inside of zero.Init, and more words."""
    plain = model()
    if mpispeed.comm.get_rank() == 0:
        plain.save_pretrained(place.own / "model")
    mpispeed.comm.barrier()
    args = arguments(place, zero(3))  # from here on transformers makes models inside of zero.Init
    made = AutoModelForCausalLM.from_pretrained(place.own / "model")
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
    trainer = Trainer(model=made, args=args, train_dataset=samples())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"wrong": wrong, "is_kept": is_kept, "shape": list(rows.shape), "losses": losses}
