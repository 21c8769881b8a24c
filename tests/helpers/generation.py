"""Tiny models with tokenizers for jobs of batch generation, and prompts for them; made here, nothing is downloaded."""

import json
import random

import torch

END = 256


def save_model(folder, name="gpt2", seed=0):
    """A model of random weights with a tokenizer of bytes, as `save_pretrained` writes them."""
    import transformers as hub

    torch.manual_seed(seed)
    ends = {"eos_token_id": END, "bos_token_id": END, "vocab_size": END + 1}
    if name == "gpt2":
        model = hub.GPT2LMHeadModel(hub.GPT2Config(n_positions=96, n_embd=32, n_layer=2, n_head=2, **ends))
    else:
        model = hub.LlamaForCausalLM(
            hub.LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=96, **ends,
            )
        )  # fmt: skip
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def byte_tokenizer():
    """Tokens are bytes; one more is the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    own = Tokenizer(models.BPE(vocab={**vocab, "<end>": END}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", pad_token="<end>")


def write_prompts(path, count, seed=1, longest=30):
    """Prompts of mixed length with answers of mixed length; every third is drawn, the others are greedy."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        text = "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 40)))
        options = {"max_new_tokens": draw.randint(1, longest)}
        if number % 3 == 0:
            options |= {"temperature": 0.9, "top_p": 0.95}
        lines.append({"id": f"p{number}", "prompt": text, "topic": "letters", **options})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
