"""Module hooks: unshard what modules need in forward and backward, reshard it, and answer stray reads.

Nothing is installed for backward. Autograd saves a parameter as its place in the unit, which is looked up again in
backward: so saved tensors keep no memory, and any order of backward finds its data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.sharding import sharded_param
from mpispeed.sharding.leaf_calls import LeafCall, LeafCalls
from mpispeed.sharding.param_shards import find_edited
from mpispeed.sharding.params import ParamStore

if TYPE_CHECKING:
    from mpispeed.sharding.module_units import ModuleUnits
    from mpispeed.sharding.prefetch import Prefetcher
    from mpispeed.store.layout import Unit


@dataclass(slots=True)
class _Frame:
    """A watched module whose forward is running."""

    module: nn.Module
    name: str
    units: list[Unit] = field(default_factory=list)
    saving: torch.autograd.graph.saved_tensors_hooks | None = None
    call: LeafCall | None = None  # of the leaf that this is, or is inside of


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a unit's buffer, without the buffer."""

    saver: _Saver
    unit: Unit
    call: LeafCall | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other saved tensor with its version: with hooks, autograd does not compare versions itself."""

    tensor: torch.Tensor
    version: int


class _Saver:
    """Saved-tensor hooks: views of units become places, everything else goes to the hooks installed before.

    So hooks of checkpoints and of the user keep working, and never hold a parameter that is resharded later.
    """

    def __init__(
        self, module_hooks: ModuleHooks, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ):
        self.module_hooks, self._pack, self._unpack = module_hooks, pack, unpack

    def save(self, tensor: torch.Tensor) -> Any:
        """The object that autograd keeps instead of `tensor`."""
        unit = self.module_hooks.unit_of(tensor)
        if unit is None:
            return self._pack(tensor)
        call = self.module_hooks.leaf_call(unit)
        return _Saved(self, unit, call, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def restore(self, saved: Any) -> torch.Tensor:
        """The saved tensor."""
        if type(saved) is _Saved and saved.saver is self:
            full = self.module_hooks.fetch_saved(saved.unit, saved.call)
            return full.as_strided(saved.size, saved.stride, saved.offset)
        return self._unpack(saved)


class ModuleHooks:
    """The forward calls that are running, outermost first, and the hooks that keep track of them.

    Collective over: the axes over which parameters are sharded at rest, whenever a watched module runs or backward
    needs weights.
    """

    def __init__(self, prefetcher: Prefetcher, users: Sequence[ModuleUnits]) -> None:
        self._prefetcher = prefetcher
        self._table = prefetcher.shards.table
        self._units: dict[int, tuple[Unit, ...]] = {}
        self._names: dict[int, str] = {}
        self._module_hooks: list[_Frame] = []
        self._leaves = {id(user.module) for user in users if user.is_leaf and user.units}
        self._calls = LeafCalls(prefetcher)
        self._handles: list[Any] = []
        self._is_shielded = False
        self.is_uneven = False
        self.is_paused = False  # everything is whole: nothing to fetch, and ranks may do different things
        self._begin_outside: Callable[[nn.Module, Any], None] = self._begin
        self._end_outside: Callable[[nn.Module, Any], Any] = self._end
        self._shield()
        for user in users:
            prefetcher.bind(user.units)
            self._watch(user.module, user.name, user.units)

    def _watch(self, module: nn.Module, name: str, units: tuple[Unit, ...]) -> None:
        self._units[id(module)] = units
        self._names[id(module)] = name or type(module).__name__
        self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add_external(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Fetch `units` too whenever `module` runs."""
        if id(module) not in self._names:
            self._watch(module, "", ())
        known = self._units[id(module)]
        self._units[id(module)] = known + tuple(u for u in units if u not in known and not u.states.param.is_replicated)

    def expect_without(self, units: frozenset[int]) -> None:
        """Note the indices of the units that nobody needs in the next passes, on all ranks alike."""
        self._prefetcher.absent = units

    def drop_external(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Undo `add_external`."""
        if id(module) in self._names:
            self._units[id(module)] = tuple(unit for unit in self._units[id(module)] if unit not in units)

    # -- forward -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, *inputs: Any) -> None:
        self._begin_outside(module, inputs)

    def _leave(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        return self._end_outside(module, outputs)

    def _shield(self) -> None:
        """Keep the hooks out of compiled graphs; not before someone compiles, because the compiler loads slowly."""
        if not self._is_shielded and "torch._dynamo" in sys.modules:
            self._is_shielded = True
            self._begin_outside = torch.compiler.disable(self._begin)
            self._end_outside = torch.compiler.disable(self._end)

    def _begin(self, module: nn.Module, inputs: Any = ()) -> None:
        if self.is_paused:
            return
        frame = _Frame(module, self._names[id(module)])
        is_backward = in_backward()
        _refuse_transforms(frame.name)
        if not self._module_hooks:
            self._shield()
            if not is_backward:
                if self._calls.active:
                    self._calls.forget()
                self._prefetcher.begin_pass(torch.is_grad_enabled())
        units = self._units[id(module)]
        if torch.is_grad_enabled():
            frame.saving = self._saving(frame.name)
            frame.call = self._module_hooks[-1].call if self._module_hooks else None
            if id(module) in self._leaves:
                frame.call = LeafCall(self._calls, frame.name, units, inputs)
        if units:
            # Only some ranks may recompute a leaf while its backward pass runs on all; it is unsharded then.
            if not (is_backward and self._calls.has(units)):
                self._prefetcher.unshard(units, is_backward=is_backward, reader=lambda: f"module {frame.name!r}")
            self._prefetcher.hold(units)
            frame.units.extend(units)
        if frame.saving is not None:
            frame.saving.__enter__()
        self._module_hooks.append(frame)

    def _end(self, module: nn.Module, outputs: Any = None) -> Any:
        if not self._module_hooks or self._module_hooks[-1].module is not module:
            return None  # its `_begin` failed, and the failure is on its way up
        frame = self._module_hooks.pop()
        if frame.saving is not None:
            frame.saving.__exit__()
        # Modules recomputed in backward are used by that backward right afterwards.
        edited = next((name for unit in frame.units if (name := find_edited(self._prefetcher.shards, unit))), "")
        self._prefetcher.unhold(frame.units, reshards=not in_backward())
        if edited:
            self._prefetcher.reshard(frame.units)
            _refuse_edit(frame.name, edited)
        if not self._module_hooks and not in_backward():
            if not self.is_uneven:
                self._prefetcher.meet(lambda: f"the end of {frame.name!r}")
            if not torch.is_grad_enabled():
                self._prefetcher.reshard_idle()
        is_leaf = frame.call is not None and id(module) in self._leaves
        return frame.call.end_forward(outputs) if frame.call is not None and is_leaf else None

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Context of a call into the model: torch tells module hooks about exceptions, but not about interrupts."""
        depth = len(self._module_hooks)
        try:
            yield
        except BaseException:
            while len(self._module_hooks) > depth:
                self._end(self._module_hooks[-1].module)
            self._calls.forget()
            raise

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Context in which parts of `module` run without a call of it: parameters read by functions are fetched too."""
        if id(module) not in self._names:
            self._units[id(module)], self._names[id(module)] = (), type(module).__name__
        self._begin(module)
        try:
            yield
        finally:
            self._end(module)

    # -- what autograd saves -------------------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[Any]:
        """Hooks for the time in which another object has unsharded parameters: graphs may be used after its end."""
        if not torch.is_grad_enabled() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return nullcontext()
        return self._saving("GatheredParameters") or nullcontext()

    def _saving(self, name: str) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Hooks for the module `name`; None if those of an outer frame are on top."""
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            msg = (
                f"module {name!r} runs where saved tensor hooks are forbidden, by "
                "torch.autograd.graph.disable_saved_tensors_hooks, but the weights that its backward pass needs are "
                "cut over ranks and saved by such hooks; run it outside, or under torch.no_grad()"
            )
            raise UsageError(msg)
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None:
            saver = _Saver(self, _keep, _kept)
        else:
            known = getattr(top[0], "__self__", None)
            if isinstance(known, _Saver) and known.module_hooks is self:
                return None
            saver = _Saver(self, *top)
        return torch.autograd.graph.saved_tensors_hooks(saver.save, saver.restore)

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose buffer `tensor` is a view of."""
        if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # neither has a storage to look at
        index = self._prefetcher.owner(tensor)
        if index is None:
            return None
        unit = self._table.all_units[index]
        return unit if tensor.dtype == unit.states.compute else None

    def leaf_call(self, unit: Unit) -> LeafCall | None:
        """The running call of a leaf that has `unit`."""
        call = self._module_hooks[-1].call if self._module_hooks else None
        return call if call is not None and unit in call.units else None

    def fetch_saved(self, unit: Unit, call: LeafCall | None = None) -> torch.Tensor:
        """The full buffer of `unit`, of which `call` saved a view, for backward. Shapes: [padded]."""
        if call is not None and not self.is_paused:
            self._calls.fetch(call)
        elif not self.is_paused:
            self._prefetcher.unshard((unit,), is_backward=True, reader=lambda: f"the backward pass of {unit.name!r}")
        full = self._prefetcher.full(unit)
        if full is None:
            msg = f"unit {unit.name!r} was fetched for backward and is not there"
            raise UsageError(msg)
        return full

    # -- stray reads -----------------------------------------------------------------------------------------------

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Fetch parameters that a forward or backward reads outside of their module; False outside of both."""
        is_backward = in_backward()
        if not self._module_hooks and not is_backward:
            return False
        units: dict[int, Unit] = {}
        for param in params:
            place = self._table.locate(param)
            if place is None:
                return False
            units[place.unit.index] = place.unit
        found = tuple(units.values())
        where = self._module_hooks[-1].name if self._module_hooks else "the backward pass"
        _refuse_transforms(where)
        self._prefetcher.unshard(found, is_backward=is_backward, reader=lambda: f"{reader} in {where}")
        if self._module_hooks:
            self._prefetcher.hold(found)
            self._module_hooks[-1].units.extend(found)
        return True

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Do nothing: they stay until the running module ends, or backward has moved on."""

    def landed(self, unit: Unit) -> None:
        """Note that all gradients of `unit` have arrived: backward is done with it."""
        self._prefetcher.reshard_unused((unit.index,))

    def end_backward(self) -> None:
        """End the backward pass. Collective over: the data axis, where ranks may diverge."""
        self._prefetcher.meet(lambda: "the end of the backward pass")
        if not self._module_hooks:
            self._prefetcher.reshard_idle()

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context in which ranks may call the model different numbers of times, where ranks may diverge at all.

        Collective over: the data axis, on leaving.

        Raises: UsageError: ranks may not diverge.
        """
        if self._prefetcher.rounds is None:
            msg = (
                'ranks can call the model different numbers of times only with "divergent_modules": "union" in '
                "zero_optimization, or inside of mpispeed.zero.unwrap_model_for_generation(engine)"
            )
            raise UsageError(msg)
        self.is_uneven = True
        try:
            yield
        finally:
            self.is_uneven = False
            self._prefetcher.meet(lambda: "the end of calls that differ between ranks")


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _refuse_edit(module: str, param: str) -> None:
    """Raise about a change that resharding would drop, on some ranks or in some passes only.

    Raises:
        UsageError: always.
    """
    msg = (
        f"parameter {param!r} was changed inside of the forward of module {module!r}, but it is cut over ranks: the "
        "change would be lost; compute with a changed copy instead, change it between steps in "
        "`with mpispeed.zero.GatheredParameters(param, modifier_rank=0):`, or keep it whole with "
        "param_persistence_threshold (torch.nn.Embedding changes its weight if max_norm is set)"
    )
    raise UsageError(msg)


def _refuse_transforms(where: str) -> None:
    """Raise inside of torch.func transforms that wrap every tensor that is made in them.

    Raises:
        UsageError: there is such a transform; vmap is none.
    """
    stack = torch._C._functorch.get_interpreter_stack()
    names = [str(level.key()).rpartition(".")[2].lower() for level in stack or ()]
    if any(name != "vmap" for name in names):
        msg = (
            f"{where!r} runs inside of a torch.func transform ({', '.join(names)}), where weights that are cut over "
            "ranks cannot be gathered; use torch.autograd.grad, or torch.func with a copy of the whole model"
        )
        raise UsageError(msg)


def _keep(tensor: torch.Tensor) -> _Kept:
    # A saved output would keep the operation that saves it, and so itself, alive for ever.
    return _Kept(tensor.detach() if tensor.requires_grad else tensor, tensor._version)


def _kept(saved: _Kept) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(_changed(saved))
    return saved.tensor


def _changed(saved: _Kept) -> str:
    tensor = saved.tensor
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {saved.version} instead"
    )


@contextmanager
def uneven_forwards(model: nn.Module) -> Iterator[None]:
    """Context in which ranks may call the engine, or its model, different numbers of times without gradients.

    For generation and evaluation that end earlier on some ranks. Sharded parameters need
    `"divergent_modules": "union"` in `zero_optimization`: a rank that leaves goes on taking part in gathers until all
    have left. Nothing is needed where every parameter is replicated.

    Collective over: the data axis, on leaving, where parameters are sharded.

    Raises:
        UsageError: parameters are sharded, and ranks may not diverge.
    """
    for param in model.parameters():
        owner = sharded_param.owner_of(param)
        if isinstance(owner, ParamStore) and isinstance(owner.reader, ModuleHooks):
            with owner.reader.uneven():
                yield
            return
    yield
