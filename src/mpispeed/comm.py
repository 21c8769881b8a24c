"""Communication for user code under the names they know from torch.distributed and DeepSpeed.

Works on the process-wide world that `mpispeed.init_distributed` or `mpispeed.initialize` joins.
Ranks given to verbs are world ranks, as in torch.distributed; results are in place or in a given tensor.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CommError, UsageError
from mpispeed.mesh import comms_log
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import World, current

if TYPE_CHECKING:
    from mpispeed.mesh.journal import Journal
    from mpispeed.mesh.work import Work

log = logging.getLogger(__name__)

_COMMS_KEYS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")


class ReduceOp(str, enum.Enum):
    """Operations of the reducing verbs."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "prod"
    MIN = "min"
    MAX = "max"


def is_initialized() -> bool:
    """True once this process has joined its world."""
    return current() is not None


def get_world_group() -> Comm:
    """The group of all ranks."""
    return _world().comm


def get_rank(group: Comm | None = None) -> int:
    """Position of this process in `group`, or its world rank."""
    return _group(group).rank


def get_world_size(group: Comm | None = None) -> int:
    """Number of ranks of `group`, or of the job."""
    return _group(group).size


def get_local_rank() -> int:
    """Position among the ranks of this node."""
    return _world().local_rank


def new_group(ranks: Sequence[int]) -> Comm | None:
    """A group of some world ranks; None on ranks outside it.

    Collective over: all ranks of the job.
    """
    return _world().group(ranks)


def journal() -> Journal:
    """What this process has communicated: counts, bytes and seconds per verb and axes."""
    return _world().journal


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set the comms logger; give all ranks the same.

    Args:
        deepspeed_config: a dict with the section `comms_logger`, or an object with that attribute; the others override.
        enabled: record from now on.
        prof_all: all verbs.
        prof_ops: these verbs, if not all.
        verbose: log each call at once, on rank 0.
        debug: tell rows of different callers apart.
    """
    journal, comms = _world().journal, comms_log.of_process()
    section = _comms_section(deepspeed_config)
    comms.configure(section, enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)
    comms.detach()  # what it asks of the journal may have changed
    comms.attach(journal)


def start_profiling_comms() -> None:
    """Let the comms logger record all verbs."""
    comms_log.of_process().configure(prof_all=True)


def stop_profiling_comms() -> None:
    """Let the comms logger record only the verbs that are chosen by name."""
    comms_log.of_process().configure(prof_all=False)


def start_profiling_op(op_name_list: Sequence[str]) -> None:
    """Let the comms logger record these verbs too."""
    comms_log.of_process().profile(op_name_list, is_on=True)


def stop_profiling_op(op_name_list: Sequence[str]) -> None:
    """Let the comms logger record these verbs no longer, unless it records all."""
    comms_log.of_process().profile(op_name_list, is_on=False)


def log_summary(show_straggler: bool = False) -> None:
    """Log on rank 0 what the comms logger has recorded; without it, what the journal has counted.

    With `show_straggler` a second table says how long rank 0 waited for others, and which rank came last.

    Collective over: all ranks of the job.
    """
    world, comms = _world(), comms_log.of_process()
    if not any(world.comm.library_gather_objects(comms.is_attached or bool(comms.rows()))):
        log.info("communication of rank %d\n%s", world.rank, world.journal.summary())
        return
    world.comm.library_barrier()
    log.info("communication of rank %d\n%s", world.rank, comms.table())
    if show_straggler:
        log.info("waits of rank %d for other ranks\n%s", world.rank, comms.straggler_table(world.comm))
    world.comm.library_barrier()


# -- verbs ---------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: Comm | None = None, async_op: bool = False
) -> Work | None:
    """Combine `tensor` of all ranks in place. Collective over: `group`."""
    return _call(group, async_op, "all_reduce", lambda comm: comm.all_reduce(tensor, _name(op)), tensor)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Comm | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks on world rank `dst`. Collective over: `group`."""
    root = _position(group, dst)
    return _call(group, async_op, "reduce", lambda comm: comm.reduce(tensor, root, _name(op)), tensor)


def broadcast(tensor: torch.Tensor, src: int, group: Comm | None = None, async_op: bool = False) -> Work | None:
    """Copy `tensor` of world rank `src` to all ranks. Collective over: `group`."""
    root = _position(group, src)
    return _call(group, async_op, "broadcast", lambda comm: comm.broadcast(tensor, root), tensor)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Comm | None = None, async_op: bool = False
) -> Work | None:
    """Collect the tensors of all ranks in a list of tensors of the same shape. Collective over: `group`."""
    size = get_world_size(group)
    if len(tensor_list) != size:
        msg = f"all_gather: tensor_list has {len(tensor_list)} tensors for {size} ranks"
        raise CommError(msg)

    def body(comm: Comm) -> None:
        gathered = torch.empty(size * tensor.numel(), dtype=tensor.dtype)
        comm.all_gather(gathered, tensor)
        for target, part in zip(tensor_list, gathered.chunk(size) if tensor.numel() else tensor_list, strict=True):
            target.copy_(part.view(tensor.shape))

    return _call(group, async_op, "all_gather", body, (tensor_list, tensor))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Comm | None = None, async_op: bool = False
) -> Work | None:
    """Collect the tensors of all ranks in one tensor. Collective over: `group`."""
    return _call(
        group,
        async_op,
        "all_gather",
        lambda comm: comm.all_gather(output_tensor, input_tensor),
        (output_tensor, input_tensor),
    )


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Comm | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input` of all ranks and keep this rank's equal cut. Collective over: `group`."""
    return _call(
        group, async_op, "reduce_scatter", lambda comm: comm.reduce_scatter(output, input, _name(op)), (output, input)
    )


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Comm | None = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange parts along the first dim; split sizes count its rows. Collective over: `group`."""
    row = input[:1].numel() if input.dim() else 1
    counts, out_counts = (
        None if sizes is None else [n * row for n in sizes] for sizes in (input_split_sizes, output_split_sizes)
    )
    return _call(
        group, async_op, "all_to_all", lambda comm: comm.all_to_all(output, input, out_counts, counts), (output, input)
    )


def send(tensor: torch.Tensor, dst: int, group: Comm | None = None, tag: int = 0) -> None:
    """Send `tensor` to world rank `dst`."""
    _group(group).send(tensor, _position(group, dst), tag)


def recv(tensor: torch.Tensor, src: int, group: Comm | None = None, tag: int = 0) -> int:
    """Fill `tensor` with what world rank `src` sends; returns `src`."""
    _group(group).recv(tensor, _position(group, src), tag)
    return src


def isend(tensor: torch.Tensor, dst: int, group: Comm | None = None, tag: int = 0) -> Work:
    """Post a send to world rank `dst`; it matches `irecv`, not `recv`."""
    return _group(group).start_send(tensor, _position(group, dst), tag)


def irecv(tensor: torch.Tensor, src: int, group: Comm | None = None, tag: int = 0) -> Work:
    """Post a receive from world rank `src`; it matches `isend`, not `send`."""
    return _group(group).start_recv(tensor, _position(group, src), tag)


def barrier(group: Comm | None = None, async_op: bool = False) -> Work | None:
    """Return when all ranks have come. Collective over: `group`."""
    return _call(group, async_op, "barrier", lambda comm: comm.barrier(), None)


# -- parts -----------------------------------------------------------------------------------------------------


def _world() -> World:
    world = current()
    if world is None:
        msg = "this process has not joined its world yet; call mpispeed.init_distributed() first"
        raise UsageError(msg)
    return world


def _comms_section(config: object) -> Mapping[str, object]:
    """The section `comms_logger` of a dict, or of an object that has it."""
    found = config.get("comms_logger") if isinstance(config, Mapping) else getattr(config, "comms_logger", None)
    if found is None:
        return {}
    values = found if isinstance(found, Mapping) else {name: getattr(found, name) for name in _COMMS_KEYS}
    unknown = sorted(set(values) - set(_COMMS_KEYS))
    if unknown:
        msg = f"comms_logger: unknown key {unknown[0]!r}; its keys are {', '.join(_COMMS_KEYS)}"
        raise UsageError(msg)
    return values


def _group(group: Comm | None) -> Comm:
    return _world().comm if group is None else group


def _position(group: Comm | None, rank: int) -> int:
    """Position of a world rank in `group`."""
    ranks = _group(group).ranks
    if rank not in ranks:
        msg = f"world rank {rank} is not in the group of ranks {list(ranks)[:16]}"
        raise CommError(msg)
    return ranks.index(rank)


def _name(op: ReduceOp | str) -> str:
    return op.value if isinstance(op, ReduceOp) else str(op)


def _call(group: Comm | None, async_op: bool, verb: str, body: Callable[[Comm], None], buffers: object) -> Work | None:
    comm = _group(group)
    if async_op:
        return comm.start(body, verb, buffers)
    body(comm)
    return None
