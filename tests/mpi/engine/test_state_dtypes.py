"""Training with masters and states of the optimizer in 16 and 8 bits."""

import pytest
import torch
from click.testing import CliRunner

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.cli.main import cli
from mpispeed.engine.estimate.budget import predict
from mpispeed.engine.estimate.inputs import gather_inputs
from mpispeed.store.placement import Tier
from tests.helpers import pipes
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.models import Mlp, TinyLM, batches, samples
from tests.zoo.training import SGD, WARM, config, start, train, train_averaged, weights

BATCH = 36
TYPES = {
    "kahan": {"master_dtype": "bf16", "master_rounding": "kahan", "optimizer_states": "int8"},
    "stochastic": {"master_dtype": "bf16", "master_rounding": "stochastic", "optimizer_states": "bf16"},
    "moments": {"optimizer_states": {"exp_avg": "int8", "exp_avg_sq": "bf16"}},
}


def settings(stage, types, tmp=None, **more):
    zero = {}
    if tmp is not None:
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp)}}
    return config(stage, BATCH, 1, dtype="bf16", zero=zero, data_types=TYPES[types], **(WARM | more))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "types"), on_ranks([0, 1, 2, 3], list(TYPES)))
def test_a_restart_goes_on_with_the_same_bits(stage, types, mpi_tmp_path):
    data = batches(4, BATCH)
    whole = start(settings(stage, types), TinyLM())
    expected = train_averaged(whole, data)
    first = start(settings(stage, types), TinyLM())
    losses = train_averaged(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    first.destroy()
    second = start(settings(stage, types), TinyLM(seed=9))
    second.load_checkpoint(str(mpi_tmp_path))
    losses += train_averaged(second, data[2:])
    assert losses == expected
    same_bits(weights(second), weights(whole))
    for unit in whole.parts.table.units:
        same_bits(second.parts.optimization.states.of(unit), whole.parts.optimization.states.of(unit))
        same_bits(second.parts.params.shards.master(unit), whole.parts.params.shards.master(unit))
    second.destroy()
    whole.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "types", "in_files"), on_ranks([1, 2, 3], list(TYPES), [False, True]))
def test_states_have_the_predicted_bytes_and_files_change_no_bit(stage, types, in_files, mpi_tmp_path):
    plain = start(settings(stage, types), TinyLM())
    engine = start(settings(stage, types, mpi_tmp_path if in_files else None), TinyLM())
    data = batches(2, BATCH)
    assert train_averaged(engine, data) == train_averaged(plain, data)
    same_bits(weights(engine), weights(plain))
    states, shards = engine.parts.optimization.states, engine.parts.params.shards
    budget = predict(gather_inputs(engine.plan, TinyLM()))
    held = {(row.what, row.tier): row.bytes for row in budget.held}
    memory = sum(held.get(("optimizer state", tier), 0) for tier in (Tier.DEVICE, Tier.HOST))
    assert states.state_bytes == memory
    assert states.swapped_bytes == held.get(("optimizer state", Tier.NVME), 0)
    assert bool(states.swapped_bytes) == in_files
    assert shards.master_bytes + shards.swapped_bytes == budget.bytes_of("masters")
    engine.destroy()
    plain.destroy()


@pytest.mark.mpi(min_size=1)
def test_masters_in_bf16_are_rounded_to_the_nearest_once_in_an_update():
    """The first update of weights that bf16 holds: as that of fp32 masters, rounded."""
    found = []
    for types in ({}, {"master_dtype": "bf16"}):
        model = TinyLM()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())
        engine = start(config(1, BATCH, 1, dtype="bf16", data_types=types, **SGD), model)
        train_averaged(engine, batches(1, BATCH))
        shards = engine.parts.params.shards
        found.append([shards.master(unit).clone() for unit in engine.parts.table.units])
        assert bool(shards.master_bytes) == (not types)
        engine.destroy()
    same_bits(found[1], [master.bfloat16().float() for master in found[0]])
    assert any((ours != theirs).any() for ours, theirs in zip(*found, strict=True))


@pytest.mark.ranks(1, 3)
def test_states_of_other_dtypes_are_converted(mpi_tmp_path, caplog):
    first = start(config(1, BATCH, 1, dtype="bf16", **WARM), TinyLM())
    train_averaged(first, batches(2, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    other = start(settings(2, "kahan"), TinyLM(seed=9))
    with caplog.at_level("INFO"):
        other.load_checkpoint(str(mpi_tmp_path))
    if other.mesh.rank == 0:
        assert "converted to: masters bf16 (kahan), optimizer states int8" in caplog.text
    for unit in first.parts.table.units:
        ours, theirs = other.parts.params.shards.master(unit), first.parts.params.shards.master(unit)
        torch.testing.assert_close(ours, theirs, rtol=2**-16, atol=0)  # two bf16 hold 16 bits
    first.destroy()
    other.destroy()


def check_restart(make, trained, folder):
    """Train 2 steps, and 1 more after a save and, by another engine, a load."""
    first = make()
    trained(first, range(2))
    first.save_checkpoint(str(folder))
    second = make()
    second.load_checkpoint(str(folder))
    assert trained(second, range(2, 3)) == trained(first, range(2, 3))
    ours, theirs = (engine.mpispeed.parts for engine in (first, second))
    has_moved = False
    for unit in ours.table.units:  # a rank's part of some may be what fills them up
        held = ours.optimization.states.of(unit)
        has_moved |= any(bool(values.any()) for values in held.values())
        same_bits(theirs.optimization.states.of(unit), held)
        same_bits(theirs.params.shards.master(unit), ours.params.shards.master(unit))
    assert has_moved
    for engine in (first, second):
        engine.destroy()


@pytest.mark.parametrize(("stage", "types"), on_ranks([0, 1, 2, 3], list(TYPES), ranks=(2, 4)))
def test_slices_go_on_with_the_same_bits(stage, types, mpi_tmp_path):
    slices = {"autotp_size": 2, "injection_policy_tuple": {"first": "column", "middle": "row"}}
    rows = samples(3, BATCH, width=8, outs=4)
    check_restart(
        lambda: start(settings(stage, types, tensor_parallel=slices), Mlp()),
        lambda engine, steps: train(engine, [rows[step] for step in steps]),
        mpi_tmp_path,
    )


PIPELINES = [((2, 1, 1), "kahan"), ((3, 1, 1), "stochastic"), ((2, 1, 2), "kahan"), ((2, 2, 1), "moments")]


@pytest.mark.parametrize(("layout", "types"), in_turn(PIPELINES, ranks=(2, 3, 4, 4)))
def test_pipelines_go_on_with_the_same_bits(layout, types, mpi_tmp_path):
    case = pipes.Case(pipes.Layout(*layout), "1f1b", 1, "bf16", is_tied=True)
    check_restart(lambda: case.engine(data_types=TYPES[types]), pipes.train, mpi_tmp_path)


@pytest.mark.ranks(1, 2, 3, 4)
def test_models_built_in_shards_have_the_same_states():
    found = []
    for is_inside in (False, True):
        given = settings(3, "kahan")
        if is_inside:
            with mpispeed.zero.Init(config_dict_or_path=given):
                model = TinyLM()
        else:
            model = TinyLM().bfloat16()
        engine = start(given, model)
        losses = train_averaged(engine, batches(2, BATCH))
        found.append(
            (losses, weights(engine), [engine.parts.optimization.states.of(u) for u in engine.parts.table.units])
        )
        engine.destroy()
    same_bits(found[1], found[0])


@pytest.mark.ranks(2)
def test_checkpoints_say_what_rested_how(mpi_tmp_path, comm):
    engine = start(settings(2, "kahan"), TinyLM())
    train_averaged(engine, batches(1, BATCH))
    engine.save_checkpoint(str(mpi_tmp_path), tag="t")
    if comm.rank == 0:
        shown = CliRunner().invoke(cli, ["ckpt", "show", f"{mpi_tmp_path}:t", "--state"])
        assert 'dtypes = "masters bf16 (kahan), optimizer states int8"' in shown.output
        again = CliRunner().invoke(cli, ["ckpt", "verify", f"{mpi_tmp_path}:t"])
        assert again.exit_code == 0, again.output
    engine.destroy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "looks at whole tensors"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}}, "exchanges them"),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, "names 'exp_avg_sq'"),
    ],
)
def test_optimizers_that_cannot_say_why(more, words):
    with pytest.raises(ConfigError, match=words):
        start(settings(1, "moments", **more), TinyLM())
