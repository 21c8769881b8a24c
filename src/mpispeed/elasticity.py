"""Batch sizes for changing numbers of ranks, with DeepSpeed's names."""

from mpispeed.base.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from mpispeed.config.elastic_batch import compute_elastic_config, elastic_counts

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elastic_counts",
]
