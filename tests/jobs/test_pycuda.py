"""Kernels go through pycuda's context and the driver's own launch, over a driver that runs them on the host.

One source is compiled by nvcc on the way. For the others the driver, which looks at the first bytes only, gets files
that say they are machine code: that all of them compile is tested elsewhere, and takes a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mpispeed.native.cuda import store
from mpispeed.native.cuda.catalog import KERNELS, sources
from tests.helpers.cuda_host import host_library
from tests.helpers.fake_driver import built

ROOT = Path(__file__).resolve().parents[2]


COMPILED = "norm/norm.cu"


def test_every_kernel_is_launched_by_pycuda(tmp_path):
    site, driver = built()
    for source in set(sources()) - {COMPILED}:
        (tmp_path / store.file_name(source, "sm_90")).write_bytes(b"\x7fELF")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(site)]),
        "LD_PRELOAD": str(driver / "libcuda.so.1"),
        "MPISPEED_HOST_KERNELS": host_library()._name,
        "OMP_NUM_THREADS": "1",
        store.BUILT_VARIABLE: str(tmp_path),
        store.CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "tests.helpers.fake_driver.launches"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["arch"], said["processors"]) == ("sm_90", 4)
    assert said["packed alike"] == said["loaded"] == len(KERNELS)
    assert said["depth after loading"] == said["depth at the end"] == 0
    # Two orders of adding 96 numbers in fp32.
    assert said["default stream"] < 1e-5
    assert said["another stream"] < 1e-5
    assert (said["launches there"], said["launches on the other"]) == ([1, 0], [2, 77])
    assert said["errors of a thread"] == []
    assert said["gradient of a thread"] < 1e-5
    assert said["refused"] == [
        "error: pack expected 5 items for packing (got 1)",
        "ValueError: column_sum_f32 takes 16 bytes after its pointers, got 8",
        "TypeError: column_sum_f32 takes 3 pointers, got 2",
        "RuntimeError: column_sum_f32: the driver says 'an error of the fake driver' (1)",
    ]
    assert [path.name.split(".")[0] for path in (tmp_path / "cache").glob("*.cubin")] == [Path(COMPILED).stem]
    words = [line for line in done.stderr.splitlines() if "it was built for sm_90" not in line]
    assert not words, done.stderr
