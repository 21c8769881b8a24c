"""Kernels run in torch's context, on torch's current stream, from any thread; and the process ends well."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from mpispeed.native import device_check
from mpispeed.native.cuda import launcher
from mpispeed.native.norm import layer_norm
from mpispeed.native.transformer import bias_gelu


def test_context_is_that_of_torch(device):
    import pycuda.driver as driver

    found = launcher.for_tensor(torch.zeros(1, device=device))
    assert isinstance(found, launcher.DeviceLauncher)
    torch.zeros(1, device=device)
    with found._current():
        inside = driver.Context.get_device()
    assert inside == driver.Device(device.index)
    assert found.arch == "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def test_self_check(device):
    assert "gives the bits of the host, on two streams" in device_check.run(device.index)


def test_a_launch_waits_for_the_stream_it_is_on_and_the_stream_for_it(device):
    """Each norm reads what the one before wrote; between them the stream is kept busy for some milliseconds."""
    x = torch.randn(4096, 1024, device=device)
    weight, bias = torch.ones(1024, device=device), torch.zeros(1024, device=device)
    wanted = x
    for _ in range(4):
        wanted = torch.nn.functional.layer_norm(wanted, (1024,), weight, bias, 1e-5) * 3 + 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = x
        for _ in range(4):
            torch.cuda._sleep(5_000_000)
            seen = layer_norm(seen, weight, bias, 1e-5) * 3 + 1
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=1e-4)


def test_memory_that_was_freed_is_not_written_by_a_late_kernel(device):
    """The allocator hands memory out again in the order of the stream; a launch outside of it would write too late."""
    weight, bias = torch.ones(4096, device=device), torch.zeros(4096, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        for round_ in range(20):
            x = torch.randn(512, 4096, device=device)
            torch.cuda._sleep(1_000_000)
            y = layer_norm(x, weight, bias, 1e-5)
            del x, y
            fresh = torch.full((512, 4096), float(round_), device=device)
            torch.cuda.current_stream().synchronize()
            assert bool((fresh == round_).all())


def test_backward_in_another_thread(device):
    x = torch.randn(64, 256, device=device, requires_grad=True)
    bias = torch.randn(256, device=device)
    thread = threading.Thread(target=lambda: bias_gelu(x, bias).sum().backward())
    thread.start()
    thread.join()
    other = x.detach().clone().requires_grad_()
    torch.nn.functional.gelu(other + bias, approximate="tanh").sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_a_process_with_kernels_ends_without_a_word(device):
    code = "from mpispeed.native import device_check; device_check.run(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (0, "")
