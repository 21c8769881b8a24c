"""Verbs for user code, with the names of torch.distributed and DeepSpeed.

They work on the process-wide world started by `mpispeed.init_distributed` or `mpispeed.initialize`, take tensors of
any layout and dtype, and fill tensors in place or given ones. Ranks given to them are world ranks. `async_op=True`
returns a handle to `wait` for. All take the keywords of the comms logger: `prof=True` records a call that it would
leave out, `log_name` is the name of its row; `debug` has no effect, because the logger finds callers itself.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch

from mpispeed.base.errors import CommError
from mpispeed.compat.comm_groups import group_of, position
from mpispeed.mesh import comms_log, roll_call
from mpispeed.mesh.collectives import host_collectives, verbs
from mpispeed.mesh.collectives.transport import Poll
from mpispeed.mesh.collectives.work import Work, in_this_mode, nap_until
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import DEFAULT_TIMEOUT_SECONDS
from mpispeed.process_group import collectives, layouts
from mpispeed.process_group.reduction import Reduction, reduction_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor]


class ReduceOp(str, enum.Enum):
    """Operations of reductions; verbs take those of torch.distributed too."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


_LOGGED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type(default).__name__)
    for name, default in (("prof", False), ("log_name", ""), ("debug", ""))
]


def logged(**other_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a verb take the keywords of the comms logger, and arguments by their names in torch.

    Args:
        other_names: name in torch -> name of the parameter.
    """

    def wrap(verb: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(verb)
        def call(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> R:
            del debug
            for other, own in other_names.items():
                if other in kwargs and own not in kwargs:
                    kwargs[own] = kwargs.pop(other)
            if not prof and not log_name:
                return verb(*args, **kwargs)
            with comms_log.of_process().wishing(comms_log.Wish(prof, log_name)):
                return verb(*args, **kwargs)

        plain = inspect.signature(verb)
        call.__signature__ = plain.replace(parameters=[*plain.parameters.values(), *_LOGGED])  # type: ignore[attr-defined]
        return cast("Callable[P, R]", call)

    return wrap


# -- reductions ------------------------------------------------------------------------------------------------


@logged()
def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks in place. Collective over: `group`."""
    reduction = _reduction(op)
    body = functools.partial(collectives.all_reduce, x=tensor, reduction=reduction)
    return _call(group, async_op, "all_reduce", body, tensor, _label(tensor, reduction))


@logged()
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """As `all_reduce`. Collective over: `group`."""
    return all_reduce(tensor, op, group, async_op)


@logged()
def all_reduce_coalesced(
    tensors: Tensors,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine several tensors of all ranks in place; small ones travel together. Collective over: `group`."""
    reduction = _reduction(op)
    body = functools.partial(collectives.all_reduce_many, tensors=tensors, reduction=reduction)
    label = f"{_label(tensors[0], reduction)} and {len(tensors) - 1} more" if tensors else ""
    return _call(group, async_op, "all_reduce", body, tensors, label)


@logged()
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks on world rank `dst`; others keep theirs. Collective over: `group`."""
    root, reduction = position(group, dst), _reduction(op)
    body = functools.partial(collectives.reduce, x=tensor, root=root, reduction=reduction)
    return _call(group, async_op, "reduce", body, tensor, f"{_label(tensor, reduction)} on {dst}")


@logged()
def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the lists of all ranks tensor by tensor and keep this rank's. Collective over: `group`."""
    reduction = _reduction(op)
    body = functools.partial(collectives.reduce_scatter, out=output, inputs=input_list, reduction=reduction)
    label = _label(input_list[0], reduction) if input_list else ""
    return _call(group, async_op, "reduce_scatter", body, (output, input_list), label)


@logged(output="output_tensor", input="tensor")
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks and keep this rank's equal share. Collective over: `group`."""
    reduction = _reduction(op)
    body = functools.partial(collectives.reduce_scatter_single, out=output_tensor, full=tensor, reduction=reduction)
    return _call(group, async_op, "reduce_scatter", body, (output_tensor, tensor), _label(tensor, reduction))


@logged()
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """As `reduce_scatter_tensor`. Collective over: `group`."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


# -- moves -----------------------------------------------------------------------------------------------------


@logged()
def broadcast(
    tensor: torch.Tensor, src: int, group: Comm | ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Copy `tensor` of world rank `src` to all ranks. Collective over: `group`."""
    root = position(group, src)
    body = functools.partial(collectives.broadcast, x=tensor, root=root)
    return _call(group, async_op, "broadcast", body, tensor, f"of {tensor.nbytes} bytes from {src}")


@logged()
def all_gather(
    tensor_list: Tensors,
    tensor: torch.Tensor,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks, whose sizes may differ, into a list. Collective over: `group`."""
    body = functools.partial(collectives.all_gather, outputs=tensor_list, x=tensor)
    return _call(group, async_op, "all_gather", body, (tensor_list, tensor), _moved(tensor_list))


@logged(input_tensor="tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks into one tensor. Collective over: `group`."""
    body = functools.partial(collectives.all_gather_single, out=output_tensor, x=tensor)
    return _call(group, async_op, "all_gather", body, (output_tensor, tensor), _moved([output_tensor]))


@logged()
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """As `all_gather_into_tensor`. Collective over: `group`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@logged()
def all_gather_coalesced(
    output_tensors: Tensors,
    input_tensors: Tensors,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather several tensors of all ranks, each into one tensor. Collective over: `group`."""

    def body(comm: Comm) -> None:
        for out, x in zip(output_tensors, input_tensors, strict=True):
            collectives.all_gather_single(comm, out, x)

    if len(output_tensors) != len(input_tensors):
        msg = f"all_gather_coalesced: {len(output_tensors)} output tensors for {len(input_tensors)} input tensors"
        raise CommError(msg)
    return _call(group, async_op, "all_gather", body, (output_tensors, input_tensors), _moved(output_tensors))


@logged()
def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int = 0,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks into a list on world rank `dst`. Collective over: `group`."""
    root = position(group, dst)
    body = functools.partial(collectives.gather, outputs=gather_list or [], x=tensor, root=root)
    return _call(group, async_op, "gather", body, (tensor, gather_list), f"of {tensor.nbytes} bytes on {dst}")


@logged()
def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int = 0,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give each rank its tensor of the list on world rank `src`. Collective over: `group`."""
    root = position(group, src)
    body = functools.partial(collectives.scatter, out=tensor, inputs=scatter_list or [], root=root)
    return _call(group, async_op, "scatter", body, (tensor, scatter_list), f"of {tensor.nbytes} bytes from {src}")


@logged(input="tensor")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange parts along the first dim; split sizes count its rows. Collective over: `group`."""
    splits = list(output_split_sizes or []), list(input_split_sizes or [])
    body = functools.partial(
        collectives.all_to_all_single, out=output, x=tensor, out_splits=splits[0], splits=splits[1]
    )
    return _call(group, async_op, "all_to_all", body, (output, tensor))


@logged()
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Comm | ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the j-th tensor of a list to rank j; sizes may differ. Collective over: `group`."""
    body = functools.partial(collectives.all_to_all, outputs=output_tensor_list, inputs=input_tensor_list)
    return _call(group, async_op, "all_to_all", body, (output_tensor_list, input_tensor_list))


# -- objects ---------------------------------------------------------------------------------------------------


@logged()
def broadcast_object_list(
    object_list: list[Any], src: int, group: Comm | ProcessGroup | None = None, device: object = None
) -> None:
    """Replace the Python objects of a list by those of world rank `src`; `device` has no effect.

    Collective over: `group`, with lists of one length.
    """
    del device
    comm, root = group_of(group), position(group, src)
    found = comm.share(list(object_list) if comm.rank == root else None, root)
    if len(found) != len(object_list):
        msg = f"broadcast_object_list: rank {src} sent {len(found)} objects for {len(object_list)} places here"
        raise CommError(msg)
    object_list[:] = found


@logged()
def all_gather_object(object_list: list[Any], obj: Any, group: Comm | ProcessGroup | None = None) -> None:
    """Fill a list with a Python object of each rank. Collective over: `group`."""
    found = group_of(group).gather_objects(obj)
    if len(found) != len(object_list):
        msg = f"all_gather_object: the list has {len(object_list)} places for {len(found)} ranks"
        raise CommError(msg)
    object_list[:] = found


# -- messages; all travel on the group of started verbs, so that any send meets any receive ----------------------


@logged()
def send(tensor: torch.Tensor, dst: int, group: Comm | ProcessGroup | None = None, tag: int = 0) -> None:
    """Send `tensor` to world rank `dst`, which calls `recv` or `irecv`."""
    verbs.SEND.meet(group_of(group).started.group, layouts.plain(tensor.detach()), position(group, dst), tag)


@logged()
def recv(tensor: torch.Tensor, src: int | None = None, group: Comm | ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive `tensor` from world rank `src`, or from whichever sends one first; return the world rank it is from."""
    comm, target = group_of(group), tensor.detach()
    if src is not None:
        with layouts.filled(target) as flat:
            verbs.RECV.meet(comm.started.group, flat, position(group, src), tag)
        return src
    host = _received(target)
    poll, found = _post_recv_any(comm, host, tag)
    nap_until(poll)
    if host is not target:
        target.copy_(host)
    return comm.ranks[found[0]]


@logged()
def isend(tensor: torch.Tensor, dst: int, group: Comm | ProcessGroup | None = None, tag: int = 0) -> Work:
    """Post a send to world rank `dst`, which calls `recv` or `irecv`."""
    return group_of(group).start_send(layouts.plain(tensor.detach()), position(group, dst), tag)


@logged()
def irecv(tensor: torch.Tensor, src: int | None = None, group: Comm | ProcessGroup | None = None, tag: int = 0) -> Work:
    """Post a receive from world rank `src`, or from whichever sends one first."""
    comm, target = group_of(group), tensor.detach()
    if src is None:
        flat = _received(target)
        poll, _ = _post_recv_any(comm, flat, tag)
        work = Work("recv", (target, flat), lambda work: work.finish() if poll() else None)
    else:
        is_plain = layouts.is_plain(target)
        flat = target if is_plain else torch.empty(target.shape, dtype=target.dtype, device=target.device)
        work = comm.start_recv(flat, position(group, src), tag)
    if flat is not target:
        bring = work.bring
        work.bring = in_this_mode(lambda: (bring is not None and bring(), target.copy_(flat)))
    return work


# -- meetings --------------------------------------------------------------------------------------------------


@logged()
def barrier(group: Comm | ProcessGroup | None = None, async_op: bool = False, device_ids: object = None) -> Work | None:
    """Wait until all ranks have called this; `device_ids` has no effect. Collective over: `group`."""
    del device_ids
    return _call(group, async_op, "barrier", lambda comm: comm.barrier(), None)


@logged()
def monitored_barrier(
    group: Comm | ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks have called this; an error names those that have not.

    Args:
        group: over which ranks.
        timeout: in seconds or as a timedelta; by default that of the group.
        wait_all_ranks: no effect: all missing ranks are named.

    Collective over: `group`.

    Raises:
        CommError: ranks did not come in time; on all ranks that came.
    """
    del wait_all_ranks
    comm = group_of(group)
    if timeout is None:
        timeout = comm.group.limits.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        msg = f"monitored_barrier(timeout={timeout!r}): give a datetime.timedelta or seconds, above 0"
        raise CommError(msg)
    roll_call.monitored_barrier(comm, seconds)


# -- parts -----------------------------------------------------------------------------------------------------


def _call(
    group: Any, async_op: bool, verb: str, body: Callable[[Comm], object], buffers: object, label: str = ""
) -> Work | None:
    """Carry `body` out, now or in its turn. Collective over: `group`."""
    comm = group_of(group)
    if not async_op:
        with torch.no_grad():
            body(comm)
        return None
    comms = comms_log.of_process()
    wish = comms.wish

    def wishing(started: Comm) -> None:
        with comms.wishing(wish):
            body(started)

    return comm.start(body if wish is comms_log.NO_WISH else wishing, verb, buffers, label)


def _reduction(op: Any) -> Reduction:
    return Reduction(str(getattr(op, "value", op))) if isinstance(op, str) else reduction_of(op)


def _label(x: torch.Tensor, reduction: Reduction) -> str:
    return f"{reduction.op} of {x.numel()} {x.dtype}"


def _moved(tensors: Tensors) -> str:
    return f"of {sum(x.nbytes for x in tensors)} bytes"


def _post_recv_any(comm: Comm, flat: torch.Tensor, tag: int) -> tuple[Poll, list[int]]:
    """Post a receive from any rank; a poll, and where the position of that rank will be."""
    verbs.check_tag(comm.group, tag, "recv")
    group, found, polls = comm.started.group, list[int](), list[Poll]()
    # The first piece tells the rank, from which the others come.
    first, *rest = host_collectives.pieces(flat.view(-1), group.limits.chunk_bytes)
    source = group.transport.post_recv_any(first, tag)

    def poll() -> bool:
        if not found:
            rank = source()
            if rank is None:
                return False
            found.append(rank)
            polls.extend(group.transport.post_recv(piece, rank, tag) for piece in rest)
        while polls and polls[0]():
            polls.pop(0)
        return not polls

    return poll, found


def _received(target: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in host memory to receive in: `target` itself if it is one."""
    return target if target.is_cpu and layouts.is_plain(target) else torch.empty(target.shape, dtype=target.dtype)
