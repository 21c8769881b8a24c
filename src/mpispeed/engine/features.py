"""The table of features: what is attached to a run beside training itself, built in or registered by a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.config import added
from mpispeed.config.layer_drop import ProgressiveLayerDrop
from mpispeed.config.loader import DataLoader
from mpispeed.config.record import RunRecord
from mpispeed.config.reproducibility import Reproducibility
from mpispeed.config.trace import Trace
from mpispeed.config.walltime import Walltime
from mpispeed.engine import (
    compression,
    curriculum,
    data_loading,
    drills,
    eigenvalue,
    expert_loads,
    experts,
    flops_profile,
    layer_drop,
    preemption,
    random_ltd,
    reproducibility,
    run_record,
    sampling,
    sequence,
    sparse_attention,
    tracing,
)
from mpispeed.engine.attached import Feature
from mpispeed.engine.build.slicing import fit_layers
from mpispeed.engine.hooks import Context, Setup
from mpispeed.engine.observe import reports
from mpispeed.nn.sync_norm import release_norms

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm


def slice_model(model: nn.Module, setup: Setup) -> None:
    """Slice layers, as `fit_layers`. Collective over: all ranks."""
    fit_layers(setup.plan, setup.mesh, model, has_mpu=setup.given.mpu is not None)


def attach_slicing(context: Context) -> None:
    """Let BatchNorms go when the engine ends; slices stay."""
    module = context.module
    context.bus.subscribe(Event.CLOSE, lambda _: release_norms(module))


BUILT_IN = (
    Feature("slicing", attach_slicing, transform=slice_model),
    Feature("reproducibility", reproducibility.attach, section=Reproducibility),
    Feature("sparse_attention", sparse_attention.attach, transform=sparse_attention.transform),
    Feature("experts", experts.attach, transform=experts.transform),
    Feature("monitors", reports.attach),
    Feature("eigenvalue", eigenvalue.attach),
    Feature("compression_training", compression.attach, transform=compression.transform),
    Feature("run_record", run_record.attach, section=RunRecord),
    Feature("expert_loads", expert_loads.attach),
    Feature("progressive_layer_drop", layer_drop.attach, section=ProgressiveLayerDrop, transform=layer_drop.transform),
    Feature("random_ltd", random_ltd.attach),
    Feature("curriculum_learning", curriculum.attach),
    Feature("data_sampling", sampling.attach),
    Feature("data_loader", data_loading.attach, section=DataLoader, is_of_data=True),
    Feature("sequence", sequence.attach, transform=sequence.transform),
    Feature("trace", tracing.attach, section=Trace),
    Feature("drills", drills.attach),
    Feature("walltime", preemption.attach, section=Walltime),
    Feature("flops_profiler", flops_profile.attach),
)
"""Features that are always in the table, before those of scripts.

Order has a meaning: a row sees the model as the rows before it have left it, and what they have published. Slices come
first, so that others add whole layers to a model that is sliced; monitors come before what may write to them; sequences
are cut when nobody else changes a batch any more. What ends
something runs in reverse: `walltime` may end the program after a step when the features of scripts are done with it,
and `flops_profiler` has reported.
"""

_table: dict[str, Feature] = {feature.name: feature for feature in BUILT_IN}


def register(feature: Feature) -> Feature:
    """Enter a feature into the table, for engines that are made from now on; call it on all ranks alike.

    Raises:
        UsageError: the name is taken, or the section cannot be added to the settings.
    """
    if feature.name in _table:
        msg = f"a feature named {feature.name!r} is registered already; unregister it first, or choose another name"
        raise UsageError(msg)
    if feature.section is not None:
        added.add_section(feature.name, feature.section)
    _table[feature.name] = feature
    return feature


def unregister(name: str) -> None:
    """Take a feature out of the table; engines that have it keep it.

    Raises:
        UsageError: there is no such feature, or it is one of `BUILT_IN`.
    """
    if any(feature.name == name for feature in BUILT_IN):
        msg = f"feature {name!r} belongs to mpispeed and stays; its section in the config switches it off"
        raise UsageError(msg)
    feature = _table.pop(name, None)
    if feature is None:
        msg = f"no feature named {name!r} is registered; registered: {', '.join(_table) or 'none'}"
        raise UsageError(msg)
    if feature.section is not None:
        added.remove_section(name)


def registered() -> tuple[Feature, ...]:
    """All rows of the table, in the order of their registration."""
    return tuple(_table.values())


def require_same(comm: Comm) -> None:
    """Refuse tables that differ between ranks.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank.
    """
    found = comm.gather_objects(list(_table))
    odd = next((rank for rank, names in enumerate(found) if names != found[0]), None)
    if odd is not None:
        told = [", ".join(names) or "none" for names in (found[0], found[odd])]
        msg = f"rank {odd} has registered the features {told[1]}, and rank 0 {told[0]}; register the same on all ranks"
        raise ConfigError(msg)
