"""Generators that training draws from (torch, numpy, Python's random): capture and restore, named streams per axis.

Replicated computation needs equal dropout masks on all slices of a layer: that is the default stream. Sliced
computation needs a different mask on every rank: such a region runs in `get_rng_tracker().fork()`. All generators of
torch are switched together, that of the host and that of the device.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv 1909.08053, appendix B.2; the offset of the seeds is DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import UsageError


def capture() -> dict[str, bytes]:
    """The state of all generators of this process, by kind, as plain bytes."""
    state = np.random.get_state(legacy=False)
    head = {key: state[key] for key in ("bit_generator", "has_gauss", "gauss")}
    version, numbers, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": _pack({**head, "pos": state["state"]["pos"]}, state["state"]["key"]),
        "python": _pack({"version": version, "gauss": gauss}, np.asarray(numbers, dtype="<u4")),
    }
    device = devices.used()
    if device is not None:
        states[device.type] = devices.module_of(device).get_rng_state().cpu().numpy().tobytes()
    return states


def restore(states: dict[str, bytes]) -> None:
    """Restore generators to the state that `capture` saw; missing kinds stay as they are."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        head, keys = _unpack(states["numpy"])
        np.random.set_state({**head, "state": {"key": keys, "pos": head.pop("pos")}})
    if "python" in states:
        head, words = _unpack(states["python"])
        random.setstate((head["version"], tuple(int(w) for w in words), head["gauss"]))
    device = devices.used()
    if device is not None and device.type in states:
        state = torch.frombuffer(bytearray(states[device.type]), dtype=torch.uint8)
        devices.module_of(device).set_rng_state(state)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Context after which all generators are as they were before it."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def seed_torch(seed: int) -> None:
    """Seed torch's generators: of all devices, or of the host if there are no others.

    `torch.manual_seed` formats tracebacks for CUDA and others, which may be started later; layers of pipelines and
    dropouts of slices are seeded in each pass.
    """
    if devices.used() is None and not torch.accelerator.is_available():
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_all(*numbers: int) -> None:
    """Seed all generators of this process from `numbers`; other numbers give unrelated streams."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    seed_torch(seed)
    np.random.seed(seed)
    random.seed(seed)


def _pack(head: dict[str, Any], words: np.ndarray) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(4, "little") + text + np.ascontiguousarray(words, dtype="<u4").tobytes()


def _unpack(data: bytes) -> tuple[dict[str, Any], np.ndarray]:
    size = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + size]), np.frombuffer(data[4 + size :], dtype="<u4")


log = logging.getLogger(__name__)

MODEL_PARALLEL = "model-parallel-rng"
"""The stream that differs between the ranks of a slicing group."""

SLICE_OFFSET = 2718
"""What is added to the user's seed, besides the rank in the slicing group."""

State = dict[str, torch.Tensor]
"""States of torch's generators by device type, as uint8 tensors in host memory. Never changed in place."""


def capture_torch() -> State:
    """The states of the generators that layers draw from on this rank."""
    state = {"cpu": torch.get_rng_state()}
    device = _device()
    if device is not None:
        state[device.type] = devices.module_of(device).get_rng_state()
    return state


def capture_others() -> tuple[Any, Any]:
    """The states of the generators of numpy and Python, as they are."""
    return np.random.get_state(), random.getstate()


def restore_others(states: tuple[Any, Any]) -> None:
    """Restore them to the states of `capture_others`."""
    np.random.set_state(states[0])
    random.setstate(states[1])


def restore_torch(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the generators to the states of `capture_torch`; devices that are missing in it stay as they are."""
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
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
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
            seed_torch(seed)
            self._states[name] = capture_torch()

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
            restore_torch(self._states[name])
            try:
                yield
            finally:
                self._states[name] = capture_torch()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context that restores the generators afterwards."""
        before = capture_torch()
        try:
            yield
        finally:
            restore_torch(before)


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
    seed_torch(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + SLICE_OFFSET + slice_rank)
    log.info("random streams: default %d, %s %d + rank of the slice", seed, MODEL_PARALLEL, seed + SLICE_OFFSET)


def reseed_slices(seed: int, slice_rank: int) -> None:
    """Start `MODEL_PARALLEL` again at `seed` + 2718 + `slice_rank`; everything else stays.

    Raises:
        UsageError: the stream was never started.
    """
    with _TRACKER.fork():
        seed_torch(seed + SLICE_OFFSET + slice_rank)
