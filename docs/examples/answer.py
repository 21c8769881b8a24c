"""Answers prompts with a model of transformers whose layers all ranks of the job share.

mpispeed run -n 2 answer.py MODEL --prompt "Once upon a time" --prompt "In the beginning"
srun -n 4 python answer.py MODEL --prompt "Once upon a time" --sample

MODEL is a folder with config.json, weights and tokenizer; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from transformers import pipeline

import mpispeed


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--prompt", action="append", required=True, help="a text to go on with; several times for more")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each answer")
    parser.add_argument("--dtype", default="bf16", help="fp32, bf16 or fp16")
    parser.add_argument("--sample", action="store_true", help="draw tokens; without it the likeliest is taken")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn tokens")
    return parser.parse_args()


def main() -> None:
    """Load, slice, answer; rank 0 prints."""
    args = arguments()
    mpispeed.init_distributed()
    ranks, rank = mpispeed.comm.get_world_size(), mpispeed.comm.get_rank()
    generator = pipeline("text-generation", model=args.model, dtype="auto", device="cpu")
    torch.manual_seed(args.seed)
    generator.model = mpispeed.init_inference(
        generator.model, dtype=args.dtype, tensor_parallel={"tp_size": ranks}, max_out_tokens=4096
    )
    engine = generator.model
    engine.profile_model_time()
    answers = generator(args.prompt, max_new_tokens=args.tokens, do_sample=args.sample, return_full_text=False)
    times = engine.model_times()
    if rank == 0:
        for prompt, [answer] in zip(args.prompt, answers, strict=True):
            print(f"{prompt} -> {answer['generated_text']}")
        print(f"{len(times)} passes of {sum(times) / len(times):.1f} ms on {ranks} rank{'s' if ranks > 1 else ''}")
    engine.destroy()


if __name__ == "__main__":
    main()
