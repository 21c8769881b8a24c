"""Weights that layers of several stages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import StageError

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.pipe.layers import Layer


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters shared under one key.

    Attributes:
        key: its name.
        attrs: attributes named by the specs of all uses, sorted.
        stages: stages with a use, ascending.
        is_owner: True if this rank's stage is the first of them, which counts in norms and is saved.
        params: full name and parameter of all shared ones; empty on other stages.
        group: the ranks of this pipeline at `stages`; None on other stages, and where there is but one stage.
    """

    key: str
    attrs: tuple[str, ...]
    stages: tuple[int, ...]
    is_owner: bool
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    group: Comm | None = None


def attrs_of(layers: Sequence[Layer], key: str) -> tuple[str, ...]:
    """Attributes that all uses of a key name, sorted."""
    return tuple(
        sorted({attr for use in layers if use.tie and use.tie.key == key for attr in use.tie.tied_weight_attr})
    )


def weight_of(module: nn.Module, attr: str, key: str) -> torch.Tensor:
    """The tensor under a dotted attribute name.

    Raises:
        StageError: there is none.
    """
    found: Any = module
    for word in attr.split("."):
        found = getattr(found, word, None)
    if not isinstance(found, torch.Tensor):
        names = ", ".join(name for name, _ in module.named_parameters()) or "none"
        msg = (
            f"layers tied as {key!r} name the attribute {attr!r}, but {type(module).__name__} has no such tensor; its "
            f"parameters are: {names}; name one in tied_weight_attr"
        )
        raise StageError(msg)
    return found


def make_equal(tensors: Iterable[torch.Tensor], group: Comm) -> None:
    """Broadcast the first rank's values over `group`, in place; without those of torch's meta device.

    Collective over: `group`.
    """
    for tensor in tensors:
        if tensor.is_meta:
            continue
        values = tensor.detach().cpu().contiguous()
        group.broadcast(values)
        with torch.no_grad():
            tensor.copy_(values)


def sum_gradients(params: Sequence[nn.Parameter], group: Comm) -> None:
    """Add the gradients of all stages, in place; where some stages have none they count as zero.

    Collective over: the stages of the key.
    """
    has_grad = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8)
    group.all_reduce(has_grad, "max")
    for param, is_there in zip(params, has_grad.tolist(), strict=True):
        if not is_there:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        values = param.grad.cpu().contiguous()
        group.all_reduce(values)
        param.grad.copy_(values)
