"""Collectives of torch.distributed on the verbs of a group: lists of tensors, any layout, any dtype.

All are collective over the group. Ranks are positions in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.host_collectives import HALF_FLOATS
from mpispeed.mesh.comm import Comm
from mpispeed.process_group import layouts
from mpispeed.process_group.reduction import Reduction

JOINED_BYTES = 1 << 20
"""Tensors of a coalesced call below this size travel together."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def all_reduce(comm: Comm, x: torch.Tensor, reduction: Reduction) -> None:
    """Combine `x` of all ranks in place."""
    if x.layout != torch.strided:
        _all_reduce_sparse(comm, x, reduction)
        return
    with layouts.reducible(x) as flat:
        flat, op, scale, divisor = _prepared(comm, flat, reduction, is_own=True)
        comm.all_reduce(flat, op, scale=scale)
        if divisor != 1:
            flat.div_(divisor)


def _prepared(
    comm: Comm, x: torch.Tensor, reduction: Reduction, *, is_own: bool = False
) -> tuple[torch.Tensor, str, float, int]:
    """`x`, the operation and the factor of a verb, and a number to divide its result by.

    An average of 16 bits is one factor in fp32; other averages are divided, as torch does: the factor 1/3 rounds twice.
    Whole numbers are multiplied before: in place if `x` `is_own`.
    """
    op, factor = reduction
    if factor != 1.0 and not (x.is_floating_point() or x.is_complex()):
        if x.dtype == torch.bool or factor != int(factor):
            msg = f"PREMUL_SUM of {x.dtype} with the factor {factor}: whole numbers need a whole factor, booleans none"
            raise CommError(msg)
        # Products of unsigned numbers, which torch has only for bytes, are those of signed ones of the same bits.
        bits = x.view(_SIGNED.get(x.dtype, x.dtype))
        x = (bits.mul_(int(factor)) if is_own else bits * int(factor)).view(x.dtype)
        factor = 1.0
    if op == "avg" and x.dtype not in HALF_FLOATS and (x.is_floating_point() or x.is_complex()):
        return x, "sum", factor, comm.size
    return x, op, factor, 1


def _all_reduce_sparse(comm: Comm, x: torch.Tensor, reduction: Reduction) -> None:
    """Sum sparse tensors, such as the gradients of embeddings: each rank's entries go to all others."""
    if x.layout != torch.sparse_coo or reduction.op not in ("sum", "avg"):
        msg = f"all_reduce of a {x.layout} tensor with op={reduction.op!r}; sums of sparse_coo tensors are possible"
        raise CommError(msg)
    own = x.coalesce()
    counts = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(counts, torch.tensor([own._nnz()]))
    indices, values = [], []
    for root, count in enumerate(counts.tolist()):
        is_own = root == comm.rank
        index = own.indices().contiguous() if is_own else own.indices().new_empty((own.sparse_dim(), count))
        value = own.values().contiguous() if is_own else own.values().new_empty((count, *own.values().shape[1:]))
        comm.broadcast(index, root)
        comm.broadcast(value, root)
        indices.append(index)
        values.append(value)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), x.shape, check_invariants=False)
    scale = reduction.factor / (comm.size if reduction.op == "avg" else 1)
    total = total.coalesce()
    x.copy_(total if scale == 1.0 else total * scale)


def all_reduce_many(comm: Comm, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Combine each of `tensors`; small ones of one dtype travel in one message."""
    for _, found in groupby(tensors, lambda x: (x.dtype, x.device, x.nbytes < JOINED_BYTES)):
        group = list(found)
        if len(group) == 1 or group[0].nbytes >= JOINED_BYTES:
            for x in group:
                all_reduce(comm, x, reduction)
            continue
        flat = layouts.joined(group)
        all_reduce(comm, flat, reduction)
        with layouts.parts(group) as target:
            if target.data_ptr() != flat.data_ptr():
                target.copy_(flat)


def reduce(comm: Comm, x: torch.Tensor, root: int, reduction: Reduction) -> None:
    """Combine `x` of all ranks on `root`; other ranks keep theirs."""
    # A factor would round a sum of 16 bits a second time.
    is_wide = x.dtype in HALF_FLOATS and (reduction.factor != 1.0 or reduction.op == "avg")
    if comm.rank != root:
        flat = layouts.summable(x).float() if is_wide else layouts.summable(x)
        flat, op, _, _ = _prepared(comm, flat, reduction)
        comm.reduce(flat, root, op)
        return
    with layouts.reducible(x, is_wide=is_wide) as flat:
        flat, op, factor, divisor = _prepared(comm, flat, reduction, is_own=True)
        comm.reduce(flat, root, op)
        if factor != 1.0:
            flat.mul_(factor)
        if divisor != 1:
            flat.div_(divisor)


def broadcast(comm: Comm, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all ranks."""
    if comm.rank == root:
        comm.broadcast(layouts.plain(x), root)
        return
    with layouts.filled(x) as flat:
        comm.broadcast(flat, root)


def all_gather(comm: Comm, outputs: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    """Collect `x` of all ranks in a list of tensors, which may have different sizes."""
    _check_count(comm, "all_gather", outputs)
    if outputs[comm.rank].numel() != x.numel():
        msg = f"all_gather over {comm}: this rank's tensor has {x.numel()} elements, its place {_sizes(outputs)}"
        raise CommError(msg)
    if layouts.is_even(outputs):
        with layouts.parts(outputs) as out:
            comm.all_gather(out, layouts.plain(x))
        return
    outputs[comm.rank].copy_(x.reshape(outputs[comm.rank].shape))
    for root, out in enumerate(outputs):
        broadcast(comm, out, root)


def all_gather_single(comm: Comm, out: torch.Tensor, x: torch.Tensor) -> None:
    """Collect `x` of all ranks in one tensor."""
    with layouts.filled(out) as flat:
        comm.all_gather(flat, layouts.plain(x))


def gather(comm: Comm, outputs: Sequence[torch.Tensor], x: torch.Tensor, root: int) -> None:
    """Collect `x` of all ranks in a list on `root`; `outputs` of other ranks is empty."""
    if comm.rank != root:
        comm.gather(x.new_empty(0), layouts.plain(x), root)
        return
    _check_count(comm, "gather", outputs)
    with layouts.parts(outputs) as out:
        comm.gather(out, layouts.plain(x), root)


def scatter(comm: Comm, out: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """Give each rank its tensor of the list on `root`; `inputs` of other ranks is empty."""
    if comm.rank == root:
        _check_count(comm, "scatter", inputs)
    with layouts.filled(out) as flat:
        comm.scatter(flat, layouts.joined(inputs) if comm.rank == root else flat.new_empty(0), root)


def reduce_scatter(comm: Comm, out: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Combine the lists of all ranks tensor by tensor and keep this rank's; tensors may have different sizes."""
    _check_count(comm, "reduce_scatter", inputs)
    if layouts.is_even(inputs):
        reduce_scatter_single(comm, out, layouts.joined(inputs), reduction)
        return
    if inputs[comm.rank].numel() != out.numel():
        msg = f"reduce_scatter over {comm}: out has {out.numel()} elements, the inputs have {_sizes(inputs)}"
        raise CommError(msg)
    for root, x in enumerate(inputs):
        part = x.clone()
        reduce(comm, part, root, reduction)
        if root == comm.rank:
            out.copy_(part.reshape(out.shape))


def reduce_scatter_single(comm: Comm, out: torch.Tensor, full: torch.Tensor, reduction: Reduction) -> None:
    """Combine `full` of all ranks and keep this rank's equal part."""
    flat, op, scale, divisor = _prepared(comm, layouts.summable(full), reduction)
    is_direct = flat.dtype == out.dtype and layouts.is_plain(out)
    shard = out if is_direct else torch.empty(out.numel(), dtype=flat.dtype, device=flat.device)
    comm.reduce_scatter(shard, flat, op, scale=scale)
    if divisor != 1:
        shard.div_(divisor)
    if not is_direct:
        out.copy_(shard.view(out.shape))


def all_to_all(comm: Comm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Send the j-th tensor to rank j; tensors may have different sizes."""
    _check_count(comm, "all_to_all", outputs)
    _check_count(comm, "all_to_all", inputs)
    sizes = [x.numel() for x in outputs], [x.numel() for x in inputs]
    with layouts.parts(outputs) as out:
        comm.all_to_all(out, layouts.joined(inputs), *sizes)


def all_to_all_single(
    comm: Comm, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], splits: Sequence[int]
) -> None:
    """Exchange parts along the first dim; splits count its rows, and are equal where they are empty.

    Always with counts: whether a rank gives splits is its own affair.
    """
    with layouts.filled(out) as flat:
        comm.all_to_all(flat, layouts.plain(x), _elements(flat, out_splits, comm.size), _elements(x, splits, comm.size))


def _elements(x: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    row = x[:1].numel() if x.dim() else 1
    return [count * row for count in splits] if splits else [x.numel() // size] * size


def _check_count(comm: Comm, verb: str, tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) != comm.size:
        msg = f"{verb} over {comm}: the list has {len(tensors)} tensors for {comm.size} ranks"
        raise CommError(msg)


def _sizes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(x.numel()) for x in tensors)
