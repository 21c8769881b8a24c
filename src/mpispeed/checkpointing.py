"""Activation checkpointing, with DeepSpeed's names."""

from mpispeed.engine.build.recomputing import configure
from mpispeed.nn.activation_checkpointing import (
    Checkpointer,
    CheckpointFunction,
    CudaRNGStatesTracker,
    RNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    is_configured,
    kept_bytes,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
    model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
    timers,
)
from mpispeed.nn.cut_marks import is_cut, mark_cut

__all__ = [
    "CheckpointFunction",
    "Checkpointer",
    "CudaRNGStatesTracker",
    "RNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "get_rng_tracker",
    "is_configured",
    "is_cut",
    "kept_bytes",
    "mark_cut",
    "model_parallel_cuda_manual_seed",
    "model_parallel_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "timers",
]
