"""Pipeline module: a model as a list of layers, of which each rank builds those of its stage."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mpispeed.base import init_scope, rng
from mpispeed.base.errors import MpispeedError, StageError, TopologyError, UsageError
from mpispeed.mesh.world import start
from mpispeed.pipe.chunk import Chunk, recompute
from mpispeed.pipe.grid import PipelineParallelGrid
from mpispeed.pipe.layer_files import LayerFiles
from mpispeed.pipe.layers import Layer, LayerSpec, first_uses, made, read_layers
from mpispeed.pipe.partition import check_shared, describe, partition
from mpispeed.pipe.process_topology import PipeDataParallelTopology
from mpispeed.pipe.tied import Tied, attrs_of, make_equal, sum_gradients, weight_of

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Topology
    from mpispeed.pipe.process_topology import ProcessTopology

log = logging.getLogger(__name__)


class PipelineModule(LayerFiles, nn.Module):
    """Layers partitioned into stages; this rank builds and has those of its own stage.

    Parameters are named by the global index of their layer, as `3.weight`, and tied ones `tied_modules.<key>.<name>`:
    names do not depend on the number of stages.

    Args:
        layers: an nn.Sequential, or any iterable of specs, modules and functions.
        num_stages: number of stages; it divides the number of ranks, the rest is data parallel.
        topology: axes pipe, data and model, instead of `num_stages`.
        loss_fn: called as `loss_fn(outputs, labels)` on the last stage; parameters of a module are there alone.
        seed_layers: seed with `base_seed + index` before a layer is built, so that weights do not depend on the
            stages, and before each layer runs. Generators are as before once the model is built.
        seed_fn: called with the seed; by default it seeds torch, numpy and Python's random.
        base_seed: see `seed_layers`.
        partition_method: "parameters" (or "best"), "uniform", "type:REGEX" or "profile".
        activation_checkpoint_interval: layers per recomputed block; 0 is off. This and the next two are read in each
            forward pass.
        activation_checkpoint_func: `func(function, *args)` that recomputes; by default torch's, not reentrant.
        checkpointable_layers: class names; blocks with other layers are not recomputed.
        dynamic_shape: accepted for DeepSpeed scripts; shapes may always change.
        num_chunks: virtual stages per rank, for interleaved schedules; virtual stage k is chunk k // num_stages of
            stage k % num_stages.
        profile_input: for "profile": an input of the first layer, of the size of a micro-batch.
        grid: an existing grid, instead of `num_stages` and `topology`.

    Attributes:
        grid: the ranks by axes.
        stage_id, num_stages: this rank's stage, and the number of stages.
        parts: borders of all virtual stages in the list of layers.

    Collective over: all ranks.

    Raises:
        StageError: settings, layers and ranks do not fit, or a layer cannot be built on some rank.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | Topology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        num_chunks: int = 1,
        profile_input: Any = None,
        grid: PipelineParallelGrid | None = None,
    ) -> None:
        super().__init__()
        found = read_layers(layers)
        self.seed_layers, self.base_seed = bool(seed_layers), base_seed
        self.seed_fn: Callable[[int], Any] = seed_fn or _seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or recompute
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.num_chunks, self.partition_method = num_chunks, partition_method
        self._check_settings(found)
        self.grid = _grid_of(num_stages, topology, grid)
        self.stage_id, self.num_stages = self.grid.stage_id, self.grid.pipe_parallel_size
        if num_chunks > 1 and self.num_stages == 1:
            msg = f"num_chunks={num_chunks}: chunks are dealt to stages in turn; that needs 2 stages, there is 1"
            raise StageError(msg)
        comm = self.grid.mesh.world.comm
        with init_scope.paused():  # ranks may build layers for a moment, to count and measure
            self.parts = partition(comm, found, partition_method, self.num_stages, num_chunks, profile_input)
        check_shared(found, self.stage_owner)
        self._first_uses = {key: layer.index for key, layer in first_uses(found).items()}
        self._ties = {key: (attrs_of(found, key), self._stages_of(found, key)) for key in self._first_uses}
        self.tied_modules, builders = nn.ModuleDict(), self.grid.mesh["data", "model"]
        with comm.together(StageError, plain=MpispeedError), init_scope.building(self, builders):
            self._build(found)
        with init_scope.building(self, builders):
            self._tie()
            self._place_loss(loss_fn)
        self._chunks = [self._chunk_of(index, found) for index in range(num_chunks)]
        if comm.rank == 0:
            is_empty = any(first == stop for first, stop in itertools.pairwise(self.parts))
            log.log(logging.WARNING if is_empty else logging.INFO, describe(found, self.parts, self.num_stages))

    # -- where layers are ------------------------------------------------------------------------------------

    def mpu(self) -> PipelineParallelGrid:
        """The ranks by axes."""
        return self.grid

    def topology(self) -> ProcessTopology:
        """The coordinates of all ranks."""
        return self.grid.topology()

    def num_pipeline_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    def partitions(self) -> list[int]:
        """Borders of all virtual stages in the list of layers: num_stages * num_chunks + 1 numbers."""
        return self.parts

    def stage_owner(self, layer: int) -> int:
        """The stage that has a layer.

        Raises:
            TopologyError: there is no such layer.
        """
        if not 0 <= layer < self.parts[-1]:
            msg = f"there is no layer {layer}; this model has the layers 0 to {self.parts[-1] - 1}"
            raise TopologyError(msg)
        part = next(i for i in range(len(self.parts) - 1) if self.parts[i] <= layer < self.parts[i + 1])
        return part % self.num_stages

    def layer_of(self, name: str) -> int:
        """Global index of the layer that has a parameter; of a tied one the first use; -1 for one of the loss."""
        head, _, rest = name.partition(".")
        if head == "tied_modules":
            return self._first_uses[rest.partition(".")[0]]
        return int(head) if head.isdecimal() else -1

    # -- running ---------------------------------------------------------------------------------------------

    def chunk(self, index: int) -> Chunk:
        """Virtual stage `index * num_stages + stage_id`; call it with the output of the one before.

        Raises:
            UsageError: there is no such chunk.
        """
        if not 0 <= index < self.num_chunks:
            msg = f"there is no chunk {index}; this rank has the chunks 0 to {self.num_chunks - 1}"
            raise UsageError(msg)
        return self._chunks[index]

    def forward(self, forward_input: Any) -> Any:
        """Run this rank's layers: the full model with one stage, else the part from this stage's input.

        Raises:
            UsageError: there are several chunks; other ranks have the layers between them.
        """
        if self.num_chunks > 1:
            msg = f"the {self.num_chunks} chunks of a stage cannot run in one go; run chunk(index) for each"
            raise UsageError(msg)
        return self._chunks[0](forward_input)

    def set_activation_checkpointing(self, interval: int, function: Callable[..., Any]) -> Callable[[], None]:
        """Recompute blocks of `interval` layers by `function`; 0 is off. Returns a function that undoes it."""
        before = self.activation_checkpoint_interval, self.activation_checkpoint_func
        self.activation_checkpoint_interval, self.activation_checkpoint_func = interval, function

        def take_back() -> None:
            self.activation_checkpoint_interval, self.activation_checkpoint_func = before

        return take_back

    @property
    def micro_offset(self) -> int:
        """Number of micro-batches that the first chunk has run, for seeds of layers. Setting it sets all chunks."""
        return self._chunks[0].micro_offset

    @micro_offset.setter
    def micro_offset(self, count: int) -> None:
        for chunk in self._chunks:
            chunk.micro_offset = count

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each of this rank's layers by itself; arguments as for `torch.nn.Module.compile`."""
        paths = dict.fromkeys(step.path for chunk in self._chunks for step in chunk.steps if step.path)
        for path in paths:
            self.get_submodule(path).compile(*args, **kwargs)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Losses to report beside the main one; None. For subclasses."""
        return None

    # -- shared weights --------------------------------------------------------------------------------------

    def tied_keys(self) -> list[str]:
        """Keys of all tied layers of the model, sorted, also of those on other stages only."""
        return list(self._ties)

    def tied(self, key: str) -> Tied:
        """The parameters shared under a key, as they are now."""
        attrs, stages = self._ties[key]
        params: list[tuple[str, nn.Parameter]] = []
        if key in self.tied_modules:
            module = self.tied_modules[key]
            params = [(f"tied_modules.{key}.{name}", param) for name, param in module.named_parameters()]
        group = self._tie_groups.get(key)
        return Tied(key, attrs, stages, self.stage_id == stages[0], params, group)

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Comm]]:
        """Each tied attribute that this rank shares with other stages, with the group that shares it."""
        return [
            (weight_of(self.tied_modules[key], attr, key), group)
            for key, group in self._tie_groups.items()
            for attr in self._ties[key][0]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied parameters over their stages.

        Collective over: the ranks of this pipeline.
        """
        for key, group in self._tie_groups.items():
            sum_gradients([param for param in self.tied_modules[key].parameters() if param.requires_grad], group)

    # -- building --------------------------------------------------------------------------------------------

    def _check_settings(self, layers: Sequence[Layer]) -> None:
        interval, listed = self.activation_checkpoint_interval, self.checkpointable_layers
        problem = ""
        if any(isinstance(layer.source, PipelineModule) for layer in layers):
            problem = "a PipelineModule cannot be a layer of another; put the layers of both into one list"
        elif not isinstance(interval, int) or interval < 0:
            problem = f"activation_checkpoint_interval={interval!r} has to be a number of layers, 0 for none"
        elif listed is not None and not isinstance(listed, list):
            problem = f"checkpointable_layers={listed!r} has to be a list of class names, or None"
        elif not isinstance(self.num_chunks, int) or self.num_chunks < 1:
            problem = f"num_chunks={self.num_chunks!r} has to be a positive number"
        elif not isinstance(self.partition_method, str):
            problem = f"partition_method={self.partition_method!r} has to be a text such as 'parameters'"
        if problem:
            msg = f"PipelineModule: {problem}"
            raise StageError(msg)

    def _stages_of(self, layers: Sequence[Layer], key: str) -> tuple[int, ...]:
        return tuple(sorted({self.stage_owner(use.index) for use in layers if use.tie and use.tie.key == key}))

    def _build(self, layers: Sequence[Layer]) -> None:
        generators = rng.capture() if self.seed_layers else None
        try:
            for layer in layers:
                if self.stage_owner(layer.index) == self.stage_id:
                    self._build_layer(layer, layers)
        finally:
            if generators is not None:
                rng.restore(generators)
        # Stages come to shared weights in different orders, and all work through them in the order of parameters.
        built = {key: self.tied_modules[key] for key in self._ties if key in self.tied_modules}
        self.tied_modules = nn.ModuleDict(built)

    def _build_layer(self, layer: Layer, layers: Sequence[Layer]) -> None:
        if isinstance(layer.source, nn.Module):
            self.add_module(str(layer.index), layer.source)
        elif layer.tie is not None:
            key = layer.tie.key
            if key not in self.tied_modules:
                first = layers[self._first_uses[key]]
                module = self._made(first)
                for attr in self._ties[key][0]:
                    weight_of(module, attr, key)
                self.tied_modules[key] = module
        elif isinstance(layer.source, LayerSpec):
            self.add_module(str(layer.index), self._made(layer))

    def _made(self, layer: Layer) -> nn.Module:
        """Build the module of a spec, with the seed of its layer."""
        if self.seed_layers:
            self.seed_fn(self.base_seed + layer.index)
        return made(layer)

    def _tie(self) -> None:
        """Make groups of the stages that share weights, and equal weights on them. Collective over: the pipeline."""
        self._tie_groups: dict[str, Comm] = {}
        for key, (_, stages) in self._ties.items():
            if len(stages) > 1:
                group = self.grid.group_of_stages(stages, f"tied {key}")
                if group is not None:
                    self._tie_groups[key] = group
                    module = self.tied_modules[key]
                    make_equal([*module.parameters(), *module.buffers()], group)

    def _place_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        if isinstance(loss_fn, nn.Module) and not self.grid.is_last_stage:
            object.__setattr__(self, "loss_fn", loss_fn)  # not a part of this stage: no parameters of it here
        else:
            self.loss_fn = loss_fn

    def _chunk_of(self, index: int, layers: Sequence[Layer]) -> Chunk:
        virtual = index * self.num_stages + self.stage_id
        return Chunk(self, index, virtual, layers[self.parts[virtual] : self.parts[virtual + 1]])


def _grid_of(
    num_stages: int | None, topology: ProcessTopology | Topology | None, grid: PipelineParallelGrid | None
) -> PipelineParallelGrid:
    """The grid that is given, or a new one. Collective over: all ranks."""
    if grid is None and topology is None and num_stages is None:
        msg = "PipelineModule: give num_stages, or a topology"
        raise StageError(msg)
    if grid is not None and topology is not None:
        msg = "PipelineModule: a grid and a topology are given; the grid has a topology, give one of the two"
        raise StageError(msg)
    if grid is None and topology is None:
        world = start()
        if not isinstance(num_stages, int) or num_stages < 1 or world.size % num_stages:
            msg = f"num_stages={num_stages!r} does not divide the {world.size} ranks of the job; choose a divisor"
            raise StageError(msg)
        topology = PipeDataParallelTopology(num_stages, world.size // num_stages)
    made = grid if grid is not None else PipelineParallelGrid(topology)
    if num_stages not in (None, made.pipe_parallel_size):
        msg = f"num_stages={num_stages}, but the topology has {made.pipe_parallel_size} stages; give one of the two"
        raise StageError(msg)
    return made


def _seed(number: int) -> None:
    rng.seed_torch(number)
    np.random.seed(number % 2**32)
    random.seed(number)
