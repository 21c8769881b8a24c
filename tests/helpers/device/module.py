"""What torch.get_device_module("standin") gives: the functions that torch.cuda has and callers of any device use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "standin"
Stream = torch.Stream
Event = torch.Event

_is_visible = False


@contextmanager
def visible() -> Iterator[None]:
    """Let the device be found as the accelerator of this process.

    Elsewhere it has to be named: a process keeps a device it has registered, and tests that come later in the
    same process shall go on to find none.
    """
    global _is_visible
    before, _is_visible = _is_visible, True
    try:
        yield
    finally:
        _is_visible = before


def module_over(library: ctypes.CDLL) -> ModuleType:
    """The module, with the memory that the library counts."""
    module = ModuleType(f"torch.{NAME}")
    module._initialized = True  # type: ignore[attr-defined]  # torch.utils.checkpoint keeps random states only then
    library.standin_bytes.restype = ctypes.c_int64
    for function in (*_DEVICES, *_RANDOM):
        setattr(module, function.__name__.removesuffix("_"), function)
    module.Stream, module.Event, module.stream = Stream, Event, stream  # type: ignore[attr-defined]
    module.memory_allocated = lambda device=None: library.standin_bytes(_index(device), 0)  # type: ignore[attr-defined]
    module.memory_reserved = module.memory_allocated  # type: ignore[attr-defined]
    module.max_memory_allocated = lambda device=None: library.standin_bytes(_index(device), 1)  # type: ignore[attr-defined]
    module.max_memory_reserved = module.max_memory_allocated  # type: ignore[attr-defined]
    module.reset_peak_memory_stats = lambda device=None: library.standin_reset_peak(_index(device))  # type: ignore[attr-defined]
    return module


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return _is_visible


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def empty_cache() -> None:
    pass


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Any) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_TYPE_NUMBER)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work inside of the block belongs to this stream; None changes nothing, as in torch.cuda."""
    if stream is None:
        yield
        return
    with stream:
        yield


@contextmanager
def device_(device: Any) -> Iterator[None]:
    """The current device inside of the block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return f"stand-in {_index(device)}"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = 1 << 40
    return total - torch.get_device_module(NAME).memory_allocated(device), total


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def default_generator(device: Any = None) -> torch.Generator:
    return torch.ops.standin.default_generator(_index(device))


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for i in range(device_count()):
        default_generator(i).manual_seed(seed)


def seed() -> int:
    return default_generator().seed()


def initial_seed() -> int:
    return default_generator().initial_seed()


def _is_in_bad_fork() -> bool:
    return False


_TYPE_NUMBER = 20  # of PrivateUse1 among torch's device types
_DEVICES = (
    is_available,
    is_initialized,
    init,
    empty_cache,
    device_count,
    current_device,
    set_device,
    synchronize,
    current_stream,
    default_stream,
    set_stream,
    device_,
    get_device_name,
    mem_get_info,
    is_bf16_supported,
    get_amp_supported_dtype,
)
_RANDOM = (
    get_rng_state,
    set_rng_state,
    get_rng_state_all,
    set_rng_state_all,
    manual_seed,
    manual_seed_all,
    seed,
    initial_seed,
    _is_in_bad_fork,
)
