"""Parameters that are cut as soon as their module is made, so that no rank ever holds the whole model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.zero import guard
from mpispeed.zero.birth_disk import InMemory, OnDisk

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.store.cell import Cell

log = logging.getLogger(__name__)


@dataclass(eq=False)  # weak references to it end what a part takes of a swap file
class Born:
    """What is known of a parameter between its birth and the engine that takes it over."""

    birth: Birth
    name: str
    numel: int
    dtype: torch.dtype
    cell: Cell | None = None  # this rank's part; the last ranks' parts end in padding

    @property
    def shard(self) -> torch.Tensor:
        """The part: itself from memory, else a copy."""
        return torch.empty(0, dtype=self.dtype) if self.cell is None else self.cell.get()


_BORN = WeakIdKeyDictionary()
"""Parameter -> Born. Entries keep the keeper alive, and go with their parameters."""


def find_born(param: torch.Tensor) -> Born | None:
    """What is known of `param`; None if it was not born cut, or an engine has taken it over."""
    found: Born | None = _BORN.get(param)
    return found


class Birth:
    """Cuts parameters over a group of ranks, brings them together on demand, cuts them again.

    Collective over: its group, for every method that cuts or gathers.
    """

    def __init__(self, comm: Comm, dtype: torch.dtype | None, home: InMemory | OnDisk | None = None) -> None:
        """Make one.

        Args:
            comm: the group of ranks.
            dtype: what floating parameters are cast to, except fp64; None keeps them.
            home: where parts rest; in memory by default.
        """
        self.comm, self.dtype, self.home = comm, dtype, home or InMemory()
        self.is_active = False  # stray reads are answered
        self.live_elements = 0  # gathered now, without padding
        self.peak_elements = 0
        self._holds: Counter[int] = Counter()
        self._lingering: dict[int, nn.Parameter] = {}  # gathered for a stray read; may have been changed

    @property
    def group_size(self) -> int:
        """Ranks over which parameters are cut."""
        return self.comm.size

    # -- cutting -------------------------------------------------------------------------------------------------

    def cut(self, module: nn.Module) -> None:
        """Cut the parameters that belong to `module` itself and are not cut yet; values are those of the first rank."""
        for name, param in module._parameters.items():
            if param is not None and _is_uncut(param):
                _BORN[param] = Born(self, f"{type(module).__name__}.{name}", param.numel(), param.dtype)
                self._keep(param, 0)
                guard.seal(param, self, param.dtype)

    def _keep(self, param: nn.Parameter, root: int) -> None:
        """Give all ranks the values of rank `root`, and keep the own part of them."""
        born = _BORN[param]
        values = param.detach()
        if self.dtype is not None and values.is_floating_point() and values.dtype != torch.float64:
            values = values.to(self.dtype)
        if values.numel() != born.numel:
            msg = f"parameter {born.name} had {born.numel} elements when it was cut and has {values.numel()} now"
            raise UsageError(msg)
        flat = values.contiguous().view(-1)
        self._run("birth", born, lambda comm: comm.broadcast(flat, root))
        part = -(-flat.numel() // self.comm.size)
        own = flat[self.comm.rank * part : (self.comm.rank + 1) * part]
        if own.numel() < part:
            own = torch.cat([own, own.new_zeros(part - own.numel())])
        born.cell, born.dtype = self.home.keep(born, born.cell, own), flat.dtype
        if flat.data_ptr() != param.data_ptr():
            guard.unseal(param, flat.view(param.shape))

    def _run(self, verb: str, born: Born, work: Callable[[Comm], None], problem: str = "") -> None:
        """Do `work` in its turn; what this rank cannot read, or could not write before, is raised on all ranks.

        Raises:
            StoreError: on every rank, if one has a problem with its disk.
        """
        found = problem or self.home.problem
        self.comm.start(
            work, verb, label=born.name, describe=lambda: f"{verb} of {self._told(born)}", ready=lambda: found
        ).wait()

    def finish(self) -> None:
        """Tell all ranks if the disk of one has failed; does nothing where parts rest in memory.

        Collective over: the group.

        Raises:
            StoreError: on every rank, if one could not write a part.
        """
        if isinstance(self.home, OnDisk):
            self.comm.agree(not self.home.problem, self.home.problem, StoreError)

    def _told(self, born: Born) -> str:
        return f"parameter {born.name} of {born.numel} elements"

    # -- gathering -----------------------------------------------------------------------------------------------

    def gather(self, params: Sequence[nn.Parameter]) -> None:
        """Make `params` whole until `let_go`."""
        self.settle(except_for=params)
        for param in params:
            self._holds[id(param)] += 1
            if guard.is_sealed(param):
                self._unite(param)

    def _unite(self, param: nn.Parameter) -> None:
        born = _BORN[param]
        part, problem = torch.empty(0), ""
        full = torch.empty(-(-born.numel // self.comm.size) * self.comm.size, dtype=born.dtype)
        try:
            part = born.shard
        except StoreError as error:
            problem = str(error)
        box = [full, part]  # emptied below: what carries the gather out may keep its function for a while
        self._run("gather", born, lambda comm: comm.all_gather(box[0], box[1]), problem)
        box.clear()
        guard.unseal(param, full[: born.numel].view(param.shape))
        self.live_elements += born.numel
        self.peak_elements = max(self.peak_elements, self.live_elements)

    def let_go(self, params: Sequence[nn.Parameter], *, root: int | None) -> None:
        """End of `gather`; with a `root` the values of that rank are kept, otherwise those from before."""
        for param in params:
            self._holds[id(param)] -= 1
            if root is not None:
                self._keep(param, root)
            if not self._holds[id(param)]:
                del self._holds[id(param)]
                self._seal(param)

    def _seal(self, param: nn.Parameter) -> None:
        self._lingering.pop(id(param), None)
        self.live_elements -= _BORN[param].numel
        guard.seal(param, self, param.dtype)

    def settle(self, except_for: Sequence[nn.Parameter] = (), *, is_final: bool = False) -> None:
        """Cut again what stray reads have left whole, with changes that were made.

        What somebody still holds a view of stays whole, because it may be about to change, unless this `is_final`.
        """
        kept = set(map(id, except_for))
        found = [param for key, param in self._lingering.items() if key not in kept and not self._holds[key]]
        for param, is_seen in zip(found, self._seen(found), strict=True):
            if is_seen and not is_final:
                continue
            if is_seen:
                log.warning(
                    "a view of %s is still held where zero.Init ends: later changes through that view are lost",
                    self._told(_BORN[param]),
                )
            self._keep(param, 0)
            self._seal(param)

    def _seen(self, params: Sequence[nn.Parameter]) -> list[bool]:
        """Which of them somebody on any rank still looks at; when a view dies differs between ranks."""
        if not params:
            return []
        views = torch.tensor([int(_looking_at(param) > _alone()) for param in params])
        self.comm.start(lambda comm: comm.all_reduce(views, "max"), "settle", label=len(params)).wait()
        return [bool(seen) for seen in views]

    @contextmanager
    def changing(self, module: nn.Module) -> Iterator[None]:
        """The time in which parameters that belong to `module` itself may be changed; the first rank's values count."""
        params = [p for p in module._parameters.values() if p is not None and _is_of(p, self)]
        self.gather(params)
        try:
            yield
        except BaseException:
            self.let_go(params, root=None)
            raise
        self.let_go(params, root=0)

    # -- as a keeper ---------------------------------------------------------------------------------------------

    def describe(self, param: nn.Parameter) -> str:
        """For messages and `repr`."""
        born = find_born(param)
        name = born.name if born is not None else "a parameter"
        return f"{name!r} is cut over {self.comm.size} ranks by zero.Init, and no engine has it yet"

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Inside of the context, or for an engine; elsewhere ranks may not all read."""
        if not self.is_active and reader != "initialize":
            return False
        self.gather(params)
        if reader != "initialize":
            # The function may have made a view, as `param.data` does, which is changed next.
            self._lingering.update((id(param), param) for param in params)
        return True

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """That function has returned."""
        for param in params:
            self._holds[id(param)] -= 1
            if not self._holds[id(param)]:
                del self._holds[id(param)]
                if id(param) not in self._lingering:
                    self._seal(param)

    def left(self, param: nn.Parameter) -> None:
        """Another keeper has `param` now."""
        if _is_of(param, self):
            self.home.drop(_BORN.pop(param).cell)


def _is_of(param: nn.Parameter, birth: Birth) -> bool:
    born = find_born(param)
    return born is not None and born.birth is birth


def _is_uncut(param: nn.Parameter) -> bool:
    """True for an ordinary parameter that has data; those of engines stay as they are."""
    if is_lazy(param) or param.is_meta or guard.is_sealed(param) or find_born(param) is not None:
        return False
    # An engine's parameter has its keeper even where it rests whole.
    return isinstance(guard.keeper_of(param), Birth | None)


@cache
def _alone() -> int:
    """Uses of a storage that only one parameter looks at."""
    return _looking_at(nn.Parameter(torch.zeros(1)))


def _looking_at(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))
