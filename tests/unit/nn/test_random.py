"""Random streams per axis: what is equal, what differs, and what runs again draws the same numbers."""

import pytest
import torch
from torch import nn

from mpispeed import checkpointing
from mpispeed.base import rng
from mpispeed.base.errors import UsageError
from mpispeed.checkpointing import RNGStatesTracker, checkpoint, get_rng_tracker
from tests.zoo import same_bits


@pytest.fixture(autouse=True)
def fresh():
    with torch.random.fork_rng(devices=[]):
        yield
    get_rng_tracker().reset()


def test_a_fork_draws_from_its_stream_and_goes_back():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(torch.cat([first, second]), expected)


def test_adding_leaves_the_default_stream_alone():
    before = torch.get_rng_state()
    RNGStatesTracker().add("a", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_put_streams_back_too():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    before = torch.get_rng_state()

    def fail():
        with tracker.fork("a"):
            torch.rand(3)
            msg = "planted"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    torch.rand(3)
    expected = torch.rand(3)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), expected)


def test_nested_forks():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    with tracker.fork("a"):
        first = torch.rand(2)
        with tracker.fork("b"):
            other = torch.rand(2)
        second = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.rand(4))
    torch.manual_seed(2)
    assert torch.equal(other, torch.rand(2))


def test_seeds_and_names_are_taken_once():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(UsageError, match="seed 1 already exists"):
        tracker.add("b", 1)
    with pytest.raises(UsageError, match="stream 'a' already exists"):
        tracker.add("a", 2)
    with pytest.raises(UsageError, match=r"stream 'c' is not added to the tracker, which has 'a'"), tracker.fork("c"):
        pass
    tracker.reset()
    tracker.add("a", 1)


def test_states_go_out_and_back():
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    with tracker.fork("a"):
        expected = torch.rand(3)
    other = RNGStatesTracker()
    other.set_states(states)
    with other.fork("a"):
        assert torch.equal(torch.rand(3), expected)
    assert all(t.dtype == torch.uint8 for state in states.values() for t in state.values())
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rule_of_seeds(rank):
    rng.seed_streams(100, rank)
    default = torch.rand(3)
    with get_rng_tracker().fork():
        own = torch.rand(3)
    torch.manual_seed(100)
    assert torch.equal(default, torch.rand(3))
    torch.manual_seed(100 + 2718 + rank)
    assert torch.equal(own, torch.rand(3))


def test_reseeding_touches_the_slices_only():
    checkpointing.configure()
    checkpointing.model_parallel_cuda_manual_seed(100)
    before = torch.get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(200)
    assert torch.equal(torch.get_rng_state(), before)
    with get_rng_tracker().fork():
        own = torch.rand(3)
    torch.manual_seed(200 + 2718)
    assert torch.equal(own, torch.rand(3))


def test_seeding_needs_the_slicing_group(monkeypatch):
    from mpispeed.nn.activation_checkpointing import _process

    monkeypatch.setattr(_process, "is_configured", False)
    with pytest.raises(UsageError, match=r"call checkpointing.configure\(mpu\) first"):
        checkpointing.model_parallel_manual_seed(1)


def test_names_of_deepspeed():
    assert checkpointing.CudaRNGStatesTracker is RNGStatesTracker
    assert checkpointing.get_cuda_rng_tracker() is get_rng_tracker()


@pytest.mark.parametrize("nested", [False, True])
def test_masks_are_the_same_when_a_call_runs_again(nested):
    """Default stream, forked, and forks in forks; the masks of both runs are compared one by one."""
    rng.seed_streams(5, 1)
    get_rng_tracker().add("other", 99)
    dropout, masks = nn.Dropout(0.5), []

    def drop(x):
        y = dropout(x)
        masks.append((y != 0).detach())
        return y

    def function(x):
        x = drop(torch.tanh(x))
        with get_rng_tracker().fork():
            x = drop(torch.tanh(x))
            with get_rng_tracker().fork("other"):
                x = drop(torch.tanh(x))
            x = drop(torch.tanh(x))
        return torch.tanh(drop(x))

    def call(x):
        # What follows the inner call makes the outer one run it again, before it runs again itself.
        return checkpoint((lambda a: torch.tanh(checkpoint(function, a))) if nested else function, x)

    x = torch.ones(64, requires_grad=True)
    losses = [call(x).sum() for _ in range(2)]
    first = list(masks)
    streams = {name: state["cpu"].clone() for name, state in get_rng_tracker().get_states().items()}
    default = torch.get_rng_state()
    masks.clear()
    losses[1].backward()
    losses[0].backward()
    runs = 2 if nested else 1
    again = [masks[i : i + 5] for i in range(0, len(masks), 5)]
    assert len(again) == 2 * runs
    for index, found in enumerate(again):
        expected = first[5:] if index < runs else first[:5]
        same_bits(found, expected)
    # What was drawn again does not count.
    assert torch.equal(torch.get_rng_state(), default)
    assert all(torch.equal(state["cpu"], streams[name]) for name, state in get_rng_tracker().get_states().items())
    assert len({tuple(mask.tolist()) for mask in first}) == 10
