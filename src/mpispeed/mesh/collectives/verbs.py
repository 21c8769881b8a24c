"""The table of verbs on tensors: checks, bytes sent, label and implementations of each.

Errors of checks of buffers, counts and peers say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError
from mpispeed.base.recorder_words import Kind
from mpispeed.mesh.collectives import device_verbs, host_collectives
from mpispeed.mesh.collectives.group import Call, Group
from mpispeed.mesh.collectives.host_collectives import (
    BITWISE,
    COMPLEX,
    FLOATS,
    HALF_FLOATS,
    INTEGERS,
    OPS,
    is_own_cut,
    overlaps,
)
from mpispeed.mesh.collectives.transport import EXCHANGE_TAG, ROLL_CALL_TAG, Posted
from mpispeed.mesh.collectives.work import nap_until

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Verb(Generic[P]):
    """One verb; all functions take its arguments in the order of its method of `Comm`, tensors first.

    Attributes:
        name: name of the method.
        tensors: number of leading arguments that are tensors; `host` and its like get flat views, other functions may
            get them as given.
        call: the bytes that this rank sends to others by the ring formula, and further facts for the trace.
        host: implementation in host memory.
        device: implementation where any tensor is on a device.
        fits: checks sizes and peers, also before a start; `name` is then that of the starting method.
        combines: checks reductions, when its turn has come.
        label: compared between ranks before a started one runs.
    """

    name: str
    tensors: int
    call: Callable[Concatenate[Group, P], Call]
    host: Callable[Concatenate[Group, P], None]
    device: Callable[Concatenate[Group, P], None]
    fits: Callable[Concatenate[Group, str, P], None] | None = None
    combines: Callable[Concatenate[Group, P], None] | None = None
    label: Callable[P, str] | None = None

    def check(self, group: Group, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`args` with flat views of the tensors, if they are contiguous and fit.

        Raises:
            CommError: they do not.
        """
        if self.tensors == 1:
            flat = (flat_view(group, args[0], name), *args[1:])
        else:
            flat = (flat_view(group, args[0], name), flat_view(group, args[1], name), *args[2:])
        fits: Callable[..., None] | None = self.fits
        if fits is not None:
            fits(group, name, *flat)
        return flat

    def carry_out(self, group: Group, *args: P.args, **_: P.kwargs) -> None:
        """Check, count and do it. Collective over: `group`, but for messages."""
        flat = self.check(group, self.name, args)
        combines: Callable[..., None] | None = self.combines
        if combines is not None:
            combines(group, *flat)
        call: Callable[..., Call] = self.call
        body: Callable[..., None] = self.device if self.is_on_device(flat) else self.host
        with call(group, *flat):
            if group.transport.moves:
                body(group, *flat)

    def is_on_device(self, flat: tuple[Any, ...]) -> bool:
        """True if any of the tensors is on a device."""
        return not (flat[0].is_cpu and (self.tensors == 1 or flat[1].is_cpu))


@dataclass(frozen=True, kw_only=True)
class Message(Verb[P]):
    """A verb between two ranks. Started, it is posted at once by `post_host` or `post_device`, not queued."""

    post_host: Callable[Concatenate[Group, P], Posted]
    post_device: Callable[Concatenate[Group, P], Posted]

    def post(self, group: Group, *args: P.args, **_: P.kwargs) -> tuple[Posted, int]:
        """Check, note and post it; returns its row of the recorder too."""
        flat = self.check(group, f"start_{self.name}", args)
        call: Callable[..., Call] = self.call
        row = call(group, *flat).post()
        return self._posted(group, flat), row

    def meet(self, group: Group, *args: P.args, **_: P.kwargs) -> None:
        """Check, post and wait for it: it meets blocking calls of `meet` and what was posted over the same group."""
        flat = self.check(group, self.name, args)
        call: Callable[..., Call] = self.call
        with call(group, *flat).beside():
            posted = self._posted(group, flat)
            for poll in posted.polls:
                nap_until(poll)
        if posted.bring is not None:
            posted.bring()

    def _posted(self, group: Group, flat: tuple[Any, ...]) -> Posted:
        if not group.transport.moves:
            return Posted([], flat)
        body: Callable[..., Posted] = self.post_device if self.is_on_device(flat) else self.post_host
        return body(group, *flat)


def flat_view(group: Group, x: torch.Tensor, verb: str) -> torch.Tensor:
    """`x` as a flat view, or a CommError if it is not a contiguous tensor, with data where any is moved."""
    if not isinstance(x, torch.Tensor) or (x.is_meta and group.transport.moves) or x.layout != torch.strided:
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


def check_peer(group: Group, rank: int, verb: str, *, is_other: bool = False) -> None:
    """Refuse a rank outside the group, or this rank itself where that cannot work."""
    if not 0 <= rank < group.size or (is_other and rank == group.rank):
        hint = "a rank does not send to itself" if rank == group.rank else f"its ranks are 0..{group.size - 1}"
        msg = f"{verb} over {group} on rank {group.rank} names rank {rank}: {hint}"
        raise CommError(msg)


def check_tag(group: Group, number: int, verb: str) -> None:
    """Refuse a tag that verbs use for messages of their own, which it would meet."""
    if number in (EXCHANGE_TAG, ROLL_CALL_TAG):
        msg = f"{verb} over {group} with tag {number}, which other verbs use for messages of their own; choose another"
        raise CommError(msg)


def check_message(group: Group, rank: int, number: int, verb: str) -> None:
    """Refuse a message that cannot be sent to this rank, or with this tag."""
    check_peer(group, rank, verb, is_other=True)
    check_tag(group, number, verb)


def check_cut(group: Group, verb: str, whole: torch.Tensor, part: torch.Tensor, *, is_widened: bool = False) -> None:
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


def check_rooted(group: Group, verb: str, whole: torch.Tensor, part: torch.Tensor, root: int) -> None:
    """Refuse a root that is no member, and on it a full tensor and a shard that do not fit."""
    check_peer(group, root, verb)
    if group.rank == root:
        check_cut(group, verb, whole, part)


def check_exchange(
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


def check_reduction(dtype: torch.dtype, op: str, scale: float, where: str) -> None:
    """Refuse reductions that have no meaning.

    Raises:
        CommError: naming the dtype, the operation and what is allowed.
    """
    if op not in OPS:
        msg = f"{where}: unknown operation {op!r}; choose one of {', '.join(OPS)}"
        raise CommError(msg)
    is_real_float = dtype in FLOATS or dtype in HALF_FLOATS
    if not is_real_float and dtype not in COMPLEX and dtype not in INTEGERS and dtype != torch.bool:
        msg = f"{where}: {dtype} tensors can be moved but not reduced; convert them to bfloat16 or float32 first"
        raise CommError(msg)
    if op == "avg" and not (is_real_float or dtype in COMPLEX):
        msg = f"{where}: an average of {dtype} is not defined; use op='sum' or a floating-point tensor"
        raise CommError(msg)
    if op in BITWISE and dtype not in INTEGERS and dtype != torch.bool:
        msg = f"{where}: op={op!r} combines the bits of integers and booleans, got {dtype}"
        raise CommError(msg)
    if op in ("min", "max") and dtype in COMPLEX:
        msg = f"{where}: complex numbers have no order, so op={op!r} is not defined for {dtype}"
        raise CommError(msg)
    if scale != 1.0 and (op not in ("sum", "avg") or not (is_real_float or dtype in COMPLEX)):
        msg = f"{where}: scale={scale} needs a sum or an average of floating-point numbers, got op={op!r} of {dtype}"
        raise CommError(msg)


def _others(group: Group, x: torch.Tensor) -> int:
    """Bytes of `x` without this rank's share."""
    return x.nbytes * (group.size - 1) // group.size


def _check_sums(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    is_widened = full.dtype in HALF_FLOATS and shard.dtype == torch.float32
    check_cut(group, "reduce_scatter", full, shard, is_widened=is_widened)
    check_reduction(full.dtype, op, scale, f"reduce_scatter over {group}")


def _check_root(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    check_reduction(x.dtype, op, 1.0, f"reduce over {group}")
    check_peer(group, root, "reduce")


def _exchanged(
    group: Group, _: torch.Tensor, x: torch.Tensor, __: Sequence[int] | None, counts: Sequence[int] | None
) -> Call:
    kept = x.numel() // group.size if counts is None else counts[group.rank]
    return Call(group, "all_to_all", (x.numel() - kept) * x.itemsize, x, is_even=counts is None)


ALL_REDUCE: Verb[[torch.Tensor, str, float]] = Verb(
    name="all_reduce",
    tensors=1,
    call=lambda group, x, op, _: Call(group, "all_reduce", 2 * x.nbytes * (group.size - 1) // group.size, x, op),
    host=host_collectives.all_reduce,
    device=device_verbs.all_reduce,
    combines=lambda group, x, op, scale: check_reduction(x.dtype, op, scale, f"all_reduce over {group}"),
    label=lambda x, op, _: f"{op} of {x.numel()} {x.dtype}",
)
REDUCE: Verb[[torch.Tensor, int, str]] = Verb(
    name="reduce",
    tensors=1,
    call=lambda group, x, root, op: Call(group, "reduce", 0 if group.rank == root else x.nbytes, x, op, peer=root),
    host=host_collectives.reduce,
    device=device_verbs.reduce,
    combines=_check_root,
)
BROADCAST: Verb[[torch.Tensor, int]] = Verb(
    name="broadcast",
    tensors=1,
    call=lambda group, x, root: Call(
        group, "broadcast", x.nbytes if group.rank == root and group.size > 1 else 0, x, peer=root
    ),
    host=host_collectives.broadcast,
    device=device_verbs.broadcast,
    fits=lambda group, name, _, root: check_peer(group, root, name),
    label=lambda x, root: f"of {x.nbytes} bytes from {root}",
)
ALL_GATHER: Verb[[torch.Tensor, torch.Tensor]] = Verb(
    name="all_gather",
    tensors=2,
    call=lambda group, out, _: Call(group, "all_gather", _others(group, out), out),
    host=host_collectives.all_gather,
    device=device_verbs.all_gather,
    fits=lambda group, _, out, shard: check_cut(group, "all_gather", out, shard),
    label=lambda out, _: f"of {out.nbytes} bytes",
)
REDUCE_SCATTER: Verb[[torch.Tensor, torch.Tensor, str, float]] = Verb(
    name="reduce_scatter",
    tensors=2,
    call=lambda group, _, full, op, __: Call(group, "reduce_scatter", _others(group, full), full, op),
    host=host_collectives.reduce_scatter,
    device=device_verbs.reduce_scatter,
    combines=_check_sums,
    label=lambda _, full, op, __: f"{op} of {full.numel()} {full.dtype}",
)
ALL_TO_ALL: Verb[[torch.Tensor, torch.Tensor, Sequence[int] | None, Sequence[int] | None]] = Verb(
    name="all_to_all",
    tensors=2,
    call=_exchanged,
    host=host_collectives.all_to_all,
    device=device_verbs.all_to_all,
    fits=lambda group, _, out, x, out_counts, counts: check_exchange(group, out, x, out_counts, counts),
)
GATHER: Verb[[torch.Tensor, torch.Tensor, int]] = Verb(
    name="gather",
    tensors=2,
    call=lambda group, _, shard, root: Call(
        group, "gather", 0 if group.rank == root else shard.nbytes, shard, peer=root
    ),
    host=host_collectives.gather,
    device=device_verbs.gather,
    fits=lambda group, name, out, shard, root: check_rooted(group, name, out, shard, root),
)
SCATTER: Verb[[torch.Tensor, torch.Tensor, int]] = Verb(
    name="scatter",
    tensors=2,
    call=lambda group, shard, full, root: Call(
        group, "scatter", _others(group, full) if group.rank == root else 0, shard, peer=root
    ),
    host=host_collectives.scatter,
    device=device_verbs.scatter,
    fits=lambda group, name, shard, full, root: check_rooted(group, name, full, shard, root),
)
SEND: Message[[torch.Tensor, int, int]] = Message(
    name="send",
    tensors=1,
    call=lambda group, x, dst, tag: Call(group, "send", x.nbytes, x, peer=dst, tag=tag, kind=Kind.SEND),
    host=host_collectives.send,
    device=device_verbs.send,
    fits=lambda group, name, _, dst, tag: check_message(group, dst, tag, name),
    post_host=host_collectives.post_send,
    post_device=device_verbs.post_send,
)
RECV: Message[[torch.Tensor, int, int]] = Message(
    name="recv",
    tensors=1,
    call=lambda group, x, src, tag: Call(group, "recv", 0, x, peer=src, tag=tag, kind=Kind.RECV),
    host=host_collectives.recv,
    device=device_verbs.recv,
    fits=lambda group, name, _, src, tag: check_message(group, src, tag, name),
    post_host=host_collectives.post_recv,
    post_device=device_verbs.post_recv,
)

TABLE = (ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV, GATHER, SCATTER)
"""All verbs on tensors."""
