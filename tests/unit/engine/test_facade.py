"""What users hold as the optimizer, and the getters of an engine."""

import argparse
import importlib

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.engine.api import _config_source
from mpispeed.engine.backward import Counters
from mpispeed.engine.delegation import COMPONENTS, HOMES, OWN, PROPERTIES, all_methods
from mpispeed.engine.facade import EngineOptimizer, InnerOptimizer, StepLink
from mpispeed.mesh import sim
from mpispeed.monitor.by_hand import Monitors
from mpispeed.precision.scaler import DynamicScale, StaticScale
from tests.unit.engine.simulated import engine_on
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, SGD, config, train


def make_facade(scaler=None):
    groups = [{"params": list(Net().parameters()), "lr": 0.1}, {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1}]
    cleared = []
    clear, link = lambda: cleared.append(True), StepLink()
    inner = InnerOptimizer(groups, Counters(), link, clear)
    return EngineOptimizer(groups, scaler or DynamicScale(8), clear, "Adam", link, inner), groups, cleared


def test_groups_are_shared_not_copied():
    facade, groups, _ = make_facade()
    assert facade.param_groups is groups
    facade.set_lr(0.5)
    assert [group["lr"] for group in groups] == facade.get_lr() == [0.5, 0.5]
    torch.optim.lr_scheduler.LambdaLR(facade, lambda _: 0.1)
    assert facade.get_lr() == [pytest.approx(0.05)] * 2


def test_a_loaded_state_dict_keeps_the_groups():
    facade, groups, _ = make_facade()
    state = facade.state_dict()
    facade.set_lr(7.0)
    before = [id(group) for group in groups]
    facade.load_state_dict(state)
    assert [id(group) for group in facade.param_groups] == before
    assert facade.get_lr() == [0.1, 1]
    assert len(groups[0]["params"]) == 6
    with pytest.raises(UsageError, match="1 parameter groups, the optimizer 2"):
        facade.load_state_dict({"state": {}, "param_groups": state["param_groups"][:1]})


def test_the_scale_shows_under_its_names():
    facade, _, cleared = make_facade()
    assert facade.loss_scale == facade.cur_scale == 256
    assert facade.dynamic_loss_scale
    assert (facade.cur_iter, facade.scale_window, facade.scale_factor) == (0, 1000, 2.0)
    assert (facade.min_loss_scale, facade.last_overflow_iter) == (1, -1)
    facade.zero_grad()
    assert cleared == [True]
    static, _, _ = make_facade(StaticScale(138.0))
    assert static.cur_scale == 138.0
    assert not static.dynamic_loss_scale
    for name in ("scale_window", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(static, name)


def test_steps_without_an_engine_and_new_groups_are_refused():
    facade, _, cleared = make_facade()
    for optimizer in (facade, facade.optimizer):
        with pytest.raises(UsageError, match="the engine that made the updates is gone"):
            optimizer.step()
        with pytest.raises(UsageError, match=r"step\(\) without it"):
            optimizer.step(lambda: None)
        with pytest.raises(UsageError, match="cannot be added"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        optimizer.zero_grad()
    assert cleared == [True, True]


def test_the_inner_optimizer_shows_groups_and_no_state_before_an_update():
    facade, groups, _ = make_facade()
    inner = facade.optimizer
    assert inner.param_groups is groups
    assert not hasattr(inner, "optimizer")
    assert dict(inner.state) == inner.state_dict()["state"] == {}
    with pytest.raises(KeyError):
        inner.state[groups[0]["params"][0]]
    with pytest.raises(UsageError, match="safe_set_full_optimizer_state"):
        inner.state = {groups[0]["params"][0]: {}}
    torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 0.5)
    assert facade.get_lr() == [pytest.approx(0.05), pytest.approx(0.5)]


@pytest.fixture
def engine():
    found = []

    def job(world):
        section = {"fp16": {"enabled": True, "loss_scale": 2.0}, "gradient_clipping": 0.5, "steps_per_print": 7}
        section["zero_optimization"] = {"stage": 2, "allgather_bucket_size": 33, "sub_group_size": 44}
        found.append(engine_on(world, {**config(), **ADAM, **section}, Net()))

    sim.run(1, job)
    yield found[0]
    found[0].destroy()


def fits(value, annotation):
    """Whether a value is of a type that is written as in the tables."""
    names = {"torch": torch, **{name: getattr(importlib.import_module(place), name) for name, place in HOMES.items()}}
    for word in annotation.split(" | "):
        plain = word.partition("[")[0]
        if plain == "Any" or (plain == "None" and value is None):
            return True
        if plain != "None" and isinstance(value, (int, float) if plain == "float" else eval(plain, names)):
            return True
    return False


def test_every_name_of_the_tables_answers_with_its_type(engine):
    for name, getter in all_methods().items():
        assert fits(getattr(engine, name)(), getter.returns), name
    for name, getter in {**COMPONENTS, **OWN, **PROPERTIES}.items():
        assert fits(getattr(engine, name), getter.returns), name


def test_the_config_is_a_mapping(engine):
    view = engine.config
    assert view["fp16"]["loss_scale"] == view.get("fp16").get("loss_scale") == view.fp16.loss_scale == 2.0
    assert view.get("nothing") is None
    assert "zero_optimization" in view
    assert dict(view) == engine.plan.config.resolved_dict()
    with pytest.raises(AttributeError, match="nothing"):
        view.nothing  # noqa: B018


def test_monitor_and_timer(engine):
    assert engine.monitor.enabled is engine.monitor_config.enabled is False
    assert engine.monitor_config.tensorboard is engine.plan.config.tensorboard
    assert engine.monitor_config.csv_monitor.job_name == engine.monitor_config.tensorboard.job_name
    engine.monitor.write_events([("Mine/series", torch.tensor(1.0), 3)])
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
    train(engine, samples(4))
    assert engine.tput_timer.global_step_count == 4
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")


def test_points_of_a_script_reach_the_sinks():
    class Noting:
        def __init__(self):
            self.calls = []

        def write(self, *point):
            self.calls.append(point)

        def flush(self):
            self.calls.append("flush")

    sink = Noting()
    Monitors([sink], enabled=True).write_events(iter([("a", torch.tensor(0.5), 1), ("b", 2, 3)]))
    assert sink.calls == [("a", 0.5, 1), ("b", 2.0, 3), "flush"]


def test_the_scheduler_can_be_replaced(engine):
    assert engine.lr_scheduler is None
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    train(engine, samples(2))
    assert engine.get_lr() == [pytest.approx(1e-2 / 3)]
    engine.lr_scheduler = None
    assert engine.lr_scheduler is None
    train(engine, samples(1))
    assert engine.get_lr() == [pytest.approx(1e-2 / 3)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_batch_size", 12),
        ("get_batch_info", (12, 12, 1)),
        ("gradient_clipping", 0.5),
        ("steps_per_print", 7),
        ("zero_optimization", True),
        ("zero_optimization_stage", 2),
        ("zero_optimization_partition_gradients", True),
        ("zero_optimization_partition_weights", False),
        ("zero_allgather_bucket_size", 33),
        ("zero_sub_group_size", 44),  # one for every key of the section
        ("zero_contiguous_gradients", True),
        ("fp16_enabled", True),
        ("bfloat16_enabled", False),
        ("loss_scale", 2.0),
        ("dynamic_loss_scale", False),
        ("optimizer_name", "Adam"),
        ("scheduler_name", None),
        ("get_data_types", (torch.float16, torch.float32)),
        ("postscale_gradients", True),
        ("get_type", [None]),
        ("zero_gather_16bit_weights_on_model_save", False),
        ("zero_hpz_partition_size", 1),
        ("zero_nvme_offload_optimizer", False),
        ("zero_allow_untested_optimizer", False),
        ("dataloader_drop_last", False),
        ("use_node_local_storage", False),
        ("load_universal_checkpoint", False),
        ("checkpoint_tag_validation_enabled", True),
        ("pld_enabled", False),
        ("pld_theta", 1.0),
        ("curriculum_enabled_legacy", False),
        ("flops_profiler_profile_step", 1),
        ("autotuning_metric", "throughput"),
        ("autotuning_profile_model_info", False),
        ("eigenvalue_max_iter", 100),
    ],
)
def test_getters(engine, name, value):
    assert getattr(engine, name)() == value


def test_unknown_names_are_attribute_errors(engine):
    for name in ("zero_nothing", "nothing", "_private"):
        with pytest.raises(AttributeError, match=name):
            getattr(engine, name)


def test_momenta_follow_the_optimizer():
    def job(world):
        adam = engine_on(world, config(**ADAM), Net())
        settings = config(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}})
        sgd = engine_on(world, settings, Net())
        result = [tuple(adam.get_mom()[0]), *sgd.get_mom()]
        adam.destroy()
        sgd.destroy()
        return result

    assert sim.run(1, job) == [[(0.9, 0.999), 0.8]]


def test_train_batch_runs_a_whole_global_batch():
    def job(world):
        settings = {**config(**SGD), "gradient_accumulation_steps": 3}
        losses, nets = [], []
        for way in ("train_batch", "by hand"):
            engine = engine_on(world, settings, Net())
            batch = samples(1)[0]
            if way == "train_batch":
                losses.append(engine.train_batch(iter([tuple(t[i : i + 4] for t in batch) for i in (0, 4, 8)])))
            else:
                losses += train(engine, [batch])
            nets.append(engine.module.first.weight.detach().clone())
            assert engine.global_steps == 1
            engine.destroy()
        assert losses[0] == losses[1]
        assert torch.equal(*nets)

    sim.run(1, job)


def namespace(**values):
    return argparse.Namespace(**values)


def test_where_the_config_comes_from():
    assert _config_source(namespace(deepspeed_config="a.json"), None) == "a.json"
    assert _config_source(namespace(deepscale_config="b.json"), None) == "b.json"
    assert _config_source(None, {"train_batch_size": 1}) == {"train_batch_size": 1}
    assert _config_source(namespace(), "c.json") == "c.json"
    for args, settings, word in (
        (namespace(deepspeed_config="a", deepscale_config="b"), None, "both"),
        (namespace(deepspeed_config="a"), {"x": 1}, "twice"),
        (namespace(), None, "no config"),
        (None, None, "no config"),
    ):
        with pytest.raises(ConfigError, match=word):
            _config_source(args, settings)


def test_what_initialize_refuses_before_anything_else():
    with pytest.raises(AssertionError, match="model is None"):
        mpispeed.initialize(config=config())
    for more, words in (({"mpu": object()}, "has no method"), ({"mesh_param": (1, 2)}, "makes 2 ranks")):
        with pytest.raises(AssertionError, match=words):
            mpispeed.initialize(model=Net(), config=config(), **more)


def test_arguments_of_a_script():
    parser = mpispeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale, args.deepscale_config) == (False, None, False, None)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale) == (True, "x.json", False)
    with pytest.raises(SystemExit):
        argparse.ArgumentParser().parse_args(["--deepspeed"])
