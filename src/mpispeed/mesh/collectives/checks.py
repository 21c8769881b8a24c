"""Checks of buffers, counts and peers, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Group


EXCHANGE_TAG, ROLL_CALL_TAG = 32000, 32767
"""Tags of messages inside one verb, and of roll calls; the second is the largest that every MPI has."""


def flat(group: Group, x: torch.Tensor, verb: str) -> torch.Tensor:
    """`x` as a flat view, or a CommError if it is not a contiguous tensor with data."""
    if not isinstance(x, torch.Tensor) or x.is_meta or x.layout != torch.strided:
        found = f"{x.layout} tensor on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        msg = f"{verb} over {group} needs a dense tensor in memory, got a {found}; copy it to the CPU first"
        raise CommError(msg)
    if not x.is_contiguous():
        msg = (
            f"{verb} over {group} needs a contiguous tensor, got shape {tuple(x.shape)} with strides {x.stride()}; "
            "call .contiguous() and copy the result back"
        )
        raise CommError(msg)
    if not x.is_cpu:
        devices.notice(x.device)  # before anything is started: what is, keeps to the order of its streams
    return x.detach().view(-1)


def peer(group: Group, rank: int, verb: str, *, is_other: bool = False) -> None:
    """Refuse a rank outside the group, or this rank itself where that cannot work."""
    if not 0 <= rank < group.size or (is_other and rank == group.rank):
        hint = "a rank does not send to itself" if rank == group.rank else f"its ranks are 0..{group.size - 1}"
        msg = f"{verb} over {group} on rank {group.rank} names rank {rank}: {hint}"
        raise CommError(msg)


def tag(group: Group, number: int, verb: str) -> None:
    """Refuse a tag that verbs use for messages of their own, which it would meet."""
    if number in (EXCHANGE_TAG, ROLL_CALL_TAG):
        msg = f"{verb} over {group} with tag {number}, which other verbs use for messages of their own; choose another"
        raise CommError(msg)


def message(group: Group, rank: int, number: int, verb: str) -> None:
    """Refuse a message that cannot be sent to this rank, or with this tag."""
    peer(group, rank, verb, is_other=True)
    tag(group, number, verb)


def cut(group: Group, verb: str, whole: torch.Tensor, part: torch.Tensor, *, is_widened: bool = False) -> None:
    """Refuse a full tensor and a shard that are not `group.size` to one, or overlap in the wrong place."""
    name, part_name = ("out" if verb in ("all_gather", "gather") else "full"), "shard"
    problem = ""
    if whole.dtype != part.dtype and not is_widened:
        problem = f"{name} is {whole.dtype} and {part_name} is {part.dtype}; they must be equal"
    elif whole.numel() != group.size * part.numel():
        problem = (
            f"{name} has {whole.numel()} elements and {part_name} {part.numel()}; "
            f"{name} needs {group.size} x {part.numel()} = {group.size * part.numel()}"
        )
    elif overlaps(whole, part) and not is_own_cut(whole, part, group.rank):
        problem = f"{part_name} overlaps {name} but is not the slice of rank {group.rank}"
    if problem:
        msg = f"{verb} over {group}: {problem}"
        raise CommError(msg)


def rooted(group: Group, verb: str, whole: torch.Tensor, part: torch.Tensor, root: int) -> None:
    """Refuse a root that is no member, and on it a full tensor and a shard that do not fit."""
    peer(group, root, verb)
    if group.rank == root:
        cut(group, verb, whole, part)


def exchange(
    group: Group,
    out: torch.Tensor,
    x: torch.Tensor,
    out_counts: Sequence[int] | None,
    counts: Sequence[int] | None,
) -> None:
    """Refuse buffers and counts of an all-to-all that do not fit."""
    problem = ""
    if out.dtype != x.dtype:
        problem = f"out is {out.dtype} and x is {x.dtype}; they must be equal"
    elif overlaps(out, x):
        problem = "out and x overlap; give two buffers"
    elif (out_counts is None) != (counts is None):
        problem = "give both counts and out_counts, or neither"
    elif counts is None or out_counts is None:
        if out.numel() != x.numel() or x.numel() % group.size:
            problem = f"x has {x.numel()} and out {out.numel()} elements; both need the same multiple of {group.size}"
    else:
        for name, tensor, given in (("out", out, out_counts), ("x", x, counts)):
            if len(given) != group.size or min(given) < 0 or sum(given) != tensor.numel():
                problem = f"the counts {list(given)} of {name} must be {group.size} that add up to {tensor.numel()}"
    if problem:
        msg = f"all_to_all over {group}: {problem}"
        raise CommError(msg)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two contiguous tensors share bytes."""
    return a.device == b.device and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def is_own_cut(whole: torch.Tensor, part: torch.Tensor, rank: int) -> bool:
    """True if `part` is the slice of `rank` in `whole`."""
    return (
        part.dtype == whole.dtype
        and part.device == whole.device
        and part.data_ptr() == whole.data_ptr() + rank * part.nbytes
    )
