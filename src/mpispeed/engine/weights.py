"""The model's weights as an ordinary state dict: brought together unit by unit, written alone, taken back."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CheckpointError, StoreError, UsageError
from mpispeed.ckpt import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from typing_extensions import Self

    from mpispeed.engine.parts import Parts
    from mpispeed.store.table import Unit

log = logging.getLogger(__name__)

NAMES_SHOWN = 20


class Weights:
    """What an engine offers for its model's weights alone."""

    parts: Parts
    training: bool
    _is_closed: bool

    def train(self, mode: bool = True) -> Self:
        """As of any module. Where data ranks are apart they train local parameters and evaluate the common ones.

        They are apart between meetings of 0/1 Adam. Local.

        Raises:
            UsageError: they are apart, and `offload_states` took away what this needs.
        """
        super().train(mode)  # type: ignore[misc]
        if not self._is_closed:
            self.parts.show(is_training=mode)
        return self

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict in compute dtype.

        Of a pipeline it is that of this rank's stage, of cut layers it has this rank's slices.
        Where parameters rest cut, the data rank 0 gets whole copies and the others {}. They are gathered unit by
        unit: no rank has more than one unit whole at a time, beside what rank 0 has copied. Where data ranks are apart
        it has copies of the common parameters.

        Collective over: the data axis.
        """
        if not self.parts.plan.states.param.is_whole:
            return gather_state(self.parts, exclude_frozen=exclude_frozen_parameters)
        left_out = _frozen_names(self.parts) if exclude_frozen_parameters else ()
        state: dict[str, Any] = self.parts.module.state_dict()
        state = {name: value for name, value in state.items() if name not in left_out}
        if self.parts.is_apart:
            with self.parts.common():
                state = copy.deepcopy(state)  # keeps what is tied
        return state

    _zero3_consolidated_16bit_state_dict = module_state_dict

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None
    ) -> None:
        """Take weights and buffers from a state dict: parameters and, in full precision, masters.

        The values of data rank 0 count; the others may pass {}. Optimizer state stays. With `custom_load_fn` all ranks
        pass the same values: it is called as `custom_load_fn(src=state_dict, dst=module)` while the whole model is on
        every rank. Where data ranks are apart they meet: what is not given goes back to the common parameters.

        Collective over: the data axis.

        Raises:
            CheckpointError: (a RuntimeError) on every rank, if names or shapes do not fit.
        """
        if custom_load_fn is None:
            take_state(self.parts, state_dict, strict=strict)
        else:
            problem = load_by(self.parts, custom_load_fn, state_dict)
            self.parts.mesh["data"].agree(not problem, problem, CheckpointError)
        if self.parts.optimization is not None and self.parts.optimization.coded is not None:
            self.parts.optimization.coded.drop_drift()
        self.parts.params.refresh()
        self.parts.show(is_training=self.training, is_refreshed=True)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's weights in compute dtype as one torch file (rank 0).

        Where parameters rest cut this needs "stage3_gather_16bit_weights_on_model_save": true; without it nothing is
        written and the answer is False.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if the file cannot be written, or ranks have only parts of the model.
        """
        return save_weights(self.parts, save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)

    save_fp16_model = save_16bit_model


# -- out -----------------------------------------------------------------------------------------------------------


def gather_state(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any]:
    """Copies of all that the module's state dict holds, on data rank 0; {} on the others. Tied names share one copy.

    Collective over: the axes by which parameters rest cut.

    Raises:
        CheckpointError: on every rank, if rank 0 has no memory for the copies.
    """
    left_out = _frozen_names(parts) if exclude_frozen else ()
    # With keep_vars nothing is read, so parameters may be elsewhere.
    state = {k: v for k, v in parts.module.state_dict(keep_vars=True).items() if k not in left_out}
    copies: dict[int, torch.Tensor] = {}
    is_taker, problem = parts.mesh.index("data") == 0, ""
    wanted = {id(value) for value in state.values()}
    for unit in parts.table.all_units:
        # A failure is kept until all gathers are done: the others take part in them.
        problem = _copy_unit(parts, unit, wanted if is_taker and not problem else set(), copies) or problem
    others = [value for value in state.values() if isinstance(value, torch.Tensor) and not _is_managed(parts, value)]
    if is_taker and not problem:
        problem = _copy([(id(tensor), tensor) for tensor in others], copies)
    parts.mesh["data"].agree(not problem, problem, CheckpointError)
    if not is_taker:
        return {}
    return {name: copies[id(value)] if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _copy_unit(parts: Parts, unit: Unit, wanted: Collection[int], copies: dict[int, torch.Tensor]) -> str:
    """Clones of a unit's parameters that are wanted; the whole unit is gone when this returns."""
    full = parts.params.rest(unit) if parts.params.is_resident(unit) else parts.params.collected(unit)
    pairs = zip(unit.layout.entries, unit.params, strict=True)
    return _copy([(id(p), full[e.span.slice].view(e.shape)) for e, p in pairs if id(p) in wanted], copies)


def _copy(tensors: Sequence[tuple[int, torch.Tensor]], copies: dict[int, torch.Tensor]) -> str:
    """A clone of each by its key, without the flat buffer behind it; returns what went wrong."""
    try:
        copies.update((key, tensor.detach().clone()) for key, tensor in tensors)
    except (RuntimeError, MemoryError) as error:
        return f"the state dict cannot be copied: {error}"
    return ""


def _is_managed(parts: Parts, tensor: torch.Tensor) -> bool:
    return parts.table.locate(tensor) is not None


def _frozen_names(parts: Parts) -> set[str]:
    named = parts.module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if parts.table.find(param) is None}


def save_weights(parts: Parts, folder: str, filename: str, *, exclude_frozen: bool) -> bool:
    """See `Weights.save_16bit_model`. Collective over: all ranks."""
    if parts.mesh["pipe", "model"].size > 1:
        msg = (
            f"{filename} would hold the weights of one stage and slice only; use save_checkpoint and `mpispeed ckpt "
            "export`, which writes whole tensors"
        )
        raise CheckpointError(msg)
    is_cut = not parts.plan.states.param.is_whole
    if is_cut and not parts.plan.config.zero_optimization.gather_16bit_weights_on_model_save:
        if parts.mesh.rank == 0:
            log.warning(
                '%s is not written: parameters are cut over ranks; set "stage3_gather_16bit_weights_on_model_save": '
                "true in zero_optimization to have them gathered, or use save_checkpoint", filename,
            )  # fmt: skip
        return False
    with parts.common():
        state, problem = gather_state(parts, exclude_frozen=exclude_frozen), ""
    if parts.mesh.rank == 0:
        try:
            _write_whole(state, Path(folder), filename)
        except (OSError, RuntimeError, ValueError) as error:  # torch reports a full disk as a RuntimeError
            problem = f"cannot write {filename} in {folder}: {error}"
    parts.mesh.world.comm.agree(not problem, problem, CheckpointError)
    return True


def _write_whole(state: dict[str, Any], folder: Path, filename: str) -> None:
    """The file appears complete or not at all; its temporary name cannot be foreseen and is made anew."""
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


def load_by(parts: Parts, function: Callable[..., Any], state: Mapping[str, Any]) -> str:
    """Let `function(src=state, dst=module)` write into the model, and keep what it wrote; returns what went wrong.

    The whole model is on every rank meanwhile, in compute dtype, beside `state`. Parameters that it does not write
    keep the precision of their masters.

    Collective over: the axes by which parameters rest cut.
    """
    params, objects = parts.params, [id(param) for param in parts.module.parameters()]
    with params.whole(parts.table.all_units), torch.no_grad():
        before = {id(param): _trace_of(param) for param, _ in parts.table.all_places()}
        try:
            function(src=state, dst=parts.module)
            if objects != [id(param) for param in parts.module.parameters()]:
                _refuse_new_objects()
        except Exception as error:  # anything may go wrong in there, and all ranks have to hear of it
            return f"custom_load_fn failed: {type(error).__name__}: {error}"
        for unit in parts.table.all_units:
            try:
                for param in unit.params:
                    if before[id(param)] != _trace_of(param):
                        params.take(param)
            except StoreError as error:
                return str(error)
            if params.is_resident(unit):  # it may have set `.data`, and parameters have to be views again
                params.show(unit, params.rest(unit))
    return ""


def _trace_of(param: torch.Tensor) -> tuple[int, int, bytes]:
    """Differs after a write: in place, through `.data`, or by other data."""
    values = bits.as_bytes(param.detach().contiguous().reshape(-1).cpu())
    return param._version, param.data_ptr(), hashlib.blake2b(values, digest_size=16).digest()


def _refuse_new_objects() -> None:
    msg = "it put new parameter objects into the model; copy values into those that are there (without assign=True)"
    raise UsageError(msg)


def take_state(parts: Parts, state: Mapping[str, Any], *, strict: bool) -> None:
    """Set masters, frozen parameters and buffers from the values of data rank 0, one unit at a time.

    Collective over: the data axis.

    Raises:
        CheckpointError: on every rank, if names or shapes do not fit, or swapped states cannot be written.
    """
    comm = parts.mesh["data"]
    own = dict(parts.module.state_dict(keep_vars=True))
    problem = ""
    if comm.rank == 0:
        problem = _misfit(own, state, strict=strict)
    comm.agree(not problem, problem, CheckpointError)
    given = {id(own[name]): state[name] for name in state.keys() & own.keys() if isinstance(own[name], torch.Tensor)}
    names = comm.share(sorted(state.keys() & own.keys()))
    taken = {id(own[name]) for name in names}
    for unit in parts.table.all_units:
        # A failure is kept until all broadcasts are done: the others take part in them.
        problem = _take_unit(parts, unit, given, taken) or problem
    comm.agree(not problem, problem, CheckpointError)
    for tensor in {id(v): v for v in own.values() if isinstance(v, torch.Tensor)}.values():
        if id(tensor) in taken and not _is_managed(parts, tensor):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            if comm.rank == 0:
                whole.copy_(given[id(tensor)])
            comm.broadcast(whole)
            tensor.data.copy_(whole)
    extra = {name: value for name, value in state.items() if name in names and not isinstance(own[name], torch.Tensor)}
    for name, value in comm.share(extra).items():
        parts.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _take_unit(parts: Parts, unit: Unit, given: Mapping[int, torch.Tensor], taken: Collection[int]) -> str:
    """One broadcast; returns why what it brought could not be kept."""
    items = [(e, p) for e, p in zip(unit.layout.entries, unit.params, strict=True) if id(p) in taken]
    if not items:
        return ""
    comm, params = parts.mesh["data"], parts.params
    compute, master = params.dtypes(unit)
    flat = torch.zeros(unit.layout.padded, dtype=master if unit.is_trainable else compute)
    if comm.rank == 0:
        for entry, param in items:
            flat[entry.span.slice].copy_(given[id(param)].detach().reshape(-1))
    comm.broadcast(flat)
    try:
        span, target = params.span(unit), params.master(unit)
        if not unit.is_trainable:
            span, target = params.rest_span(unit), params.rest(unit)
        for entry, _ in items:
            common = entry.span.intersect(span)
            if common.numel:
                target[common.shifted(-span.start).slice].copy_(flat[common.slice])
        put = params.put_master if unit.is_trainable else params.put_rest
        put(unit, target)
    except StoreError as error:
        return str(error)
    return ""


def _misfit(own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool) -> str:
    """What is wrong with `state` for a model of `own`; without `strict`, names that do not match are only logged."""
    found = []
    # Of tied parameters one name is enough.
    given = {id(own[name]) for name in own.keys() & state.keys()}
    lacking = {name for name, value in own.items() if id(value) not in given}
    for what, names in (("lacks", lacking), ("has unknown", state.keys() - own.keys())):
        if names:
            rest = len(names) - NAMES_SHOWN
            shown = ", ".join(sorted(names)[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
            found.append(f"the state dict {what} {shown}")
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
    return "; ".join(found)
