"""Sharded init: parameters sharded as soon as their module is made, so that no rank ever holds the full model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.mesh.comm import text_of
from mpispeed.sharding import sharded_param
from mpispeed.sharding.init_storage import InMemory, OnDisk

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.store.stored_tensor import StoredTensor

log = logging.getLogger(__name__)


@dataclass(eq=False)  # weak references to it end what a part takes of a swap file
class InitShard:
    """This rank's shard of a parameter between sharded init and the engine that takes it over."""

    sharded_init: ShardedInit
    name: str
    numel: int
    dtype: torch.dtype
    stored: StoredTensor | None = None  # this rank's part; the last ranks' parts end in padding

    @property
    def shard(self) -> torch.Tensor:
        """The shard: itself from memory, else a copy."""
        return torch.empty(0, dtype=self.dtype) if self.stored is None else self.stored.get()


_INIT_SHARD = WeakIdKeyDictionary()
"""Parameter -> Born. Entries keep the keeper alive, and go with their parameters."""


def find_init_shard(param: torch.Tensor) -> InitShard | None:
    """The `InitShard` of `param`; None if it has none, or an engine has taken it over."""
    found: InitShard | None = _INIT_SHARD.get(param)
    return found


class ShardedInit:
    """Shards parameters over a group of ranks, unshards them on demand, reshards them.

    Collective over: its group, for every method that shards or unshards.
    """

    rests_cut = is_of_init = True

    def __init__(self, comm: Comm, dtype: torch.dtype | None, home: InMemory | OnDisk | None = None) -> None:
        """Nothing is sharded yet.

        Args:
            comm: the group of ranks.
            dtype: what floating parameters are cast to, except fp64; None keeps them.
            home: storage of shards; memory by default.
        """
        self.comm, self.dtype, self.home = comm, dtype, home or InMemory()
        self.is_active = False  # stray reads are answered
        self.live_elements = 0  # gathered now, without padding
        self.peak_elements = 0
        self._holds: Counter[int] = Counter()
        self._lingering: dict[int, nn.Parameter] = {}  # gathered for a stray read; may have been changed

    @property
    def ranks(self) -> Sequence[int]:
        """World ranks over which parameters are sharded; they have equal values of them."""
        return self.comm.ranks

    # -- sharding -------------------------------------------------------------------------------------------------

    def cut(self, module: nn.Module) -> None:
        """Shard the unsharded parameters that belong to `module` itself; values are those of the first rank."""
        for name, param in module._parameters.items():
            if param is not None and _is_uncut(param):
                self.cut_param(param, f"{type(module).__name__}.{name}", 0)

    def cut_param(self, param: nn.Parameter, name: str, root: int | None) -> None:
        """Shard an unsharded parameter; values are those of rank `root`, or equal on all ranks already (None)."""
        _INIT_SHARD[param] = InitShard(self, name, param.numel(), param.dtype)
        self._keep(param, root)
        sharded_param.to_sharded(param, param.dtype)
        sharded_param.watch(param, self)

    def _keep(self, param: nn.Parameter, root: int | None) -> None:
        """Give all ranks the values of rank `root`, if there is one, and keep this rank's shard of them."""
        init_shard = _INIT_SHARD[param]
        values = param.detach()
        if self.dtype is not None and values.is_floating_point() and values.dtype != torch.float64:
            values = values.to(self.dtype)
        if values.numel() != init_shard.numel:
            now = f"when it was sharded and has {values.numel()} now"
            msg = f"parameter {init_shard.name} had {init_shard.numel} elements {now}"
            raise UsageError(msg)
        flat = values.contiguous().view(-1)
        if root is not None:
            self._run("birth", init_shard, lambda comm: comm.broadcast(flat, root))
        part = -(-flat.numel() // self.comm.size)
        own = flat[self.comm.rank * part : (self.comm.rank + 1) * part]
        if own.numel() < part:
            own = torch.cat([own, own.new_zeros(part - own.numel())])
        init_shard.stored, init_shard.dtype = self.home.keep(init_shard, init_shard.stored, own), flat.dtype
        if flat.data_ptr() != param.data_ptr():
            sharded_param.to_unsharded(param, flat.view(param.shape))

    def _run(self, verb: str, init_shard: InitShard, work: Callable[[Comm], None], problem: str = "") -> None:
        """Do `work` in its turn; errors of this rank's reads, or of its earlier writes, are raised on all ranks.

        Raises:
            StoreError: on every rank, if one has a problem with its disk.
        """
        found = problem or self.home.problem
        self.comm.start(
            work,
            verb,
            label=init_shard.name,
            describe=lambda: f"{verb} of {self._told(init_shard)}",
            ready=lambda: found,
        ).wait()

    def finish(self) -> None:
        """Raise on all ranks if the disk of one has failed; does nothing where shards are in memory.

        Collective over: the group.

        Raises:
            StoreError: on every rank, if one could not write a shard.
        """
        if isinstance(self.home, OnDisk):
            self.comm.agree(not self.home.problem, self.home.problem, StoreError)

    def _told(self, init_shard: InitShard) -> str:
        return f"parameter {init_shard.name} of {init_shard.numel} elements"

    # -- gathering -----------------------------------------------------------------------------------------------

    def gather(self, params: Sequence[nn.Parameter]) -> None:
        """Unshard `params` until `let_go`. Collective over: the group of the shards."""
        self.settle(except_for=params)
        for param in params:
            self._holds[id(param)] += 1
            if sharded_param.is_sharded(param):
                self._unite(param)

    def _unite(self, param: nn.Parameter) -> None:
        init_shard = _INIT_SHARD[param]
        part, problem = torch.empty(0), ""
        full = torch.empty(-(-init_shard.numel // self.comm.size) * self.comm.size, dtype=init_shard.dtype)
        try:
            part = init_shard.shard
        except Exception as error:  # whatever it is: the other ranks come to the gather
            problem = text_of(error)
        box = [full, part]  # emptied below: what carries the gather out may keep its function for a while
        self._run("gather", init_shard, lambda comm: comm.all_gather(box[0], box[1]), problem)
        box.clear()
        sharded_param.to_unsharded(param, full[: init_shard.numel].view(param.shape))
        self.live_elements += init_shard.numel
        self.peak_elements = max(self.peak_elements, self.live_elements)

    def let_go(self, params: Sequence[nn.Parameter], *, root: int | None) -> None:
        """Undo `gather`; with a `root` the values of that rank are kept, otherwise those from before."""
        for param in params:
            self._holds[id(param)] -= 1
            if root is not None:
                self._keep(param, root)
            if not self._holds[id(param)]:
                del self._holds[id(param)]
                self._seal(param)

    def _seal(self, param: nn.Parameter) -> None:
        self._lingering.pop(id(param), None)
        self.live_elements -= _INIT_SHARD[param].numel
        sharded_param.to_sharded(param, param.dtype)
        sharded_param.watch(param, self)

    def settle(self, except_for: Sequence[nn.Parameter] = (), *, is_final: bool = False) -> None:
        """Reshard parameters that stray reads have left unsharded, with changes that were made.

        Parameters of which a view is still alive stay, because they may be about to change, unless this `is_final`.
        """
        kept = set(map(id, except_for))
        found = [param for key, param in self._lingering.items() if key not in kept and not self._holds[key]]
        for param, is_seen in zip(found, self._seen(found), strict=True):
            if is_seen and not is_final:
                continue
            if is_seen:
                log.warning(
                    "a view of %s is still held where zero.Init ends: later changes through that view are lost",
                    self._told(_INIT_SHARD[param]),
                )
            self._keep(param, 0)
            self._seal(param)

    def _seen(self, params: Sequence[nn.Parameter]) -> list[bool]:
        """Parameters that are still referenced on any rank; the time at which a view dies differs between ranks."""
        if not params:
            return []
        views = torch.tensor([int(_looking_at(param) > _alone()) for param in params])
        self.comm.start(lambda comm: comm.all_reduce(views, "max"), "settle", label=len(params)).wait()
        return [bool(seen) for seen in views]

    @contextmanager
    def changing(self, module: nn.Module) -> Iterator[None]:
        """Context in which parameters of `module` itself may be changed; the first rank's values count."""
        with self.edited([p for p in module._parameters.values() if p is not None and _is_of(p, self)]):
            yield

    @contextmanager
    def edited(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context in which `params` may be changed; the first rank's values count.

        Collective over: the group of the shards.
        """
        self.gather(params)
        try:
            yield
        except BaseException:
            self.let_go(params, root=None)
            raise
        self.let_go(params, root=0)

    # -- as an owner ---------------------------------------------------------------------------------------------

    def describe(self, param: nn.Parameter) -> str:
        """Name and state, for messages and `repr`."""
        init_shard = find_init_shard(param)
        name = init_shard.name if init_shard is not None else "a parameter"
        return f"{name!r} is cut over {self.comm.size} ranks by zero.Init, and no engine has it yet"

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Unshard inside of the context, or for an engine; elsewhere ranks may not all read.

        Collective over: the group of the shards, where it unshards.
        """
        if not self.is_active and reader != "initialize":
            return False
        self.gather(params)
        if reader != "initialize":
            # The function may have made a view, as `param.data` does, which is changed next.
            self._lingering.update((id(param), param) for param in params)
        return True

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Note that the torch function has returned."""
        for param in params:
            self._holds[id(param)] -= 1
            if not self._holds[id(param)]:
                del self._holds[id(param)]
                if id(param) not in self._lingering:
                    self._seal(param)

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's shard. Local."""
        return _INIT_SHARD[param].shard[: self.shard_numel(param)].clone()

    def shard_numel(self, param: nn.Parameter) -> int:
        """Elements of this rank's shard, without padding. Local."""
        numel = param.numel()
        part = -(-numel // self.comm.size)
        return max(0, min(part, numel - self.comm.rank * part))

    def second_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """None: second copies are taken by an engine."""
        return None

    def left(self, param: nn.Parameter) -> None:
        """Forget `param`, which has another owner now."""
        if _is_of(param, self):
            self.home.drop(_INIT_SHARD.pop(param).stored)


@contextmanager
def edited(param: nn.Parameter) -> Iterator[None]:
    """Context in which a parameter may be changed, also one that sharded init has; the first rank's values count.

    Collective over: the ranks of the sharded init, if it has the parameter.
    """
    init_shard = find_init_shard(param)
    with nullcontext() if init_shard is None else init_shard.sharded_init.edited([param]):
        yield


def _is_of(param: nn.Parameter, sharded_init: ShardedInit) -> bool:
    init_shard = find_init_shard(param)
    return init_shard is not None and init_shard.sharded_init is sharded_init


def _is_uncut(param: nn.Parameter) -> bool:
    """True for an ordinary parameter that has data and is common to ranks; those of engines stay as they are."""
    if is_lazy(param) or param.is_meta or distinct_over(param) > 1:
        return False
    if sharded_param.is_sharded(param) or find_init_shard(param) is not None:
        return False
    # An engine's parameter has its owner even where it is replicated.
    return isinstance(sharded_param.owner_of(param), ShardedInit | None)


@cache
def _alone() -> int:
    """References to a storage that only one parameter uses."""
    return _looking_at(nn.Parameter(torch.zeros(1)))


def _looking_at(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))
