"""The dtypes that follow from settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.precision import Policy, resolve

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Policy(F32, F32, F32, F32)),
        ({"fp16_enabled": True}, Policy(F16, F32, F32, F16)),
        ({"bf16_enabled": True}, Policy(BF16, F32, F32, BF16)),
        ({"model_dtype": F64}, Policy(F64, F64, F64, F64)),
        ({"model_dtype": BF16}, Policy(BF16, F32, F32, BF16)),
        ({"bf16_enabled": True, "model_dtype": F64}, Policy(BF16, F32, F32, BF16)),
        ({"bf16_enabled": True, "grad_accum_dtype": "bf16"}, Policy(BF16, BF16, F32, BF16)),
        ({"fp16_enabled": True, "communication_data_type": "FP32"}, Policy(F16, F32, F32, F32)),
        ({"grad_accum_dtype": "torch.float16", "communication_data_type": "bf16"}, Policy(F32, F16, F32, BF16)),
    ],
)
def test_resolve(options: dict[str, object], expected: Policy) -> None:
    assert resolve(**options) == expected


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("fp16", "float16", "half", "torch.float16", F16), F16),
        (("bf16", "bfloat16", "torch.bfloat16", "BF16"), BF16),
        (("fp32", "float32", "float", "torch.float32"), F32),
    ],
)
def test_every_spelling_of_a_dtype(names: tuple[object, ...], dtype: torch.dtype) -> None:
    assert {resolve(grad_accum_dtype=name).accumulate for name in names} == {dtype}


@pytest.mark.parametrize("name", ["int8", "fp8", 16])
@pytest.mark.parametrize("setting", ["grad_accum_dtype", "communication_data_type"])
def test_other_dtypes_are_refused_by_name(setting: str, name: object) -> None:
    with pytest.raises(ValueError, match=setting):
        resolve(**{setting: name})


def test_both_sixteen_bit_formats_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"fp16\.enabled and bf16\.enabled"):
        resolve(fp16_enabled=True, bf16_enabled=True)


def test_integer_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="int32"):
        resolve(model_dtype=torch.int32)


def test_policy_is_frozen() -> None:
    policy = resolve(bf16_enabled=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute = F32  # type: ignore[misc]
