"""Floor 5: layers spread over stages, and the order in which stages work on micro-batches.

Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019. Knows meshes of ranks. Must not
know the config, the engine, or how parameters rest.

The public names are imported when they are first used: schedules need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.pipe.chunk import Chunk
    from mpispeed.pipe.cut import partition_balanced, partition_bottleneck, partition_uniform
    from mpispeed.pipe.grid import PipelineParallelGrid
    from mpispeed.pipe.layers import LayerSpec, TiedLayerSpec, spread
    from mpispeed.pipe.module import PipelineModule
    from mpispeed.pipe.process_topology import (
        PipeDataParallelTopology,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )
    from mpispeed.pipe.tied import Tied

__all__ = [
    "Chunk",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "Tied",
    "TiedLayerSpec",
    "partition_balanced",
    "partition_bottleneck",
    "partition_uniform",
    "spread",
]

# public name -> module of this package
_HOME = {
    "Chunk": "chunk",
    "LayerSpec": "layers",
    "PipeDataParallelTopology": "process_topology",
    "PipeModelDataParallelTopology": "process_topology",
    "PipelineModule": "module",
    "PipelineParallelGrid": "grid",
    "ProcessTopology": "process_topology",
    "Tied": "tied",
    "TiedLayerSpec": "layers",
    "partition_balanced": "cut",
    "partition_bottleneck": "cut",
    "partition_uniform": "cut",
    "spread": "layers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
