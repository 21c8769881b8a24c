"""Settings that try to forge lines, to leak keys, or to take all time and memory; and what only seems to fit."""

from __future__ import annotations

import base64
import json
import os
import time

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import accept, load, parse

KEY = "kY7-distinctive-9Qz"


def refused(settings):
    with pytest.raises(ConfigError) as caught:
        parse(settings, "ds.json") if isinstance(settings, str) else load(settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_clipng": "auto"}, 'gradient_clipng: unknown key (with a text); did you mean "gradient_clipping"?'),
        ({"zero_optimization": {"stagee": "auto"}}, 'zero_optimization.stagee: unknown key (with a text); did you'),
        ({"zero_optimisation": "auto"}, 'zero_optimisation: unknown key (with a text); did you mean "zero_optim'),
        ({"zero_optimisation": {"stage": "auto"}}, "zero_optimisation: unknown key (with a section); did you mean"),
        ({"zero_optimization": {"offload_param": {"devise": "auto"}}}, "zero_optimization.offload_param.devise: unkn"),
        ({"fp16": {"enabld": ["auto", "auto"]}}, "fp16.enabld: unknown key (with a list)"),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": "auto"}}}, "optimizer.params.lrr: unknown keyword"),
        ({"scheduler": {"type": "WarmupLR", "params": {"lrr": "auto"}}}, "scheduler.params.lrr: unknown keyword"),
    ],
)  # fmt: skip
def test_auto_hides_no_wrong_key(settings, said):
    message = refused(settings)
    assert message.startswith(f"configuration: {said}") and "\n" not in message


def test_all_mistakes_of_the_newcomer_at_once():
    message = refused(
        {
            "train_batch_size": "twelve",
            "zero_optimization": {"stage": 7, "stag": 1},
            "gradient_clipping": -1,
            "optimizer": {"type": "AdamX", "params": {"lr": "fast"}},
        }
    )
    for path in (
        "train_batch_size", "zero_optimization.stage", "zero_optimization.stag", "gradient_clipping", "optimizer.type",
        "optimizer.params.lr",
    ):  # fmt: skip
        assert f"\n  {path}: " in message
    assert message.startswith("configuration: 6 problems")


def test_what_a_run_would_refuse_is_in_the_same_message():
    with pytest.raises(ConfigError) as caught:
        accept({"seeed": 1, "train_batch_size": 12, "hybrid_engine": True}, "ds.json", 5)
    for said in (
        "3 problems",
        "seeed: unknown",
        "hybrid_engine: the hybrid engine is not",
        "12 is not 2 * 1 * 5 = 10 on 5 data-par",
    ):
        assert said in str(caught.value)


def test_a_wrong_value_brings_no_mistakes_of_its_default():
    message = refused({"zero_optimization": {"stage": 7, "offload_optimizer": {"device": "cpu"}}})
    assert message == "configuration: zero_optimization.stage: must be at most 3, found 7"


@pytest.mark.parametrize("value", ["yes", "true", "False", 1, 0, "on", 2, [], 1.0])
@pytest.mark.parametrize(
    "path", ["bf16.enabled", "prescale_gradients", "comet.online", "zero_optimization.cpu_offload"]
)
def test_only_true_and_false_are_switches(path, value):
    section, _, key = path.rpartition(".")
    message = refused({section: {key: value}} if section else {key: value})
    assert message.startswith(f"configuration: {path}: expected true or false, found ")


def test_null_is_no_switch():
    assert "expected true or false, found null" in refused({"bf16": {"enabled": None}})
    assert load({"comet": {"online": None}}).config.comet.online is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("csv_monitor.output_path", "\ud800"), ("csv_monitor.job_name", "a\0b"), ("wandb.team", "\udfffx"),
        ("zero_optimization.offload_optimizer.nvme_path", "/a\0"), ("comms_logger.prof_ops[1]", "\0"),
        ("optimizer.type", "Adam\0"), ("optimizer.params.x\0", 1), ("x\ud800y", 1), ("walltime.save_dir", "\udc00"),
        ("autotuning.arg_mappings.a", "\0"),
    ],
)  # fmt: skip
def test_texts_that_no_file_name_can_hold(path, value):
    keys, _, index = path.partition("[")
    *sections, last = keys.split(".")
    settings = {last: ["all_reduce", value] if index else value}
    for section in reversed(sections):
        settings = {section: settings}
    text = json.dumps(settings)
    for message in (refused(settings), refused(text)):
        shown = path.replace("\0", "\\x00").replace("\ud800", "\\ud800")
        assert f": {shown}: " in message and "no file name and no message can hold" in message
        message.encode()
        assert message.isprintable()


def test_messages_are_lines_of_signs_that_only_show():
    message = refused({"\x1b[31mred": 1, "x\nINFO: fake": 2, "\u202eabc": 3, "k" * 10**7: 4})
    lines = message.split("\n")
    assert len(lines) == 5 and all(line.isprintable() for line in lines) and len(message) < 5000
    assert "\\x1b[31mred: unknown key" in message and "x\\nINFO: fake: unknown" in message and "\\u202e" in message
    assert refused({"fp16": {"a\nb": 1}}).isprintable()
    assert refused({"optimizer": {"type": "Adam\x1b", "params": {"\u202e": 1}}}).replace("\n", "").isprintable()


@pytest.mark.parametrize("count", [2_000, 20_000])
@pytest.mark.parametrize("place", ["top", "params", "section"])
def test_thousands_of_mistakes_take_no_time(count, place):
    many = {f"unknown_key_{number}": number for number in range(count)}
    settings = {
        "top": many, "params": {"optimizer": {"type": "AdamW", "params": many}}, "section": {"fp16": many},
    }[place]  # fmt: skip
    start = time.process_time()
    message = refused(settings)
    assert time.process_time() - start < 4
    assert message.startswith(f"configuration: {count} problems") and message.endswith(f"and {count - 100} more")


@pytest.mark.parametrize("text", ['{"a": ' + "/*" * 10**6, '{"a" ' + '"\\' * 10**6, '{"a": 1' + ", " * 10**6])
def test_texts_that_are_no_json_take_no_time(text):
    start = time.process_time()
    assert "this is no JSON" in refused(text)
    assert time.process_time() - start < 4


def test_a_comment_in_front_of_deep_brackets_is_one_line():
    assert "nested" in refused("// x\n" + "[" * 100_000)
    assert "this is no JSON" in refused('// x\n{"seed": ' + "1" * 5000 + "}")


def test_only_ordinary_files_of_some_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no ordinary file"):
        load(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no ordinary file"):
        load("/dev/zero")
    (tmp_path / "long").write_text("{" + " " * (4 << 20) + "}")
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        load(tmp_path / "long")
    (tmp_path / "ds.json").write_text('{"seed": 7}')
    (tmp_path / "link").symlink_to("ds.json")
    assert load(tmp_path / "link").config.seed == 7


@pytest.mark.parametrize(
    "settings",
    [
        {"train_batch_size": "\uff18"}, {"train_batch_size": "1_000"}, {"train_batch_size": 2**63},
        {"train_batch_size": 1e308}, {"gradient_clipping": 1e308}, {"gradient_clipping": "\uff11"},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e308}}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e7}}},
        {"optimizer": {"type": "Adam", "params": {"eps": 1e308}}},
        {"optimizer": {"type": "NAdam", "params": {"lr": 1e308}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": -1e21}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e308}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "\uff18"}}},
        {"host_memory_limit": "1e300"}, {"walltime": {"limit": "\uff18"}}, {"walltime": {"limit": "1_0"}},
    ],
)  # fmt: skip
def test_numbers_that_only_seem_to_be_settings(settings):
    assert "\n" not in refused(settings)


def test_numbers_that_are_documented_stay_legal():
    loaded = load({"train_batch_size": " 8 ", "zero_optimization": {"reduce_bucket_size": "5e8"}, "csv_monitor": True})
    assert loaded.config.train_batch_size == 8 and loaded.config.csv_monitor.enabled
    assert not load({"wall_clock_breakdown": "auto"}).config.wall_clock_breakdown


# -- keys of services ------------------------------------------------------------------------------------------------


def test_a_key_is_nowhere_but_where_it_is_asked_for():
    for source in ({"comet": {"api_key": KEY}}, json.dumps({"comet": {"api_key": KEY}})):
        loaded = load(source) if isinstance(source, dict) else parse(source, "ds.json")
        config = loaded.config
        assert config.comet.api_key is not None and config.comet.api_key.get_secret_value() == KEY
        for text in (
            repr(loaded), str(config), repr(config.comet), config.model_dump_json(), json.dumps(config.resolved_dict()),
            str(config.comet.model_dump()), str(loaded.origins),
        ):  # fmt: skip
            assert KEY not in text
        assert config.resolved_dict()["comet"]["api_key"] == "(set)"
    assert load({"comet": {}}).config.resolved_dict()["comet"]["api_key"] is None


@pytest.mark.parametrize(
    "settings",
    [
        {"comet": {"api_key": KEY, "api_kye": KEY}}, {"comet": {"api_key": [KEY]}}, {"comet": KEY},
        {"comet": {"mode": KEY}}, {"comet": {"online": KEY}}, {"comet": [KEY]}, {"wandb": {"api_key": KEY}},
        {"cometx": {"api_key": KEY}}, {"api_key": KEY}, {"comet": {"enabled": True, "mode": "get", "api_key": KEY}},
        {"comet": {"api_key": f"{KEY}\0"}}, {"comet": {"samples_log_interval": KEY}},
    ],
)  # fmt: skip
def test_no_mistake_shows_a_key(settings):
    for content in (settings, json.dumps(settings)):
        with pytest.raises(ConfigError) as caught:
            accept(content, "ds.json")
        assert KEY not in str(caught.value)


def test_settings_in_the_place_of_a_path_are_not_shown():
    text = json.dumps({"comet": {"api_key": KEY}})
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (text, encoded[:-3] + "*", encoded[:-5], f" {encoded}"):
        with pytest.raises(ConfigError) as caught:
            load(source)
        assert KEY not in str(caught.value) and encoded[8:30] not in str(caught.value)
    assert load(encoded).config.comet.api_key.get_secret_value() == KEY
