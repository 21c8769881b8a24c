"""Muon in runs: failures, pipelines, copies of experts, states in codes and in memory, sums of slots, predictions."""

import pytest
import torch

import mpispeed
from mpispeed.base.errors import AgreementError, StoreError
from mpispeed.config import load
from mpispeed.engine.estimate.budget import predict
from mpispeed.engine.estimate.feasibility import Setup, examine
from mpispeed.engine.estimate.inputs import gather_inputs
from mpispeed.engine.matrix_update import MatrixUpdate
from mpispeed.optim.muon import Muon
from mpispeed.optim.rule import Window
from mpispeed.store.placement import Tier
from tests.helpers import pipes
from tests.helpers.covering import in_turn
from tests.helpers.muon import HYPER, PlainMuon
from tests.helpers.pipes import Case, Layout
from tests.mpi.engine.test_slot_sums import SIZE, SLOTS, mean_of_slots, slot
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import config, start, train, train_plain, weights

pytestmark = pytest.mark.mpi(min_size=1)
MUON = {"optimizer": {"type": "Muon", "params": HYPER}}
BATCH = 12


def on_disk(path, **more):
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(path)}, **more}


def update_of(engine):
    return next(part for part in engine.mpispeed.parts.updates._parts if isinstance(part, MatrixUpdate))


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("where", "stage", "is_in_files"), [("directions", 3, False), ("iteration", 0, False), ("masters", 2, True)]
)
def test_a_failure_of_one_rank_ends_the_step_on_all(where, stage, is_in_files, mpi_tmp_path, monkeypatch):
    zero = on_disk(mpi_tmp_path) if is_in_files else {}
    engine = start(config(stage, BATCH, 1, zero=zero, **MUON), TinyLM())
    train(engine, batches(1, BATCH))
    name = {"directions": "direction", "iteration": "orthogonal", "masters": "apply"}[where]
    rank = engine.mpispeed.parts.mesh.rank

    def fails(self, *args, **more):
        msg = "no memory left for a matrix"
        raise RuntimeError(msg)

    owners = {owner for group in update_of(engine).found for owner in group.ownership.owners}
    if rank == max(owners):
        monkeypatch.setattr(Muon, name, fails)
    with pytest.raises(StoreError if is_in_files else AgreementError, match="RuntimeError: no memory left for a matr"):
        train(engine, batches(1, BATCH))
    monkeypatch.undo()
    engine.destroy()


# -- axes --------------------------------------------------------------------------------------------------------------


def of(*cases):
    rows = [Case(Layout(*sizes), stage=stage, is_tied=is_tied, clip=0.0) for sizes, stage, is_tied in cases]
    return pytest.mark.parametrize(
        "case", [pytest.param(row, id=str(row), marks=pytest.mark.ranks(row.layout.ranks)) for row in rows]
    )


@of(((2, 1, 1), 1, True), ((3, 1, 1), 2, False), ((2, 2, 1), 0, False))
def test_stages_of_a_pipeline_have_their_matrices(case, monkeypatch):
    """What a stage has is made orthogonal there; tied tables stay Adam's, and equal on both ends."""
    monkeypatch.setattr(pipes, "SHAPE", pipes.gpt.Shape(layers=3, heads=2, width=16, block=12))
    engine, plain = case.engine(**MUON), pipes.Plain(is_tied=case.is_tied)
    assert update_of(engine).found
    losses = pipes.train(engine, range(5))
    pipes.all_weights(engine)  # those of several stages are equal
    engine.destroy()
    reference = PlainMuon(plain, lambda name, param: param.dim() == 2 and not name.startswith("parts.0."), **HYPER)
    expected = train_plain(plain, [pipes.batch(step) for step in range(5)], reference).losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "word"), in_turn([(1, "int8"), (2, "bf16"), (3, "int8")]))
def test_momentum_in_codes(stage, word, mpi_tmp_path):
    """Files and a restart change no bit; momenta take what codes take."""
    types = {"data_types": {"optimizer_states": word}, "reduction": "ordered", **MUON}
    data, found = batches(3, BATCH), []
    for zero in ({}, on_disk(mpi_tmp_path / "disk")):
        engine = start(config(stage, BATCH, 1, zero=zero, **types), TinyLM())
        train(engine, data[:2])
        engine.save_checkpoint(str(mpi_tmp_path / f"in {len(zero)}"))
        train(engine, data[2:])
        found.append(weights(engine))
        states = engine.mpispeed.parts.optimization.states
        held = states.state_bytes + states.swapped_bytes
        assert held == predict(gather_inputs(engine.plan, TinyLM())).bytes_of("optimizer state")
        assert held < 0.6 * 4 * sum(
            len(unit.states.slots_among(states.slots)) * engine.mpispeed.parts.params.shards.span(unit).numel
            for unit in engine.mpispeed.parts.table.units
        )
        engine.destroy()
    same_bits(found[1], found[0])
    again = start(config(stage, BATCH, 1, **types), TinyLM(seed=9))
    again.load_checkpoint(str(mpi_tmp_path / "in 1"))
    train(again, data[2:])
    same_bits(weights(again), found[0])
    again.destroy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("stage", in_turn([2, 3]))
def test_momentum_stays_in_memory_beside_files(stage, mpi_tmp_path):
    found = []
    for stays in (False, True):
        zero = on_disk(mpi_tmp_path, save_muon_momentum_buffer_in_memory=stays)
        engine = start(config(stage, BATCH, 1, zero=zero, reduction="ordered", **MUON), TinyLM())
        train(engine, batches(2, BATCH))
        found.append(weights(engine))
        states = engine.mpispeed.parts.optimization.states
        held = {row.tier: row.bytes for row in predict(gather_inputs(engine.plan, TinyLM())).held
                if row.what == "optimizer state"}  # fmt: skip
        assert states.state_bytes == held.get(Tier.HOST, 0)
        assert states.swapped_bytes == held[Tier.NVME]
        assert bool(states.state_bytes) == stays
        for unit in engine.mpispeed.parts.table.units:
            for name, stored in states.tensors(unit).items():
                assert stored.is_swapped == (not stays or name != "momentum_buffer")
        engine.destroy()
    same_bits(found[1], found[0])


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3]))
def test_sums_of_slots_have_the_bits_of_one_process(stage):
    """Gradients are one sum over slots; the rest is the rule on whole parameters."""
    made = config(stage, SLOTS * SIZE, reduction="invariant", train_micro_batch_size_per_gpu=SIZE, **MUON)
    engine, model = start(made, TinyLM()), TinyLM()
    slots, rank = engine.mpispeed.parts.plan.slots, engine.mpispeed.parts.mesh.index("batch")
    rule = Muon(**HYPER)
    states, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for step, batch in enumerate(batches(3, SLOTS * SIZE), 1):
        for at in range(slots.per_rank):
            engine.backward(engine(slot(batch, slots.slot(rank, at))))
            engine.step()
        grads = mean_of_slots(model, batch, torch.float32, 1.0)
        with torch.no_grad():
            for name, param in model.named_parameters():
                group = rule.group_of({}, is_matrix=param.dim() == 2 and name != "embed.weight")
                own = states.setdefault(name, {key: torch.zeros(param.numel()) for key in rule.slots_of(group)})
                flat = param.data.view(-1)
                window = Window(flat, grads[name].view(-1), own, group, step, shape=tuple(param.shape), key=(0, 0, 0))
                rule.update([window])
    torch.set_num_threads(threads)
    same_bits(weights(engine), {name: param.detach() for name, param in model.named_parameters()})
    engine.destroy()


# -- prediction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "size"), in_turn([(0, 1), (0, 2), (1, 1), (3, 2)]))
def test_matrices_send_what_is_predicted(stage, size):
    if mpispeed.init_distributed().size % size:
        size = 1
    more = (
        {"tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": {"up": "column", "down": "row"}}}
        if size == 2
        else {}
    )
    made = config(stage, BATCH, 1, **more, **MUON)
    engine = start(made, TinyLM())
    train(engine, batches(1, BATCH))
    trace = engine.mpispeed.parts.mesh.comm_trace
    before = {verb: trace.total_bytes(verb) for verb in ("all_to_all", "broadcast")}
    train(engine, batches(1, BATCH))
    sent = sum(trace.total_bytes(verb) - start for verb, start in before.items())
    if engine.mpispeed.parts.mesh.rank == 0:  # of which the prediction is
        _, stages = examine(Setup(load(made).config, engine.mpispeed.parts.mesh.world.size), TinyLM)
        budget = stages[0].budget
        rows = [row for row in budget.sent if row.what == "matrices to owners and back"]
        assert sum(row.bytes for row in rows) == sent
        assert bool(sent) == (engine.mpispeed.parts.mesh.world.size > 1)
        assert {one.matrices for one in budget.owners} == {len(one.matrices) for one in update_of(engine).found}
    engine.destroy()
