"""Machine code is made once per node, whoever asks; nobody reads a part of it, nobody else can write it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda import store, toolchain

ROOT = Path(__file__).resolve().parents[3]

# Stands for nvcc: slow, and it counts its runs.
COMPILER = """\
#!/bin/sh
for word in "$@"; do
  if [ "$word" = --version ]; then echo "release 99.1, V99.1.7"; exit 0; fi
done
echo run >> "$RUNS"
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then out="$2"; fi
  shift
done
sleep 0.3
head -c 400000 /dev/zero | tr '\\0' 'x' > "$out"
"""
ASK = """\
from mpispeed.native.cuda import store
code = store.machine_code("optim/multi_tensor_adam.cu", "sm_90")
assert code == b"x" * 400000, len(code)
"""


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "nvcc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("MPISPEED_NVCC", str(compiler))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(store.BUILT_VARIABLE, raising=False)
    toolchain.find_nvcc.cache_clear()
    yield tmp_path
    toolchain.find_nvcc.cache_clear()


def test_processes_that_ask_at_once_compile_once_and_read_all_of_it(slow_compiler):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    asked = [subprocess.Popen([sys.executable, "-c", ASK], env=environment) for _ in range(4)]
    assert [process.wait(120) for process in asked] == [0] * 4
    assert (slow_compiler / "runs").read_text() == "run\n"
    assert [path.suffix for path in (slow_compiler / "cache").iterdir() if not path.name.startswith(".")] == [".cubin"]


def test_another_compiler_compiles_again(slow_compiler):
    store.machine_code("optim/multi_tensor_adam.cu", "sm_90")
    store.machine_code("optim/multi_tensor_adam.cu", "sm_90")
    compiler = slow_compiler / "nvcc"
    compiler.write_text(COMPILER.replace("V99.1.7", "V99.2.0"))
    toolchain.version.cache_clear()
    store.machine_code("optim/multi_tensor_adam.cu", "sm_90")
    toolchain.version.cache_clear()
    assert (slow_compiler / "runs").read_text() == "run\n" * 2


def test_a_compiler_that_fails_leaves_nothing_and_says_why(slow_compiler):
    (slow_compiler / "nvcc").write_text(COMPILER.replace("sleep 0.3", "echo 'error: no' >&2; exit 3"))
    with pytest.raises(NativeMissing, match=r"\(exit code 3\):\nerror: no"):
        store.machine_code("optim/multi_tensor_adam.cu", "sm_90")
    assert not list((slow_compiler / "cache").glob("*.cubin"))


def test_no_compiler_is_said_with_the_cures(monkeypatch, tmp_path):
    monkeypatch.setenv("MPISPEED_NVCC", str(tmp_path / "none"))
    toolchain.find_nvcc.cache_clear()
    with pytest.raises(NativeMissing, match=r"no nvcc: looked at .*none .*CUDA_HOME.*mpispeed\[kernels\]"):
        toolchain.find_nvcc()
    toolchain.find_nvcc.cache_clear()


@pytest.mark.parametrize("kind", ["a link", "open to others"])
def test_a_folder_that_others_can_write_is_not_trusted(kind, monkeypatch, tmp_path):
    monkeypatch.delenv(store.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = store.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    if kind == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.chmod(0o777)
    with pytest.raises(NativeMissing, match="is not a folder that only you can write"):
        store.cache_folder()


def test_what_was_built_for_another_architecture_is_said_once(slow_compiler, monkeypatch, caplog):
    monkeypatch.setattr("mpispeed.base.log._seen", set())
    built = slow_compiler / "built"
    built.mkdir()
    (built / store.file_name("optim/multi_tensor_adam.cu", "sm_80")).write_bytes(b"80")
    monkeypatch.setenv(store.BUILT_VARIABLE, str(built))
    assert store.machine_code("optim/multi_tensor_adam.cu", "sm_80") == b"80"
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    with caplog.at_level("WARNING", logger="mpispeed.native.cuda.store"):
        assert len(store.machine_code("optim/multi_tensor_adam.cu", "sm_90")) == 400000
    assert caplog.text.count("it was built for sm_80") == 1
