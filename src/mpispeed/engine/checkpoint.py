"""What an engine writes to a checkpoint and how it takes it back: logical tensors, counters, generators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import rng
from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.base.events import Event
from mpispeed.ckpt.errors import NoCheckpoint
from mpispeed.ckpt.load import Checkpoint, open_checkpoint
from mpispeed.ckpt.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.save import SaveOptions
from mpispeed.ckpt.save import save as save_files
from mpispeed.ckpt.tags import check_same_tag
from mpispeed.engine.placements import DATA
from mpispeed.optim.rule import KeepsState
from mpispeed.store.layout import Span
from mpispeed.store.move import own_span
from mpispeed.zero.units import tied_names
from mpispeed.zero.walk import Walker

if TYPE_CHECKING:
    from mpispeed.engine.engine import Engine
    from mpispeed.engine.parts import Parts
    from mpispeed.optim.rule import Window
    from mpispeed.store.layout import Entry
    from mpispeed.store.table import Unit

log = logging.getLogger(__name__)

NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Flags of `Engine.save_checkpoint`."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Flags of `Engine.load_checkpoint`."""

    strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., None] | None = None


# -- save --------------------------------------------------------------------------------------------------------


def save(engine: Engine, folder: str, tag: str | None, client_state: dict[str, Any], settings: SaveSettings) -> bool:
    """Write one checkpoint. Collective over: all ranks."""
    parts, comm = engine.parts, engine.mesh.world.comm
    start = time.perf_counter()
    tag = f"global_step{parts.counters.global_steps}" if tag is None else str(tag)
    tag = check_same_tag(comm, tag, parts.plan.config.checkpoint.tag_validation)
    windows = _windows(parts)
    slots = _slots(parts, windows)
    report = save_files(
        comm,
        Path(folder),
        tag,
        params=_param_infos(parts, settings),
        tensors=list(_tensors(parts, windows, slots, settings)),
        aliases=tied_names(parts.module),
        state=_state(parts, windows, slots, client_state),
        config_json=parts.plan.config.model_dump_json(),
        rng=rng.capture(),
        layout={**parts.plan.axes, "stage": parts.plan.stage, "world_size": parts.plan.world_size},
        options=SaveOptions(overwrite=settings.overwrite, save_latest=settings.save_latest),
    )
    seconds = time.perf_counter() - start
    log.info("saved %s in %.2f s", report.path, seconds)
    engine.bus.announce(Event.SAVE_END, path=str(report.path), tag=tag, seconds=seconds, bytes=report.size_bytes)
    return True


def _windows(parts: Parts) -> list[Window]:
    optimization = parts.optimization
    if optimization is None:
        return []
    walker = Walker(parts.params, optimization.grads, optimization.states, per_parameter=optimization.rule.wants_whole)
    return list(walker.windows(optimization.groups, parts.counters.update_count))


def _window_slots(parts: Parts, window: Window) -> dict[str, torch.Tensor]:
    rule = parts.optimization.rule if parts.optimization else None
    return rule.slots(window.key) if isinstance(rule, KeepsState) else window.state


def _slots(parts: Parts, windows: list[Window]) -> list[list[str]]:
    """Slot names of each parameter group that any rank holds.

    Collective over: all ranks, for rules that make their slots themselves.
    """
    if parts.optimization is None:
        return []
    groups = parts.optimization.groups
    if not isinstance(parts.optimization.rule, KeepsState):
        return [list(parts.optimization.rule.state_names) for _ in groups]
    own: list[set[str]] = [set() for _ in groups]
    for window in windows:
        own[window.key[1]].update(_window_slots(parts, window))
    everyone = parts.mesh.world.comm.gather_objects(own)
    return [sorted(set().union(*names)) for names in zip(*everyone, strict=True)]


def _param_infos(parts: Parts, settings: SaveSettings) -> list[ParamInfo]:
    infos = []
    step = parts.counters.update_count
    for name, param in parts.module.named_parameters():
        place = parts.table.find(param)
        if place is not None:
            compute = parts.params.dtypes(place.unit)[0]
            infos.append(ParamInfo(name, tuple(param.shape), compute, "trainable", place.entry.group, step))
        elif not settings.exclude_frozen_parameters:
            infos.append(ParamInfo(name, tuple(param.shape), param.dtype, "frozen", -1, 0))
    return infos


def _tensors(
    parts: Parts, windows: list[Window], slots: list[list[str]], settings: SaveSettings
) -> Iterator[LogicalTensor]:
    """Every tensor of the checkpoint, in the same order on every rank, with this rank's pieces."""
    states: dict[tuple[str, str], list[Piece]] = {}
    for window in windows:
        unit = parts.table.units[window.key[0]]
        span = Span(window.key[2], window.key[2] + window.master.numel())
        for slot, tensor in _window_slots(parts, window).items():
            for entry, common in unit.layout.overlaps(span.intersect(_share(parts, unit))):
                local = common.shifted(-span.start).slice
                states.setdefault((entry.name, slot), []).append(
                    Piece(common.start - entry.offset, tensor.reshape(-1)[local])
                )
    rank = parts.mesh.rank
    for name, param in parts.module.named_parameters():
        place = parts.table.find(param)
        if place is None:
            if not settings.exclude_frozen_parameters:
                yield _by_rank_0(name, "weight16", param, rank)
            continue
        shape = tuple(param.shape)
        dtype = parts.params.dtypes(place.unit)[1]
        yield LogicalTensor(name, "master", shape, dtype, _master_pieces(parts, place.unit, place.entry))
        for slot in slots[place.entry.group]:
            yield LogicalTensor(name, slot, shape, dtype, tuple(states.get((name, slot), ())))
    for name, buffer in _persistent_buffers(parts.module):
        yield _by_rank_0(name, "buffer", buffer, rank)


def _by_rank_0(name: str, slot: str, tensor: torch.Tensor, rank: int) -> LogicalTensor:
    pieces = (Piece(0, tensor.detach().contiguous().reshape(-1)),) if rank == 0 else ()
    return LogicalTensor(name, slot, tuple(tensor.shape), tensor.dtype, pieces)


def _share(parts: Parts, unit: Unit) -> Span:
    """The range this rank writes: an equal cut even where masters are whole, so that all ranks write."""
    return own_span(parts.mesh, DATA, unit.layout.padded)


def _master_pieces(parts: Parts, unit: Unit, entry: Entry) -> tuple[Piece, ...]:
    common = entry.span.intersect(_share(parts, unit))
    if not common.numel:
        return ()
    local = common.shifted(-parts.params.span(unit).start).slice
    return (Piece(common.start - entry.offset, parts.params.master(unit)[local]),)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in names:
            yield name, buffer


def _scalars(parts: Parts, windows: list[Window]) -> dict[str, Any]:
    """State that is no flat slot.

    One set per parameter group holds for every cut; where masters are whole there is also one per window, for rules
    whose scalars differ between parameters.

    Collective over: all ranks, for rules that keep their state themselves.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsState):
        return {"by_group": {}, "by_window": rule.scalars() if rule else {}}
    own: dict[str, dict[str, Any]] = {}
    for window in windows:
        numbers = {name: _number(value) for name, value in rule.window_scalars(window.key).items()}
        own.setdefault(str(window.key[1]), {k: v for k, v in numbers.items() if v is not None})
    merged: dict[str, dict[str, Any]] = {}
    for groups in parts.mesh.world.comm.gather_objects(own):
        for group, values in groups.items():
            merged.setdefault(group, values)
    return {"by_group": merged, "by_window": rule.scalars() if parts.params.placement.is_whole else {}}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value


def _state(parts: Parts, windows: list[Window], slots: list[list[str]], client_state: dict[str, Any]) -> dict[str, Any]:
    counters = parts.counters
    state: dict[str, Any] = {
        "engine": {
            "global_steps": counters.global_steps,
            "global_samples": counters.global_samples,
            "skipped_steps": counters.skipped_steps,
            "micro_steps": counters.micro_steps,
            "loss_scaler": parts.scaler.state_dict(),
        },
        "client": client_state,
    }
    optimization = parts.optimization
    if optimization is not None:
        names = {id(param): name for name, param in parts.module.named_parameters()}
        members: list[list[str]] = [[] for _ in optimization.groups]
        for param, place in parts.table.places():
            members[place.entry.group].append(names[id(param)])
        state["optimizer"] = {
            "name": optimization.rule.name,
            "slots": sorted(set().union(*slots)),
            "scalars": _scalars(parts, windows),
            "param_groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "params": members[index]}
                for index, group in enumerate(optimization.groups)
            ],
        }
    if parts.scheduler is not None:
        state["lr_scheduler"] = _plain_scheduler(parts.scheduler.state_dict())
    if parts.loader is not None:
        # Micro-batches since the last boundary left no trace but their gradients, which are not saved: replay them.
        state["data_sampler"] = parts.loader.state_dict(unused_batches=counters.pending_backwards)
    return state


def _plain_scheduler(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without callables (torch keeps lambdas out of it too, as None)."""
    return {key: value for key, value in state.items() if not callable(value)}


# -- load --------------------------------------------------------------------------------------------------------


def load(
    engine: Engine, folder: str, tag: str | None, settings: LoadSettings
) -> tuple[str | None, dict[str, Any] | None]:
    """Take a checkpoint back at this engine's layout. Collective over: all ranks."""
    parts, comm = engine.parts, engine.mesh.world.comm
    start = time.perf_counter()
    try:
        source = open_checkpoint(Path(folder), tag)
        problem = ""
    except NoCheckpoint as missing:
        source, problem = None, f"none:{missing}"
    except CheckpointError as error:
        source, problem = None, str(error)
    problems = [p for p in comm.gather_objects(problem) if p]
    if len(problems) == comm.size and all(p.startswith("none:") for p in problems):
        if parts.mesh.rank == 0:
            log.warning("no checkpoint in %s: nothing is loaded", folder)
        return None, None
    _agree(comm, problems[0].removeprefix("none:") if problems else "")
    if source is None:  # not reached: _agree raises; tells the type checker so
        return None, None
    with source:
        _take(parts, source, settings)
        state = source.state()
        if not settings.module_only:
            _take_progress(parts, source, state, settings)
    seconds = time.perf_counter() - start
    log.info("loaded %s in %.2f s", source.path, seconds)
    engine.bus.announce(Event.LOAD_END, path=str(source.path), tag=source.tag, seconds=seconds)
    return str(source.path), dict(state.get("client", {}))


def _take_progress(parts: Parts, source: Checkpoint, state: dict[str, Any], settings: LoadSettings) -> None:
    """Everything that is no tensor: counters, schedule, place in the data, generators."""
    _take_counters(parts, state)
    if parts.optimization is not None:
        # An update counter that belongs to other state would spoil Adam's bias correction.
        seen = _updates_of_state(parts, source, state) if settings.optimizer_states else 0
        parts.counters.updates_before_state = parts.counters.update_count - seen
    if settings.lr_scheduler_states and parts.scheduler is not None and "lr_scheduler" in state:
        parts.scheduler.load_state_dict(state["lr_scheduler"])
    if parts.loader is not None and "data_sampler" in state:
        parts.loader.load_state_dict(state["data_sampler"])
    _take_generators(parts, source)


def _updates_of_state(parts: Parts, source: Checkpoint, state: dict[str, Any]) -> int:
    """Updates that the optimizer state in the file has seen; 0 if this optimizer has to start afresh."""
    rule = parts.optimization.rule if parts.optimization else None
    saved = state.get("optimizer")
    if rule is None or saved is None or not set(rule.state_names) <= set(saved["slots"]):
        return 0
    return max((source.info(name).step for name in source.names()), default=0)


def _take_generators(parts: Parts, source: Checkpoint) -> None:
    """Exact states on as many ranks as saved; else fresh ones, seeded by the saved step and this rank."""
    rank, size = parts.mesh.rank, parts.mesh.size
    states = {kind: source.rng(kind) for kind in source.rng_kinds()}
    if all(len(ranks) == size for ranks in states.values()):
        rng.restore({kind: ranks[rank] for kind, ranks in states.items()})
    else:
        rng.seed_all(parts.plan.config.seed, source.global_step, rank)


def _agree(comm: Any, problem: str) -> None:
    comm.agree(not problem, problem, CheckpointError)


def _take(parts: Parts, source: Checkpoint, settings: LoadSettings) -> None:
    """Weights, masters and optimizer state; every rank reads only its own ranges."""
    comm, problem = parts.mesh.world.comm, ""
    takes_optimizer = settings.optimizer_states and not settings.module_only and parts.optimization is not None
    try:
        if settings.custom_load_fn is None:
            _check_names(parts, source, settings.strict)
            _read_module(parts, source)
        else:
            with torch.no_grad():
                settings.custom_load_fn(src=_whole_state(source), dst=parts.module)
            parts.params.refresh_masters()
        if takes_optimizer:
            _take_groups(parts, source)
            _read_slots(parts, source)
    except (CheckpointError, ConfigError, OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)
    _agree(comm, problem)
    parts.params.refresh()


def _check_names(parts: Parts, source: Checkpoint, strict: bool) -> None:
    buffers = dict(_persistent_buffers(parts.module))
    params = dict(parts.module.named_parameters())
    stored, stored_buffers = set(source.names()), set(source.buffers())
    for what, names in (
        ("lacks parameters of the model", sorted(params.keys() - stored)),
        ("has parameters the model lacks", sorted(stored - params.keys())),
        ("lacks buffers of the model", sorted(buffers.keys() - stored_buffers)),
        ("has buffers the model lacks", sorted(stored_buffers - buffers.keys())),
    ):
        if names:
            rest = len(names) - NAMES_SHOWN
            shown = ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
            text = f"checkpoint {source.path} {what}: {shown}"
            if strict:
                msg = text + "; load_module_strict=False loads what fits"
                raise CheckpointError(msg)
            log.warning("%s", text)
    shapes: dict[str, tuple[str, tuple[int, ...], torch.Tensor]]
    shapes = {name: ("parameter", source.info(name).shape, params[name]) for name in params.keys() & stored}
    for name in buffers.keys() & stored_buffers:
        shapes[name] = ("buffer", source.stored(name, "buffer").shape, buffers[name])
    for name, (kind, shape, tensor) in sorted(shapes.items()):
        if tuple(shape) != tuple(tensor.shape):
            msg = (
                f"{kind} {name} has shape {tuple(shape)} in {source.path} and {tuple(tensor.shape)} in the model; "
                "build the model as it was when saved"
            )
            raise CheckpointError(msg)


def _weight_slot(source: Checkpoint, name: str) -> str:
    slots = source.slots(name)
    return "master" if "master" in slots else "weight16"


def _read_module(parts: Parts, source: Checkpoint) -> None:
    stored = set(source.names())
    for unit in parts.table.units:
        own = parts.params.span(unit)
        for entry, common in unit.layout.overlaps(own):
            if entry.name in stored:
                out = parts.params.master(unit)[common.shifted(-own.start).slice]
                source.read(entry.name, _weight_slot(source, entry.name), common.start - entry.offset, out)
    with torch.no_grad():
        for name, param in parts.module.named_parameters():
            if parts.table.find(param) is None and name in stored:
                source.read(name, _weight_slot(source, name), 0, param.data.view(-1))
        stored_buffers = set(source.buffers())
        for name, buffer in _persistent_buffers(parts.module):
            if name in stored_buffers:
                source.read(name, "buffer", 0, buffer.view(-1))


def _whole_state(source: Checkpoint) -> dict[str, torch.Tensor]:
    """The checkpoint's weights and buffers as an ordinary state dict, for `custom_load_fn`."""
    state = {name: source.read_whole(name, _weight_slot(source, name)) for name in source.names()}
    state |= {name: source.read_whole(name, "buffer") for name in source.buffers()}
    return state | {alias: state[name] for alias, name in source.aliases().items() if name in state}


def _take_groups(parts: Parts, source: Checkpoint) -> None:
    """Hyper-parameters of the groups; groups are matched by order."""
    saved = source.state().get("optimizer")
    if saved is None or parts.optimization is None:
        return
    groups = parts.optimization.groups
    if len(saved["param_groups"]) != len(groups):
        msg = (
            f"checkpoint {source.path} has {len(saved['param_groups'])} parameter groups and the optimizer "
            f"{len(groups)}; group the parameters alike, or load with load_optimizer_states=False"
        )
        raise CheckpointError(msg)
    is_same_rule = saved["name"] == parts.optimization.rule.name
    for group, stored in zip(groups, saved["param_groups"], strict=True):
        for key, value in stored.items():
            if key != "params" and (is_same_rule or key in group):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    if parts.params.placement.is_whole or not isinstance(parts.optimization.rule, KeepsState):
        parts.optimization.rule.load_scalars(saved["scalars"]["by_window"])


def _read_slots(parts: Parts, source: Checkpoint) -> None:
    """Optimizer slots by name; a parameter without them in the file starts afresh, with a warning."""
    optimization = parts.optimization
    if optimization is None:
        return
    saved = source.state().get("optimizer", {})
    stored = set(source.names())
    rule = optimization.rule
    fresh: set[str] = set()
    for window in _windows(parts):
        unit = parts.table.units[window.key[0]]
        span = Span(window.key[2], window.key[2] + window.master.numel())
        slots = window.state
        if isinstance(rule, KeepsState):
            slots = {slot: torch.zeros_like(window.master) for slot in saved.get("slots", ())}
        for slot, tensor in slots.items():
            for entry, common in unit.layout.overlaps(span):
                if entry.name in stored and slot in source.slots(entry.name):
                    out = tensor[common.shifted(-span.start).slice]
                    source.read(entry.name, slot, common.start - entry.offset, out)
                else:
                    fresh.add(entry.name)
        if isinstance(rule, KeepsState) and slots:
            scalars = saved["scalars"]
            is_by_window = parts.params.placement.is_whole and scalars["by_window"]
            rule.restore(window, slots, {} if is_by_window else scalars["by_group"].get(str(window.key[1]), {}))
    if fresh:
        log.warning("optimizer state of %d parameters is not in %s; they start afresh", len(fresh), source.path)


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


# -- weights alone -----------------------------------------------------------------------------------------------


def save_weights(engine: Engine, folder: str, filename: str, exclude_frozen: bool) -> bool:
    """The module's state dict in compute dtype as one torch file. Collective over: all ranks."""
    parts, problem = engine.parts, ""
    if parts.mesh.rank == 0:
        state = {}
        frozen = {name for name, param in parts.module.named_parameters() if parts.table.find(param) is None}
        clones: dict[int, torch.Tensor] = {}
        for name, tensor in parts.module.state_dict(keep_vars=True).items():
            if exclude_frozen and name in frozen:
                continue
            # A clone drops the flat buffer behind the view; tied names share one clone.
            state[name] = clones.setdefault(id(tensor), tensor.detach().clone())
        try:
            target = Path(folder)
            target.mkdir(parents=True, exist_ok=True)
            torch.save(state, target / f".{filename}.tmp")
            (target / f".{filename}.tmp").replace(target / filename)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            problem = f"cannot write {filename} in {folder}: {error}"
    _agree(parts.mesh.world.comm, problem)
    return True
