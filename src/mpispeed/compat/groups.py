"""`deepspeed.utils.groups`: sizes, ranks and groups of the axes of the newest engine.

Without an engine every axis but data has one rank, and data has all. Data ranks have samples of their own; ranks that
share sequences are further ones.
"""

from __future__ import annotations

from mpispeed.base.slot_scope import refuse_rank
from mpispeed.compat.comm_groups import current_world
from mpispeed.engine.ownership import newest_mesh
from mpispeed.mesh.comm import Comm

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
]


def get_data_parallel_group() -> Comm:
    """Ranks that have the same parts of the model and of sequences, as `mpispeed.comm` takes groups."""
    mesh = newest_mesh()
    return current_world().comm if mesh is None else mesh["batch"]


def get_data_parallel_world_size() -> int:
    """How many ranks have the same parts of the model and of sequences."""
    return get_data_parallel_group().size


def get_data_parallel_rank() -> int:
    """Place of this rank among those with the same parts of the model and of sequences.

    Raises:
        UsageError: a model whose bits may not depend on the ranks asks in its forward pass.
    """
    refuse_rank("groups.get_data_parallel_rank()")
    return get_data_parallel_group().rank


def get_model_parallel_group() -> Comm | None:
    """Ranks with slices of the same layers; None without an engine."""
    mesh = newest_mesh()
    return None if mesh is None else mesh["model"]


def get_model_parallel_world_size() -> int:
    """How many slices each layer has."""
    group = get_model_parallel_group()
    return 1 if group is None else group.size


def get_model_parallel_rank() -> int:
    """Which slice this rank has."""
    group = get_model_parallel_group()
    return 0 if group is None else group.rank


def get_pipe_parallel_world_size() -> int:
    """How many stages the pipeline has."""
    mesh = newest_mesh()
    return 1 if mesh is None else mesh["pipe"].size


def get_pipe_parallel_rank() -> int:
    """Which stage this rank has."""
    mesh = newest_mesh()
    return 0 if mesh is None else mesh["pipe"].rank


def _get_sequence_parallel_world_size() -> int:
    """How many ranks share each sequence."""
    mesh = newest_mesh()
    return 1 if mesh is None else mesh["sequence"].size


def _get_sequence_parallel_rank() -> int:
    """Place of this rank among those that share its sequences."""
    mesh = newest_mesh()
    return 0 if mesh is None else mesh["sequence"].rank


def _get_sequence_data_parallel_group() -> Comm:
    """Ranks that have the same part of the model, over which ZeRO shards."""
    mesh = newest_mesh()
    return current_world().comm if mesh is None else mesh["data"]


def _get_sequence_data_parallel_world_size() -> int:
    """How many ranks have the same part of the model."""
    return _get_sequence_data_parallel_group().size


def _get_sequence_data_parallel_rank() -> int:
    """Place of this rank among those with the same part of the model. Raises as `get_data_parallel_rank`."""
    refuse_rank("groups._get_sequence_data_parallel_rank()")
    return _get_sequence_data_parallel_group().rank


# DeepSpeed's own libraries call them with an underscore.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_group = get_model_parallel_group
_get_model_parallel_rank = get_model_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
