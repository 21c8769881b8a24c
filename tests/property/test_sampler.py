"""The sample order is a permutation per epoch, and does not depend on how the group is cut."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.data import SampleOrder, ShardedLoader

seeds = st.integers(min_value=0, max_value=2**63)


@given(length=st.integers(1, 700), seed=seeds, epoch=st.integers(0, 10**9))
def test_each_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed, shuffle=True)
    found = order.indices(range(epoch * length, (epoch + 1) * length))
    assert sorted(found) == list(range(length))


@given(length=st.integers(1, 10**15), seed=seeds, position=st.integers(0, 10**18))
def test_one_position_is_found_without_the_others(length: int, seed: int, position: int) -> None:
    order = SampleOrder(length, seed, shuffle=True)
    index = order.index(position)
    assert 0 <= index < length
    assert order.indices([position + 1, position])[1] == index


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A global batch and two cuts of it: (ranks, micro-batch, accumulation)."""
    chosen = []
    batch = draw(st.sampled_from([4, 6, 12, 24]))
    for _ in range(2):
        size = draw(st.sampled_from([d for d in range(1, batch + 1) if batch % d == 0]))
        micro = draw(st.sampled_from([d for d in range(1, batch // size + 1) if batch // size % d == 0]))
        chosen.append((size, micro, batch // size // micro))
    return batch, chosen


def global_batches(length: int, batch: int, cut: tuple[int, int, int], drop_last: bool, state: dict | None) -> tuple:
    """The global batches of one pass as sorted lists, and the position after it."""
    size, micro, accumulation = cut
    loaders = [
        ShardedLoader(
            range(length),  # type: ignore[arg-type]
            micro_batch=micro,
            rank=rank,
            size=size,
            drop_last=drop_last,
            step_samples=batch,
            collate_fn=list,
        )
        for rank in range(size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    passes = [list(loader) for loader in loaders]
    assert len({len(steps) for steps in passes}) == 1, "ranks made different numbers of micro-steps"
    micro_steps = [list(chain.from_iterable(parts)) for parts in zip(*passes, strict=True)]
    found = [
        sorted(chain.from_iterable(micro_steps[k : k + accumulation])) for k in range(0, len(micro_steps), accumulation)
    ]
    return found, {loader.position for loader in loaders}


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 100), cut=cuts(), drop_last=st.booleans(), steps=st.integers(0, 4))
def test_global_batches_do_not_depend_on_the_cut(length: int, cut: tuple, drop_last: bool, steps: int) -> None:
    batch, (first, second) = cut
    state = {"position": min(steps * batch, length), "epoch": 0, "length": length, "seed": 7, "shuffle": True}
    mine = global_batches(length, batch, first, drop_last, state)
    assert mine == global_batches(length, batch, second, drop_last, state)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 100), cut=cuts())
def test_an_epoch_holds_every_sample_and_fills_up_from_its_beginning(length: int, cut: tuple) -> None:
    batch, (first, _) = cut
    found, _ = global_batches(length, batch, first, False, None)
    counted = Counter(index for step in found for index in step)
    total = -(-length // batch) * batch
    order = SampleOrder(length, 1234, shuffle=True)
    assert counted == Counter(order.index(p % length) for p in range(total))
    assert set(counted) == set(range(length))
