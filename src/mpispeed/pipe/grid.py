"""The ranks of a pipeline on one grid of MPI ranks: the object DeepSpeed calls mpu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from mpispeed.base.errors import TopologyError
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.mesh.world import World, start
from mpispeed.pipe.process_topology import ProcessTopology, _prime_factors

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

AXES = ("pipe", "data", "model")


class _Positions:
    """Rank, size and group of this process along the axes of `mesh`. Groups were made with the mesh."""

    mesh: Mesh
    _sharing: Mesh | None = None

    @property
    def _samples(self) -> tuple[Mesh, str]:
        """The axis of ranks with samples of their own."""
        return (self.mesh, "data") if self._sharing is None else (self._sharing, "batch")

    def get_global_rank(self) -> int:
        """World rank of this process."""
        return self.mesh.rank

    def get_pipe_parallel_rank(self) -> int:
        """Stage of this rank."""
        return self.mesh.index("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.mesh["pipe"].size

    def get_pipe_parallel_group(self) -> Comm:
        """The ranks of this pipeline, in the order of stages."""
        return self.mesh["pipe"]

    def get_data_parallel_rank(self) -> int:
        """Position among the ranks with the same stage and slice, and the same part of sequences."""
        mesh, axis = self._samples
        return mesh.index(axis)

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks, or of groups that share sequences, with samples of their own."""
        return self.get_data_parallel_group().size

    def get_data_parallel_group(self) -> Comm:
        """The ranks with the same stage and slice, and the same part of sequences."""
        mesh, axis = self._samples
        return mesh[axis]

    def get_model_parallel_rank(self) -> int:
        """Position among all ranks with the same data coordinate: stages and slices."""
        return self.mesh.index(("pipe", "model"))

    def get_model_parallel_world_size(self) -> int:
        """Stages times slices."""
        return self.mesh["pipe", "model"].size

    def get_model_parallel_group(self) -> Comm:
        """All ranks with the same data coordinate: together they hold one model."""
        return self.mesh["pipe", "model"]

    def get_slice_parallel_rank(self) -> int:
        """Position among the ranks that share each layer; 0 where layers are not sliced."""
        return self.mesh.index("model")

    def get_slice_parallel_world_size(self) -> int:
        """Number of ranks that share each layer."""
        return self.mesh["model"].size

    def get_slice_parallel_group(self) -> Comm:
        """The ranks that share each layer of this stage."""
        return self.mesh["model"]

    def get_tensor_model_parallel_rank(self) -> int:
        """`get_slice_parallel_rank` under Megatron's name."""
        return self.get_slice_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """`get_slice_parallel_world_size` under Megatron's name."""
        return self.get_slice_parallel_world_size()

    def get_tensor_model_parallel_group(self) -> Comm:
        """`get_slice_parallel_group` under Megatron's name."""
        return self.get_slice_parallel_group()


class PipelineParallelGrid(_Positions):
    """Stages, data-parallel ranks and slices as groups of one Cartesian communicator.

    `get_model_parallel_group` spans pipe and slices; the slices alone are `get_slice_parallel_group`, also called
    `get_tensor_model_parallel_group`. All groups are made here, once, and are `mesh.Comm` objects.

    Attributes:
        mesh: the groups by axes; "pipe", "data" and "model" are always among them.
        stage_id: stage of this rank.
        data_parallel_id: data coordinate of this rank.
        is_first_stage, is_last_stage: True at the ends of its pipeline.
        pp_group, dp_group, slice_group: world ranks of these groups of this rank.
    """

    def __init__(
        self,
        topology: ProcessTopology | Topology | None = None,
        process_group: World | None = None,
    ) -> None:
        """Make all groups.

        Args:
            topology: axes pipe, data, model in any order; missing ones have size 1. Without a topology, the prime
                factors of the number of ranks go to pipe and data in turn.
            process_group: the world whose ranks these are; by default that of this process, which is joined if needed.

        Collective over: all ranks.

        Raises:
            TopologyError: an axis of another name, or sizes that do not multiply to the number of ranks.
        """
        world = start() if process_group is None else process_group
        if not isinstance(world, World):
            msg = (
                f"PipelineParallelGrid: process_group is a {type(world).__name__}; pass a World, or None for all ranks"
            )
            raise TopologyError(msg)
        chosen = _dealt(world.size) if topology is None else _plain(topology)
        unknown = [axis for axis in chosen if axis not in AXES]
        if unknown or math.prod(chosen.values()) != world.size:
            text = " x ".join(f"{axis}={size}" for axis, size in chosen.items()) or "no axis"
            why = f"unknown axes {unknown}" if unknown else f"they make {math.prod(chosen.values())} ranks"
            msg = (
                f"invalid grid: axes {text}: {why}; a pipeline has the axes pipe, data and model, and their sizes "
                f"have to multiply to the {world.size} ranks of the job"
            )
            raise TopologyError(msg)
        self._topology = ProcessTopology(list(chosen), list(chosen.values()))
        # Axes of size 1 number no ranks anew, and `mesh["model"]` needs no question before it.
        self.mesh = Mesh(Topology({**chosen, **{axis: 1 for axis in AXES if axis not in chosen}}), world)
        self._stage_groups: dict[tuple[int, ...], Comm] = {}
        self.stage_id, stages = self.mesh.index("pipe"), self.mesh["pipe"].size
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == stages - 1
        self.pipe_parallel_size = stages
        self.model_parallel_size = self.slice_parallel_size = self.mesh["model"].size
        self.pp_group = list(self.mesh["pipe"].ranks)
        self.share_sequences(None)
        self.slice_group = list(self.mesh["model"].ranks)

    def share_sequences(self, mesh: Mesh | None) -> None:
        """Count data-parallel ranks without those that share sequences, by the mesh of an engine; None: all.

        Local, on all ranks alike; the engine calls it, for as long as it lasts.
        """
        self._sharing = mesh
        self.data_parallel_id, self.data_parallel_size = (
            self.get_data_parallel_rank(),
            self.get_data_parallel_world_size(),
        )
        self.dp_group = list(self.get_data_parallel_group().ranks)

    @cached_property
    def p2p_groups(self) -> list[list[int]]:
        """For each rank, itself and the rank of the next stage; the first follows the last. Grows with the ranks."""
        grid, stages = self.mesh.topology, self.pipe_parallel_size
        pairs: list[list[int]] = []
        for rank in range(grid.size):
            at = grid.coords(rank)
            pairs.append([rank, grid.rank(**{**at, "pipe": (at["pipe"] + 1) % stages})])
        return pairs

    def topology(self) -> ProcessTopology:
        """The coordinates of all ranks."""
        return self._topology

    def get_stage_id(self) -> int:
        """Stage of this rank."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Data coordinate of this rank."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """World rank of a stage that has this rank's other coordinates, or those given by name.

        Raises:
            TopologyError: there is no such stage or coordinate.
        """
        grid = self.mesh.topology
        return grid.rank(**{**grid.coords(self.mesh.rank), "pipe": stage_id, **kwargs})

    def group_of_stages(self, stages: Sequence[int], name: str) -> Comm | None:
        """The ranks of this pipeline at some stages, in their order; None on the other stages.

        A group of the same stages is made once.

        Collective over: the ranks of this pipeline, with equal arguments.

        Raises:
            TopologyError: no stage, or one there is not.
        """
        pipe, wanted = self.mesh["pipe"], tuple(sorted(set(stages)))
        if not wanted or not set(wanted) <= set(range(pipe.size)):
            msg = f"a group of the stages {list(stages)} ({name}) needs stages out of 0..{pipe.size - 1}"
            raise TopologyError(msg)
        if len(wanted) == pipe.size:
            return pipe
        if wanted not in self._stage_groups:
            members = [stage for stage in range(pipe.size) if (stage in wanted) == (self.stage_id in wanted)]
            color = int(self.stage_id in wanted)
            made = pipe.split(color, [pipe.ranks[stage] for stage in members], (name,))
            if made.size > 1 and pipe.progress is not None:
                made = made.starting_on(pipe.progress)
            self._stage_groups[wanted] = made
        return self._stage_groups[wanted] if self.stage_id in wanted else None

    def close(self) -> None:
        """Finish started operations and release all groups. Collective over: all ranks."""
        self.mesh.close()  # ends the thread of started verbs, also for the groups of stages
        for comm in self._stage_groups.values():
            comm.close()
        self._stage_groups.clear()


def _plain(topology: ProcessTopology | Topology) -> dict[str, int]:
    if isinstance(topology, ProcessTopology):
        return dict(zip(topology.axes, topology.dims, strict=True))
    if isinstance(topology, Topology):
        return dict(zip(topology.names, topology.sizes, strict=True))
    msg = (
        f"PipelineParallelGrid: topology is a {type(topology).__name__}; pass a ProcessTopology such as "
        "PipeDataParallelTopology(num_pp=2, num_dp=2)"
    )
    raise TopologyError(msg)


def _dealt(size: int) -> dict[str, int]:
    """Prime factors in turn to pipe and data."""
    factors = _prime_factors(size)
    return {"pipe": math.prod(factors[0::2]), "data": math.prod(factors[1::2])}
