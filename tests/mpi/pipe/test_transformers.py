"""A model of transformers as a pipeline, its layers cut over slices too: losses and weights of the whole model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import mpispeed
from mpispeed.mesh.world import start
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology, spread
from tests.helpers.covering import in_turn

pytestmark = pytest.mark.mpi

STEPS, MICRO, SAMPLES, LENGTH = 4, 2, 8, 12


def llama():
    """A tiny model with grouped queries, the same on every rank."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=47, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Enter(nn.Module):
    """Tokens to hidden states, with what every block needs beside."""

    def __init__(self, model):
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb

    def forward(self, ids):
        x = self.embed_tokens(ids)
        return x, *self.rotary_emb(x, torch.arange(ids.shape[1])[None])


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, cos, sin):
        return self.layer(x, position_embeddings=(cos, sin)), cos, sin


class Leave(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x, cos, sin):
        return self.lm_head(self.norm(x))


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def pipeline(pipe, model, data):
    whole = llama()
    blocks = [spread(Block(layer)) for layer in whole.model.layers]
    return PipelineModule(
        [Enter(whole.model), *blocks, spread(Leave(whole))],
        topology=PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data),
        loss_fn=next_token_loss,
        partition_method="uniform",
    )


def batches():
    return torch.randint(0, 47, (STEPS, MICRO, SAMPLES // MICRO, LENGTH), generator=torch.Generator().manual_seed(5))


@cache
def reference():
    """Losses of the whole model, trained by torch alone."""
    model, losses = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in batches():
        total = 0.0
        for ids in step:
            loss = next_token_loss(model(input_ids=ids).logits, ids) / MICRO
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


LAYOUTS = {2: [(2, 1, 1), (1, 2, 1)], 4: [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1)]}


CASES = [
    (0, "1f1b"), (0, "zb-h1"), (1, "zb-h1"), (1, "1f1b"), (2, "1f1b"), (2, "zb-h1"), (3, "zb-h1"), (3, "1f1b"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "schedule"), in_turn(CASES, ranks=(4, 2)))
def test_a_transformers_model_learns_as_a_pipeline_as_it_does_whole(number, schedule):
    layouts = LAYOUTS[start().size]
    pipe, model, data = layouts[number % len(layouts)]
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": schedule},
        "tensor_parallel": {"autotp_size": model},
        "steps_per_print": None,
    }
    engine, *_ = mpispeed.initialize(model=pipeline(pipe, model, data), config=config)
    rows = SAMPLES // MICRO // data
    own = slice(engine.mesh.index("data") * rows, (engine.mesh.index("data") + 1) * rows)
    losses = [float(engine.train_batch(iter([(ids[own], ids[own]) for ids in step]))) for step in batches()]
    engine.destroy()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference()), rtol=1e-5, atol=0)
