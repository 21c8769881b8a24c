"""Training on a device is training on the host, to the bit: every stage, dtype and tier."""

import collections
import contextlib

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError, UnsupportedOption
from mpispeed.store.placement import Tier
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.on_device import moved
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights, zero_section

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 36
SECTIONS = [
    zero_section(0),
    zero_section(1),
    zero_section(2),
    zero_section(3),
    zero_section(3, stage3_max_reuse_distance=0),
    {"stage": 3},
]
CPU = {"device": "cpu"}


def precision(name):
    more = {"initial_scale_power": 8} if name == "fp16" else {}
    return {} if name == "fp32" else {name: {"enabled": True, **more}}


def run(section, accumulation=1, device=None, dtype="fp32", steps=4, is_partly_frozen=False, **more):
    settings = config(0, BATCH, accumulation, reduction="ordered", **precision(dtype), **(WARM | more))
    model = moved(TinyLM(), device)
    model.blocks[0].requires_grad_(not is_partly_frozen)
    engine = mpispeed.initialize(model=model, config=settings | {"zero_optimization": section})[0]
    if device is not None:
        assert engine.device == device
        assert engine.local_rank == device.index  # scripts write batch.to(engine.local_rank)
        assert all(param.device == device for param in engine.module.parameters())
    losses = train_averaged(engine, batches(steps, BATCH))
    found = losses, engine.get_global_grad_norm(), {k: v.cpu() for k, v in weights(engine).items()}
    engine.destroy()
    if device is not None:
        assert all(param.device == device for param in model.parameters())
    return found


@pytest.mark.parametrize(("section", "how"), on_ranks(SECTIONS, [("fp32", 1), ("bf16", 3), ("fp16", 1)]), ids=str)
def test_stages(device, on_host, section, how):
    dtype, accumulation = how
    found = run(section, accumulation, device, dtype)
    on_host()
    same_bits(found, run(section, accumulation, None, dtype))


ON_HOST = [
    *(zero_section(stage, offload_optimizer=CPU) for stage in (1, 2, 3)),
    zero_section(3, offload_param=CPU),
    zero_section(3, offload_param=CPU, offload_optimizer={"device": "cpu", "pin_memory": True}),
    {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU},
]


@pytest.mark.parametrize(("section", "how"), on_ranks(ON_HOST, [("fp32", 1), ("bf16", 3)], ranks=(1, 2)), ids=str)
def test_tiers_in_host_memory(device, on_host, section, how):
    dtype, accumulation = how
    found = run(section, accumulation, device, dtype)
    on_host()
    same_bits(found, run(section, accumulation, None, dtype))


SPLITS = [
    ("fp32", 1, {"offload_optimizer": CPU}),
    ("bf16", 3, {"offload_optimizer": CPU | {"pin_memory": True}}),
    ("bf16", 1, {"offload_optimizer": CPU, "offload_param": CPU}),
    ("fp32", 3, {"offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True}),
    ("bf16", 3, {"offload_optimizer": {"device": "nvme"}}),
    ("fp32", 1, {"offload_optimizer": {"device": "nvme"}}),
]


@pytest.mark.parametrize(("dtype", "accumulation", "more"), in_turn(SPLITS, ranks=(1, 2)), ids=str)
def test_states_beyond_the_ratio_rest_and_are_updated_on_the_device(
    device, on_host, mpi_tmp_path, dtype, accumulation, more
):
    """The same bits as with all states on the host: updates repeat its arithmetic, and the order of sums is fixed."""

    def train(where, ratio):
        section = zero_section(3, **more)
        section["offload_optimizer"] = section["offload_optimizer"] | {"nvme_path": str(mpi_tmp_path), "ratio": ratio}
        settings = config(0, BATCH, accumulation, reduction="ordered", **precision(dtype), **WARM)
        engine = mpispeed.initialize(model=moved(TinyLM(), where), config=settings | {"zero_optimization": section})[0]
        homes = []
        with look_at_updates(engine) as updated:
            losses = train_averaged(engine, batches(4, BATCH))
        parts = engine.parts
        for unit in parts.params.table.units:
            held = parts.params.shards.master(unit), *parts.optimization.states.of(unit).values()
            tensors = [*held, parts.optimization.grads.shards.stored(unit)[0].get()]
            homes.append({tensor.device.type for tensor in tensors} | updated[unit.index])
            tier = Tier(more["offload_optimizer"]["device"].replace("cpu", "host"))
            tier = tier if homes[-1] == {"cpu"} else Tier.DEVICE
            assert where is None or {unit.states.master.tier, unit.states.grad.tier} == {tier}
        found = losses, engine.get_global_grad_norm(), {k: v.cpu() for k, v in weights(engine).items()}
        engine.destroy()
        return found, homes

    (split, homes), (apart, on_host_alone) = train(device, 0.5), train(device, 1.0)
    same_bits(split, apart)
    host = sum(home == {"cpu"} for home in homes)
    assert 0 < host < len(homes)
    assert homes == [{"cpu"}] * host + [{device.type}] * (len(homes) - host)
    assert on_host_alone == [{"cpu"}] * len(homes)
    assert train(device, 0.0)[1] == [{device.type}] * len(homes)
    on_host()
    same_bits(split, train(None, 0.5)[0])


@contextlib.contextmanager
def look_at_updates(engine):
    """By unit: the kinds of devices on which the rule has updated its masters, with all that it read and wrote."""
    rule, found = engine.parts.optimization.rule, collections.defaultdict(set)
    update_one = rule.update_one

    def looked_at(window, *more):
        found[window.key[0]] |= {x.device.type for x in (window.master, window.grad, *window.state.values())}
        return update_one(window, *more)

    rule.update_one = looked_at
    yield found
    del rule.update_one


PINS = [(1, (False, True)), (2, (False, True)), (3, (True, False)), (3, (True, True)), (3, (False, False))]


@pytest.mark.parametrize(("stage", "pins"), in_turn(PINS, ranks=(2, 3)))
def test_host_memory_is_page_locked_where_the_section_says_so(device, on_host, caplog, stage, pins):
    sections = {"offload_optimizer": CPU | {"pin_memory": pins[1]}}
    if stage == 3:
        sections["offload_param"] = CPU | {"pin_memory": pins[0]}
    settings = config(stage, BATCH, 1, dtype="bf16", zero=sections, **WARM)
    engine = mpispeed.initialize(model=moved(TinyLM(), device), config=settings)[0]
    params, parts = engine.parts.params, engine.parts.optimization
    for unit in params.table.units:
        slots = parts.states.of(unit).values()
        cut_grads = [parts.grads.shards.stored(unit)[0].get()] if stage > 1 else []
        assert [x.is_pinned() for x in (params.shards.master(unit), *slots, *cut_grads)] == [pins[1]] * (
            3 + len(cut_grads)
        )
        assert stage < 3 or params.shards.rest(unit).is_pinned() == pins[0]
    losses = train_averaged(engine, batches(2, BATCH))
    engine.destroy()
    assert "page-locked" not in caplog.text
    on_host()
    engine = mpispeed.initialize(model=TinyLM(), config=settings)[0]
    assert not any(engine.parts.params.shards.master(unit).is_pinned() for unit in engine.parts.params.table.units)
    assert train_averaged(engine, batches(2, BATCH)) == losses
    engine.destroy()
    asked = sum(pins) if stage == 3 else pins[1]
    assert caplog.text.count("page-locked memory is for transfers to a GPU") == (asked if engine.mesh.rank == 0 else 0)


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    on_ranks([("optimizer",), ("param",), ("optimizer", "param")], ["fp32", "bf16"], ranks=(1, 2)),
    ids=str,
)
def test_tiers_in_files(device, on_host, mpi_tmp_path, kinds, dtype):
    nvme = {"device": "nvme", "nvme_path": str(mpi_tmp_path)}
    section = zero_section(3, **{f"offload_{kind}": nvme for kind in kinds})
    found = run(section, 3, device, dtype)
    on_host()
    same_bits(found, run(zero_section(3), 3, None, dtype))


SCHEMES = [
    {"zero_quantized_weights": True, "zero_quantized_in_node": True},
    {"zero_hpz_partition_size": 2},
    {"mics_shard_size": 2},
    {"zero_quantized_nontrainable_weights": True},
    {"zero_quantized_nontrainable_weights": True, "offload_param": CPU},
]


@pytest.mark.parametrize("more", in_turn(SCHEMES, ranks=(2, 4, 4, 2, 2)), ids=str)
def test_schemes(device, on_host, more):
    found = run(zero_section(3, **more), 3, device, "bf16", is_partly_frozen=True)
    on_host()
    same_bits(found, run(zero_section(3, **more), 3, None, "bf16", is_partly_frozen=True))


@pytest.mark.parametrize("optimizer", in_turn(["Adam", "Lion", "Adagrad", "SGD"], ranks=(1, 2)))
def test_optimizers(device, on_host, optimizer):
    more = {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
    section = zero_section(2)
    found = run(section, 1, device, "bf16", **more)
    on_host()
    same_bits(found, run(section, 1, None, "bf16", **more))


OF_THE_SCRIPT = [
    (zero_section(1), "fp32"),
    (zero_section(1, offload_optimizer=CPU), "fp32"),
    (zero_section(2, offload_optimizer={"device": "cpu", "pin_memory": True}), "bf16"),
    (zero_section(3, offload_optimizer=CPU), "bf16"),
    (zero_section(3, offload_optimizer=CPU), "fp32"),
    (zero_section(3, offload_optimizer=CPU | {"ratio": 0.5}), "bf16"),
]


@pytest.mark.parametrize(("section", "dtype"), in_turn(OF_THE_SCRIPT, ranks=(1, 2)), ids=str)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_of_the_script(device, on_host, cls, section, dtype):
    def train(where):
        model = moved(TinyLM(), where)
        optimizer = cls(model.parameters(), lr=1e-3)
        settings = config(0, BATCH, 1, **WARM, reduction="ordered", **precision(dtype))
        settings |= {"zero_optimization": section, "zero_allow_untested_optimizer": True}
        del settings["optimizer"]
        engine = mpispeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        losses = train_averaged(engine, batches(4, BATCH))
        found = losses, {name: values.cpu() for name, values in weights(engine).items()}
        engine.destroy()
        return found

    found = train(device)
    on_host()
    same_bits(found, train(None))


def test_what_is_refused(device):
    settings = config(0, BATCH, 1, **WARM, sparse_gradients=True)
    with pytest.raises(ConfigError, match="host memory only"):
        mpispeed.initialize(model=moved(TinyLM(), device), config=settings)
    engine = mpispeed.initialize(model=moved(TinyLM(), device), config=config(1, BATCH, 1, **WARM))[0]
    with pytest.raises(UnsupportedOption, match="offload_states"):
        engine.offload_states()
    engine.destroy()
