"""From settings to an engine: the steps in their order, one call each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpispeed.base import rng
from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.config.problems import Problem, refuse
from mpispeed.inference.casting import cast_model, empty_model, is_empty, sharded_name
from mpispeed.inference.engine import InferenceEngine, Limits, MakeCache
from mpispeed.inference.experts import ExpertShares
from mpispeed.inference.fused import inject_kernels, split_policies
from mpispeed.inference.groups import make_mesh
from mpispeed.inference.in_step import InStep
from mpispeed.inference.quantized import Quantizer, options_of
from mpispeed.inference.slicing import slice_model
from mpispeed.inference.streaming import stream_model
from mpispeed.inference.weights import load_weights, save_sharded
from mpispeed.mesh.device_paths import choose, connect
from mpispeed.plan.device import choose_device

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.inference import InferenceConfig, TPConfig
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)


class Refused(NamedTuple):
    """A setting that cannot be had beside others, the test that it is asked for so, and the sentence."""

    path: str
    asks: Callable[[InferenceConfig], Any]
    sentence: str


def _codes_by_name(config: InferenceConfig) -> bool:
    weight = config.quant.weight
    return bool(weight.post_init_quant or weight.quantized_initialization)


_STREAMED_CODES = "parameters are streamed, and codes are not; use fp16, bf16 or fp32"

REFUSED: tuple[Refused, ...] = (
    Refused(
        "set_empty_params",
        lambda c: c.set_empty_params and c.checkpoint is None,
        "values have to come from a checkpoint, and none is given; set checkpoint",
    ),
    Refused(
        "save_mp_checkpoint_path",
        lambda c: c.save_mp_checkpoint_path and (c.streams_parameters or (c.moe.enabled and c.moe.ep_size > 1)),
        "no rank has a whole slice to write where parameters are streamed or experts are spread; remove it",
    ),
    Refused(
        "replace_with_kernel_inject",
        lambda c: c.streams_parameters and c.replace_with_kernel_inject,
        "parameters are streamed for one module after the other, and fused layers read several at once; use false",
    ),
    Refused("dtype", lambda c: c.streams_parameters and c.dtype == torch.int8, _STREAMED_CODES),
    Refused("quant.weight", lambda c: c.streams_parameters and _codes_by_name(c), _STREAMED_CODES),
    Refused(
        "moe.ep_size",
        lambda c: c.streams_parameters and c.moe.enabled and c.moe.ep_size > 1,
        "parameters are streamed, those of experts too; use 1",
    ),
    Refused(
        "tensor_parallel",
        lambda c: c.streams_parameters and any(_given_groups(c.tensor_parallel).values()),
        "parameters are streamed, and then ranks that share layers are neighbours; give tp_size instead of groups",
    ),
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
    _refuse_combinations(config)
    device = choose_device(world, model)
    _advise(config, device, is_first=world.rank == 0)
    section = config.tensor_parallel
    mesh = make_mesh(world, _tensor_size(section), **_given_groups(section))
    connect(mesh, device, choose(world, device))
    parts = Parts(mesh, config, device)
    try:
        with world.comm.together(ConfigError):
            _check_shards(model, config)
            if config.dtype != torch.int8:
                cast_model(model, config.dtype)
        if config.streams_parameters:
            parts.stream(model)
        else:
            parts.place(model)
    except (CheckpointError, ConfigError, UsageError):  # on all ranks
        parts.close()
        raise
    limits = Limits(config.max_out_tokens, config.min_out_tokens)
    return InferenceEngine(
        model.eval(),
        mesh,
        limits=limits,
        config=config.config,
        in_step=parts.in_step,
        make_cache=parts.make_cache,
        close=parts.close,
    )


class Parts:
    """The steps from a cast model to one that answers, and what they leave to be closed."""

    def __init__(self, mesh: Mesh, config: InferenceConfig, device: torch.device) -> None:
        self._mesh, self._config, self._device = mesh, config, device
        self._closing: list[Callable[[], object]] = [mesh.close]
        self.in_step: InStep | None = None
        self.make_cache: MakeCache | None = None

    def stream(self, model: nn.Module) -> None:
        """Shard the model over all ranks; its layers come when they run. Collective over: all ranks."""
        given, tensor = self._config.zero, self._mesh["model"]
        load = None
        if self._config.checkpoint is None:
            _require_values(self._mesh.world.comm, model)
        else:
            empty_model(model)
            load = partial(self._load, model, self._mesh[()])
        section = given.model_dump(include=given.model_fields_set)
        streamed = stream_model(model, section, tensor=tensor.size, load=load)
        self._closing.insert(0, streamed.close)
        self.in_step = streamed.in_step
        share_generators(tensor)

    def place(self, model: nn.Module) -> None:
        """Slice the model, fill it, share its experts out, put it on the device. Collective over: all ranks."""
        config, world, tensor = self._config, self._mesh.world, self._tensor_group()
        shares = self._find_experts(model)
        names, policies = split_policies(config.injection_policy)
        if config.set_empty_params:
            empty_model(model)
        self._slice(model, tensor, names or config.injection_policy_tuple)
        coder = None if shares is not None else self._make_coder(model, tensor)
        if config.checkpoint is not None:
            self._load(model, tensor, self._finish(model, shares, coder))
        _require_values(world.comm, model)
        if config.save_mp_checkpoint_path is not None:
            self._save(model, tensor, config.save_mp_checkpoint_path)
        if shares is not None:
            shares.share_out()
            self.in_step = InStep(model, shares.comm, self._device)
            coder = self._make_coder(model, tensor)
        if coder is not None:
            coder.finish_rest()
            self._tell(coder.report)
        if not config.keep_module_on_host:
            model.to(self._device)
        if config.replace_with_kernel_inject or policies:
            self._fuse(model, tensor, policies)
        share_generators(tensor)

    def _slice(self, model: nn.Module, tensor: Comm, policy: Any) -> None:
        """Slice layers over the tensor group. Collective over: `tensor`."""
        if tensor.size > 1 and not is_empty(model):
            model.to("cpu")  # slices are made in host memory
        grain = self._config.tensor_parallel.tp_grain_size
        report = slice_model(model, tensor, policy=policy, grain=grain, without_values=is_empty(model))
        if report is not None:
            self._tell(report)

    def _tell(self, report: object) -> None:
        """Write a report of what was done to layers to the log of the first rank."""
        log.log(logging.INFO if self._mesh.world.rank == 0 else logging.DEBUG, "%s", report)

    def _finish(
        self, model: nn.Module, shares: ExpertShares | None, coder: Quantizer | None
    ) -> Callable[[str], object] | None:
        """What is done with a module, by its path, as soon as it has its values."""
        if shares is not None:
            return lambda path: shares.finish(path, model.get_submodule(path))
        is_whole = self._config.save_mp_checkpoint_path is not None  # a copy has the weights themselves
        return None if coder is None or is_whole else coder.finish

    def _make_coder(self, model: nn.Module, tensor: Comm) -> Quantizer | None:
        """What codes weights, if the settings ask for it. Collective over: `tensor`."""
        given = self._config.quant.model_dump(exclude_unset=True)
        with tensor.together(ConfigError):
            options = options_of(given, is_int8=self._config.dtype == torch.int8)
            return None if options is None else Quantizer(model, options)

    def _fuse(self, model: nn.Module, tensor: Comm, policies: dict[Any, Any] | None) -> None:
        """Put fused layers into the model. Collective over: `tensor`."""
        config = self._config
        limits: dict[str, Any] = {"max_out_tokens": config.max_out_tokens, "min_out_tokens": config.min_out_tokens}
        causal = config.triangular_masking
        report = inject_kernels(model, tensor=tensor, triangular_masking=causal, policy=policies, **limits)
        self._tell(report)
        self.make_cache = report.cache

    def _load(self, model: nn.Module, tensor: Comm, finish: Callable[[str], object] | None) -> None:
        """Fill the model from the checkpoint. Collective over: all ranks."""
        world, source, base = self._mesh.world, self._config.checkpoint, self._config.base_dir
        if not isinstance(source, dict):
            source = str(Path(base) / str(source))
        loaded = load_weights(model, source, world.node, tensor, base_dir=base, finish=finish, everyone=world.comm)
        if world.rank == 0:
            log.info("%d tensors of %s in %.1f s", loaded.tensors, loaded.path, loaded.seconds)

    def _save(self, model: nn.Module, tensor: Comm, folder: str) -> None:
        """Write a copy of the slices, by the first tensor group. Collective over: all ranks."""
        with self._mesh.world.comm.together(CheckpointError):
            if self._mesh["data"].rank == 0:
                save_sharded(model, folder, tensor)

    def close(self) -> None:
        """Give back what the steps have made. Collective over: all ranks."""
        while self._closing:
            self._closing.pop(0)()

    def _tensor_group(self) -> Comm:
        """The ranks that share layers, with messages of their own: layers outlive the engine."""
        tensor = self._mesh["model"]
        return tensor.duplicate() if tensor.size > 1 else tensor

    def _find_experts(self, model: nn.Module) -> ExpertShares | None:
        section = self._config.moe
        if not section.enabled or section.ep_size == 1:
            return None
        shares = ExpertShares(model, section.ep_size, self._mesh["data"])
        self._closing.insert(0, shares.close)
        return shares


def _refuse_combinations(config: InferenceConfig) -> None:
    problems = [Problem(row.path, row.sentence) for row in REFUSED if row.asks(config)]
    if problems:
        raise refuse("init_inference", problems)


def _check_shards(model: nn.Module, config: InferenceConfig) -> None:
    """Refuse a model in shards where it has to be whole. Local."""
    name = "" if config.streams_parameters else sharded_name(model)
    if name:
        msg = (
            f"init_inference: {name} was built in zero.Init and is in shards; let parameters be streamed (the section "
            "zero), or build the model outside of it"
        )
        raise ConfigError(msg)


def _advise(config: InferenceConfig, device: torch.device, *, is_first: bool) -> None:
    if is_first and device.type == "cpu" and config.dtype == torch.float16:
        log.warning(
            "the model answers in fp16, in which most CPUs take many times as long over prompts as in bf16: set dtype "
            "to bf16, or to fp32"
        )


def _tensor_size(section: TPConfig) -> int | None:
    """Ranks that share each layer; None where the given groups are to say it."""
    if not section.enabled:
        return 1
    has_groups = section.mpu is not None or section.tp_group is not None
    return None if has_groups and section.tp_size == 1 else section.tp_size


def _given_groups(section: TPConfig) -> dict[str, Any]:
    return {"mpu": section.mpu, "tp_group": section.tp_group} if section.enabled else {}


def _require_values(comm: Comm, model: nn.Module) -> None:
    """Refuse a model with parameters that have no values. Collective over: `comm`."""
    empty = next((name for name, tensor in model.named_parameters() if tensor.is_meta), "")
    text = f"init_inference: {empty} of the model is on torch's meta device and has no values; give a checkpoint"
    comm.agree(not empty, text, ConfigError)


def share_generators(comm: Comm) -> None:
    """Give torch's default generators of all ranks the state of the first one's, so that they sample the same tokens.

    Collective over: `comm`.
    """
    rng.restore_torch(comm.share(rng.capture_torch()))
