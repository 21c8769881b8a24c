"""`zero.Init`: the time in which modules are made with cut parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mpispeed.base import births, late
from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import start
from mpispeed.zero.birth import Birth
from mpispeed.zero.birth_disk import OnDisk

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = (None, "none", "cpu", "nvme")


class Init:
    """Modules that are made inside are cut over the ranks as soon as their own constructor has returned.

    Each constructor, those of parent classes included, sees its own parameters whole. Afterwards they are cast,
    take the values of the first rank, and each rank keeps its part. Inside of the context parameters of finished
    modules can be read and changed in place: they are gathered for it, and cut again with the first rank's values.
    `initialize` takes the parts over, at any stage; nothing is whole on the way but one unit.

    Contexts can be nested, and the innermost one counts. Ranks have to make the same modules in the same order.

    Collective over: the group, whenever a module is made or a finished parameter is read.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Comm | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | Path | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Comm | None = None,
        param_swapper: Any = None,
    ) -> None:
        """Prepare; joins MPI if that was not done.

        Args:
            module: its parameters are cut at once; the context need not be entered for that.
            data_parallel_group: ranks over which parameters are cut; all ranks by default.
            mem_efficient_linear: accepted; no module keeps its weights for backward in any case.
            remote_device: where parts rest until `initialize`. "cpu" or "none": in memory. "nvme": in swap files below
                `zero_optimization.offload_param.nvme_path` of the config. None: as `offload_param.device` of the
                config says; in memory without one.
            pin_memory: accepted; no effect.
            config_dict_or_path: as for `initialize`; gives the dtype and `override_module_apply`.
            config: the older name of `config_dict_or_path`.
            enabled: False: nothing happens at all.
            dtype: of floating parameters, fp64 excepted; by default that of the config, and without a config (or with
                neither fp16 nor bf16 in it) each keeps its own.
            mpu: its `get_data_parallel_group()` is used if no group is given.
            zero_param_parallel_group: accepted; the engine's config decides about second copies.
            zero_quantized_weights: accepted; the engine's config decides.
            zero_quantized_nontrainable_weights: accepted; the engine's config decides.
            sequence_data_parallel_group: the older name of `data_parallel_group`.
            param_swapper: must be None.

        Collective over: the group, if `module` is given or parts rest in swap files.

        Raises:
            ConfigError: (a ValueError) two groups or two configs are given, the config has mistakes, or the folder for
                swap files is not given or cannot be used on some rank.
            UsageError: an argument of a wrong type, or something that is not available.
        """
        self.enabled = enabled
        if not enabled:
            return
        _refuse_unavailable(remote_device, param_swapper)
        self.settings = _settings(config_dict_or_path, config)
        dtype = _checked(dtype if dtype is not None else self.settings["dtype"])
        comm = _group(data_parallel_group, sequence_data_parallel_group, mpu)
        self.birth = Birth(comm, dtype, _home(comm, remote_device, self.settings))
        if module is not None:
            _cut_all(self.birth, module)
            self.birth.finish()

    def __enter__(self) -> Init:
        if self.enabled:
            _PATCHES.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.enabled:
            _PATCHES.leave(self, has_failed=kind is not None)


def _refuse_unavailable(device: Any, swapper: Any) -> None:
    if device not in DEVICES or swapper is not None:
        what = "param_swapper" if swapper is not None else f"remote_device={device!r}"
        msg = f'zero.Init: {what} is not available; remote_device can be None, "cpu" or "nvme"'
        raise UsageError(msg)


def _checked(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in DTYPES:
        msg = f"zero.Init: dtype {dtype!r} is not possible; choose torch.float32, torch.float16 or torch.bfloat16"
        raise UsageError(msg)
    return cast("torch.dtype | None", dtype)


def _settings(source: Any, older: Any) -> dict[str, Any]:
    if older is not None:
        if source is not None:
            msg = "zero.Init: config_dict_or_path and its older name config are both given; keep the first"
            raise ConfigError(msg)
        logs.once(log, logging.WARNING, "zero.Init: config is the older name of config_dict_or_path")
        source = older
    if source is None:
        return {"dtype": None, "override_module_apply": True, "device": None, "nvme_path": None}
    return cast("dict[str, Any]", late.find("resolve_init_config")(source))


def _home(comm: Comm, device: str | None, settings: Mapping[str, Any]) -> OnDisk | None:
    """Swap files, or None for memory. Collective over: the group, if there are to be swap files."""
    device = device if device is not None else settings["device"]
    if device != "nvme":
        return None
    path = settings["nvme_path"]
    if path is None:
        msg = (
            'zero.Init: remote_device="nvme" needs a folder on the local disk of each node; set '
            "zero_optimization.offload_param.nvme_path in the config and pass it as config_dict_or_path"
        )
        raise ConfigError(msg)
    return OnDisk(comm, start().node, Path(path), settings["io_options"])


def _group(group: Any, older: Any, mpu: Any) -> Comm:
    if group is not None and older is not None:
        msg = "zero.Init: data_parallel_group and its older name sequence_data_parallel_group are both given"
        raise ConfigError(msg)
    group = older if group is None else group
    if group is None and mpu is not None:
        group = mpu.get_data_parallel_group()
    if group is None:
        return start().comm
    if not isinstance(group, Comm):
        msg = f"zero.Init: the group of ranks is a {type(group).__name__}; make one with mpispeed.comm.new_group(ranks)"
        raise UsageError(msg)
    return group


def _cut_all(birth: Birth, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        msg = f"zero.Init: module is a {type(module).__name__}; pass a torch.nn.Module"
        raise UsageError(msg)
    for inner in module.modules():
        birth.cut(inner)


class _Patches:
    """What is replaced in torch while any context is entered."""

    def __init__(self) -> None:
        self._contexts: list[Init] = []
        self._inits: dict[type, tuple[Callable[..., None], Callable[..., None]]] = {}  # original, replacement
        self._making: list[int] = []  # modules whose constructors run, outermost first
        self._apply, self._to_empty = nn.Module.apply, nn.Module.to_empty

    # -- contexts ------------------------------------------------------------------------------------------------

    def enter(self, context: Init) -> None:
        if not self._contexts:
            self._install()
        self._contexts.append(context)
        births.enter()
        context.birth.is_active = True

    def leave(self, context: Init, *, has_failed: bool) -> None:
        self._contexts.remove(context)
        births.leave()
        if not self._contexts:
            self._restore()
        if context not in self._contexts:
            context.birth.is_active = False
            # After a failure other ranks may be elsewhere.
            if not has_failed:
                context.birth.settle(is_final=True)
                context.birth.finish()

    @property
    def _birth(self) -> Birth:
        return self._contexts[-1].birth

    # -- classes -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
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
            if id(module) in patches._making or not patches._contexts:
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
        if not self._contexts or "_parameters" not in module.__dict__:
            return
        self._birth.settle()
        if self._making:
            self._birth.cut(module)
        else:
            # Parameters may have been added to finished modules, as to a ParameterList.
            _cut_all(self._birth, module)

    def _make_apply(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        patches = self

        @functools.wraps(original)
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            if not patches._contexts or not patches._contexts[-1].settings["override_module_apply"]:
                return original(module, fn)
            for child in module.children():
                child.apply(fn)
            with patches._birth.changing(module):
                fn(module)
            return module

        return apply

    def _make_to_empty(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        patches = self

        @functools.wraps(original)
        def to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            made = original(module, *args, **kwargs)
            if patches._contexts:
                _cut_all(patches._birth, module)  # made on the meta device, as by torch.nn.utils.skip_init
            return made

        return to_empty


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
