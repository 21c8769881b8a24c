"""Sequences over ranks by DeepSpeed's names: its tutorial, accelerate's ParallelismConfig, the Trainer with it."""

from functools import partial

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB, LENGTH, SAMPLES, RATE = 64, 21, 8, 1e-2
"""A length that no number of ranks divides."""


def cases(place):
    """Name -> case; ranks share one sequence in all of them."""
    found = {"plain": plain, "tutorial": tutorial, "accelerate": loop, "trainer": partial(trainer, place, 3)}
    return {**found, "resumed trainer": partial(resumed, place), "distributed attention": distributed_attention}


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2))


def samples(count=SAMPLES):
    """Sentences with prompts, which have no labels; on a step with SP ranks all of them see the same sentence."""
    rows = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = rows.clone()
    labels[:, :9] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def plain():
    """One process, a sentence a step: losses, what the weights have become, and the loss of two sentences then."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for sample in samples():
        loss = made(**{name: row[None] for name, row in sample.items()}, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        rows = [{name: row[None] for name, row in sample.items()} for sample in samples()[:2]]
        evaluated = sum(made(**row).loss.item() for row in rows) / 2
    return {"losses": losses, "weights": sums(made), "eval": evaluated}


def sums(made):
    return [float(param.detach().double().abs().sum()) for param in made.parameters()]


def zero(stage):
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {**section, "stage3_gather_16bit_weights_on_model_save": True}}


def whole_sums(engine):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return sums(engine.module)


def mean_over_good_tokens(loss, shift_labels, group):
    """The loss of the whole sequence, as DeepSpeed's and accelerate's documents compute it."""
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    good_tokens = (shift_labels != -100).view(-1).sum()
    counts = torch.distributed.nn.functional.all_gather(good_tokens, group=group)
    total = sum(losses[rank] * counts[rank] for rank in range(len(counts)) if counts[rank] > 0)
    return total / max(sum(counts), 1)


def tutorial():
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.runtime.utils import move_to_device
    from deepspeed.utils import groups

    dist.init_distributed(dist_backend="nccl", dist_init_required=True)
    size = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": size, **zero(3),
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
    }  # fmt: skip
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="a name that is not read", core_attn_implementation="sdpa",
        sequence_parallel_size=size, micro_batch_size=1, seq_length=64, seq_length_is_variable=True,
    )  # fmt: skip
    made = model()
    engine, _, _, _ = deepspeed.initialize(config=config, model=made, model_parameters=made.parameters(), mpu=mpu)
    group = groups._get_sequence_parallel_group()
    rows = samples()[dist.get_rank() :: size]  # each rank loads other sentences, and all work on all of them
    loader = UlyssesSPDataLoaderAdapter(
        torch.utils.data.DataLoader(rows, batch_size=1),
        sp_rank=groups._get_sequence_parallel_rank(), sp_group=group,
        sp_world_size=groups._get_sequence_parallel_world_size(), device=engine.device,
    )  # fmt: skip
    losses = []
    for batch in loader:
        part = move_to_device(batch, engine.device)
        outputs = engine(**part)
        loss = engine.module.loss_function(
            logits=outputs.logits, labels=None, shift_labels=part["shift_labels"],
            vocab_size=engine.module.config.vocab_size,
        )  # fmt: skip
        loss = mean_over_good_tokens(loss, part["shift_labels"], group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "weights": whole_sums(engine), "length": len(loader)}
    UlyssesSPAttentionHF.unregister_from_transformers("sdpa")
    engine.destroy()
    return found


def parallelism(size):
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler)


def loop():
    """The loop of accelerate's guide to sequence parallelism."""
    import deepspeed.comm as dist
    from deepspeed.utils import groups

    size = dist.get_world_size()
    plugin = DeepSpeedPlugin(hf_ds_config={**zero(3), "train_micro_batch_size_per_gpu": 1})
    one = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism(size))
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, weight_decay=0.0)
    made, optimizer, rows = one.prepare(made, optimizer, torch.utils.data.DataLoader(samples(), batch_size=1))
    group, losses = groups._get_sequence_parallel_group(), []
    for batch in rows:
        shift_labels = batch.pop("shift_labels")
        outputs = made(**batch)
        loss = one.unwrap_model(made).loss_function(
            logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=VOCAB
        )
        loss = mean_over_good_tokens(loss, shift_labels, group)
        one.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = {"losses": losses, "weights": whole_sums(made)}
    made.destroy()
    return found


def arguments(place, folder, size, stage, **changes):
    kept = {
        "output_dir": str(folder), "per_device_train_batch_size": 1, "num_train_epochs": 1, "logging_steps": 1,
        "learning_rate": RATE, "max_grad_norm": 0.0, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "lr_scheduler_type": "constant", "dataloader_pin_memory": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    ds = {**zero(stage), "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    ds["gradient_accumulation_steps"] = "auto"
    return TrainingArguments(**{**kept, **changes}, deepspeed=ds, parallelism_config=parallelism(size))


def trained(place, folder, size, stage, start=None, **changes):
    args = arguments(place, folder, size, stage, **changes)
    trainer = Trainer(model=model(), args=args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=start)
    log = [row for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate(samples()[:2])["eval_loss"]
    found = {"losses": [row["loss"] for row in log], "weights": whole_sums(trainer.model_wrapped), "eval": evaluated}
    trainer.model_wrapped.destroy()
    return found


def trainer(place, stage):
    saves = {"save_strategy": "steps", "save_steps": SAMPLES // 2}
    return trained(place, place.own / "trained", place.ranks, stage, **saves)


def resumed(place):
    """From the middle of the epoch, where the loader has to skip what was seen."""
    start = place.own / "trained" / f"checkpoint-{SAMPLES // 2}"
    return trained(place, place.own / "resumed", place.ranks, 3, start=str(start))


def distributed_attention():
    """DeepSpeed-Ulysses as its tutorial has it, with the tensors of Megatron: [sequence, batch, heads, width]."""
    import deepspeed.comm as dist
    from deepspeed.sequence.layer import DistributedAttention

    size, rank = dist.get_world_size(), dist.get_rank()
    group = torch.distributed.new_group(list(range(size)))
    heads, worst = 6, 0.0

    def local(query, key, value, *rest):
        swapped = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
        found = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True)
        return found.permute(2, 0, 1, 3)

    attention = DistributedAttention(local, group)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(4 * size, 2, heads, 8, generator=generator, requires_grad=True) for _ in range(3)]
    expected = local(*whole)
    expected.sum(1).square().sum().backward()
    rows = slice(4 * rank, 4 * (rank + 1))
    mine = [part.detach()[rows].clone().requires_grad_() for part in whole]
    found = attention(*mine, None)
    found.sum(1).square().sum().backward()
    for one, other in [(found, expected[rows]), *((a.grad, b.grad[rows]) for a, b in zip(mine, whole, strict=True))]:
        worst = max(worst, float((one - other).abs().max() / other.abs().max()))
    return {"worst": worst}
