"""What scripts see of a pipeline's engine: evaluation, sources of data, whole batches only, mistakes by name."""

import math

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError, PipelineError, UsageError
from mpispeed.base.events import Event
from mpispeed.pipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from mpispeed.sharding import sharded_param
from tests.helpers.pipes import (
    BATCH,
    SHAPE,
    Case,
    Layout,
    PlainRun,
    all_weights,
    batch,
    feed,
    gpt_layers,
    micro_batches,
    train,
)
from tests.zoo import same_bits
from tests.zoo.training import zero_section

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3)]


@pytest.fixture
def engine(world):
    """As many stages as ranks."""
    made = Case(Layout(world.size, 1, 1)).engine()
    yield made
    made.destroy()


@pytest.fixture
def two_data(world):
    """Two data ranks, if the number of ranks is even."""
    data = 2 if world.size % 2 == 0 else 1
    made = Case(Layout(world.size // data, 1, data)).engine()
    yield made
    made.destroy()


def plain_outputs(pairs):
    """(loss, logits) of each pair with the weights at the start."""
    model = PlainRun().model
    with torch.no_grad():
        found = []
        for x, y in pairs:
            logits = x
            for part in model.parts:
                logits = part(logits)
            found.append((float(gpt_layers.cross_entropy(logits, y)), logits))
        return found


def feed_of(engine, pairs):
    return iter(pairs) if engine.is_first_stage() or engine.is_last_stage() else None


# -- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_eval_batch_is_the_mean_over_micro_batches_and_ranks(two_data):
    before = all_weights(two_data)
    whole = [batch(3)]
    expected = plain_outputs(whole)[0][0]
    for _ in range(2):
        found = two_data.eval_batch(feed(two_data, 3))
        assert isinstance(found, torch.Tensor)
        assert float(found) == pytest.approx(expected, rel=1e-5)
    assert (two_data.global_steps, two_data.micro_steps) == (0, 0)
    after = all_weights(two_data)
    same_bits(after, before)
    assert train(two_data, [3]) == pytest.approx([expected], rel=1e-5)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("is_per_micro", [False, True])
def test_parameters_are_held_whole_only_where_the_plan_says_so(is_per_micro, world):
    data = 2 if world.size % 2 == 0 else 1
    layout = Layout(world.size // data, 1, data)
    nothing_ahead = zero_section(
        3, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=0, stage3_max_reuse_distance=0
    )
    engine = Case(layout, stage=3, is_per_micro=is_per_micro).engine(zero_optimization=nothing_ahead)
    assert engine.plan.gathers_once == (layout.pipe > 1 and not is_per_micro)
    params, most = list(engine.module.parameters()), [0]

    def count(_):
        most[0] = max(most[0], sum(not sharded_param.is_sharded(param) for param in params))

    engine.bus.subscribe(Event.FORWARD_END, count)
    for verb in (lambda: engine.eval_batch(feed(engine, 0)), lambda: train(engine, [0])):
        most[0] = 0
        verb()
        assert most[0] == (len(params) if engine.plan.gathers_once or layout == (1, 1, 1) else 0)
    engine.destroy()


def test_eval_batch_alone_on_the_last_stage(engine):
    found = engine.eval_batch(feed(engine, 0), bcast_loss=False)
    if engine.is_last_stage():
        assert float(found) == pytest.approx(plain_outputs([batch(0)])[0][0], rel=1e-5)
    else:
        assert found is None


@pytest.mark.parametrize("is_shared", [True, False])
def test_eval_batch_as_a_list(engine, is_shared):
    pairs = micro_batches(engine, 1)
    found = engine.eval_batch(feed_of(engine, pairs), reduce_output=None, bcast_loss=is_shared)
    if is_shared or engine.is_last_stage():
        assert [float(loss) for loss in found] == pytest.approx([loss for loss, _ in plain_outputs(pairs)], rel=1e-5)
    else:
        assert found is None


def test_eval_batch_returns_logits_of_the_last_micro_batch(engine):
    pairs = micro_batches(engine, 1)
    loss, logits = engine.eval_batch(feed_of(engine, pairs), return_logits=True)
    assert float(loss) == pytest.approx(plain_outputs([batch(1)])[0][0], rel=1e-5)
    if engine.is_last_stage():
        torch.testing.assert_close(logits, plain_outputs(pairs)[-1][1], rtol=1e-4, atol=1e-5)
    else:
        assert logits is None


def test_eval_batch_without_a_loss(engine):
    pairs = micro_batches(engine, 2)
    outputs = torch.stack([logits for _, logits in plain_outputs(pairs)])
    mean = engine.eval_batch(feed_of(engine, pairs), compute_loss=False)
    listed = engine.eval_batch(feed_of(engine, pairs), compute_loss=False, reduce_output=None)
    if engine.is_last_stage():
        torch.testing.assert_close(mean, outputs.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.stack(listed), outputs, rtol=1e-4, atol=1e-5)
    else:
        assert mean is None
        assert listed is None


@pytest.mark.parametrize("count", [1, 3, 7])
def test_eval_batch_of_another_number_of_micro_batches(engine, count):
    pairs = [tuple(part[index : index + 2] for part in batch(4)) for index in range(count)]
    found = engine.eval_batch(feed_of(engine, pairs), num_micro_batches=count)
    expected = plain_outputs(pairs)
    assert float(found) == pytest.approx(math.fsum(loss for loss, _ in expected) / count, rel=1e-5)


def test_evaluation_leaves_the_training_data_and_mode_alone(engine):
    steps = iter(pair for step in (0, 1) for pair in micro_batches(engine, step))
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataiterator(steps)
    first = float(engine.train_batch())
    engine.eval_batch(feed(engine, 5))
    assert engine.module.training
    engine.eval()
    engine.eval_batch(feed(engine, 5))
    assert not engine.module.training
    reference = PlainRun()
    expected = [reference.step(*batch(step))[0] for step in (0, 1)]
    assert [first, float(engine.train_batch())] == pytest.approx(expected, rel=1e-5)
    assert engine.module.training


def test_interleaved_stages_evaluate_too(world):
    layout = Layout(world.size, 1, 1)
    made = Case(layout, "interleaved" if world.size > 1 else "1f1b").engine()
    assert float(made.eval_batch(feed(made, 3))) == pytest.approx(plain_outputs([batch(3)])[0][0], rel=1e-5)
    made.destroy()


def test_eval_batch_knows_no_other_reduction(engine):
    with pytest.raises(NotImplementedError, match=r"reduce_output='max'\): \"avg\" and None are known"):
        engine.eval_batch(feed(engine, 0), reduce_output="max")


# -- sources of data -------------------------------------------------------------------------------------------------


class Untouched:
    """Fails when it is asked for data."""

    def __iter__(self):
        return self

    def __next__(self):
        pytest.fail("a middle stage took a batch")


@pytest.mark.parametrize("how", ["argument", "iterator", "loader"])
def test_only_first_and_last_stages_take_data(engine, how):
    has_data = engine.is_first_stage() or engine.is_last_stage()
    source = micro_batches(engine, 0) if has_data else Untouched()
    if how == "iterator":
        engine.set_dataiterator(iter(source))
    elif how == "loader":
        engine.set_dataloader(source)  # it begins again at its end
    losses = [
        float(engine.train_batch(iter(source) if how == "argument" else None)) for _ in range(1 + (how == "loader"))
    ]
    reference = PlainRun()
    assert losses == pytest.approx([reference.step(*batch(0))[0] for _ in losses], rel=1e-5)


class Samples(torch.utils.data.Dataset):
    """The first global batches, sample by sample."""

    def __len__(self):
        return 3 * BATCH

    def __getitem__(self, index):
        x, y = batch(index // BATCH)
        return x[index % BATCH], y[index % BATCH]


@pytest.mark.ranks(2, 3, 4)
def test_training_data_is_dealt_to_data_ranks_and_repeated(world):
    data = 2 if world.size % 2 == 0 else 1
    case = Case(Layout(world.size // data, 1, data))
    made, _, loader, _ = mpispeed.initialize(model=case.module(), config=case.settings(), training_data=Samples())
    assert loader is made.training_dataloader
    seen = []
    made.set_batch_fn(lambda pair: (seen.append(pair), pair)[1])
    losses = [float(made.train_batch()) for _ in range(4)]
    steps, reference = made.gradient_accumulation_steps(), PlainRun()
    ends = made.is_first_stage(), made.is_last_stage()
    everyone = [pairs for is_end, pairs in world.comm.gather_objects((ends, seen)) if is_end[1]]
    assert len(everyone) == data
    for step, loss in enumerate(losses):
        pairs = [pair for own in everyone for pair in own[step * steps : (step + 1) * steps]]
        whole = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
        assert len(whole[0]) == BATCH
        assert loss == pytest.approx(reference.step(*whole)[0], rel=1e-5)
    if any(ends):
        assert len(seen) == 4 * steps
        firsts = [pairs for is_end, pairs in made.mesh["pipe"].gather_objects((ends, seen)) if is_end[0]]
        assert all(torch.equal(x, y) for (x, _), (y, _) in zip(firsts[0], seen, strict=True))
    else:
        made.mesh["pipe"].gather_objects((ends, seen))
        assert not seen
    epoch = torch.cat([x for own in everyone for x, _ in own[: 3 * steps]])
    assert sorted(epoch.tolist()) == sorted(Samples()[index][0].tolist() for index in range(3 * BATCH))
    made.destroy()


class Grouped(Samples):
    """Samples sorted by length: shuffled ones do not stack."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x[: 2 + index // BATCH], y[: 2 + index // BATCH]


@pytest.mark.deepspeed_row("a7")
@pytest.mark.ranks(1, 2, 3, 4)
def test_training_data_keep_their_order(world):
    data = 2 if world.size % 2 == 0 else 1
    case = Case(Layout(world.size // data, 1, data))

    def run(steps, dataset, **more):
        settings = case.settings() | more
        made, *_ = mpispeed.initialize(model=case.module(), config=settings, training_data=dataset)
        seen = []
        made.set_batch_fn(lambda pair: (seen.append(pair[0]), pair)[1])
        losses = [float(made.train_batch()) for _ in range(steps)]
        is_first, accumulation = made.is_first_stage(), made.gradient_accumulation_steps()
        ranks = [own for at_start, own in world.comm.gather_objects((is_first, seen)) if at_start]
        made.destroy()
        micros = range(steps * accumulation)
        return losses, [row.tolist() for micro in micros for own in ranks for row in own[micro]]

    # Twice through: the order is the same in every epoch.
    losses, rows = run(6, Grouped())
    assert rows == 2 * [Grouped()[index][0].tolist() for index in range(3 * BATCH)]
    reference, batches = PlainRun(), [[Grouped()[at + i] for i in range(BATCH)] for at in range(0, 3 * BATCH, BATCH)]
    expected = [reference.step(*(torch.stack(part) for part in zip(*rows, strict=True)))[0] for rows in 2 * batches]
    assert losses == pytest.approx(expected, rel=1e-5)  # sums in another order
    in_order = [Samples()[index][0].tolist() for index in range(3 * BATCH)]
    _, rows = run(3, Samples(), dataloader_shuffle=True)
    assert rows != in_order
    assert sorted(rows) == sorted(in_order)


def test_batch_fn_changes_every_batch(engine):
    engine.set_batch_fn(lambda pair: (pair["text"][:, :-1], pair["text"][:, 1:]))
    texts = [{"text": torch.cat([x, y[:, -1:]], 1)} for x, y in micro_batches(engine, 0)]
    assert float(engine.train_batch(feed_of(engine, texts))) == pytest.approx(PlainRun().step(*batch(0))[0], rel=1e-5)


# -- whole batches only ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["forward", "backward", "step", "no_sync"])
def test_parts_of_a_batch_are_refused(engine, verb):
    with pytest.raises(PipelineError, match=rf"no {verb}\(\) of its own.*call engine.train_batch"):
        getattr(engine, verb)()
    with pytest.raises(PipelineError, match="forward"):
        engine(torch.zeros(1))


def test_mistakes_are_told(engine):
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"runs under torch.no_grad\(\); use engine.eval_batch"):
        engine.train_batch(feed(engine, 0))
    with pytest.raises(UsageError, match="give the loss to PipelineModule"):
        engine.train_batch(feed(engine, 0), loss_fn=torch.sum)
    with pytest.raises(ValueError, match="train_batch_size"):
        engine.set_train_batch_size(BATCH + 1)
    assert train(engine, [0]) == pytest.approx([PlainRun().step(*batch(0))[0]], rel=1e-5)


@pytest.mark.ranks(1)
def test_a_batch_without_data(engine):
    with pytest.raises(UsageError, match="no data: pass an iterator, give training_data"):
        engine.train_batch()


@pytest.mark.ranks(1)
def test_an_iterator_that_ends_within_a_batch(engine):
    with pytest.raises(StopIteration, match=r"ended after 1 micro-batches of a global batch; wrap the loader"):
        engine.train_batch(iter(micro_batches(engine, 0)[:1]))
    assert train(engine, [0]) == pytest.approx([PlainRun().step(*batch(0))[0]], rel=1e-5)


def test_an_iterator_that_ends_ends_the_loops_of_all_ranks(engine):
    loads = engine.is_first_stage() or engine.is_last_stage()
    data = iter([pair for seed in range(2) for pair in micro_batches(engine, seed)]) if loads else None
    losses = []
    with pytest.raises(StopIteration, match="ended after 0 micro-batches"):
        while True:
            losses.append(float(engine.train_batch(data)))
    assert len(losses) == 2
    with pytest.raises(StopIteration), torch.no_grad():
        engine.eval_batch(iter([]) if loads else None)
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        list(engine.train_batch(data) for _ in range(3))  # never a shorter list
    with pytest.raises(UsageError, match="ended after 0"):  # by the name of other mistakes too
        engine.train_batch(data)
    assert train(engine, [2])
    assert engine.global_steps == 3


def test_weights_of_a_stage_are_loaded(engine):
    state = {name: torch.full_like(value, 0.25) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": state}, strict=True, custom_load_fn=None, fetch_z3_params=True)
    assert all((value == 0.25).all() for value in engine.module_state_dict().values())
    for path in ("folder", None):
        with pytest.raises(UsageError, match="load_checkpoint"):
            engine.load_module_state_dict(path)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.zeros(2, 12, dtype=torch.int64), "found a Tensor"),
        ((torch.zeros(1),) * 3, "found a tuple of 3"),
        ({"x": torch.zeros(1)}, "found a dict"),
        ([torch.zeros(1)], "found a list of 1"),
    ],
)
def test_a_batch_that_is_no_pair(engine, wrong, words):
    with pytest.raises(UsageError, match=rf"is a pair \(inputs, labels\).*{words}"):
        engine.train_batch(iter([wrong] * 4))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (None, r"a tensor of shape \(8, 12, 256\)"),
        (lambda x, y: (x.sum(), y), "a tuple"),
        (lambda x, y: 1.0, "a float"),
    ],
)
def test_a_loss_that_is_no_scalar(loss_fn, words, world):
    case = Case(Layout(world.size, 1, 1))
    made = mpispeed.initialize(model=case.module(loss_fn=loss_fn), config=case.settings())[0]
    with pytest.raises(UsageError, match=f"one scalar loss, found {words}; give PipelineModule a loss_fn"):
        train(made, [0])
    made.destroy()


# -- beside the loss -------------------------------------------------------------------------------------------------


class WithExtras(PipelineModule):
    """Reports twice the mean label beside the loss."""

    def get_additional_losses(self):
        return {"labels": self.seen.float().mean() * 2}


@pytest.mark.ranks(1, 2, 3, 4)
def test_additional_losses_are_means_over_micro_batches_and_ranks(world):
    data = 2 if world.size % 2 == 0 else 1
    case = Case(Layout(world.size // data, 1, data))

    def loss_fn(x, y):
        model.seen = y
        return gpt_layers.cross_entropy(x, y)

    topology = PipeDataParallelTopology(case.layout.pipe, data)
    model = WithExtras(gpt_layers.layers(SHAPE), topology=topology, loss_fn=loss_fn)
    made = mpispeed.initialize(model=model, config=case.settings())[0]
    assert made.get_additional_losses() is None
    train(made, [0])
    assert made.get_additional_losses() == {"labels": pytest.approx(2 * float(batch(0)[1].float().mean()))}
    made.destroy()


def test_the_boundary_is_where_gradients_are_summed(engine):
    seen = []
    engine.bus.subscribe(Event.STEP_END, lambda _: seen.append(engine.is_gradient_accumulation_boundary()))
    engine.bus.subscribe(Event.FORWARD_END, lambda _: seen.append(engine.is_gradient_accumulation_boundary()))
    train(engine, [0])
    assert seen == [False] * engine.gradient_accumulation_steps() + [True]
    assert not engine.is_gradient_accumulation_boundary()


def test_activation_shapes_can_be_announced_again(engine):
    expected = PlainRun()
    found = train(engine, [0])
    engine.reset_activation_shape()
    found += train(engine, [1])
    assert found == pytest.approx([expected.step(*batch(step))[0] for step in (0, 1)], rel=1e-5)


# -- settings --------------------------------------------------------------------------------------------------------


def test_stages_of_the_config_are_those_of_the_module(world):
    case = Case(Layout(world.size, 1, 1))
    wrong = case.settings(pipeline={"stages": world.size + 1})
    with pytest.raises(ConfigError, match=rf"pipeline.stages is {world.size + 1}, but the PipelineModule was made for"):
        mpispeed.initialize(model=case.module(), config=wrong)
    right = case.settings(pipeline={"stages": world.size})
    mpispeed.initialize(model=case.module(), config=right)[0].destroy()


def test_stages_need_layers_in_a_row(world):
    with pytest.raises(ConfigError, match=r"the model is a Linear: only layers in a row can be dealt to stages"):
        mpispeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 12, "pipeline": {"stages": 2}})


def test_stages_that_do_not_divide_the_ranks(world):
    with pytest.raises(RuntimeError, match=rf"num_stages={world.size + 1} does not divide the {world.size} ranks"):
        PipelineModule([LayerSpec(torch.nn.Linear, 2, 2)], num_stages=world.size + 1)
    with pytest.raises(ConfigError, match="ranks"):
        PipelineModule([LayerSpec(torch.nn.Linear, 2, 2)], topology=PipeDataParallelTopology(world.size, 2))


@pytest.mark.parametrize("name", ["interleaved"])
def test_schedules_of_several_chunks_need_them(name, world):
    case = Case(Layout(world.size, 1, 1))
    with pytest.raises(ConfigError, match="chunks"):
        mpispeed.initialize(model=case.module(), config=case.settings(pipeline={"schedule": name}))
