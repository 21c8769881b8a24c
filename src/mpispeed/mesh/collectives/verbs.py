"""The table of verbs on tensors: checks, bytes sent, label and implementations of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec

import torch

from mpispeed.base.recorder_file import Kind
from mpispeed.mesh.collectives import checks, device_collectives, host_collectives
from mpispeed.mesh.collectives.call import Call
from mpispeed.mesh.collectives.dtypes import HALF_FLOATS, check_reduction
from mpispeed.mesh.collectives.transport import Group
from mpispeed.mesh.collectives.work import Posted, nap_until

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
            flat = (checks.flat(group, args[0], name), *args[1:])
        else:
            flat = (checks.flat(group, args[0], name), checks.flat(group, args[1], name), *args[2:])
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
        body: Callable[..., Posted] = self.post_device if self.is_on_device(flat) else self.post_host
        return body(group, *flat)


def _others(group: Group, x: torch.Tensor) -> int:
    """Bytes of `x` without this rank's share."""
    return x.nbytes * (group.size - 1) // group.size


def _check_cut(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    is_widened = full.dtype in HALF_FLOATS and shard.dtype == torch.float32
    checks.cut(group, "reduce_scatter", full, shard, is_widened=is_widened)
    check_reduction(full.dtype, op, scale, f"reduce_scatter over {group}")


def _check_root(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    check_reduction(x.dtype, op, 1.0, f"reduce over {group}")
    checks.peer(group, root, "reduce")


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
    device=device_collectives.all_reduce,
    combines=lambda group, x, op, scale: check_reduction(x.dtype, op, scale, f"all_reduce over {group}"),
    label=lambda x, op, _: f"{op} of {x.numel()} {x.dtype}",
)
REDUCE: Verb[[torch.Tensor, int, str]] = Verb(
    name="reduce",
    tensors=1,
    call=lambda group, x, root, op: Call(group, "reduce", 0 if group.rank == root else x.nbytes, x, op, peer=root),
    host=host_collectives.reduce,
    device=device_collectives.reduce,
    combines=_check_root,
)
BROADCAST: Verb[[torch.Tensor, int]] = Verb(
    name="broadcast",
    tensors=1,
    call=lambda group, x, root: Call(
        group, "broadcast", x.nbytes if group.rank == root and group.size > 1 else 0, x, peer=root
    ),
    host=host_collectives.broadcast,
    device=device_collectives.broadcast,
    fits=lambda group, name, _, root: checks.peer(group, root, name),
    label=lambda x, root: f"of {x.nbytes} bytes from {root}",
)
ALL_GATHER: Verb[[torch.Tensor, torch.Tensor]] = Verb(
    name="all_gather",
    tensors=2,
    call=lambda group, out, _: Call(group, "all_gather", _others(group, out), out),
    host=host_collectives.all_gather,
    device=device_collectives.all_gather,
    fits=lambda group, _, out, shard: checks.cut(group, "all_gather", out, shard),
    label=lambda out, _: f"of {out.nbytes} bytes",
)
REDUCE_SCATTER: Verb[[torch.Tensor, torch.Tensor, str, float]] = Verb(
    name="reduce_scatter",
    tensors=2,
    call=lambda group, _, full, op, __: Call(group, "reduce_scatter", _others(group, full), full, op),
    host=host_collectives.reduce_scatter,
    device=device_collectives.reduce_scatter,
    combines=_check_cut,
    label=lambda _, full, op, __: f"{op} of {full.numel()} {full.dtype}",
)
ALL_TO_ALL: Verb[[torch.Tensor, torch.Tensor, Sequence[int] | None, Sequence[int] | None]] = Verb(
    name="all_to_all",
    tensors=2,
    call=_exchanged,
    host=host_collectives.all_to_all,
    device=device_collectives.all_to_all,
    fits=lambda group, _, out, x, out_counts, counts: checks.exchange(group, out, x, out_counts, counts),
)
GATHER: Verb[[torch.Tensor, torch.Tensor, int]] = Verb(
    name="gather",
    tensors=2,
    call=lambda group, _, shard, root: Call(
        group, "gather", 0 if group.rank == root else shard.nbytes, shard, peer=root
    ),
    host=host_collectives.gather,
    device=device_collectives.gather,
    fits=lambda group, name, out, shard, root: checks.rooted(group, name, out, shard, root),
)
SCATTER: Verb[[torch.Tensor, torch.Tensor, int]] = Verb(
    name="scatter",
    tensors=2,
    call=lambda group, shard, full, root: Call(
        group, "scatter", _others(group, full) if group.rank == root else 0, shard, peer=root
    ),
    host=host_collectives.scatter,
    device=device_collectives.scatter,
    fits=lambda group, name, shard, full, root: checks.rooted(group, name, full, shard, root),
)
SEND: Message[[torch.Tensor, int, int]] = Message(
    name="send",
    tensors=1,
    call=lambda group, x, dst, tag: Call(group, "send", x.nbytes, x, peer=dst, tag=tag, kind=Kind.SEND),
    host=host_collectives.send,
    device=device_collectives.send,
    fits=lambda group, name, _, dst, tag: checks.message(group, dst, tag, name),
    post_host=host_collectives.post_send,
    post_device=device_collectives.post_send,
)
RECV: Message[[torch.Tensor, int, int]] = Message(
    name="recv",
    tensors=1,
    call=lambda group, x, src, tag: Call(group, "recv", 0, x, peer=src, tag=tag, kind=Kind.RECV),
    host=host_collectives.recv,
    device=device_collectives.recv,
    fits=lambda group, name, _, src, tag: checks.message(group, src, tag, name),
    post_host=host_collectives.post_recv,
    post_device=device_collectives.post_recv,
)
