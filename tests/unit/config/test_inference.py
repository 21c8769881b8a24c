"""Settings of inference: second spellings, forms of values, and the merging of a config with keywords."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.config.inference import DtypeEnum, InferenceConfig, MoEConfig, MoETypeEnum, QuantizationConfig, TPConfig
from mpispeed.config.inference_effects import DEPENDENT, NO_EFFECT, find_sentences
from mpispeed.config.inference_load import resolve
from mpispeed.config.schema import inference_page, inference_schema
from mpispeed.config.section import walk

GROUP = object()
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "inference-config.md"


def refused(*args):
    with pytest.raises(ConfigError) as caught:
        resolve(*args)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# -- merging -----------------------------------------------------------------------------------------------------------


def test_nothing_given_is_all_defaults():
    assert resolve() == resolve({}, {}) == InferenceConfig()
    assert resolve().dtype == torch.float16


def test_keywords_join_the_config():
    found = resolve({"replace_with_kernel_inject": True}, {"dtype": torch.float32})
    assert found.replace_with_kernel_inject
    assert found.dtype == torch.float32


def test_equal_values_may_be_in_both():
    found = resolve({"replace_with_kernel_inject": True, "dtype": "half"}, {"kernel_inject": True, "dtype": torch.half})
    assert found.replace_with_kernel_inject


def test_different_values_are_named():
    text = refused({"replace_with_kernel_inject": True}, {"kernel_inject": False})
    assert "replace_with_kernel_inject: true in the configuration and false in the keywords" in text
    assert "dtype: torch.float16 in the configuration and torch.float32" in refused(
        {"dtype": "fp16"}, {"dtype": "fp32"}
    )


def test_settings_made_in_code_are_a_config_too():
    made = InferenceConfig(dtype="bf16", tp=TPConfig(tp_size=2))
    assert resolve(made) == made
    assert resolve(made, {"dtype": torch.bfloat16, "mp_size": 2}).tensor_parallel.tp_size == 2
    assert "dtype" in refused(made, {"dtype": "fp32"})


def test_sections_are_merged_key_by_key():
    found = resolve({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_grain_size": 8, "tp_size": 2}}).tensor_parallel
    assert (found.tp_size, found.tp_grain_size) == (2, 8)
    text = refused({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_size": 4}})
    assert "tensor_parallel.tp_size: 2 in the configuration and 4 in the keywords" in text


def test_a_load_policy_is_one_value():
    assert "checkpoint" in refused({"checkpoint": {"type": "ds_model"}}, {"checkpoint": {"version": 1.0}})


def test_a_text_is_read_as_json():
    text = json.dumps({"dtype": "torch.bfloat16", "tensor_parallel": {"tp_size": 2}, "_note": "a comment"})
    found = resolve(text, {}, "settings.json")
    assert (found.dtype, found.tensor_parallel.tp_size) == (torch.bfloat16, 2)
    assert refused('{"max_tokens": 0}', {}, "settings.json").startswith("settings.json: max_out_tokens: ")


@given(st.dictionaries(st.sampled_from(["dtype", "max_tokens", "kernel_inject", "tm"]), st.integers(0, 1)), st.data())
def test_any_split_between_config_and_keywords_is_the_same(chosen, data):
    values = {
        "dtype": ("fp32", torch.bfloat16), "max_tokens": (7, 9), "kernel_inject": (True, False), "tm": (False, True)
    }  # fmt: skip
    whole = {key: values[key][at] for key, at in chosen.items()}
    left = {key: value for key, value in whole.items() if data.draw(st.booleans())}
    right = {key: value for key, value in whole.items() if key not in left or data.draw(st.booleans())}
    assert resolve(left, right) == resolve(whole)


# -- spellings and forms -----------------------------------------------------------------------------------------------

ALIASES = [(InferenceConfig, old, new) for old, new in InferenceConfig.ALIASES.items()] + [
    (MoEConfig, old, new) for old, new in MoEConfig.ALIASES.items()
]
VALUES = {
    "replace_with_kernel_inject": (True, False), "tensor_parallel": ({"tp_size": 2}, {"tp_size": 3}),
    "triangular_masking": (False, True), "checkpoint_config": ({"base_dir": "a"}, {"base_dir": "b"}),
    "injection_policy": ({int: "a"}, {int: "b"}), "config": ({"a": 1}, {"a": 2}), "max_out_tokens": (5, 6),
    "min_out_tokens": (5, 6), "ep_group": (GROUP, 7), "ep_mp_group": (GROUP, 7), "moe_experts": ([4], [8]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "old", "new"), ALIASES, ids=[f"{kind.__name__}-{old}" for kind, old, _ in ALIASES])
def test_second_spellings(kind, old, new):
    value, other = VALUES[new]
    expected = getattr(kind(**{new: value}), new)
    assert expected != type(expected)() if isinstance(expected, TPConfig) else expected is not None
    assert getattr(kind(**{old: value}), new) == getattr(kind(**{old: value, new: value}), new) == expected
    with pytest.raises(ValueError, match=f"{old}|{new}"):
        kind(**{old: value, new: other})
    if kind is InferenceConfig:
        assert getattr(resolve({old: value}), new) == getattr(resolve({new: value}, {old: value}), new) == expected
        assert new in refused({new: other}, {old: value})
        assert "the same setting" in refused({new: other, old: value})


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("torch.float16 fp16 float16 half FP16", torch.float16),
        ("fp32 float float32 torch.float", torch.float32),
        ("bf16 bfloat16 bfloat", torch.bfloat16),
        ("int8 torch.int8", torch.int8),
    ],
)
def test_names_of_dtypes(names, dtype):
    given_values = [*names.split(), dtype, next(each for each in DtypeEnum if each.value == dtype)]
    assert {resolve({"dtype": name}).dtype for name in given_values} == {dtype}
    assert InferenceConfig(dtype=names.split()[0]).dtype == dtype


@pytest.mark.parametrize("value", ["fp8", torch.float64, 16, None, ["fp16"]])
def test_other_dtypes_are_refused(value):
    assert "dtype: expected one of fp16, fp32, bf16, int8" in refused({"dtype": value})


def test_numbers_that_stand_for_quantization():
    groups = resolve({"quant": 8}).quant.weight
    assert (groups.q_groups, groups.mlp_extra_grouping) == (8, False)
    for pair in ((True, 8), [True, 8]):
        both = resolve({}, {"quant": pair}).quant.weight
        assert (both.q_groups, both.mlp_extra_grouping) == (8, True)
    assert not resolve({"quant": False}).quant.enabled
    assert QuantizationConfig().weight.num_bits == 8
    assert "quant" in refused({"quant": (True, 8, 9)})


def test_a_switch_stands_for_experts():
    assert not resolve({"moe": False}).moe.enabled
    assert InferenceConfig(moe=True).moe == MoEConfig()
    assert resolve({"moe": {"type": "Residual"}}).moe.type is MoETypeEnum.residual


@pytest.mark.parametrize(
    ("given_settings", "path", "value"),
    [
        ({"mp_size": 2}, "tensor_parallel.tp_size", 2),
        ({"mpu": GROUP}, "tensor_parallel.mpu", GROUP),
        ({"ep_size": 2, "moe": {"num_experts": [4]}}, "moe.ep_size", 2),
        ({"expert_group": GROUP}, "moe.ep_group", GROUP),
        ({"ep_mp_group": GROUP, "moe": True}, "moe.ep_mp_group", GROUP),
        ({"moe_experts": 4}, "moe.moe_experts", [4]),
        ({"moe_type": "residual"}, "moe.type", "residual"),
        ({"ckpt_config": {"checkpoint_dir": "w"}}, "checkpoint", "w"),
        ({"checkpoint_config": {"base_dir": "w"}, "base_dir": "w"}, "base_dir", "w"),
        ({"checkpoint_config": {"save_mp_checkpoint_path": "w"}}, "save_mp_checkpoint_path", "w"),
    ],
)
def test_deprecated_keys_reach_their_new_places(given_settings, path, value):
    for found in (resolve(given_settings), resolve({}, given_settings), InferenceConfig(**given_settings)):
        for key in path.split("."):
            found = getattr(found, key)
        assert found == value


def test_deprecated_keys_have_to_agree_with_the_new_ones():
    assert resolve({"mp_size": 2, "tp": {"tp_size": 2}}).tensor_parallel.tp_size == 2
    text = refused({"mp_size": 1}, {"tensor_parallel": TPConfig(tp_size=4)})
    assert text == "configuration: mp_size: 1, but tensor_parallel.tp_size, the same setting, is 4; keep " \
        "tensor_parallel.tp_size"  # fmt: skip
    assert "checkpoint_config.base_dir" in refused({"base_dir": "a", "checkpoint_config": {"base_dir": "b"}})


def test_zero_is_read_as_in_training():
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "cpu_offload_param": True, "sub_group_size": "1e6"}
    found = resolve({"zero": zero}).zero
    assert (found.stage, found.offload_param.device, found.sub_group_size) == (3, "cpu", 10**6)
    assert "zero.stge: unknown key" in refused({"zero": {"stge": 3}})


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_in_one_message():
    text = refused({"dtype": "fp7", "tp": {"tp_sise": 2}}, {"max_tokens": 0, 3: 4, "enable_cuda_graph": "no"})
    for line in (
        "dtype: expected",
        'tensor_parallel.tp_sise: unknown key (value 2); did you mean "tp_size"?',
        "max_out_tokens: must be at least 1",
        "a key must be a text, found 3",
        "enable_cuda_graph: expected true or false",
    ):
        assert line in text


def test_settings_that_contradict_each_other():
    assert "raise max_out_tokens" in refused({"min_tokens": 6, "max_tokens": 5})
    assert "injection_policy" in refused({"kernel_inject": True, "injection_policy": {torch.nn.Linear: "a"}})
    assert resolve({"kernel_inject": True, "injection_policy": {torch.nn.Linear: torch.nn.Module}})
    assert "keep one" in refused({"tp": {"mpu": GROUP, "tp_group": [0]}})


# -- effects -----------------------------------------------------------------------------------------------------------


def test_tables_name_keys_that_exist():
    known = {field.path for field in walk(InferenceConfig)}
    assert {*NO_EFFECT, *DEPENDENT} <= known


def test_what_does_nothing_is_said():
    assert find_sentences(resolve()) == []
    said = find_sentences(resolve({"use_triton": True, "mp_size": 2, "quant": 8, "tm": False}))
    assert said[0] == "mp_size is deprecated; use tensor_parallel.tp_size"
    assert [line.partition(" has no effect here: ")[0] for line in said[1:]] == [
        "use_triton", "triangular_masking", "quant.weight.q_groups",
    ]  # fmt: skip
    assert find_sentences(resolve({"quant": 8, "dtype": "int8"})) == []
    said = find_sentences(resolve({"zero": {"stage": 2}, "base_dir": "w", "moe": {"ep_group": GROUP, "ep_size": 2}}))
    assert [line.partition(" ")[0] for line in said] == ["moe.ep_group", "zero", "base_dir"]
    assert find_sentences(resolve({"zero": {"stage": 3}, "base_dir": "w", "checkpoint": "c"})) == []


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_schema_is_json_and_closed():
    document = json.loads(json.dumps(inference_schema()))
    assert document["additionalProperties"] is False
    assert set(document["properties"]) == set(InferenceConfig.model_fields)
    assert "torch.half" in document["properties"]["dtype"]["enum"]


def test_the_reference_page_is_up_to_date():
    assert [field.path for field in walk(InferenceConfig) if not field.description] == []
    page = inference_page()
    for kind, old, _ in ALIASES:
        assert old in page, f"{kind.__name__}: the description of the key does not say that it is also read as {old}"
    assert PAGE.read_text(encoding="utf-8") == page, (
        "run: mpispeed config schema --inference --markdown > docs/reference/inference-config.md"
    )
