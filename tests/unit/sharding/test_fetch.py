"""The fetcher on simulated ranks: budgets are kept, nothing is read before it is whole, all ranks do the same."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import StoreError
from mpispeed.mesh import sim
from mpispeed.sharding.sharded_param import is_sharded
from tests.unit.engine.simulated import engine_on
from tests.zoo import same_bits
from tests.zoo.training import ADAM, config

WIDTH = 4
BATCH = 6


class Block(nn.Module):
    """One or several layers, some of them frozen."""

    def __init__(self, layers, frozen):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.layers(x)) + x


class Wandering(nn.Module):
    """Runs its blocks in the order of `ways`, one of them in each pass; some are computed again in backward."""

    def __init__(self, blocks, ways):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList(Block(*spec) for spec in blocks)
        self.last = nn.Linear(WIDTH, WIDTH)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        self.ways, self.passes = ways, 0

    def forward(self, x):
        way = self.ways[self.passes % len(self.ways)]
        self.passes += 1
        for index, again in way:
            block = self.blocks[index % len(self.blocks)]
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.last(x).square().mean()


def limited(stage, **limits):
    zero = {f"stage3_{name}": value for name, value in limits.items()}
    return config(stage, BATCH, reduction="ordered", zero=zero, **ADAM)


def watched(prefetcher):
    """Note every gather that is started and check the budget then; returns the list."""
    started, start, show = [], prefetcher._start, prefetcher.shards.unshard
    largest = max(unit.layout.padded for unit in prefetcher._units)
    needed = max(sum(u.layout.padded for u in group) for group in bound_together(prefetcher))

    def noting(unit, reader):
        start(unit, reader)
        started.append(unit.index)
        assert prefetcher.tally.live_elements <= prefetcher.limits.live + max(largest, needed)
        assert prefetcher.tally.live_elements == sum(prefetcher._units[i].layout.padded for i in prefetcher._full)

    def showing(unit, full):
        assert unit.index not in prefetcher._works or prefetcher._works[unit.index].is_done()
        show(unit, full)

    prefetcher._start, prefetcher.shards.unshard = noting, showing
    return started


def bound_together(prefetcher):
    units = prefetcher._units
    return [[units[i] for i in {unit.index, *prefetcher._bound.get(unit.index, ())}] for unit in units]


def train(world, stage, model, steps, **limits):
    engine = engine_on(world, limited(stage, **limits), model)
    prefetcher = engine.parts.params.prefetcher
    started = watched(prefetcher) if prefetcher is not None else []
    count = BATCH // world.size
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, WIDTH, generator=generator)[world.rank * count : (world.rank + 1) * count]
        if step % 3 == 2:
            with torch.no_grad():
                losses.append(float(model(x)))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if prefetcher is not None:
            assert prefetcher.tally.live_elements == 0
            assert prefetcher.tally.kept_elsewhere == 0
            assert all(is_sharded(param) for param in model.parameters())
    tally = prefetcher.tally if prefetcher is not None else None
    engine.destroy()
    return losses, [param.detach().clone() for param in model.parameters()], started, tally


blocks = st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4)
ways = st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=3)


@given(
    blocks=blocks,
    ways=ways,
    ranks=st.sampled_from([2, 3]),
    live=st.sampled_from([None, 0, 300, 2000, 10**9]),
    reuse=st.sampled_from([None, 0, 200, 10**9]),
    ahead=st.sampled_from([0, 256, 10**9]),
)
@settings(max_examples=40)
def test_any_order_of_use_under_any_budget(blocks, ways, ranks, live, reuse, ahead):
    models = [Wandering(blocks, ways) for _ in range(2 * ranks)]
    limits = {"max_live_parameters": live, "max_reuse_distance": reuse, "prefetch_bucket_size": ahead}
    whole = sim.run(ranks, lambda world: train(world, 0, models[world.rank], 5))
    cut = sim.run(ranks, lambda world: train(world, 3, models[ranks + world.rank], 5, **limits))
    same_bits([found[:2] for found in cut], [found[:2] for found in whole])
    assert all(result[2] == cut[0][2] for result in cut), "ranks gather in different orders"
    tally = cut[0][3]
    assert tally.fetches == len(cut[0][2])
    assert live is None or tally.peak_elements <= live + 4 * 3 * 256


def job(world, model, act, **limits):
    engine = engine_on(world, limited(3, **limits), model)
    result = act(engine, engine.parts.params.prefetcher, model)
    engine.destroy()
    return result


def on_two_ranks(act, blocks=((1, False),) * 4, **limits):
    models = [Wandering(blocks, [[(i, False) for i in range(len(blocks))]]) for _ in range(2)]
    return sim.run(2, lambda world: job(world, models[world.rank], act, **limits))[0]


def step(engine):
    loss = engine(torch.ones(BATCH // 2, WIDTH))
    engine.backward(loss)
    engine.step()


def test_the_second_pass_fetches_ahead_and_each_unit_once():
    def act(engine, prefetcher, model):
        step(engine)
        first = prefetcher.tally.fetches, prefetcher.tally.ahead
        step(engine)
        return first, (prefetcher.tally.fetches - first[0], prefetcher.tally.ahead - first[1]), prefetcher.tally.unused

    first, second, unused = on_two_ranks(act, max_live_parameters=10**9)
    assert first == (9, 0)  # five units in forward; in backward all but the first, since nobody wants its input's
    assert second == (5, 4)  # all but the very first are under way before they are needed
    assert unused == 0


def test_without_reuse_each_unit_is_fetched_for_forward_and_for_backward():
    def act(engine, prefetcher, model):
        step(engine)
        before = prefetcher.tally.fetches
        step(engine)
        return prefetcher.tally.fetches - before, prefetcher.tally.peak_elements

    fetches, peak = on_two_ranks(act, max_reuse_distance=0, prefetch_bucket_size=0)
    assert fetches == 9
    assert peak <= 2 * 256


def test_the_budget_of_live_elements_bounds_the_peak():
    def act(engine, prefetcher, model):
        for _ in range(3):
            step(engine)
        return prefetcher.tally.peak_elements, max(unit.layout.padded for unit in prefetcher._units)

    for live in (0, 1, 600, 1100):
        peak, largest = on_two_ranks(act, max_live_parameters=live)
        assert peak <= live + largest


def test_by_default_one_block_and_the_one_that_comes_next_are_whole():
    def act(engine, prefetcher, model):
        step(engine)
        before = prefetcher.tally.fetches, prefetcher.tally.ahead
        for _ in range(2):
            step(engine)
        tally, sizes = prefetcher.tally, {unit.layout.padded for unit in prefetcher._units}
        return tally.fetches - before[0], tally.ahead - before[1], tally.peak_elements, sizes, tally.unused

    fetches, ahead, peak, sizes, unused = on_two_ranks(act)
    assert {peak} == {2 * size for size in sizes}  # all five units are alike
    assert fetches == 2 * 7  # the last block and the head are still there for backward
    assert ahead == fetches - 2  # what a step begins with is not known before it begins
    assert unused == 0


def test_prefetch_lets_go_of_what_is_used_later_and_of_nothing_in_vain():
    class Tied(Wandering):
        """Its first weight is needed again at the end, as an embedding that is the head too."""

        def __init__(self, blocks, ways):
            super().__init__(blocks, ways)
            self.first = nn.Linear(WIDTH * WIDTH, WIDTH * WIDTH, bias=False)

        def forward(self, x):
            x = self.first(x.repeat(1, WIDTH))[:, :WIDTH]
            for block in self.blocks:
                x = block(x)
            return self.first(x.repeat(1, WIDTH)).square().mean()

    def act(world):
        engine = engine_on(world, limited(3), models[world.rank])
        prefetcher = engine.parts.params.prefetcher
        for _ in range(2):
            step(engine)
        before = prefetcher.tally.fetches, prefetcher.tally.ahead
        step(engine)
        tally, sizes = prefetcher.tally, sorted(unit.layout.padded for unit in prefetcher._units)
        engine.destroy()
        return tally.fetches - before[0], tally.ahead - before[1], tally.peak_elements, sum(sizes[-2:])

    models = [Tied([(1, False)] * 3, [[]]) for _ in range(2)]
    fetches, ahead, peak, need = sim.run(2, act)[0]
    assert peak <= need
    assert fetches == ahead + 1


def test_what_comes_is_fetched_one_use_ahead_and_only_what_stays_until_then_is_kept():
    def act(engine, prefetcher, model):
        live = []
        for _ in range(2):
            step(engine)
        inner = prefetcher._start

        def start(unit, reader):
            inner(unit, reader)
            live.append(len(prefetcher._full))

        prefetcher._start = start
        step(engine)
        return max(live), len(live), prefetcher.tally.unused

    # The largest unit leaves room for four of the others, which would be dropped for it at its next use.
    most, fetches, unused = on_two_ranks(act, blocks=((4, False), *((1, False),) * 6))
    assert (most, unused) == (2, 0)
    assert fetches == 8 + 6  # the head is needed right again, and so is the last block


def test_more_than_the_budget_at_once_is_an_error_that_says_how_much_is_needed():
    class Greedy(Wandering):
        def forward(self, x):
            for block in self.blocks:  # read here, and so kept until this forward ends
                x = nn.functional.linear(x, block.layers[0].weight)
            return x.sum()

    def work(world):
        engine = engine_on(world, limited(3, max_live_parameters=256), models[world.rank])
        with pytest.raises(StoreError, match=r"raise it to at least \d+") as caught:
            engine(torch.ones(BATCH // 2, WIDTH))
        message = str(caught.value)
        assert "max_live_parameters 256" in message
        step_with(engine, int(message.rsplit(" ", 1)[1]))
        engine.destroy()

    def step_with(engine, enough):
        prefetcher = engine.parts.params.prefetcher
        assert prefetcher.tally.live_elements < enough

    models = [Greedy([(1, False)] * 4, [[]]) for _ in range(2)]
    sim.run(2, work)


def test_dropping_what_is_held_is_refused():
    def act(engine, prefetcher, model):
        units = prefetcher.shards.table.all_units[:2]
        prefetcher.open(units)
        assert not is_sharded(units[0].params[0])
        with pytest.raises(StoreError, match=units[0].name):
            prefetcher.reshard_all()
        prefetcher.close(units)
        prefetcher.reshard_all()
        assert is_sharded(units[0].params[0])
        return prefetcher.tally.live_elements

    assert on_two_ranks(act) == 0


def test_a_view_that_somebody_kept_stays_right():
    def act(engine, prefetcher, model):
        units = prefetcher.shards.table.all_units
        prefetcher.open(units[:1])
        view = units[0].params[0].detach()
        values = view.clone()
        prefetcher.close(units[:1])
        prefetcher.reshard_all()
        assert prefetcher.tally.kept_elsewhere == 1
        for _ in range(2):
            step(engine)  # other units of the same size are fetched into buffers
        return torch.equal(view, values)

    assert on_two_ranks(act)


def test_buffers_are_used_again():
    def act(engine, prefetcher, model):
        for _ in range(7):
            step(engine)
        arena, sizes = engine.parts.params.arena, [4 * unit.layout.padded for unit in prefetcher._units]
        return arena.owned_bytes, arena.taken_count, prefetcher.tally.fetches * min(sizes), sum(sizes)

    owned, taken, fetched, whole = on_two_ranks(act)
    assert owned <= 2 * whole  # each unit once, and its gradients
    assert owned < fetched / 5
    assert taken == 0


def test_reads_in_threads_of_other_ranks_do_not_mix():
    """Simulated ranks are threads: each has its own frames, and random delays change nothing."""
    order = [(i, i % 2 == 0) for i in (3, 1, 0, 2, 2, 1)]
    models = [Wandering([(2, i % 2 == 0) for i in range(4)], [order]) for _ in range(3)]
    delays = [random.Random(rank) for rank in range(3)]

    def work(world):
        wait = threading.Event()
        for block in models[world.rank].blocks:
            block.register_forward_pre_hook(lambda *_: bool(wait.wait(delays[world.rank].random() * 0.01)) or None)
        return train(world, 3, models[world.rank], 4, max_reuse_distance=0)

    results = sim.run(3, work)
    assert all(result[2] == results[0][2] for result in results)
