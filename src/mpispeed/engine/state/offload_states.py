"""Offloading of model states to swap files on request, and their bitwise reload."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError, StoreError, UnsupportedOption, UsageError
from mpispeed.base.registry import did_you_mean
from mpispeed.base.units import format_bytes
from mpispeed.engine.build.nvme_tiers import io_options
from mpispeed.native.block_io import ALIGNMENT, BlockIO
from mpispeed.optim.foreign import Foreign
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind
from mpispeed.store.coded_tensor import CodedTensor
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import MemoryTensor
from mpispeed.store.swap import SwapFolder

if TYPE_CHECKING:
    from mpispeed.engine.build.parts import Parts
    from mpispeed.native.block_io import BlockFile
    from mpispeed.store.stored_tensor import StoredTensor

log = logging.getLogger(__name__)

DEVICES = ("cpu", "nvme", "none")
ALL = tuple(Kind.__members__.values())


class OffloadStates:
    """Frees memory between phases of training."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._absence: Absence | None = None
        self._tried_roots: set[str] = set()  # folders that passed the preflight

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str | Path | None = None,
    ) -> None:
        """Move model states out of memory until `reload_states`; calls that need them raise meanwhile.

        Can be called again for other kinds. States that are in swap files anyway stay there.

        Args:
            include: kinds, as `zero.OffloadStateTypeEnum` or its strings; all by default.
            device: "nvme": swap files; "cpu" and "none": no effect, because states are in host memory already.
            pin_memory: accepted; no effect.
            non_blocking: accepted; the call returns when memory is free.
            nvme_path: folder on each node's local disk; by default that of `offload_optimizer` or `offload_param`.

        Collective over: all ranks, with equal arguments.

        Raises:
            UsageError: an unknown kind or device, or the engine is closed.
            ConfigError: on every rank, if there is no folder, or one cannot be used.
            UnsupportedOption: the engine computes on a device.
            StoreError: on every rank, if states of one cannot be written; all states stay in memory then.

        Source: `offload_states` of DeepSpeed's documentation; device "nvme" is not part of it.
        """
        if self._parts.is_closed:
            msg = "engine.offload_states() after engine.destroy(): the engine holds nothing any more; make a new engine"
            raise UsageError(msg)
        kinds, device = _kinds(include), str(getattr(device, "value", device))
        if device not in DEVICES:
            msg = f"engine.offload_states: device is {device!r}; choose one of {', '.join(DEVICES)}"
            raise UsageError(msg)
        if self._parts.plan.device.type != "cpu":
            msg = (
                f"engine.offload_states works on host memory, and this engine computes on {self._parts.plan.device}; "
                "use zero_optimization.offload_optimizer and offload_param instead"
            )
            raise UnsupportedOption(msg)
        if device != "nvme":
            logs.once(
                log, logging.WARNING,
                f'engine.offload_states(device="{device}") moves nothing: model states are in host memory; '
                'device="nvme" moves them to swap files',
            )  # fmt: skip
            return
        root = _root(self._parts, nvme_path)
        self._parts.sharding.meet(f"engine.offload_states({', '.join(sorted(kinds))})")
        absence = self._absence or Absence(self._parts, self._tried_roots)
        try:
            absence.take_away(kinds, root)
        finally:
            if self._parts.params.away:
                self._absence = absence
            else:
                absence.close()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring offloaded states back and delete the swap files; no effect if none are offloaded.

        Args:
            non_blocking: accepted; the call returns when all states are in memory.

        Collective over: all ranks.

        Raises:
            StoreError: on every rank, if states of one cannot be read or memory is short; all stay offloaded then.
        """
        if self._absence is not None:
            self._parts.sharding.meet("engine.reload_states()")
            self._absence.end()
            self._absence = None

    def end(self) -> None:
        """Bring the model's parameters back and drop other states. Collective over: all ranks."""
        absence, self._absence = self._absence, None
        if absence is not None:
            try:
                absence.end((Kind.lp_params,))
            finally:
                absence.close()


@dataclass(frozen=True, slots=True)
class _Look:
    """A view of a storage, held by a stored tensor or by a tensor."""

    holder: MemoryTensor | torch.Tensor
    dtype: torch.dtype
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, holder: MemoryTensor | torch.Tensor, values: torch.Tensor) -> _Look:
        """The place of `values`, those of `holder`, in their storage."""
        return cls(holder, values.dtype, int(values.storage_offset()), tuple(values.shape), values.stride())

    def let_go(self) -> None:
        if isinstance(self.holder, MemoryTensor):
            self.holder.let_go()
        else:
            self.holder.data = torch.empty(0, dtype=self.dtype)

    def come_back(self, storage: torch.UntypedStorage) -> None:
        values = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)
        if isinstance(self.holder, MemoryTensor):
            self.holder.bring_back(values)
        else:
            self.holder.data = values


@dataclass(slots=True)
class _Stored:
    """A storage that is, or will be, in a swap file, and its views."""

    kind: str
    nbytes: int
    storage: torch.UntypedStorage | None
    has_values: bool = True  # else it is reloaded as zeros
    looks: list[_Look] = field(default_factory=list)
    file: BlockFile | None = None
    offset: int = 0

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """All bytes as a tensor."""
        return torch.empty(0, dtype=torch.uint8).set_(storage)


class Absence:
    """Offloaded states of an engine, in a swap folder of their own."""

    def __init__(self, parts: Parts, tried_roots: set[str]) -> None:
        """Args: `tried_roots`: folders that passed the preflight; new ones are added."""
        self._parts, self._comm, self._tried = parts, parts.mesh.world.comm, tried_roots
        self._stored: list[_Stored] = []
        self._folders: dict[str, SwapFolder] = {}
        self._options = io_options(parts.plan.config.aio)
        self._count = 0

    def take_away(self, kinds: frozenset[str], root: str) -> None:
        """Write states, agree that all ranks could, and free them. Collective over: all ranks."""
        params, optimization = self._parts.params, self._parts.optimization
        kinds -= params.away
        if params.prefetcher is not None and Kind.lp_params in kinds:
            params.prefetcher.reshard_all()
        if optimization is not None:
            optimization.grads.pause()
        found = _find_stored(self._parts, kinds)
        wanted = sum(_up(item.nbytes) for item in found if item.has_values)
        if root not in self._tried:
            preflight(self._comm, self._parts.mesh.world.node, Path(root), wanted, self._options)
            self._tried.add(root)
        with self._comm.together(StoreError):
            self._write(found, root, wanted)
        if Kind.lp_params in kinds:
            params.shards.gatherer.drop_copies()
            for unit in params.table.all_units:
                if unit.states.param.is_replicated:
                    params.shards.reshard(unit)
        params.away |= kinds - {Kind.contiguous_grad_buffer}
        for item in found:
            for look in item.looks:
                look.let_go()
            item.storage = None
        self._stored += found
        params.arena.trim()
        params.shards.collector.arena.trim()
        _give_to_system()
        if self._parts.mesh.rank == 0:
            log.info(
                "%s of this rank went to swap files below %s: %s", format_bytes(wanted), root, ", ".join(sorted(kinds))
            )

    def _write(self, found: Sequence[_Stored], root: str, wanted: int) -> None:
        """Write storages to a file. Nothing is freed here.

        Raises:
            StoreError: the disk fails.
        """
        self._count += 1
        try:
            if root not in self._folders:
                self._folders[root] = SwapFolder(Path(root), run_name(), self._parts.mesh.rank)
            file, end = self._folders[root].file(f"states{self._count}", wanted), 0
            with BlockIO(self._options) as io:  # holds the last buffer until it is closed
                for item in found:
                    if item.has_values and item.storage is not None and item.nbytes:
                        item.file, item.offset = file, end
                        io.write(file, item.bytes_of(item.storage), end).wait()
                        end += _up(item.nbytes)
        except (StoreError, OSError) as error:
            msg = f"{socket.gethostname()}: model states cannot be moved to swap files: {error}; they stay in memory"
            raise StoreError(msg) from error

    def end(self, kinds: Collection[str] = ALL) -> None:
        """Bring states of `kinds` back. Collective over: all ranks."""
        params = self._parts.params
        wanted = [item for item in self._stored if item.kind in kinds]
        try:
            with self._comm.together(StoreError):
                self._read(wanted)
        except StoreError:
            for item in wanted:
                item.storage = None
            raise
        for item in wanted:
            if item.storage is not None:
                for look in item.looks:
                    look.come_back(item.storage)
        is_back = Kind.lp_params in params.away.intersection(kinds)
        params.away -= frozenset(kinds)
        if is_back:
            for unit in params.table.all_units:
                if unit.states.param.is_replicated:
                    params.shards.unshard(unit, params.shards.rest(unit))
        if not params.away:
            self.close()

    def _read(self, wanted: Sequence[_Stored]) -> None:
        """Read storages back.

        Raises:
            StoreError: the disk fails, or memory is short.
        """
        try:
            with BlockIO(self._options) as io:
                for item in wanted:
                    values = torch.empty(item.nbytes, dtype=torch.uint8)
                    if item.file is not None:
                        io.read(item.file, values, item.offset).wait()
                    else:
                        values.zero_()
                    item.storage = values.untyped_storage()
        except (OSError, RuntimeError, MemoryError) as error:
            msg = (
                f"{socket.gethostname()}: model states cannot come back: {error}; mend it and call "
                "engine.reload_states() again, or resume from the last checkpoint"
            )
            raise StoreError(msg) from error

    def close(self) -> None:
        """Delete the swap files."""
        self._stored.clear()
        for folder in self._folders.values():
            folder.remove()
        self._folders.clear()


def _give_to_system() -> None:
    """Return freed memory to the system: glibc keeps freed blocks below some 32 MiB unless it is asked to trim."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _kinds(include: Iterable[str] | None) -> frozenset[str]:
    if include is None:
        return frozenset(ALL)
    names = [include] if isinstance(include, str) else list(include)
    known = [str(kind) for kind in ALL]
    for name in names:
        if name not in known:
            msg = f"engine.offload_states: no kind of states is called {name!r}; there are {', '.join(known)}."
            raise UsageError(msg + did_you_mean(str(name), known))
    return frozenset(Kind(name) for name in names)


def _root(parts: Parts, path: str | Path | None) -> str:
    if path is not None:
        return str(path)
    zero = parts.plan.config.zero_optimization
    for section in (zero.offload_optimizer, zero.offload_param):
        if section is not None and section.nvme_path is not None:
            return str(section.nvme_path)
    msg = (
        'engine.offload_states(device="nvme") needs a folder on the local disk of each node: pass nvme_path=, or set '
        "nvme_path in zero_optimization.offload_optimizer or zero_optimization.offload_param"
    )
    raise ConfigError(msg)


# -- storages and views --------------------------------------------------------------------------------------------


def _find_stored(parts: Parts, kinds: Collection[str]) -> list[_Stored]:
    """Storages of states of `kinds` that are in memory, each once."""
    has_gradients = parts.optimization is not None and parts.optimization.grads.has_gradients
    found: dict[int, _Stored] = {}
    empty: list[_Stored] = []
    for kind in ALL:
        for holder in _holders(parts, kind) if kind in kinds else ():
            values = holder.get() if isinstance(holder, MemoryTensor) else holder.detach()
            storage = values.untyped_storage()
            look = _Look.of(holder, values)
            has_values = kind != Kind.lp_grads or has_gradients
            if not storage.nbytes():
                empty.append(_Stored(kind, 0, storage, has_values, [look]))
            else:
                item = found.setdefault(storage.data_ptr(), _Stored(kind, storage.nbytes(), storage, has_values))
                item.looks.append(look)
    _add_bound(parts, found)
    return [*found.values(), *empty]


def _holders(parts: Parts, kind: str) -> Iterator[MemoryTensor | torch.Tensor]:
    """Holders of states of one kind, except the model's own tensors."""
    params, optimization = parts.params, parts.optimization
    holders: list[StoredTensor] = []
    if kind == Kind.lp_params:
        holders += [params.shards.stored_shard(unit) for unit in params.table.all_units]
    if kind in (Kind.lp_params, Kind.hp_params):
        is_own = kind == Kind.hp_params
        holders += [
            params.shards.stored_master(u)
            for u in params.table.units
            if (params.shards.low_precision(u) is not None) == is_own
        ]
    if kind == Kind.lp_grads and optimization is not None:
        holders += [optimization.grads.shards.stored(unit)[0] for unit in params.table.units]
    if kind == Kind.optim_states and optimization is not None:
        holders += [holder for unit in params.table.units for holder in optimization.states.tensors(unit).values()]
        if isinstance(optimization.rule, Foreign):
            states = optimization.rule.optimizer.state.values()
            tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
            yield from (tensor for tensor in tensors if tensor.dim())
    parted = (part for holder in holders for part in (holder.parts if isinstance(holder, CodedTensor) else (holder,)))
    yield from {id(part): part for part in parted if isinstance(part, MemoryTensor)}.values()


def _add_bound(parts: Parts, found: dict[int, _Stored]) -> None:
    """Add views held by a client's optimizer: its parameters that stand for windows of masters."""
    optimization = parts.optimization
    if optimization is None or not isinstance(optimization.rule, Foreign):
        return
    own = {id(param) for param in parts.module.parameters()}
    for group in optimization.rule.optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in own:
                values = param.detach()
                item = found.get(values.untyped_storage().data_ptr())
                if item is not None:
                    item.looks.append(_Look.of(param, values))
