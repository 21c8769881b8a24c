"""Sharded parameters: full shape, no data, and a helpful answer to whoever reads them.

A sharded parameter keeps its shape over a single NaN and has a class that intercepts every torch function. Questions
about shape, type or gradient are answered; for anything else the owner unshards it or explains where the data are.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mpispeed.base.errors import UsageError
from mpispeed.sharding.param_facts import ParamFacts, serve_whole_params

_QUESTIONS_TEXT = (
    "shape size numel nelement dim ndim ndimension dtype device layout requires_grad requires_grad_ is_leaf grad "
    "grad_fn _version is_floating_point is_complex is_signed is_inference is_sparse is_sparse_csr is_quantized is_meta "
    "is_cpu is_cuda is_mps is_xpu is_mkldnn is_nested is_vulkan is_ipu is_maia is_mtia is_xla element_size nbytes "
    "itemsize names name __len__ __hash__ output_nr retains_grad get_device is_same_size "
    "register_hook register_post_accumulate_grad_hook _backward_hooks _post_accumulate_grad_hooks is_neg is_conj "
    "_has_compatible_shallow_copy_type new_empty new_zeros new_ones new_full empty_like zeros_like ones_like "
    "full_like rand_like randn_like"
)
_QUESTIONS = frozenset(_QUESTIONS_TEXT.split())
"""What is answered from shape, type and gradient alone."""

_CASTS = frozenset(("to", "cpu", "float", "half", "bfloat16", "double"))
"""What gives the tensor itself where nothing has to be changed."""

_SETTABLE = frozenset(("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad"))


class Owner(Protocol):
    """Object that has the data of sharded parameters and answers for them.

    Attributes:
        rests_cut: True if parameters are sharded while nobody needs them, as at stage 3.
        is_of_init: True for parameters of `zero.Init` that no engine has yet.
    """

    rests_cut: bool
    is_of_init: bool

    def describe(self, param: nn.Parameter) -> str:
        """Name and state of `param`, for messages and `repr`."""

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Unshard `params` for a torch function called `reader`; False if they cannot be read here and now."""

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Note that the torch function has returned."""

    def left(self, param: nn.Parameter) -> None:
        """Note that `param` has another owner from now on, or none."""

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's shard of `param`, flat and without padding."""

    def shard_numel(self, param: nn.Parameter) -> int:
        """Elements of this rank's shard of `param`."""

    def second_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of this rank's part of the second copy (hpZ) of `param`; None without a fresh one."""


_OWNERS = WeakIdKeyDictionary()
"""Parameter -> weak reference to its keeper. By the parameter and not by its `id`, which a new one may get again."""

_NUMBERS = WeakIdKeyDictionary()
"""Parameter -> its number, in the order in which parameters came to an owner; ranks shard in the same order."""

_COUNTER = itertools.count()

_STAND_INS: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
_SHARDED_CLASSES: dict[type, type] = {}


class ShardedParam(ParamFacts):
    """Mixed into the class of a parameter while its data are elsewhere."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from metadata, or have the owners unshard first."""
        kwargs = kwargs or {}
        if _is_question(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "stride":
            return _contiguous_stride(args[0].shape, *args[1:], **kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if getattr(func, "__name__", "") == "detach" and _has_no_engine(args[0]):
            return _alias(args[0])
        with opened(_sharded_in((args, kwargs)), _spoken(func)):
            return func(*args, **kwargs)

    def is_contiguous(self, **_: Any) -> bool:
        """True, as for the full parameter."""
        return True

    def _asked(self, reader: str) -> Owner:
        owner: Owner | None = owner_of(self)  # type: ignore[arg-type]
        if owner is None:
            refuse(self, reader)  # type: ignore[arg-type]
        return owner

    def _number(self) -> int:
        return int(_NUMBERS[self])

    def __repr__(self) -> str:
        return f"Parameter {tell(self)}"  # type: ignore[arg-type]

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def as_subclass(self, cls: type) -> NoReturn:
        """Refuse, because torch itself does not ask `__torch_function__`."""
        refuse(self, f"as_subclass({cls.__name__})")  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse(self, "copy.deepcopy")  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "pickle")  # type: ignore[arg-type]


# -- shard and unshard ---------------------------------------------------------------------------------------------


def to_sharded(param: nn.Parameter, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Drop the data of `param`, for which its owner answers; its dtype is `dtype` from now on.

    Its device is reported as `device`, by default that of its data.
    """
    cls, shape, device = type(param), param.shape, device or param.device
    if issubclass(cls, ShardedParam) and (param.dtype != dtype or param.device != device):
        param.__class__ = cls = cls.__bases__[1]
    if not issubclass(cls, ShardedParam):
        param.data = _stand_in(dtype, device).expand(shape)
        param.__class__ = _sharded_class(cls)


def to_unsharded(param: nn.Parameter, data: torch.Tensor) -> None:
    """Give `param` its data, of the same shape."""
    cls = type(param)
    if issubclass(cls, ShardedParam):
        param.__class__ = cls.__bases__[1]
    param.data = data


def is_sharded(param: torch.Tensor) -> bool:
    """True if the data of `param` are elsewhere."""
    return isinstance(param, ShardedParam)


def watch(param: nn.Parameter, owner: Owner) -> None:
    """Make `owner` the owner of `param`, which stays as it is."""
    known = owner_of(param)
    if known is not owner:
        forget(param)
        _OWNERS[param] = weakref.ref(owner)
        if param not in _NUMBERS:
            _NUMBERS[param] = next(_COUNTER)
        if owner.rests_cut and not hasattr(nn.Parameter, "ds_id"):
            serve_whole_params(_cutter_of, lambda param: int(_NUMBERS[param]))


def owner_of(param: torch.Tensor) -> Any | None:
    """The owner of `param`; None for an ordinary parameter."""
    found = _OWNERS.get(param)
    return None if found is None else found()


def _cutter_of(param: nn.Parameter) -> Owner | None:
    owner = owner_of(param)
    return owner if owner is not None and owner.rests_cut else None


def forget(param: nn.Parameter) -> None:
    """Make `param` an ordinary parameter again, without an owner."""
    known = owner_of(param)
    _OWNERS.pop(param, None)
    if known is not None:
        known.left(param)


def _stand_in(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    key = dtype, device
    if key not in _STAND_INS:
        # A few functions of torch ask no class (torch.tensor, vmap): they must not read anything like weights.
        value: float | bool = float("nan")
        if not dtype.is_floating_point and not dtype.is_complex:
            value = dtype == torch.bool or torch.iinfo(dtype).max
        with torch.inference_mode(False):
            _STAND_INS[key] = torch.full((1,), value, dtype=dtype, device=device).squeeze(0)
    return _STAND_INS[key]


def _sharded_class(cls: type) -> type:
    if cls not in _SHARDED_CLASSES:
        _SHARDED_CLASSES[cls] = type(f"Sharded{cls.__name__}", (ShardedParam, cls), {"__module__": __name__})
    return _SHARDED_CLASSES[cls]


class _AliasOwner:
    """Owner of a detached parameter whose data stay elsewhere."""

    rests_cut = is_of_init = True

    def __init__(self, param: torch.Tensor) -> None:
        self._param = param

    def describe(self, param: torch.Tensor) -> str:
        """Name and state of the parameter that was detached."""
        owner = owner_of(self._param)
        return "whose engine is gone" if owner is None else str(owner.describe(self._param))

    def open(self, params: Sequence[torch.Tensor], reader: str) -> bool:
        """False: there are no data."""
        return False

    def close(self, params: Sequence[torch.Tensor]) -> None:
        """Nothing was opened."""

    def left(self, param: torch.Tensor) -> None:
        """Nothing is kept."""

    def shard_of(self, param: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's shard of the parameter that was detached."""
        return self._param.ds_tensor  # type: ignore[attr-defined]

    def shard_numel(self, param: torch.Tensor) -> int:
        """Elements of this rank's shard."""
        return self._param.partition_numel()  # type: ignore[attr-defined]

    def second_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """A copy of this rank's part of the second copy, if there is a fresh one."""
        return self._param.ds_secondary_tensor  # type: ignore[attr-defined]


def _has_no_engine(param: torch.Tensor) -> bool:
    owner = owner_of(param)
    if owner is None or not owner.is_of_init:
        return False
    is_open = owner.open([param], "detach")
    if is_open:
        owner.close([param])
    return not is_open


def _alias(param: torch.Tensor) -> torch.Tensor:
    """`param.detach()` without data, for `state_dict` of a model that no engine has yet.

    Libraries look at its names and shapes before they load. Who reads it is told the same as of the parameter.
    """
    alias: Any = _stand_in(param.dtype, param.device).expand(param.shape).as_subclass(_sharded_class(torch.Tensor))
    owner = _AliasOwner(param)
    alias._alias_owner = owner  # the registry holds a weak reference
    _OWNERS[alias] = weakref.ref(owner)
    _NUMBERS[alias] = _NUMBERS[param]
    return alias


# -- reading -----------------------------------------------------------------------------------------------------


@contextmanager
def opened(params: Sequence[nn.Parameter], reader: str) -> Iterator[None]:
    """Context in which the sharded ones among `params` have their data.

    Raises:
        UsageError: an owner cannot unshard them here and now.
    """
    by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in params:
        if is_sharded(param):
            owner = owner_of(param)
            if owner is None:
                refuse(param, reader)
            by_owner.setdefault(id(owner), (owner, []))[1].append(param)
    done: list[tuple[Owner, list[nn.Parameter]]] = []
    try:
        for owner, own in by_owner.values():
            if not owner.open(own, reader):
                refuse(own[0], reader)
            done.append((owner, own))
        yield
    finally:
        for owner, own in reversed(done):
            owner.close(own)


def tell(param: nn.Parameter) -> str:
    """A line about a sharded parameter."""
    owner = owner_of(param)
    where = owner.describe(param) if owner is not None else "whose engine is gone"
    return f"(sharded: {where}; full shape {tuple(param.shape)}, {str(param.dtype).removeprefix('torch.')})"


def refuse(param: nn.Parameter, reader: str) -> NoReturn:
    """Raise an error that says why `param` cannot be read here, and what to do.

    Raises:
        UsageError: always.
    """
    msg = (
        f"{reader} reads a parameter whose data are cut over ranks {tell(param)}; on all ranks use "
        "`with mpispeed.zero.GatheredParameters(param):` to read it, with modifier_rank=0 to change it, or "
        "mpispeed.zero.safe_get_full_fp32_param(param); for a state dict engine.module_state_dict()"
    )
    raise UsageError(msg)


def _is_question(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in (_QUESTIONS if name == "__get__" else _SETTABLE)
    return name in _QUESTIONS


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `module.to(device)` and the like where the parameter is there already, in that dtype."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # what `to` has returned is put back
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data" and args[0] is args[1]
    if name not in _CASTS or not is_sharded(args[0]):
        return False
    probe = _empty_like(args[0])
    others = [_empty_like(arg) if is_sharded(arg) else arg for arg in args[1:]]
    return func(probe, *others, **kwargs) is probe


def _empty_like(param: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=param.dtype, device=param.device)


def _spoken(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):
        return f"attribute {getattr(getattr(func, '__self__', None), '__name__', '?')!r}"
    return f"torch function {name!r}"


def _sharded_in(tree: Any) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if is_sharded(item):
                found.append(item)  # type: ignore[arg-type]
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
    return found


def _contiguous_stride(shape: Sequence[int], dim: int | None = None) -> tuple[int, ...] | int:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    found = tuple(reversed(strides))
    return found if dim is None else found[dim]
