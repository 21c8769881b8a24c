"""`OnDevice`: a context in which modules are made in a dtype and on a device, such as "meta"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = "empty zeros ones full rand randn randint arange linspace logspace eye tensor empty_strided normal"
_FACTORIES = frozenset(getattr(torch, name) for name in _NAMES.split())


class OnDevice(TorchFunctionMode):
    """Context in which torch's factories (torch.empty, torch.zeros, torch.tensor and so on) make tensors on `device`.

    Floating-point tensors get `dtype`, also those that are asked for in another. On "meta" they have no data, so that a
    model of any size can be described. `torch.Tensor(...)` and the constructors of its types are not changed.
    """

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        """Prepare the context.

        Args:
            dtype: of floating-point tensors; None: each keeps its own.
            device: for tensors that are asked for without a device.
            enabled: False: the context has no effect.

        Raises:
            UsageError: `dtype` is no floating-point dtype, or torch knows no such device.
        """
        super().__init__()
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            msg = f"OnDevice: dtype {dtype!r} is no floating-point dtype of torch; give torch.half or the like, or None"
            raise UsageError(msg)
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            msg = f'OnDevice: device {device!r} is none of torch ({error}); give "meta", "cpu" or "cuda"'
            raise UsageError(msg) from error
        self.dtype, self.enabled = dtype, enabled

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give factories the device, and what they make the dtype."""
        kwargs = kwargs or {}
        if not self.enabled or func not in _FACTORIES:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        made = func(*args, **kwargs)
        return made.to(self.dtype) if self.dtype is not None and made.is_floating_point() else made
