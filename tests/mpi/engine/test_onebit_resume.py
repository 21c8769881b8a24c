"""Restarts of 1-bit optimizers: bit for bit on as many ranks, whatever phase they are saved in."""

import logging

import pytest
import torch
from click.testing import CliRunner

from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.cli.main import cli
from mpispeed.engine import api
from tests.helpers.covering import in_turn
from tests.helpers.onebit_training import (
    FREEZE,
    NAMES,
    PRECISIONS,
    engine_of,
    is_same_on_ranks,
    run_step,
    samples,
    settings,
    states_of,
)
from tests.helpers.pipes import Case, Layout, train
from tests.zoo.models import Mlp
from tests.zoo.training import start, weights

pytestmark = pytest.mark.mpi(min_size=1)
DATA = samples(20)
# 0/1 Adam: coded gradients, the end of that phase, a meeting, and between meetings.
CASES = [
    ("OneBitAdam", 0, "fp32", 10), ("OneBitAdam", 1, "fp32", 10), ("OneBitAdam", 0, "bf16", FREEZE),
    ("OneBitAdam", 1, "bf16", 10), ("OneBitAdam", 1, "fp16", 10), ("OneBitLamb", 0, "fp32", 10),
    ("OneBitLamb", 0, "bf16", FREEZE), ("ZeroOneAdam", 0, "fp32", 7), ("ZeroOneAdam", 0, "bf16", 8),
    ("ZeroOneAdam", 0, "fp32", 10), ("ZeroOneAdam", 0, "fp32", 13), ("ZeroOneAdam", 0, "bf16", 13),
    ("ZeroOneAdam", 1, "bf16", 15),
]  # fmt: skip


def everything(engine):
    """Parameters, masters, states and errors of this rank."""
    return states_of(engine) | weights(engine)


def unlike(ours, theirs):
    """Names of tensors that are not the same."""
    return [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]


def steps(engine, data):
    return [run_step(engine, batch) for batch in data]


@pytest.mark.parametrize(("name", "stage", "dtype", "at"), in_turn(CASES, ranks=(2, 3, 1, 2, 4, 3)))
def test_20_steps_equal_some_a_restart_and_the_rest(name, stage, dtype, at, mpi_tmp_path):
    more = {**PRECISIONS[dtype], "reduction": "ordered", "gradient_clipping": 0.5}
    whole = engine_of(name, stage, **more)
    expected = steps(whole, DATA)
    first = engine_of(name, stage, **more)
    losses = steps(first, DATA[:at])
    first.save_checkpoint(str(mpi_tmp_path), async_save=at == 13)
    before = everything(first)
    losses += steps(first, DATA[at : at + 2]) if at == 13 else []
    first.destroy()  # waits for what is written
    second = engine_of(name, stage, model=Mlp(seed=99), **more)
    second.load_checkpoint(str(mpi_tmp_path))
    assert unlike(everything(second), before) == []
    assert losses[:at] + steps(second, DATA[at:]) == expected
    assert unlike(everything(second), everything(whole)) == []
    for engine in (second, whole):
        engine.destroy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("name", "at"), [("OneBitAdam", 9), ("OneBitLamb", 9), ("ZeroOneAdam", 13)])
def test_what_is_in_the_file(name, at, mpi_tmp_path, comm):
    engine = engine_of(name)
    steps(engine, DATA[:at])
    engine.save_checkpoint(str(mpi_tmp_path), tag="t")
    with open_checkpoint(mpi_tmp_path) as source:
        parts = engine.parts
        for unit in parts.table.units:
            errors = parts.optimization.exchange.coder.errors[unit.index]
            for entry in unit.layout.entries:
                rows = source.read_whole(entry.name, "worker_error")
                assert rows.shape == (comm.size, *entry.shape)
                assert torch.equal(rows[comm.rank].reshape(-1), errors.worker[entry.span.slice])
                assert source.read_whole(entry.name, "server_error").shape == entry.shape
                numbers = source.info(entry.name).scalars
                assert set(numbers) == (
                    {"lamb_coeff_freeze", "last_factor", "scaling_coeff"} if name == "OneBitLamb" else set()
                )
                if name == "ZeroOneAdam":
                    for slot in ("exp_avg", "momentum_accumulator"):
                        rows = source.read_whole(entry.name, f"local_{slot}")
                        own = parts.optimization.states.of(unit)[slot][entry.span.slice]
                        assert torch.equal(rows[comm.rank].reshape(-1), own)
                        # The mean is of sums in fp32.
                        mean = source.read_whole(entry.name, slot).double()
                        assert torch.allclose(
                            mean, rows.double().mean(0), rtol=1e-6, atol=1e-7 * float(rows.abs().max())
                        )
    engine.destroy()


@pytest.mark.parametrize("name", in_turn(["OneBitAdam", "ZeroOneAdam"], ranks=(4, 2, 1)))
def test_stages_and_slices_of_a_model(name, mpi_tmp_path, comm):
    sizes = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 1, 2)}[comm.size]
    check_pipe(Case(Layout(*sizes), stage=1, is_tied=True), name, mpi_tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["OneBitLamb", "ZeroOneAdam"])
def test_slices_on_two_data_ranks(name, mpi_tmp_path):
    check_pipe(Case(Layout(1, 2, 2), stage=0), name, mpi_tmp_path)


@pytest.mark.ranks(2)
def test_numbers_of_parameters_on_two_stages(mpi_tmp_path):
    check_pipe(Case(Layout(2, 1, 1), stage=0), "OneBitLamb", mpi_tmp_path)


def check_pipe(case, name, folder):
    params = {"lr": 1e-3, **({"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 1,
              "local_step_clipper": 4} if name == "ZeroOneAdam" else {"freeze_step": 4})}  # fmt: skip
    more = {"optimizer": {"type": name, "params": params}, "reduction": "ordered"}
    whole = case.engine(**more)
    train(whole, range(7))
    whole.save_checkpoint(str(folder), tag="t")
    before = everything(whole)
    expected = train(whole, range(7, 12))
    second = case.engine(**more)
    second.load_checkpoint(str(folder))
    assert unlike(everything(second), before) == []
    assert train(second, range(7, 12)) == expected
    assert unlike(everything(second), everything(whole)) == []
    for engine in (second, whole):
        engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMES)
def test_nodes_of_two_ranks_and_back(name, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(api, "ranks_per_node", lambda world: 2)
    first = engine_of(name)
    steps(first, DATA[:13])
    assert first.parts.optimization.exchange.coder.compressor.workers == 2
    first.save_checkpoint(str(mpi_tmp_path))
    second = engine_of(name, model=Mlp(seed=99))
    second.load_checkpoint(str(mpi_tmp_path))
    assert unlike(everything(second), everything(first)) == []
    monkeypatch.setattr(api, "ranks_per_node", lambda world: 4)
    flat = engine_of(name, model=Mlp(seed=99))
    flat.load_checkpoint(str(mpi_tmp_path))
    with open_checkpoint(mpi_tmp_path) as source:
        for unit in flat.parts.table.units:
            errors = flat.parts.optimization.exchange.coder.errors[unit.index]
            for entry in unit.layout.entries:
                mean = source.read_whole(entry.name, "worker_error").double().mean(0).float()
                assert torch.equal(errors.worker[entry.span.slice], mean.reshape(-1))
    for engine in (first, second, flat):
        engine.destroy()


# -- evaluation between meetings ---------------------------------------------------------------------------------------


def test_evaluation_is_with_common_parameters_and_changes_nothing(comm):
    plain, watched = engine_of("ZeroOneAdam", reduction="ordered"), engine_of("ZeroOneAdam", reduction="ordered")
    x, y = DATA[0]
    for step, batch in enumerate(DATA, start=1):
        assert run_step(plain, batch) == run_step(watched, batch)
        local = weights(watched)
        watched.eval()
        with torch.no_grad():
            outputs = comm.gather_objects(float(watched(x, y)))
        assert len(set(outputs)) == 1, step
        assert is_same_on_ranks(watched)
        watched.train()
        watched.train()
        assert unlike(weights(watched), local) == []
    assert unlike(everything(watched), everything(plain)) == []
    for engine in (plain, watched):
        engine.destroy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_alone_are_common_ones(dtype, mpi_tmp_path):
    engine = engine_of("ZeroOneAdam", **PRECISIONS[dtype])
    steps(engine, DATA[:13])
    local = weights(engine)
    engine.save_16bit_model(str(mpi_tmp_path), "weights.bin")
    state = engine.module_state_dict()
    assert unlike(weights(engine), local) == []
    engine.eval()
    common = weights(engine)
    assert unlike(common, local)
    assert unlike(state, common) == []
    assert unlike(torch.load(mpi_tmp_path / "weights.bin"), common) == []
    engine.save_checkpoint(str(mpi_tmp_path), tag="t")
    with open_checkpoint(mpi_tmp_path) as source:
        masters = {name: source.read_whole(name, "master").to(common[name].dtype) for name in source.names()}
    assert unlike(masters, common) == []
    engine.load_module_state_dict(state)
    engine.train()  # ranks have met
    assert unlike(weights(engine), common) == []
    engine.destroy()
    assert unlike(weights(engine), common) == []


# -- what is not taken back --------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", NAMES)
def test_without_optimizer_states_the_warm_up_begins_again(name, mpi_tmp_path):
    first = engine_of(name)
    steps(first, DATA[:13])
    first.save_checkpoint(str(mpi_tmp_path))
    first.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    fresh = engine_of(name, model=Mlp(seed=99))
    fresh.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    for engine in (first, fresh):
        assert engine.parts.counters.update_count == 0
        assert engine.parts.optimization.exchange.coder.errors == {}
    assert is_same_on_ranks(fresh)
    assert steps(first, DATA[:10]) == steps(fresh, DATA[:10])
    for engine in (first, fresh):
        engine.destroy()


@pytest.mark.ranks(1, 3)
def test_checkpoints_without_errors_and_of_another_phase(mpi_tmp_path, caplog, comm):
    adam = engine_of("OneBitAdam", optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    steps(adam, DATA[:10])
    adam.save_checkpoint(str(mpi_tmp_path / "adam"))
    adam.destroy()
    engine = engine_of("OneBitAdam")
    with caplog.at_level(logging.INFO, "mpispeed"):
        engine.load_checkpoint(str(mpi_tmp_path / "adam"))
    said = [record for record in caplog.records if "no errors of 1-bit coding" in record.message]
    assert [record.levelname for record in said] == (["INFO"] if comm.rank == 0 else ["DEBUG"] * len(said))
    steps(engine, DATA[10:12])
    engine.destroy()

    local = engine_of("ZeroOneAdam")
    steps(local, DATA[:13])
    local.save_checkpoint(str(mpi_tmp_path / "local"))
    local.destroy()
    later = engine_of("ZeroOneAdam", optimizer={"type": "ZeroOneAdam", "params": {"var_freeze_step": 15}})
    caplog.clear()
    with caplog.at_level(logging.INFO, "mpispeed"):
        later.load_checkpoint(str(mpi_tmp_path / "local"))
    assert sum("another phase" in record.message for record in caplog.records if record.levelname == "WARNING") == (
        comm.rank == 0
    )
    for unit in later.parts.table.units:
        assert not later.parts.optimization.states.of(unit)["momentum_accumulator"].any()
    steps(later, DATA[13:17])
    later.destroy()


@pytest.mark.ranks(1, 2)
def test_masks_are_those_of_the_groups(mpi_tmp_path):
    def make(mask):
        model = Mlp()
        groups = [{"params": [model.first.weight]}, {"params": [*model.middle.parameters(), *model.last.parameters()]}]
        if mask is not None:
            groups[0]["exp_avg_mask"] = mask
        return start(settings("OneBitAdam"), model, model_parameters=groups)

    rows = torch.ones(32, 8)
    rows[1:] = 0
    first = make(rows)
    steps(first, DATA[:9])
    first.save_checkpoint(str(mpi_tmp_path), tag="t")
    first.destroy()
    with open_checkpoint(mpi_tmp_path) as source:
        assert all("exp_avg_mask" not in group for group in source.state()["optimizer"]["param_groups"])
    for mask in (None, 1 - rows):
        second = make(mask)
        second.load_checkpoint(str(mpi_tmp_path))
        kept = second.parts.optimization.groups[0].get("exp_avg_mask")
        assert kept is mask
        run_step(second, DATA[9])
        unit = second.parts.table.units[0]
        moved = second.parts.optimization.states.of(unit)["exp_avg"][: 32 * 8].view(32, 8)
        assert mask is None or not moved[0].any()
        second.destroy()


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_tools_read_such_checkpoints(mpi_tmp_path, comm):
    engine = engine_of("ZeroOneAdam", checkpoint={"files": 2})
    steps(engine, DATA[:13])
    engine.save_checkpoint(str(mpi_tmp_path / "a"), tag="t")
    common = engine.module_state_dict()
    engine.destroy()
    if comm.rank == 0:
        folder, again, out = (str(mpi_tmp_path / name) for name in ("a", "b", "out.pt"))
        commands = [[name, folder] for name in ("ls", "show", "tree", "verify", "stats")]
        commands += [["reshape", folder, again, "--files", "3"], ["verify", again], ["diff", folder, again]]
        for command in [*commands, ["show", folder, "--state"], ["export", folder, out]]:
            done = CliRunner().invoke(cli, ["ckpt", *command])
            assert done.exit_code == 0, (command, done.output)
        assert unlike(torch.load(out), common) == []
    comm.barrier()
    second, third = (engine_of("ZeroOneAdam", model=Mlp(seed=99)) for _ in range(2))
    second.load_checkpoint(str(mpi_tmp_path / "a"))
    third.load_checkpoint(str(mpi_tmp_path / "b"))
    assert unlike(everything(second), everything(third)) == []
    for one in (second, third):
        one.destroy()
