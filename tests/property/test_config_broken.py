"""Two hundred broken configurations, each refused with the path of its mistake; and many good ones that load."""

from __future__ import annotations

import base64
import copy
import json
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter, ValidationError

from mpispeed.base.errors import ConfigError
from mpispeed.config import load, parse, resolve_batch
from mpispeed.config.legacy import ALIASES
from mpispeed.config.root import Config
from mpispeed.config.section import inner_section, walk


class Broken(NamedTuple):
    name: str
    content: Any  # a dict, or a JSON text
    path: str  # what the message has to name
    world: int | None = None  # set when only the number of ranks makes it impossible


GOOD_BASES = (
    {},
    {"train_batch_size": 32, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0},
    {"train_batch_size": "auto", "zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "wall_clock_breakdown": False},
)
UNKNOWN, WRONG_TYPE, OUT_OF_RANGE, TRIANGLES, DUPLICATES = 62, 62, 24, 14, 8


def set_at(base: dict, path: str, value: Any) -> dict:
    result = copy.deepcopy(base)
    *parents, last = path.split(".")
    node = result
    for key in parents:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return set_at({}, path, value)
    node[last] = value
    return result


def sections() -> list[str]:
    found = [""]
    for field in walk(Config):
        inner, is_mapping = inner_section(field.annotation)
        if inner is not None:
            found.append(f"{field.path}.*".replace("*", "mine") + "." if is_mapping else f"{field.path}.")
    return [path.replace("*", "mine") for path in found]


def misspell(rng: random.Random, name: str) -> str:
    place = rng.randrange(1, len(name))
    kind = rng.randrange(3)
    if kind == 0:
        return name[:place] + name[place + 1 :] + "q"
    if kind == 1:
        return name[:place] + "zz" + name[place:]
    return name.upper() if name.upper() != name else name + "_x"


def unknown_keys(rng: random.Random) -> Iterator[Broken]:
    places = sections()
    names = [field.name for field in walk(Config)]
    for index in range(UNKNOWN):
        place = places[index % len(places)]
        path = place + misspell(rng, rng.choice(names))
        yield Broken(f"unknown {path}", set_at(rng.choice(GOOD_BASES), path, rng.choice([1, True, "x", {}])), path)


BAD_VALUES: tuple[Any, ...] = ("no_such_value", 3.25, [], ["x"], {}, {"a": 1}, -7.5, True, [[1]], 5)


def wrong_types(rng: random.Random) -> Iterator[Broken]:
    # An independent judge: pydantic's own adapter of the field's annotation, without our translation.
    fields = [f for f in walk(Config) if f.annotation is not Any and "*" not in f.path]
    spelled = {alias.new: alias.old for alias in ALIASES if alias.convert is None and not alias.is_deprecated}
    rng.shuffle(fields)
    count = 0
    for field in fields:
        bad = [value for value in BAD_VALUES if not fits(field, value)]
        if not bad or count == WRONG_TYPE:
            continue
        path = spelled.get(field.path, field.path)
        base = set_at(rng.choice(GOOD_BASES), path, rng.choice(bad))
        yield Broken(f"type of {path}", base, path)
        count += 1


def fits(field: Any, value: Any) -> bool:
    if isinstance(value, (bool, dict)) and inner_section(field.annotation)[0] is not None:
        return True  # a bare switch is a legal spelling of many sections; an unknown key inside is another mistake
    try:
        TypeAdapter(field.section.model_fields[field.name].rebuild_annotation()).validate_python(value)
    except ValidationError:
        return False
    return True


RANGES = (
    ("train_batch_size", 0), ("train_micro_batch_size_per_gpu", -4), ("gradient_accumulation_steps", 0),
    ("steps_per_print", -1), ("gradient_clipping", -0.5), ("gradient_predivide_factor", 0), ("vocabulary_size", 0),
    ("fp16.loss_scale", -1), ("fp16.initial_scale_power", -1), ("fp16.loss_scale_window", 0), ("fp16.hysteresis", 0),
    ("zero_optimization.stage", 4), ("zero_optimization.stage", -1), ("zero_optimization.reduce_bucket_size", -5),
    ("zero_optimization.stage3_max_live_parameters", -1), ("zero_optimization.sub_group_size", -1),
    ("zero_optimization.offload_optimizer.ratio", 1.5), ("zero_optimization.offload_optimizer.buffer_count", -1),
    ("aio.block_size", 0), ("aio.thread_count", 0), ("elasticity.version", 0.7), ("elasticity.min_gpus", 0),
    ("flops_profiler.profile_step", 0), ("comet.samples_log_interval", 0),
)  # fmt: skip


def out_of_range(rng: random.Random) -> Iterator[Broken]:
    for path, value in RANGES:
        yield Broken(f"range of {path} {value}", set_at(rng.choice((GOOD_BASES[0], GOOD_BASES[4])), path, value), path)


def conflicts() -> Iterator[Broken]:
    on, zero = {"enabled": True}, "zero_optimization"
    rows: tuple[tuple[dict, str], ...] = (
        ({"fp16": on, "bf16": on}, "bf16.enabled"),
        ({"fp16": on, "bfloat16": True}, "bfloat16.enabled"),
        ({"prescale_gradients": True, zero: {"stage": 2}}, "prescale_gradients"),
        ({"prescale_gradients": 1, zero: {"stage": 3}}, "prescale_gradients"),
        ({"gradient_predivide_factor": 4, zero: {"stage": 2}}, "gradient_predivide_factor"),
        ({"amp": {**on, "master_weights": True}, zero: {"stage": 1}}, "amp.master_weights"),
        ({"torch_autocast": on, "bf16": on}, "torch_autocast.enabled"),
        ({"amp": on, "fp16": on}, "amp.enabled"),
        ({zero: {"zero_quantized_gradients": True, "reduce_scatter": False}}, f"{zero}.zero_quantized_gradients"),
        ({zero: {"offload_optimizer": {"device": "cpu"}}}, f"{zero}.offload_optimizer.device"),
        ({zero: {"cpu_offload": True}}, f"{zero}.cpu_offload.device"),
        ({zero: {"stage": 3, "offload_param": {"device": "nvme"}}}, f"{zero}.offload_param.nvme_path"),
        ({zero: {"cpu_offload": True, "offload_optimizer": {}}}, f"{zero}.cpu_offload"),
        ({zero: {"stage": 1, "legacy_stage1": True}}, f"{zero}.legacy_stage1"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"fp16": on, "data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "optimizer.params.max_grad_norm"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warm_up": 1}}}, "scheduler.params.warm_up"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps"),
    )
    for settings, path in rows:
        yield Broken(f"conflict {path} {json.dumps(settings)}", settings, path)


def triangles(rng: random.Random) -> Iterator[Broken]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for index in range(TRIANGLES):
        mb, gas, world = rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 8)
        tb = mb * gas * world + (mb * gas * rng.randint(1, 4) * world if index % 2 else rng.randint(1, mb * gas - 1))
        settings = dict(zip(keys, (tb, mb, gas), strict=True))
        if index == 0:
            settings = {keys[2]: gas}
        yield Broken(f"triangle {settings} on {world}", settings, next(iter(settings)), world)


def duplicates(rng: random.Random) -> Iterator[Broken]:
    for index in range(DUPLICATES):
        value = rng.choice(["1", "true", '"auto"'])
        depth = index % 4
        inner = f'"twice{index}": {value}, "between": 0, "twice{index}": {value}'
        names = ["zero_optimization", "offload_optimizer", "more"][:depth]
        text = "{" + "".join(f'"{name}": {{' for name in names) + inner + "}" * (depth + 1)
        yield Broken(f"duplicate at depth {depth} of twice{index}", text, ".".join([*names, f"twice{index}"]))


MALFORMED = (
    '{"train_batch_size": 4',
    '{"train_batch_size" 4}',
    '{"fp16": {"enabled": true}, "bf16" {}}',
    "{train_batch_size: 4}",
    "{'train_batch_size': 4}",
    '{"train_batch_size": 4}}',
    '{"train_batch_size": 4 "fp16": {}}',
    '{"optimizer": {"type": Adam}}',
    '{"a": "unfinished}',
    '/* unfinished {"train_batch_size": 4}',
)


def all_broken() -> list[Broken]:
    rng = random.Random(20251)
    found = [*unknown_keys(rng), *wrong_types(rng), *out_of_range(rng), *conflicts(), *triangles(rng)]
    found += duplicates(rng)
    return found + [Broken(f"malformed {text}", text, "broken.json: line 1, column") for text in MALFORMED]


BROKEN = all_broken()


def test_there_are_two_hundred_different_ones():
    assert len({(repr(case.content), case.world) for case in BROKEN}) == len(BROKEN) >= 200


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_is_refused_and_the_path_is_named(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)  # it reads some of the malformed ones, whose keys have no quotes
    before = copy.deepcopy(case.content)
    with pytest.raises(ConfigError) as caught:
        loaded = parse(case.content, "broken.json") if isinstance(case.content, str) else load(case.content)
        config = loaded.config
        resolve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            case.world,
        )
    first, *more = str(caught.value).splitlines()
    lines = [first.partition(": ")[2], *(line.strip() for line in more)]
    if case.name.startswith(("malformed", "triangle")):
        assert case.path in first
    else:
        assert any(line.startswith((f"{case.path}: ", f"{case.path}[")) for line in lines), str(caught.value)
    assert case.content == before


ADAMW_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP_AUTO = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
FP16_AUTO = {
    "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
    "min_loss_scale": 1,
}  # fmt: skip
TRAINER_AUTO = {
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
GOOD = (
    *GOOD_BASES,
    {  # a trainer's stage 2
        "fp16": FP16_AUTO, "bf16": {"enabled": "auto"}, "optimizer": ADAMW_AUTO, "scheduler": WARMUP_AUTO,
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, "allgather_partitions": True,
            "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        **TRAINER_AUTO,
    },
    {  # a trainer's stage 3
        "fp16": FP16_AUTO, "bf16": {"enabled": "auto"}, "optimizer": ADAMW_AUTO, "scheduler": WARMUP_AUTO,
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
            "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        },
        **TRAINER_AUTO,
    },
    {"train_micro_batch_size_per_gpu": "auto", "steps_per_print": float("inf"), "zero_optimization": {"stage": 0}},
    {"amp": {"enabled": "auto", "opt_level": "auto"}, "zero_optimization": {"stage": 0}},
    {  # pre-training of a large encoder
        "train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 1000,
        "prescale_gradients": False, "bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 4e-3, "weight_decay": 0.01, "bias_correction": False}},
        "gradient_clipping": 1.0, "wall_clock_breakdown": False,
        "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4, "attention": "bidirectional"},
    },
    {  # an old file
        "train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 128}, "allgather_size": 500000000,
        "zero_optimization": True, "disable_allgather": True,
    },
    {
        "train_batch_size": 16, "zero_optimization": {"stage": 2, "cpu_offload": True, "grad_hooks": True},
        "fp16": {"enabled": True, "initial_scale_power": 32, "min_loss_scale": 0.25},
    },
    {"optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 400, "comm_backend_name": "nccl"}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}, "train_batch_size": 4},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": "1e-2"}}},
    {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [1e-4, 1e-3]}}},
    {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}},
    {"tensorboard": {"enabled": True, "output_path": None, "job_name": "run1"}, "csv_monitor": {"enabled": True}},
    {"comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "prof_ops": ["all_reduce"]}},
    {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "output_file": None}},
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False}},
    {"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "overlap_events": True}},
    {
        "elasticity": {
            "enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1,
            "max_gpus": 10000, "min_time": 20, "prefer_large_batch": True, "version": 0.1,
        }
    },
    {
        "data_efficiency": {
            "enabled": True, "seed": 1234,
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True, "total_layer_num": 24, "random_ltd_layer_num": 22,
                    "random_ltd_layer_id": list(range(1, 23)), "model_mask_name": "attention_mask",
                    "model_type": "decoder", "hidden_state_order": "seq_batch_dim",
                    "random_ltd_schedule": {
                        "min_value": 128, "max_value": 2048, "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
                    },
                },
            },
            "data_sampling": {
                "enabled": True, "num_epochs": 1, "num_workers": 0,
                "curriculum_learning": {
                    "enabled": True, "data_cluster_path": "/data/clusters",
                    "curriculum_metrics": {
                        "vocabularyrarity": {
                            "index_to_sample_path": "/data/s", "index_to_metric_path": "/data/m",
                            "difficulty_type": "percentile", "clustering_type": "schedule_based",
                            "min_difficulty": 1, "max_difficulty": 100, "schedule_type": "fixed_root",
                            "schedule_config": {
                                "total_curriculum_step": 110000, "difficulty_step": 1, "root_degree": 2,
                            },
                        }
                    },
                },
            },
        }
    },
    {
        "curriculum_learning": {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8},
        }
    },
    {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {
                    "enabled": True, "quantize_weight_in_forward": True, "rounding": "nearest",
                    "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
                },
                "different_groups": {
                    "wq1": {
                        "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50},
                        "modules": ["attention.self", "intermediate"],
                    }
                },
            },
            "row_pruning": {
                "shared_parameters": {"enabled": True, "method": "topk"},
                "different_groups": {
                    "rp1": {
                        "params": {"dense_ratio": 0.5}, "modules": ["intermediate.dense"],
                        "related_modules": [["layer.\\w+.output.dense"]],
                    }
                },
            },
            "layer_reduction": {
                "enabled": True, "keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer",
                "teacher_layer": [2, 4], "other_module_name": ["bert.pooler", "classifier"],
            },
        }
    },
    {"quantize_training": {"enabled": True, "quantize-algo": {"q_type": "asymmetric"}, "quantize_type": "auto"}},
    {"autotuning": {"enabled": True, "metric": "FLOPS", "arg_mappings": {"train_batch_size": "--batch"}}},
    {"checkpoint": {"tag_validation": "fail", "load_universal": True, "parallel_write": {"pipeline_stage": True}}},
    {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
    {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}, "zero_optimization": {"stage": 1}},
    {"data_types": {"grad_accum_dtype": "float32"}, "bf16": {"enabled": True}, "communication_data_type": "bf16"},
    {"timers": {"throughput": {"enabled": True, "synchronized": False}}, "nebula": {"enabled": False}},
    {"reduction": "ordered", "seed": 7, "data_parallel_size": 4, "sequence_parallel_size": 1},
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_good_ones_load_from_a_dict_a_text_and_base64(number):
    settings = GOOD[number]
    before = copy.deepcopy(settings)
    config = load(settings).config
    assert settings == before
    text = json.dumps(settings)
    assert parse(text, "good.json").config == config
    assert load(base64.urlsafe_b64encode(text.encode()).decode()).config == config
    assert load(json.loads(json.dumps(config.resolved_dict()))).config == config


def test_a_good_file_with_one_mistake_more_is_refused_everywhere():
    for settings in GOOD:
        with pytest.raises(ConfigError, match="surely_unknown"):
            load({**settings, "surely_unknown": 1})
