"""Factory of stored tensors of one rank, in memory or in swap files, by kind and unit."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.mesh.comm import text_of
from mpispeed.native.block_io import ALIGNMENT, BlockIO, Options
from mpispeed.store import host_memory
from mpispeed.store.coded_tensor import CodedTensor, Scratch
from mpispeed.store.pool import Pool
from mpispeed.store.stored_tensor import STEP, MemoryTensor, StoredTensor, SwappedTensor

if TYPE_CHECKING:
    from mpispeed.native.block_io import BlockFile
    from mpispeed.store.state_code import StateCode
    from mpispeed.store.swap import SwapFolder

PARAM, MASTER, GRAD = "param", "master", "grad"
"""Kinds of model state; every other kind is the name of a slot of optimizer state."""

MASTER_REST = "master.rest"
"""What 16-bit masters leave to a second number."""


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """States that one rank keeps in swap files, and the memory that serves them.

    `tensors` maps (kind, unit index) to (elements, dtype) of swapped states. Windows of an update take `states_bytes`
    at most, `in_flight` of them at a time; parameters on their way to a gather take `param_buffers` buffers of
    `param_bytes`. `reads_ahead`, `writes_behind`: of the update. `pins_params`, `pins_states`: buffers are page-locked.
    """

    tensors: Mapping[tuple[str, int], tuple[int, torch.dtype]] = field(default_factory=dict)
    states_bytes: int = 0
    param_bytes: int = 0
    param_buffers: int = 0
    reads_ahead: bool = False
    writes_behind: bool = False
    reserves: bool = True
    pins_params: bool = False
    pins_states: bool = False

    @property
    def file_bytes(self) -> dict[str, int]:
        """Bytes of the swap file of each kind."""
        sizes: dict[str, int] = {}
        for (kind, _), (numel, dtype) in self.tensors.items():
            sizes[kind] = sizes.get(kind, 0) + padded_bytes(numel, dtype)
        return sizes

    @property
    def in_flight(self) -> int:
        """Windows that are in memory at a time."""
        return 1 + self.reads_ahead + self.writes_behind

    @property
    def window_kinds(self) -> tuple[str, ...]:
        """Kinds that one window of an update borrows from the pool of states."""
        return tuple(sorted({kind for kind, _ in self.tensors if kind != PARAM}))

    @property
    def window_elements(self) -> int:
        """Longest window of an update, a multiple of `STEP`: all windows in flight fit into the memory given."""
        kinds, widest = len(self.window_kinds), max((d.itemsize for _, d in self.tensors.values()), default=4)
        longest = max((-(-numel // STEP) * STEP for numel, _ in self.tensors.values()), default=STEP)
        if kinds:
            longest = min(longest, self.states_bytes // (kinds * self.in_flight * widest))
        if self.param_buffers:
            narrowest = max((d.itemsize for (k, _), (_, d) in self.tensors.items() if k == PARAM), default=widest)
            longest = min(longest, self.param_bytes // narrowest)
        return max(longest // STEP * STEP, STEP)


def padded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a stored tensor in its file: whole pages."""
    return -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Tiers:
    """Makes stored tensors; in memory unless the plan says otherwise.

    Attributes:
        is_swapping: this rank or another has states in swap files; equal on all ranks.
        scratch: memory for decoded ranges of states.
        problem: the first failure of `keep`, or "".
    """

    def __init__(
        self,
        plan: SwapPlan | None = None,
        folders: Mapping[str, SwapFolder] | None = None,
        options: Options | None = None,
        *,
        device: torch.device = devices.HOST,
        on_host: Collection[tuple[str, int]] = (),
        pins: Collection[str] = (),
        others_swap: bool = False,
    ) -> None:
        """Reserve the space of the plan.

        Args:
            plan: swapped states; none by default.
            folders: folder of the swap file of each kind.
            options: of reading and writing files.
            device: the model's device.
            on_host: (kind, unit index) of states kept in host memory all the same; those of optimizers go with the
                masters of their unit.
            pins: kinds whose host memory is page-locked where the model is on a device.
            others_swap: another rank has states in swap files.

        Raises:
            StoreError: a file cannot be made, or there is no space for it.
        """
        self.plan = plan or SwapPlan()
        self.device, self._on_host = device, frozenset(on_host)
        self._pins = frozenset(pins) if device.type != "cpu" else frozenset()
        self.is_swapping = others_swap or bool(self.plan.tensors)
        self.problem, self.scratch = "", Scratch()
        self._folders = {id(folder): folder for folder in (folders or {}).values()}
        self._files: dict[str, BlockFile] = {}
        self._ends: dict[str, int] = {}
        self.io: BlockIO | None = None
        self._pools: list[Pool] = []
        if not self.plan.tensors:
            return
        self.io = BlockIO(options or Options())
        try:
            for kind, size in self.plan.file_bytes.items():
                folder = (folders or {})[kind]
                file = folder.file(kind, size, reserve=self.plan.reserves)
                if not self.plan.reserves:
                    os.truncate(file.path, size)  # a hole: ranges that were never written read as zeros
                self._files[kind], self._ends[kind] = file, 0
            self._make_pools()
        except BaseException:
            self.close()
            raise

    def _make_pools(self) -> None:
        plan = self.plan
        count = max(len(plan.window_kinds) * plan.in_flight, 1)
        widest = max(dtype.itemsize for _, dtype in plan.tensors.values())
        self._states = Pool(
            _up(plan.window_elements * widest), count, name="offload_optimizer.buffer_count", pin=plan.pins_states
        )
        self._params = Pool(
            _up(max(plan.param_bytes, 1)),
            max(plan.param_buffers, 1),
            name="offload_param.buffer_size",
            pin=plan.pins_params,
        )
        self._pools = [self._states, self._params]

    def holds(self, kind: str, unit: int) -> bool:
        """True if that kind of the unit is in a swap file."""
        return (kind, unit) in self.plan.tensors

    @property
    def keeps_on_host(self) -> bool:
        """True if this rank has states in host memory while its model is on a device."""
        return bool(self._on_host)

    def home(self, kind: str, unit: int) -> torch.device:
        """Device of values of that kind of the unit while they are used: the host for those in swap files."""
        return devices.HOST if (_group_of(kind), unit) in self._on_host else self.device

    def _is_pinned(self, kind: str, unit: int) -> bool:
        return _group_of(kind) in self._pins and self.home(kind, unit).type == "cpu"

    def pins(self, kind: str) -> bool:
        """True if host memory of that kind is page-locked."""
        return _group_of(kind) in self._pins

    def is_apart(self, kind: str, unit: int) -> bool:
        """True if that kind of the unit is on another device than the model."""
        return self.home(kind, unit) != self.device

    def bring(self, kind: str, unit: int, values: torch.Tensor, dtype: torch.dtype, *, copies: bool) -> torch.Tensor:
        """`values` in `dtype` at the home of that kind of the unit; themselves if they are so, unless `copies`."""
        home = self.home(kind, unit)
        if not self._is_pinned(kind, unit) or values.device == home:
            if values.device == home and (copies or values.dtype != dtype):
                return host_memory.copied(values, dtype)
            return values.to(device=home, dtype=dtype, copy=copies)
        return torch.empty(values.shape, dtype=dtype, device=home, pin_memory=True).copy_(values)

    def keep(self, kind: str, unit: int, values: torch.Tensor) -> StoredTensor:
        """A stored tensor that holds `values`; in memory it is that tensor.

        If it cannot be written, `problem` has the error, to be raised once all ranks can hear of it.
        """
        if not self.holds(kind, unit):
            return MemoryTensor(values)
        stored = self._swapped(kind, values.numel(), values.dtype)
        try:
            stored.put(values)
        except Exception as error:  # whatever it is: the other ranks go on
            self.problem = self.problem or text_of(error)
        return stored

    def zeros(self, kind: str, unit: int, numel: int, dtype: torch.dtype) -> StoredTensor:
        """A stored tensor of zeros; in a swap file nothing is written for them."""
        if self.holds(kind, unit):
            return self._swapped(kind, numel, dtype)
        home, is_pinned = self.home(kind, unit), self._is_pinned(kind, unit)
        if home.type == "cpu" and not is_pinned:
            return MemoryTensor(host_memory.zeros(numel, dtype))
        return MemoryTensor(torch.zeros(numel, dtype=dtype, device=home, pin_memory=is_pinned))

    def coded(
        self, kind: str, unit: int, numel: int, code: StateCode, *, base: int, param: StoredTensor | None = None
    ) -> CodedTensor:
        """A stored tensor of zeros that rests in a code; scales of blocks are in memory in any case.

        Args:
            kind: as for `zeros`.
            unit: index of the unit.
            numel: elements of the values.
            code: the code.
            base: number of the first element where stochastic rounding draws.
            param: the parameters, if they are the first part.
        """
        parts: list[StoredTensor] = [] if param is None else [param]
        for part in code.parts[len(parts) :]:
            count = part.count(numel)
            if part.stride > 1:
                made = torch.zeros(count, dtype=part.dtype, device=self.home(kind, unit))
                parts.append(MemoryTensor(made))
            else:
                parts.append(self.zeros(MASTER_REST if kind == MASTER and parts else kind, unit, count, part.dtype))
        return CodedTensor(code, parts, numel, base=base, is_param=param is not None, scratch=self.scratch)

    def _swapped(self, kind: str, numel: int, dtype: torch.dtype) -> SwappedTensor:
        end = self._ends[kind] + padded_bytes(numel, dtype)
        if end > self.plan.file_bytes[kind]:
            msg = f"the swap file of {kind} was planned for {self.plan.file_bytes[kind]} bytes and needs {end}"
            raise StoreError(msg)
        offset, self._ends[kind] = self._ends[kind], end
        pool = self._params if kind == PARAM else self._states
        if self.io is None:
            msg = "swap files are closed"
            raise StoreError(msg)
        return SwappedTensor(numel, dtype, self._files[kind], offset, self.io, pool)

    @property
    def file_bytes(self) -> int:
        """Bytes of all swap files of this rank."""
        return sum(self.plan.file_bytes.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers that were made so far."""
        return sum(pool.owned_bytes for pool in self._pools)

    @property
    def most_buffer_bytes(self) -> int:
        """Upper limit of the bytes of buffers."""
        return sum(pool.buffer_bytes * pool.count for pool in self._pools)

    def settle(self) -> None:
        """Wait until everything that was given back is written.

        Raises:
            StoreError: something could not be written.
        """
        for pool in self._pools:
            pool.settle()

    def close(self) -> None:
        """Delete the swap files; stored tensors in them are of no use any more."""
        if self.io is not None:
            self.io.close()
            self.io = None
        for folder in self._folders.values():
            folder.remove()


def _group_of(kind: str) -> str:
    """Kind that decides about another: states of optimizers go with the masters."""
    return kind if kind in (PARAM, GRAD) else MASTER


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


IN_MEMORY = Tiers()
"""For stores whose states all rest in memory."""
