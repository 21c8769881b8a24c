"""Machine code is made once per node, whoever asks; nobody reads a part of it, nobody else can write it."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda import build, catalog, store, toolchain
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
  source="$1"
  shift
done
if [ -n "$STARTED" ]; then
  echo "$source" >> "$STARTED"
  while [ "$(wc -l < "$STARTED")" -lt "$TOGETHER" ]; do sleep 0.02; done
fi
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


ALL = """\
import json, sys
from mpispeed.native.cuda import store
print(json.dumps(store.compile_missing(sys.argv[1:], "sm_90")))
"""


def test_processes_share_the_sources_that_are_missing(slow_compiler):
    """Each is compiled once, by either; the first of both processes wait for each other, so both do some."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "STARTED": str(slow_compiler / "started"),
                   "TOGETHER": "2"}  # fmt: skip
    words = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", ALL, *catalog.sources()[:6]]
    asked = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [json.loads(process.communicate(timeout=120)[0]) for process in asked]
    assert sorted(made[0] + made[1]) == catalog.sources()[:6]
    assert all(made)
    assert (slow_compiler / "runs").read_text() == "run\n" * 6
    assert store.compile_missing(catalog.sources()[:6], "sm_90") == []


def test_one_process_compiles_as_many_at_a_time_as_it_may_use_cores(slow_compiler, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setenv("STARTED", str(slow_compiler / "started"))
    monkeypatch.setenv("TOGETHER", "3")  # none ends before three have begun
    wanted = catalog.sources()[:6]
    (slow_compiler / "cache").mkdir(mode=0o700)
    assert store.compile_missing(wanted, "sm_90") == wanted


def test_what_another_is_at_is_waited_for_last(slow_compiler, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    wanted = catalog.sources()[:3]
    kept = store.cache_folder() / store.file_name(wanted[0], "sm_90", toolchain.version(toolchain.find_nvcc()))
    with ThreadPoolExecutor(1) as pool:
        with store._locked(kept, waits=True):
            asked = pool.submit(store.compile_missing, wanted, "sm_90")
            while len(list(kept.parent.glob("[!.]*.cubin"))) < 2:
                assert not asked.done(), asked.result()
                time.sleep(0.01)
            store.publish(b"of another", kept)
        assert asked.result() == wanted[1:]
    assert store.machine_code(wanted[0], "sm_90") == b"of another"


def test_one_source_that_does_not_compile_is_said_and_nothing_hangs(slow_compiler):
    (slow_compiler / "nvcc").write_text(COMPILER.replace("sleep 0.3", "echo 'error: no' >&2; exit 3"))
    with pytest.raises(NativeMissing, match=r"\(exit code 3\):\nerror: no"):
        store.compile_missing(catalog.sources(), "sm_90")
    assert not list((slow_compiler / "cache").glob("[!.]*.cubin"))


@pytest.mark.parametrize("ask", [lambda: store.compile_missing([SOURCE], "sm_90"),
                                 lambda: store.machine_code(SOURCE, "sm_90")], ids=["all", "one"])  # fmt: skip
def test_a_cache_that_cannot_be_written_is_said_and_what_is_in_it_is_read(slow_compiler, ask):
    """Else an operator would end the program, where its reference can run. Root may write anywhere: a lock fails."""
    kept = store.cache_folder() / store.file_name(SOURCE, "sm_90", toolchain.version(toolchain.find_nvcc()))
    (kept.parent / f".{kept.stem}.lock").mkdir()
    with pytest.raises(NativeMissing, match=f"cannot keep the compiled {SOURCE} in .*: .*set {store.CACHE_VARIABLE}"):
        ask()
    store.publish(b"of an administrator", kept)
    assert ask() in ([], b"of an administrator")


def test_a_compiler_that_is_killed_is_said_and_the_next_can_compile(slow_compiler):
    compiler = slow_compiler / "nvcc"
    compiler.write_text(COMPILER.replace("sleep 0.3", "kill -9 $$"))
    with pytest.raises(NativeMissing, match=r"could not compile .*[(]exit code -9[)]"):
        store.compile_missing([SOURCE], "sm_90")
    compiler.write_text(COMPILER)
    assert store.compile_missing([SOURCE], "sm_90") == [SOURCE]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_no_hindrance(slow_compiler, monkeypatch, number):
    def refuse(file, kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store.fcntl, "flock", refuse)
    (slow_compiler / "cache").mkdir(mode=0o700)
    assert store.compile_missing(catalog.sources()[:1], "sm_90") == catalog.sources()[:1]


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
