"""Orders of slots: the samples of a slot do not depend on the ranks, nor on where reading begins."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from mpispeed.base.errors import ConfigError
from mpispeed.curriculum.order import Split
from mpispeed.data import EpochOrder, SampleOrder, ShardedLoader
from mpispeed.plan.slots import Slots


def slot_of(slots, rank):
    return lambda micro_step: slots.slot(rank, micro_step)


def order(slots, rank, *, length=37, micro=2, drop_last=False):
    samples = SampleOrder(length, 3, shuffle=True)
    return EpochOrder(
        samples, micro_batch=micro, rank=rank, size=slots.ranks, unit=slots.count * micro, drop_last=drop_last,
        slot_of=slot_of(slots, rank),
    )  # fmt: skip


def by_slot(slots, batches_of, start=0):
    """(update, slot) -> samples, of the batches that each rank has from a micro-step on."""
    found = {}
    for rank in range(slots.ranks):
        for step, samples in enumerate(batches_of(rank), start):
            update, micro_step = divmod(step, slots.per_rank)
            found[update, slots.slot(rank, micro_step)] = samples
    return found


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.booleans(), st.booleans(), st.integers(0, 60))
def test_slots_have_the_same_samples_at_any_number_of_ranks(ranks, in_turn, drop_last, length):
    one = Slots(12, 1, in_turn=False)
    expected = by_slot(one, lambda rank: order(one, rank, length=length, drop_last=drop_last).batches(1, 0))
    slots = Slots(12, ranks, in_turn=in_turn)
    found = by_slot(slots, lambda rank: order(slots, rank, length=length, drop_last=drop_last).batches(1, 0))
    assert found == expected
    seen = [samples for _, samples in sorted(expected.items())]
    plain = EpochOrder(
        SampleOrder(length, 3, shuffle=True), micro_batch=2, rank=0, size=1, unit=24, drop_last=drop_last
    )
    assert seen == list(plain.batches(1, 0))  # those of other reductions on one rank


@pytest.mark.parametrize("in_turn", [False, True])
def test_reading_goes_on_within_an_update_and_from_a_saved_place(in_turn):
    slots = Slots(6, 3, in_turn=in_turn)
    for rank in range(3):
        own = order(slots, rank)
        whole = list(own.batches(0, 0))
        for step in range(len(whole) + 1):
            assert list(own.batches(0, step * 6)) == whole[step:]
            assert own.count(0, step * 6) == len(whole) - step
        # the place of a run with other updates: the next one begins there
        own.load_state_dict({"length": 37, "seed": 3, "shuffle": True, "position": 37 + 10})
        alone = order(Slots(6, 1, in_turn=False), 0)
        alone.load_state_dict({"length": 37, "seed": 3, "shuffle": True, "position": 37 + 10})
        first = list(alone.batches(1, 10))[:6]
        assert list(own.batches(1, 10))[:2] == [first[slots.slot(rank, step)] for step in range(2)]
        assert list(own.batches(2, 0)) == list(order(slots, rank).batches(2, 0))


@given(st.sampled_from([1, 2, 3, 6]), st.booleans(), st.integers(0, 3))
def test_samples_by_difficulty_go_to_slots(ranks, in_turn, update):
    slots = Slots(6, ranks, in_turn=in_turn)
    starts = {
        slots.slot(rank, step): Split(12, 2, rank, ranks, slot_of(slots, rank)).start(
            5, 5 + update * 12 + step * 2 * ranks
        )
        for rank in range(ranks)
        for step in range(slots.per_rank)
    }
    assert starts == {slot: 5 + update * 12 + slot * 2 for slot in range(6)}


class Noisy(torch.utils.data.Dataset):
    """Samples that are drawn, by all three generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, float(torch.rand(())), random.random()], dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(31))

    def __len__(self):
        return 31


def loader(dataset, slots, rank, **more):
    return ShardedLoader(
        dataset, micro_batch=2, rank=rank, size=slots.ranks, step_samples=2 * slots.count,
        slot_of=slot_of(slots, rank), **more,
    )  # fmt: skip


def read(dataset, ranks, *, in_turn, start=0, **more):
    slots = Slots(6, ranks, in_turn=in_turn)
    loaders = [loader(dataset, slots, rank, **more) for rank in range(ranks)]
    try:
        return by_slot(slots, lambda rank: [batch.tolist() for batch in loaders[rank]])
    finally:
        for each in loaders:
            each.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_samples_draw_follows_seed_epoch_and_sample(workers):
    expected = read(Noisy(), 1, in_turn=False)
    torch.manual_seed(8)  # what the process draws elsewhere does not matter
    before = torch.get_rng_state()
    assert read(Noisy(), 3, in_turn=True, workers=workers) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_are_read_by_updates(drop_last):
    expected = read(Stream(), 1, in_turn=False, drop_last=drop_last)
    assert len(expected) == (12 if drop_last else 18)
    for ranks, in_turn in ((2, False), (3, True), (3, False)):
        assert read(Stream(), ranks, in_turn=in_turn, drop_last=drop_last) == expected
    slots = Slots(6, 3, in_turn=False)
    own = loader(Stream(), slots, 1, drop_last=drop_last)
    assert len(own) == len(expected) // 3
    assert next(iter(own)).tolist() == expected[0, 2]
    assert next(iter(own)).tolist() == expected[0, 3]  # reading goes on within the update


def test_reading_ahead_beside_the_model_is_refused():
    with pytest.raises(ConfigError, match="come from the generators of the model"):
        loader(Noisy(), Slots(6, 1, in_turn=False), 0, prefetch=2)
