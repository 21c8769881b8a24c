"""The progress of a unit's gradient: in every order of landing, launching and settling it ends with the sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import StoreError
from mpispeed.sharding.reducers import Backlog, Held, Phase, UnitGradient
from mpispeed.store.layout import FlatLayout

LAYOUT = FlatLayout([("a", (2,), 0), ("b", (3,), 0)], 1)
INNER, OUTER = 2, 3
"""Ranks that sum every bucket, and groups of such ranks that sum accumulators; all ranks have the same gradients."""


class Work:
    """A started sum, which runs when it is waited for or earlier."""

    def __init__(self, run):
        self._run, self.waits = run, 0

    def run(self):
        if self._run is not None:
            self._run()
            self._run = None

    def wait(self):
        self.waits += 1
        self.run()


class Unit:
    """A unit of several ranks with equal gradients, of which one is followed."""

    def __init__(self, kind):
        self.is_whole, self.has_outer = kind == "replicated", kind == "in two hops"
        self.gradient = UnitGradient("u")
        self.accumulator = torch.zeros(LAYOUT.padded)
        self.backlog = Backlog(2 * LAYOUT.padded)
        self.works = []
        self.expected = torch.zeros(LAYOUT.padded)

    def begin(self):
        gradient = self.gradient
        if gradient.is_averaged and (self.is_whole or self.has_outer):
            self.settle()
            gradient.put_aside(self.accumulator.clone())
        gradient.begin_micro_step()

    def fill(self):
        if self.gradient.bucket is None:
            bucket = self.accumulator if self.is_whole else torch.full((LAYOUT.padded,), 99.0)
            self.gradient.use(bucket, is_new=not self.is_whole)

    def land(self, name, value):
        entry = LAYOUT[name]
        self.fill()
        view = self.gradient.view(entry)
        view.copy_(view + value if name in self.gradient.written else torch.full_like(view, value))
        self.gradient.land(name)
        self.expected[entry.span.slice] += value * INNER * OUTER

    def launch(self, *, is_due):
        self.fill()
        for entry in LAYOUT.entries:
            if entry.name not in self.gradient.written:
                self.gradient.view(entry).zero_()
        for hole in LAYOUT.holes():
            self.gradient.bucket[hole.slice].zero_()
        self.settle()
        self.start(self.gradient.launch(keeps=not self.is_whole, completes=is_due or not self.has_outer))

    def start(self, reduction):
        bucket, adds, completes, carried = reduction.bucket, reduction.adds, reduction.completes, reduction.carried

        def run():
            if bucket is not None:
                total = bucket * (INNER if self.has_outer else INNER * OUTER)
                self.accumulator.copy_(self.accumulator + total if adds else total)
            if completes:
                if self.has_outer:
                    self.accumulator *= OUTER
                if carried is not None:
                    self.accumulator += carried

        self.backlog.add(LAYOUT.padded, lambda: reduction.settle(Work.wait))
        reduction.work = Work(run)
        self.works.append(reduction.work)

    def settle(self):
        if self.gradient.reduction is not None:
            self.gradient.reduction.settle(Work.wait)

    def finish(self):
        if not self.gradient.is_launched:
            self.launch(is_due=True)
        if self.gradient.held is Held.PART:
            self.settle()
            self.start(self.gradient.complete())
        self.backlog.clear()


LANDINGS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-4, 4)), max_size=4)
MICRO_STEPS = st.lists(
    st.tuples(LANDINGS, st.sampled_from(("nothing", "run", "settle")), st.booleans(), st.booleans()), max_size=6
)


@given(st.sampled_from(("replicated", "sharded", "in two hops")), MICRO_STEPS)
def test_every_order_ends_with_the_sum(kind, micro_steps):
    unit = Unit(kind)
    for landings, meanwhile, is_due, finishes in micro_steps:
        unit.begin()
        for at, (name, value) in enumerate(landings):
            unit.land(name, float(value))
            if at == len(landings) // 2 and unit.works:
                if meanwhile == "run":
                    unit.works[-1].run()
                elif meanwhile == "settle":
                    unit.settle()
        if is_due or not unit.is_whole:  # replicated gradients are summed when that is due
            unit.launch(is_due=is_due)
        if finishes:
            unit.finish()
    unit.finish()
    assert torch.equal(unit.accumulator, unit.expected)
    assert unit.gradient.phase is Phase.REDUCED
    assert unit.gradient.held is Held.ALL
    assert unit.gradient.reduction is None
    assert all(work.waits == 1 for work in unit.works)


@given(st.integers(1, 5), st.integers(1, 4))
def test_a_bounded_backlog_waits_for_its_own_micro_step_and_for_no_later_one(micro_steps, room):
    unit, backlog = Unit("sharded"), Backlog(room)
    works = []
    for micro in range(micro_steps):
        unit.begin()
        unit.land("a", 1.0)
        unit.settle()
        reduction = unit.gradient.launch(keeps=True, completes=True)
        backlog.add(1, lambda reduction=reduction: reduction.settle(Work.wait))
        reduction.work = Work(lambda: None)
        works.append(reduction.work)
        assert [work.waits for work in works] == [1] * micro + [0]
    backlog.add(room, lambda: None)
    assert [work.waits for work in works] == [1] * micro_steps


def refused(gradient, act):
    before = gradient.phase, gradient.held
    with pytest.raises(StoreError, match="internal error: the gradient of unit 'u' cannot"):
        act()
    assert (gradient.phase, gradient.held) == before


def test_transitions_that_would_lose_or_double_gradients_are_refused():
    unit = Unit("in two hops")
    gradient = unit.gradient
    refused(gradient, gradient.complete)
    refused(gradient, lambda: gradient.put_aside(unit.accumulator))
    refused(gradient, lambda: gradient.view(LAYOUT["a"]))
    unit.land("a", 1.0)
    assert gradient.phase is Phase.FILLING
    refused(gradient, lambda: gradient.use(unit.accumulator, is_new=True))
    unit.launch(is_due=False)
    assert (gradient.phase, gradient.held) == (Phase.REDUCING, Held.PART)
    refused(gradient, lambda: gradient.land("a"))
    refused(gradient, lambda: gradient.launch(keeps=True, completes=True))
    refused(gradient, lambda: gradient.use(unit.accumulator, is_new=True))
    refused(gradient, gradient.complete)  # its first sum still runs
    unit.settle()
    assert gradient.phase is Phase.REDUCED
    refused(gradient, lambda: gradient.land("a"))
    refused(gradient, lambda: gradient.launch(keeps=True, completes=True))
    unit.finish()
    assert (gradient.phase, gradient.held) == (Phase.REDUCED, Held.ALL)
    refused(gradient, gradient.complete)
