"""Steps of trl's trainers on ZeRO, with a tokenizer and a model made here; needs `--as-deepspeed`."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import mpispeed

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
TEXTS = ["a b c d e", "f g h i", "x y z", "q r s t"] * 4
KEPT = {
    "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": [], "bf16": False,
    "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "dataloader_pin_memory": False,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def zero(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
    }  # fmt: skip


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def logged(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def fine_tune(folder, **place):
    args = SFTConfig(output_dir=str(folder), max_length=16, **place, **KEPT)
    return logged(
        SFTTrainer(
            model=model(), args=args, train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer()
        )
    )


def different_words(completions, **_):
    return [float(len(set(completion))) for completion in completions]


def reinforce(folder, stage):
    """With a reference model, which a second engine keeps sharded."""
    args = GRPOConfig(
        output_dir=str(folder), num_generations=2, max_completion_length=6, beta=0.1, deepspeed=zero(stage), **KEPT
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"), args=args, reward_funcs=different_words, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )  # fmt: skip
    return logged(trainer)


def main(folder):
    mpispeed.init_distributed()
    if mpispeed.comm.get_rank() == 0:
        model().save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
    mpispeed.comm.barrier()
    found = {"sft ddp": fine_tune(folder, use_cpu=True)}
    for stage in (2, 3):
        found[f"sft {stage}"] = fine_tune(folder, deepspeed=zero(stage))
        found[f"grpo {stage}"] = reinforce(folder, stage)
    if mpispeed.comm.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
