"""A model that is wrapped a second time, without `destroy()`: by a trainer called twice, or a cell run again."""

import gc

import pytest

import mpispeed
from mpispeed.base.errors import UsageError
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
