"""The table of torch.distributed's verbs over our groups: its rows are tests, and a table of docs/guides.

`python -m tests.helpers.torch_verbs` writes the table into the guide.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from tests.helpers import verbs
from tests.helpers.covering import IS_FULL, pairwise

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "torch-distributed.md"
BEGIN, END = "<!-- verbs: begin -->", "<!-- verbs: end -->"

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*FLOATS, *NARROW, *verbs.COMPLEX, *verbs.INTEGERS, torch.bool)
GLOO_TAKES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
"""Dtypes that gloo has to take in every verb: a comparison with it that never happens shows nothing."""

OPS = ("sum", "avg", "premul", "prod", "min", "max", "band", "bor", "bxor")
OPS_OF = {
    "floats": ("sum", "avg", "premul", "prod", "min", "max"),
    "complex numbers": ("sum", "avg", "premul"),
    "integers": ("sum", "premul", "prod", "min", "max", "band", "bor", "bxor"),
    "booleans": ("sum", "prod", "min", "max", "band", "bor", "bxor"),
}
NAMES = {
    "sum": "SUM", "avg": "AVG", "premul": "PREMUL_SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip
LAYOUTS = ("contiguous", "strided", "empty")
GROUPS = ("world", "sub-group")
FACTOR = 3.0
ROWS, COLUMNS = 3, 2

single = {
    name: getattr(dist, f"{name}_single", None) or getattr(dist, older)
    for name, older in (("all_gather", "all_gather_into_tensor"), ("reduce_scatter", "reduce_scatter_tensor"))
}
"""Functions that newer versions of torch have renamed."""


def kind_of(dtype: torch.dtype) -> str:
    """Dtypes of one kind have the same reductions."""
    if dtype == torch.bool:
        return "booleans"
    return "complex numbers" if dtype.is_complex else "floats" if dtype.is_floating_point else "integers"


def reduce_op(op: str) -> Any:
    """A reduction as torch takes it."""
    return _make_nccl_premul_sum(FACTOR) if op == "premul" else getattr(dist.ReduceOp, NAMES[op])


class Case(NamedTuple):
    """One cell of a row; `op` is "" for verbs that only move."""

    dtype: torch.dtype
    op: str
    layout: str
    group: str


class Data:
    """Tensors of a case, the same at every call: of `me` among `size` ranks, and what the others have."""

    def __init__(self, case: Case, size: int, me: int) -> None:
        self.case, self.size, self.me, self.root = case, size, me, size - 1
        self.rows = 0 if case.layout == "empty" else ROWS

    def values(self, position: int, blocks: int = 1) -> torch.Tensor:
        """Whole numbers of the rank at `position`. Shapes: [blocks * rows, columns]."""
        count = self.rows * blocks
        return verbs.values(position, count * COLUMNS, self.case.dtype).view(count, COLUMNS)

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` in the layout of the case."""
        if self.case.layout != "strided":
            return x.clone()
        wide = torch.zeros(x.shape[0], 2 * COLUMNS, dtype=x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]

    def own(self, blocks: int = 1) -> torch.Tensor:
        """This rank's values."""
        return self.laid(self.values(self.me, blocks))

    def cut(self, blocks: int | None = None) -> list[torch.Tensor]:
        """This rank's values for each rank."""
        return [self.laid(x) for x in self.values(self.me, blocks or self.size).chunk(self.size)]

    def room(self, blocks: int = 1) -> torch.Tensor:
        """A tensor to be filled."""
        return self.laid(torch.ones(blocks * self.rows, COLUMNS).to(self.case.dtype))

    def rooms(self) -> list[torch.Tensor]:
        """A tensor to be filled from each rank."""
        return [self.room() for _ in range(self.size)]

    def all(self, blocks: int = 1) -> list[torch.Tensor]:
        """The values of all ranks."""
        return [self.values(position, blocks) for position in range(self.size)]

    def combined(self, blocks: int = 1) -> torch.Tensor:
        """The reduction of the values of all ranks, computed here."""
        op, parts, dtype = self.case.op, self.all(blocks), self.case.dtype
        if op == "premul":
            total = verbs.expected("sum", [verbs.wide(x) for x in parts], FACTOR)
            return total.to(dtype) if kind_of(dtype) != "integers" else total.to(torch.int64).to(dtype)
        return verbs.expected(op, parts)

    def for_me(self) -> list[torch.Tensor]:
        """The part for this rank of each rank's values."""
        return [x.chunk(self.size)[self.me] if self.rows else x for x in self.all(self.size)]


Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Verb:
    """One row.

    Attributes:
        name: of the function of torch.distributed, or of the method of a group.
        run: carries it out on a group; returns the tensors that have results.
        wanted: the same tensors, computed here; None for ranks that get none.
        is_sum: it takes a reduction.
        clients: who calls it.
    """

    name: str
    run: Callable[[dist.ProcessGroup, Data], Tensors]
    wanted: Callable[[Data], Tensors]
    is_sum: bool
    clients: str


@functools.cache
def _pairs(is_sum: bool) -> list[Case]:
    """Every pair of values of two axes."""
    if not is_sum:
        return [Case(dtype, "", layout, group) for dtype, layout, group in pairwise(DTYPES, LAYOUTS, GROUPS)]
    found = pairwise(DTYPES, OPS, LAYOUTS, GROUPS, fits=lambda dtype, op, *_: op in OPS_OF[kind_of(dtype)])
    return [Case(*row) for row in found]


def cases(is_sum: bool, size: int) -> list[Case]:
    """Cases of a number of ranks: all on two, and each on another number in turn.

    The whole product on all numbers under MPISPEED_MATRIX=full.
    """
    found = _pairs(is_sum)
    return found if IS_FULL or size == 2 else found[(1, 3, 4).index(size) :: 3]


def _all_reduce(group: dist.ProcessGroup, data: Data) -> Tensors:
    x = data.own()
    dist.all_reduce(x, reduce_op(data.case.op), group)
    return [x]


def _all_reduce_coalesced(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = [data.own(), data.own(2)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = reduce_op(data.case.op)
    group.allreduce_coalesced(found, options).wait()
    return found


def _reduce(group: dist.ProcessGroup, data: Data) -> Tensors:
    x = data.own()
    dist.reduce(x, op=reduce_op(data.case.op), group=group, group_dst=data.root)
    return [x] if data.me == data.root else []


def _reduce_scatter(group: dist.ProcessGroup, data: Data) -> Tensors:
    out = data.room()
    dist.reduce_scatter(out, data.cut(), reduce_op(data.case.op), group)
    return [out]


def _reduce_scatter_tensor(group: dist.ProcessGroup, data: Data) -> Tensors:
    out = data.room()
    single["reduce_scatter"](out, data.own(data.size), reduce_op(data.case.op), group)
    return [out]


def _reduce_scatter_coalesced(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = [data.room(), data.room()]
    with dist._coalescing_manager(group):
        for out in found:
            single["reduce_scatter"](out, data.own(data.size), reduce_op(data.case.op), group)
    return found


def _broadcast(group: dist.ProcessGroup, data: Data) -> Tensors:
    x = data.own()
    dist.broadcast(x, group=group, group_src=data.root)
    return [x]


def _all_gather(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = data.rooms()
    dist.all_gather(found, data.own(), group)
    return found


def _all_gather_into_tensor(group: dist.ProcessGroup, data: Data) -> Tensors:
    out = data.room(data.size)
    single["all_gather"](out, data.own(), group)
    return [out]


def _all_gather_coalesced(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = [[data.room(), data.room(2)] for _ in range(data.size)]
    group.allgather_coalesced(found, [data.own(), data.own(2)]).wait()
    return [x for pair in found for x in pair]


def _all_gather_into_tensor_coalesced(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = [data.room(data.size), data.room(2 * data.size)]
    with dist._coalescing_manager(group):
        single["all_gather"](found[0], data.own(), group)
        single["all_gather"](found[1], data.own(2), group)
    return found


def _gather(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = data.rooms() if data.me == data.root else None
    dist.gather(data.own(), found, group=group, group_dst=data.root)
    return found or []


def _scatter(group: dist.ProcessGroup, data: Data) -> Tensors:
    out = data.room()
    dist.scatter(out, data.cut() if data.me == data.root else None, group=group, group_src=data.root)
    return [out]


def _all_to_all(group: dist.ProcessGroup, data: Data) -> Tensors:
    found = data.rooms()
    dist.all_to_all(found, data.cut(), group)
    return found


def _all_to_all_single(group: dist.ProcessGroup, data: Data) -> Tensors:
    out = data.room(data.size)
    dist.all_to_all_single(out, data.own(data.size), group=group)
    return [out]


def _blocks(data: Data, sender: int, receiver: int) -> int:
    """Blocks that one rank sends to another: none to some, several to others."""
    return (sender + receiver) % data.size if data.size > 1 else 1


def _all_to_all_uneven(group: dist.ProcessGroup, data: Data) -> Tensors:
    sent = [_blocks(data, data.me, other) for other in range(data.size)]
    got = [_blocks(data, other, data.me) for other in range(data.size)]
    out, x = data.room(sum(got)), data.laid(data.values(data.me).repeat(sum(sent), 1))
    splits = [[count * data.rows for count in counts] for counts in (got, sent)]
    dist.all_to_all_single(out, x, *splits, group=group)
    return [out]


def _all_to_all_uneven_wanted(data: Data) -> Tensors:
    return [torch.cat([data.values(r).repeat(_blocks(data, r, data.me), 1) for r in range(data.size)])]


def _messages(group: dist.ProcessGroup, data: Data) -> Tensors:
    if data.size == 1:
        return [data.own()]
    out, after, before = data.room(), (data.me + 1) % data.size, (data.me - 1) % data.size
    for work in (
        dist.irecv(out, group=group, group_src=before, tag=5),
        dist.isend(data.own(), group=group, group_dst=after, tag=5),
    ):
        work.wait()
    return [out]


TABLE = (
    Verb(
        "all_reduce", _all_reduce, lambda d: [d.combined()], True,
        "DistributedDataParallel, tensor parallelism, norms of gradients, torchmetrics",
    ),
    Verb(
        "all_reduce_coalesced", _all_reduce_coalesced, lambda d: [d.combined(), d.combined(2)], True,
        "functional collectives, `_coalescing_manager`",
    ),
    Verb(
        "reduce", _reduce, lambda d: [d.combined()] if d.me == d.root else [], True, "logs of losses, torchmetrics"
    ),
    Verb(
        "reduce_scatter", _reduce_scatter, lambda d: [d.combined(d.size).chunk(d.size)[d.me]], True,
        "FSDP with uneven shards, tensor parallelism",
    ),
    Verb(
        "reduce_scatter_tensor", _reduce_scatter_tensor, lambda d: [d.combined(d.size).chunk(d.size)[d.me]], True,
        "FSDP, FSDP2, sequence parallelism",
    ),
    Verb(
        "reduce_scatter_tensor_coalesced", _reduce_scatter_coalesced,
        lambda d: [d.combined(d.size).chunk(d.size)[d.me]] * 2, True, "functional collectives, `_coalescing_manager`",
    ),
    Verb(
        "broadcast", _broadcast, lambda d: [d.values(d.root)], False,
        "DistributedDataParallel, FSDP (`sync_module_states`), distributed checkpoints",
    ),
    Verb("all_gather", _all_gather, lambda d: d.all(), False, "SyncBatchNorm, torchmetrics, DTensor"),
    Verb(
        "all_gather_into_tensor", _all_gather_into_tensor, lambda d: [torch.cat(d.all())], False,
        "FSDP, FSDP2, sequence parallelism",
    ),
    Verb(
        "all_gather_coalesced", _all_gather_coalesced,
        lambda d: [x for r in range(d.size) for x in (d.values(r), d.values(r, 2))], False, "older code of RPC",
    ),
    Verb(
        "all_gather_into_tensor_coalesced", _all_gather_into_tensor_coalesced,
        lambda d: [torch.cat(d.all()), torch.cat(d.all(2))], False, "functional collectives, `_coalescing_manager`",
    ),
    Verb("gather", _gather, lambda d: d.all() if d.me == d.root else [], False, "distributed checkpoints, evaluation"),
    Verb(
        "scatter", _scatter, lambda d: [d.laid(x) for x in d.values(d.root, d.size).chunk(d.size)][d.me : d.me + 1],
        False, "DTensor, distributed checkpoints",
    ),
    Verb("all_to_all", _all_to_all, lambda d: d.for_me(), False, "context parallelism, embeddings by table"),
    Verb(
        "all_to_all_single", _all_to_all_single, lambda d: [torch.cat(d.for_me())], False,
        "expert parallelism, Ulysses",
    ),
    Verb(
        "all_to_all_single, uneven", _all_to_all_uneven, _all_to_all_uneven_wanted, False,
        "expert parallelism without padding, TorchRec",
    ),
    Verb(
        "isend, irecv", _messages, lambda d: [d.values((d.me - 1) % d.size)], False,
        "pipeline parallelism, ring attention",
    ),
)  # fmt: skip


def by_name(name: str) -> Verb:
    """The row of a verb."""
    return next(verb for verb in TABLE if verb.name == name)


def table() -> str:
    """The table as it stands in the guide."""
    lines = ["| Verb | Reductions | Called by |", "| --- | --- | --- |"]
    for verb in TABLE:
        name = ", ".join(f"`{word}`" if word != "uneven" else word for word in verb.name.split(", "))
        lines.append(f"| {name} | {'those of the dtype' if verb.is_sum else '-'} | {verb.clients} |")
    lines += ["", "| Kind | Dtypes | Reductions |", "| --- | --- | --- |"]
    for kind, ops in OPS_OF.items():
        dtypes = ", ".join(f"`{str(dtype).removeprefix('torch.')}`" for dtype in DTYPES if kind_of(dtype) == kind)
        lines.append(f"| {kind} | {dtypes} | {', '.join(NAMES[op] for op in ops)} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """The text of the guide with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    GUIDE.write_text(written(GUIDE.read_text()))

IS_GLOO_OLD = "sort_ranks" not in inspect.signature(dist.new_group).parameters
"""torch 2.8: gloo has no all_to_all of lists, and its reduce_scatter sums whatever it is asked for."""
