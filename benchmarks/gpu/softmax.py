"""Softmax of attention scores: bytes moved a second as part of a copy's, and torch's time over ours.

    python benchmarks/gpu/softmax.py

A batch of about 2^28 scores, masked by [batch, 1, 1, keys] and causal, forward and backward, in turns with
`torch.softmax(scores * scale + mask)`. Only the work of the device counts.
"""

from __future__ import annotations

from typing import Any

import torch
from timing import copy_bandwidth, interleaved, need_gpu, parser_of, write_results

from mpispeed.native import softmax
from mpispeed.native.cuda import philox

TARGET, HEADS, COUNT = 0.85, 16, 2**28


def measure(dtype: torch.dtype, keys: int, kind: str, bandwidth: float, rounds: int) -> dict[str, Any]:
    """Seconds and fractions of one kind of softmax."""
    is_causal, ratio = kind == "causal", 0.1 if kind == "dropout" else 0.0
    x = torch.randn(max(1, COUNT // (HEADS * keys * keys)), HEADS, keys, keys, device="cuda").to(dtype)
    mask = torch.zeros(x.shape[0], 1, 1, keys, device="cuda", dtype=dtype)
    upper = torch.full((x.shape[-2], keys), float("-inf"), device="cuda", dtype=dtype).triu(1 + keys - x.shape[-2])
    mask = None if is_causal else mask
    seed = philox.draw_seed(x)
    left, probs = softmax.run_softmax(x, mask, seed, 0.125, is_causal, ratio)
    probs = probs if ratio else left
    calls = {
        "forward": lambda: softmax.run_softmax(x, mask, seed, 0.125, is_causal, ratio),
        "backward": lambda: softmax.run_softmax_backward(x, probs, seed, 0.125, is_causal, ratio),
        "torch forward": lambda: torch.softmax(x * 0.125 + (upper if mask is None else mask), -1),
        "torch backward": lambda: torch.ops.aten._softmax_backward_data(x, probs, -1, x.dtype) * 0.125,
    }
    seconds = interleaved(calls, rounds, is_device_only=True)
    whole = x.numel() * x.element_size()
    read = whole * (keys + 1) / (2 * keys) if is_causal else whole
    moved = {"forward": read + whole * (2 if ratio else 1), "backward": 2 * read + whole}
    fractions = {name: moved[name] / seconds[name] / bandwidth for name in moved}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "keys": keys,
        "kind": kind,
        "seconds": seconds,
        "fraction_of_copy": fractions,
        "torch_over_ours": {name: seconds[f"torch {name}"] / seconds[name] for name in moved},
        "target": TARGET,
        "is_reached": all(value >= TARGET for value in fractions.values()),
    }


def main() -> None:
    """Measure all kinds and write the record."""
    args = parser_of(__doc__).parse_args()
    need_gpu()
    bandwidth = copy_bandwidth()
    records = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for keys in (128, 512, 2048, 8192):
            for kind in ("masked", "causal", "dropout"):
                records.append(measure(dtype, keys, kind, bandwidth, args.rounds))
                print(records[-1])
    found = {"copy_bytes_per_second": bandwidth, "softmax": records}
    print(write_results("softmax", found, options=vars(args), path=args.json))


if __name__ == "__main__":
    main()
