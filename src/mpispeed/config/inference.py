"""Settings of `init_inference`: sections, fields, defaults and second spellings of DeepSpeed's inference settings.

Source: the chapter "Inference Setup" of DeepSpeed's API reference (0.14.1). Made in code, each class takes the second
spellings too, and the forms of a value that the reference documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mpispeed.config.problems import Problem, show
from mpispeed.config.section import Positive, Section, subsection
from mpispeed.config.zero import ZeroOptimization


class DtypeEnum(Enum):
    """Number formats of a model that answers. `dtype` takes these, torch's dtypes and the texts of `DTYPES`."""

    fp16 = torch.float16
    fp32 = torch.float32
    bf16 = torch.bfloat16
    int8 = torch.int8


class MoETypeEnum(str, Enum):
    """Kinds of layers of experts."""

    standard = "standard"
    residual = "residual"


DTYPES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}
"""Format -> its names, each also behind "torch."."""

_BY_NAME = {name: dtype for dtype, names in DTYPES.items() for name in names}


def read_dtype(value: Any) -> Any:
    """The torch dtype of a text or of a member of `DtypeEnum`; anything else as it is."""
    if isinstance(value, DtypeEnum):
        return value.value
    if isinstance(value, str):
        return _BY_NAME.get(value.strip().lower().removeprefix("torch."), value)
    return value


def _require_dtype(value: Any) -> torch.dtype:
    found = read_dtype(value)
    if isinstance(found, torch.dtype) and found in DTYPES:
        return found
    wanted = f"one of {', '.join(names[0] for names in DTYPES.values())}, or the dtype of torch"
    raise PydanticCustomError("either_type", "Input should be a dtype", {"wanted": wanted})


def spread_quant(value: Any) -> Any:
    """The section that a number of groups, `(mlp_extra_grouping, groups)` or a switch stands for."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, int):
        return {"weight": {"q_groups": value}}
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return {"weight": {"mlp_extra_grouping": value[0], "q_groups": value[1]}}
    return value


def spread_moe(value: Any) -> Any:
    """The section that a switch stands for."""
    return {"enabled": value} if isinstance(value, bool) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value


FORWARDED = {
    "mp_size": "tensor_parallel.tp_size",
    "mpu": "tensor_parallel.mpu",
    "ep_size": "moe.ep_size",
    "ep_group": "moe.ep_group",
    "ep_mp_group": "moe.ep_mp_group",
    "moe_experts": "moe.moe_experts",
    "moe_type": "moe.type",
    "checkpoint_config.checkpoint_dir": "checkpoint",
    "checkpoint_config.save_mp_checkpoint_path": "save_mp_checkpoint_path",
    "checkpoint_config.base_dir": "base_dir",
}
"""Second place of a setting -> the place that is read."""

Dtype = Annotated[
    Any,
    BeforeValidator(_require_dtype),
    PlainSerializer(str, when_used="json"),
    WithJsonSchema({"enum": [prefix + name for name in _BY_NAME for prefix in ("", "torch.")]}),
]
Counts = Annotated[list[Positive], BeforeValidator(_as_list)]
MoEType = Annotated[MoETypeEnum, BeforeValidator(_lower)]


class Spelled(Section):
    """A section whose keys have second spellings."""

    ALIASES: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def take_second_spellings(cls, given: Any) -> Any:
        """Second spellings become the first; both at once have to agree."""
        if not isinstance(given, Mapping):
            return given
        settings, problems = rename(cls, given)
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        return settings


def rename(kind: type[Section], given: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """Entries of a section by the first spellings of their keys, and a problem for each key that is there twice.

    Args:
        kind: the class of the section.
        given: its entries, in any spelling.
        prefix: the path of the section and a dot, for problems.
    """
    aliases: Mapping[str, str] = getattr(kind, "ALIASES", {})
    settings: dict[str, Any] = {}
    problems: list[Problem] = []
    spelled: dict[str, Any] = {}
    for key, value in given.items():
        name = aliases.get(key, key)
        if name in settings and not is_same(settings[name], value):
            what = f"{show(value)}, but {prefix}{spelled[name]}, the same setting, is {show(settings[name])}"
            problems.append(Problem(f"{prefix}{key}", what, "keep one of them"))
            continue
        settings[name], spelled[name] = value, key
    return settings, problems


def forward(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Entries of all settings with those of `FORWARDED` at their new places too; they have to agree with what is there.

    Args:
        given: entries by first spellings; sections are mappings or made in code. Not changed.
    """
    settings, problems = dict(given), []
    for old, new in FORWARDED.items():
        value = _entry(settings, old)
        if value is None:
            continue
        there = _entry(settings, new)
        if there is None or is_same(there, value):
            section, _, key = new.rpartition(".")
            settings[section or key] = {**_entries(settings.get(section)), key: value} if section else value
        else:
            what = f"{show(value)}, but {new}, the same setting, is {show(there)}"
            problems.append(Problem(old, what, f"keep {new}"))
    return settings, problems


def is_same(one: Any, other: Any) -> bool:
    """True for equal values; objects that cannot be compared are the same if they are one object."""
    try:
        return one is other or bool(read_dtype(one) == read_dtype(other))
    except (TypeError, ValueError, RuntimeError):
        return False


def _entries(section: Any) -> dict[str, Any]:
    """What is given of a section; of one that was made in code too."""
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    spread = spread_moe(section)
    return dict(spread) if isinstance(spread, Mapping) else {}


def _entry(settings: Mapping[str, Any], path: str) -> Any:
    section, _, key = path.rpartition(".")
    kind = _HOMES.get(section)
    if kind is None:
        return settings.get(key)
    return rename(kind, _entries(settings.get(section)))[0].get(key)


class TPConfig(Spelled):
    """Tensor parallelism: layers sliced over neighbouring ranks."""

    enabled: bool = Field(True, description="Slice layers; false is as tp_size 1.")
    tp_size: Positive = Field(1, description="Ranks that share each layer. They have to divide the ranks of the job.")
    tp_grain_size: Positive = Field(
        64, description="Widths that are no heads are sliced at multiples of it, where every rank gets one."
    )
    mpu: Any = Field(
        None, description="An object with get_model_parallel_group() and its like; its groups share layers."
    )
    tp_group: Any = Field(
        None,
        description="The ranks that share layers with this one: a list of ranks, or a group of torch or mpi4py. All "
        "ranks give one, of equal sizes.",
    )


class MoEConfig(Spelled):
    """Layers of experts."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "moe_experts", "numExperts": "moe_experts", "expert_group": "ep_group",
        "expert_mp_group": "ep_mp_group",
    }  # fmt: skip

    enabled: bool = Field(True, description="Spread experts where ep_size asks for it; false is as ep_size 1.")
    ep_size: Positive = Field(1, description="Ranks that share the experts of a layer.")
    moe_experts: Counts = Field([1], description="Experts of a layer; also read as num_experts and numExperts.")
    type: MoEType = Field(MoETypeEnum.standard, description="Kind of layers of experts: standard or residual.")
    ep_mp_group: Any = Field(None, description="Ranks that share each expert; also read as expert_mp_group.")
    ep_group: Any = Field(None, description="Ranks that share the experts of a layer; also read as expert_group.")

    @model_validator(mode="before")
    @classmethod
    def take_switch(cls, given: Any) -> Any:
        """A switch becomes the section it stands for."""
        return spread_moe(given)

    @field_validator("moe_experts", mode="after")
    @classmethod
    def require_experts(cls, value: list[int]) -> list[int]:
        """Refuse a list without a number."""
        if not value:
            raise PydanticCustomError("either_type", "empty", {"wanted": "a number, or a list of at least one"})
        return value


class QuantConfig(Section):
    """Integers in place of numbers."""

    enabled: bool = Field(True, description="Quantize.")
    num_bits: Literal[4, 8] = Field(8, description="Bits of an integer, 4 or 8.")
    q_type: Literal["symmetric", "asymmetric"] = Field(
        "symmetric", description="Whether the range of the integers is centred at 0."
    )
    q_groups: Positive = Field(1, description="Groups of a tensor, each with its own scale.")


class WeightQuantConfig(QuantConfig):
    """Integers in place of weights."""

    mlp_extra_grouping: bool = Field(
        False,
        description="Twice the groups in layers of an MLP (mpispeed's name of the first entry of a tuple).",
    )
    quantized_initialization: dict[str, Any] = Field(
        default_factory=dict, description="Quantize each weight as soon as it is read: num_bits, group_size, group_dim."
    )
    post_init_quant: dict[str, Any] = Field(
        default_factory=dict,
        description="Part of a layer's path -> num_bits (4 or 8), group_size, group_dim, symmetric of its weight. For "
        "every dtype.",
    )


class ActivationQuantConfig(QuantConfig):
    """Integers in place of activations."""


class QKVQuantConfig(Section):
    """Quantization of the layers to queries, keys and values."""

    enabled: bool = Field(True, description="Quantize them too.")


class QuantizationConfig(Spelled):
    """Weights kept as integers. One number stands for q_groups, `(true, 8)` for mlp_extra_grouping and q_groups."""

    enabled: bool = Field(True, description="Quantize where dtype is int8.")
    activation: ActivationQuantConfig = subsection(ActivationQuantConfig, "Activations.")
    weight: WeightQuantConfig = subsection(WeightQuantConfig, "Weights.")
    qkv: QKVQuantConfig = subsection(QKVQuantConfig, "Queries, keys and values.")

    @model_validator(mode="before")
    @classmethod
    def take_numbers(cls, given: Any) -> Any:
        """A number or a pair becomes the section it stands for."""
        return spread_quant(given)


class InferenceCheckpointConfig(Section):
    """The three keys of a checkpoint in a section of their own, which DeepSpeed has too."""

    checkpoint_dir: str | None = Field(None, description="As `checkpoint`.")
    save_mp_checkpoint_path: str | None = Field(None, description="As the key of this name beside the section.")
    base_dir: str | None = Field(None, description="As the key of this name beside the section.")


class InferenceConfig(Spelled):
    """All settings of `init_inference`."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "kernel_inject": "replace_with_kernel_inject",
        "tp": "tensor_parallel",
        "tm": "triangular_masking",
        "ckpt_config": "checkpoint_config",
        "injection_dict": "injection_policy",
        "args": "config",
        "max_tokens": "max_out_tokens",
        "min_tokens": "min_out_tokens",
        "expert_group": "ep_group",
        "expert_mp_group": "ep_mp_group",
        "num_experts": "moe_experts",
        "numExperts": "moe_experts",
    }

    replace_with_kernel_inject: bool = Field(
        False, description="Replace layers of known models by fused ones; also read as kernel_inject."
    )
    dtype: Dtype = Field(
        "fp16",
        description="Format of the model: fp16, bf16, fp32 or int8, by torch's or DeepSpeed's names, or a dtype of "
        "torch. int8 keeps weights as integers and computes in the model's own format.",
    )
    tensor_parallel: TPConfig = subsection(TPConfig, "Layers sliced over ranks; also read as tp.")
    enable_cuda_graph: bool = Field(False, description="Replay forward passes as graphs of a GPU.")
    use_triton: bool = Field(False, description="Kernels of Triton.")
    triton_autotune: bool = Field(False, description="Tuning of these kernels.")
    zero: ZeroOptimization = subsection(
        ZeroOptimization, "Parameters that rest outside of the model, as in training: the section zero_optimization."
    )
    triangular_masking: bool = Field(True, description="Fused attention sees no later tokens; also read as tm.")
    moe: MoEConfig = subsection(MoEConfig, "Layers of experts; true and false stand for the key enabled.")
    quant: QuantizationConfig = subsection(QuantizationConfig, "Weights kept as integers.")
    checkpoint: str | dict[str, Any] | None = Field(
        None, description="Weights: a folder, a file, or a load policy (a dict, or the JSON file of one)."
    )
    base_dir: str = Field("", description="Folder that relative names of the load policy start at.")
    set_empty_params: bool = Field(
        False, description="The model's parameters get their values from the checkpoint alone, and need none before."
    )
    save_mp_checkpoint_path: str | None = Field(None, description="Folder for a copy of the weights as sliced.")
    checkpoint_config: InferenceCheckpointConfig = subsection(
        InferenceCheckpointConfig, "Another place for three keys; also read as ckpt_config."
    )
    return_tuple: bool = Field(True, description="Fused layers return a tuple, as layers of transformers do.")
    training_mp_size: Positive = Field(1, description="Ranks that shared each layer when the weights were saved.")
    replace_method: str = Field("auto", description="How layers are chosen.")
    injection_policy: dict[Any, Any] | None = Field(
        None,
        description="Class of layers -> names of its layers whose outputs are summed over ranks, or a policy of fused "
        "layers; also read as injection_dict.",
    )
    injection_policy_tuple: tuple[str, ...] | None = Field(
        None, description="Names of layers whose outputs are summed over ranks, in all blocks of the model."
    )
    config: Any = Field(None, description="What `engine.config` returns instead of the model's; also read as args.")
    max_out_tokens: Positive = Field(
        1024, description="Most tokens of a sequence, those of the prompt included; also read as max_tokens."
    )
    min_out_tokens: Positive = Field(
        1, description="New tokens that there has to be room for, at least; also read as min_tokens."
    )
    transposed_mode: bool = Field(False, description="Weights are stored transposed.")
    keep_module_on_host: bool = Field(False, description="Leave the parameters in host memory.")
    mp_size: Positive = Field(1, description="As tensor_parallel.tp_size (deprecated).")
    mpu: Any = Field(None, description="As tensor_parallel.mpu (deprecated).")
    ep_size: Positive = Field(1, description="As moe.ep_size (deprecated).")
    ep_group: Any = Field(None, description="As moe.ep_group (deprecated); also read as expert_group.")
    ep_mp_group: Any = Field(None, description="As moe.ep_mp_group (deprecated); also read as expert_mp_group.")
    moe_experts: Counts = Field(
        [1], description="As moe.moe_experts (deprecated); also read as num_experts and numExperts."
    )
    moe_type: MoEType = Field(MoETypeEnum.standard, description="As moe.type (deprecated).")

    @property
    def streams_parameters(self) -> bool:
        """True if parameters rest outside of the model and come when they are needed."""
        return self.zero.stage == 3

    @model_validator(mode="before")
    @classmethod
    def take_second_spellings(cls, given: Any) -> Any:
        """Second spellings become the first, deprecated keys also the new ones; what is there twice has to agree."""
        if not isinstance(given, Mapping):
            return given
        settings, problems = rename(cls, given)
        if not problems:
            settings, problems = forward(settings)
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        return settings


_HOMES: dict[str, type[Section]] = {
    "tensor_parallel": TPConfig,
    "moe": MoEConfig,
    "checkpoint_config": InferenceCheckpointConfig,
}
