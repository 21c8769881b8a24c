"""Experts that `zero.Init` has sharded over all ranks, on their way to the ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mpispeed.sharding import sharded_param
from mpispeed.sharding.sharded_init import ShardedInit, find_init_shard

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm

Part = Callable[[torch.Tensor], torch.Tensor]


class InitExperts:
    """Gives each rank its experts, sharded over the ranks that have the same; one parameter is full at a time.

    Shards stay in the tier that `zero.Init` has put them in. Parameters that it has not sharded are changed in place.

    Collective over: the ranks of `zero.Init`, for each method, with parameters of equal shapes in equal order.
    """

    def __init__(self, alike: Comm) -> None:
        """`alike`: the ranks that hold the same experts."""
        self._alike = alike
        self._targets: dict[int, ShardedInit] = {}

    def keep(self, param: nn.Parameter, part: Part | None) -> None:
        """Give `param` a part of its values; None: all of them."""
        init_shard = find_init_shard(param)
        if init_shard is None:
            if part is not None:
                param.grad, param.data = None, part(param.detach()).clone()
            return
        source, name = init_shard.sharded_init, init_shard.name
        with sharded_param.opened([param], "initialize"):
            values = (param.detach() if part is None else part(param.detach())).clone()
        sharded_param.forget(param)
        sharded_param.to_unsharded(param, values)
        if id(source) not in self._targets:
            self._targets[id(source)] = ShardedInit(self._alike, None, source.home)
        self._targets[id(source)].cut_param(param, name, None)

    def drop(self, param: nn.Parameter) -> None:
        """Leave `param` to other ranks; groups of an optimizer may have it: nobody trains it here."""
        param.requires_grad_(False)
        if find_init_shard(param) is not None:
            with sharded_param.opened([param], "initialize"):
                pass  # other ranks read it
            sharded_param.forget(param)

    def finish(self) -> None:
        """Raise a StoreError on all ranks that have the same experts, if one could not write a shard."""
        for target in self._targets.values():
            target.finish()
