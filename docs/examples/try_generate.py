"""A model and prompts to try `mpispeed generate` with, made here: nothing is downloaded, and nothing sensible is said.

python try_generate.py /tmp/try
mpirun -n 2 mpispeed generate --model /tmp/try/model --prompts /tmp/try/prompts.jsonl --out /tmp/try/answers.jsonl
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = 256


def make_tokenizer():
    """Tokens are bytes; one more is the end."""
    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    own = Tokenizer(models.BPE(vocab={**vocab, "<end>": END}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", pad_token="<end>")


def save_model(folder):
    """A GPT-2 of random weights."""
    torch.manual_seed(0)
    ends = {"eos_token_id": END, "bos_token_id": END, "vocab_size": END + 1}
    model = GPT2LMHeadModel(GPT2Config(n_positions=96, n_embd=32, n_layer=2, n_head=2, **ends))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def write_prompts(path, count):
    """Prompts of mixed length, with answers of mixed length; every third is drawn, the others are greedy."""
    draw, lines = random.Random(1), []
    for number in range(count):
        text = "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 40)))
        line = {"id": f"p{number}", "prompt": text, "topic": "letters", "max_new_tokens": draw.randint(1, 30)}
        lines.append(line | ({"temperature": 0.9, "top_p": 0.95} if number % 3 == 0 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_model(folder / "model")
    write_prompts(folder / "prompts.jsonl", int(sys.argv[2]) if len(sys.argv) > 2 else 60)
