"""Sources of settings, and how mistakes are told."""

from __future__ import annotations

import base64
import json

import pytest
from pydantic import ValidationError

from mpispeed.base.errors import ConfigError
from mpispeed.config import Config, load, parse, read_source

SETTINGS = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def test_path_dict_and_base64_agree(tmp_path):
    text = json.dumps(SETTINGS)
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    configs = [load(source).config for source in (path, str(path), SETTINGS, encoded)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].train_micro_batch_size_per_gpu == 4


def test_long_base64_is_no_file_name():
    text = json.dumps(SETTINGS | {"_": "x" * 5000})
    assert load(base64.urlsafe_b64encode(text.encode()).decode()).config.zero_optimization.stage == 2


def test_read_source_gives_the_text_to_share(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SETTINGS), encoding="utf-8")
    text, where = read_source(path)
    assert where == str(path)
    assert parse(text, where).config == load(path).config
    assert read_source(SETTINGS)[0] is SETTINGS


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"^/no/such\.json: there is no such configuration file") as caught:
        load("/no/such.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="pass a dict"):
        load('{"train_batch_size": 4}')
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="found int"):
        load(3)
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        load(binary)


def test_all_mistakes_at_once():
    text = """{
      "train_batch_sise": 3, "train_batch_size": 33, "train_micro_batch_size_per_gpu": 2,
      "fp16": {"enabled": true, "lossscale": 3, "hysteresis": 0, "hysteresis": 2},
      "bf16": {"enabled": true}, "stage": 2,
      "zero_optimization": {"stage": 4, "stage3_prefetch_bucket_size": -1, "offload_param": {"device": "cpuu"}},
      "optimizer": {"type": "Adam", "params": {"lrr": 1, "max_grad_norm": 0.5}}
    }"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "ds.json")
    lines = str(caught.value).splitlines()
    assert lines[0] == "ds.json: 11 problems"
    expected = [
        'train_batch_sise: unknown key (value 3); did you mean "train_batch_size"?',
        "train_batch_size: 33 is no multiple of train_micro_batch_size_per_gpu 2; set it to 32 or 34, ",
        'fp16.lossscale: unknown key (value 3); did you mean "loss_scale"?',
        "fp16.hysteresis: the key is there twice in one object",
        "bf16.enabled: fp16.enabled and bf16.enabled are both true",
        "stage: unknown key (value 2); it belongs at zero_optimization.stage",
        "zero_optimization.stage: must be at most 3, found 4",
        "zero_optimization.stage3_prefetch_bucket_size: must be at least 0, found -1",
        'zero_optimization.offload_param.device: expected "none", "cpu" or "nvme", found "cpuu"; did you mean "cpu"?',
        'optimizer.params.lrr: unknown keyword (value 1); did you mean "lr"?',
        "optimizer.params.max_grad_norm: the optimizer takes no max_grad_norm (value 0.5); remove it and set the "
        "top-level key gradient_clipping to 0.5",
    ]
    for sentence in expected:
        assert any(line.strip().startswith(sentence) for line in lines[1:]), (sentence, lines)


def test_one_mistake_is_one_line():
    with pytest.raises(ConfigError) as caught:
        load({"fp16": {"enabled": "maybe"}})
    assert str(caught.value) == 'configuration: fp16.enabled: expected true or false, found "maybe"'


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clipping": "1e400"},
        {"compression_training": {"row_pruning": {"different_groups": {"g.h": {"params": {}}}}}},
        {"fp16": {"enabled": "x"}, "zero_optimization": {"stage": 1}},
        {"optimizer": {"type": "Adam", "params": {"lr": float("nan")}}},
    ],
)
def test_no_mistake_is_told_twice_or_brings_a_follower(settings):
    with pytest.raises(ConfigError) as caught:
        load(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("fp16", "loss_scale", True),
        ("zero_optimization", "stage", True),
        ("zero_optimization", "reduce_bucket_size", 1.5),
        ("elasticity", "micro_batch_sizes", ["2"]),
        ("elasticity", "micro_batch_sizes", [2.0]),
        ("elasticity", "micro_batch_sizes", [-1]),
        ("elasticity", "micro_batch_sizes", 4),
        ("elasticity", "version", 0.3),
        ("checkpoint", "tag_validation", "never"),
    ],
)
def test_values_that_only_seem_to_fit(section, key, value):
    with pytest.raises(ConfigError, match=rf"^configuration: {section}\.{key}"):
        load({section: {key: value}})


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"scheduler": {"type":"WarmupLR", "params": {"warmup_num_steps": %s}}}', "scheduler.params.warmup_num_steps"),
        ('{"scheduler": {"type": "WarmupLR", "params": {"a": [[1, {"b": %s}]]}}}', "scheduler.params.a[0][1].b"),
        ('{"optimizer": {"type": "Adam", "params": {"betas": [0.9, %s]}}}', "optimizer.params.betas[1]"),
        ('{"optimizer": {"type": "RMSprop", "params": {"dtype": %s}}}', "optimizer.params.dtype"),
        ('{"gradient_clipping": %s}', "gradient_clipping"),
        ('{"train_batch_size": %s}', "train_batch_size"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_once_with_their_path(text, path, number):
    with pytest.raises(ConfigError) as caught:
        parse(text % number, "ds.json")
    assert str(caught.value).startswith(f"ds.json: {path}: expected a finite number, found "), str(caught.value)


@pytest.mark.parametrize("depth", [33, 200, 450, 700, 990])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"k": ', "}")])
def test_what_is_nested_too_deeply_is_refused_in_one_line(depth, start, end):
    text = '{"optimizer": {"params": {"a": ' + start * depth + "1" + end * depth + "}}}"
    sources = [lambda: parse(text, "configuration")]
    if depth < 500:  # reading deeper ones is up to whoever made the dict
        sources.append(lambda: load(json.loads(text)))
    for source in sources:
        with pytest.raises(
            ConfigError, match=r"^configuration: (optimizer\.params\.a|this is no JSON).*nested"
        ) as told:
            source()
        assert "\n" not in str(told.value) and len(str(told.value)) < 300


def test_a_dict_that_holds_itself_is_refused():
    settings = {"optimizer": {"params": {}}}
    settings["optimizer"]["params"]["again"] = settings
    with pytest.raises(ConfigError, match="nested deeper"):
        load(settings)


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("seed", (0, 2**63 - 1), (-1, 2**63, 99999999999999999999999)),
        ("fp16.initial_scale_power", (0, 127), (-1, 128, 1000000)),
    ],
)
def test_numbers_that_a_run_could_not_hold(path, good, bad):
    section, _, key = path.rpartition(".")

    def settings(value):
        return {section: {key: value}} if section else {key: value}

    for value in good:
        load(settings(value))
    for value in bad:
        with pytest.raises(
            ConfigError, match=rf"^configuration: {path}: must be at (least 0|most \d+), found {value}$"
        ):
            load(settings(value))


def test_null_where_a_section_is_expected():
    with pytest.raises(ConfigError, match=r"fp16: expected a section"):
        load({"fp16": None})
    assert load({"optimizer": None, "scheduler": None}).config.optimizer is None


def test_a_config_cannot_change():
    config = load({}).config
    with pytest.raises(ValidationError):
        config.train_batch_size = 3
    with pytest.raises(ValidationError):
        config.fp16.enabled = True


def test_empty_settings_are_the_defaults():
    loaded = load({})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.warnings == []


def test_defaults_that_existing_runs_depend_on():
    config = load({}).config
    zero = config.zero_optimization
    assert (config.gradient_clipping, config.steps_per_print, config.reduction) == (0.0, None, "mpi")
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.sub_group_size) == (5 * 10**8, 5 * 10**7, 10**9)
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (16, 1000, 2)
    assert (config.checkpoint.tag_validation, config.comms_logger.prof_all) == ("Warn", True)
    assert (config.wandb.project, config.tensorboard.job_name) == ("deepspeed", "DeepSpeedJobName")


def test_resolved_dict_is_plain_and_loads_again():
    loaded = load(SETTINGS | {"optimizer": {"type": "AdamW", "params": {"lr": 1}}})
    again = load(json.loads(json.dumps(loaded.config.resolved_dict())))
    assert again.config == loaded.config
