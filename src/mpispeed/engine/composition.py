"""The objects that an engine is made of, each made of the components that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.engine.backward import DirectBackward
from mpispeed.engine.build.loaders import Loaders
from mpispeed.engine.features import registered
from mpispeed.engine.hooks import Context
from mpispeed.engine.state.checkpoints import Checkpoints
from mpispeed.engine.state.offload_states import OffloadStates
from mpispeed.engine.state.weights import Weights
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from mpispeed.engine.backward import Accumulation
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.curriculum import Curricula
    from mpispeed.engine.updates import Updates


@dataclass(frozen=True, slots=True)
class Composition:
    """The objects that an engine delegates to.

    Attributes:
        parts: the components that they work on.
        accumulation: the boundaries of global batches.
        direct: backward passes that scripts start themselves.
        updates: the updates.
        checkpoints: saving and loading of whole runs.
        weights: the model's weights as state dicts.
        offload: states that leave memory on request.
        loaders: the loader of the training data, and more of its kind.
        curricula: schedules of difficulty.
    """

    parts: Parts
    accumulation: Accumulation
    direct: DirectBackward
    updates: Updates
    checkpoints: Checkpoints
    weights: Weights
    offload: OffloadStates
    loaders: Loaders
    curricula: Curricula


def compose(parts: Parts) -> Composition:
    """Make the objects of an engine, and attach the features of the table.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a feature fails on one.
    """
    optimization = parts.optimization
    direct = DirectBackward(
        None if optimization is None else optimization.grads,
        parts.scaler,
        parts.accumulation,
        parts.bus,
        clock=parts.clock,
        require=parts.require,
        end_backward=parts.end_backward,
    )
    is_pipeline = isinstance(parts.module, PipelineModule)
    # Gradients that come outside of a pipeline's schedule are refused by the gradient store.
    if optimization is not None and not is_pipeline:
        optimization.hooks.listen(direct.expect_gradient)
    context = Context(None, parts.plan, parts.mesh, parts.given, parts, {})
    parts.updates.insert(parts.features.attach(registered(), context))
    return Composition(
        parts=parts,
        accumulation=parts.accumulation,
        direct=direct,
        updates=parts.updates,
        checkpoints=Checkpoints(parts),
        weights=Weights(parts),
        offload=OffloadStates(parts),
        loaders=Loaders(parts, shuffles=not is_pipeline),
        curricula=parts.features.published["curricula"],
    )
