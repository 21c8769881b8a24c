"""The fused transformer layer on the device, against its own references in fp64 on the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch

from mpispeed import checkpointing
from mpispeed.native.cuda import philox
from mpispeed.nn.block import TransformerConfig, TransformerLayer


def layers(hidden, heads, count, **changes):
    given = {
        "hidden_size": hidden, "heads": heads, "num_hidden_layers": count, "initializer_range": 0.02,
        "attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = TransformerConfig(**{**given, **changes})
    return torch.nn.ModuleList(TransformerLayer(config) for _ in range(count))


def loss_of(out):
    # Not the squares alone: those of a normed output are constant.
    return (out - torch.linspace(-1, 1, out.shape[-1], device=out.device)).square().sum().div(64)


def run(model, x, mask):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = x
    for layer in model:
        out = layer(out, mask)
    loss_of(out).backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def batch(device, size, length, hidden, dtype):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(size, length, hidden, generator=generator).to(device, dtype)
    mask = torch.zeros(size, 1, 1, length, device=device, dtype=dtype)
    mask[..., length - length // 4 :] = -10000.0
    return x, mask


SHAPES = [
    (8, 256, 53, 4, 3),
    (64, 160, 128, 2, 24),
    (3, 1024, 119, 16, 3),
    (7, 1024, 384, 16, 3),
    (1, 2048, 511, 32, 1),
]


@pytest.mark.parametrize("is_pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize(("size", "hidden", "length", "heads", "count"), SHAPES)
def test_16_bits_are_as_close_to_fp64_as_16_bits_are(device, is_pre, attention, size, hidden, length, heads, count):
    model = layers(hidden, heads, count, pre_layer_norm=is_pre, attention=attention).to(device).half()
    x, mask = batch(device, size, length, hidden, torch.float16)
    exact = run(copy.deepcopy(model).double(), x.double(), mask.double())
    for a, b in zip(run(model, x, mask), exact, strict=True):
        # About ten roundings of a layer, which add up like a walk, relative to the largest number. A bias of keys
        # has no influence: its gradient is rounding.
        largest = b.abs().max().clamp(min=1e-2 * exact[1].abs().max())
        assert (a.double() - b).abs().max() <= 10 * count**0.5 * 2**-10 * largest


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_dropout_repeats_in_a_checkpointed_call(device, attention):
    ratios = {"attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1}
    model = layers(256, 4, 2, attention=attention, **ratios).to(device).half()
    x, mask = batch(device, 4, 56, 256, torch.float16)
    torch.manual_seed(1)
    want = run(model, x, mask)
    wrapped = [lambda *args, layer=layer: checkpointing.checkpoint(layer, *args) for layer in model]
    model.zero_grad()
    torch.manual_seed(1)
    out = x.clone().requires_grad_()
    for call in wrapped:
        out = call(out, mask)
    loss_of(out).backward()
    assert torch.equal(out, want[0])
    for p, grad in zip(model.parameters(), want[2:], strict=True):
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.parametrize("flag", ["gelu_checkpoint", "attn_dropout_checkpoint"])
def test_flags_save_memory_of_the_device(device, flag):
    peaks = []
    for value in (False, True):
        model = layers(256, 4, 4, attention="explicit", attn_dropout_ratio=0.1, **{flag: value}).to(device).half()
        x, mask = batch(device, 8, 256, 256, torch.float16)
        out = x.requires_grad_()
        before = torch.cuda.memory_allocated()
        for layer in model:
            out = layer(out, mask)
        peaks.append(torch.cuda.memory_allocated() - before)
        del out
    saved = {"gelu_checkpoint": 8 * 256 * 1024, "attn_dropout_checkpoint": 8 * 4 * 256 * 256}[flag]
    assert peaks[0] - peaks[1] >= 4 * 2 * saved * 0.99


def test_the_compiler_takes_it_whole(device):
    model = layers(256, 4, 1).to(device).half()
    x, mask = batch(device, 4, 56, 256, torch.float16)
    compiled = torch.compile(model[0], fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), model[0](x, mask), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_a_captured_graph_gives_the_bits_of_eager_mode(device, is_pre, attention, ratio):
    """Each replay draws new seeds on the device, as eager mode does where it is asked to."""
    ratios = {"attn_dropout_ratio": ratio, "hidden_dropout_ratio": ratio}
    model = layers(256, 4, 1, attention=attention, pre_layer_norm=is_pre, **ratios).to(device).half()
    x, mask = batch(device, 4, 56, 256, torch.float16)
    x.requires_grad_()
    leaves = [x, *model.parameters()]

    def step():
        out = model[0](x, mask)
        return [out, *torch.autograd.grad(loss_of(out), leaves)]

    with philox.seeds_in_memory():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.manual_seed(5)
        wanted = [[t.detach().clone() for t in step()] for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    torch.cuda.manual_seed(5)
    for want in wanted:
        graph.replay()
        assert torch.equal(got[0], want[0])
        for a, b in zip(got[1:], want[1:], strict=True):
            # Torch's fused attention may add up gradients in any order; two roundings of the largest number.
            room = 0.0 if attention == "explicit" else 2 * 2**-10 * b.abs().max().item()
            assert (a - b).abs().max() <= room
    assert torch.equal(wanted[0][0], wanted[1][0]) == (ratio == 0)


class Stack(torch.nn.Module):
    """Layers one after the other, with one mask."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, mask):
        for layer in self.inner:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("is_pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("how", ["a layer", "layers of a model", "a whole model"])
def test_graphed_callables_give_the_bits_of_eager_mode(device, is_pre, attention, ratio, how):
    """As `torch.cuda.make_graphed_callables` captures them, forward and backward by themselves."""
    ratios = {"attn_dropout_ratio": ratio, "hidden_dropout_ratio": ratio}
    count = 1 if how == "a layer" else 3
    model = Stack(layers(256, 4, count, attention=attention, pre_layer_norm=is_pre, **ratios)).to(device).half()
    captured = copy.deepcopy(model)
    x, mask = batch(device, 4, 56, 256, torch.float16)

    def sample():
        return x.detach().clone().requires_grad_(), mask

    if how == "layers of a model":
        made = torch.cuda.make_graphed_callables(tuple(captured.inner), tuple(sample() for _ in range(count)))
        captured.inner = torch.nn.ModuleList(made)
    else:
        captured = torch.cuda.make_graphed_callables(captured, sample())

    def steps(called):
        """Output and gradients of three calls; copies, because a replay writes to the same places again."""
        found = []
        for _ in range(3):
            given, _ = sample()
            out = called(given, mask)
            grads = torch.autograd.grad(loss_of(out), [given, *called.parameters()])
            found.append([out.detach().clone(), *(grad.clone() for grad in grads)])
        return found

    with philox.seeds_in_memory():
        steps(model)
        torch.cuda.manual_seed(5)
        wanted = steps(model)
    torch.cuda.manual_seed(5)
    for got, want in zip(steps(captured), wanted, strict=True):
        assert torch.equal(got[0], want[0])
        for a, b in zip(got[1:], want[1:], strict=True):
            # Torch's fused attention may add up gradients in any order; two roundings of the largest number,
            # which the layers before pass on.
            room = 0.0 if attention == "explicit" else 4 * count * 2**-10 * b.abs().max().item()
            assert (a - b).abs().max() <= room
    assert torch.equal(wanted[0][0], wanted[1][0]) == (ratio == 0)
