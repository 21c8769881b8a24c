"""An error that a script catches within a batch ends that batch on all ranks; the next one trains as if it was not."""

import time
import traceback

import pytest

from mpispeed.base.errors import MessageError, PipelineError
from tests.helpers import covering
from tests.helpers.pipe_faults import FAULT, MICRO_BATCHES, Planted, engine, micro_batches
from tests.helpers.pipes import Layout, all_weights
from tests.zoo import same_bits
from tests.zoo.training import zero_section

pytestmark = pytest.mark.mpi(min_size=1)
# Far less than what the watchdog waits for, and enough for a machine with much other work.
BOUND_SECONDS = 60


@pytest.fixture(autouse=True)
def no_fault():
    FAULT.arm()
    yield
    FAULT.arm()


def train(made, step):
    return float(made.train_batch(micro_batches(made, step)))


def state(made):
    """What a batch that failed must leave as it was; and that nothing of it is left."""
    counters, grads = made.counters, made.mpispeed.parts.optimization.grads
    assert not grads.has_gradients
    assert not grads.is_open
    assert all(param.grad is None for param in made.module.parameters())
    assert not made._executor._slots
    assert not made._executor.exchange._works
    offsets = [made.module.chunk(index).micro_offset for index in range(made.module.num_chunks)]
    return counters.micro_steps, counters.global_steps, counters.global_samples, counters.pending_backwards, offsets


def fail(made, place, at, failing, run):
    """`run` with a failure on the ranks `failing`; each rank checks what it gets."""
    before, begin, rank = state(made), time.monotonic(), made.mesh.rank
    FAULT.arm(place if rank in failing else "", at)
    words = f"failed on stage .*, rank {min(failing)}: Planted: {place} of micro-batch {at}"
    with pytest.raises((Planted, PipelineError)) as caught:
        run()
    if rank in failing:
        assert caught.value is FAULT.error
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "look"
        assert caught.value.__cause__ is None
    else:
        assert caught.type is PipelineError
        caught.match(words)
    FAULT.arm()
    assert time.monotonic() - begin < BOUND_SECONDS
    assert state(made) == before


CASES = [
    # layout, schedule, stage of ZeRO, gathers and sums in every micro-batch
    ((1, 1, 1), "1f1b", 0, False),
    ((2, 1, 1), "1f1b", 0, False),
    ((2, 1, 1), "gpipe", 3, False),
    ((2, 1, 1), "interleaved", 1, False),
    ((2, 1, 1), "zb-h1", 2, True),
    ((3, 1, 1), "zb-h1", 0, False),
    ((4, 1, 1), "1f1b", 1, False),
    ((2, 1, 2), "1f1b", 2, True),
    ((2, 1, 2), "gpipe", 3, False),
    ((2, 2, 1), "interleaved", 1, False),
]
if covering.IS_FULL:
    CASES += [((2, 1, 2), "zb-h1", 0, False), ((2, 2, 1), "1f1b", 0, False)]


def places_of(layout, world):
    """Pairs of (place, micro-batch, failing ranks): each place on the first and on the last stage that has it."""
    ranks, width = world.size, world.size // layout.pipe
    first, last = list(range(width)), list(range(ranks - width, ranks))
    # Layers that communicate fail on all their ranks, or the others would wait inside of them.
    some = (lambda ranks: ranks) if layout.model > 1 else (lambda ranks: ranks[-1:])
    end = MICRO_BATCHES - 1
    yield ("forward", 0, some(first)), ("forward", end, some(last))
    yield ("backward", end, some(first)), ("backward", 0, some(last))
    yield ("data", 2, first[-1:]), ("data", end, last[:1])
    yield ("loss", 1, last[:1]), ("data", 0, first[:1])


@pytest.mark.parametrize(
    ("sizes", "schedule", "stage", "is_per_micro"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.ranks(Layout(*case[0]).ranks))
        for case in CASES
    ],
)
def test_after_a_caught_error_training_goes_on_with_the_same_bits(sizes, schedule, stage, is_per_micro, world):
    layout = Layout(*sizes)
    made = engine(world, layout, schedule, stage, is_per_micro=is_per_micro)
    half = CASES.index((sizes, schedule, stage, is_per_micro)) % 2  # each place in every other case: batches take time
    places = [pair[half] for pair in places_of(layout, world)]
    losses = [train(made, 0)]
    for step, (place, at, failing) in enumerate(places, start=1):
        fail(made, place, at, failing, lambda: train(made, 99))
        losses.append(train(made, step))
    weights, counters = all_weights(made), made.counters
    assert counters.global_steps == counters.update_count == len(places) + 1
    made.destroy()

    made = engine(world, layout, schedule, stage, is_per_micro=is_per_micro)
    assert [train(made, step) for step in range(len(places) + 1)] == losses
    same_bits(all_weights(made), weights)
    made.destroy()


@pytest.mark.ranks(4)
def test_where_ranks_may_diverge_gathers_of_micro_batches_are_no_obstacle(world):
    """One data rank fails in the first stage, whose parameters the other one gathers in each pass."""
    zero = zero_section(3, divergent_modules="union")
    made = engine(world, Layout(2, 1, 2), "1f1b", 3, is_per_micro=True, zero_optimization=zero)
    train(made, 0)
    for place in ("forward", "backward"):
        fail(made, place, 1, [0], lambda: train(made, 99))
    train(made, 1)
    weights = all_weights(made)
    made.destroy()
    made = engine(world, Layout(2, 1, 2), "1f1b", 3, is_per_micro=True, zero_optimization=zero)
    train(made, 0)
    train(made, 1)
    same_bits(all_weights(made), weights)
    made.destroy()


@pytest.mark.ranks(2)
def test_the_loss_scale_and_required_gradients_do_not_see_a_failed_batch(world):
    zero, fp16 = zero_section(1, ignore_unused_parameters=False), {"enabled": True, "auto_cast": True}
    made = engine(world, Layout(2, 1, 1), "1f1b", 1, zero_optimization=zero, fp16=fp16)
    losses = []
    for step, place in enumerate(("forward", "backward", "loss")):
        scale = made.optimizer.loss_scale
        for at in (0, MICRO_BATCHES - 1):
            fail(made, place, at, [1], lambda: train(made, 99))
        assert made.optimizer.loss_scale == scale
        losses.append(train(made, step))
    made.destroy()
    made = engine(world, Layout(2, 1, 1), "1f1b", 1, zero_optimization=zero, fp16=fp16)
    assert [train(made, step) for step in range(3)] == losses
    made.destroy()


@pytest.mark.parametrize("reduce_output", ["avg", None])
@pytest.mark.parametrize(
    "sizes", [pytest.param(sizes, marks=pytest.mark.ranks(Layout(*sizes).ranks)) for sizes in ((3, 1, 1), (2, 1, 2))]
)
def test_an_evaluation_fails_on_all_ranks_too(sizes, reduce_output, world):
    layout = Layout(*sizes)
    made = engine(world, layout, "1f1b", 0)

    def evaluate(step=0):
        result = made.eval_batch(micro_batches(made, step), reduce_output=reduce_output)
        return [float(loss) for loss in result] if reduce_output is None else float(result)

    made.train()
    before = evaluate()
    for place, at, failing in [one for pair in places_of(layout, world) for one in pair]:
        if place != "backward":
            fail(made, place, at, failing, evaluate)
            assert made.training
    assert evaluate() == before
    made.destroy()


@pytest.mark.ranks(3, 4)
def test_data_that_end_within_a_batch_end_the_loops_of_those_that_load_them(world):
    layout = Layout(3, 1, 1) if world.size == 3 else Layout(2, 1, 2)
    made = engine(world, layout, "1f1b", 0)
    is_short = made.mesh.index("data") == 0
    for run in (made.train_batch, made.eval_batch):
        pairs = micro_batches(made, 0)
        if pairs is not None and is_short:
            pairs = iter([next(pairs), next(pairs)])
        if pairs is not None and is_short:
            with pytest.raises(StopIteration, match="ended after 2 micro-batches of a global batch"):
                run(pairs)
        else:
            with pytest.raises(PipelineError, match="stage 0, rank 0: the data iterator ended after 2 micro-batches"):
                run(pairs)
    losses = [train(made, 0), train(made, 1)]
    made.destroy()
    made = engine(world, layout, "1f1b", 0)
    assert [train(made, 0), train(made, 1)] == losses
    made.destroy()


@pytest.mark.ranks(3)
def test_an_output_that_cannot_be_sent_does_not_keep_the_next_stage_waiting(world):
    made = engine(world, Layout(3, 1, 1), "1f1b", 0)
    losses = [train(made, 0)]
    hook = None
    if made.stage_id == 1:
        hook = list(made.module.children())[-1].register_forward_hook(lambda *_: object())
    with pytest.raises(MessageError if made.stage_id == 1 else PipelineError, match="a object cannot be sent"):
        train(made, 99)
    if hook is not None:
        hook.remove()
    losses.append(train(made, 1))
    made.destroy()
    made = engine(world, Layout(3, 1, 1), "1f1b", 0)
    assert [train(made, 0), train(made, 1)] == losses
    made.destroy()
