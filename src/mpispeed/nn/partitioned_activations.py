"""Kept activations of one checkpointed call in one piece of memory, gathered by one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import AgreementError, UsageError

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.nn.policy import Policy

ALIGNMENT = 16
"""Bytes; where anything in a bundle begins, so that it can be looked at in its own dtype."""

SAMPLES = 8
"""Elements of a whole activation that travel with its slices, and activations of a call of which they do."""

TOLERANCE = 0.1
"""How far samples of ranks may be apart, relative to their size: more than rounding does, less than other data."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An activation in the bundle: bytes from `start` hold `count` elements, a slice or all of it."""

    start: int
    count: int
    is_sliced: bool
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Bundle:
    """Copies of activations, or this rank's slices of them.

    Memory order: slices, then samples of the sliced activations, then the full ones. The first two are one message.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], sliced: Sequence[bool], policy: Policy, number: int) -> None:
        """Copy them.

        Args:
            tensors: on any device, with any strides.
            sliced: for each, True if only this rank's slice is kept.
            policy: storage of the bundle, and the ranks that share it.
            number: of the call among those of the ranks that share it.

        Raises:
            UsageError: a size does not divide where it has to, or slots do not fit.
        """
        self._comm, self._number = policy.comm, number
        flats = [_flat(tensor) for tensor in tensors]
        self._entries, self._message_bytes, total = self._laid_out(tensors, flats, sliced, policy)
        device = torch.device("cpu") if policy.on_host else tensors[0].device
        self._memory = self._allocated(policy, total, device)
        for entry, flat in zip(self._entries, flats, strict=True):
            self._copy(entry, flat)
        self._take_samples(flats)
        # Copies to the host are only queued: readers there, such as MPI, have to wait for this.
        source = tensors[0].device
        self._copied = devices.mark(source) if policy.on_host and source.type != "cpu" else None

    @property
    def device_type(self) -> str:
        """Type of its device."""
        return self._memory.device.type

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations in it, with the padding of slices."""
        return sum(entry.nbytes for entry in self._entries)

    def open(self) -> list[torch.Tensor]:
        """The full activations, with the strides and on the devices they had. Not to be written to.

        Collective over: the ranks that share activations, if anything was sliced.

        Raises:
            AgreementError: these ranks are at different calls, or hold different activations.
        """
        whole = self._collect() if self._message_bytes else None
        found = []
        for entry in self._entries:
            span = slice(entry.start, entry.start + entry.nbytes)
            if whole is not None and entry.is_sliced:
                flat = whole[:, span].contiguous().view(-1).view(entry.dtype)[: entry.shape.numel()]
            else:
                # A copy: a slot is reused when this call's graph is gone, while others may still hold the result.
                flat = self._memory[span].view(entry.dtype)
                flat = flat.clone() if flat.device == entry.device else flat
            found.append(flat.to(entry.device, non_blocking=True).as_strided(entry.shape, entry.stride))
        return found

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _laid_out(
        self,
        tensors: Sequence[torch.Tensor],
        flats: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
        sliced: Sequence[bool],
        policy: Policy,
    ) -> tuple[list[_Entry], int, int]:
        """Entries, bytes of the message, bytes of all."""
        size = 1 if policy.comm is None else policy.comm.size
        starts: dict[int, int] = {}
        position = message = 0
        for group in (True, False):
            for index, (tensor, is_sliced) in enumerate(zip(tensors, sliced, strict=True)):
                if is_sliced == group:
                    starts[index] = position
                    count = -(-tensor.numel() // size) if is_sliced else tensor.numel()
                    position += _aligned(count * tensor.itemsize)
            if group and starts:
                position += _aligned(4 * SAMPLES * min(len(starts), SAMPLES))
                message = position
        entries = []
        for index, (tensor, (_, stride), is_sliced) in enumerate(zip(tensors, flats, sliced, strict=True)):
            if is_sliced and policy.is_strict and tensor.numel() % size:
                msg = (
                    f"partition_activations in strict mode: an activation of shape {tuple(tensor.shape)} has "
                    f"{tensor.numel()} elements, which {size} ranks do not divide; without strict mode its last "
                    "slice is padded"
                )
                raise UsageError(msg)
            count = -(-tensor.numel() // size) if is_sliced else tensor.numel()
            entries.append(_Entry(starts[index], count, is_sliced, tensor.dtype, tensor.shape, stride, tensor.device))
        return entries, message, position

    def _allocated(self, policy: Policy, total: int, device: torch.device) -> torch.Tensor:
        if policy.slots is not None:
            return policy.slots.take(self, total, device)
        return (
            devices.pinned(total, torch.uint8)
            if policy.on_host
            else torch.empty(total, dtype=torch.uint8, device=device)
        )

    def _copy(self, entry: _Entry, flat: tuple[torch.Tensor, tuple[int, ...]]) -> None:
        values, place = flat[0], self._memory[entry.start : entry.start + entry.nbytes].view(entry.dtype)
        if not entry.is_sliced or self._comm is None:
            place.copy_(values, non_blocking=True)
            return
        first = min(self._comm.rank * entry.count, values.numel())
        own = values[first : first + entry.count]
        place[: own.numel()].copy_(own, non_blocking=True)
        place[own.numel() :].zero_()

    def _take_samples(self, flats: Sequence[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
        if not self._message_bytes:
            return
        samples = self._samples(self._memory[: self._message_bytes])
        samples.zero_()
        sliced = [flat for entry, (flat, _) in zip(self._entries, flats, strict=True) if entry.is_sliced]
        for row, flat in zip(samples, sliced, strict=False):
            # One less than a whole part, so that samples of a matrix do not all come from one column.
            some = flat[:: max(1, (flat.numel() - 1) // SAMPLES)][:SAMPLES]
            row[: some.numel()].copy_(some, non_blocking=True)

    def _samples(self, message: torch.Tensor) -> torch.Tensor:
        """Shapes: [activations, SAMPLES], a view of the message's end."""
        count = min(sum(entry.is_sliced for entry in self._entries), SAMPLES)
        return message[-4 * SAMPLES * count :].view(torch.float32).view(count, SAMPLES)

    # -- collecting ------------------------------------------------------------------------------------------------

    def _collect(self) -> torch.Tensor:
        """The messages of all ranks. Shapes: [ranks, bytes]. Collective over: the ranks that share activations."""
        comm = self._comm
        if comm is None:
            msg = "slices are kept and no group of ranks to collect them from"
            raise UsageError(msg)
        if self._copied is not None:
            self._copied.synchronize()
        message = self._memory[: self._message_bytes].cpu()
        whole = torch.empty(comm.size * message.numel(), dtype=torch.uint8)
        label = f"of checkpointed call {self._number}, {message.numel()} bytes"
        if comm.progress is None:
            _compare(comm, self._number, message.numel(), label)
        work = comm.start(
            lambda lane: lane.all_gather(whole, message), "recompute", (whole, message), label, lambda: _told(label)
        )
        work.wait()
        rows = whole.view(comm.size, -1)
        self._check_equal(rows, comm)
        return rows

    def _check_equal(self, rows: torch.Tensor, comm: Comm) -> None:
        """Check that slices were taken of equal activations; all ranks compare the same numbers."""
        samples = torch.stack([self._samples(row) for row in rows]).nan_to_num()
        apart = (samples - samples[0]).norm(dim=-1)
        size = samples.norm(dim=-1) + samples[0].norm(dim=-1)
        wrong = (apart > TOLERANCE * size).nonzero()
        if not wrong.numel():
            return
        rank, which = (int(number) for number in wrong[0])
        entry = [entry for entry in self._entries if entry.is_sliced][which]
        error = AgreementError(
            f"partition_activations keeps a slice on each rank of what is equal on all ranks of {comm}, but an "
            f"activation of shape {tuple(entry.shape)} differs between ranks {comm.ranks[0]} and {comm.ranks[rank]}; "
            "if it is cut over these ranks already, by sequence or by heads, mark it with "
            "mpispeed.checkpointing.mark_cut(tensor)"
        )
        error.is_collective = True
        raise error


def _compare(comm: Comm, number: int, nbytes: int, label: str) -> None:
    """Check the order of calls, as channels do for started operations. Collective over: `comm`."""
    told = torch.empty(comm.size, 2, dtype=torch.int64)
    comm.all_gather(told, torch.tensor([number, nbytes]))
    if bool((told == told[0]).all()):
        return
    texts = "; ".join(
        f"rank {rank}: call {row[0]}, {row[1]} bytes" for rank, row in zip(comm.ranks, told.tolist(), strict=True)
    )
    error = AgreementError(f"ranks of {comm} want different things: {texts}. {_told(label)}")
    error.is_collective = True
    raise error


def _told(label: str) -> str:
    return f"slices {label} (all ranks of a slicing group have to checkpoint the same calls in the same order)"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The elements in memory order, and the strides that restore the tensor from them."""
    source = tensor.detach()
    if not _is_dense(source):
        source = source.contiguous()
    return source.as_strided((source.numel(),), (1,)), source.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a range of memory without overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
