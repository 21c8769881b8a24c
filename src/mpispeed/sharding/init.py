"""Context in which modules are constructed with sharded parameters; `zero.Init` is its wrapper for users."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mpispeed.base import init_scope
from mpispeed.base.errors import ConfigError, MpispeedError, UsageError
from mpispeed.base.param_marks import part_of
from mpispeed.mesh.comm import Comm, text_of
from mpispeed.mesh.world import start
from mpispeed.native.block_io import Options
from mpispeed.sharding import sharded_param
from mpispeed.sharding.init_storage import OnDisk
from mpispeed.sharding.sharded_init import ShardedInit, find_init_shard

_SHOWN = 8  # ranks in a message


@dataclass(frozen=True, slots=True)
class InitSettings:
    """Settings of sharded init, in plain values.

    Attributes:
        dtype: of floating parameters, fp64 excepted; None: each keeps its own.
        override_module_apply: `Module.apply` sees full parameters inside of the context.
        device: "nvme": shards are in swap files until `initialize`; else in memory.
        nvme_path: folder for swap files on the local disk of each node.
        io_options: of the swap files.
    """

    dtype: torch.dtype | None = None
    override_module_apply: bool = True
    device: str | None = None
    nvme_path: str | None = None
    io_options: Options | None = None


class Init:
    """Context that shards the parameters of each module as soon as the module's own constructor has returned.

    Each constructor, those of parent classes included, sees its own full parameters. Afterwards they are cast, take the
    values of the first rank, and each rank keeps its shard. Inside of the context parameters of finished modules can be
    read and changed in place: they are unsharded for it, and resharded with the first rank's values. `initialize` takes
    the shards over, at any stage, with one full unit at a time.

    Contexts can be nested, and the innermost one counts. Ranks have to make the same modules in the same order; layers
    of a pipeline are sharded over the ranks that make them.

    Collective over: the group, whenever a module is made or a finished parameter is read.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        group: Comm | None = None,
        settings: InitSettings | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        """Prepare; joins MPI if that was not done.

        Args:
            module: its parameters are sharded at once, without entering the context.
            group: ranks over which parameters are sharded; all ranks by default.
            settings: dtype, and storage of shards until `initialize`.
            enabled: False makes the context do nothing.

        Collective over: the group, if `module` is given or shards are in swap files.

        Raises:
            ConfigError: the folder for swap files is not given or cannot be used on some rank.
            UsageError: `module` is no module.
        """
        self.enabled = enabled
        if not enabled:
            return
        self.settings = InitSettings() if settings is None else settings
        comm = start().comm if group is None else group
        self.sharded_init = ShardedInit(comm, self.settings.dtype, _home(comm, self.settings))
        self._inits = {tuple(comm.ranks): self.sharded_init}
        if module is not None:
            _cut_all(self.sharded_init, module)
            self.sharded_init.finish()

    def __enter__(self) -> Init:
        if self.enabled:
            _PATCHES.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.enabled:
            _PATCHES.leave(self, has_failed=kind is not None)

    def activate(self) -> None:
        """Answer stray reads."""
        for sharded_init in self._inits.values():
            sharded_init.is_active = True

    def settle(self, *, has_failed: bool) -> None:
        """Answer no stray reads any more, and keep what they have changed.

        Collective over: the group, then those of `over`, in the order in which they were first asked for.
        """
        for sharded_init in self._inits.values():
            sharded_init.is_active = False
            # After a failure other ranks may be elsewhere.
            if not has_failed:
                sharded_init.settle(is_final=True)
                sharded_init.finish()

    def over(self, group: Comm) -> ShardedInit:
        """What shards modules that the ranks of `group` alone construct: over those, or over the own group in them.

        Raises:
            UsageError: the own group has some of these ranks and some others.
        """
        own, wanted = self.sharded_init.comm, tuple(group.ranks)
        if set(own.ranks) <= set(wanted):
            return self.sharded_init
        if not set(own.ranks) >= set(wanted):
            msg = (
                f"zero.Init shards over the ranks {list(own.ranks)[:_SHOWN]}, and layers are constructed by the ranks "
                f"{list(wanted)[:_SHOWN]} alone; leave data_parallel_group out, or give data ranks of these alone"
            )
            raise UsageError(msg)
        if wanted not in self._inits:
            made = ShardedInit(group, self.settings.dtype, self.sharded_init.home)
            made.is_active = self.sharded_init.is_active
            self._inits[wanted] = made
        return self._inits[wanted]


def _home(comm: Comm, settings: InitSettings) -> OnDisk | None:
    """Storage in swap files, or None for memory. Collective over: the group, if there are to be swap files."""
    if settings.device != "nvme":
        return None
    if settings.nvme_path is None:
        msg = (
            'zero.Init: remote_device="nvme" needs a folder on the local disk of each node; set '
            "zero_optimization.offload_param.nvme_path in the config and pass it as config_dict_or_path"
        )
        raise ConfigError(msg)
    return OnDisk(comm, start().node, Path(settings.nvme_path), settings.io_options or Options())


def _cut_all(sharded_init: ShardedInit, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        msg = f"zero.Init: module is a {type(module).__name__}; pass a torch.nn.Module"
        raise UsageError(msg)
    for inner in module.modules():
        sharded_init.cut(inner)


class _Patches:
    """Replacements in torch while any context is entered."""

    def __init__(self) -> None:
        self._contexts: list[Init] = []
        self._inits: dict[type, tuple[Callable[..., None], Callable[..., None]]] = {}  # original, replacement
        self._making: list[int] = []  # modules whose constructors run, outermost first
        self._builders: list[Comm] = []  # ranks that construct parts of a module alone, innermost last
        self._pauses = 0
        self._apply, self._to_empty = nn.Module.apply, nn.Module.to_empty

    # -- contexts ------------------------------------------------------------------------------------------------

    def enter(self, context: Init) -> None:
        if not self._contexts:
            self._install()
        self._contexts.append(context)
        context.activate()

    def leave(self, context: Init, *, has_failed: bool) -> None:
        self._contexts.remove(context)
        if not self._contexts:
            self._restore()
        if context not in self._contexts:
            context.settle(has_failed=has_failed)

    @property
    def _sharded_init(self) -> ShardedInit:
        context = self._contexts[-1]
        return context.over(self._builders[-1]) if self._builders else context.sharded_init

    @property
    def _is_on(self) -> bool:
        return bool(self._contexts) and not self._pauses

    # -- as the scope --------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `init_scope.paused`."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextmanager
    def building(self, module: nn.Module, group: Comm) -> Iterator[None]:
        """As `init_scope.building`."""
        self._contexts[-1].over(group)  # refused before anything is made
        self._builders.append(group)
        try:
            yield
            self._sharded_init.settle()
            _cut_all(self._sharded_init, module)
        except Exception as error:
            with suppress(MpispeedError):  # the failure itself is raised
                _meet(group, text_of(error))
            raise
        else:
            _meet(group, "")
        finally:
            self._builders.pop()

    def copied(self, module: nn.Module) -> nn.Module:
        """As `init_scope.copied`."""
        cut = [param for param in module.parameters() if find_init_shard(param) is not None]
        with sharded_param.opened(cut, "initialize"):
            memo: dict[int, Any] = {id(param): part_of(param, param.detach().clone()) for param in cut}
            made = copy.deepcopy(module, memo)
        if self._is_on:
            self._sharded_init.settle()
            _cut_all(self._sharded_init, made)
        return made

    # -- classes -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        init_scope.enter(self)
        for cls in _subclasses(nn.Module):
            self._watch(cls)
        patches = self

        def define(cls: type, **arguments: Any) -> None:
            cast("Any", super)(nn.Module, cls).__init_subclass__(**arguments)
            patches._watch(cls)

        module = cast("Any", nn.Module)
        module.__init_subclass__ = classmethod(define)
        self._apply, self._to_empty = nn.Module.apply, nn.Module.to_empty
        module.apply, module.to_empty = self._make_apply(self._apply), self._make_to_empty(self._to_empty)

    def _restore(self) -> None:
        init_scope.leave()
        module = cast("Any", nn.Module)
        del module.__init_subclass__
        module.apply, module.to_empty = self._apply, self._to_empty
        for cls, (original, replacement) in self._inits.items():
            if cls.__dict__.get("__init__") is replacement:  # not if somebody replaced it meanwhile
                cast("Any", cls).__init__ = original
        self._inits.clear()
        self._making.clear()

    def _watch(self, cls: type) -> None:
        original = cls.__dict__.get("__init__")
        if original is None or cls in self._inits or issubclass(cls, torch.jit.ScriptModule):
            return
        patches = self

        @functools.wraps(original)
        def make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in patches._making or not patches._is_on:
                original(module, *args, **kwargs)  # the constructor of a parent class
                return
            patches._making.append(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                patches._making.remove(id(module))
            patches._finish(module)

        self._inits[cls] = original, make
        cast("Any", cls).__init__ = make

    def _finish(self, module: nn.Module) -> None:
        if not self._is_on or "_parameters" not in module.__dict__:
            return
        self._sharded_init.settle()
        if self._making:
            self._sharded_init.cut(module)
        else:
            # Parameters may have been added to finished modules, as to a ParameterList.
            _cut_all(self._sharded_init, module)

    def _make_apply(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        patches = self

        @functools.wraps(original)
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            if not patches._is_on or not patches._contexts[-1].settings.override_module_apply:
                return original(module, fn)
            for child in module.children():
                child.apply(fn)
            with patches._sharded_init.changing(module):
                fn(module)
            return module

        return apply

    def _make_to_empty(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        patches = self

        @functools.wraps(original)
        def to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            made = original(module, *args, **kwargs)
            if patches._is_on:
                _cut_all(patches._sharded_init, module)  # made on the meta device, as by torch.nn.utils.skip_init
            return made

        return to_empty


def _meet(group: Comm, problem: str) -> None:
    """End of what the ranks of `group` construct: a rank that has failed is no longer waited for.

    Raises:
        MpispeedError: a rank has failed.
    """
    group.start(
        lambda _: None, "build", describe=lambda: problem or "the end of its layers", ready=lambda: problem
    ).wait()


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    stack: list[type] = list(cls.__subclasses__())
    while stack:
        found = stack.pop()
        if found not in seen:
            seen.add(found)
            stack.extend(found.__subclasses__())
            yield found


_PATCHES = _Patches()
