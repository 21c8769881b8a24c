"""An exchange of one's own: a row of the table is all that a strategy needs."""

import pytest
import torch

from mpispeed.exchange import table
from mpispeed.exchange.cost import SUMS_ALONE
from mpispeed.exchange.strategy import ExchangeStrategy
from mpispeed.exchange.table import ExchangeKind
from tests.helpers.onebit_training import BATCH, run_step, samples
from tests.zoo import same_bits
from tests.zoo.models import Mlp
from tests.zoo.training import ADAM, config, start, weights

pytestmark = pytest.mark.ranks(2, 3)


class LocalUnits:
    """Leaves all gradients to the ranks that have them."""

    local_grads, takes_units, keeps_buckets = True, False, False

    def __init__(self, sums):
        self.sums = sums

    def begin_backward(self, *, is_again):
        pass

    def has_taken(self, unit):
        return False

    def clear(self):
        self.sums.clear()

    def rescale(self, factor, *, is_overflow):
        self.sums.rescale(factor, is_overflow=is_overflow)


class LateSums(ExchangeStrategy):
    """Sums gradients in the step, one unit after the other, and not beside the backward pass."""

    is_phased = True

    def __init__(self, making):
        super().__init__(LocalUnits(making.sums), making.rule)
        self._making, self.calls = making, []

    def begin(self, step):
        self._making.grads.is_local = True
        self.calls.append(("begin", step))

    def before_update(self, step, multiplier):
        self.calls.append(("before", step))
        comm = self._making.mesh["data"]
        for unit in self._making.params.table.units:
            comm.all_reduce(self._making.grads.reduced(unit), scale=1.0 / comm.size)
        return multiplier

    def drop(self):
        self.calls.append(("drop", self.calls[-1][1]))

    def after_update(self, step):
        self.calls.append(("after", step))


def trained(accumulation, batches):
    engine = start(config(0, BATCH, accumulation, reduction="ordered", **ADAM), Mlp())
    losses = [run_step(engine, batch) for batch in batches]
    found = weights(engine)
    engine.destroy()
    return losses, found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sums_in_the_step_train_as_sums_beside_backward(accumulation, monkeypatch):
    batches = samples(4)
    losses, expected = trained(accumulation, batches)
    made = []
    kind = ExchangeKind(lambda _: True, lambda making: made.append(LateSums(making)) or made[-1], lambda *_: SUMS_ALONE)
    monkeypatch.setattr(table, "KINDS", (kind,))
    late, found = trained(accumulation, batches)
    assert late == losses
    same_bits(found, expected)
    steps = [(call, step) for step in range(1, 5) for call in ("begin", "before", "after")]
    assert made[0].calls == [*steps, ("begin", 5)]


def test_a_skipped_step_is_dropped(monkeypatch):
    made = []
    kind = ExchangeKind(lambda _: True, lambda making: made.append(LateSums(making)) or made[-1], lambda *_: SUMS_ALONE)
    monkeypatch.setattr(table, "KINDS", (kind,))
    engine = start(config(0, BATCH, bf16={"enabled": True}, **ADAM), Mlp())
    run_step(engine, samples(1)[0], factor=float("inf"))
    assert not engine.was_step_applied()
    assert made[0].calls == [("begin", 1), ("drop", 1), ("begin", 1)]
    assert all(bool(torch.isfinite(values).all()) for values in weights(engine).values())
    engine.destroy()
