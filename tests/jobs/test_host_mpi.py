"""Containers with the host's MPI, and module files: recipes of docs/packages, run.

Apptainer is not here. Its stand-in enters a root of its own, made of bind mounts: what is bound is seen at its place
inside and nowhere else, so that the library's path and what it needs are those of a container.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.system import ROOT, cannot, with_own_mounts

PACKAGES = ROOT / "docs" / "packages"
STAND_IN = """#!/usr/bin/env bash
# exec --bind A:B,C --env NAME=VALUE ... IMAGE COMMAND...
set -euo pipefail
shift
binds=() variables=()
while [[ $1 == --* ]]; do
    case $1 in
    --bind) IFS=, read -r -a more <<<"$2"; binds+=("${more[@]}") ;;
    --env) variables+=("$2") ;;
    esac
    shift 2
done
root=$1
shift
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "$root/"
    elif [ -d "$path" ]; then mkdir "$root$path" && mount --rbind "$path" "$root$path"; fi
done
for bind in "${binds[@]}"; do
    target=$root${bind#*:}
    mkdir -p "$target" && mount --rbind "${bind%%:*}" "$target"
done
exec chroot "$root" env "${variables[@]}" "$@"
"""


@pytest.fixture
def container(tmp_path):
    """(the command, an image) of a stand-in for Apptainer."""
    command, inner, image = tmp_path / "container", tmp_path / "inner", tmp_path / "image"
    inner.write_text(STAND_IN)
    command.write_text(f'#!/bin/sh\nexec {" ".join(with_own_mounts())} bash {inner} "$@"\n')
    command.chmod(0o755)
    image.mkdir()
    return command, image


def bind(container, folder, library, **variables):
    """Run the bind test of the recipe."""
    command, image = container
    environment = {**os.environ, "CONTAINER": str(command), "PYTHON": sys.executable, **variables}
    environment["MPIRUN"] = f"{shutil.which('mpirun', path=_path())} -n 2"
    words = [str(PACKAGES / "apptainer" / "bind_mpi.sh"), str(image), str(folder), library]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)


def _path():
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def library_folder():
    """(folder, library below it) of the MPI that mpi4py loads here."""
    code = "from which_mpi import loaded; import json; print(json.dumps(loaded()))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES / "apptainer")}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    paths = [Path(word) for word in json.loads(told.stdout.splitlines()[-1])]
    path = min(paths, key=lambda path: len(path.name))  # libmpi.so.12 of libmpi.so.12 and libmpi_abi.so
    return path.parent.parent, f"{path.parent.name}/{path.name}"


def test_ranks_in_containers_load_the_library_that_is_bound(container):
    folder, library = library_folder()
    done = bind(container, folder, library)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert [line.split(":")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]
    assert all("/host/mpi/" in line for line in lines)
    assert "Permission denied" not in done.stderr  # of ranks that are in other user namespaces


def test_a_library_that_is_not_bound_is_told(container):
    done = bind(container, ROOT, "lib/libmpi_none.so")
    assert done.returncode == 2
    assert "libmpi_none.so is missing" in done.stderr
    code = "import sys; from which_mpi import main; sys.exit(main('/nowhere'))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES / "apptainer")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not from /nowhere" in done.stderr


def test_module_file(tmp_path):
    """Environment Modules loads it, the MPI it names first; unloading leaves nothing."""
    if not shutil.which("modulecmd"):
        cannot("it needs the Debian package environment-modules")
    (tmp_path / "mpispeed").mkdir()
    shutil.copy(PACKAGES / "modulefiles" / "module.tcl", tmp_path / "mpispeed" / "0.1.0")
    (tmp_path / "mpich").write_text("#%Module\nsetenv MPI_MODULE yes\n")
    script = f"""
    export MODULEPATH={tmp_path}
    eval "$(modulecmd bash load mpispeed)"
    echo "$MPI_MODULE $VIRTUAL_ENV $PYTHONNOUSERSITE $PATH"
    eval "$(modulecmd bash unload mpispeed)"
    echo "left: ${{VIRTUAL_ENV-}}${{MPISPEED_PYTHON-}} $PATH"
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    loaded, left = done.stdout.splitlines()
    assert loaded == "yes /opt/mpispeed/0.1.0 1 /opt/mpispeed/0.1.0/bin:/usr/bin:/bin", done.stderr
    assert left == "left:  /usr/bin:/bin"
