"""Floor 5: layers distributed over stages, and the order in which stages work on micro-batches.

Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019. Knows meshes of ranks. Must not
know the config, the engine, or the placement of parameters.

The public names are imported when they are first used: schedules need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.pipe.check import Proof
    from mpispeed.pipe.chunk import Chunk
    from mpispeed.pipe.cut import partition_balanced, partition_bottleneck, partition_uniform
    from mpispeed.pipe.grid import PipelineParallelGrid
    from mpispeed.pipe.instructions import PipeInstruction
    from mpispeed.pipe.layers import LayerSpec, TiedLayerSpec, spread
    from mpispeed.pipe.module import PipelineModule
    from mpispeed.pipe.process_topology import (
        PipeDataParallelTopology,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )
    from mpispeed.pipe.schedule import (
        DataParallelSchedule,
        GPipeSchedule,
        InferenceSchedule,
        InterleavedSchedule,
        OrderedSchedule,
        Pass,
        PipeSchedule,
        TrainSchedule,
        ZeroBubbleSchedule,
    )
    from mpispeed.pipe.tied import Tied
    from mpispeed.pipe.timeline import expected_bubble, times

__all__ = [
    "Chunk",
    "DataParallelSchedule",
    "GPipeSchedule",
    "InferenceSchedule",
    "InterleavedSchedule",
    "LayerSpec",
    "OrderedSchedule",
    "Pass",
    "PipeDataParallelTopology",
    "PipeInstruction",
    "PipeModelDataParallelTopology",
    "PipeSchedule",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "Proof",
    "Tied",
    "TiedLayerSpec",
    "TrainSchedule",
    "ZeroBubbleSchedule",
    "expected_bubble",
    "partition_balanced",
    "partition_bottleneck",
    "partition_uniform",
    "spread",
    "times",
]

# public name -> module of this package
_HOME = {
    "Chunk": "chunk",
    "DataParallelSchedule": "schedule",
    "GPipeSchedule": "schedule",
    "InferenceSchedule": "schedule",
    "InterleavedSchedule": "schedule",
    "LayerSpec": "layers",
    "OrderedSchedule": "schedule",
    "Pass": "schedule",
    "PipeDataParallelTopology": "process_topology",
    "PipeInstruction": "instructions",
    "PipeModelDataParallelTopology": "process_topology",
    "PipeSchedule": "schedule",
    "PipelineModule": "module",
    "PipelineParallelGrid": "grid",
    "ProcessTopology": "process_topology",
    "Proof": "check",
    "Tied": "tied",
    "TiedLayerSpec": "layers",
    "TrainSchedule": "schedule",
    "ZeroBubbleSchedule": "schedule",
    "expected_bubble": "timeline",
    "partition_balanced": "cut",
    "partition_bottleneck": "cut",
    "partition_uniform": "cut",
    "spread": "layers",
    "times": "timeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
