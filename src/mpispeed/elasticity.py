"""Batch sizes for changing numbers of ranks, with DeepSpeed's names."""

from mpispeed.base.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from mpispeed.config.elastic_batch import compute_elastic_config, elastic_counts

#: lets `mpispeed.elasticity.config` be found, which is made from the table of DeepSpeed's names
__path__: list[str] = []

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elastic_counts",
]
