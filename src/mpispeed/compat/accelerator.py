"""DeepSpeed's accelerator object: the device of this process under one set of names, the host included."""

from __future__ import annotations

from typing import Any

import torch

from mpispeed.base.device import HOST, module_of, used


class DeepSpeedAccelerator:
    """Answers for the device that the process computes on, which is chosen at `initialize`; the host without one.

    What is not defined here is taken from torch.cuda or its counterpart (torch.cpu on the host) under the same name:
    `synchronize`, `Stream`, `memory_allocated`, `empty_cache` and so on.

    Source: DeepSpeed documentation, "Accelerator abstraction interface".
    """

    @property
    def _device(self) -> torch.device:
        if used() is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return used() or HOST

    @property
    def _name(self) -> str:
        return self._device.type

    def __getattr__(self, name: str) -> Any:
        found = getattr(module_of(self._device), name, None)
        if found is None:
            msg = f"the accelerator of device {self._device} has no {name!r}"
            raise AttributeError(msg)
        return found

    def device_name(self, device_index: int | str | None = None) -> str:
        """Name for `Tensor.to`: "cpu", or "cuda" with the index if one is given."""
        return self._name if device_index is None or self._device == HOST else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Name of the device of this process, with its index."""
        return str(self._device)

    def current_device(self) -> int | str:
        """Index of the device; "cpu" on the host."""
        return "cpu" if self._device == HOST else self._device.index or 0

    def communication_backend_name(self) -> str:
        """The back end of torch.distributed that reaches this device."""
        return "mpi4py"

    def device_count(self) -> int:
        """Devices that this process sees; 0 on the host."""
        return 0 if self._device == HOST else int(module_of(self._device).device_count())

    def is_available(self) -> bool:
        """True: there is always the host."""
        return True

    def is_bf16_supported(self) -> bool:
        """True if the device computes in bfloat16."""
        return self._device == HOST or bool(module_of(self._device).is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """True if the device computes in half precision."""
        return True

    def is_synchronized_device(self) -> bool:
        """True if work is done when a call returns, as on the host."""
        return self._device == HOST

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; 0 on the host."""
        return 0 if self._device == HOST else int(module_of(self._device).memory_allocated(device_index))

    def empty_cache(self) -> None:
        """Give unused device memory back."""
        if self._device != HOST:
            module_of(self._device).empty_cache()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy in pinned host memory; the tensor itself without a device."""
        del align_bytes
        return tensor if self._device == HOST else tensor.pin_memory()

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device of the process."""
        torch.manual_seed(seed)


_ACCELERATOR = DeepSpeedAccelerator()


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process."""
    return _ACCELERATOR


def set_accelerator(accelerator: object) -> None:
    """Raise ValueError: the device follows the model (`initialize`) and CUDA_VISIBLE_DEVICES."""
    msg = f"the accelerator cannot be set to {accelerator!r}: the device is that of the model given to initialize"
    raise ValueError(msg)
