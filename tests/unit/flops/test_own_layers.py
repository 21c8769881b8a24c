"""Layers of ours count as the plain ones that they stand for, with and without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpispeed.base import split_grads
from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.inference import quantized
from mpispeed.inference.fused import inject_kernels
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from mpispeed.nn.tiled import TiledLinear
from tests.helpers import experts as expert_cases
from tests.helpers.tiny_models import prompts, tiny_model


def counted(model: nn.Module, run: Callable[[], Any]) -> Counts:
    counter = ModuleCounter(model)
    counter.start()
    try:
        out = run()
        if isinstance(out, Tensor) and out.requires_grad:
            out.sum().backward()
    finally:
        counter.stop()
    assert not counter.unknown
    return counter.total()


def three(counts: Counts) -> tuple[int, int, int]:
    return counts.forward, counts.backward, counts.recompute


def products(counts: Counts) -> tuple[int, int]:
    """What is the same however element-wise functions are written."""
    return counts.forward, counts.deepspeed_macs


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "bert"])
def test_fused_layers_of_models_that_answer(family: str) -> None:
    plain = tiny_model(family)
    fused = copy.deepcopy(plain)
    report = inject_kernels(fused, tensor=solo_comm(), max_out_tokens=64)
    assert len(report.layers) == 3
    with torch.no_grad():
        expected, found = (counted(model, lambda model=model: model(**prompts())) for model in (plain, fused))
    assert products(found) == products(expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoding_counts_the_tokens_in_the_cache(family: str) -> None:
    """The growing cache and the loops of few rows, against eager attention over the same tokens."""
    plain = tiny_model(family, attn_implementation="eager")
    fused = copy.deepcopy(plain)
    report = inject_kernels(fused, tensor=solo_comm(), max_out_tokens=64)
    ids, found = torch.randint(3, 90, (1, 9)), []
    for model, cache in ((plain, None), (fused, report.cache(fused, 1))):

        def decode(model: Any = model, cache: Any = cache) -> None:
            with torch.no_grad():
                out = model(ids, past_key_values=cache, use_cache=True)
                for token in (5, 6):
                    out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)

        found.append(counted(model, decode))
    assert products(found[0]) == products(found[1])


@pytest.mark.parametrize("tokens", [2, 40])
def test_quantized_layers(tokens: int) -> None:
    layer, x = nn.Linear(64, 40), torch.randn(tokens, 64)
    with torch.no_grad():
        expected = counted(layer, lambda: layer(x))
        quantized.quantize_module(layer, quantized.Format(8, 32))
        assert products(counted(layer, lambda: layer(x))) == products(expected)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("saves", [{}, {"gelu_checkpoint": True, "normalize_invertible": True}])
def test_the_transformer_layer(attention: str, saves: dict[str, bool]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "heads": 2, "num_hidden_layers": 1, "initializer_range": 0.02}
    config = TransformerConfig(attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0, attention=attention, **sizes, **saves)
    layer, x = TransformerLayer(config), torch.randn(2, 6, 16, requires_grad=True)
    found = counted(layer, lambda: layer(x, torch.zeros(2, 1, 1, 6)))
    tokens, scores = 12, 2 * 2 * 6 * 6
    macs = tokens * (4 * 16 * 16 + 2 * 16 * 32) + 2 * scores * 8
    assert three(found) == (2 * macs, 4 * macs, 0)
    assert found.deepspeed_macs == macs


@pytest.mark.parametrize("kind", expert_cases.KINDS)
def test_layers_of_experts(kind: str) -> None:
    """The products of the rows that every expert has, and the router."""
    layer, x = expert_cases.whole_layer(kind, 3, 2), torch.randn(7, expert_cases.HIDDEN, requires_grad=True)
    layer.set_expert_group(solo_comm(), None)
    counter = ModuleCounter(layer)
    counter.start()
    y, routing = layer(x)
    expert_cases.loss_of(y, routing).backward()
    counter.stop()
    matrices = 3 if kind == "swiglu" else 2
    once = 2 * 7 * 2 * expert_cases.HIDDEN * expert_cases.INNER * matrices
    assert three(counter.total("experts")) == (once, 2 * once, 0)
    gate = 2 * 7 * expert_cases.HIDDEN * 3
    assert three(counter.total("gate"))[:2] == (gate, 2 * gate)
    assert not counter.unknown


def test_tiled_layers() -> None:
    layer, x = TiledLinear(8, 12, in_splits=2, out_splits=3), torch.randn(4, 8, requires_grad=True)
    once = 2 * 4 * 8 * 12
    assert three(counted(layer, lambda: layer(x))) == (once, 2 * once, 0)


def test_weight_gradients_that_are_postponed_are_backward() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    expected = counted(model, lambda: model(x))
    undo, backlog = split_grads.split(model), split_grads.Backlog()

    def run() -> None:
        out = model(x)
        with split_grads.put_off(backlog):
            out.sum().backward()
        assert len(backlog) == 2
        backlog.work_off(lambda param, grad: None)

    assert three(counted(model, run)) == three(expected)
    undo()


def test_our_loops_are_operators_for_other_modes_too() -> None:
    """Results are the same bits under a mode that only looks on."""
    fused = tiny_model("llama")
    inject_kernels(fused, tensor=solo_comm(), max_out_tokens=64)
    with torch.no_grad():
        expected = fused(**prompts()).logits
        with FlopCounterMode(display=False):
            assert torch.equal(fused(**prompts()).logits, expected)
