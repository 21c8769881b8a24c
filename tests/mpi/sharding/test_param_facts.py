"""What libraries for DeepSpeed ask of parameters at stage 3, of `zero.Init`, and changes of many gradients."""

import pytest
import torch

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import ConfigError, UsageError
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(2, 3)]
NAMES = (
    "ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_secondary_tensor", "ds_persist", "partition_numel",
)  # fmt: skip


def check_facts(params, comm):
    """Attributes of sharded parameters; nothing is gathered for them."""
    for param in params:
        assert all(hasattr(param, name) for name in NAMES)
        assert (param.ds_shape, param.ds_numel) == (param.shape, param.numel())
        assert param.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
        assert param.ds_persist is False
        assert param.ds_tensor.numel() == param.partition_numel()
        assert param.ds_secondary_tensor is None
        assert sum(comm.gather_objects(param.partition_numel())) == param.ds_numel
        assert not set(vars(param)) & set(NAMES)
    numbers = [param.ds_id for param in params]
    assert len(set(numbers)) == len(numbers)
    assert comm.gather_objects(numbers) == [numbers] * comm.size


def test_sharded_parameters_tell(comm):
    engine = start(config(3, **ADAM))
    params = list(engine.module.parameters())
    train(engine, samples(1))
    engine.empty_partition_cache()
    check_facts(params, comm)
    for param in params:
        parts = comm.gather_objects(param.ds_tensor)
        assert torch.equal(param.ds_tensor, zero.safe_get_local_fp32_param(param))
        # the snippet of DeepSpeed's page on changes of states
        zero.safe_set_local_fp32_param(param, torch.zeros_like(param.ds_tensor))
        with zero.GatheredParameters(param):
            assert not param.any()
            assert param.ds_status is zero.ZeroParamStatus.AVAILABLE
            assert torch.equal(param.ds_tensor, torch.zeros_like(parts[comm.rank]))
        assert param.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
        assert sum(map(torch.numel, parts)) == param.numel()
    engine.destroy()
    assert not any(hasattr(param, name) for param in params for name in NAMES)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_below_stage_3_have_no_such_attributes(stage):
    other = start(config(3, **ADAM))  # from here on torch.nn.Parameter has the properties
    engine = start(config(stage, **ADAM))
    assert not any(hasattr(param, name) for param in engine.module.parameters() for name in NAMES)
    engine.destroy()
    other.destroy()


def test_parameters_that_stay_whole_at_stage_3_tell():
    engine = start(config(3, zero={"stage3_param_persistence_threshold": 10**6}, **ADAM))
    for param in engine.module.parameters():
        assert (param.ds_status, param.ds_persist) == (zero.ZeroParamStatus.AVAILABLE, True)
        assert (param.ds_numel, param.partition_numel()) == (param.numel(), param.numel())
        assert torch.equal(param.ds_tensor, param.detach().flatten())
        assert not set(vars(param)) & set(NAMES)
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_second_copies_are_there_from_a_gather_to_the_next_update(comm, monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    engine = start(config(3, zero={"zero_hpz_partition_size": 2}, **ADAM))
    params = list(engine.module.parameters())
    assert all(param.ds_secondary_tensor is None for param in params)
    engine.backward(engine(*own_part(engine, samples(1)[0])))
    for param in params:
        assert param.ds_secondary_tensor.numel() >= param.ds_tensor.numel()
        assert not set(vars(param)) & set(NAMES)
        first = comm.rank // 2 * 2
        parts = comm.gather_objects(param.ds_secondary_tensor)[first : first + 2]
        with zero.GatheredParameters(param):
            assert torch.equal(torch.cat(parts), param.detach().flatten())
            assert param.ds_secondary_tensor is not None
    engine.step()
    assert all(param.ds_secondary_tensor is None for param in params)
    engine.destroy()


def test_parameters_of_zero_init_tell(comm):
    context = zero.Init()
    with context:
        model = Net()
    check_facts(list(model.parameters()), comm)
    numbers = [param.ds_id for param in model.parameters()]
    assert context.get_partition_rank() == comm.rank
    assert context.get_dp_process_group().size == comm.size
    engine = start(config(3, **ADAM), model)
    assert [param.ds_id for param in model.parameters()] == numbers
    check_facts(list(model.parameters()), comm)
    engine.destroy()


def test_settings_of_zero_init(comm):
    with pytest.raises(UsageError, match="enabled=False"):
        zero.Init(enabled=False).get_dp_process_group()

    class Turned(zero.Init):
        def get_partition_rank(self):
            return 0

    with pytest.raises(UsageError, match=r"Turned.get_partition_rank\(\) is overridden"):
        Turned()
    with pytest.raises(ConfigError, match="mics_shard_size"):
        zero.MiCS_Init(config_dict_or_path=config(3, **ADAM))
    settings = config(3, zero={"mics_shard_size": comm.size}, **ADAM)
    with zero.MiCS_Init(config_dict_or_path=settings) as context:
        model = Net()
    assert context.get_partition_rank() == comm.rank
    engine, whole = start(settings, model), start(config(0, **ADAM))
    assert train(engine, samples(2)) == pytest.approx(train(whole, samples(2)), rel=1e-5)
    engine.destroy()
    whole.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_many_gradients_are_changed(stage):
    engine, other = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    seen = []

    def double(grad, param):
        seen.append(param)
        return 2 * grad

    batch = samples(1)[0]
    engine.backward(engine(*own_part(engine, batch)))
    params = list(engine.module.parameters())
    zero.safe_update_full_grad_vectorized(params, double)
    assert [id(param) for param in seen] == [id(param) for param in params]
    other.backward(other(*own_part(other, batch)))
    for param, twin in zip(params, other.module.parameters(), strict=True):
        same_bits(zero.safe_get_full_grad(param), 2 * zero.safe_get_full_grad(twin))
    engine.step()
    other.step()
    assert mpispeed.zero.safe_get_full_fp32_param(params[0]).shape == params[0].shape
    assert weights(engine).keys() == weights(other).keys()
    engine.destroy()
    other.destroy()
