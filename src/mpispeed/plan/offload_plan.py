"""Plan of states outside the device, and of buffers for those in files. Pure functions of settings and sizes.

Sources: Ren et al., ZeRO-Offload, arXiv 2101.06840; Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.store.placement import Tier
from mpispeed.store.tiers import GRAD, MASTER, MASTER_REST, PARAM, SwapPlan

if TYPE_CHECKING:
    from mpispeed.config.root import Config
    from mpispeed.config.zero import ZeroOptimization
    from mpispeed.mesh.mesh import Topology
    from mpispeed.store.layout import Table

Cells = Mapping[tuple[str, int], tuple[int, torch.dtype]]
"""(kind of state, unit index) -> (elements, dtype) of the states that one rank keeps in swap files."""

_Z = "zero_optimization"


@dataclass(frozen=True, slots=True)
class Offload:
    """Settings of states outside the device. Units: elements.

    Attributes:
        ratio: fraction of the trained elements whose masters and states are outside the device.
        memory_elements: elements of parameters in the file tier that each rank still keeps in memory.
        param_buffers, param_elements: buffers between files and gathers, and the length of one.
        state_buffers, state_elements: buffers between files and updates, and the length of one in fp32.
        reads_ahead, writes_behind: overlap of updates with reads and writes.
        reserves: space of files is allocated at the start.
        pins_params, pins_states: their buffers are page-locked.
    """

    ratio: float = 1.0
    memory_elements: int = 0
    param_buffers: int = 1
    param_elements: int = 1
    state_buffers: int = 1
    state_elements: int = 1
    reads_ahead: bool = False
    writes_behind: bool = False
    reserves: bool = True
    pins_params: bool = False
    pins_states: bool = False


def offload_of(zero: ZeroOptimization) -> Offload:
    """Offload settings of the config's `zero_optimization`; defaults where nothing is offloaded."""
    found: dict[str, bool | int | float] = {}
    param, optimizer = zero.offload_param, zero.offload_optimizer
    if param is not None:
        found |= {
            "memory_elements": param.max_in_cpu,
            "param_buffers": param.buffer_count,
            "param_elements": param.buffer_size,
            "pins_params": param.pin_memory,
        }
    if optimizer is not None:
        found |= {
            "ratio": optimizer.ratio,
            "state_buffers": optimizer.buffer_count,
            "state_elements": zero.sub_group_size,
            "reads_ahead": optimizer.pipeline_read,
            "writes_behind": optimizer.pipeline_write,
            "reserves": not optimizer.fast_init,
            "pins_states": optimizer.pin_memory,
        }
    return Offload(**found)  # type: ignore[arg-type]


def slots_in_files(config: Config, slots: Iterable[str]) -> tuple[str, ...]:
    """Those of the optimizer's states that go to files where states do: all, unless Muon's momentum is to stay."""
    name = (config.optimizer.type if config.optimizer is not None else None) or ""
    stays = config.zero_optimization.save_muon_momentum_buffer_in_memory and name.lower() == "muon"
    return tuple(slot for slot in slots if not (stays and slot == "momentum_buffer"))


def leading_units(sizes: Iterable[tuple[int, int]], limit: float) -> frozenset[int]:
    """The longest row of first units with at most `limit` elements together.

    Args:
        sizes: (unit index, elements), in the order of units.
        limit: elements; the first unit that does not fit ends the row, even if smaller ones follow.
    """
    chosen: set[int] = set()
    total = 0
    for index, size in sizes:
        total += size
        if total > limit:
            break
        chosen.add(index)
    return frozenset(chosen)


def swapped_cells(table: Table, topology: Topology, slots: Iterable[str]) -> Cells:
    """States that one rank keeps in swap files; `slots` are the names of the optimizer's that go there."""
    found: dict[tuple[str, int], tuple[int, torch.dtype]] = {}
    names = tuple(slots)
    for unit in table.all_units:
        states, padded = unit.states, unit.layout.padded
        if states.param.tier is Tier.NVME:
            found[PARAM, unit.index] = padded // topology.group_size(states.param.axes), states.compute
    for unit in table.units:
        states, padded = unit.states, unit.layout.padded
        if states.master.tier is Tier.NVME:
            span, master = padded // topology.group_size(states.master.axes), states.codes.master
            if not states.master_is_param:
                found[MASTER, unit.index] = span, states.full if master is None else master.dtype
            if master is not None and len(master.parts) > 1:
                found[MASTER_REST, unit.index] = span, master.dtype
            for kind in states.slots_among(names):
                code = states.codes.slot(kind)
                found[kind, unit.index] = span, states.full if code is None else code.dtype
        if states.grad.tier is Tier.NVME:
            found[GRAD, unit.index] = padded // topology.group_size(states.grad.axes), states.accumulate
    return found


def make_swap_plan(tensors: Cells, offload: Offload, table: Table) -> SwapPlan:
    """Files of one rank, and their buffers.

    Raises:
        ConfigError: a shard of a unit is longer than a buffer for parameters.
    """
    params = {unit: kept for (kind, unit), kept in tensors.items() if kind == PARAM}
    longest = max(params, key=lambda unit: params[unit][0], default=None)
    if longest is not None and params[longest][0] > offload.param_elements:
        name, size = table.all_units[longest].name, params[longest][0]
        msg = (
            f"{_Z}.offload_param.buffer_size {offload.param_elements} is less than the {size} elements that each rank "
            f"holds of the unit {name!r}; set it to at least {size}, or use more ranks"
        )
        raise ConfigError(msg)
    param_bytes = max((numel * dtype.itemsize for numel, dtype in params.values()), default=0)
    states = [numel for (kind, _), (numel, _) in tensors.items() if kind != PARAM]
    masters = [numel for (kind, _), (numel, _) in tensors.items() if kind == MASTER]
    state_elements = min(offload.state_elements, max(masters or states, default=0))
    return SwapPlan(
        tensors=tensors,
        states_bytes=offload.state_buffers * state_elements * torch.float32.itemsize,
        param_bytes=param_bytes,
        param_buffers=offload.param_buffers if params else 0,
        reads_ahead=offload.reads_ahead,
        writes_behind=offload.writes_behind,
        reserves=offload.reserves,
        pins_params=offload.pins_params,
        pins_states=offload.pins_states,
    )
