"""Persistent buffers, such as BatchNorm's running statistics, kept equal on all data ranks after steps and at saves.

A forward pass updates them from one rank's data. Floating-point buffers become their mean over the data ranks, others
take the first rank's value. Buffers that are not persistent, such as caches, are left alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpispeed.base import log as logs
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)


class _Form(NamedTuple):
    """Shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Zeros, as many doubles as `Buffers._part` returns for such a buffer."""
        doubles = math.prod(self.shape) * (1 if self.dtype.is_floating_point else self.dtype.itemsize)
        return torch.zeros(doubles, dtype=torch.float64, device=device)


def _form(buffer: torch.Tensor) -> _Form:
    return _Form(tuple(buffer.shape), buffer.dtype)


class Buffers:
    """The persistent buffers of one model.

    Most never change. Those that do are found by checksums after the first step and at saves, and in between whenever
    torch's version counters show a change. So a step costs one all-reduce, of the changing buffers and two flags.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        self._holders = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._values: dict[str, int] = {}
        self._changes: list[tuple[int, int]] = []
        self._moving: dict[str, _Form] = {}
        self._unlike: set[str] = set()
        self._is_settled = False
        self.look()

    @classmethod
    def of(cls, model: nn.Module, comm: Comm) -> Buffers | None:
        """Those of `model`; None where there are none, or one rank has all data."""
        found = cls(model, comm) if comm.size > 1 else None
        return found if found is not None and found._holders else None

    def look(self) -> None:
        """Record the present values as equal on all ranks, as after loading. Local."""
        self._values = {name: _checksum(buffer) for name, buffer in self._named()}
        self._changes = self._counted()

    def equalise(self, *, is_thorough: bool = False) -> None:
        """Give all data ranks the same buffers.

        Args:
            is_thorough: compare the values of all buffers; otherwise only of those known to change, and of the others
                if torch has counted a change.

        Collective over: the data axis.
        """
        if is_thorough or not self._is_settled or self._mean(is_changed=self._counted() != self._changes):
            self._find_moving()
            self._mean(is_changed=False)
            self._is_settled = True
        self._changes = self._counted()

    def _find_moving(self) -> None:
        """Find the buffers that have changed on any rank. Collective over: the data axis."""
        buffers = dict(self._named())
        own = {name for name in buffers.keys() - self._unlike if _checksum(buffers[name]) != self._values.get(name)}
        shapes = {name: _form(buffer) for name, buffer in buffers.items()}
        everyone = self._comm.gather_objects((own, shapes))
        changed = set().union(self._moving, *(names for names, _ in everyone))
        unlike = {name for name in changed if any(others.get(name) != shapes.get(name) for _, others in everyone)}
        self._unlike |= unlike
        if unlike and self._comm.rank == 0:
            logs.once(
                log,
                logging.WARNING,
                f"buffer {min(unlike)} has other shapes on other data ranks: each keeps its own, and a checkpoint "
                "cannot have it; register it with persistent=False",
            )
        self._moving = {name: shapes[name] for name in buffers if name in changed - unlike}

    def _mean(self, *, is_changed: bool) -> bool:
        """Average the changing buffers; True if on any rank other buffers have changed, or one has another form.

        Nothing is written where one has another form. Collective over: the data axis.
        """
        buffers = dict(self._named())
        moving = [buffers[name] for name, form in self._moving.items() if name in buffers]
        is_odd = [_form(buffer) for buffer in moving] != list(self._moving.values())
        device = moving[0].device if moving else torch.device("cpu")
        # In doubles, the sum of equal 32-bit values divided by their number is that value again. A buffer that has
        # another form here still contributes a part as long as on other ranks.
        parts = [form.zeros(device) if is_odd else self._part(buffers[name]) for name, form in self._moving.items()]
        flags = torch.tensor([float(is_changed or is_odd), float(is_odd)], dtype=torch.float64, device=device)
        total = torch.cat([*parts, flags])
        self._comm.all_reduce(total)
        must_look, anywhere_odd = total[-2:].tolist()
        if not anywhere_odd:
            for buffer, part in zip(moving, total[:-2].split([part.numel() for part in parts]), strict=True):
                if buffer.is_floating_point():
                    mean = (part / self._comm.size).to(buffer.dtype).view(buffer.shape)
                else:
                    mean = part.to(torch.uint8).view(buffer.dtype).view(buffer.shape)
                buffer.data.copy_(mean)
        return bool(must_look)

    def _part(self, buffer: torch.Tensor) -> torch.Tensor:
        """The summand of this rank in doubles: the values, or (not floating point) bytes on the first rank, else 0."""
        flat = buffer.detach().contiguous().view(-1)
        if buffer.is_floating_point():
            return flat.double()
        return flat.view(torch.uint8).double() * (self._comm.rank == 0)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and buffers that exist and are not empty, each tensor once."""
        seen: set[int] = set()
        for name, module, key in self._holders:
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.numel() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer

    def _counted(self) -> list[tuple[int, int]]:
        """Identity and version counter of the buffers that are not known to change."""
        known = self._unlike.union(self._moving)
        still = [buffer for name, buffer in self._named() if name not in known]
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in still]


def _checksum(buffer: torch.Tensor) -> int:
    return crc32c(buffer.detach().cpu().contiguous())
