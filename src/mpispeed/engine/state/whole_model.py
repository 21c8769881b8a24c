"""The whole model's weights on rank 0, of all stages, slices and experts; or of one stage and slice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.slices import place_slice
from mpispeed.engine.state.global_layout import GlobalLayout, require_named
from mpispeed.mesh.comm import Failures
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mpispeed.ckpt.slices import TensorSlice
    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.comm import Comm


def kept_state(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any]:
    """The module's state dict with its own parameters; they may be sharded, as no data are read."""
    left_out = frozen_names(parts) if exclude_frozen else ()
    return {k: v for k, v in parts.module.state_dict(keep_vars=True).items() if k not in left_out}


def frozen_names(parts: Parts) -> set[str]:
    """Names of parameters that are not trained."""
    named = parts.module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if parts.table.find(param) is None}


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensor of the whole model, or slice of one, that a rank passes.

    Attributes:
        names: names of the tensor in this rank's state dict; several if it is tied.
        numel: elements that are passed, with padding.
        shape: shape of the whole tensor.
        cut: the slice that the elements are in; None: they are a flat range of the whole tensor.
        before: where they begin in the slice or tensor; above 0 for experts in a fused tensor.
    """

    names: tuple[str, ...]
    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: TensorSlice | None
    before: int = 0


def gather_model(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any]:
    """The whole model's state dict in host memory of rank 0: layers of all stages, unsliced; {} on the others.

    Of each stage and slice, data rank 0 passes its tensors one by one as they are gathered: beside the result no rank
    holds more than one full unit, and rank 0 the largest tensor or slice that it receives. Values that several stages
    or slices have are those of the first, as in checkpoints. Tied names share one tensor. Of experts that are shared
    out, the first data rank that has them passes them in the end, and holds them until then.

    Collective over: all ranks.

    Raises:
        CheckpointError: on every rank, if rank 0 has no memory for the model, or parameters cannot be read.
        UsageError: parameters were taken away by `engine.offload_states`, or data ranks have others of their own than
            experts.
    """
    parts.params.require((Kind.lp_params,), "engine.save_16bit_model()")
    mesh, layout = parts.mesh, GlobalLayout.of(parts)
    require_named(parts, layout)
    # Asked of the plan: only some stages may have experts.
    sends_late = bool(parts.plan.placing.distinct)
    comm = mesh.world.comm if sends_late else mesh["pipe", "model"]
    return _gather(parts, layout, _Scope(comm, mesh.world.comm, mesh.rank == 0, sends_late, True), exclude_frozen)


def gather_with_experts(parts: Parts, layout: GlobalLayout, *, exclude_frozen: bool) -> dict[str, Any]:
    """The state dict of this rank's stage and slice with the experts of all data ranks, on data rank 0; else {}.

    Memory, order and ties as `gather_model`.

    Collective over: the data axis.

    Raises:
        CheckpointError: on every rank of the axis, if data rank 0 has no memory for it, or parameters cannot be read.
    """
    parts.params.require((Kind.lp_params,), "engine.module_state_dict()")
    comm = parts.mesh["data"]
    return _gather(parts, layout, _Scope(comm, comm, comm.rank == 0, True, False), exclude_frozen)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Ranks between which weights are passed.

    Attributes:
        comm: the ranks that pass, to its rank 0.
        all: the ranks that fail together.
        is_root: this rank gets the weights.
        sends_late: ranks hold what they pass until all units are gathered: rank 0 is in these gathers too.
        is_whole: layers of all stages, unsliced; else those of one stage and slice.
    """

    comm: Comm
    all: Comm
    is_root: bool
    sends_late: bool
    is_whole: bool


def _gather(parts: Parts, layout: GlobalLayout, scope: _Scope, exclude_frozen: bool) -> dict[str, Any]:
    failures, comm, sends_late = Failures(), scope.comm, scope.sends_late
    kinds, doing = (RuntimeError, MemoryError), "the weights cannot be gathered on rank 0"
    with scope.all.together(CheckpointError, doing=doing, plain=kinds):  # hooks of modules may run
        state = kept_state(parts, exclude_frozen=exclude_frozen)
        own = _own_parts(parts, layout, state, is_whole=scope.is_whole)
    passed = [part for part, _ in own]
    others = {name: None if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    firsts = ((name, other) for name, other in others.items() if not scope.is_whole or layout.is_first(name))
    rows = layout.expanded(firsts, lambda _, other: other)
    names = layout.over_stages(rows) if scope.is_whole else list(rows)
    everyone = comm.gather_objects(passed)
    whole: dict[str, torch.Tensor] = {}
    with scope.all.together(CheckpointError, doing=doing, plain=kinds):
        if scope.is_root:  # all memory at once: nothing is on its way if there is too little
            whole = _empty_model(row for rows in everyone for row in rows)
            longest = max((row.numel * row.dtype.itemsize for rows in everyone[1:] for row in rows), default=0)
            received = torch.empty(longest, dtype=torch.uint8)

    held: list[torch.Tensor] = []

    def take(part: _Part, values: torch.Tensor) -> None:
        if scope.is_root:
            _put(part, values, whole[part.names[0]])
        elif part.numel and sends_late:
            held.append(values.cpu().clone())
        elif part.numel:
            comm.send(values.cpu().view(torch.uint8), 0)

    done = _visit(parts, own, take, failures)
    for part in () if scope.is_root else passed[done:]:  # after a failure: rank 0 waits for them
        take(part, torch.zeros(part.numel, dtype=part.dtype))
    for values in held:
        comm.send(values.view(torch.uint8), 0)
    if scope.is_root:
        _receive(comm, everyone, received, whole, failures)
    with scope.all.together(CheckpointError, doing=doing, plain=kinds):
        failures.raise_first()
    return {name: whole.get(name, value) for name, value in names} if scope.is_root else {}


def _receive(
    comm: Comm,
    everyone: Sequence[Sequence[_Part]],
    memory: torch.Tensor,
    whole: Mapping[str, torch.Tensor],
    failures: Failures,
) -> None:
    """Put the parts that other ranks pass to their places. Messages: one for each part, in order."""
    for source, rows in enumerate(everyone[1:], 1):
        for part in rows:
            if part.numel:
                letter = memory[: part.numel * part.dtype.itemsize]
                comm.recv(letter, source)
                with failures.kept():
                    _put(part, letter.view(part.dtype), whole[part.names[0]])


def _own_parts(
    parts: Parts, layout: GlobalLayout, state: Mapping[str, Any], *, is_whole: bool
) -> list[tuple[_Part, torch.Tensor]]:
    """What this rank passes, in the order of `_visit`, each with the parameter or buffer of the module."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
    tensors = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    managed = [param for unit in parts.table.all_units for param in unit.params if id(param) in tensors]
    known = {id(param) for param in managed}
    found = []
    for tensor in (*managed, *(tensor for key, tensor in tensors.items() if key not in known)):
        place, own = parts.table.locate(tensor), tuple(names[id(tensor)])
        shape = tuple(tensor.shape if place is None else place.entry.shape)
        dtype = tensor.dtype if place is None else place.unit.states.compute
        cut = next((layout.slices[name] for name in own if name in layout.slices), None) if is_whole else None
        name = own[0] if cut is None else cut.info.name
        if (not is_whole or layout.is_first(name)) and layout.is_writer(name, tensor):
            whole = layout.whole_shape(name, shape) if cut is None else cut.info.shape
            found.append((_Part(own, math.prod(shape), whole, dtype, cut, layout.before(name)), tensor))
    return found


def _empty_model(rows: Iterable[_Part]) -> dict[str, torch.Tensor]:
    """Memory for the tensors of all parts by name; tied names share it."""
    found: dict[str, torch.Tensor] = {}
    for part in rows:
        if part.names[0] not in found:
            found.update(dict.fromkeys(part.names, torch.empty(part.shape, dtype=part.dtype)))
    return found


def _visit(
    parts: Parts,
    own: Sequence[tuple[_Part, torch.Tensor]],
    take: Callable[[_Part, torch.Tensor], None],
    failures: Failures,
) -> int:
    """Call `take` with the flat values of every part in order, unit by unit; return for how many it succeeded.

    Collective over: the axes over which parameters are sharded.
    """
    done = 0
    with failures.kept():
        for unit in parts.table.all_units:
            full = (
                parts.params.shards.rest(unit)
                if unit.states.param.is_replicated
                else parts.params.shards.collected(unit)
            )
            entries = {id(param): entry for entry, param in zip(unit.layout.entries, unit.params, strict=True)}
            while done < len(own) and id(own[done][1]) in entries:
                part, tensor = own[done]
                take(part, full[entries[id(tensor)].span.slice])
                done += 1
            del full
        for part, tensor in own[done:]:
            take(part, tensor.detach().reshape(-1))
            done += 1
    return done


def _put(part: _Part, values: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the elements of a part to their places."""
    if part.cut is None:
        whole.view(-1)[part.before :][: part.numel].copy_(values)
    else:
        place_slice(part.cut, values, whole, part.before)
