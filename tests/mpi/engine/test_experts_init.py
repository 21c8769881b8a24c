"""Models with layers of experts that are built inside of `zero.Init`."""

import pytest

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.nn.expert import MLPExperts
from mpispeed.nn.tensor import cuts, partial_gradients
from mpispeed.sharding import sharded_param
from mpispeed.zero import GatheredParameters, safe_get_full_grad
from tests.helpers.covering import in_turn
from tests.helpers.expert_training import BATCH, SGD, Net, data, group_sizes, reference, same_tensors
from tests.helpers.hub_experts import model_of, tokens_of
from tests.helpers.tensor import assert_near, joined
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)


def built(settings, ep_size, **options):
    with mpispeed.zero.Init(config_dict_or_path=settings):
        return Net(ep_size, fused=MLPExperts, **options)


def train(engine):
    norms = []
    for batch in data():
        engine.backward(engine(*own_part(engine, tuple(batch))))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def compare(engine, expected):
    held, known = engine.module.second.experts.held, cuts(engine.module)
    for name, own in weights(engine).items():
        value = joined(engine.mpispeed.parts.mesh["model"], known.get(name), own)
        wanted = expected[name][held.start : held.stop] if name.startswith("second.experts.") else expected[name]
        assert_near(value, wanted, 1e-5, name)


@pytest.mark.parametrize("stage", in_turn([3, 2, 0]))
def test_training_is_that_of_one_process(comm, stage):
    expected, wanted = reference(fused=MLPExperts)
    for ep_size in group_sizes(comm):
        settings = config(stage, BATCH, 1, **SGD)
        model = built(settings, ep_size)
        assert all(map(sharded_param.is_sharded, model.parameters()))
        engine = start(settings, model)
        assert train(engine) == pytest.approx(wanted, rel=1e-5)
        compare(engine, expected)
        engine.destroy()


def test_shards_go_to_the_ranks_with_the_same_experts(comm):
    model = built(config(3, BATCH, 1, **ADAM), comm.size)
    with GatheredParameters(list(model.second.experts.parameters()), modifier_rank=0):
        model.second.experts.up_proj.data.fill_(comm.rank + 2.0)
    engine = start(config(3, BATCH, 1, **ADAM), model)
    assert (weights(engine)["second.experts.up_proj"] == 2.0).all()
    names = [name for name, _ in model.first.deepspeed_moe.experts.named_parameters()]
    assert len(names) == 4 * len(model.second.experts.held)
    engine.destroy()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_cut", [False, True])
def test_in_layers_that_are_cut(comm, is_cut):
    expected, wanted = reference(fused=MLPExperts)
    policy = {"up": "column", "down": "row"}
    settings = config(3, BATCH, 1, tensor_parallel={"autotp_size": 2, "injection_policy_tuple": policy}, **SGD)
    engine = start(settings, built(settings, comm.size // 2, slices=is_cut))
    assert train(engine) == pytest.approx(wanted, rel=1e-5)
    compare(engine, expected)
    engine.destroy()


@pytest.mark.ranks(2, 3)
def test_a_checkpoint_of_a_model_built_whole_fits(comm, mpi_tmp_path):
    settings = config(3, BATCH, 1, **ADAM)
    engine = start(settings, Net(1, fused=MLPExperts))
    train(engine)
    engine.save_checkpoint(str(mpi_tmp_path), tag="whole")
    engine.destroy()
    engine = start(settings, built(settings, comm.size))
    engine.load_checkpoint(str(mpi_tmp_path), tag="whole")
    engine.save_checkpoint(str(mpi_tmp_path), tag="again")
    assert same_tensors(mpi_tmp_path / "again", mpi_tmp_path / "whole")
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "stage", "experts_cut"), in_turn([("mixtral", 3, True), ("deepseek_v3", 2, False)], (2, 4))
)
def test_blocks_of_transformers_in_layers_that_are_cut(comm, kind, stage, experts_cut):
    """Those of a model that is built in `zero.Init` too, at stage 3."""
    model, tokens = model_of(kind), tokens_of(4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    experts = {"enabled": True, "autoep_size": comm.size // 2, "expert_tensor_parallel_size": 2 if experts_cut else 1}
    settings = config(stage, 4, 1, **SGD, expert_parallel=experts, tensor_parallel={"autotp_size": 2})
    with mpispeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
        other = model_of(kind)
    engine = start(settings, other)
    known = cuts(other)
    assert any(".experts." in name for name in known) is experts_cut
    part = own_part(engine, tokens)[0]
    engine.backward(engine(input_ids=part, labels=part).loss)
    grads = {name: param.grad for name, param in model.named_parameters()}
    slices, partial = engine.mpispeed.parts.mesh["model"], set(partial_gradients(other))
    for name, param in other.named_parameters():
        layer, _, rest = name.partition(".experts.")
        held = other.get_submodule(layer).experts.held if rest else range(0)
        wanted = grads[name][held.start : held.stop] if rest else grads[name]
        grad = safe_get_full_grad(param)
        if name in partial:
            slices.all_reduce(grad)  # a step does so
        assert_near(joined(slices, known.get(name), grad), wanted, 1e-5, name)
    engine.destroy()


@pytest.mark.ranks(2)
def test_other_slices_of_experts_than_of_layers_are_refused(comm):
    settings = config(1, 4, 1, **SGD, expert_parallel={"enabled": True, "expert_tensor_parallel_size": 2})
    with pytest.raises(
        ConfigError, match="tensor_parallel cuts layers over 1 ranks: experts are cut over as many; use 1"
    ):
        start(settings, model_of("mixtral"))
