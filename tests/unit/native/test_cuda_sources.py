"""CUDA sources: each file compiles without spills; Adam's kernel, run on the host, gives the bits of the host loop."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mpispeed.base import assets
from mpispeed.native.host_optim import adam

HERE = Path(__file__).resolve().parent
CUDA = assets.folder("cuda")
SOURCES = sorted(CUDA.rglob("*.cu"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = [(grad, out) for grad in DTYPES for out in ("", "bf16", "fp16")]
STEP, LR, BETAS, EPS, DECAY, SCALE = 7, 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.25


def find_nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on PATH nor under CUDA_HOME")
needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernels for the host")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_without_spills(source, arch, tmp_path):
    cubin = tmp_path / "out.cubin"
    options = [f"-arch={arch}", "-cubin", "-std=c++17", "-Xptxas=-v", "-Werror=all-warnings", f"-I{CUDA / 'include'}"]
    done = subprocess.run([find_nvcc(), *options, "-o", cubin, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) == done.stderr.count("Compiling entry function") > 0
    assert set(spills) == {("0", "0")}, done.stderr
    assert cubin.stat().st_size > 1000


FLOATS = ("beta1", "rest1", "beta2", "rest2", "step_size", "root_scale", "eps", "decay", "grad_scale")


class Span(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "out")),
        ("count", ctypes.c_ulonglong),
    ]


class Terms(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in FLOATS),
        ("decay_mode", ctypes.c_int),
    ]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    library = tmp_path_factory.mktemp("cuda") / "kernels.so"
    source = CUDA / "optim" / "multi_tensor_adam.cu"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    folders = [f"-I{CUDA / 'include'}", f"-I{HERE}"]
    subprocess.run(["g++", *flags, *folders, "-x", "c++", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def make_state(count, offset, grad_dtype, out_dtype):
    """Tensors that start `offset` elements into their storage, so that some are not aligned."""
    torch.manual_seed(count)
    whole = [torch.randn(count + offset) for _ in range(4)]
    master, exp_avg, exp_avg_sq, grad = (x[offset:] for x in whole)
    exp_avg_sq.abs_()
    grad = (whole[3] * 8).to(grad_dtype)[offset:]
    out = None if out_dtype is None else torch.zeros(count + offset, dtype=out_dtype)[offset:]
    return [master, exp_avg, exp_avg_sq, grad, out]


def terms(decay_mode):
    decay = {0: 0.0, 1: LR * DECAY, 2: DECAY}[decay_mode]
    bias1, bias2 = 1 - BETAS[0] ** STEP, 1 - BETAS[1] ** STEP
    return Terms(
        BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1], LR / bias1, bias2**-0.5, EPS, decay, SCALE, decay_mode
    )  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("decay_mode", [0, 1, 2], ids=["plain", "decoupled", "l2"])
@pytest.mark.parametrize(("grad", "out"), KINDS)
def test_adam_kernel_gives_the_bits_of_the_host_loop(on_host, grad, out, decay_mode):
    # Two spans in one launch: an aligned one with a tail, and one that starts in the middle.
    states = [make_state(count, offset, DTYPES[grad], DTYPES.get(out)) for count, offset in ((1027, 0), (61, 3))]
    expected = [[None if x is None else x.clone() for x in state] for state in states]
    rows = (Span * 2)(*(Span(*(None if x is None else x.data_ptr() for x in s), s[0].numel()) for s in states))
    spans, dims = ctypes.pointer(rows), (ctypes.c_uint * 3)(2, 2, 64)
    launch = getattr(on_host, f"on_host_adam_{grad}" + (f"_{out}" if out else ""))
    values = terms(decay_mode)
    launch(dims, (ctypes.c_void_p * 2)(ctypes.addressof(spans), ctypes.addressof(values)))
    for state, (master, exp_avg, exp_avg_sq, gradient, low) in zip(states, expected, strict=True):
        before = master.clone()
        adam(
            master, exp_avg, exp_avg_sq, gradient, out=low, step=STEP, lr=LR, betas=BETAS, eps=EPS,
            weight_decay=DECAY if decay_mode else 0.0, decoupled=decay_mode == 1, grad_scale=SCALE,
        )  # fmt: skip
        assert not torch.equal(before, master)
        for name, seen, wanted in zip(
            ("master", "exp_avg", "exp_avg_sq"), state, (master, exp_avg, exp_avg_sq), strict=False
        ):
            assert torch.equal(seen, wanted), name
        if low is not None:
            assert torch.equal(state[4], low)
            assert torch.equal(low, master.to(low.dtype))
