"""A process group that lets another backend carry tensors of accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mpispeed.process_group.group import MpiProcessGroup

_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Verbs by the name that older versions of torch know them by."""

_SUMS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
_MOVES = (
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
)


class MixedProcessGroup(MpiProcessGroup):
    """Tensors of the CPU go over MPI; those of `options.device_types` over a group of `options.device`.

    That group has the same ranks and is made at the first tensor that it carries. Sums in a fixed order stay with MPI.
    """

    _other: Any = None

    def takes(self, verb: str, args: tuple[Any, ...]) -> bool:
        """True if the other group carries a call; every rank has to come to the same answer."""
        first = None if verb in _SUMS and self.options.reduction == "ordered" else next(_tensors(args), None)
        if first is None:
            return False
        types = self.options.device_types
        return first.device.type in types if types else first.device.type != "cpu"

    def hand_over(self, verb: str, *args: Any) -> dist.Work:
        """Call a method of the other group. Collective over: this group, at the first call."""
        if self._other is None:
            self._other = dist.new_group(
                list(self.comm.ranks), backend=self.options.device, use_local_synchronization=True
            )
        made: dist.Work = getattr(self._other, verb if hasattr(self._other, verb) else _OLDER[verb])(*args)
        return made


def _routed(verb: str) -> Callable[..., dist.Work]:
    own: Callable[..., dist.Work] = getattr(MpiProcessGroup, verb)

    def route(self: MixedProcessGroup, *args: Any) -> dist.Work:
        return self.hand_over(verb, *args) if self.takes(verb, args) else own(self, *args)

    route.__doc__ = own.__doc__
    return route


for _verb in (*_SUMS, *_MOVES):
    setattr(MixedProcessGroup, _verb, _routed(_verb))
    if _verb in _OLDER:
        setattr(MixedProcessGroup, _OLDER[_verb], getattr(MixedProcessGroup, _verb))


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)
