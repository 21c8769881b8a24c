"""Layers that `zero.Init` has sharded, on their way to slices: full one at a time, slices sharded at once."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.sharding import sharded_param
from mpispeed.sharding.sharded_init import ShardedInit, find_init_shard

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


class InitSlices:
    """Gives layers their full parameters to be sliced, and shards the slices over the data ranks.

    A rank has at most one layer in full, with its slice, and its shards of everything else; those of a sliced layer
    go as the slice is made. Shards stay in the tier that `zero.Init` has put them in.

    Collective over: the ranks of `zero.Init` and both groups below, with the same layers in the same order.
    """

    def __init__(self, model: nn.Module, data: Comm, slices: Comm) -> None:
        """Nothing is sliced yet.

        Args:
            model: the model, before anything in it is replaced.
            data: the ranks that will have equal slices.
            slices: the ranks that will share layers.
        """
        self._data, self._slices = data, slices
        self._targets: dict[int, ShardedInit] = {}
        self._uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

    def has(self, tensor: torch.Tensor) -> bool:
        """True for tensors that `zero.Init` has not sharded."""
        return find_init_shard(tensor) is None

    def copied(self, module: nn.Module) -> nn.Module:
        """A deep copy in which parameters of `zero.Init` have random values, the same in each copy. Local."""
        generator = torch.Generator().manual_seed(3)
        memo: dict[int, Any] = {}
        for param in module.parameters():
            if not self.has(param):
                values = torch.randn(param.shape, generator=generator) / math.sqrt(
                    max(param.shape[-1:], default=1) or 1
                )
                memo[id(param)] = nn.Parameter(values.to(param.dtype), requires_grad=param.requires_grad)
        return copy.deepcopy(module, memo)

    def replaced(self, old: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        """The module of `make`, which reads the full parameters of `old`, with its parameters sharded."""
        params = {name: p for name, p in old._parameters.items() if p is not None and not self.has(p)}
        with self._full(list({id(p): p for p in params.values()}.values())):
            made = make()
        for name, param in params.items():
            part = made._parameters.get(name)
            if part is not None:
                self._shard(part, param)
        for param in params.values():
            self._uses[id(param)] -= 1
            if not self._uses[id(param)]:
                sharded_param.forget(param)
        return made

    def move(self, model: nn.Module) -> None:
        """Bring what was not sliced from all ranks of `zero.Init` to the data ranks; one parameter is full at a time.

        Raises:
            StoreError: on every rank of a group, if one could not write a shard.
        """
        for param in model.parameters():
            init_shard = find_init_shard(param)
            if init_shard is None or set(init_shard.sharded_init.ranks) <= set(self._data.ranks):
                continue
            with self._full([param]):
                values = param.detach()
            name, target = init_shard.name, self._target(init_shard.sharded_init)
            root = self._root(init_shard.sharded_init)
            sharded_param.forget(param)
            sharded_param.to_unsharded(param, values)
            target.cut_param(param, name, root)
        for target in self._targets.values():
            target.finish()

    @contextmanager
    def _full(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context in which `params` are full, with equal values on the ranks that share layers."""
        with sharded_param.opened(params, "initialize"):
            for param in params:
                init_shard = find_init_shard(param)
                if init_shard is not None and not set(self._slices.ranks) <= set(init_shard.sharded_init.ranks):
                    self._slices.broadcast(param.detach())
            yield

    def _shard(self, part: nn.Parameter, source: nn.Parameter) -> None:
        init_shard = find_init_shard(source)
        if init_shard is not None:
            owner = init_shard.sharded_init
            self._target(owner).cut_param(part, init_shard.name, self._root(owner))

    def _target(self, source: ShardedInit) -> ShardedInit:
        """What shards over the data ranks, in the tier of `source`."""
        if id(source) not in self._targets:
            self._targets[id(source)] = ShardedInit(self._data, None, source.home)
        return self._targets[id(source)]

    def _root(self, source: ShardedInit) -> int | None:
        """The data rank whose values count; None where all have the same."""
        return None if set(self._data.ranks) <= set(source.ranks) else 0
