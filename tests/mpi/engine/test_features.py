"""Features that a script registers: settings, places in the step, batches, state in checkpoints, monitors."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.features import Feature, Hooks, Place, Section, register, registered, unregister
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import ADAM, WARM, config, start, train_averaged, weights

BATCH, LIMIT = 36, 0.05
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "clip_weights.py"


def example():
    spec = importlib.util.spec_from_file_location("clip_weights", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def known(*features):
    """Context in which features are registered."""
    for feature in features:
        register(feature)
    try:
        yield
    finally:
        for feature in features:
            unregister(feature.name)


@pytest.fixture
def clip_weights():
    module = example()
    with known(Feature("clip_weights", module.attach, section=module.ClipWeights)):
        yield


def settings(stage, dtype="fp32", limit=LIMIT, **more):
    return config(stage, BATCH, 1, dtype=dtype, clip_weights={"limit": limit}, **WARM, **more)


def clipper_of(engine):
    return next(part for part in engine.updates._parts if type(part).__name__ == "Clipper")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16", "fp16"]))
def test_weights_are_clipped_after_each_update(stage, dtype, clip_weights):
    low = {"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}  # no step overflows
    engine = start(settings(stage, dtype) | low, TinyLM())
    train_averaged(engine, batches(2, BATCH))
    bound = torch.tensor(LIMIT).to(next(iter(weights(engine).values())).dtype)
    assert all(float(value.abs().max()) <= float(bound) for value in weights(engine).values())
    assert clipper_of(engine).clipped > 0
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_in_files_are_clipped_to_the_same_bits(dtype, clip_weights, mpi_tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(mpi_tmp_path)}
    found = []
    for zero in ({}, {"offload_optimizer": nvme, "offload_param": nvme, "sub_group_size": 1000}):
        engine = start(settings(3, dtype, zero=zero), TinyLM())
        train_averaged(engine, batches(2, BATCH))
        found.append((weights(engine), clipper_of(engine).clipped))
        engine.destroy()
    same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 3])
def test_state_of_a_feature_is_in_checkpoints(stage, clip_weights, mpi_tmp_path):
    data = batches(6, BATCH)
    whole = start(settings(stage), TinyLM())
    train_averaged(whole, data)
    first = start(settings(stage), TinyLM())
    train_averaged(first, data[:3])
    first.save_checkpoint(str(mpi_tmp_path))
    counted = first.mesh.world.comm.share(clipper_of(first).clipped)
    first.destroy()
    second = start(settings(stage), TinyLM(seed=99))
    second.load_checkpoint(str(mpi_tmp_path))
    assert clipper_of(second).clipped == counted > 0
    train_averaged(second, data[3:])
    same_bits(weights(second), weights(whole))
    second.destroy()
    whole.destroy()


@pytest.mark.mpi(min_size=1)
def test_a_checkpoint_with_state_of_a_feature_loads_without_the_feature(clip_weights, mpi_tmp_path):
    first = start(settings(1), TinyLM())
    train_averaged(first, batches(1, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    first.destroy()
    second = start(settings(1, limit=0.0), TinyLM(seed=99))
    path, _ = second.load_checkpoint(str(mpi_tmp_path))
    assert path is not None
    second.destroy()


@pytest.mark.mpi(min_size=1)
def test_a_feature_writes_a_series(clip_weights, mpi_tmp_path):
    monitor = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "clip"}
    engine = start(settings(2, csv_monitor=monitor), TinyLM())
    train_averaged(engine, batches(2, BATCH))
    engine.destroy()
    if engine.mesh.rank == 0:
        assert list(mpi_tmp_path.rglob("*clipped_weights.csv"))


@pytest.mark.mpi(min_size=1)
def test_parts_run_at_their_places(mpi_tmp_path):
    seen = []

    def attach(context):
        first = context.params.table.units[0]

        def note(place):
            return lambda ctx: seen.append((place, float(context.params.shards.master(first).sum())))

        return Hooks([(place, note(place)) for place in reversed(Place)])

    with known(Feature("places", attach)):
        engine = start(config(2, BATCH, 1, **ADAM), TinyLM())
        train_averaged(engine, batches(1, BATCH))
    assert [place for place, _ in seen] == list(Place)
    before, after = [dict(seen)[place] for place in (Place.CLIPPED, Place.UPDATED)]
    assert before == dict(seen)[Place.START] != after == dict(seen)[Place.PUBLISHED]
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_a_feature_changes_the_model_and_its_batches():
    told = []

    def transform(model, setup):
        model.added = torch.nn.Parameter(torch.ones(8))

    def batch(inputs, is_training):
        told.append(is_training)
        return inputs

    with known(Feature("changes", lambda context: Hooks(batch=batch), transform=transform)):
        engine = start(config(3, BATCH, 1, zero={"ignore_unused_parameters": True}, **WARM), TinyLM())
        train_averaged(engine, batches(1, BATCH))
        assert told and all(told)
        assert "added" in dict(engine.module.named_parameters())
        engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_a_wrong_setting_of_a_feature_is_named(clip_weights):
    with pytest.raises(ConfigError, match=r"clip_weights\.limits.*limit"):
        start(config(1, BATCH, 1, clip_weights={"limits": 1}, **WARM), TinyLM())


@pytest.mark.mpi(min_size=2)
def test_a_feature_of_one_rank_is_refused_on_all():
    import mpispeed

    world = mpispeed.init_distributed()
    feature = Feature("own", lambda context: None)
    with (
        known(*([feature] if world.rank == 1 else [])),
        pytest.raises(ConfigError, match=r"rank 1 has registered the features slicing, .*, own"),
    ):
        start(config(1, BATCH, 1, **WARM), TinyLM())


@pytest.mark.mpi(min_size=1)
def test_a_feature_that_fails_on_one_rank_fails_on_all():
    def attach(context):
        if context.mesh.rank == context.mesh.size - 1:
            raise ValueError("no such thing")  # noqa: TRY003

    with known(Feature("failing", attach)), pytest.raises(ConfigError, match="no such thing"):
        start(config(1, BATCH, 1, **WARM), TinyLM())


@pytest.mark.mpi(min_size=1)
def test_state_that_a_feature_refuses_is_an_error_of_the_checkpoint(mpi_tmp_path):
    def refuse(state):
        raise KeyError("old")

    hooks = Hooks(state=lambda: {"new": 1}, load=refuse)
    with known(Feature("refusing", lambda context: hooks)):
        engine = start(config(1, BATCH, 1, **WARM), TinyLM())
        engine.save_checkpoint(str(mpi_tmp_path))
        with pytest.raises(CheckpointError, match="feature 'refusing' does not take its state"):
            engine.load_checkpoint(str(mpi_tmp_path))
        engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_state_that_a_feature_cannot_give_on_one_rank_fails_the_save_on_all(mpi_tmp_path):
    def attach(context):
        missing = {} if context.mesh.rank == 0 else {"count": 1}
        return Hooks(state=lambda: {"count": missing["count"]})

    with known(Feature("counting", attach)):
        engine = start(config(1, BATCH, 1, **WARM), TinyLM())
        with pytest.raises(CheckpointError, match="asking features for their state: KeyError: 'count'"):
            engine.save_checkpoint(str(mpi_tmp_path))
        engine.destroy()


class Empty(Section):
    pass


@pytest.mark.mpi(min_size=1)
def test_names_of_features_are_unique():
    for name in ("zero_optimization", "not a name", "bfloat16"):
        with pytest.raises(UsageError, match="cannot be added"):
            register(Feature(name, lambda context: None, section=Empty))
    with known(Feature("once", lambda context: None)), pytest.raises(UsageError, match="registered already"):
        register(Feature("once", lambda context: None))
    with pytest.raises(UsageError, match="no feature named 'once'"):
        unregister("once")
    assert "once" not in {feature.name for feature in registered()}
