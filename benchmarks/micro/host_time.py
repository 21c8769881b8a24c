"""Time of the host for fused operations whose launches cost nothing, beside torch's own, without a GPU.

    python benchmarks/micro/host_time.py [--rounds 40] [--json FILE]

On a GPU a call is no faster than the host can enqueue it. Here tensors have 16 elements and lie on the host, and
`cuLaunchKernel` is a function of C that counts. What is left is what a call costs in Python, in torch's autograd and
allocator, and in our packing of arguments; torch's own calls compute 16 numbers besides. Calls run in turn in every
round, and the best times of all rounds are compared. A ratio is ours by torch's; allocations are those of the forward
and backward pass together, launches too.

The layer is a BERT layer of width 8 with fused attention, beside the same of torch's modules, eager.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed._native.launch import Launch, Queue
from mpispeed.kernels import bias_dropout_residual, bias_gelu, layer_norm, masked_softmax
from mpispeed.native.cuda import launcher
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.nn.block import TransformerConfig, TransformerLayer

GOALS = {"layer norm, forward and backward": 1.25, "transformer layer": 1.2}
WIDTH, HEADS, INNER = 8, 2, 16
COUNTER = "unsigned long count; int launch(void) { count++; return 0; }\n"
Call = Callable[[], object]


class CountingLauncher:
    """Packs arguments and calls an entry point as on a device, which counts."""

    processors = 132

    def __init__(self, folder: str) -> None:
        source, library = Path(folder, "counter.c"), Path(folder, "counter.so")
        source.write_text(COUNTER)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        entry = ctypes.cast(self._library.launch, ctypes.c_void_p).value or 0
        self._queue = Queue(entry, 0, 0, _stream, 0, nullcontext, _failed)
        self.kept: dict[Any, Any] = {}

    @property
    def count(self) -> int:
        """Launches so far."""
        return ctypes.c_ulong.in_dll(self._library, "count").value

    def launch(
        self, kernel: str, grid: launcher.Size, threads: launcher.Size, *args: Any, shared_bytes: int = 0
    ) -> None:
        """As of a device."""
        self._queue.run(kernel, 1, grid, threads, shared_bytes, launcher.packed(kernel, args))

    def prepare(
        self, kernel: str, grid: launcher.Size, threads: launcher.Size, tail: bytes = b"", shared_bytes: int = 0,
        seed_at: int = -1,
    ) -> launcher.Prepared:  # fmt: skip
        """As of a device."""
        pointers = launcher.leading_pointers(kernel, tail)
        return Launch(self._queue, kernel, 1, grid, threads, shared_bytes, pointers, tail, seed_at)


def _stream(device: int) -> int:
    return 0


def _failed(kernel: str, code: int) -> NoReturn:
    raise RuntimeError(kernel, code)


class TorchLayer(nn.Module):
    """The same layer of torch's modules, norms behind, with fused attention."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inter, self.output = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.attn_norm, self.norm = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention and MLP."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.ratio)
        f = self.attn_norm(x + F.dropout(self.o(context.transpose(1, 2).reshape(x.shape)), self.ratio))
        y = self.output(F.gelu(self.inter(f), approximate="tanh"))
        return self.norm(f + F.dropout(y, self.ratio))


def fused_layer(ratio: float, is_pre: bool) -> TransformerLayer:
    """Ours of the same sizes."""
    config = TransformerConfig(
        hidden_size=WIDTH, heads=HEADS, intermediate_size=INNER, num_hidden_layers=24, initializer_range=0.02,
        attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio, pre_layer_norm=is_pre, attention="sdpa",
    )  # fmt: skip
    return TransformerLayer(config)


def both_ways(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """A forward and a backward pass; gradients are returned, so that none is added up."""
    grad = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def calls_of_faces() -> dict[str, tuple[Call, Call]]:
    """Name -> (ours, torch's)."""
    x, residual = (torch.randn(2, WIDTH, requires_grad=True) for _ in range(2))
    weight, bias = torch.ones(WIDTH, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)
    norms = [x, weight, bias]

    def theirs() -> Tensor:
        return F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)

    def drop_then_norm() -> Tensor:
        return F.layer_norm(residual + F.dropout(x + bias, 0.1), (WIDTH,), weight, bias, 1e-5)

    detached = x.detach()
    return {
        "layer norm, forward": (
            lambda: layer_norm(detached, weight.detach(), bias.detach()),
            lambda: F.layer_norm(detached, (WIDTH,), weight.detach(), bias.detach(), 1e-5),
        ),
        "layer norm, forward and backward": (
            both_ways(lambda: layer_norm(x, weight, bias), norms),
            both_ways(theirs, norms),
        ),
        "bias and GELU": (
            both_ways(lambda: bias_gelu(x, bias), [x, bias]),
            both_ways(lambda: F.gelu(x + bias, approximate="tanh"), [x, bias]),
        ),
        "bias, dropout, residual": (
            both_ways(lambda: bias_dropout_residual(x, bias, residual, 0.1), [x, bias, residual]),
            both_ways(lambda: residual + F.dropout(x + bias, 0.1), [x, bias, residual]),
        ),
        "bias, dropout, residual, norm": (
            both_ways(lambda: bias_dropout_layer_norm(x, bias, residual, weight, bias, 0.1)[1], [*norms, residual]),
            both_ways(drop_then_norm, [*norms, residual]),
        ),
        "softmax": (both_ways(lambda: masked_softmax(x), [x]), both_ways(lambda: torch.softmax(x, -1), [x])),
    }


def calls_of_layers() -> dict[str, tuple[Call, Call]]:
    """Name -> (ours, torch's)."""
    x = torch.randn(1, 2, WIDTH, requires_grad=True)
    mask = torch.zeros(1, 1, 1, 2)
    found = {}
    for ratio in (0.0, 0.1):
        theirs = TorchLayer(ratio)
        for is_pre in (False, True):
            ours = fused_layer(ratio, is_pre)
            found[f"transformer layer, {'pre' if is_pre else 'post'}, dropout {ratio}"] = tuple(
                both_ways(lambda layer=layer: layer(x, mask), [x, *layer.parameters()]) for layer in (ours, theirs)
            )
    return found


def best(calls: dict[str, tuple[Call, Call]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Best microseconds of a call of both, over all rounds of so many repeats."""
    found = {name: [float("inf")] * 2 for name in calls}
    for round_ in range(rounds + 2):
        for name, pair in calls.items():
            for which, call in enumerate(pair):
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                seconds = (time.perf_counter() - began) / repeats
                if round_ >= 2:
                    found[name][which] = min(found[name][which], 1e6 * seconds)
    return found


def allocations(call: Call) -> int:
    """Blocks of memory that torch's allocator hands out in a call."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


def main() -> None:
    """Measure all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        counting = CountingLauncher(folder)
        with launcher.standing_in(counting):
            faces, layers = calls_of_faces(), calls_of_layers()
            # Long turns are seldom left alone on a shared machine.
            times = best(faces, options.rounds, 20) | best(layers, 4 * options.rounds, 4)
            calls = faces | layers
            for name, (ours, theirs) in calls.items():
                before = counting.count
                ours()
                launches = counting.count - before
                mine, other = times[name]
                results[name] = {
                    "microseconds": mine, "torch_microseconds": other, "ratio": mine / other, "launches": launches,
                    "allocations": allocations(ours), "torch_allocations": allocations(theirs),
                }  # fmt: skip
                print(f"{name:42} {mine:7.1f} us, torch {other:7.1f}: {mine / other:.2f}; {results[name]}")
    kept = {"rounds": options.rounds, "goals": GOALS, "load_average": os.getloadavg()[0]}
    peers.write_record(options.json, "micro/host_time", kept, results)


if __name__ == "__main__":
    main()
