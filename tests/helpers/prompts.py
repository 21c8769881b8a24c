"""A tiny tokenizer and pipelines of tiny models, made here: nothing is downloaded."""

import torch

from tests.helpers import hub_models

SPECIAL = ("<pad>", "<s>", "</s>")


def tokenizer():
    """Words w3, w4, ... are tokens 3, 4, ...; padding is on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: number for number, name in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), hub_models.VOCAB)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w3"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w3", padding_side="left", **names)


def generator(name="gpt2", **change):
    """A text-generation pipeline of a tiny model, on the host."""
    from transformers import pipeline

    model = hub_models.build(name, **change)
    return pipeline("text-generation", model=model, tokenizer=tokenizer(), device=torch.device("cpu"))
