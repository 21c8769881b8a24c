"""The attention core on a GPU: blocks, documents and a ring's steps beside dense attention, forward and backward.

    python benchmarks/gpu/attention.py

bf16, 8 heads of 64 elements. Seconds with the host's part and of the device alone. Block-sparse layouts are causal,
with one block of 8 below the diagonal, computed as `attend_blocks` does (by torch's compiled flex_attention where that
serves) and by tiles with gathered keys; their peer is torch's dense causal attention. Documents and a ring's steps do a
known share of the work of the whole, so the rate of pairs beside that of the whole sequence in one call shows what
pieces cost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timing import interleaved, need_gpu, parser_of, write_results
from torch import Tensor
from torch.nn import functional

from mpispeed.nn.attention import BlockList, Piece, attend, attend_blocks, flex, pieces_of

HEADS, WIDTH, SHARE = 8, 64, 8
SHAPES = ((8192, 16), (8192, 64), (8192, 128), (32768, 64), (32768, 128))
"""Tokens, and tokens of a block."""
GATHERED_FROM = 64  # smaller blocks take the other way too long to be timed along
RING = 4
HOST_SECONDS = 20e-3  # at most, of one call

Tensors = tuple[Tensor, Tensor, Tensor]


def tensors_of(length: int) -> tuple[Tensors, Tensor]:
    """q, k, v and a gradient."""
    q, k, v, grad = (torch.randn(1, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


def both(attention: Callable[..., Tensor], leaves: Tensors, grad: Tensor) -> Callable[[], object]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call takes beside what is there."""
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measured(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Seconds, those of the device alone, and bytes."""
    return {
        "seconds": interleaved(calls, rounds),
        "device_seconds": interleaved(calls, rounds, is_device_only=True, enqueue_seconds=HOST_SECONDS),
        "bytes": {name: peak(call) for name, call in calls.items()},
    }


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's causal attention, by its best kernel."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def listed(q: Tensor, k: Tensor, v: Tensor, part: slice, pieces: Sequence[Piece]) -> Tensor:
    """Some queries, by a list of pieces."""
    return attend(q[:, :, part], k, v, pieces)


def layout_of(blocks: int) -> Tensor:
    """The diagonal, and of the blocks below it one in 8 of each row, another choice in each row."""
    kept = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).argsort(1) < -(-blocks // SHARE)
    return (kept | torch.eye(blocks, dtype=torch.bool)).tril().unsqueeze(0)


def gathered(q: Tensor, k: Tensor, v: Tensor, blocks: BlockList) -> Tensor:
    """By tiles with gathered keys, whatever is served else."""
    flex.IS_WANTED = False
    try:
        return attend_blocks(q, k, v, blocks, is_causal=True)
    finally:
        flex.IS_WANTED = True


def sparse(length: int, block: int, rounds: int) -> dict[str, Any]:
    """One layout, whether the compiled kernel serves it, and how far the two ways are from each other."""
    leaves, grad = tensors_of(length)
    layout = layout_of(length // block)
    blocks = BlockList.of(layout, block)
    began = time.perf_counter()
    found, other = attend_blocks(*leaves, blocks, is_causal=True), gathered(*leaves, blocks)
    is_compiled = "_AttendBlocks" not in type(found.grad_fn).__name__
    grads = [torch.autograd.grad(out, leaves, grad) for out in (found, other)]
    off = [((a - b).norm() / b.norm()).item() for a, b in ((found, other), *zip(*grads, strict=True))]
    record: dict[str, Any] = {"tokens": length, "block": block, "kept": layout.sum().item() / layout.numel()}
    record |= {"is_compiled": is_compiled, "first_seconds": time.perf_counter() - began, "off_gathered": off}
    calls = {
        "ours": both(lambda q, k, v: attend_blocks(q, k, v, blocks, is_causal=True), leaves, grad),
        "dense": both(dense, leaves, grad),
    }
    if block >= GATHERED_FROM:
        calls["gathered"] = both(lambda q, k, v: gathered(q, k, v, blocks), leaves, grad)
    record |= measured(calls, rounds)
    device = record["device_seconds"]
    record["dense_over_ours"] = device["dense"] / device["ours"]
    return record


def lists(rounds: int) -> list[dict[str, Any]]:
    """Lists of pieces beside the whole sequence in one call: 16 and 64 documents, and a rank of a zigzag ring."""
    length = 32768
    leaves, grad = tensors_of(length)
    kinds: dict[str, tuple[Sequence[Piece], slice]] = {}
    for count in (16, 64):
        spans = list(itertools.pairwise(range(0, length + 1, length // count)))
        kinds[f"{count} documents"] = pieces_of([(0, length)], [(0, length)], causal=True, spans=[spans]), slice(None)
    chunk = length // (2 * RING)
    own = [(chunk, 2 * chunk), (length - 2 * chunk, length - chunk)]
    kinds[f"rank 1 of a ring of {RING}"] = pieces_of(own, [(0, length)], causal=True), slice(0, 2 * chunk)
    records = []
    for name, (pieces, part) in kinds.items():
        calls = {
            "pieces": both(partial(listed, part=part, pieces=pieces), leaves, grad[:, :, part]),
            "whole": both(dense, leaves, grad),
        }
        found = measured(calls, rounds)
        pairs = sum(
            (p.queries[1] - p.queries[0]) * (p.keys[1] - p.keys[0] + p.is_causal) / (1 + p.is_causal) for p in pieces
        )
        share = pairs / (length * (length + 1) / 2)
        rate = {key: share * found[key]["whole"] / found[key]["pieces"] for key in ("seconds", "device_seconds")}
        records.append({"list": name, "pieces": len(pieces), "share_of_pairs": share, "rate_of_whole": rate, **found})
    return records


def main() -> None:
    """Measure, print, record."""
    args = parser_of(__doc__).parse_args()
    need_gpu()
    found: dict[str, list[dict[str, Any]]] = {"sparse": [], "lists": lists(args.rounds)}
    for row in found["lists"]:
        print(row, flush=True)
    for shape in SHAPES:
        found["sparse"].append(sparse(*shape, args.rounds))
        print(found["sparse"][-1], flush=True)
    print(write_results("attention", found, options=vars(args), path=args.json))


if __name__ == "__main__":
    main()
