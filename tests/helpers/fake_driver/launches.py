"""Kernels through pycuda, with the driver of the tests: every entry of the catalog, streams, threads, contexts."""

from __future__ import annotations

import ctypes
import json
import struct
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pycuda._pvt_struct
import torch

from mpispeed.native.cuda import launcher
from mpispeed.native.cuda.catalog import KERNELS
from mpispeed.native.norm import layer_norm
from mpispeed.native.transformer import bias_gelu

_driver = ctypes.CDLL("libcuda.so.1")


class Event:
    """As torch.cuda.Event: to record one is a call of the runtime."""

    def record(self, stream: int) -> None:
        _driver.mpispeed_fake_runtime_call()


now = 0


def stand_in_for_torch() -> None:
    """This torch knows no device: what the launcher asks it is answered here."""
    torch.cuda.device = lambda index: nullcontext()
    torch.cuda.synchronize = lambda index=None: None
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(multi_processor_count=4, major=9, minor=0)
    torch.cuda.Event = Event
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda index=None: now
    torch._C._cuda_getCurrentRawStream = lambda index: now


def values_of(arguments: str) -> list[object]:
    """Some value for each field of a format."""
    found: list[object] = []
    digits = ""
    for letter in arguments:
        if letter.isdigit():
            digits += letter
            continue
        found.append(bytes(at % 251 for at in range(int(digits or 1))) if letter == "s" else len(found) + 3)
        digits = ""
    return found


def refusals(device: launcher.DeviceLauncher) -> list[str]:
    """What is said to arguments of another number or size, and of a launch that the driver refuses."""
    said = []
    block = ((1, 1, 1), (32, 1, 1))
    for call in (
        lambda: device.launch("column_sum_f32", *block, 1),
        lambda: device.prepare("column_sum_f32", *block, b"12345678"),
        lambda: device.prepare("column_sum_f32", *block, bytes(16))(1, 2),
        lambda: device._queue.run("column_sum_f32", device._functions["column_sum_f32"], *block, 0, b"1234"),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def main() -> None:
    """Print what was found as one line of JSON."""
    global now
    stand_in_for_torch()
    device = launcher.DeviceLauncher(0)
    said: dict[str, object] = {"arch": device.arch, "processors": device.processors}
    said["packed alike"] = sum(
        pycuda._pvt_struct.pack(kernel.arguments, *values_of(kernel.arguments))
        == struct.pack(kernel.arguments, *values_of(kernel.arguments))
        for kernel in KERNELS.values()
    )
    for kernel in KERNELS.values():
        if kernel.name not in device._functions:
            device._load(kernel.source)
    said["loaded"] = len(device._functions)
    said["depth after loading"] = _driver.mpispeed_fake_depth()

    x, w, b = torch.randn(5, 96), torch.randn(96), torch.randn(96)
    wanted = torch.nn.functional.layer_norm(x, (96,), w, b, 1e-5)
    with launcher.standing_in(device):
        said["default stream"] = (layer_norm(x, w, b, 1e-5) - wanted).abs().max().item()
        said["launches there"] = [_driver.mpispeed_fake_launches(), _driver.mpispeed_fake_last_stream()]
        now = 77
        said["another stream"] = (layer_norm(x, w, b, 1e-5) - wanted).abs().max().item()
        said["launches on the other"] = [_driver.mpispeed_fake_launches(), _driver.mpispeed_fake_last_stream()]

        # Backward runs in a thread of its own, in which no context is current.
        leaf = x.clone().requires_grad_()
        errors: list[str] = []

        def backward() -> None:
            try:
                bias_gelu(leaf, b).sum().backward()
            except Exception as error:
                errors.append(repr(error))

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        said["errors of a thread"] = errors
        other = x.clone().requires_grad_()
        torch.nn.functional.gelu(other + b, approximate="tanh").sum().backward()
        said["gradient of a thread"] = (leaf.grad - other.grad).abs().max().item() if not errors else None
    said["refused"] = refusals(device)
    said["depth at the end"] = _driver.mpispeed_fake_depth()
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main()
