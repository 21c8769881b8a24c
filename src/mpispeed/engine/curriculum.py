"""`curriculum_learning`: the older form of curriculum learning; and the schedules of both forms, for scripts.

Source: DeepSpeed's documentation of curriculum learning, and arXiv 2108.06084.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.curriculum.schedule import CurriculumScheduler
from mpispeed.curriculum.truncation import truncate
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.sequence import cuts_batches
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

SEQLEN = "seqlen"
"""The curriculum_type whose difficulty is a length."""
KEYWORD = "curriculum_seqlen"
"""Keyword argument of the model's forward that says the length."""


Functions = Mapping[str, Callable[[int], int]]


class Curricula:
    """The schedules of a run, by the names of their measures of difficulty.

    Features that grow a difficulty add theirs: `context.published["curricula"].add(name, scheduler)`.
    """

    def __init__(self) -> None:
        """None yet."""
        self._schedulers: list[tuple[str, CurriculumScheduler]] = []

    def add(self, name: str, scheduler: CurriculumScheduler) -> None:
        """Add a schedule; where two have one name, a function is for both."""
        self._schedulers.append((name, scheduler))

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Functions | Callable[[int], int]) -> None:
        """Set functions that give the difficulty of a step, which is counted from 1, for schedules of type custom.

        Call it before training, with the same functions on all ranks, also if a checkpoint is loaded: checkpoints have
        the difficulty, not functions. Local.

        Args:
            schedule_func_dict: name of a measure -> function. In the section curriculum_learning the name is its
                curriculum_type, such as seqlen. A function alone is for the only schedule of type custom.

        Raises:
            UsageError: no schedule has one of the names, or it is of another type. Nothing was set then.
        """
        functions, call = self._named(schedule_func_dict), "engine.set_custom_curriculum_learning_schedule()"
        names = ", ".join(dict.fromkeys(name for name, _ in self._schedulers))
        unknown = ", ".join(str(name) for name in functions if name not in dict(self._schedulers))
        if unknown:
            has = f"its schedules are of {names}" if names else "curriculum learning is off in the config"
            msg = f"{call}: this run has no schedule of {unknown}; {has}"
            raise UsageError(msg)
        found = [(name, each) for name, each in self._schedulers if name in functions]
        fixed = next((name for name, each in found if not each.is_custom), None)
        if fixed is not None:
            msg = f"{call}: schedule_type of {fixed} is {dict(found)[fixed].kind}, and functions are for type custom"
            raise UsageError(msg)
        for name, scheduler in found:
            scheduler.set_custom_get_difficulty(functions[name])

    def _named(self, given: Functions | Callable[[int], int]) -> Functions:
        """Functions by the names of their schedules."""
        custom = [name for name, each in self._schedulers if each.is_custom]
        if isinstance(given, Mapping) and all(map(callable, given.values())):
            return given
        if callable(given) and not isinstance(given, Mapping) and len(set(custom)) == 1:
            return {custom[0]: given}
        msg = (
            "engine.set_custom_curriculum_learning_schedule() takes a dict {name: function of the step}; schedules of "
            f"type custom in this run: {', '.join(custom) or 'none'}"
        )
        raise UsageError(msg)


class Growth:
    """The difficulty of a run, as a function of its step.

    Attributes:
        scheduler: `engine.curriculum_scheduler_legacy`.
    """

    def __init__(self, context: Context) -> None:
        """Start at the minimum."""
        section, self._context = context.plan.config.curriculum_learning, context
        self.name = str(section.curriculum_type)
        # find_warnings speaks of lengths that are slow, once and with the key
        config = {key: getattr(section, key) for key in ("min_difficulty", "max_difficulty", "schedule_type")}
        numbers = section.schedule_config.model_dump()
        self.scheduler = CurriculumScheduler(
            {**config, "schedule_config": numbers}, warns=context.mesh.rank == 0 and section.schedule_type == "custom"
        )
        self._gives_length = self.name == SEQLEN and not isinstance(context.module, PipelineModule)
        self._cuts = self._gives_length and context.mesh["sequence"].size > 1

    def update(self) -> None:
        """Go to the step that is under way. Local."""
        step, before = self._context.counters.global_steps + 1, self.scheduler.get_current_difficulty()
        now = self.scheduler.update_difficulty(step)
        if now != before and self._context.mesh.rank == 0:
            log.info("curriculum_learning: %s %d from step %d on", self.name, now, step)

    def batch(self, inputs: Any, is_training: bool) -> Any:
        """The inputs of a forward pass; in training with the length, where the difficulty is one.

        Where ranks share sequences the inputs are shortened here, before each rank gets its part of them.
        """
        if not is_training or isinstance(self._context.module, PipelineModule):
            return inputs
        self.update()
        if not self._gives_length:
            return inputs
        if self._cuts:
            return truncate(inputs, self.scheduler.get_current_difficulty())
        args, kwargs = inputs
        return args, {**kwargs, KEYWORD: self.scheduler.get_current_difficulty()}

    def write(self, event: Mapping[str, Any]) -> None:
        """Write the difficulty of the step that ended to the monitors."""
        point = f"Train/Samples/curriculum_{self.name}", self.scheduler.get_current_difficulty(), event["samples"]
        self._context.published["monitor"].write_events([point])

    def warn(self) -> None:
        """Warn of a model that cannot take the length."""
        if self._gives_length and not self._cuts and not _takes(self._context.module):
            log.warning(
                "curriculum_learning passes %s=LENGTH to the model in training, and forward of %s has no such argument "
                "which is a TypeError then; add the argument, and cut the inputs to that length there",
                KEYWORD, type(self._context.module).__name__,
            )  # fmt: skip


def _takes(model: nn.Module) -> bool:
    try:
        params = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return True  # nobody knows
    return KEYWORD in params or any(each.kind is each.VAR_KEYWORD for each in params.values())


def attach(context: Context) -> Hooks:
    """Grow the difficulty, if the config says so; and offer the list of all schedules.

    Raises:
        ConfigError: the section does not hold together; or sequences would have to be shortened that a script has cut.
    """
    curricula, config = Curricula(), context.plan.config
    if not config.curriculum_learning.enabled:
        return Hooks(published={"curricula": curricula})
    is_of_length, size = config.curriculum_learning.curriculum_type == SEQLEN, context.mesh["sequence"].size
    if is_of_length and size > 1 and not cuts_batches(context):
        msg = (
            f"curriculum_learning shortens whole sequences, of which {size} ranks have parts that the script or its "
            "loader has cut, as sequence_parallel.cuts_batches or the mpu says; let the engine cut, or disable "
            "curriculum_learning and shorten them before the cut (mpispeed.curriculum.truncate)"
        )
        raise ConfigError(msg)
    growth = Growth(context)
    curricula.add(growth.name, growth.scheduler)
    if context.mesh.rank == 0:
        growth.warn()
        context.bus.subscribe(Event.STEP_END, growth.write)
    return Hooks(
        batch=growth.batch,
        global_batch=growth.update,
        state=growth.scheduler.get_state,
        check=growth.scheduler.check_state,
        load=growth.scheduler.set_state,
        published={"curricula": curricula, "curriculum_scheduler_legacy": growth.scheduler},
    )
