"""Smoke test of kernels on a device: the update of Adam there against that on the host."""

from __future__ import annotations

import torch

from mpispeed.base.errors import NativeMissing
from mpispeed.native import host_optim
from mpispeed.native.coefficients import adam_terms
from mpispeed.native.cuda import launcher
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.multi_tensor_host import Row

_COUNT = 10_007
_HYPER = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


def run(index: int) -> str:
    """Update some numbers on device `index`, on its default stream and on another; returns a summary.

    Raises:
        NativeMissing: a number differs from the host's, or no kernel ran.
    """
    device = torch.device("cuda", index)
    generator = torch.Generator().manual_seed(1)
    state = [torch.randn(_COUNT, generator=generator) for _ in range(4)]
    state[2].abs_()
    wanted = [x.clone() for x in state]
    host_optim.adam(*wanted, **_HYPER)  # type: ignore[arg-type]
    with torch.cuda.device(device):
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                param, first, second, grad = (x.to(device) for x in state)
                if launcher.for_tensor(param) is None:
                    raise NativeMissing(launcher.unusable_reason() or "no kernel was launched")
                DeviceTable("adam", [Row(param, (first, second), grad)]).run([adam_terms(**_HYPER)])  # type: ignore[arg-type]
                seen = [x.cpu() for x in (param, first, second)]
            if not all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=False)):
                msg = f"Adam on {device} differs from Adam on the host; do not train with this driver and compiler"
                raise NativeMissing(msg)
    return f"Adam on {torch.cuda.get_device_name(device)} gives the bits of the host, on two streams"
