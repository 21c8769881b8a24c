"""Steps of trl's trainers on ZeRO, with a tokenizer and a model made here; on two ranks."""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mpispeed

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
TEXTS = ["a b c d e", "f g h i", "x y z", "q r s t"] * 4
KEPT = {
    "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": [], "bf16": False,
    "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "dataloader_pin_memory": False,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def cases(place):
    """Name -> case."""
    if place.ranks != 2:
        return {}
    found = {"sft ddp": partial(fine_tune, place, use_cpu=True)}
    for stage in (2, 3):
        found[f"sft {stage}"] = partial(fine_tune, place, deepspeed=zero(stage))
        found[f"grpo {stage}"] = partial(reinforce, place, stage)
    return found


def zero(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
    }  # fmt: skip


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def logged(trainer):
    trainer.train()
    return {"losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}


def fine_tune(place, **settings):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(output_dir=str(place.own), max_length=16, **settings, **KEPT)
    rows = Dataset.from_dict({"text": TEXTS})
    return logged(SFTTrainer(model=model(), args=args, train_dataset=rows, processing_class=tokenizer()))


def different_words(completions, **_):
    return [float(len(set(completion))) for completion in completions]


def reinforce(place, stage):
    """With a reference model, which a second engine keeps sharded."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = place.own / f"grpo{stage}"
    if mpispeed.comm.get_rank() == 0:
        model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    mpispeed.comm.barrier()
    args = GRPOConfig(
        output_dir=str(place.own), num_generations=2, max_completion_length=6, beta=0.1, deepspeed=zero(stage), **KEPT
    )
    trainer = GRPOTrainer(
        model=str(folder), args=args, reward_funcs=different_words, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )  # fmt: skip
    return logged(trainer)
