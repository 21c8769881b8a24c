"""Machine code is made once per node, whoever asks; nobody reads a part of it, nobody else can write it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda import build, store, toolchain
from tests.helpers.system import cannot

SOURCE = "optim/multi_tensor_adam.cu"
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
    store.machine_code(SOURCE, "sm_90")
    store.machine_code(SOURCE, "sm_90")
    compiler = slow_compiler / "nvcc"
    compiler.write_text(COMPILER.replace("V99.1.7", "V99.2.0"))
    toolchain.version.cache_clear()
    store.machine_code(SOURCE, "sm_90")
    toolchain.version.cache_clear()
    assert (slow_compiler / "runs").read_text() == "run\n" * 2


def test_a_compiler_that_fails_leaves_nothing_and_says_why(slow_compiler):
    (slow_compiler / "nvcc").write_text(COMPILER.replace("sleep 0.3", "echo 'error: no' >&2; exit 3"))
    with pytest.raises(NativeMissing, match=r"\(exit code 3\):\nerror: no"):
        store.machine_code(SOURCE, "sm_90")
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


def give_away(path, kind):
    if kind == "of another":
        if os.geteuid():
            cannot("only root can give a folder to another user")
        os.chown(path, 12345, -1)
    else:
        path.chmod({"writable by its group": 0o775, "writable by all": 0o777}[kind])


KINDS = {
    "writable by its group": "others can write there [(]its mode is 0o775[)]",
    "writable by all": "others can write there [(]its mode is 0o777[)]",
    "of another": "it belongs to user 12345",
}


@pytest.mark.parametrize("variable", [store.CACHE_VARIABLE, store.BUILT_VARIABLE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_named_folder_that_others_can_write_is_not_trusted(slow_compiler, monkeypatch, variable, kind):
    folder = slow_compiler / "named"
    folder.mkdir(mode=0o755)
    compiler = None if variable == store.BUILT_VARIABLE else toolchain.version(toolchain.find_nvcc())
    name = store.file_name(SOURCE, "sm_90", compiler)
    (folder / name).write_bytes(b"kept")
    link = slow_compiler / "link"
    link.symlink_to(folder)
    for path in (folder, link):
        monkeypatch.setenv(variable, str(path))
        assert store.machine_code(SOURCE, "sm_90") == b"kept"
    for victim in (folder, folder / name):
        give_away(victim, kind)
        said = f"{variable}={link}" if victim == folder else str(link / name)
        with pytest.raises(NativeMissing, match=f"{said}, .* is not trusted: {KINDS[kind]}"):
            store.machine_code(SOURCE, "sm_90")
        os.chown(victim, os.geteuid(), -1)
        victim.chmod(0o755)
    assert not (slow_compiler / "runs").exists()


def test_kernels_of_who_owns_the_package_are_trusted(slow_compiler, monkeypatch):
    """An administrator's, say: who can change the package can change what runs anyway."""
    give_away(slow_compiler, "of another")
    monkeypatch.setenv(store.BUILT_VARIABLE, str(slow_compiler))
    package = slow_compiler / "cuda"
    package.mkdir()
    (slow_compiler / store.file_name(SOURCE, "sm_90")).write_bytes(b"built")
    with pytest.raises(NativeMissing, match="it belongs to user 12345"):
        store.machine_code(SOURCE, "sm_90")
    monkeypatch.setattr(store.assets, "folder", lambda _: package)
    os.chown(package, 12345, -1)
    assert store.machine_code(SOURCE, "sm_90") == b"built"


def test_what_is_built_ahead_is_trusted_whatever_the_umask_is(tmp_path, slow_compiler, monkeypatch):
    monkeypatch.setattr(build.catalog, "sources", lambda: [SOURCE])
    monkeypatch.setattr(build, "check_names", lambda *_: None)
    before = os.umask(0o002)
    try:
        list(build.build(["sm_90"], tmp_path / "shared" / "out"))
    finally:
        os.umask(before)
    monkeypatch.setenv(store.BUILT_VARIABLE, str(tmp_path / "shared" / "out"))
    assert len(store.machine_code(SOURCE, "sm_90")) == 400000
    (tmp_path / "shared" / "out").chmod(0o777)
    with pytest.raises(NativeMissing, match="not trusted: others can write there"):
        list(build.build(["sm_90"], tmp_path / "shared" / "out"))


def test_what_was_built_for_another_architecture_is_said_once(slow_compiler, monkeypatch, caplog):
    monkeypatch.setattr("mpispeed.base.log._seen", set())
    built = slow_compiler / "built"
    built.mkdir(mode=0o755)
    (built / store.file_name(SOURCE, "sm_80")).write_bytes(b"80")
    monkeypatch.setenv(store.BUILT_VARIABLE, str(built))
    assert store.machine_code(SOURCE, "sm_80") == b"80"
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    with caplog.at_level("WARNING", logger="mpispeed.native.cuda.store"):
        assert len(store.machine_code(SOURCE, "sm_90")) == 400000
    assert caplog.text.count("it was built for sm_80") == 1
