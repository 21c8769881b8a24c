"""Floor 6, curriculum: how difficult samples may be at a step, and what follows for batches.

Above data, whose order of samples it uses. Knows plain values and tensors. Must not know the engine, the configuration
or MPI's names: what communicates is handed a group of ranks.
"""

from __future__ import annotations

from mpispeed.curriculum.analyzer import DataAnalyzer
from mpispeed.curriculum.distributed import DistributedDataAnalyzer
from mpispeed.curriculum.index_file import MMapIndexedDataset, MMapIndexedDatasetBuilder
from mpispeed.curriculum.sampler import DeepSpeedDataSampler
from mpispeed.curriculum.schedule import CurriculumScheduler
from mpispeed.curriculum.truncation import truncate

__all__ = [
    "CurriculumScheduler",
    "DataAnalyzer",
    "DeepSpeedDataSampler",
    "DistributedDataAnalyzer",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "truncate",
]
