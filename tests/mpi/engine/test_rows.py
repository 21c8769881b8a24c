"""Rows of the table of features: their order, what they publish, what is left when one fails, and names of models."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.ckpt.tools import show as showing
from mpispeed.features import Feature, Hooks, register, unregister
from mpispeed.monitor import Event
from mpispeed.nn.tensor import cuts
from tests.mpi.engine.test_features import known
from tests.zoo import same_bits
from tests.zoo.models import BATCH, WIDTH, Net, TinyLM, batches, samples
from tests.zoo.training import ADAM, WARM, config, start, train, train_averaged, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
BUILT_IN = ["slicing", "monitors", "data_loader", "drills", "walltime"]


def test_rows_begin_in_order_and_end_in_reverse(mpi_tmp_path):
    told = []

    def row(name):
        def note(what):
            return lambda *_: told.append((what, name))

        points = ("begun", "after_step", "between_steps", "before_save", "after_save")
        return Feature(name, lambda context: Hooks(**{point: note(point) for point in points}))

    with known(row("first"), row("second")):
        engine = start(config(1, **ADAM))
        train(engine, samples(1))
        engine.heed_requests()
        engine.save_checkpoint(str(mpi_tmp_path))
        engine.destroy()
    found = {}
    for what, name in told:
        found.setdefault(what, []).append(name)
    assert found.pop("begun") == found.pop("between_steps") == found.pop("before_save") == ["first", "second"]
    assert found == {"after_step": ["second", "first"], "after_save": ["second", "first"]}


def test_a_feature_ends_the_program_after_a_step():
    class Enough(SystemExit):
        pass

    def attach(context):
        def look():
            if context.counters.global_steps == 2:
                raise Enough

        return Hooks(after_step=look)

    with known(Feature("enough", attach)):
        engine = start(config(1, **ADAM))
        with pytest.raises(Enough):
            train(engine, samples(5))
        assert engine.global_steps == 2
        engine.destroy()


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
def test_features_see_a_sliced_model(comm):
    found = []
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    policy = {"autotp_size": 2, "injection_policy_tuple": {"0": "column", "2": "row"}}
    with known(Feature("looking", transform=lambda model, setup: found.append((len(cuts(model)), setup.settings)))):
        engine = start(config(1, tensor_parallel=policy, **ADAM), model)
    assert found[0][0] > 0 and found[0][1] is None
    engine.destroy()


def test_what_features_publish_is_found_on_the_engine():
    seen = []

    def later(context):
        seen.append(sorted(context.published))
        return Hooks(published={"second_thing": 2, "hidden": 3})

    model = Net()
    model.hidden = "of the model"
    with known(Feature("one", lambda context: Hooks(published={"first_thing": 1})), Feature("two", later)):
        engine = start(config(1, **ADAM), model)
    (names,) = seen
    assert {"first_thing", "monitor", "tput_timer"} <= set(names)  # of the rows before it, built in or not
    assert "second_thing" not in names
    assert (engine.first_thing, engine.second_thing, engine.hidden) == (1, 2, "of the model")
    with pytest.raises(AttributeError, match="third_thing"):
        _ = engine.third_thing
    engine.destroy()


def test_two_features_cannot_publish_one_name():
    hooks = Hooks(published={"monitor": 1})
    with (
        known(Feature("rival", lambda context: hooks)),
        pytest.raises(ConfigError, match=r"'rival' publishes monitor, as one before it does"),
    ):
        start(config(1, **ADAM))


def test_rows_of_mpispeed_stay():
    for name in BUILT_IN:
        with pytest.raises(UsageError, match="belongs to mpispeed"):
            unregister(name)
        with pytest.raises(UsageError, match="registered already"):
            register(Feature(name))


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_failed_attach_everything_is_closed(stage, comm):
    kept = []

    def watch(context):
        context.mesh["data"]
        kept.append((context.mesh, context.parts.features))
        context.bus.subscribe(Event.CLOSE, lambda _: kept.append("closed"))

    def fail(context):
        if context.mesh.rank == context.mesh.size - 1:
            raise LookupError("planted")

    model = TinyLM()
    model.norm_of_batches = nn.SyncBatchNorm(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = set(vars(optimizer))
    settings = config(stage, 36, 1, zero={"ignore_unused_parameters": True})
    with (
        known(Feature("watching", watch), Feature("failing", fail)),
        pytest.raises(ConfigError, match="LookupError: planted"),
    ):
        start(settings, model, optimizer=optimizer)
    assert kept[1:] == ["closed"]
    assert kept[0][0]._comms == {}
    assert type(model.norm_of_batches) is nn.SyncBatchNorm
    assert set(vars(optimizer)) == own
    same_bits(dict(model.state_dict()), before)
    engine = start(settings, model, optimizer=optimizer)
    train_averaged(engine, batches(1, 36))
    engine.destroy()


def test_after_a_failed_transform_the_mesh_is_closed():
    kept = []

    def fail(model, setup):
        kept.append(setup.mesh)
        setup.mesh["data"]
        raise LookupError("planted")

    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with known(Feature("failing", transform=fail)), pytest.raises(ConfigError, match="planted"):
        start(config(1, **ADAM), model)
    assert kept[0]._comms == {}
    assert type(model[1]) is nn.SyncBatchNorm


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_client_optimizer_is_left_alone_by_a_failed_build(stage):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own = set(vars(optimizer))

    def broken(optimizer):
        raise LookupError("planted")

    with pytest.raises(LookupError, match="planted"):
        start(config(stage), model, optimizer=optimizer, lr_scheduler=broken)
    assert set(vars(optimizer)) == own


# -- state ---------------------------------------------------------------------------------------------------------


def loaded(**more):
    return start(config(1, **ADAM), training_data=TensorDataset(torch.ones(48, WIDTH), torch.ones(48, 2)), **more)


def test_the_position_of_the_loader_is_state_of_its_feature(mpi_tmp_path, comm):
    first = loaded()
    train(first, samples(1))
    next(iter(first.training_dataloader))
    first.save_checkpoint(str(mpi_tmp_path), tag="one")
    state = showing.state(showing.open_location(f"{mpi_tmp_path}:one"))  # what `mpispeed ckpt show --state` prints
    assert (state["features"]["data_loader"]["position"], state["features"]["data_loader"]["length"]) == (BATCH, 48)
    second = loaded(model=Net(seed=3))
    _, left = second.load_checkpoint(str(mpi_tmp_path), load_module_only=True)
    assert (left["features"]["data_loader"]["position"], second.training_dataloader.position) == (BATCH, 0)
    second.load_checkpoint(str(mpi_tmp_path))
    assert second.training_dataloader.position == BATCH
    first.destroy()
    second.destroy()


def test_state_of_data_is_left_alone_on_request(mpi_tmp_path):
    taken = []
    hooks = Hooks(state=lambda: {"at": 5}, load=lambda state: taken.append(state["at"]))
    with known(Feature("curriculum", lambda context: hooks, is_of_data=True)):
        engine = start(config(1, **ADAM))
        engine.save_checkpoint(str(mpi_tmp_path))
        engine.load_checkpoint(str(mpi_tmp_path), load_data_state=False)
        assert taken == []
        engine.load_checkpoint(str(mpi_tmp_path))
        assert taken == [5]
        engine.destroy()


def test_a_feature_refuses_its_state_before_anything_is_taken(mpi_tmp_path):
    def check(state):
        raise ValueError("too old")  # noqa: TRY003

    hooks = Hooks(state=lambda: {"at": 5}, check=check, load=lambda state: None)
    with known(Feature("strict", lambda context: hooks)):
        engine = start(config(1, **ADAM))
        engine.save_checkpoint(str(mpi_tmp_path))
        train(engine, samples(2))
        before = weights(engine)
        with pytest.raises(CheckpointError, match=r"feature 'strict' does not take its state .*: too old"):
            engine.load_checkpoint(str(mpi_tmp_path))
        same_bits(weights(engine), before)
        assert engine.global_steps == 2
        engine.destroy()


# -- names of models -----------------------------------------------------------------------------------------------

NAMES = (
    "parts", "plan", "mesh", "bus", "counters", "accumulation", "direct", "updates", "checkpoints", "weights",
    "offload", "loaders", "run_end",
)  # fmt: skip


def test_attributes_of_the_model_come_before_objects_of_the_engine(mpi_tmp_path):
    def run(model, folder):
        engine = start(config(2, 36, 1, walltime={"save_dir": str(folder / "end")}, **WARM), model)
        losses = train_averaged(engine, batches(2, 36))
        engine.save_checkpoint(str(folder), tag="one")
        losses += train_averaged(engine, batches(3, 36)[2:])
        engine.load_checkpoint(str(folder), tag="one")
        losses += train_averaged(engine, batches(3, 36)[2:])
        return engine, losses

    plain, expected = run(TinyLM(), mpi_tmp_path / "plain")
    assert plain.parts is plain.mpispeed.parts and plain.weights is plain.mpispeed.weights
    with pytest.raises(AttributeError, match="cannot be set"):
        plain.plan = None
    plain.destroy()
    model = TinyLM()
    for name in NAMES:
        setattr(model, name, f"{name} of the model")
    engine, losses = run(model, mpi_tmp_path / "named")
    assert losses == expected
    assert [getattr(engine, name) for name in NAMES] == [f"{name} of the model" for name in NAMES]
    engine.destroy()
