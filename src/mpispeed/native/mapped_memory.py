"""Memory of a device that several processes of a node have mapped, and signals between their streams."""

from __future__ import annotations

import abc

import torch

HANDLE_BYTES = 64
"""Most that a handle has."""


class Signal(abc.ABC):
    """A place in the order of a stream that streams of other processes can wait for.

    A stream that follows waits for the last `set` that came before in time: hosts have to meet between the two.
    """

    handle: bytes

    @abc.abstractmethod
    def set(self) -> None:
        """Set it behind all that this thread has queued."""

    @abc.abstractmethod
    def follow(self) -> None:
        """Let later work of this thread wait for it; a signal that was never set is not waited for."""


class Mapper(abc.ABC):
    """Makes memory of one device for other processes, and maps theirs.

    Attributes:
        device: the memory's, also of what other processes have made.
        waits_on_host: signals make the host wait for the device.
    """

    waits_on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """New memory, and the handle by which others open it.

        Shapes: [nbytes], of bytes.
        """

    @abc.abstractmethod
    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Memory that another process has allocated. Shapes: [nbytes], of bytes."""

    @abc.abstractmethod
    def make_signal(self) -> Signal:
        """A signal of this process."""

    @abc.abstractmethod
    def open_signal(self, handle: bytes) -> Signal:
        """A signal of another process, which is only followed here."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Unmap what other processes have made; they free it after all have."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give back what was allocated here."""


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes at an address of a device, which the caller keeps. Shapes: [nbytes]."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    with torch.inference_mode(False):  # it serves calls outside of that mode too
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
