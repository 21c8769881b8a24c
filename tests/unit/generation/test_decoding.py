"""The answers of a batch: each row's are its own, whatever becomes of the others."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mpispeed.generation.answers import ERROR, LENGTH
from mpispeed.generation.batches import cut
from mpispeed.generation.decoding import Answerer, Job
from mpispeed.generation.model import Described, Opened
from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options
from mpispeed.generation.texts import Encoder
from mpispeed.mesh import sim

BROKEN = 7


@pytest.fixture(scope="module")
def model():
    """A model that has no number for what follows the token BROKEN."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    made = GPT2LMHeadModel(config).eval()
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    with torch.no_grad():
        made.transformer.wte.weight[BROKEN] = torch.nan
    return made


def answered(tmp_path, model, prompts, batch_size, limits):
    """Answers to prompts by number."""
    path = tmp_path / f"{batch_size}.jsonl"
    lines = ({"prompt": each, "max_new_tokens": limit} for each, limit in zip(prompts, limits, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    described = Described(Path("none"), Path("none"), model.config, None, 32, 50, frozenset(), 0, "")

    def answer(world):
        with open_prompts(path) as found:
            batches = cut([len(each) for each in prompts], limits, batch_size=batch_size, max_positions=32)
            job = Job(described, found, batches, Encoder(None, vocabulary=50), Options())
            answerer = Answerer(job, Opened(model, world.comm), lambda: False)
            made = [answerer.answer(number) for number in range(len(batches))]
        return {each.request: each for batch in made for each in batch.answers}

    return sim.run(1, answer)[0]


def test_a_row_without_numbers_is_an_error_and_leaves_the_others_alone(tmp_path, model):
    prompts, limits = [[3, 4, 5], [6, BROKEN], [9], [8, 2], [1, 12]], [3, 4, 9, 9, 5]
    together = answered(tmp_path, model, prompts, 5, limits)
    alone = answered(tmp_path, model, prompts, 1, limits)
    assert sorted(together) == sorted(alone) == list(range(5))
    for request in range(5):
        here, there = together[request], alone[request]
        assert list(here.tokens) == list(there.tokens)
        assert (here.reason, here.error) == (there.reason, there.error)
        if request == 1:
            assert here.reason == ERROR
            assert here.error.startswith("logits of token 0 are no numbers (NaN)")
        elif here.reason == LENGTH:
            assert len(here.tokens) == limits[request]
    # another row may come to the broken token by itself
    assert [each.reason for each in together.values()].count(LENGTH) >= 3
