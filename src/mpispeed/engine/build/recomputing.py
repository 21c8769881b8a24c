"""Activation checkpointing as the config asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.nn import activation_checkpointing

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan

_made: activation_checkpointing.Checkpointer | None = None
"""The checkpointer configured by an engine: the next engine may replace it, but not one configured by the script."""


def configure_recomputation(plan: Plan, mesh: Mesh, *, micro_batches: int = 1) -> None:
    """Set the options of `mpispeed.checkpointing`, unless the script has set its own.

    Args:
        plan: the settings.
        mesh: the ranks.
        micro_batches: the most that are between their forward and backward passes at once.

    Raises:
        ConfigError: options do not fit together.
    """
    global _made
    section, comm = plan.config.activation_checkpointing, mesh["model"]
    is_own = activation_checkpointing.is_configured() and activation_checkpointing.current() is not _made
    is_asked = section != type(section).model_validate({}) or comm.size > 1
    if not is_own and (is_asked or _made is not None):
        activation_checkpointing.configure(
            comm if comm.size > 1 else None,
            partition_activations=section.partition_activations,
            contiguous_checkpointing=section.contiguous_memory_optimization,
            num_checkpoints=section.number_checkpoints and section.number_checkpoints * micro_batches,
            checkpoint_in_cpu=section.cpu_checkpointing,
            synchronize=section.synchronize_checkpoint_boundary,
            profile=section.profile,
        )
        _made = activation_checkpointing.current()
