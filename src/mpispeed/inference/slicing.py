"""Slicing of a model for predictions: layers over the ranks of a tensor group, caches for their heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import Report, inject
from mpispeed.nn.tensor.apply import AT_HAND
from mpispeed.nn.tensor.row_policy import is_row_policy
from mpispeed.nn.tensor.trial_copies import RandomCopies
from mpispeed.nn.tensor.vocabulary import told_paths


def slice_model(
    model: nn.Module,
    comm: Comm,
    *,
    policy: Any = None,
    grain: int = 64,
    without_values: bool = False,
) -> Report | None:
    """Replace layers of a model by layers that are sliced over `comm`, for predictions.

    Attention is sliced by heads. Each rank has at least one, also where several have to have copies of a key; so a
    cache of keys and values is made for this rank's heads by the first call. The embedding of tokens and the layer to
    logits are sliced by vocabulary where the model tells which they are; logits are returned whole, with the same bits
    on all ranks.

    Args:
        model: the same on all ranks, with whole parameters, which become those of the first rank; changed in place.
        comm: the tensor group.
        policy: None for the tables of this package, the model's own `tp_plan`, and the rule; else what `inject` takes.
            With a table of kinds nothing is sliced beside what it names.
        grain: widths that are no heads are sliced at multiples of it; those of fewer grains than ranks anywhere.
        without_values: the model may be on the meta device, values come later.

    Returns:
        what was sliced, and how it was found; None for a group of one rank, which leaves the model as it is.

    Collective over: `comm`.

    Raises:
        ConfigError: nothing can be sliced, attention has fewer heads than ranks, or the policy does not fit.
        UsageError: the model is sliced already, or is not the same on all ranks. All errors are raised on all ranks.
    """
    if comm.size == 1:
        return None
    report = inject(
        model,
        comm,
        policy,
        vocab=bool(told_paths(model)) and (policy is None or is_row_policy(model, policy)),
        grain=grain,
        forward_only=True,
        without_values=without_values,
        layers=RandomCopies() if without_values else AT_HAND,
    )
    _let_caches_grow(model)
    return report


def _let_caches_grow(model: Any) -> None:
    """Keep `generate` from allocating a static cache for all heads, or compiling layers that send messages."""
    if hasattr(model, "_get_static_cache_init_shape"):
        model._get_static_cache_init_shape = _unknown_shape
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.disable_compile = True


def _unknown_shape() -> None:
    """The shape of static caches before the first call, as transformers asks: not known."""
