"""Activations counted without memory: as many bytes as the same pass makes in memory, and what cut sequences send."""

import json
from contextlib import nullcontext

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional

from mpispeed.cli.main import cli
from mpispeed.config.load import validate
from mpispeed.engine.estimate.activations import EXCHANGED, FusedAttention, Living
from mpispeed.engine.estimate.feasibility import STEP_TOKENS
from mpispeed.engine.estimate.stages import activations_at
from mpispeed.nn.sequence import Layout

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 64
FP32 = 4


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A decoder that gives its loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Choosing(nn.Module):
    """What cannot run without values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight.sum() if x.sum().item() else -self.weight.sum()


def counted(length, ranks=1, source=Decoder, **settings):
    config = validate({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, **settings}).config
    return activations_at(config, ranks, ranks, source, None, length)


def peak_on(device, length):
    """Most bytes of one pass on a device, by the same counter."""
    torch.manual_seed(1)
    model = Decoder().to(device)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with FusedAttention() if device == "meta" else nullcontext(), Living(model.parameters()) as living:
        ids = torch.zeros(2, length, dtype=torch.int64, device=device)
        model(ids, ids).backward()
    return living.peak


def test_as_many_bytes_are_counted_as_the_pass_makes_in_memory():
    assert counted(96).peak_bytes == peak_on("meta", 96) == peak_on("cpu", 96)


def test_bytes_grow_as_the_length_where_scores_are_not_kept():
    short, twice, long = (counted(length).kept_bytes for length in (512, 1024, 2048))
    assert long - twice == 2 * (twice - short)
    assert counted(512).layer_bytes * LAYERS < short


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("length", [256, 251])
def test_a_rank_of_a_shared_sequence_sends_what_the_formulas_say(ring, length):
    found = counted(length, 4, sequence_parallel_size=4, sequence_parallel={"ring_size": ring})
    assert not found.refusal
    assert {row.what for row in found.sent} == {EXCHANGED}
    layout, ulysses = Layout(length, 4 // ring, ring), 4 // ring
    sent = {row.verb: row.bytes for row in found.sent}
    rows, head = 2, WIDTH // HEADS
    if ulysses > 1:
        # of q, k, v the heads of the others leave, of the output the tokens of the others, and backward the reverse
        own = HEADS // ulysses
        tokens = layout.ulysses_counts(0)
        leaves = 3 * (HEADS - own) * tokens[0] + own * (sum(tokens) - tokens[0])
        returns = 3 * own * (sum(tokens) - tokens[0]) + (HEADS - own) * tokens[0]
        assert sent.pop("all_to_all") == LAYERS * FP32 * rows * head * (leaves + returns)
    if ring > 1:
        counts = [layout.ring_count(place) for place in range(ring)]
        passed = sum(counts) - counts[1]  # all blocks but that of the next place go through this one
        token = LAYERS * FP32 * 2 * rows * head * HEADS // ulysses
        assert sent.pop("send") == token * (2 * passed + sum(counts) - counts[0])
    assert not sent


def test_a_rank_of_four_needs_for_a_shared_sequence_what_one_needs_for_a_quarter():
    alone = counted(512).peak_bytes
    for ring in (1, 2, 4):
        shared = counted(2048, 4, sequence_parallel_size=4, sequence_parallel={"ring_size": ring}).peak_bytes
        assert shared < 1.1 * alone


def test_a_model_that_needs_values_is_not_counted():
    found = counted(64, source=Choosing)
    assert found.peak_bytes == 0
    assert "the model cannot run on token ids without values: RuntimeError" in found.refusal


def asked(tmp_path, model, *words):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}))
    return CliRunner().invoke(cli, ["plan", str(config), "-n", "2", "--model", f"{__name__}:{model}", *words])


def test_the_longest_sequence_fits_and_the_next_does_not(tmp_path):
    memory = ("--memory", "64MiB")
    answer = json.loads(asked(tmp_path, "Decoder", *memory, "--longest-sequence", "--json").stdout)
    longest = answer["longest_sequence"]
    assert answer["go"]
    assert longest % STEP_TOKENS == 0
    more = asked(tmp_path, "Decoder", *memory, "--sequence-length", str(longest + STEP_TOKENS), "--json")
    assert more.exit_code == 1, more.output
    text = asked(tmp_path, "Decoder", *memory, "--longest-sequence").stdout
    assert f"longest sequence that fits: {longest} tokens" in text
    assert "activations of a micro-batch, at most" in text
    assert "no sequence fits" in asked(tmp_path, "Decoder", "--memory", "64KiB", "--longest-sequence").stdout


def test_the_longest_sequence_of_a_model_that_cannot_be_counted_is_refused(tmp_path):
    done = asked(tmp_path, "Choosing", "--memory", "64MiB", "--longest-sequence")
    assert done.exit_code == 2
    assert "the longest sequence that fits is not known" in done.output
