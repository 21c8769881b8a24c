"""A model that is wrapped a second time, without `destroy()`: by a trainer called twice, or a cell run again."""

import copy
import gc
import io
import weakref

import pytest
import torch

import mpispeed
from mpispeed.base.errors import UsageError
from mpispeed.engine.ownership import engine_of
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, config, start, train, weights

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.deepspeed_row("a6")
@pytest.mark.parametrize(
    ("first", "second"), in_turn([(0, 0), (1, 2), (2, 1), (3, 3), (3, 0), (0, 3)], ranks=(1, 3, 2, 2, 4))
)
def test_the_new_engine_trains_and_the_old_one_says_why_not(first, second):
    model = Net()
    old = start(config(first, **ADAM), model)
    train(old, samples(2))
    new = start(config(second, **ADAM), model)
    reference = start(config(second, **ADAM), _copy_of(weights(new)))
    data = samples(3, seed=8)
    assert train(new, data) == train(reference, data)
    same_bits(weights(new), weights(reference))
    with pytest.raises(UsageError, match=r"engine\.step\(\).* its model was given to another engine"):
        old.step()
    old.destroy()  # once more is no harm
    train(new, samples(1))
    new.destroy()
    reference.destroy()


def _copy_of(values):
    model = Net()
    model.load_state_dict({name.removeprefix("module."): value for name, value in values.items()})
    return model


def test_an_engine_that_nobody_refers_to_any_more():
    model, stage = Net(), 1
    for _ in range(2):
        engine = start(config(stage, **ADAM), model)
        train(engine, samples(1))
        if engine.global_rank == 0:
            del engine  # collected on one rank, alive on the others until the next round
            gc.collect()
    engine = mpispeed.initialize(model=model, config=config(stage, **ADAM))[0]
    train(engine, samples(1))
    engine.destroy()


@pytest.mark.parametrize("stage", in_turn([1, 3], ranks=(1, 2)))
def test_a_script_may_keep_only_the_model_and_the_optimizer(stage):
    def made():
        engine = start(config(stage, **ADAM), Net())
        return engine.module, engine.optimizer

    model, optimizer = made()
    gc.collect()
    before = full(model)
    for batch in samples(2):
        model(*batch).backward()
        optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(before, full(model), strict=True))


@pytest.mark.parametrize("stage", in_turn([2, 3], ranks=(2, 3)))
def test_parameters_alone_keep_their_engine_until_they_go(stage):
    def made():
        engine = start(config(stage, **ADAM), Net())
        train(engine, samples(1))
        return list(engine.module.parameters()), weakref.ref(engine)

    params, engine = made()
    gc.collect()
    assert all(mpispeed.zero.safe_get_full_fp32_param(param) is not None for param in params)
    del params
    gc.collect()
    assert engine() is None


@pytest.mark.ranks(1)
def test_copies_of_a_model_hold_no_engine():
    engine = start(config(1, **ADAM), Net())
    reference = weakref.ref(engine)
    copies = [copy.deepcopy(engine.module)]
    for what, is_safe in ((next(engine.module.parameters()), True), (engine.module, False)):
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=is_safe))
    del engine, what
    gc.collect()
    assert reference() is None
    assert [engine_of(each) for each in (copies[0], copies[2])] == [None, None]


def full(model):
    return [mpispeed.zero.safe_get_full_fp32_param(param).clone() for param in model.parameters()]


@pytest.mark.ranks(2)
def test_a_frozen_parameter_that_two_models_share_keeps_both_engines():
    """The end of one leaves the other to those that have the parameter alone."""
    stage, models = 1, (Net(seed=3), Net(seed=4))
    shared = next(models[0].parameters()).requires_grad_(False)
    name = next(name for name, _ in models[0].named_parameters())
    owner, _, attribute = name.rpartition(".")
    setattr(models[1].get_submodule(owner), attribute, shared)
    first, second = (start(config(stage, **ADAM), model) for model in models)
    assert [engine_of(model) for model in models] == [first, second]
    outside = torch.nn.Module()
    outside.frozen, outside.own = shared, torch.nn.Parameter(torch.ones(2))
    assert engine_of(outside) is None  # it is no model of theirs
    watched, trained = weakref.ref(first), [p for p in models[0].parameters() if p is not shared]
    second.destroy()
    del models, first
    for param in trained:
        vars(param).clear()
    gc.collect()
    assert watched() is not None  # held by the shared parameter alone
    watched().destroy()
    assert not vars(shared)
