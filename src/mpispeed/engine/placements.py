"""ZeRO as a table: which state is cut over which axes. The only module that maps stages.

Source: Rajbhandari et al., SC20, section 5 (P_os, P_os+g, P_os+g+p); Zhang et al., MiCS (arXiv 2205.00119); Wang et
al., ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.topology import Factor, Topology
from mpispeed.store.placement import WHOLE, Placement, Tier

if TYPE_CHECKING:
    from mpispeed.config.zero import ZeroOptimization
    from mpispeed.mesh.world import World

DATA = Placement(("data",))
INNER, OUTER = "data.inner", "data.outer"
LOCAL, ACROSS = "data.local", "data.across"
RANKS_PER_NODE = "MPISPEED_RANKS_PER_NODE"
_Z = "zero_optimization"
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


@dataclass(frozen=True, slots=True)
class States:
    """Where each kind of model state rests. Gradients are summed into the masters' placement.

    `second` is how a second copy of parameters is cut that gathers read until the next update.
    """

    param: Placement
    grad: Placement
    master: Placement
    second: Placement | None = None


STATES_BY_STAGE: dict[int, States] = {
    0: States(param=WHOLE, grad=WHOLE, master=WHOLE),
    1: States(param=WHOLE, grad=WHOLE, master=DATA),
    2: States(param=WHOLE, grad=DATA, master=DATA),
    3: States(param=DATA, grad=DATA, master=DATA),
}


@dataclass(frozen=True, slots=True)
class Placing:
    """Where states rest, and how the data axis is divided for it.

    `hops` names the axes inside of nodes and between them of a sum that is coded, or is None. `sums_late` is True where
    gradients rest whole only because they are summed once for all micro-batches.
    """

    states: States
    factors: tuple[Factor, ...] = ()
    hops: tuple[str, str] | None = None
    sums_late: bool = False

    def topology(self, axes: Mapping[str, int]) -> Topology:
        """`axes` with the data axis divided; its name and those of its parts become aliases."""
        topology = Topology.factored(axes, {"data": self.factors})
        if not (topology.has(LOCAL) and topology.has(INNER)):
            return topology
        local = topology.resolve(LOCAL)
        across = [name for name in topology.resolve(INNER) if name not in local]
        sizes = dict(zip(topology.names, topology.sizes, strict=True))
        return Topology(sizes, {**dict(topology.aliases), ACROSS: across})


def place(
    zero: ZeroOptimization,
    data: int,
    ranks_per_node: int,
    *,
    sums_late: bool = False,
    codes: bool = False,
    replicates: bool = False,
) -> Placing:
    """Placements for the settings.

    Args:
        zero: the section of the config.
        data: size of the data axis.
        ranks_per_node: ranks that share a node, equal on all nodes; 0 if they are not. Only settings that tell nodes
            apart look at it.
        sums_late: gradients rest whole until the last micro-batch, whatever the stage: a pipeline then sums over ranks
            once in a step, and not once for each micro-batch.
        codes: the optimizer codes what nodes tell each other in one bit; the data axis is divided into them.
        replicates: the optimizer needs whole states on every rank: stage 1 keeps them so.

    Raises:
        ConfigError: sizes that do not divide each other, or settings that exclude each other.
    """
    shard, second = zero.mics_shard_size, zero.zero_hpz_partition_size
    if zero.stage != 3 and (shard > 0 or second > 1):
        key, value = ("mics_shard_size", shard) if shard > 0 else ("zero_hpz_partition_size", second)
        msg = f"{_Z}.{key} {value} divides cut parameters and needs {_Z}.stage 3, found {zero.stage}; remove the key"
        raise ConfigError(msg)
    if codes and zero.stage <= 1:
        return _on_tiers(_place_coded(0 if replicates else zero.stage, data, ranks_per_node), zero, sums_late=False)
    if shard > 0:
        return _on_tiers(_place_in_groups(zero, data, ranks_per_node), zero, sums_late=sums_late)
    if zero.mics_hierarchical_params_gather:
        msg = (
            f"{_Z}.mics_hierarchical_params_gather needs {_Z}.mics_shard_size, found {shard}; set that to the ranks of "
            "a shard group, or remove the key"
        )
        raise ConfigError(msg)
    return _on_tiers(_place_over_all(zero, data, ranks_per_node), zero, sums_late=sums_late)


def _on_tiers(placing: Placing, zero: ZeroOptimization, *, sums_late: bool) -> Placing:
    """The same cuts on the tiers of `offload_param` and `offload_optimizer`.

    Gradients go where the optimizer runs, unless they rest whole: then every backward pass adds to all of them.
    Sources: ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv 2104.07857).
    """
    states = replace(placing.states, grad=WHOLE) if sums_late else placing.states
    param = _TIERS[zero.offload_param.device] if zero.offload_param is not None else Tier.DEVICE
    master = _TIERS[zero.offload_optimizer.device] if zero.offload_optimizer is not None else Tier.DEVICE
    grad = Tier.DEVICE if states.grad.is_whole else master
    moved = replace(
        states,
        param=replace(states.param, tier=param),
        grad=replace(states.grad, tier=grad),
        master=replace(states.master, tier=master),
    )
    return replace(placing, states=moved, sums_late=sums_late and not placing.states.grad.is_whole)


def _place_coded(stage: int, data: int, ranks_per_node: int) -> Placing:
    """States as the stage says; full nodes of several ranks are told apart."""
    states = STATES_BY_STAGE[stage]
    if ranks_per_node < 2 or data <= ranks_per_node or data % ranks_per_node:
        return Placing(states)
    return Placing(states, (Factor(INNER, ranks_per_node, "ranks per node", rest=OUTER),), (INNER, OUTER))


def _place_in_groups(zero: ZeroOptimization, data: int, ranks_per_node: int) -> Placing:
    """MiCS: everything is cut inside groups of neighbouring ranks, and groups hold copies."""
    shard = zero.mics_shard_size
    if zero.zero_hpz_partition_size > 1:
        msg = (
            f"{_Z}.mics_shard_size {shard} and {_Z}.zero_hpz_partition_size {zero.zero_hpz_partition_size} exclude "
            "each other: both keep gathers inside groups of ranks; remove one of them"
        )
        raise ConfigError(msg)
    if zero.zero_quantized_gradients:
        msg = (
            f"{_Z}.zero_quantized_gradients does not work with {_Z}.mics_shard_size {shard}: sums inside a shard group "
            "stay on few nodes; remove one of them"
        )
        raise ConfigError(msg)
    _check_divides("mics_shard_size", shard, data)
    factors, cut = [Factor(INNER, shard, f"{_Z}.mics_shard_size", rest=OUTER)], Placement((INNER,))
    if zero.mics_hierarchical_params_gather:
        node = _node_of("mics_hierarchical_params_gather", ranks_per_node)
        if shard <= node or shard % node:
            msg = (
                f"{_Z}.mics_hierarchical_params_gather needs shard groups that fill two or more nodes: "
                f"{_Z}.mics_shard_size is {shard}, a node has {node} ranks; use a multiple of {node} from {2 * node} "
                f"on, or set the key to false"
            )
            raise ConfigError(msg)
        factors.append(Factor(LOCAL, node, "ranks per node"))
        # Gathers go from the last axis to the first: small pieces between nodes, then larger ones inside.
        cut = Placement((LOCAL, ACROSS))
    return Placing(States(param=cut, grad=cut, master=cut), tuple(factors))


def _place_over_all(zero: ZeroOptimization, data: int, ranks_per_node: int) -> Placing:
    """Everything that is cut is cut over all ranks; the order of axes serves second copies and quantized sums."""
    states, second = STATES_BY_STAGE[zero.stage], zero.zero_hpz_partition_size
    if zero.zero_quantized_gradients and states.master.is_whole:
        msg = (
            f"{_Z}.zero_quantized_gradients needs cut gradients: {_Z}.stage 1 to 3, found {zero.stage}; set it to false"
        )
        raise ConfigError(msg)
    if second > 1:
        _check_divides("zero_hpz_partition_size", second, data)
        factor = Factor(INNER, second, f"{_Z}.zero_hpz_partition_size", rest=OUTER)
    elif zero.zero_quantized_gradients:
        node = _node_of("zero_quantized_gradients", ranks_per_node)
        if data <= node:
            return Placing(states)
        if data % node:
            msg = (
                f"{_Z}.zero_quantized_gradients needs full nodes: {data} ranks are no multiple of {node} ranks per "
                "node; start a multiple, or set it to false"
            )
            raise ConfigError(msg)
        factor = Factor(INNER, node, "ranks per node", rest=OUTER)
    else:
        return Placing(states)
    nested = Placement((INNER, OUTER))
    moved = {name: nested for name in ("param", "grad", "master") if not getattr(states, name).is_whole}
    states = replace(states, second=Placement((INNER,)) if second > 1 else None, **moved)
    hops = (INNER, OUTER) if zero.zero_quantized_gradients and factor.size < data else None
    return Placing(states, (factor,), hops)


def _check_divides(key: str, size: int, data: int) -> None:
    if data % size:
        sizes = ", ".join(str(n) for n in range(1, data + 1) if data % n == 0)
        msg = f"{_Z}.{key} {size} does not divide the {data} data-parallel ranks; use one of {sizes}"
        raise ConfigError(msg)


def _node_of(key: str, ranks_per_node: int) -> int:
    if ranks_per_node < 1:
        msg = (
            f"{_Z}.{key} needs nodes of equally many ranks that are numbered node by node; start the job so (mpirun "
            f"--map-by core, srun --distribution=block), or say how many ranks form a node with {RANKS_PER_NODE}"
        )
        raise ConfigError(msg)
    return ranks_per_node


def ranks_per_node(world: World) -> int:
    """How many neighbouring ranks share a node; 0 if nodes differ or their ranks are not numbered node by node.

    The environment variable MPISPEED_RANKS_PER_NODE, the same on all ranks, overrides what MPI says.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if the variable is no number of ranks or differs between ranks.
    """
    given = os.environ.get(RANKS_PER_NODE, "")
    members = list(world.node.ranks)
    first, size = members[0], len(members)
    is_block = members == list(range(first, first + size)) and first % size == 0
    found = world.comm.gather_objects((given, size if is_block else 0))
    values = {text for text, _ in found}
    if values == {""}:
        sizes = {count for _, count in found}
        return sizes.pop() if len(sizes) == 1 else 0
    text = found[0][0]
    if len(values) > 1 or not text.isdecimal() or int(text) < 1:
        shown = ", ".join(repr(value) for value in sorted(values)[:4])
        msg = f"{RANKS_PER_NODE} is {shown}; give all ranks the same number of at least 1, or unset it"
        raise ConfigError(msg)
    return int(text)
