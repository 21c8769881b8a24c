"""Smoke test of kernels on a device: the update of Adam there against that on the host."""

from __future__ import annotations

import torch

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda import launcher
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.flat import DECAY_DECOUPLED, Terms
from mpispeed.native.multi_tensor_host import HostTable, Row

_COUNT = 10_007
_ADAMW = Terms(0.9, 0.999, step_size=4e-3, root_scale=18.0, eps=1e-8, decay=1e-4, decay_mode=DECAY_DECOUPLED)
"""About those of an update at the beginning of a training."""


def _row(param: torch.Tensor, first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor) -> Row:
    return Row(param, (first, second), grad)


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
    HostTable("adam", [_row(*wanted)]).run([_ADAMW])
    with torch.cuda.device(device):
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                row = _row(*(x.to(device) for x in state))
                if launcher.for_tensor(row.param) is None:
                    raise NativeMissing(launcher.unusable_reason() or "no kernel was launched")
                DeviceTable("adam", [row]).run([_ADAMW])
                seen = [x.cpu() for x in (row.param, *row.states)]
            if not all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=False)):
                msg = f"Adam on {device} differs from Adam on the host; do not train with this driver and compiler"
                raise NativeMissing(msg)
    return f"Adam on {torch.cuda.get_device_name(device)} gives the bits of the host, on two streams"
