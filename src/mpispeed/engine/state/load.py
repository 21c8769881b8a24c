"""Loading of checkpoints into an engine at its own layout: tensors, counters, schedule, data, generators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import rng
from mpispeed.base.errors import CheckpointError, ZeRORuntimeException
from mpispeed.base.events import Event
from mpispeed.base.rng import get_rng_tracker, reseed_slices
from mpispeed.base.units import format_list
from mpispeed.ckpt.format import objects, schema
from mpispeed.ckpt.format.errors import NoCheckpoint
from mpispeed.ckpt.format.logical import persistent_buffers
from mpispeed.ckpt.node_local.fetch import find_on_nodes
from mpispeed.ckpt.read.reader import Checkpoint, Opened, find
from mpispeed.engine.state.client_state import Restorer, windows_of
from mpispeed.engine.state.global_layout import (
    GlobalLayout,
    exchanging_run,
    named,
    names_by_group,
    require_named,
    slice_streams,
)
from mpispeed.engine.state.group_match import matched
from mpispeed.engine.state.rule_numbers import read_numbers
from mpispeed.engine.state.weights import load_by
from mpispeed.exchange.saved import NAMES_SHOWN, Loading
from mpispeed.optim.rule import MASK, KeepsCounts, KeepsNumbers, KeepsState, Matrixwise
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.state_dtypes import describe_codes
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from mpispeed.engine.build.parts import Parts
    from mpispeed.store.layout import Unit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Flags of `Engine.load_checkpoint`."""

    strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., None] | None = None
    data_state: bool = True
    client_types: Sequence[type] = ()


def load(
    parts: Parts, folder: str, tag: str | None, settings: LoadSettings
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint at this engine's layout. Collective over: all ranks."""
    comm, types = parts.mesh.world.comm, objects.by_name(settings.client_types)
    parts.sharding.meet("engine.load_checkpoint()")
    if parts.optimization is not None and not settings.module_only:
        parts.optimization.grads.clear()  # reductions under way write into states
    start = time.perf_counter()
    opened = open_together(parts, Path(folder), tag)
    if opened is None:
        return None, None
    with Source(opened, parts.plan.config.checkpoint.load_verify != "off") as source:
        with comm.together(CheckpointError):
            state = objects.restored(source.state(), types)
            if not settings.module_only:
                parts.features.check(state.get("features", {}), takes_data=settings.data_state)
            if parts.plan.config.checkpoint.load_verify == "full":
                source.verify_share(comm.rank, comm.size)
        _take(parts, source, state, settings)
        if not settings.module_only:
            with comm.together(CheckpointError):
                _take_progress(parts, source, state, settings)
            exchange = parts.optimization.exchange if parts.optimization is not None else None
            if settings.optimizer_states and exchange is not None and exchange.has_scaled_state:
                with comm.together(CheckpointError):  # the loss scale is here now
                    exchange.read_scaled(_loading(parts, source, state, GlobalLayout.of(parts)))
                exchange.spread_scaled()
    seconds = time.perf_counter() - start
    log.info("loaded %s in %.2f s", source.path, seconds)
    parts.bus.announce(Event.LOAD_END, path=str(source.path), tag=source.tag, seconds=seconds)
    return str(source.path), _left_over(state, settings) | dict(state.get("client", {}))


def _left_over(state: dict[str, Any], settings: LoadSettings) -> dict[str, Any]:
    """State that the checkpoint has and this load leaves out, for the caller; names as in the state tree."""
    if settings.module_only:
        return {name: value for name, value in state.items() if name not in ("client", "optimizer")}
    names = () if settings.lr_scheduler_states else ("lr_scheduler",)
    return {name: state[name] for name in names if name in state}


class Source(Checkpoint):
    """A checkpoint whose reads verify checksums if the config says so."""

    def __init__(self, opened: Opened, verifies: bool) -> None:
        super().__init__(opened)
        self._verifies = verifies

    def __enter__(self) -> Source:
        return self

    def read(self, name: str, slot: str, start: int, out: torch.Tensor, verify: bool = True) -> None:
        """As `Checkpoint.read`."""
        super().read(name, slot, start, out, verify and self._verifies)

    def verify_share(self, rank: int, size: int) -> None:
        """Verify the checksums of every `size`-th tensor.

        Raises:
            CorruptCheckpoint: names the first block that differs.
        """
        for tensor in list(self.tensors())[rank::size]:
            for _ in self.chunks(tensor):
                pass


def open_together(parts: Parts, folder: Path, tag: str | None) -> Opened | None:
    """Find the checkpoint and check its index; None, with a warning, if there is none.

    Rank 0 does so for all, unless every node has a copy of its own.

    Collective over: all ranks.

    Raises:
        CheckpointError: on every rank.
    """
    comm = parts.mesh.world.comm
    if parts.plan.config.checkpoint.use_node_local_storage:
        try:
            return find_on_nodes(comm, folder, tag)
        except NoCheckpoint as missing:
            _say_missing(comm.rank, missing)
            return None
    opened = None
    with comm.together(CheckpointError):
        if comm.rank == 0:
            try:
                opened = find(folder, tag)
            except NoCheckpoint as missing:
                _say_missing(comm.rank, missing)
    shared: Opened | None = comm.share(opened)
    if shared is not None:
        with comm.together(CheckpointError):
            if not (shared.path / schema.MODEL_FILE).is_file():
                msg = f"{shared.path} is on rank 0 and not here; load from a folder that all nodes share, or set "
                msg += "checkpoint.use_node_local_storage"
                raise CheckpointError(msg)
    return shared


def _say_missing(rank: int, missing: NoCheckpoint) -> None:
    if rank == 0:
        log.warning("%s", missing)


def _take_progress(parts: Parts, source: Checkpoint, state: dict[str, Any], settings: LoadSettings) -> None:
    """Load everything that is not a tensor: counters, schedule, position in the data, generators."""
    _take_counters(parts, state)
    if parts.optimization is not None:
        # An update counter that belongs to other state would spoil Adam's bias correction.
        seen = _updates_of_state(parts, source, state) if settings.optimizer_states else 0
        parts.counters.updates_before_state = parts.counters.update_count - seen
    parts.expect_step()
    if isinstance(parts.module, PipelineModule):
        parts.module.micro_offset = int(state.get("pipeline", {}).get("micro_offset", 0))
    if settings.lr_scheduler_states and parts.scheduler is not None and "lr_scheduler" in state:
        parts.scheduler.load_state_dict(state["lr_scheduler"])
    parts.features.load(state.get("features", {}), takes_data=settings.data_state)
    _take_generators(parts, source)


def _loading(parts: Parts, source: Checkpoint, state: dict[str, Any], whole: GlobalLayout) -> Loading:
    """The checkpoint, for the exchange."""
    seen = _updates_of_state(parts, source, state)
    return Loading(exchanging_run(parts, whole), source, state.get("optimizer", {}), seen)


def _updates_of_state(parts: Parts, source: Checkpoint, state: dict[str, Any]) -> int:
    """Updates that the stored optimizer state includes; 0 if this optimizer has to start afresh."""
    rule = parts.optimization.rule if parts.optimization else None
    saved = state.get("optimizer")
    if rule is None or saved is None or not set(rule.state_names) <= set(saved["slots"]):
        return 0
    return max((source.info(name).step for name in source.names()), default=0)


def _take_generators(parts: Parts, source: Checkpoint) -> None:
    """Restore generators exactly at the layout that saved; else seed them by the saved step and this rank's place.

    Ranks that differ only in their slice get equal default streams.
    """
    mesh = parts.mesh
    is_alike = all(source.layout.get(axis, size) == size for axis, size in parts.plan.axes.items())
    is_alike = is_alike and source.layout.get("sequence", 1) == parts.plan.sequence.size
    if source.rng_ranks == mesh.size and is_alike:
        states = source.rng_of(mesh.rank)
        rng.restore(states)
        _take_streams(states)
    elif source.rng_ranks and parts.plan.slots is not None:
        # Slots have numbers of their own; what a script draws beside them goes on as on the first rank.
        states = source.rng_of(0)
        rng.restore(states)
        if slice_streams() and source.layout.get("model", 1) != mesh["model"].size:
            reseed_slices(parts.plan.config.seed + source.global_step, mesh.index("model"))
    elif source.rng_ranks:
        rng.seed_all(parts.plan.config.seed, source.global_step, mesh.index(("pipe", "data")))
        if slice_streams():
            reseed_slices(parts.plan.config.seed + source.global_step, mesh.index("model"))


def _take_streams(states: Mapping[str, bytes]) -> None:
    """Restore random streams that differ between the slices of a layer."""
    tracker = get_rng_tracker()
    streams = tracker.get_states()
    for name, state in streams.items():
        for kind in state:
            if f"{name}.{kind}" in states:
                state[kind] = torch.frombuffer(bytearray(states[f"{name}.{kind}"]), dtype=torch.uint8)
    tracker.set_states(streams)


def _take(parts: Parts, source: Checkpoint, state: dict[str, Any], settings: LoadSettings) -> None:
    """Load weights, masters and optimizer state; every rank reads only its own ranges."""
    comm, whole_model = parts.mesh.world.comm, GlobalLayout.of(parts)
    require_named(parts, whole_model)
    if settings.custom_load_fn is not None:
        with comm.together(CheckpointError):
            _refuse_function(parts, whole_model)
            whole = _whole_state(source)
        load_by(parts, settings.custom_load_fn, whole, comm)
    names, buffer_names = _names_of_all(parts, whole_model)
    members = whole_model.names_by_group(names_by_group(parts))
    exchange = parts.optimization.exchange if parts.optimization is not None else None
    saved = state.get("optimizer", {})
    with comm.together(CheckpointError):
        if settings.custom_load_fn is None:
            _check_names(parts, source, names, buffer_names, settings.strict)
            _check_shapes(parts, source, whole_model)
            _read_module(parts, source, whole_model)
    with comm.together(ZeRORuntimeException):
        takes_groups = saved and settings.optimizer_states and not settings.module_only
        pairs = list(matched(parts, source, saved["param_groups"], members)) if takes_groups else []
    with comm.together(CheckpointError):
        if not settings.module_only:
            _forget_states(parts)
            if settings.optimizer_states:
                _tell_dtypes(parts, source, saved)
                _take_groups(parts, source, saved, pairs, whole_model)
                loading = _loading(parts, source, state, whole_model)
                _read_slots(parts, loading, saved, whole_model)
                _read_slots_of_features(parts, source, state, whole_model)
                if exchange is not None:
                    exchange.read(loading)
    if exchange is not None:
        if settings.module_only:
            exchange.drop_local()
        exchange.spread()
    parts.params.refresh()
    if parts.buffers is not None:
        parts.buffers.look()


def _tell_dtypes(parts: Parts, source: Checkpoint, saved: dict[str, Any]) -> None:
    """Log where states rest in other dtypes than they did when they were saved."""
    here, there = describe_codes(parts.plan.config), saved.get("dtypes")
    if there is not None and there != here and parts.mesh.rank == 0:
        log.info("states of %s rested as: %s; they are converted to: %s", source.path, there, here)


def _names_of_all(parts: Parts, whole: GlobalLayout) -> tuple[set[str], set[str]]:
    """Names of the parameters and buffers of all stages and experts. Collective over: the pipe axis."""
    own = whole.names(name for name, _ in parts.module.named_parameters())
    params = whole.over_stages((name, None) for name in own)
    buffers = whole.over_stages(named(persistent_buffers(parts.module)))
    return {name for name, _ in params}, {name for name, _ in buffers}


def _refuse_function(parts: Parts, whole: GlobalLayout) -> None:
    if parts.mesh["pipe", "model"].size > 1 or whole.experts.are_shared_out:
        msg = (
            "custom_load_fn writes into a whole model, and this one is cut over stages, slices or experts; leave it out"
        )
        raise CheckpointError(msg)


def _forget_states(parts: Parts) -> None:
    """Reset the optimizer state, so that states missing from the checkpoint begin at zero."""
    if parts.optimization is None:
        return
    for store in (parts.optimization.states, *parts.features.slots(parts.counters.applied_steps)):
        store.clear()
    parts.optimization.exchange.forget()
    if isinstance(parts.optimization.rule, KeepsState):
        parts.optimization.rule.forget()
    else:
        parts.optimization.rule.load_scalars({})


def _check_names(parts: Parts, source: Checkpoint, params: set[str], buffers: set[str], strict: bool) -> None:
    stored, stored_buffers = set(source.names()), set(source.buffers())
    for what, names in (
        ("lacks parameters of the model", sorted(params - stored)),
        ("has parameters the model lacks", sorted(stored - params)),
        ("lacks buffers of the model", sorted(buffers - stored_buffers)),
        ("has buffers the model lacks", sorted(stored_buffers - buffers)),
    ):
        if names:
            text = f"checkpoint {source.path} {what}: {format_list(names, NAMES_SHOWN)}"
            if strict:
                msg = text + "; load_module_strict=False loads what fits"
                raise CheckpointError(msg)
            log.log(logging.WARNING if parts.mesh.rank == 0 else logging.DEBUG, "%s", text)


def _check_shapes(parts: Parts, source: Checkpoint, whole: GlobalLayout) -> None:
    """Require equal shapes of tensors in both, and equal slices of layers that the model slices itself."""
    problem = whole.misfit(source)
    if problem:
        raise CheckpointError(problem)
    stored, stored_buffers = set(source.names()), set(source.buffers())
    params, buffers = dict(parts.module.named_parameters()), dict(persistent_buffers(parts.module))
    shapes: dict[str, tuple[str, tuple[int, ...], torch.Tensor]]
    shapes = {name: ("parameter", source.info(name).shape, params[name]) for name in params.keys() & stored}
    for name in buffers.keys() & stored_buffers:
        shapes[name] = ("buffer", source.stored(name, "buffer").shape, buffers[name])
    for name, (kind, shape, tensor) in sorted(shapes.items()):
        if tuple(shape) != whole.shape(name, tensor):
            msg = (
                f"{kind} {name} has shape {tuple(shape)} in {source.path} and {whole.shape(name, tensor)} in the "
                "model; build the model as it was when saved"
            )
            raise CheckpointError(msg)


def _weight_slot(source: Checkpoint, name: str) -> str:
    slots = source.slots(name)
    return "master" if "master" in slots else "weight16"


def _read_module(parts: Parts, source: Checkpoint, whole: GlobalLayout) -> None:
    stored, stored_buffers, params = set(source.names()), set(source.buffers()), parts.params
    for unit in parts.table.all_units:
        own, holder = params.shards.span(unit), params.shards.stored_master(unit)
        if not unit.is_trainable:
            own, holder = params.shards.rest_span(unit), params.shards.stored_shard(unit)
        ranges = [(e, common) for e, common in unit.layout.overlaps(own) if e.name in stored]
        if not ranges:
            continue
        if holder.is_swapped and all(entry.name in stored for entry in unit.layout.entries):
            values = torch.zeros(own.numel, dtype=holder.dtype)  # all of it but the padding comes from the checkpoint
        else:
            values = params.shards.master(unit) if unit.is_trainable else params.shards.rest(unit)
        rounds = unit.is_trainable and not parts.plan.config.zero_optimization.load_from_fp32_weights
        for entry, common in ranges:
            out = values[common.shifted(-own.start).slice]
            whole.read(source, entry.name, _weight_slot(source, entry.name), common.start - entry.offset, out)
            out.copy_(out.to(unit.states.compute) if rounds else out)
        put = params.shards.put_master if unit.is_trainable else params.shards.put_rest
        put(unit, values)
    with torch.no_grad():
        for name, param in parts.module.named_parameters():
            if parts.table.locate(param) is None and name in stored:
                whole.read(source, name, _weight_slot(source, name), 0, param.data.view(-1))
        for name, buffer in persistent_buffers(parts.module):
            if name in stored_buffers:
                whole.read(source, name, "buffer", 0, buffer.view(-1))


def _whole_state(source: Checkpoint) -> dict[str, torch.Tensor]:
    """The checkpoint's weights and buffers as an ordinary state dict, for `custom_load_fn`."""
    state = {name: source.read_whole(name, _weight_slot(source, name)) for name in source.names()}
    state |= {name: source.read_whole(name, "buffer") for name in source.buffers()}
    return state | {alias: state[name] for alias, name in source.aliases().items() if name in state}


def _take_groups(
    parts: Parts,
    source: Checkpoint,
    saved: dict[str, Any],
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    whole: GlobalLayout,
) -> None:
    """Load hyper-parameters of the groups (except masks) from those they go with, and scalars of the rule."""
    if not saved or parts.optimization is None:
        return
    is_same_rule = saved["name"] == parts.optimization.rule.name
    for group, stored in pairs:
        for key, value in stored.items():
            if key not in ("params", MASK) and (is_same_rule or key in group):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    rule = parts.optimization.rule
    if isinstance(rule, KeepsNumbers):
        read_numbers(parts, source, saved, whole)
    elif not isinstance(rule, KeepsState):
        rule.load_scalars(saved["scalars"]["of_rule"] if is_same_rule else {})


def _read_slots(parts: Parts, loading: Loading, saved: dict[str, Any], whole: GlobalLayout) -> None:
    """Load optimizer slots by name; parameters that have none in the file start afresh, with a warning."""
    optimization, source = parts.optimization, loading.source
    if optimization is None:
        return
    stored = set(source.names())
    rule = optimization.rule
    fresh: set[str] = set()
    if isinstance(rule, KeepsState):
        restorer = Restorer(parts, whole, source, saved)
        for window in windows_of(parts):
            unit, span = parts.table.units[window.key[0]], Span(window.key[2], window.key[2] + window.master.numel())
            overlaps = list(unit.layout.overlaps(span))
            slots = {slot: torch.zeros_like(window.master) for slot in restorer.slots_of(overlaps)}
            fresh |= _fill_slots(source, whole, unit, span, slots, stored)
            if not restorer.give(window, overlaps, slots):
                fresh |= {entry.name for entry, _ in overlaps}
    else:
        fresh = _fill_states(parts, source, saved, whole)
    optimization.exchange.check_fresh(loading, fresh)
    if fresh:
        text = "optimizer state of %d parameters is not in %s, or not of the parts on this rank; they start afresh"
        log.warning(text, len(fresh), source.path)


def _read_slots_of_features(parts: Parts, source: Checkpoint, state: dict[str, Any], whole: GlobalLayout) -> None:
    """Load the tensors that features keep beside the optimizer's; what is not in the file stays zero."""
    counted = state["engine"]
    for store in parts.features.slots(counted["global_steps"] - counted["skipped_steps"]):
        for unit in parts.table.units:
            span = parts.params.shards.span(unit)
            _fill_slots(source, whole, unit, span, store.of(unit), set(source.names()))


def _fill_states(parts: Parts, source: Checkpoint, saved: dict[str, Any], whole: GlobalLayout) -> set[str]:
    """Read the slots of a rule that keeps them in the engine's stores; return the parameters that lack one."""
    optimization, stored = parts.optimization, set(source.names())
    fresh: set[str] = set()
    if optimization is None:
        return fresh
    rule = optimization.rule
    needed = [
        rule.slots_of(g) if isinstance(rule, KeepsCounts | Matrixwise) else rule.state_names
        for g in optimization.groups
    ]
    restorer = Restorer(parts, whole, source, saved) if isinstance(rule, KeepsCounts) else None
    for unit in parts.table.units:
        for slot, holder in optimization.states.tensors(unit).items():
            if restorer is not None and not restorer.has(slot):
                continue
            values = holder.get()  # was cleared: nothing is read from a swap file
            lacking = _fill_slots(source, whole, unit, parts.params.shards.span(unit), {slot: values}, stored)
            holder.put(values)
            entries = [entry for entry in unit.layout.entries if entry.name in lacking]
            fresh |= {entry.name for entry in entries if slot in needed[entry.group]}
    if restorer is not None:
        restorer.give_counts(parts)
    return fresh


def _fill_slots(
    source: Checkpoint, whole: GlobalLayout, unit: Unit, span: Span, slots: Mapping[str, torch.Tensor], stored: set[str]
) -> set[str]:
    """Read every slot over the range `span` of a unit; return the parameters that lack a slot in the file."""
    fresh: set[str] = set()
    for slot, tensor in slots.items():
        for entry, common in unit.layout.overlaps(span):
            if entry.name in stored and slot in source.slots(entry.name):
                out = tensor[common.shifted(-span.start).slice]
                whole.read(source, entry.name, slot, common.start - entry.offset, out)
            else:
                fresh.add(entry.name)
    return fresh


def _take_counters(parts: Parts, state: dict[str, Any]) -> None:
    saved, counters = state["engine"], parts.counters
    counters.global_steps = saved["global_steps"]
    counters.global_samples = saved["global_samples"]
    counters.skipped_steps = saved["skipped_steps"]
    counters.micro_steps = counters.boundary_micro_steps = counters.pending_backwards = 0
    counters.updates_before_state = 0
    parts.scaler.load_state_dict(saved["loss_scaler"])
    if parts.optimization is not None:
        parts.optimization.grads.clear()
