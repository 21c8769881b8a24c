"""Blocks of experts of transformers' models in a run: made layers of ours where the config asks for it."""

from __future__ import annotations

import inspect
import re
from types import MethodType
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.expert.block_table import Described
from mpispeed.nn.expert.blocks import BlockExperts, find_blocks, replace_block
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.experts import ExpertParallel
    from mpispeed.config.root import Config

_SAVES = "transformers.modeling_utils"
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
_NAMES = {
    "router": "router_pattern",
    "experts": "expert_pattern",
    "shared": "shared_experts_pattern",
    "shared_gate": "shared_experts_gate_pattern",
}
_OPTIONS = {
    "k": "top_k",
    "score": "score_func",
    "renormalize": "route_norm",
    "weight_scale": "routed_scaling_factor",
    "groups": "num_expert_groups",
    "kept_groups": "num_limited_groups",
    "bias_rate": "load_balance_coeff",
}


def take_blocks(model: nn.Module, config: Config) -> None:
    """Make the model's blocks of experts layers of ours, if the section `expert_parallel` is on.

    Blocks that are such layers already get their ranks anew. A stage of a pipeline may have no block.

    Raises:
        ConfigError: names the block, or says that there is none.
    """
    section = config.expert_parallel
    if not section.enabled:
        return
    slices = _checked_slices(config)
    known = [layer for layer in model.modules() if isinstance(layer, BlockExperts)]
    for layer in known:
        layer.ep_size = section.autoep_size
    pattern = _checked(section.moe_layer_pattern)
    blocks = find_blocks(model, section.preset_model, pattern)
    if not blocks and not known and not isinstance(model, PipelineModule):
        what = "block of experts" if pattern is None else f"block whose name matches moe_layer_pattern {pattern!r}"
        msg = f"expert_parallel.enabled is true, and the model ({type(model).__name__}) has no {what}; remove the "
        msg += "section, or give the names of the blocks in moe_layer_pattern"
        raise ConfigError(msg)
    for name, row in blocks:
        block = model.get_submodule(name)
        made = replace_block(name, block, row, section.autoep_size, described(section), getattr(model, "config", None))
        made.slices_experts = slices > 1
    _guard_saving(model, section.autoep_size)


def _guard_saving(model: nn.Module, ep_size: int) -> None:
    """Let `save_pretrained` of transformers' models refuse to write part of the experts as if they were all."""
    for module in model.modules() if ep_size > 1 else ():
        is_one = any(each.__module__ == _SAVES and each.__name__ == "PreTrainedModel" for each in type(module).__mro__)
        if is_one and any(isinstance(layer, BlockExperts) for layer in module.modules()):
            vars(module)["save_pretrained"] = MethodType(_save_whole, module)


def _save_whole(model: Any, *args: Any, **keywords: Any) -> Any:
    """As the model's own `save_pretrained`.

    Raises:
        UsageError: what would be written has not all experts.
    """
    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, *args, **keywords).arguments.get("state_dict")
    state = model.state_dict() if given is None else given
    for path, layer in model.named_modules():
        start = f"{path}.{getattr(layer, 'experts_name', '')}."
        if isinstance(layer, BlockExperts) and any(
            name.startswith(start) and len(value) < layer.experts.num_experts for name, value in state.items()
        ):
            held = layer.experts.held
            msg = f"save_pretrained: this rank has experts {held.start} to {held.stop - 1} of {path}, and the state "
            msg += f"dict has not all {layer.experts.num_experts}; call engine.save_16bit_model(folder), or on all "
            msg += "ranks state = engine._consolidated_16bit_state_dict() and pass state_dict=state on rank 0. The "
            msg += "Trainer does the latter at ZeRO stage 3"
            raise UsageError(msg)
    return save(model, *args, **keywords)


def _checked_slices(config: Config) -> int:
    wanted, section = config.expert_parallel.expert_tensor_parallel_size, config.tensor_parallel
    slices = max(section.autotp_size, section.tensor_parallel.tp_size)
    if wanted not in (1, slices):
        msg = f"expert_parallel.expert_tensor_parallel_size is {wanted}, and tensor_parallel cuts layers over {slices} "
        msg += f"ranks: experts are cut over as many; use 1{f' or {slices}' if slices > 1 else ''}"
        raise ConfigError(msg)
    return wanted


def _checked(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        msg = f"expert_parallel.moe_layer_pattern {pattern!r} is no regular expression: {error}"
        raise ConfigError(msg) from None
    return pattern


def described(section: ExpertParallel) -> Described:
    """What a section says of blocks."""
    names: dict[str, Any] = {
        field: value for field, key in _NAMES.items() if (value := getattr(section, key)) is not None
    }
    weights = (section.expert_w1, section.expert_w2, section.expert_w3)
    if any(weights):
        if section.expert_w1 is None or section.expert_w2 is None:
            msg = "expert_parallel: expert_w1 and expert_w2 go together; expert_w3 is for a third tensor beside them"
            raise ConfigError(msg)
        names["weights"] = tuple(name for name in weights if name is not None)
    options = {field: getattr(section, key) for field, key in _OPTIONS.items()}
    activation = section.expert_activation
    return Described(
        names=names,
        has_shared=section.has_shared_experts,
        options={field: value for field, value in options.items() if value not in (None, "auto")},
        scale=section.route_scale,
        k_attribute=section.top_k_attr,
        count_attribute=section.num_experts_attr,
        activation=None if activation is None else _ACTIVATIONS.get(activation, activation),
        compute="auto" if section.use_grouped_mm else "loop",
    )
