"""The cut of the running pass: also found again when backward recomputes an attention layer."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import UsageError
from mpispeed.mesh import CommTrace, solo_comm
from mpispeed.nn.sequence import Layout, Running, SequenceGroup, current, mark, running, set_running, use


@pytest.fixture(autouse=True)
def nothing_waits():
    running._here.state = None
    yield
    running._here.state = None


def passes():
    return Running(None, Layout(4)), Running(None, Layout(6))


def noted(found):
    def layer(x):
        found.append(current())
        return x.sin()

    return layer


def test_a_context_ends_with_what_was_before():
    first, second = passes()
    assert current() is None
    with use(first):
        with use(second):
            assert current() is second
        assert current() is first
    assert current() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_marked_outputs_tell_their_pass(use_reentrant):
    first, second = passes()
    found, outputs = [], []
    for one in (first, second):
        with use(one):
            x = torch.ones(2, requires_grad=True)
            outputs.append(checkpoint(noted(found), x, use_reentrant=use_reentrant))
            mark({"out": [outputs[-1]]})
    outputs[0].sum().backward()
    outputs[1].sum().backward()
    assert found == [first, second, first, second]


def test_without_marks_one_pass_at_a_time_is_found():
    found = []
    for one in passes():
        with use(one):
            y = checkpoint(noted(found), torch.ones(2, requires_grad=True), use_reentrant=False)
        running._state().waiting = [one]
        y.sum().backward()
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_two_different_cuts_that_wait_are_refused():
    first, second = passes()
    with use(first):
        y = checkpoint(noted([]), torch.ones(2, requires_grad=True), use_reentrant=False)
    set_running(second)
    with pytest.raises(UsageError, match="2 passes with different cuts"):
        y.sum().backward()


def test_a_cut_that_does_not_fit_the_group_is_refused():
    with pytest.raises(UsageError, match="cut over 2 x 1 ranks"):
        Running(None, Layout(4, 2, 1))


def test_an_engine_that_ends_leaves_the_passes_of_others():
    group, other = SequenceGroup.split(solo_comm(0, ("sequence",), "ordered", CommTrace())), object()
    running.set_running(Running(group, Layout(4)))
    running.leave(other)
    assert current().group is group
    running.leave(group)
    assert current() is None
