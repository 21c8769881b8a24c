"""The fused transformer layer beside plain torch: compiled, and eager with explicit and with fused attention.

    python benchmarks/gpu/transformer_layer.py

BERT-large shape (hidden 1024, 16 heads, intermediate 4096), post-LN, dropout 0.1 and 0, fp16, 8192 tokens a batch in
sequences of 128 and 512, an additive mask. Forward and backward of one layer, in turns; ratios are peer's time over
ours. The time of the device alone, and that of the host to enqueue a call, are given apart; "ours, captured" replays
a CUDA graph of the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from timing import enqueued, interleaved, need_gpu, parser_of, write_results
from torch import Tensor, nn
from torch.nn import functional as F

from mpispeed.nn.block import TransformerConfig, TransformerLayer

HIDDEN, HEADS, INNER = 1024, 16, 4096
TARGETS = {"compiled": 1.0, "explicit": 1.5, "sdpa": 1.1}


class PlainLayer(nn.Module):
    """The same layer of torch's modules, one projection for queries, keys and values."""

    def __init__(self, ratio: float, *, is_explicit: bool) -> None:
        super().__init__()
        self.ratio, self.is_explicit = ratio, is_explicit
        self.qkv, self.o = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.inter, self.output = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.attn_norm, self.norm = nn.LayerNorm(HIDDEN, eps=1e-12), nn.LayerNorm(HIDDEN, eps=1e-12)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        """The attention with its output projection."""
        shape = (*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        if self.is_explicit:
            probs = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask, -1)
            context = F.dropout(probs, self.ratio) @ v
        else:
            context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.ratio)
        return self.o(context.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention and MLP, norms behind."""
        f = self.attn_norm(x + F.dropout(self.attend(x, mask), self.ratio))
        y = self.output(F.gelu(self.inter(f), approximate="tanh"))
        return self.norm(f + F.dropout(y, self.ratio))


def pass_of(layer: Callable[..., Tensor], parameters: list[Tensor], x: Tensor, mask: Tensor) -> Callable[[], object]:
    """A forward and a backward pass; gradients are returned, so that none is added up."""
    grad = torch.randn_like(x)
    return lambda: torch.autograd.grad(layer(x, mask), [x, *parameters], grad)


def fused(ratio: float, attention: str) -> TransformerLayer:
    """Our layer of the same shape."""
    config = TransformerConfig(
        hidden_size=HIDDEN, heads=HEADS, intermediate_size=INNER, num_hidden_layers=24, initializer_range=0.02,
        attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio, pre_layer_norm=False, attention=attention,
    )  # fmt: skip
    return TransformerLayer(config)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of the call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(length: int, tokens: int, ratio: float, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of every layer, and ratios to ours."""
    torch.compiler.reset()
    x = torch.randn(tokens // length, length, HIDDEN, device=device, dtype=torch.float16, requires_grad=True)
    mask = torch.zeros(x.shape[0], 1, 1, length, device=device, dtype=torch.float16)
    mask[..., length - length // 8 :] = -10000.0
    plain = {"sdpa": PlainLayer(ratio, is_explicit=False), "explicit": PlainLayer(ratio, is_explicit=True)}
    made: dict[str, nn.Module] = {
        "ours": fused(ratio, "auto"),
        "ours with explicit attention": fused(ratio, "explicit"),
    }
    made |= plain
    calls = {}
    for name, layer in made.items():
        layer.to(device).half()
        calls[name] = pass_of(layer, list(layer.parameters()), x, mask)
    for name, layer in plain.items():
        # Not dynamic: the second length would otherwise be timed with symbolic shapes.
        calls[f"compiled {name}"] = pass_of(torch.compile(layer, dynamic=False), list(layer.parameters()), x, mask)
    calls["ours, captured"] = captured(calls["ours"])
    seconds = interleaved(calls, rounds, repeats=5)
    device_seconds = interleaved(calls, rounds, is_device_only=True, enqueue_seconds=8e-3)
    host_seconds = enqueued(calls, rounds)
    seconds["compiled"] = min(seconds[name] for name in seconds if name.startswith("compiled"))
    ratios = {name: seconds[name] / seconds["ours"] for name in TARGETS}
    return {
        "sequence": length,
        "batch": x.shape[0],
        "dropout": ratio,
        "milliseconds": {name: 1e3 * value for name, value in seconds.items()},
        "device_milliseconds": {name: 1e3 * value for name, value in device_seconds.items()},
        "host_milliseconds": {name: 1e3 * value for name, value in host_seconds.items()},
        "ratio_to_ours": ratios,
        "targets": TARGETS,
        "are_reached": all(ratios[name] >= target for name, target in TARGETS.items()),
    }


def main() -> None:
    """Measure all shapes and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dropout", type=float, nargs="*", default=[0.1, 0.0])
    args = parser.parse_args()
    device = need_gpu()
    records = []
    for length in (128, 512):
        for ratio in args.dropout:
            records.append(measure(length, args.tokens, ratio, args.rounds, device))
            print(records[-1])
    print(write_results("transformer-layer", records, options=vars(args), path=args.json))


if __name__ == "__main__":
    main()
