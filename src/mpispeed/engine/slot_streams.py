"""Random numbers of slots: all generators are seeded for each slot, and go on as before after its backward.

A slot is a micro-batch of the global batch, numbered without regard to the ranks (`plan/slots.py`).
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING

from mpispeed.base import rng, slot_scope
from mpispeed.base.errors import UsageError
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.slots import Slots

_DEFAULT, _NAMED = 0x51, 0x52
"""Kinds of streams, so that no two have the same key."""


class SlotStreams:
    """The generators of one run in the forward passes of its slots.

    The default streams of torch, numpy and Python are those of (seed, update, slot, virtual stage, place in the
    sequence, pass of the slot), equal for all slices; each named stream of the tracker has its name and the slice too.
    """

    def __init__(
        self, seed: int, slots: Callable[[], Slots | None], mesh: Mesh, model: nn.Module, stages: tuple[int, int]
    ) -> None:
        """Args: `stages` are the stage of this rank and their number; `slots` gives the slots of the plan."""
        self._seed, self._slots, self._mesh = seed, slots, mesh
        self._stage, self._stages = stages
        self._buffers = _Buffers(model)
        self._outer: tuple[dict[str, bytes], dict[str, rng.State]] | None = None
        self._key: tuple[int, ...] = ()
        self._passes = 0

    def begin(self, update: int, micro_step: int, chunk: int = 0) -> int:
        """Seed for the pass of a micro-step, unless another pass of it runs still; returns its slot. Local."""
        slots = self._slots()
        if slots is None:
            msg = "streams of slots without slots"
            raise TypeError(msg)
        slot = slots.slot(self._mesh.index("batch"), micro_step)
        key = update, slot, chunk * self._stages + self._stage
        if self._outer is not None and key == self._key:
            return slot
        self._passes = self._passes + 1 if key == self._key else 0
        self._key = key
        tracker = rng.get_rng_tracker()
        if self._outer is None:
            self._outer = rng.capture(), tracker.get_states()
        numbers = (*key, self._mesh.index("sequence"), self._passes)
        states = {}
        for name in tracker.get_states():
            stream = zlib.crc32(name.encode())
            rng.seed_all(self._seed, _NAMED, *numbers, stream, self._mesh.index("model"))
            states[name] = rng.capture_torch()
        tracker.set_states(states)
        rng.seed_all(self._seed, _DEFAULT, *numbers)
        return slot

    def leave(self) -> None:
        """Let the generators go on as they were before the slot. Local; without a slot nothing happens."""
        outer, self._outer = self._outer, None
        if outer is not None:
            rng.restore(outer[0])
            rng.get_rng_tracker().set_states(outer[1])

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the forward pass of a slot.

        Raises:
            UsageError: the pass has changed a buffer of the model, or asks for the rank.
        """
        if self._outer is None:  # an evaluation
            yield
            return
        before = self._buffers.state()
        with slot_scope.inside():
            yield
        changed = self._buffers.changed_since(before)
        if changed:
            msg = (
                f'reduction "invariant": the forward pass changes buffer {changed!r} of the model, which would depend '
                "on the micro-batches that this rank has computed; register it with persistent=False if no result "
                "depends on it, take a layer without running statistics (LayerNorm, GroupNorm), or use reduction "
                "ordered"
            )
            raise UsageError(msg)


class _Buffers:
    """The persistent buffers of a model, to find those that a pass changes.

    They are compared by torch's counts of changes, in the first pass by values too: writes through .data are not
    counted. Masks of compressed layers follow from the weights, which are the same on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
            and not (name.endswith("_mask") and "_compression_state" in vars(module))
        ]
        self._is_first = True

    def state(self) -> list[tuple[int, int, int]]:
        """What is compared, of each buffer."""
        return [_state_of(module._buffers.get(key), by_value=self._is_first) for _, module, key in self._holders]

    def changed_since(self, before: list[tuple[int, int, int]]) -> str:
        """The name of a buffer that has changed since, or ""."""
        after = self.state()
        self._is_first = False
        names = (name for (name, _, _), old, new in zip(self._holders, before, after, strict=True) if old != new)
        return next(names, "")


def _state_of(buffer: torch.Tensor | None, *, by_value: bool) -> tuple[int, int, int]:
    if buffer is None:
        return 0, 0, 0
    value = crc32c(buffer.detach().cpu().contiguous()) if by_value and buffer.numel() else 0
    return id(buffer), 0 if buffer.is_inference() else buffer._version, value
