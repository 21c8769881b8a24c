"""From settings to an engine: the steps in their order, one call each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.config.problems import Problem, refuse
from mpispeed.inference.casting import cast_model
from mpispeed.inference.engine import InferenceEngine, Limits
from mpispeed.inference.groups import make_mesh
from mpispeed.inference.slicing import slice_model
from mpispeed.plan.device import choose_device

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.inference import InferenceConfig, TPConfig
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)


class Missing(NamedTuple):
    """A setting whose step is not there yet, the test that it asks for it, and the sentence."""

    path: str
    asks: Callable[[InferenceConfig], Any]
    sentence: str


# Delete a row when its step is connected in `build`.
MISSING: tuple[Missing, ...] = (
    Missing("checkpoint", lambda c: c.checkpoint is not None, "weights are not read yet; load them into the model"),
    Missing("set_empty_params", lambda c: c.set_empty_params, "weights are not read yet; load them into the model"),
    Missing("save_mp_checkpoint_path", lambda c: c.save_mp_checkpoint_path, "slices are not written yet; remove it"),
    Missing("replace_with_kernel_inject", lambda c: c.replace_with_kernel_inject, "no layer is fused yet; use false"),
    Missing("dtype", lambda c: c.dtype == torch.int8, "integer weights are not available yet; use fp16, bf16 or fp32"),
    Missing(
        "quant.weight",
        lambda c: c.quant.weight.post_init_quant or c.quant.weight.quantized_initialization,
        "integer weights are not available yet; remove the section",
    ),
    Missing("zero", lambda c: c.streams_parameters, "parameters are not streamed yet; use tensor_parallel"),
    Missing("moe.ep_size", lambda c: c.moe.enabled and c.moe.ep_size > 1, "experts are not spread yet; use 1"),
)


def build(model: nn.Module, config: InferenceConfig, world: World) -> InferenceEngine:
    """Cast, slice, load, quantize and fuse a model as the settings ask, and make its engine.

    Args:
        model: changed in place.
        config: equal on all ranks but for groups.
        world: all ranks.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a setting cannot be had on this job or with this model.
    """
    _refuse_missing(config)
    device = choose_device(world, model)
    section = config.tensor_parallel
    mesh = make_mesh(world, _tensor_size(section), **_given_groups(section))
    tensor = mesh["model"].duplicate() if mesh["model"].size > 1 else mesh["model"]  # layers outlive the engine
    try:
        is_empty = _is_empty(model)
        if config.dtype != torch.int8:
            cast_model(model, config.dtype)
        report = slice_model(
            model,
            tensor,
            policy=config.injection_policy or config.injection_policy_tuple,
            grain=section.tp_grain_size,
            without_values=is_empty,
        )
        if report is not None:
            log.info("%s", report) if world.rank == 0 else log.debug("%s", report)
        _require_values(world.comm, model)
        if not config.keep_module_on_host:
            model.to(device)
        share_generators(tensor, device)
    except (ConfigError, UsageError):  # on all ranks
        if tensor.size > 1:
            tensor.close()
        mesh.close()
        raise
    limits = Limits(config.max_out_tokens, config.min_out_tokens)
    return InferenceEngine(model.eval(), mesh, limits=limits, config=config.config)


def _refuse_missing(config: InferenceConfig) -> None:
    problems = [Problem(row.path, row.sentence) for row in MISSING if row.asks(config)]
    if problems:
        raise refuse("init_inference", problems)


def _tensor_size(section: TPConfig) -> int | None:
    """Ranks that share each layer; None where the given groups are to say it."""
    if not section.enabled:
        return 1
    has_groups = section.mpu is not None or section.tp_group is not None
    return None if has_groups and section.tp_size == 1 else section.tp_size


def _given_groups(section: TPConfig) -> dict[str, Any]:
    return {"mpu": section.mpu, "tp_group": section.tp_group} if section.enabled else {}


def _is_empty(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _require_values(comm: Comm, model: nn.Module) -> None:
    """Refuse a model with parameters that have no values. Collective over: `comm`."""
    empty = next((name for name, tensor in model.named_parameters() if tensor.is_meta), "")
    text = f"init_inference: {empty} of the model is on torch's meta device and has no values; give a checkpoint"
    comm.agree(not empty, text, ConfigError)


def share_generators(comm: Comm, device: torch.device) -> None:
    """Give all ranks of a tensor group the state of its first rank's generators, so that they draw the same tokens.

    Collective over: `comm`.
    """
    if comm.size == 1:
        return
    torch.set_rng_state(comm.share(torch.get_rng_state()))
    if device.type != "cpu":
        module = devices.module_of(device)
        module.set_rng_state(comm.share(module.get_rng_state(device)), device)
