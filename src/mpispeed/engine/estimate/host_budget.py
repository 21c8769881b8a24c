"""Check of a rank's predicted host memory against its limit, before anything is allocated."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_bytes
from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.sharding import sharded_param

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm
    from mpispeed.optim.rule import Rule
    from mpispeed.plan.plan import Plan

ROWS_SHOWN = 4
"""Kinds of state that a message names, the largest first."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Address space of this process. Units: bytes.

    Attributes:
        mapped: mapped now and still mapped when an engine has taken the model over.
        rlimit: the soft RLIMIT_AS; None if unlimited.
    """

    mapped: int
    rlimit: int | None


def predict_host(
    plan: Plan,
    model: nn.Module,
    *,
    group_of: Mapping[int, int] | None = None,
    slots: Sequence[str] | None = None,
    rule: Rule | None = None,
    slots_of: Mapping[int, tuple[str, ...]] | None = None,
) -> dict[str, int]:
    """Predicted host memory of one rank while it trains, states and buffers by kind. Units: bytes.

    Activations are not counted, nor buckets held only if gradient reductions lag behind backward. Nothing is allocated.
    Local.

    Args:
        plan: the settings for so many ranks.
        model: any that `initialize` takes, also one constructed in `zero.Init`.
        group_of: parameter group index by `id` of the parameter; all trainable parameters by default.
        slots: names of the optimizer's flat state tensors; by default those of the plan's optimizer, or Adam's.
        rule: the optimizer, where `slots` are given; None: one whose gradients are summed.
        slots_of: as for `plan.units.deal_units`, where `slots` are given.

    Raises:
        ConfigError: the plan's optimizer refuses its settings, or buffers are too short for shards of units.
    """
    facts = gather_inputs(plan, model, group_of=group_of, slots=slots, rule=rule, slots_of=slots_of)
    # More than two micro-steps hold no more than two.
    steps = min(facts.micro_steps, 2)
    return predict(replace(facts, is_overlapped=False, micro_steps=steps)).memory_bytes()


def read_limits(model: nn.Module | None = None, root: Path = Path("/")) -> ProcessLimits:
    """Address space that this process has mapped, and its limit.

    Args:
        model: its parameters are freed while an engine takes it over, so they do not count as mapped.
        root: the folder that has /proc, for tests.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = int((root / "proc/self/statm").read_text().split()[0])
    given = 0
    if model is not None:
        own = [
            param for param in model.parameters() if param.device.type == "cpu" and not sharded_param.is_sharded(param)
        ]
        given = sum({param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in own}.values())
    mapped = max(0, pages * resource.getpagesize() - given)
    return ProcessLimits(mapped, None if soft == resource.RLIM_INFINITY else soft)


def check_host_budget(predicted_bytes: Mapping[str, int], limit: int | None, *, mapped: int, rlimit: int | None) -> str:
    """A sentence if the prediction is more than the limit, else "".

    Args:
        predicted_bytes: kind of state -> bytes, as `predict_host`.
        limit: `host_memory_limit` of the config; None: the remainder of `rlimit` is the limit.
        mapped: address space that the process has in use already.
        rlimit: its RLIMIT_AS, or None.
    """
    if limit is not None:
        most, source = limit, f"host_memory_limit is {format_bytes(limit)}"
    elif rlimit is not None:
        most = max(0, rlimit - mapped)
        source = (
            f"RLIMIT_AS of {format_bytes(rlimit)} (ulimit -v) leaves {format_bytes(most)} beside the "
            f"{format_bytes(mapped)} that the process has mapped"
        )
    else:
        return ""
    need = sum(predicted_bytes.values())
    if need <= most:
        return ""
    rows = sorted(((size, what) for what, size in predicted_bytes.items() if size), reverse=True)
    shown = ", ".join(f"{what} {format_bytes(size)}" for size, what in rows[:ROWS_SHOWN])
    rest = sum(size for size, _ in rows[ROWS_SHOWN:])
    shown += f", other {format_bytes(rest)}" if rest else ""
    return (
        f"each rank needs {format_bytes(need)} of host memory for the model ({shown}), and {source}; set "
        "zero_optimization.offload_optimizer or offload_param to device nvme, start more ranks, or raise the limit"
    )


def require_host_budget(
    comm: Comm,
    plan: Plan,
    model: nn.Module,
    *,
    group_of: Mapping[int, int] | None = None,
    slots: Sequence[str] | None = None,
    rule: Rule | None = None,
    slots_of: Mapping[int, tuple[str, ...]] | None = None,
) -> None:
    """Refuse a plan for which some rank lacks host memory, before anything is allocated.

    Args:
        comm: all ranks.
        plan: the settings.
        model: what will be trained.
        group_of: as `predict_host`.
        slots: as `predict_host`.
        rule: as `predict_host`.
        slots_of: as `predict_host`.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if one of them needs more than it may have.
    """
    with comm.together(ConfigError):
        limit, found = plan.config.host_memory_limit, read_limits(model)
        # On a CPU all of the prediction is host memory.
        if (limit is not None or found.rlimit is not None) and plan.device.type == "cpu":
            rows = predict_host(plan, model, group_of=group_of, slots=slots, rule=rule, slots_of=slots_of)
            problem = check_host_budget(rows, limit, mapped=found.mapped, rlimit=found.rlimit)
            if problem:
                raise ConfigError(problem)
