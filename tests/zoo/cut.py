"""Models of every shape, trained with whole and with cut parameters: the two have to agree to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpispeed.sharding.prefetch import Tally
from mpispeed.sharding.sharded_param import is_sharded
from tests.zoo.compare import same_bits
from tests.zoo.models import BATCH, built
from tests.zoo.training import ORDERED, config, start, weights

WIDTH = 6

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: losses of this rank, all parameters and buffers, and what was fetched."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    tally: Tally | None


def own_batches(engine: Any, steps: int) -> list[Batch]:
    """This rank's part of `steps` global batches: inputs and targets of one shape."""
    x = torch.randn(steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    count = BATCH // engine.world_size
    own = slice(engine.global_rank * count, (engine.global_rank + 1) * count)
    return [(part[own], part[own].sin()) for part in x]


def difference(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return nn.functional.mse_loss(out.float(), y)


def one_step(engine: Any, batch: Batch, step: int) -> float:
    """Forward, backward, step."""
    del step
    loss = difference(engine(batch[0]), batch[1])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


Drive = Callable[[Any, Batch, int], float]


def tally_of(engine: Any) -> Tally | None:
    """What the engine fetched; None if it has nothing to fetch."""
    prefetcher = engine.mpispeed.parts.params.prefetcher
    return None if prefetcher is None else prefetcher.tally


def run(
    make: Callable[[], nn.Module], settings: dict[str, Any], drive: Drive = one_step, steps: int = 4, **more: Any
) -> Outcome:
    """Train; nothing may be whole after any step of a model that is cut."""
    engine = start(settings, built(make), **more)
    losses = []
    for step, batch in enumerate(own_batches(engine, steps)):
        torch.manual_seed(step)
        losses.append(drive(engine, batch, step))
        if (tally := tally_of(engine)) is not None:
            check_all_cut(engine)
    tally = tally_of(engine)
    module = engine.module
    engine.destroy()
    state = {**weights(module), **{f"buffer {name}": value.clone() for name, value in module.named_buffers()}}
    return Outcome(losses, state, tally)


def check_all_cut(engine: Any) -> None:
    """Fail if any parameter is whole, held or on its way."""
    tally = tally_of(engine)
    assert tally is not None
    assert tally.live_elements == 0
    params = engine.mpispeed.parts.params
    whole = [name for name, param in engine.module.named_parameters() if param.numel() and not is_sharded(param)]
    assert not whole, whole
    assert all(params.prefetcher.full(unit) is None for unit in params.table.all_units)


def check_like_whole(
    make: Callable[[], nn.Module],
    drive: Drive = one_step,
    *,
    steps: int = 4,
    kept: bool = False,
    like: int = 0,
    more: dict[str, Any] | None = None,
    **given: Any,
) -> None:
    """Train with whole parameters, with cut ones, and with cut ones that never stay; all bits have to agree.

    Args:
        make: makes the model.
        drive: runs one step.
        steps: how many.
        kept: views of parameters outlive their modules' calls; otherwise none may.
        like: the stage to compare with: with accumulation sums are in the order of stage 2.
        more: arguments of `initialize`.
        given: of the config.
    """
    given = ORDERED | given
    reference = run(make, config(like, **given), drive, steps, **(more or {}))
    assert any(loss != reference.losses[0] for loss in reference.losses[1:]), "nothing was learned"
    keeps: list[int] = []
    for reuse in (None, 0):
        ours = run(make, config(3, reuse=reuse, **given), drive, steps, **(more or {}))
        assert ours.losses == reference.losses
        same_bits(ours.state, reference.state)
        if ours.tally is not None:
            assert ours.tally.fetches > 0
            keeps.append(ours.tally.kept_elsewhere)
    assert any(keeps) == (kept and bool(keeps)), keeps
