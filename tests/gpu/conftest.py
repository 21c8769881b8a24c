"""Tests on a real GPU: skipped, with the reason, where kernels cannot run. CI has none."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native.cuda import launcher

IGNORED = (
    # torch itself uses it, where some releases import inductor.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # Once in a process, when the first call of autograd's thread is a product of matrices; so with torch alone.
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
    # Once in a process, when a test asks torch to say where the host waits.
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
)
"""Warnings about torch's own affairs; all others are errors here too."""


def pytest_collection_modifyitems(items):
    """Mark everything here, let torch warn of itself, and skip all without a usable GPU."""
    reason = launcher.unusable_reason()
    for item in items:
        if "tests/gpu/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        for line in IGNORED:
            item.add_marker(pytest.mark.filterwarnings(line))
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no kernels on a GPU: {reason}"))


@pytest.fixture
def device():
    """The GPU, idle before and after a test, so that a failed kernel is that of its test."""
    torch.cuda.synchronize()
    yield torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
