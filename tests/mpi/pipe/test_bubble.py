"""Bubbles of real pipelines beside the formulas: the executor and its messages are real, computing is waiting."""

import time
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch

from mpispeed.base import split_grads
from mpispeed.mesh import Mesh, Topology
from mpispeed.pipe import instructions as do
from mpispeed.pipe.exchange import Exchange
from mpispeed.pipe.run import Executor, Place
from mpispeed.pipe.schedule import build
from mpispeed.pipe.timeline import expected_bubble, times

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]

MICRO_BATCHES = 8
# Of a chunk, in seconds. The formula of ZB-H1 needs weight passes that are no longer than the others.
EQUAL = {"forward": 0.1, "backward_input": 0.1, "backward_weight": 0.1}
SHORT = {"forward": 0.15, "backward_input": 0.15, "backward_weight": 0.1}
NONE = dict.fromkeys(EQUAL, 0.0)
CASES = [("1f1b", 1, EQUAL), ("interleaved", 2, EQUAL), ("zb-h1", 1, SHORT)]
TOLERANCE = 0.1
TRIES = 2


class Waiting:
    """Duties of a stage whose passes take given times. See `pipe.run.Duties`.

    Attributes:
        seconds: of each kind of pass.
        spans: begin and end of every pass and its kind, in seconds of a clock that all ranks of a machine share.
        steps: how often the end of a batch was reached.
    """

    def __init__(self, place, seconds, *, is_split):
        self.seconds, self.is_split = seconds, is_split
        self.weights = [torch.eye(4, requires_grad=True) for _ in range(place.chunks)]
        self.spans, self.steps = [], 0

    def load(self):
        return torch.ones(2, 4), None

    def forward(self, chunk, inputs):
        with self.passing("forward"):
            return split_grads.linear(inputs, self.weights[chunk])

    def loss(self, outputs, labels):
        return outputs.sum()

    def backward(self, tensors, grads, *, is_last):
        with self.passing("backward_input", *([] if self.is_split else ["backward_weight"])):
            torch.autograd.backward(tensors, grads)

    def deliver(self, backlog):
        assert len(backlog) == 1
        with self.passing("backward_weight"):
            backlog.work_off(self.land)

    def land(self, weight, grad):
        weight.grad = grad if weight.grad is None else weight.grad + grad

    def reduce_tied(self):
        pass

    def reduce(self):
        pass

    def step(self):
        self.steps += 1

    @contextmanager
    def passing(self, *kinds):
        begin = time.monotonic()
        yield
        time.sleep(max(0.0, begin + sum(self.seconds[kind] for kind in kinds) - time.monotonic()))
        self.spans.append((begin, time.monotonic()))


def _run(comm, exchange, name, chunks, seconds):
    """(measured, expected) idle seconds of a stage, over the mean of all; the same on every rank."""
    schedule = build(name, MICRO_BATCHES, comm.size, comm.rank, chunks)
    is_split = any(isinstance(one, do.BackwardWeight) for step in schedule.steps() for one in step)
    place = Place(comm.rank, comm.size, chunks)
    duties = Waiting(place, seconds, is_split=is_split)
    comm.barrier()
    Executor(place, exchange, duties).run(schedule, is_training=True)
    assert duties.steps == 1
    # Every chunk multiplies by one: its gradient counts the rows that passed, and all of them did.
    assert all(torch.equal(weight.grad, torch.full((4, 4), 2.0 * MICRO_BATCHES)) for weight in duties.weights)
    ranks = comm.gather_objects(duties.spans)
    spans = [span for one in ranks for span in one]
    makespan = max(end for _, end in spans) - min(begin for begin, _ in spans)
    busy = sum(end - begin for begin, end in spans) / len(ranks)
    # A sleep is never short, and late where the machine is busy: the formula is that of the times that were slept.
    late = busy / (chunks * MICRO_BATCHES * sum(seconds.values())) if any(seconds.values()) else 1.0
    of_stage = {kind: chunks * planned * late for kind, planned in seconds.items()}
    expected = expected_bubble(name, MICRO_BATCHES, comm.size, chunks, **of_stage)
    return makespan - busy, float(expected)


@pytest.mark.parametrize(("name", "chunks", "seconds"), CASES, ids=[case[0] for case in CASES])
def test_bubble_is_that_of_the_formula(world, name, chunks, seconds):
    """Messages take next to no time beside passes, so stages idle as long as the schedule makes them."""
    mesh = Mesh(Topology({"pipe": world.size}), world)
    exchange = Exchange(mesh.channel("pipe")["pipe"])
    _run(mesh["pipe"], exchange, name, chunks, NONE)  # what only the first run does
    tries = []
    while len(tries) < TRIES:
        measured, expected = _run(mesh["pipe"], exchange, name, chunks, seconds)
        tries.append(f"{measured:.3f} s for {expected:.3f} s")
        if abs(measured - expected) <= TOLERANCE * expected:
            break
    else:
        pytest.fail(f"bubble of {name}: {'; '.join(tries)}")
    mesh.close()


def test_bubbles_differ_by_more_than_the_tolerance(world):
    """Else the measurement could not tell the schedules from 1F1B; and no formula is compared with itself."""
    for name, chunks, seconds in CASES:
        whole = {kind: chunks * Fraction(str(of_chunk)) for kind, of_chunk in seconds.items()}
        played = times([build(name, MICRO_BATCHES, world.size, stage, chunks) for stage in range(world.size)], **whole)
        assert set(played.bubbles) == {expected_bubble(name, MICRO_BATCHES, world.size, chunks, **whole)}
        plain = expected_bubble("1f1b", MICRO_BATCHES, world.size, **whole)
        assert name == "1f1b" or played.bubbles[0] * (1 + Fraction(TOLERANCE)) < plain * (1 - Fraction(TOLERANCE))
