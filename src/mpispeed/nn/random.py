"""Random streams per axis: some equal over the slices of a layer, others different between them.

Replicated computation needs equal dropout masks on all slices: that is the default stream. Sliced computation needs a
different mask on every rank: such a region runs in `get_rng_tracker().fork()`. All generators of torch are switched
together, that of the host and that of the device.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv 1909.08053, appendix B.2; the offset of the seeds is DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import UsageError

log = logging.getLogger(__name__)

MODEL_PARALLEL = "model-parallel-rng"
"""The stream that differs between the ranks of a slicing group."""

SLICE_OFFSET = 2718
"""What is added to the user's seed, besides the rank in the slicing group."""

State = dict[str, torch.Tensor]
"""States of torch's generators by device type, as uint8 tensors in host memory. Never changed in place."""


def capture() -> State:
    """The states of the generators that layers draw from on this rank."""
    state = {"cpu": torch.get_rng_state()}
    device = _device()
    if device is not None:
        state[device.type] = devices.module_of(device).get_rng_state()
    return state


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the generators to the states of `capture`; devices that are missing in it stay as they are."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    device = _device()
    if device is not None and device.type in state:
        devices.module_of(device).set_rng_state(state[device.type])


def _device() -> torch.device | None:
    """The device of this process, as an engine or a script has chosen it; None: the host."""
    if devices.used() is not None:
        return devices.used()
    # Asking a device that nobody uses for its state would start it.
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else None


class RNGStatesTracker:
    """Named streams of random numbers beside the default one."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all streams and seeds."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, State]:
        """The state of every stream by name: for a checkpoint, besides the default stream."""
        return {name: dict(state) for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all streams by the result of `get_states`."""
        self._states = {name: dict(state) for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """A new stream that starts at `seed`; the default stream stays as it is.

        Raises:
            UsageError: (a RuntimeError) the seed or the name is taken.
        """
        if seed in self._seeds:
            msg = f"seed {seed} already exists in the tracker and gives the same numbers; choose another for {name!r}"
            raise UsageError(msg)
        if name in self._states:
            msg = f"stream {name!r} already exists in the tracker; choose another name, or reset() it first"
            raise UsageError(msg)
        self._seeds.add(seed)
        with self._aside():
            torch.manual_seed(seed)
            self._states[name] = capture()

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the stream `name` inside the block, and from the stream before after it, also on errors.

        Raises:
            UsageError: there is no such stream.
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            msg = (
                f"stream {name!r} is not added to the tracker, which has {known}; call "
                "model_parallel_manual_seed(seed) after checkpointing.configure, or add(name, seed)"
            )
            raise UsageError(msg)
        with self._aside():
            restore(self._states[name])
            try:
                yield
            finally:
                self._states[name] = capture()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context that restores the generators afterwards."""
        before = capture()
        try:
            yield
        finally:
            restore(before)


_TRACKER = RNGStatesTracker()


def get_rng_tracker() -> RNGStatesTracker:
    """The tracker of this process."""
    return _TRACKER


def seed_streams(seed: int, slice_rank: int) -> None:
    """Start all streams: the default one at `seed`, `MODEL_PARALLEL` at `seed` + 2718 + `slice_rank`.

    So the default stream is equal over a slicing group, and the other one over ranks that hold the same slice. Replaces
    other seeding of torch; streams that were in the tracker are gone.
    """
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + SLICE_OFFSET + slice_rank)
    log.info("random streams: default %d, %s %d + rank of the slice", seed, MODEL_PARALLEL, seed + SLICE_OFFSET)


def reseed_slices(seed: int, slice_rank: int) -> None:
    """Start `MODEL_PARALLEL` again at `seed` + 2718 + `slice_rank`; everything else stays.

    Raises:
        UsageError: the stream was never started.
    """
    with _TRACKER.fork():
        torch.manual_seed(seed + SLICE_OFFSET + slice_rank)
