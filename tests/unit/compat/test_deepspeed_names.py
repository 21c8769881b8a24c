"""The table of DeepSpeed's names, and the package `deepspeed` that is made from it.

What imports `deepspeed` runs in processes of its own: later tests must not find the package.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mpispeed.compat.as_deepspeed import FOLDER, find_real, with_folder, write_wheel
from mpispeed.compat.modules import Unserved, lookup, paths, rows, served
from mpispeed.compat.names import LATER, NEVER, SERVED, VERSION
from tests.helpers.system import CHECKOUT

MISSING = {
    (path, name): reason
    for reason, modules in (*LATER.items(), *NEVER.items())
    for path, names in modules.items()
    for name in names.split()
}
NAMES = """
import importlib, json, sys
import mpispeed.as_deepspeed
from mpispeed.compat.modules import rows
from mpispeed.compat.names import SERVED

wrong = []
for path in sorted(SERVED):
    for package in ("deepspeed", "mpispeed"):
        where = f"{package}.{path}".rstrip(".")
        try:
            module = importlib.import_module(where)
        except Exception as error:
            wrong.append(f"{where}: {error!r}")
            continue
        for name, (home, ours) in rows(path).items():
            if where == "mpispeed" and name.startswith("__"):
                continue
            expected = importlib.import_module(home)
            expected = getattr(expected, ours) if ours else expected
            found = getattr(module, name, None)
            if found is not expected and found != expected:
                wrong.append(f"{where}.{name} is {found!r}, not {expected!r}")
        for home in (home for home, names in SERVED[path].items() if "*" in names.split()):
            for name in importlib.import_module(home).__all__:
                if name not in rows(path) and not hasattr(module, name):
                    wrong.append(f"{where}.{name} is not there")
print(json.dumps(wrong))
"""
LACKING = """
import importlib, json
import mpispeed.as_deepspeed
from tests.unit.compat.test_deepspeed_names import MISSING

wrong = []
for (path, name), reason in MISSING.items():
    for package in ("deepspeed", "mpispeed"):
        where = f"{package}.{path}".rstrip(".")
        module = importlib.import_module(where)
        if hasattr(module, name):
            wrong.append(f"{where}.{name} is there")
        try:
            getattr(module, name)
        except AttributeError as error:
            if reason not in str(error):
                wrong.append(f"{where}.{name}: {error}")
        try:
            exec(f"from {where} import {name}", {})
        except ImportError as error:
            if reason not in str(error):
                wrong.append(f"from {where} import {name}: {error}")
        else:
            wrong.append(f"from {where} import {name} works")
print(json.dumps(wrong))
"""
CHILDREN = """
import json, multiprocessing, subprocess, sys

def version(_=None):
    import deepspeed
    return deepspeed.__version__

if __name__ == "__main__":
    import mpispeed.as_deepspeed
    code = "import deepspeed; print(deepspeed.__version__)"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(version, [0])[0]
    print(json.dumps([version(), started, spawned]))
"""


def child(*words, cwd=None, code=0, path=CHECKOUT, **env):
    """A process of Python; PYTHONPATH is the checkout."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environ, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def last_line(done):
    return json.loads(done.stdout.splitlines()[-1])


# `deepspeed.comm` has those that libraries ask before anything has joined MPI. `mpispeed.sequence` is no package: a
# module `cross_entropy` in it would take the place of the function.
OTHERS = {
    "mpispeed.comm.init_distributed", "mpispeed.comm.is_initialized",
    "mpispeed.sequence.cross_entropy:", "mpispeed.sequence.layer:",
}  # fmt: skip


@pytest.fixture(scope="module")
def wrong_names():
    """Of names that are served, and of those that are missing; from one process, which imports all modules."""
    return [json.loads(line) for line in child("-c", NAMES + LACKING).stdout.splitlines()[-2:]]


def test_every_served_name_is_ours_below_both_packages(wrong_names):
    wrong = [line for line in wrong_names[0] if line.split(" ")[0] not in OTHERS]
    assert not wrong, "\n".join(wrong)


def test_every_name_that_is_missing_says_why(wrong_names):
    assert not wrong_names[1], "\n".join(wrong_names[1])


def test_no_name_is_served_and_missing():
    both = [f"{path}.{name}" for path, name in MISSING if path in SERVED and name in rows(path)]
    assert not both


@pytest.mark.parametrize("path", ["", "zero", "utils", "runtime.zero.config", "moe.layer"])
def test_an_unknown_name_lists_those_there_are(path):
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'; its public names are"):
        lookup("deepspeed", path, "Nothing")


def test_an_unknown_module_is_no_module():
    code = "import mpispeed.as_deepspeed, deepspeed.runtime.nothing"
    assert "No module named 'deepspeed.runtime.nothing'" in child("-c", code, code=1).stderr


def test_a_name_that_is_missing_is_no_other_attribute_error():
    with pytest.raises(Unserved, match="belongs to the hybrid engine"):
        lookup("mpispeed", "runtime.hybrid_engine", "DeepSpeedHybridEngine")


def test_packages_of_modules_are_modules():
    assert {"runtime", "runtime.fp16", "ops", "ops.transformer", "profiling", "module_inject"} <= paths()
    assert "zero" in set(served("runtime"))


def test_deepspeed_is_not_found_unasked():
    code = "import mpispeed, importlib.util; assert importlib.util.find_spec('deepspeed') is None"
    child("-c", code)


def test_import_of_a_module_of_the_table_loads_no_torch():
    code = "import sys, mpispeed.as_deepspeed, deepspeed.moe, deepspeed.ops.adam; assert 'torch' not in sys.modules"
    child("-c", code)


def test_child_processes_see_deepspeed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    assert last_line(child(script)) == [VERSION] * 3


def test_libraries_find_the_version_in_the_metadata():
    code = """
import importlib.metadata, json, mpispeed.as_deepspeed, deepspeed
found = importlib.metadata.distribution("deepspeed")
print(json.dumps([found.version, importlib.metadata.packages_distributions()["deepspeed"], deepspeed.__version__]))
"""
    assert last_line(child("-c", code)) == [VERSION, ["deepspeed"], VERSION]


@pytest.mark.deepspeed_row("a19")
def test_scripts_find_the_commit_and_the_branch_of_the_build():
    """Those of DeepSpeed's releases that were made without a checkout."""
    code = """
import json, mpispeed.as_deepspeed, deepspeed
from deepspeed.git_version_info import git_branch, git_hash, version
print(json.dumps([deepspeed.__git_hash__, deepspeed.__git_branch__, git_hash, git_branch, version]))
"""
    assert last_line(child("-c", code)) == [*4 * ["[none]"], VERSION]


def test_transformers_sees_deepspeed():
    code = """
import mpispeed.as_deepspeed
from transformers.integrations.deepspeed import is_deepspeed_available
assert is_deepspeed_available()
"""
    child("-c", code)


def test_the_place_of_the_rank_is_set_for_libraries():
    code = """
import os, json, mpispeed.as_deepspeed
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(json.dumps([[os.environ.get(name) for name in names], os.environ["PYTHONPATH"]]))
"""
    done = child("-m", "mpispeed", "run", "-n", "1", "--no-python", sys.executable, "-c", code)
    place, path = last_line(done)
    assert place == ["0", "1", "0", "1"]
    assert path.split(os.pathsep)[0] == str(FOLDER)


def test_the_folder_stands_once_and_first():
    once = with_folder("/a::/b")
    assert once.split(os.pathsep) == [str(FOLDER), "/a", "/b"]
    assert with_folder(once) == once


# -- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which pip has put the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = child("-m", "mpispeed", "compat", "wheel", "--out", folder)
    wheel = Path(done.stdout.strip())
    words = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target")
    child("-m", "pip", *words, folder / "site", wheel)
    return folder / "site"


def test_the_wheel_serves_the_names(installed):
    code = """
import importlib.metadata, json, deepspeed
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
version = importlib.metadata.version("deepspeed")
print(json.dumps([version, deepspeed.__version__, deepspeed.__file__, DeepSpeedZeroConfig().stage]))
"""
    path = os.pathsep.join([str(installed), CHECKOUT])
    assert last_line(child("-c", code, path=path)) == [VERSION, VERSION, f"{installed}/deepspeed/__init__.py", 0]


def test_the_command_of_the_wheel_starts_mpispeed(installed):
    path = os.pathsep.join([str(installed), CHECKOUT])
    assert "Usage: " in child(installed / "bin" / "deepspeed", "--help", path=path).stdout


def test_beside_the_wheel_as_deepspeed_stays_active(installed):
    code = "import mpispeed.as_deepspeed as it; assert it.IS_SERVED; import deepspeed.zero"
    child("-c", code, path=os.pathsep.join([str(installed), CHECKOUT]))


def test_the_wheel_is_the_same_each_time(tmp_path):
    first, second = write_wheel(tmp_path), (tmp_path / "again")
    second.mkdir()
    assert write_wheel(second).read_bytes() == first.read_bytes()
    with zipfile.ZipFile(first) as archive:
        record = archive.read(next(name for name in archive.namelist() if name.endswith("RECORD"))).decode()
        assert {line.split(",")[0] for line in record.splitlines()} == set(archive.namelist())


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = child("-m", "mpispeed", "compat", "wheel", "--out", tmp_path / "file" / "folder", code=2)
    assert "give another folder with --out" in done.stderr


def test_a_path_for_programs_that_start_others_finds_names_and_command():
    path = child("-m", "mpispeed", "compat", "path").stdout.strip()
    code = "import deepspeed; from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME as name; print(name)"
    assert child("-c", code, path=os.pathsep.join([path, CHECKOUT])).stdout.strip() == ".deepspeed_env"
    done = subprocess.run(
        [FOLDER / "bin" / "deepspeed", "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": CHECKOUT, "MPISPEED_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.stdout.startswith("Usage: ")


def test_the_command_lists_names():
    assert "runtime.zero.config" in child("-m", "mpispeed", "compat", "names").stdout.splitlines()
    rows_of = child("-m", "mpispeed", "compat", "names", "deepspeed.runtime.hybrid_engine").stdout
    assert "DeepSpeedHybridEngine" in rows_of
    assert "belongs to the hybrid engine" in rows_of
    assert "there is no module" in child("-m", "mpispeed", "compat", "names", "runtime.nothing", code=2).stderr


# -- DeepSpeed itself -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["with metadata", "without metadata"])
def real(request, tmp_path):
    """A folder with a package deepspeed that is not ours."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.16.2'\n")
    if request.param == "with metadata":
        info = tmp_path / "deepspeed-0.16.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.2\n")
    return tmp_path


def test_the_real_one_is_left_alone(real):
    code = "import logging, mpispeed.as_deepspeed as it, deepspeed; print(it.IS_SERVED, deepspeed.__version__)"
    done = child("-c", code, path=os.pathsep.join([str(real), CHECKOUT]))
    assert done.stdout.split() == ["False", "0.16.2"]
    assert "DeepSpeed itself is installed" in done.stderr
    assert "uninstall it" in done.stderr


def test_the_launcher_refuses_beside_the_real_one(real, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    path = os.pathsep.join([str(real), CHECKOUT])
    done = child("-m", "mpispeed", "run", "-n", "1", "--as-deepspeed", script, code=2, path=path)
    assert "--as-deepspeed: DeepSpeed itself is installed" in done.stderr
    assert "started" not in done.stdout


def test_the_real_one_is_described(real, monkeypatch):
    monkeypatch.syspath_prepend(str(real))
    found = find_real()
    assert str(real) in found
    assert ("0.16.2" in found) == any(real.glob("*.dist-info"))
