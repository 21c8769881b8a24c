"""MiCS, second copies, coded messages: the bits of stage 0 where nothing is coded, and the traffic of theory."""

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.native.block_quant import default_block
from mpispeed.store.layout import BLOCK
from tests.helpers.codec import gather_bytes, reduce_scatter_bytes
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

BATCH, STEPS = 36, 10
CUT = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
SCHEMES = {
    "stage 1": {"stage": 1, "stage3_param_persistence_threshold": 0},
    "stage 2": {"stage": 2, "stage3_param_persistence_threshold": 0},
    "stage 3": CUT,
    "mics 1": {**CUT, "mics_shard_size": 1},
    "mics 2": {**CUT, "mics_shard_size": 2},
    "mics 4": {**CUT, "mics_shard_size": 4},
    "mics 4 over nodes": {**CUT, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
    "mics 2, hpz 2": {**CUT, "mics_shard_size": 2, "zero_hpz_partition_size": 2},
    "mics 3, hpz 3": {**CUT, "mics_shard_size": 3, "zero_hpz_partition_size": 3},
    "mics 4, hpz 2": {**CUT, "mics_shard_size": 4, "zero_hpz_partition_size": 2},
    "hpz 2": {**CUT, "zero_hpz_partition_size": 2},
    "hpz 4": {**CUT, "zero_hpz_partition_size": 4},
}
EMBED = 1  # index of the embedding's unit
QWZ, QGZ, HPZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
CODED = {
    "qwZ": QWZ,
    "qgZ": QGZ,
    "qgZ with feedback": QGZ | LOCO,
    "qwZ, hpZ": QWZ | HPZ,
    "qwZ, hpZ, qgZ": QWZ | HPZ | QGZ,
}
EVERYWHERE = {"zero_quantized_in_node": True}


@pytest.fixture(autouse=True)
def _nodes_of_two(monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")


def ranks() -> int:
    engine = start(config(0, BATCH, 1, **WARM), TinyLM())
    size = engine.mesh.size
    engine.destroy()
    return size


def run(zero, *, steps=STEPS, accumulation=1, **model):
    """Losses, norm and weights after `steps` with sums in rank order."""
    settings = config(0, BATCH, accumulation, **WARM, reduction="ordered")
    settings["zero_optimization"] = dict(zero)
    engine = start(settings, TinyLM(**model))
    losses = train_averaged(engine, batches(steps, BATCH))
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return losses, norm, weights(engine)


def fits(name: str, size: int) -> bool:
    group = next((int(word) for word in name.replace(",", "").split() if word.isdigit()), 1)
    return name.startswith("stage") or (size % group == 0 and not ("nodes" in name and size < 4))


@pytest.mark.mpi(min_size=1)
def test_every_placement_gives_the_bits_of_stage_0():
    size = ranks()
    plain = run({"stage": 0, "stage3_param_persistence_threshold": 0})
    tried = []
    for name, zero in SCHEMES.items():
        if not fits(name, size):
            continue
        losses, norm, found = run(zero)
        assert losses == plain[0], name
        assert norm == plain[1], name
        same_bits(found, plain[2], name)
        tried.append(name)
    assert len(tried) >= {1: 4, 2: 7, 3: 5, 4: 11}.get(size, 4)


@pytest.mark.mpi(min_size=1)
def test_cut_gradients_are_equal_to_the_bit_with_accumulation():
    second = run(SCHEMES["stage 2"], accumulation=3)
    third = run(CUT, accumulation=3)
    assert (second[0], second[1]) == (third[0], third[1])
    same_bits(second[2], third[2])


@pytest.mark.mpi(min_size=3)
def test_groups_that_do_not_divide_the_ranks_are_refused():
    size = ranks()
    bad = size + 1
    for key in ("mics_shard_size", "zero_hpz_partition_size"):
        with pytest.raises(ConfigError, match=key):
            run({**CUT, key: bad})
    with pytest.raises(ConfigError, match="mics"):
        run({**CUT, "mics_shard_size": size, "zero_hpz_partition_size": 2 * size})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(CODED))
def test_coded_messages_stay_near_the_plain_run(name):
    """Bounds: 8 bits keep weights within 1/254 of a block's largest; 4 bits keep gradients within 1/14 of it.

    A loss follows its weights within a few percent over so short a run; the long comparison is in benchmarks.
    """
    size = ranks()
    if size % 2 and name != "qwZ":
        with pytest.raises(ConfigError, match=r"zero_hpz_partition_size|full nodes"):
            run({**CUT, **CODED[name]}, steps=1)
        return
    plain = run(CUT)[0]
    losses = run({**CUT, **CODED[name], **EVERYWHERE})[0]
    assert max(abs(a - b) / b for a, b in zip(losses, plain, strict=True)) < 0.03
    assert losses != plain


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(CODED))
def test_ranks_of_one_node_send_plain_values(name, monkeypatch):
    size = ranks()
    if size % 2 and "hpZ" in name:
        return
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", str(size))
    plain, found = run(SCHEMES["hpz 2"] if "hpZ" in name else CUT), run({**CUT, **CODED[name]})
    assert found[:2] == plain[:2]
    same_bits(found[2], plain[2])


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", ["qgZ", "qgZ with feedback"])
def test_inside_of_nodes_sums_are_plain(name):
    plain, found, coded = (run({**CUT, **more})[0] for more in ({}, CODED[name], CODED[name] | EVERYWHERE))
    misses = [max(abs(a - b) / b for a, b in zip(losses, plain, strict=True)) for losses in (found, coded)]
    assert 0 < misses[0] < 0.03  # bound as above
    assert found != coded


def traffic(zero, steps=2, **model):
    """Sent bytes by verb and axes without what the norm and the test itself exchange; and the padded unit sizes.

    The backward of an embedding reads no weights: its unit is fetched in forward only.
    """
    settings = config(0, BATCH, 1, **WARM)
    settings["zero_optimization"] = dict(zero)
    engine = start(settings, TinyLM(is_tied=False, depth=3, **model))
    data = batches(steps + 1, BATCH)
    train_averaged(engine, data[:1])
    engine.mesh.comm_trace.reset()
    train_averaged(engine, data[1:])
    found = {key: entry.bytes / steps for key, entry in engine.mesh.comm_trace.entries().items() if entry.bytes}
    assert engine.parts.table.units[EMBED].layout.entries[0].name == "embed.weight"
    size, units = engine.mesh.size, [unit.layout.padded for unit in engine.parts.table.units]
    norm_and_loss = 2 * 72 * 8 * (size - 1) // size + 2 * 8 * (size - 1) // size
    found["all_reduce", ("data",)] = found.get(("all_reduce", ("data",)), 0) - norm_and_loss
    engine.destroy()
    return {key: value for key, value in found.items() if value}, units, size


@pytest.mark.mpi(min_size=2)
def test_traffic_of_plain_schemes():
    sent, units, size = traffic(CUT)
    psi, back = 4 * sum(units), 4 * (sum(units) - units[EMBED])
    assert sent == {
        ("all_gather", ("data",)): (psi + back) * (size - 1) // size,  # forward and backward
        ("reduce_scatter", ("data",)): psi * (size - 1) // size,
    }
    if size != 4:
        return
    inner, outer = ("data.inner",), ("data.outer",)
    sent, units, _ = traffic({**CUT, "mics_shard_size": 2})
    psi, back = 4 * sum(units), 4 * (sum(units) - units[EMBED])
    assert sent == {
        ("all_gather", inner): (psi + back) // 2,
        ("reduce_scatter", inner): psi // 2,
        ("all_reduce", outer): 2 * (psi // 2) // 2,
    }
    sent, units, _ = traffic({**CUT, "zero_hpz_partition_size": 2})
    psi, back = 4 * sum(units), 4 * (sum(units) - units[EMBED])
    assert sent == {
        ("all_gather", outer): (psi // 2) // 2,  # forward only
        ("all_gather", inner): (psi + back) // 2,
        ("reduce_scatter", inner): psi // 2,
        ("reduce_scatter", outer): (psi // 2) // 2,
    }
    sent, units, _ = traffic(SCHEMES["mics 4, hpz 2"])
    psi, back = 4 * sum(units), 4 * (sum(units) - units[EMBED])
    near, across = ("data.second",), ("data.across",)
    assert sent == {
        ("all_gather", across): (psi // 2) // 2,  # forward only
        ("all_gather", near): (psi + back) // 2,
        ("reduce_scatter", near): psi // 2,
        ("reduce_scatter", across): (psi // 2) // 2,
    }
    sent, units, _ = traffic(SCHEMES["mics 4 over nodes"])
    psi, back = 4 * sum(units), 4 * (sum(units) - units[EMBED])
    local, across = ("data.local",), ("data.across",)
    assert sent == {
        ("all_gather", across): ((psi + back) // 2) // 2,
        ("all_gather", local): (psi + back) // 2,
        ("reduce_scatter", local): psi // 2,
        ("reduce_scatter", across): (psi // 2) // 2,
    }


@pytest.mark.mpi(min_size=2)
def test_traffic_of_coded_gathers():
    sent, units, size = traffic({**CUT, **QWZ, **EVERYWHERE})
    shards = [padded // size for padded in units]
    coded = [gather_bytes(count, [size], default_block(count))[0] for count in shards]
    assert sent["all_gather", ("data",)] == 2 * sum(coded) - coded[EMBED]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("in_node", [False, True])
def test_traffic_of_all_of_zero_plus_plus(in_node):
    """Gathers between nodes are coded on their whole way; of the two hops of a sum only the one between nodes is."""
    zero = {**CUT, **CODED["qwZ, hpZ, qgZ"], "zero_quantized_in_node": in_node}
    settings = config(0, BATCH, 1, **WARM)
    settings["zero_optimization"] = zero
    engine = start(settings, TinyLM(is_tied=False, depth=3))
    flat = [all(len(e.shape) < 2 for e in unit.layout.entries) for unit in engine.parts.table.units]
    engine.destroy()
    sent, units, _ = traffic(zero)
    inner, outer = ("data.inner",), ("data.outer",)
    hops = [gather_bytes(padded // 4, [2, 2], default_block(padded // 4)) for padded in units]
    assert sent["all_gather", outer] == sum(hop[0] for hop in hops)
    # forward over codes, backward from the second copy in fp32
    assert sent["all_gather", inner] == sum(hop[1] for hop in hops) + 4 * (sum(units) - units[EMBED]) // 2
    coded = [padded for padded, is_flat in zip(units, flat, strict=True) if not is_flat]
    plain = [padded for padded, is_flat in zip(units, flat, strict=True) if is_flat]
    reduced = [reduce_scatter_bytes(padded // 4, 2, 2, BLOCK) for padded in coded]
    assert sent.get(("all_to_all", inner), 0) == in_node * sum(first for first, _ in reduced)
    assert sent["all_to_all", outer] == sum(second for _, second in reduced)
    assert sent.get(("reduce_scatter", inner), 0) == 4 * (sum(plain) + (not in_node) * sum(coded)) // 2
    # between nodes a quarter of the bytes of plain sums, and less
    assert sent["all_to_all", outer] < 4 * sum(coded) // 2 // 2 / 4
