"""Attention of a sequence that ranks share, beside dense attention of one process in fp64."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpispeed.nn.sequence import Layout, Running, SequenceGroup, attention

ROWS, WIDTH = 2, 8
KINDS = ("ulysses", "ring", "two levels")
DOCUMENTS = ("one", "packed", "padded")


def ring_size(kind: str, size: int) -> int:
    """The outer factor; two levels need four ranks, below that and on three they are a ring."""
    return {"ulysses": 1, "ring": size, "two levels": 2 if size % 2 == 0 else size}[kind]


def spans_of(documents: str, length: int) -> Any:
    """Documents of each row."""
    first = max(length // 3, 1)
    if documents == "packed":
        return (((0, first), (first, length)), ((0, length),))
    return (((0, length - 1),), ((1, length),)) if documents == "padded" else None


def inputs(length: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Whole q, k, v and gradient of the output, equal on all ranks; some have other strides than they seem."""
    maker = torch.Generator().manual_seed(length * 100 + heads)
    shapes = [(ROWS, length, each, WIDTH) for each in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=maker).to(dtype).transpose(1, 2) for shape in shapes]


def dense(tensors: list[torch.Tensor], causal: bool, spans: Any, scale: float | None = None) -> list[torch.Tensor]:
    """Output and gradients of q, k, v by a mask of all pairs, in fp64."""
    q, k, v, grad = (x.detach().double().requires_grad_() for x in tensors)
    length = q.shape[2]
    allowed = torch.zeros(ROWS, length, length, dtype=torch.bool)
    for row, documents in enumerate(spans or [((0, length),)] * ROWS):
        for start, end in documents:
            allowed[row, start:end, start:end] = True
    if causal:
        allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    k_all, v_all = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k_all.mT * (WIDTH**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~allowed[:, None], -1e300).softmax(-1) * allowed.any(-1)[:, None, :, None]
    out = weights @ v_all
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def running_of(comm: Any, kind: str, length: int, spans: Any = None, *, causal: bool = True) -> Running:
    """The cut of this rank; a pure ring is the group itself, with its progress thread if it has one.

    Collective over: the group.
    """
    group = SequenceGroup.split(comm, ring_size(kind, comm.size))
    if kind == "ring":
        group = SequenceGroup(comm, group.ulysses, comm)
    return Running(group, Layout(length, group.ulysses.size, group.ring.size, spans), causal)


def shared(
    tensors: list[torch.Tensor], running: Running, attend: Any = attention, **options: Any
) -> list[torch.Tensor]:
    """This rank's output and gradients of q, k, v. Collective over: the group."""
    q, k, v, grad = (running.layout.cut(x, running.rank, 2).requires_grad_() for x in tensors)
    out = attention(q, k, v, running=running, **options)
    out.backward(grad.detach())
    return [out.detach(), q.grad, k.grad, v.grad]


class Living(TorchDispatchMode):
    """Bytes of tensors that were made inside and live: now and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        old = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and self._key(x) not in self._known | old:
                self._add(x.untyped_storage())
        return found

    @staticmethod
    def _key(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)
