"""Trains a small Llama of transformers with Hugging Face's Trainer on ZeRO-3, on any number of ranks.

    mpispeed run -n 2 --as-deepspeed docs/examples/hf_trainer.py --steps 100
    srun --mpi=pmi2 mpispeed env -- python docs/examples/hf_trainer.py      # with the wheel of `mpispeed compat wheel`

The script says nothing of mpispeed: the Trainer needs `deepspeed=` and no more.
"""

from __future__ import annotations

import argparse

from text import Windows, standard_library
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


class Samples(Dataset[dict[str, Tensor]]):
    """Windows of a text as the Trainer wants them; the model itself shifts the labels."""

    def __init__(self, block: int) -> None:
        self.windows = Windows(standard_library(cap_bytes=1_000_000)[0], block)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict.fromkeys(("input_ids", "labels"), self.windows[index][0])


def main() -> None:
    """Train, save the model, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="hf_trainer")
    given = parser.parse_args()
    settings = TrainingArguments(
        given.out, deepspeed=ZERO, max_steps=given.steps, per_device_train_batch_size=16, learning_rate=3e-3,
        weight_decay=0.1, logging_steps=10, save_strategy="no", report_to=[], dataloader_pin_memory=False,
    )  # fmt: skip
    shape = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(shape), settings, train_dataset=Samples(64))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
