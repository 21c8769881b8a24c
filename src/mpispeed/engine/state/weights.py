"""The model's weights as an ordinary state dict: gathered unit by unit, written to a file, loaded."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.base.units import format_list
from mpispeed.ckpt.format import schema
from mpispeed.engine.state.expert_weights import take_experts, with_all_experts
from mpispeed.engine.state.global_layout import GlobalLayout, require_common
from mpispeed.engine.state.whole_model import frozen_names, gather_model, gather_with_experts, kept_state
from mpispeed.exchange.saved import NAMES_SHOWN
from mpispeed.mesh.comm import Failures
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind
from mpispeed.sharding.update_windows import take_edited

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn

    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.comm import Comm
    from mpispeed.store.layout import Unit

log = logging.getLogger(__name__)


class Weights:
    """The weights of an engine's model."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict in compute dtype.

        For a pipeline it has this rank's stage only, for sliced layers its slices. Where parameters are sharded, or
        experts shared out over ranks, data rank 0 gets full copies of all and the others {}: units are gathered one at
        a time, and beside its experts no other rank holds more than one. With local updates it has copies of the common
        parameters.

        Collective over: the data axis.
        """
        layout = GlobalLayout.of(self._parts)
        if layout.experts.are_shared_out:
            require_common(self._parts.module, "the state dict of data rank 0 has one value for each name", layout)
            return gather_with_experts(self._parts, layout, exclude_frozen=exclude_frozen_parameters)
        if not self._parts.plan.states.param.is_replicated:
            return gather_state(self._parts, exclude_frozen=exclude_frozen_parameters)
        left_out = frozen_names(self._parts) if exclude_frozen_parameters else ()
        state: dict[str, Any] = self._parts.module.state_dict()
        state = {name: value for name, value in state.items() if name not in left_out}
        if self._parts.optimization and self._parts.optimization.exchange.is_apart:
            with self._parts.optimization.exchange.common():
                state = copy.deepcopy(state)  # keeps tied tensors tied
        return state

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """As `module_state_dict`; where ranks share experts out, the whole model on rank 0 and {} on the others.

        Collective over: all ranks.
        """
        if not self._parts.plan.placing.distinct:
            return self.module_state_dict(exclude_frozen_parameters)
        with self._parts.optimization.exchange.common() if self._parts.optimization else nullcontext():
            return gather_model(self._parts, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load weights and buffers from a state dict: parameters and, in full precision, masters.

        The values of data rank 0 count; the others may pass {}. Optimizer state stays. With `custom_load_fn` all ranks
        pass the same values: it is called as `custom_load_fn(src=state_dict, dst=module)` while every rank holds the
        full model. Local updates are dropped: parameters not given return to the common values.

        Args:
            checkpoint: a state dict, or {"module": a state dict}; with the experts of all ranks.
            strict: all names have to be there, and no others.
            custom_load_fn: writes the values into the module.
            fetch_z3_params: no effect: sharded parameters are always written.

        Collective over: the data axis.

        Raises:
            CheckpointError: (a RuntimeError) on every rank, if names or shapes do not fit.
            UsageError: on every rank, if data ranks have parameters of their own other than experts, or experts and a
                `custom_load_fn`, which would need a model with all of them.
        """
        layout = GlobalLayout.of(self._parts) if custom_load_fn is None else None
        require_common(self._parts.module, "a state dict that is loaded has one value for each name", layout)
        state_dict = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        if custom_load_fn is None:
            take_state(self._parts, state_dict, strict=strict)
        else:
            load_by(self._parts, custom_load_fn, state_dict, self._parts.mesh["data"])
        if self._parts.optimization:
            self._parts.optimization.exchange.drop_local()
        self._parts.params.refresh()
        self._parts.show_loaded()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights in compute dtype as one torch file (rank 0).

        Layers of all pipeline stages are in it, and whole tensors of sliced layers. Rank 0 holds a copy of the model
        in host memory meanwhile. Where parameters are sharded this needs "stage3_gather_16bit_weights_on_model_save":
        true; without it nothing is written and False is returned.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
        """
        return save_weights(self._parts, save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)


# -- out -----------------------------------------------------------------------------------------------------------


def gather_state(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any]:
    """A copy of the module's full state dict on data rank 0; {} on the others. Tied names share one copy.

    Collective over: the axes over which parameters are sharded, and the data axis.

    Raises:
        CheckpointError: on every rank, if rank 0 has no memory for the copies.
    """
    require_common(parts.module, "the gathered state dict of data rank 0 has one value for each name")
    state = kept_state(parts, exclude_frozen=exclude_frozen)
    copies: dict[int, torch.Tensor] = {}
    is_taker, failures = parts.mesh.index("data") == 0, Failures()
    wanted = {id(value) for value in state.values()}
    for unit in parts.table.all_units:
        # A failure is kept until all gathers are done: the others take part in them.
        full = (
            parts.params.shards.rest(unit) if unit.states.param.is_replicated else parts.params.shards.collected(unit)
        )
        if is_taker and failures.first is None:
            with failures.kept():
                _copy_unit(unit, full, wanted, copies)
        del full
    others = [value for value in state.values() if isinstance(value, torch.Tensor) and not _is_managed(parts, value)]
    plain, doing = (RuntimeError, MemoryError), "the state dict cannot be copied"
    with parts.mesh["data"].together(CheckpointError, doing=doing, plain=plain):
        failures.raise_first()
        if is_taker:
            _copy([(id(tensor), tensor) for tensor in others], copies)
    if not is_taker:
        return {}
    return {name: copies[id(value)] if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _copy_unit(unit: Unit, full: torch.Tensor, wanted: Collection[int], copies: dict[int, torch.Tensor]) -> None:
    """Clone the wanted parameters of a gathered unit."""
    pairs = zip(unit.layout.entries, unit.params, strict=True)
    _copy([(id(p), full[e.span.slice].view(e.shape)) for e, p in pairs if id(p) in wanted], copies)


def _copy(tensors: Sequence[tuple[int, torch.Tensor]], copies: dict[int, torch.Tensor]) -> None:
    """Clone each tensor by its key, without the flat buffer behind it."""
    copies.update((key, tensor.detach().clone()) for key, tensor in tensors)


def _is_managed(parts: Parts, tensor: torch.Tensor) -> bool:
    return parts.table.locate(tensor) is not None


def save_weights(parts: Parts, folder: str, filename: str, *, exclude_frozen: bool) -> bool:
    """See `Weights.save_16bit_model`. Collective over: all ranks."""
    is_cut = not parts.plan.states.param.is_replicated
    if is_cut and not parts.plan.config.zero_optimization.gather_16bit_weights_on_model_save:
        if parts.mesh.rank == 0:
            log.warning(
                '%s is not written: parameters are cut over ranks; set "stage3_gather_16bit_weights_on_model_save": '
                "true in zero_optimization to have them gathered, or use save_checkpoint", filename,
            )  # fmt: skip
        return False
    with parts.optimization.exchange.common() if parts.optimization else nullcontext():
        state = gather_model(parts, exclude_frozen=exclude_frozen)
    # torch reports a full disk as a RuntimeError
    plain, doing = (OSError, RuntimeError, ValueError), f"cannot write {filename} in {folder}"
    with parts.mesh.world.comm.together(CheckpointError, doing=doing, plain=plain):
        if parts.mesh.rank == 0:
            _write_whole(state, Path(folder), filename)
    return True


def _write_whole(state: dict[str, Any], folder: Path, filename: str) -> None:
    """Write the file under a random temporary name and rename it, so that it appears complete or not at all."""
    if Path(filename).name != filename:
        msg = f"save_filename {filename!r} is no plain file name; put the folder into save_dir"
        raise ValueError(msg)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{filename}.{secrets.token_hex(8)}.tmp"
    with temporary.open("xb") as file:  # "x" follows no link
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(folder / filename)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


# -- in ------------------------------------------------------------------------------------------------------------


def load_by(parts: Parts, function: Callable[..., Any], state: Mapping[str, Any], comm: Comm) -> None:
    """Let `function(src=state, dst=module)` write into the full model, and keep its writes.

    Every rank holds the full model meanwhile, in compute dtype, beside `state`. Parameters that are not written keep
    the precision of their masters.

    Collective over: the axes over which parameters are sharded, and `comm`, whose ranks fail together.

    Raises:
        CheckpointError: on every rank of `comm`, if the function fails on one, or swapped states cannot be written.
    """
    params, objects = parts.params, [id(param) for param in parts.module.parameters()]
    with params.whole(parts.table.all_units), torch.no_grad():
        before = {id(param): _trace_of(param) for param, _ in parts.table.all_places()}
        failures = Failures()
        with failures.kept():
            _call(function, state, parts.module, objects)
        for unit in parts.table.all_units if failures.first is None else ():
            with failures.kept():
                for param in unit.params:
                    if before[id(param)] != _trace_of(param):
                        take_edited(params, param)
            if failures.first is not None:
                break
            if unit.states.param.is_replicated:  # the function may have set `.data`: make parameters views again
                params.shards.unshard(unit, params.shards.rest(unit))
    with comm.together(CheckpointError):
        failures.raise_first()


def _call(function: Callable[..., Any], state: Mapping[str, Any], module: nn.Module, objects: list[int]) -> None:
    """Let the function write; `objects` are the parameters that the module has to keep."""
    try:
        function(src=state, dst=module)
        if objects != [id(param) for param in module.parameters()]:
            _refuse_new_objects()
    except Exception as error:  # anything may go wrong in there
        msg = f"custom_load_fn failed: {type(error).__name__}: {error}"
        raise CheckpointError(msg) from error


def _trace_of(param: torch.Tensor) -> tuple[int, int, bytes]:
    """A fingerprint that changes with any write: in place, through `.data`, or by other data."""
    values = schema.as_bytes(param.detach().contiguous().reshape(-1).cpu())
    return param._version, param.data_ptr(), hashlib.blake2b(values, digest_size=16).digest()


def _refuse_new_objects() -> None:
    msg = "it put new parameter objects into the model; copy values into those that are there (without assign=True)"
    raise UsageError(msg)


def take_state(parts: Parts, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load masters, frozen parameters and buffers from data rank 0, one unit at a time.

    Collective over: the data axis.

    Raises:
        CheckpointError: on every rank, if names or shapes do not fit, or swapped states cannot be written.
        UsageError: states that are changed were taken away by `engine.offload_states`.
    """
    parts.params.require((Kind.lp_params, Kind.hp_params), "engine.load_module_state_dict()")
    comm = parts.mesh["data"]
    own, layout = dict(parts.module.state_dict(keep_vars=True)), GlobalLayout.of(parts)
    whole_model = with_all_experts(layout, own)
    with comm.together(CheckpointError):
        if comm.rank == 0:
            _refuse_misfit(whole_model, state, strict=strict)
    given = {id(own[name]): state[name] for name in state.keys() & own.keys() if isinstance(own[name], torch.Tensor)}
    names = comm.share(sorted(state.keys() & whole_model.keys()))
    taken = {id(own[name]) for name in names if name in own and not layout.experts.differ(name)}
    failures = Failures()  # kept until all broadcasts are done: the others take part in them
    for unit in parts.table.all_units:
        _take_unit(parts, unit, given, taken, failures)
    take_experts(parts, layout, own, {name: state.get(name) for name in names if layout.experts.differ(name)}, failures)
    with comm.together(CheckpointError):
        failures.raise_first()
    for tensor in {id(v): v for v in own.values() if isinstance(v, torch.Tensor)}.values():
        if id(tensor) in taken and not _is_managed(parts, tensor):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            if comm.rank == 0:
                whole.copy_(given[id(tensor)])
            comm.broadcast(whole)
            tensor.data.copy_(whole)
    extra = {name: state[name] for name in names if name in state and not isinstance(whole_model[name], torch.Tensor)}
    for name, value in comm.share(extra).items():
        if name not in own:  # of an expert on another rank
            continue
        parts.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _take_unit(
    parts: Parts, unit: Unit, given: Mapping[int, torch.Tensor], taken: Collection[int], failures: Failures
) -> None:
    """Broadcast one unit and store this rank's part. Collective over: the data axis."""
    items = [(e, p) for e, p in zip(unit.layout.entries, unit.params, strict=True) if id(p) in taken]
    if not items:
        return
    comm, params = parts.mesh["data"], parts.params
    flat = torch.zeros(unit.layout.padded, dtype=unit.states.full if unit.is_trainable else unit.states.compute)
    with failures.kept():
        for entry, param in items if comm.rank == 0 else ():
            flat[entry.span.slice].copy_(given[id(param)].detach().reshape(-1))
    comm.broadcast(flat)
    with failures.kept():
        span, target = params.shards.span(unit), params.shards.master(unit)
        if not unit.is_trainable:
            span, target = params.shards.rest_span(unit), params.shards.rest(unit)
        for entry, _ in items:
            common = entry.span.intersect(span)
            if common.numel:
                target[common.shifted(-span.start).slice].copy_(flat[common.slice])
        put = params.shards.put_master if unit.is_trainable else params.shards.put_rest
        put(unit, target)


def _refuse_misfit(own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a `state` that does not fit a model of `own`; without `strict`, other names are only logged.

    Raises:
        CheckpointError: the names or the shapes differ.
    """
    found = []
    # One name of tied parameters is enough.
    given = {id(own[name]) for name in own.keys() & state.keys()}
    lacking = {name for name, value in own.items() if id(value) not in given}
    for what, names in (("lacks", lacking), ("has unknown", state.keys() - own.keys())):
        if names:
            found.append(f"the state dict {what} {format_list(sorted(names), NAMES_SHOWN)}")
    if found and not strict:
        log.warning("%s", "; ".join(found))
        found = []
    elif found:
        found.append("strict=False loads what fits")
    for name in sorted(own.keys() & state.keys()):
        ours, theirs = own[name], state[name]
        if not isinstance(ours, torch.Tensor):
            continue
        if not isinstance(theirs, torch.Tensor):
            found.append(f"{name} is a {type(theirs).__name__} in the state dict, not a tensor")
        elif ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)} in the model and {tuple(theirs.shape)} in the state dict"
            found.append(f"{name} has shape {shapes}")
    if found:
        raise CheckpointError("; ".join(found))
