"""The objects that an engine is made of, each made of the components that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.engine.backward import DirectBackward
from mpispeed.engine.build.loaders import Loaders
from mpispeed.engine.observe import fault_injection
from mpispeed.engine.preemption import RunEnd, make_run_end
from mpispeed.engine.state.checkpoints import Checkpoints
from mpispeed.engine.state.offload_states import OffloadStates
from mpispeed.engine.state.weights import Weights
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from mpispeed.drill.inject import Injector
    from mpispeed.engine.backward import Accumulation
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.step import Updates


@dataclass(frozen=True, slots=True)
class Composition:
    """The objects that an engine delegates to.

    Attributes:
        accumulation: the boundaries of global batches.
        direct: backward passes that scripts start themselves.
        updates: the updates.
        checkpoints: saving and loading of whole runs.
        weights: the model's weights as state dicts.
        offload: states that leave memory on request.
        loaders: the loader of the training data, and more of its kind.
        run_end: what saves and ends the run in time, or None.
    """

    accumulation: Accumulation
    direct: DirectBackward
    updates: Updates
    checkpoints: Checkpoints
    weights: Weights
    offload: OffloadStates
    loaders: Loaders
    run_end: RunEnd | None


def compose(parts: Parts, injector: Injector | None = None) -> Composition:
    """Make the objects of an engine; `injector` has the faults of a drill.

    If that fails, the model and the optimizer can be given to another `initialize`.

    Collective over: all ranks, if the run is to end in time.

    Raises:
        ConfigError: on every rank, if MPISPEED_WALLTIME of one is not a duration.
    """
    optimization = parts.optimization
    direct = DirectBackward(
        None if optimization is None else optimization.grads,
        parts.scaler,
        parts.accumulation,
        parts.bus,
        require=parts.require,
        end_backward=parts.end_backward,
    )
    is_pipeline = isinstance(parts.module, PipelineModule)
    # Gradients that come outside of a pipeline's schedule are refused by the gradient store.
    if optimization is not None and not is_pipeline:
        optimization.hooks.listen(direct.expect_gradient)
    if injector is None:
        checkpoints = Checkpoints(parts)
    else:
        checkpoints = fault_injection.DrilledCheckpoints(parts, injector)
        fault_injection.attach(parts, injector)
    try:
        run_end = make_run_end(parts, checkpoints)
    except BaseException:
        parts.dismantle()
        raise
    return Composition(
        accumulation=parts.accumulation,
        direct=direct,
        updates=parts.updates,
        checkpoints=checkpoints,
        weights=Weights(parts),
        offload=OffloadStates(parts),
        loaders=Loaders(parts, shuffles=not is_pipeline),
        run_end=run_end,
    )
