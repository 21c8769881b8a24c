"""Engine methods and attributes that DeepSpeed scripts and other libraries use beside the training step."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from tests.zoo import same_bits
from tests.zoo.models import BATCH, Net, samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Numbers(torch.utils.data.Dataset):
    """Samples that are their own index."""

    def __len__(self):
        return BATCH

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    """The same numbers without indices."""

    def __iter__(self):
        return iter(range(BATCH))


# -- backward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduces", ["by hand", "in step"])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_stay_local_until_they_are_reduced(stage, reduces, comm):
    one, other = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    for batch in samples(2):
        train(one, [batch])
        other.backward(other(*own_part(other, batch)), False, True, scale_wrt_gas=True)  # positions as in DeepSpeed
        assert not any(state.is_averaged for state in other.parts.optimization.grads._states) or comm.size == 1
        if reduces == "by hand":
            other.allreduce_gradients(bucket_size=500_000_000)
        other.step()
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_cannot_stay_local(stage):
    engine = start(config(stage, **ADAM))
    loss = engine(*own_part(engine, samples(1)[0]))
    with pytest.raises(UsageError, match=r"allreduce_gradients=False\) is incompatible .* partitioned"):
        engine.backward(loss, allreduce_gradients=False)
    engine.backward(loss, release_loss=True, retain_graph=False)
    engine.step()
    engine.destroy()


# -- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 3])
def test_compile(stage):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    engine, plain = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    assert engine.is_compiled is False
    with pytest.raises(UsageError, match="schedule"):
        engine.compile(schedule=[(0, [])])
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    assert engine.is_compiled is True
    data = samples(2)
    assert train(engine, data) == pytest.approx(train(plain, data), rel=1e-5)
    assert graphs
    engine.destroy()
    plain.destroy()


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_loaders_that_data_ranks_share(comm):
    engine = start(config(0, **ADAM))
    loader = engine.deepspeed_io(Numbers(), batch_size=2, collate_fn=torch.stack)
    seen = torch.cat(list(loader))
    everyone = comm.gather_objects(seen.tolist())
    assert sorted(number for own in everyone for number in own) == list(range(BATCH))
    assert len(next(iter(engine.deepspeed_io(Numbers())))) == engine.train_micro_batch_size_per_gpu()
    assert engine.is_map_style_dataset(Numbers())
    assert engine.is_iterable_style_dataset(Stream())
    stream = torch.cat([torch.as_tensor(batch) for batch in engine.deepspeed_io(Stream(), batch_size=2)])
    assert stream.tolist()[:2] == [2 * comm.rank, 2 * comm.rank + 1]
    engine.destroy()


@pytest.mark.parametrize("route", ["eval", "predict"])
def test_loaders_that_read_everything(route):
    engine = start(config(0, **ADAM))
    for dataset in (Numbers(), Stream()):
        assert torch.cat(list(engine.deepspeed_io(dataset, 4, route))).tolist() == list(range(BATCH))
    sampled = engine.deepspeed_io(Numbers(), batch_size=1, data_sampler=[3, 1], num_local_io_workers=0)
    assert torch.cat(list(sampled)).tolist() == [3, 1]
    with pytest.raises(UsageError, match="data_sampler"):
        engine.deepspeed_io(Stream(), data_sampler=[3, 1])
    with pytest.raises(UsageError, match="'train', 'eval', 'predict'"):
        engine.deepspeed_io(Numbers(), route="test")
    with pytest.raises(UsageError, match="a int is no data set"):
        engine.deepspeed_io(3)
    engine.destroy()


def test_batches_pass_through_a_function():
    engine = start(config(0, **ADAM), training_data=Numbers())
    engine.set_data_post_process_func(lambda batch, state: (batch * 0, state["position"]))
    batch, position = next(iter(engine.training_dataloader))
    assert not batch.any()
    assert position == BATCH
    other = start(config(0, **ADAM), Net())
    with pytest.raises(UsageError, match="training_data"):
        other.set_data_post_process_func(print)
    engine.destroy()
    other.destroy()
