"""Storage of the arguments of a checkpointed call until backward: as they are, in host memory, in slots, or sliced.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, sections 6.1
(partitioned activations, also in host memory) and 6.3 (one buffer for long-lived tensors).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.cut_marks import is_cut, mark_cut
from mpispeed.nn.partitioned_activations import Bundle
from mpispeed.nn.policy import Policy

if TYPE_CHECKING:
    from mpispeed.nn.recompute import Handle, Recorder


@dataclass(frozen=True, slots=True)
class _Slot:
    """Placeholder of a tensor in the tree of arguments."""

    index: int


class SavedInputs:
    """The stored arguments of one call. Tensors in tuples, lists and dicts are found too, each one kept once."""

    def __init__(self, args: tuple[Any, ...], policy: Policy, recorder: Recorder | None, number: int) -> None:
        """Store the arguments.

        Args:
            args: the arguments; they are not changed.
            policy: storage of activations.
            recorder: the enclosing checkpointed call. It keeps everything: nothing is sliced twice.
            number: of the call among those of this group of ranks.

        Raises:
            UsageError: slots or sizes do not fit.
        """
        tensors: list[torch.Tensor] = []
        known: dict[int, _Slot] = {}

        def replace(tensor: torch.Tensor) -> _Slot:
            if id(tensor) not in known:
                known[id(tensor)] = _Slot(len(tensors))
                tensors.append(tensor)
            return known[id(tensor)]

        self._tree = map_tensors(args, replace)
        self._is_inside = recorder is not None
        self._facts = [(t.requires_grad, is_cut(t)) for t in tensors]
        self._seen = [(t, _version(t)) for t in tensors]
        self._kept: list[_Reference | _Held | None] = [None] * len(tensors)
        self._bundle: Bundle | None = None
        bundled = []
        for index, tensor in enumerate(tensors):
            if recorder is not None and not isinstance(tensor, torch.nn.Parameter):
                self._kept[index] = _Held(recorder.keep(tensor))
            elif recorder is None and _goes_into_bundle(tensor, policy):
                bundled.append(index)
            else:
                self._kept[index] = _Reference(tensor)
        self._in_bundle = bundled
        if bundled:
            chosen = [tensors[index] for index in bundled]
            self._bundle = Bundle(chosen, [is_sliced(t, policy) for t in chosen], policy, number)
        self._count_bytes(tensors, policy)

    def restore(self) -> tuple[Any, ...]:
        """The arguments, detached from the graph they came from.

        Collective over: the ranks that share activations, if anything is sliced.

        Raises:
            AgreementError: these ranks are at different calls, or hold different activations.
            UsageError: an argument was changed in place after the call.
        """
        found: list[torch.Tensor | None] = [None if kept is None else kept.get() for kept in self._kept]
        if self._bundle is not None:
            for index, tensor in zip(self._in_bundle, self._bundle.open(), strict=True):
                found[index] = tensor
        tensors = [_as_argument(t, *facts) for t, facts in zip(found, self._facts, strict=True) if t is not None]
        args: tuple[Any, ...] = map_slots(self._tree, lambda slot: tensors[slot.index])
        return args

    def check_unchanged(self) -> None:
        """Check after the first run that the arguments are unchanged.

        Raises:
            UsageError: it changed an argument in place.
        """
        seen, self._seen = self._seen, []
        for tensor, version in seen:
            if _version(tensor) != version:
                raise _changed(tensor, "the checkpointed function changed an argument in place")

    def _count_bytes(self, tensors: list[torch.Tensor], policy: Policy) -> None:
        if self._is_inside:
            return  # the outer call computes it again
        counted: Counter[str] = Counter()
        for tensor, kept in zip(tensors, self._kept, strict=True):
            if isinstance(kept, _Reference) and is_activation(tensor):
                counted[tensor.device.type] += tensor.nbytes
        if self._bundle is not None:
            counted[self._bundle.device_type] += self._bundle.activation_bytes
        for device_type, nbytes in counted.items():
            policy.account.keep(self, device_type, nbytes)


class _Reference:
    """A tensor, kept as it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A parameter may be sharded when it is needed. Other tensors are kept without the graph behind them.
        self._tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self._version = _version(self._tensor)

    def get(self) -> torch.Tensor:
        if _version(self._tensor) != self._version:
            raise _changed(self._tensor, "an argument of a checkpointed function was changed in place before backward")
        return self._tensor


class _Held:
    """A tensor that the outer call keeps."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def get(self) -> torch.Tensor:
        return self._handle.get().detach()


def is_activation(tensor: torch.Tensor) -> bool:
    """True if options for kept activations apply to a tensor: it is floating point and no parameter.

    Tensors with an attribute `no_checkpointing` that is true are left alone.
    """
    return (
        tensor.is_floating_point()
        and tensor.layout == torch.strided
        and not isinstance(tensor, torch.nn.Parameter)
        and not getattr(tensor, "no_checkpointing", False)
    )


def is_sliced(tensor: torch.Tensor, policy: Policy) -> bool:
    """True if an activation is sliced over the ranks: not if it is marked, or has fewer elements than ranks."""
    return policy.comm is not None and tensor.numel() >= policy.comm.size and not is_cut(tensor)


def _goes_into_bundle(tensor: torch.Tensor, policy: Policy) -> bool:
    if not is_activation(tensor) or not tensor.numel():
        return False
    moves = policy.on_host and tensor.device.type != "cpu"
    return moves or policy.slots is not None or is_sliced(tensor, policy)


def _as_argument(tensor: torch.Tensor, requires_grad: bool, was_cut: bool) -> torch.Tensor:
    if requires_grad and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return mark_cut(tensor) if was_cut else tensor


def _version(tensor: torch.Tensor) -> int:
    # Sharded parameters may be unsharded meanwhile by their owner; inference tensors have no versions.
    return 0 if isinstance(tensor, torch.nn.Parameter) or tensor.is_inference() else tensor._version


def _changed(tensor: torch.Tensor, what: str) -> UsageError:
    return UsageError(
        f"{what}, a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}: run again, the function would compute "
        "something else; let it work on a copy"
    )


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of a tree of tuples, lists and dicts with other leaves for its tensors."""
    return _map(tree, torch.Tensor, change)


def map_slots(tree: Any, change: Callable[[_Slot], Any]) -> Any:
    """The inverse of `map_tensors`."""
    return _map(tree, _Slot, change)


def _map(tree: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_map(item, kind, change) for item in tree)
    if type(tree) is dict:
        return {key: _map(item, kind, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(item, kind, change) for item in tree))
    return tree
