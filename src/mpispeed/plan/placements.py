"""ZeRO's stages as a table: the placement of each kind of state.

Source: Rajbhandari et al., SC20, section 5 (P_os, P_os+g, P_os+g+p); Zhang et al., MiCS (arXiv 2205.00119); Wang et
al., ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.mesh import Factor, Topology
from mpispeed.optim.exchange import Needs
from mpispeed.plan.sequence_axis import BATCH, SequenceAxis, uncut_names
from mpispeed.store.placement import REPLICATED, Placement, Tier

if TYPE_CHECKING:
    from mpispeed.config.zero import ZeroOptimization
    from mpispeed.mesh.world import World

DATA = Placement(("data",))
INNER, OUTER = "data.inner", "data.outer"
LOCAL, ACROSS = "data.local", "data.across"
SECOND, BETWEEN = "data.second", "data.between"
NEAR = "data.near"
RANKS_PER_NODE = "MPISPEED_RANKS_PER_NODE"
_Z = "zero_optimization"
NEEDS_NOTHING = Needs()
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


@dataclass(frozen=True, slots=True)
class States:
    """Placement of each kind of model state. Gradients are reduced into the masters' placement.

    `second` is the placement of a second copy of parameters, from which gathers read until the next update.
    """

    param: Placement
    grad: Placement
    master: Placement
    second: Placement | None = None


STATES_BY_STAGE: dict[int, States] = {
    0: States(param=REPLICATED, grad=REPLICATED, master=REPLICATED),
    1: States(param=REPLICATED, grad=REPLICATED, master=DATA),
    2: States(param=REPLICATED, grad=DATA, master=DATA),
    3: States(param=DATA, grad=DATA, master=DATA),
}


@dataclass(frozen=True, slots=True)
class Placing:
    """Placements of states, and the factors of the data axis that they need.

    `hops`: axes inside and between nodes of a compressed reduction, or None. `sums_late` is True if gradients
    are replicated only because they are reduced once for all micro-batches. `rings` are further names of axes: (name,
    factor, smaller factor) names the axes of a factor that are not in the smaller one. `distinct`: sizes of groups of
    neighbours whose ranks have parameters of their own. `data_per_node`: neighbours on the data axis that share a node;
    0 if that differs between nodes.
    """

    states: States
    factors: tuple[Factor, ...] = ()
    hops: tuple[str, str] | None = None
    sums_late: bool = False
    rings: tuple[tuple[str, str, str], ...] = ()
    distinct: tuple[int, ...] = ()
    data_per_node: int = 0

    @property
    def sum_hops(self) -> tuple[str, str] | None:
        """The hops of a quantized reduction; None on one node, and where gradients are not sharded over the hops."""
        return self.hops if self.states.master.axes == self.hops else None

    def with_distinct(self, sizes: Iterable[int]) -> Placing:
        """The same with the factors for groups of neighbours whose ranks have parameters of their own.

        Those that fill several nodes with several ranks each are divided by nodes, if that nests with all factors.
        """
        found, node = tuple(sorted(sizes)), self.data_per_node
        factors = (*self.factors, *map(distinct_factor, found))
        made = replace(self, factors=factors, distinct=(*self.distinct, *found))
        filling = [size for size in found if 1 < node < size]
        if not filling or any(max(node, factor.size) % min(node, factor.size) for factor in factors):
            return made
        near = () if any(factor.name == NEAR for factor in factors) else (Factor(NEAR, node, "ranks per node"),)
        rings = ((far(size), distinct_factor(size).name, NEAR) for size in filling)
        return replace(made, factors=(*factors, *near), rings=(*self.rings, *rings))

    def with_sequence(self, axis: SequenceAxis) -> Placing:
        """The same with the factors of a sequence axis."""
        return replace(self, factors=(*self.factors, *axis.factors()), rings=(*self.rings, *axis.rings()))

    def topology(self, axes: Mapping[str, int]) -> Topology:
        """`axes` with the data axis divided into its factors; its name and theirs become aliases.

        The names "batch", "sequence", "sequence.ulysses" and "sequence.ring" are always among them.
        """
        topology = Topology.factored(axes, {"data": self.factors})
        sizes, aliases = dict(zip(topology.names, topology.sizes, strict=True)), dict(topology.aliases)
        for name, factor, smaller in self.rings:
            aliases[name] = tuple(axis for axis in aliases[factor] if axis not in aliases[smaller])
        if BATCH not in aliases:
            aliases |= uncut_names(aliases)
        return Topology(sizes, aliases)


def distinct_factor(ranks: int) -> Factor:
    """The factor for parameters of which `ranks` neighbours have their own; `rest` are those with copies."""
    return Factor(
        f"data.distinct{ranks}",
        ranks,
        "ep_size of experts, or ranks with parameters of their own",
        rest=f"data.equal{ranks}",
    )


def far(ranks: int) -> str:
    """Name of the axes between nodes inside groups of `ranks` neighbours; only where these fill several nodes."""
    return f"data.far{ranks}"


def place(
    zero: ZeroOptimization,
    data: int,
    ranks_per_node: int,
    *,
    sums_late: bool = False,
    needs: Needs = NEEDS_NOTHING,
) -> Placing:
    """Placements for the settings.

    Args:
        zero: the section of the config.
        data: size of the data axis.
        ranks_per_node: ranks that share a node, equal on all nodes; 0 if they differ. Used only by settings that
            distinguish nodes.
        sums_late: gradients are replicated until the last micro-batch at every stage: a pipeline then reduces them once
            in a step, and not for each micro-batch.
        needs: what the optimizer's exchange asks for.

    Raises:
        ConfigError: sizes do not divide each other, or settings exclude each other.
    """
    shard, second = zero.mics_shard_size, zero.zero_hpz_partition_size
    if zero.stage != 3 and (shard > 0 or second > 1):
        key, value = ("mics_shard_size", shard) if shard > 0 else ("zero_hpz_partition_size", second)
        msg = f"{_Z}.{key} {value} divides cut parameters and needs {_Z}.stage 3, found {zero.stage}; remove the key"
        raise ConfigError(msg)
    if needs.divides_nodes and zero.stage <= 1:
        stage = 0 if needs.whole_states else zero.stage
        return _on_tiers(_place_through_nodes(stage, data, ranks_per_node), zero, sums_late=False)
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
    """The same placements on the tiers of `offload_param` and `offload_optimizer`.

    Gradients go to the optimizer's tier unless they are replicated: then every backward pass adds to all of them.
    Sources: ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv 2104.07857).
    """
    states = replace(placing.states, grad=REPLICATED) if sums_late else placing.states
    param = _TIERS[zero.offload_param.device] if zero.offload_param is not None else Tier.DEVICE
    master = _TIERS[zero.offload_optimizer.device] if zero.offload_optimizer is not None else Tier.DEVICE
    grad = Tier.DEVICE if states.grad.is_replicated else master
    moved = replace(
        states,
        param=replace(states.param, tier=param),
        grad=replace(states.grad, tier=grad),
        master=replace(states.master, tier=master),
    )
    return replace(placing, states=moved, sums_late=sums_late and not placing.states.grad.is_replicated)


def _place_through_nodes(stage: int, data: int, ranks_per_node: int) -> Placing:
    """States by the stage; the data axis divided into nodes, if they are full."""
    states = STATES_BY_STAGE[stage]
    if ranks_per_node < 2 or data <= ranks_per_node or data % ranks_per_node:
        return Placing(states)
    return Placing(states, (Factor(INNER, ranks_per_node, "ranks per node", rest=OUTER),), (INNER, OUTER))


def _place_in_groups(zero: ZeroOptimization, data: int, ranks_per_node: int) -> Placing:
    """MiCS placements: all states are sharded inside groups of neighbouring ranks and replicated between groups.

    A second copy is sharded inside a part of the group; over the whole group it would be the shards themselves.
    """
    shard, second = zero.mics_shard_size, zero.zero_hpz_partition_size
    if zero.zero_quantized_gradients:
        msg = (
            f"{_Z}.zero_quantized_gradients does not work with {_Z}.mics_shard_size {shard}: sums inside a shard group "
            "stay on few nodes; remove one of them"
        )
        raise ConfigError(msg)
    _check_divides("mics_shard_size", shard, data)
    if shard % second:
        sizes = ", ".join(str(n) for n in range(1, shard + 1) if shard % n == 0)
        msg = (
            f"{_Z}.zero_hpz_partition_size {second} does not divide {_Z}.mics_shard_size {shard}: a second copy is cut "
            f"inside a shard group; use one of {sizes}"
        )
        raise ConfigError(msg)
    parts: list[Factor] = []
    if 1 < second < shard:
        parts.append(Factor(SECOND, second, f"{_Z}.zero_hpz_partition_size"))
    if zero.mics_hierarchical_params_gather:
        node = _node_of("mics_hierarchical_params_gather", ranks_per_node)
        if shard <= node or shard % node:
            msg = (
                f"{_Z}.mics_hierarchical_params_gather needs shard groups that fill two or more nodes: "
                f"{_Z}.mics_shard_size is {shard}, a node has {node} ranks; use a multiple of {node} from {2 * node} "
                f"on, or set the key to false"
            )
            raise ConfigError(msg)
        if node != second:  # else the second copy is cut inside nodes, and its axes are those of gathers
            parts.append(Factor(LOCAL, node, "ranks per node"))
    return _nest(Factor(INNER, shard, f"{_Z}.mics_shard_size", rest=OUTER), parts)


def _nest(group: Factor, parts: Sequence[Factor]) -> Placing:
    """All states sharded over `group`, by axes that begin with those of each of its nested `parts`.

    Gathers go from the last axis to the first: small messages between nodes, then larger ones inside.
    """
    nested = [*sorted(parts, key=lambda part: part.size), group]
    names = (BETWEEN, ACROSS)[3 - len(nested) :]
    rings = tuple((name, outer.name, inner.name) for name, (inner, outer) in zip(names, pairwise(nested), strict=True))
    axes = (nested[0].name, *names)
    stop = next((i + 1 for i, part in enumerate(nested) if part.name == SECOND), 0)
    cut, second = Placement(axes), Placement(axes[:stop]) if stop else None
    return Placing(States(cut, cut, cut, second), (group, *parts), rings=rings)


def _place_over_all(zero: ZeroOptimization, data: int, ranks_per_node: int) -> Placing:
    """Sharding over all data ranks; the order of axes serves second copies and quantized reductions."""
    states, second = STATES_BY_STAGE[zero.stage], zero.zero_hpz_partition_size
    if zero.zero_quantized_gradients and states.master.is_replicated:
        msg = (
            f"{_Z}.zero_quantized_gradients needs cut gradients: {_Z}.stage 1 to 3, found {zero.stage}; set it to false"
        )
        raise ConfigError(msg)
    if second > 1:
        _check_divides("zero_hpz_partition_size", second, data)
        factor = Factor(INNER, second, f"{_Z}.zero_hpz_partition_size", rest=OUTER)
    elif zero.zero_quantized_gradients:
        node = _node_of("zero_quantized_gradients", ranks_per_node)
        if data <= node and not zero.zero_quantized_in_node:
            return Placing(states)
        node = min(node, data)
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
    moved = {name: nested for name in ("param", "grad", "master") if not getattr(states, name).is_replicated}
    states = replace(states, second=Placement((INNER,)) if second > 1 else None, **moved)
    is_hopping = factor.size < data or (zero.zero_quantized_in_node and data > 1)
    hops = (INNER, OUTER) if zero.zero_quantized_gradients and is_hopping else None
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
    """Number of neighbouring ranks on a node; 0 if nodes differ or their ranks are not numbered node by node.

    The environment variable MPISPEED_RANKS_PER_NODE, the same on all ranks, overrides what MPI says.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if the variable is not a number of ranks or differs between ranks.
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
